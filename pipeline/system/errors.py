"""Exit codes, CommandError (one sentence with the cure), and run_command, which runs every command."""

import codecs
import contextlib
import difflib
import errno
import importlib.util
import io
import itertools
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from traceback import format_exception
from types import TracebackType
from typing import NoReturn, TextIO

EXIT_OK = 0  # also if nothing was left to measure
EXIT_GAPS = 1  # a point has no result (with --strict, or if submit waited); one is too slow (with --fail-above)
EXIT_USAGE = 2  # wrong usage or configuration, an absent or unreadable folder, a grid without points
EXIT_NOTHING_FOUND = 3  # no experiment in the folder, an option that selects no point, or no point to compare
EXIT_SCHEDULER = 4  # Slurm refused, or is configured and does not answer
EXIT_NO_READER = 128 + signal.SIGPIPE  # whoever read stdout has gone (`| head`); a stdout closed from the start is
# /dev/null: the caller wants no output, and the exit code tells of the work

UMASK = 0o027  # the group may read the files of a command and its processes, others may not
USERS_UMASK = "DDPSCALE_UMASK"

CONTROL_CHARACTERS = r"\x00-\x1f\x7f-\x9f\u2028\u2029"  # a range of a regular expression
CONTROL_CHARACTER = re.compile(f"[{CONTROL_CHARACTERS}]")
NO_CONTROL_CHARACTERS = rf"\A[^{CONTROL_CHARACTERS}]*\Z"
PATTERN_ERROR = f"Expected `str` matching regex {NO_CONTROL_CHARACTERS!r}"  # as msgspec says it
ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # of a terminal: a colour
NOT_ASCII_TEXT = re.compile(r"[^\x20-\x7e\n\t]")
REDACTED = "<redacted>"
MAX_REDACTED_CHARS = 16_000  # of a text; a record keeps 3,900
SECRET_NAME = (
    r"(?:passw(?:or)?d|passphrase|pwd|secret|cookie|credentials?"
    r"|(?:api|access|account|private|secret)[_-]?key)[\w.-]{0,40}"
)
TOKEN_NAME = r"(?:token(?!s|_id|iz)|signature|authorization|auth(?![a-z]))[\w.-]{0,40}"
VALUE = r"(?:\"(?:[^\"\\]|\\.){1,2000}\"?|'(?:[^'\\]|\\.){1,2000}'?|[^\s\"'&<]{1,2000})"
CREDENTIALS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # user and password of a URL, and without a URL
        r"(?P<name>://)(?:[^\s/@\"'<]{1,500}|[^\s/@:\"'<]{0,200}:[^\s\"'<]{0,500})(?=@)",
        r"(?P<name>(?<![\w/.:+-]))[\w.+-]{1,100}:[^\s/@\"'<]{1,500}(?=@[\w\[])",
        # what a URL asks for, headers, options, names with values
        r"(?P<name>[?&;#][\w.-]{0,40}(?:token|key|secret|sig|signature|pass\w{0,9}|pwd|auth|credential|code)[\w.-]{0,40}=)"
        r"[^&;\s\"'#<]{1,2000}",
        r"(?P<name>\bauthorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:(?:basic|bearer|token|digest|negotiate)\s{1,3})?)"
        r"[^\s\"',<]{1,2000}",
        r"(?P<name>\bbearer\s{1,3})[\w.~+/=-]{6,2000}",
        rf"(?P<name>(?<![\w-])--?[\w-]{{0,40}}(?:{SECRET_NAME}|token)\s{{1,3}}){VALUE}",
        rf"(?P<name>{SECRET_NAME}[\"']?\s{{0,3}}(?:=|:(?!:))\s{{0,3}}){VALUE}",
        rf"(?P<name>{TOKEN_NAME}[\"']?\s{{0,3}}(?:=|:(?!:))\s{{0,3}})"
        rf"(?![\d.,-]{{1,20}}(?![\w.-])|none\b|true\b|false\b|[(<]){VALUE}",
        # keys of Amazon, Hugging Face, W&B, GitHub, GitLab, OpenAI, Slack, Google; JSON web tokens; private keys
        r"(?P<name>)\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
        r"(?P<name>)(?<![\w/+=.])(?-i:(?=[A-Za-z0-9/+]{0,39}[a-z])(?=[A-Za-z0-9/+]{0,39}[A-Z])(?=[A-Za-z0-9/+]{0,39}[0-9]))"
        r"[A-Za-z0-9/+]{40}(?![\w/+=])",
        r"(?P<name>)\b(?:hf_|wandb_v\d_|gh[opsur]_|github_pat_|glpat-|sk-|xox[a-z]-|AIza)[\w-]{10,300}",
        r"(?P<name>)(?<![\w])[0-9a-f]{40}(?![\w])",
        r"(?P<name>)\beyJ[\w-]{5,2000}\.[\w-]{1,2000}(?:\.[\w-]{0,2000})?",
        r"(?P<name>-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----)[^-]{1,8000}",
    )
]
RANK_PACKAGES = ("numpy", "PIL", "torch", "torchvision")  # module names
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "PyYAML"}  # module name -> package name, where they differ
EXTRAS = ("mlflow", "wandb", "shtab")  # packages that an extra of the same name installs
INSTALL_EXTRA = "install it with: python -m pip install -c constraints.txt -e"
INSTALL = "install this project's packages with: python -m pip install -c constraints.txt -e ."
FULL_DISK_HINTS = {
    os.strerror(errno.ENOSPC): "the disk is full: free space on it, and try again",
    os.strerror(errno.EDQUOT): "your quota on the disk is used up: free space or have it raised, and try again",
}
NO_WRITING = (errno.EACCES, errno.EPERM, errno.EROFS)  # another user's folder, or a read-only file system


class CommandError(Exception):
    """Raised if the command cannot continue. It has one sentence with the cure, and the exit code."""

    def __init__(self, sentence: str, code: int = EXIT_USAGE) -> None:
        super().__init__(sentence)
        self.code = code


def open_closed_streams() -> None:
    """Open /dev/null for each closed standard stream: else a file opened later would take its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            os.set_inheritable(handle, handle == number)
            setattr(sys, name, os.fdopen(handle, mode))


def discard(stream: TextIO) -> None:
    """Let /dev/null take the rest of a stream that nobody reads: Python could not flush it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_text(text: str, end: str = "\n") -> None:
    """Print text to stdout without characters that control a terminal: it may have names and messages of others.

    A terminal of ASCII alone gets an ASCII form of what separates the words of a report.
    """
    shown = replace_control_characters(text)
    if codecs.lookup(sys.stdout.encoding or "ascii").name == "ascii":
        shown = shown.replace(" ·", ";").replace("·", ";").replace("±", "+/-")
    print(shown, end=end)


def log_line(sentence: str) -> None:
    """Print a sentence to stderr, because stdout is for data. The work goes on if nobody reads it any longer."""
    try:
        print(replace_control_characters(sentence), file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def suggest_name(name: str, known: Collection[str]) -> str:
    """Return the cure for a name that is not known: the nearest one, else all."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(known)}."


def pluralize(number: int, noun: str) -> str:
    """Return the number with its noun: 1 point, 2,000 points, 2 processes."""
    suffix = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{suffix}"


def format_duration(seconds: float) -> str:
    """Return the seconds for people: 45 s, 2 min 10 s, 1 h 05 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def shorten_list(names: Sequence[str], max_shown: int) -> str:
    """Return the first `max_shown` names and the number of the others: a, b and 3 more."""
    num_others = len(names) - max_shown
    return ", ".join(names[:max_shown]) + (f" and {num_others} more" if num_others > 0 else "")


def replace_control_characters(text: str, by: str = "\N{REPLACEMENT CHARACTER}") -> str:
    """Replace what is not printable (escapes, C1, text direction, no width, not in XML), but line breaks and tabs."""
    return NOT_ASCII_TEXT.sub(lambda match: match[0] if match[0].isprintable() else by, text)


def redact_credentials(text: str) -> str:
    """Replace passwords, keys and tokens in a text by "<redacted>", and cut it at MAX_REDACTED_CHARS.

    They are known by their place (a URL, a header), their name (api_key) or their form. Numbers stay (token=5), but not
    after the name of a password.
    """
    text = text[:MAX_REDACTED_CHARS]
    for pattern in CREDENTIALS:
        text = pattern.sub(lambda match: f"{match['name']}{REDACTED}", text)
    return text


def refuse_control_characters(words: Sequence[str]) -> None:
    """Raise CommandError for an argument with a control character: after a newline, a batch script would run it."""
    for before, word in itertools.pairwise(["", *words]):
        if CONTROL_CHARACTER.search(word):
            option = f"{before} " if before.startswith("-") and "=" not in before else ""
            raise CommandError(f"{option}{word!r} has a control character; remove it.")


def require_packages(*modules: str) -> None:
    """Raise CommandError for the first module that is not installed. Imports none of them."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise missing_package_error(module)


def missing_package_error(module: str) -> CommandError:
    name = module.partition(".")[0]
    install = f"{INSTALL_EXTRA} '.[{name}]'" if name in EXTRAS else INSTALL
    return CommandError(f"needs the package {DISTRIBUTIONS.get(name, name)!r}; {install}")


def import_error_as_command_error(error: ImportError) -> CommandError | None:
    """Return the error for a missing or broken package; None if the import failed in this project's own code."""
    if (error.name or "").partition(".")[0] == "pipeline":
        return None
    if isinstance(error, ModuleNotFoundError) and error.name:
        return missing_package_error(error.name)
    return CommandError(f"cannot import a package ({' '.join(str(error).split())}); {INSTALL}")


def report_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Handle what run_command does not: a failed import ends with one sentence, other errors with their traceback."""
    command_error = import_error_as_command_error(error) if isinstance(error, ImportError) else None
    if command_error is None:
        log_line("".join(format_exception(kind, error, traceback)).rstrip())
        return
    log_line(f"error: {command_error}")
    sys.exit(command_error.code)


def describe_os_error(error: OSError) -> str:
    """Return the message of the error; if the error names a file, the file comes first."""
    message = error.strerror or str(error) or type(error).__name__
    return message if error.filename is None else f"{error.filename}: {message}"


def full_disk_hint(text: str) -> str:
    """Return that the disk is full, with the cure, if an error or a log says so of a file; else ""."""
    of_files = [line for line in text.splitlines() if "/dev/shm" not in line and "</torch_" not in line]
    return next((hint for sign, hint in FULL_DISK_HINTS.items() if any(sign in line for line in of_files)), "")


@contextlib.contextmanager
def go_on_after_error(name: str, codes: list[int]) -> Iterator[None]:
    """Log an error of one experiment and append its exit code: the command goes on with the other experiments."""
    try:
        yield
    except CommandError as error:
        log_line(f"error: {error}")
        codes.append(error.code)
    except OSError as error:
        log_line(f"error: {name}: {describe_os_error(error)}; solve this problem and run the command again.")
        codes.append(EXIT_USAGE)


@contextlib.contextmanager
def go_on_unwritten(problem: str, consequence: str, codes: list[int]) -> Iterator[None]:
    """Log a write that failed and append its exit code: 0 if this user may not write there, which is no failure."""
    try:
        yield
    except OSError as error:
        log_line(f"{problem} ({error.strerror}); {consequence}.")
        codes.append(EXIT_OK if error.errno in NO_WRITING else EXIT_USAGE)


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command's main function and exit with its code; a CommandError becomes one sentence on stderr."""
    users = os.umask(UMASK)
    os.umask(users | UMASK)
    os.environ.setdefault(USERS_UMASK, f"{users:o}")  # for the files of a script, which are the user's
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the terminal may not be able to show a name
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # while the command was imported
            signal.signal(signal.SIGINT, signal.default_int_handler)
        refuse_control_characters(sys.argv[1:])
        code = main()
        sys.stdout.flush()
    except CommandError as error:
        log_line(f"error: {error}")
        code = error.code
    except BrokenPipeError:  # no error: the reader has what it wants
        discard(sys.stdout)
        code = EXIT_NO_READER
    except OSError as error:
        log_line(f"error: {describe_os_error(error)}; solve this problem and run the command again.")
        code = EXIT_USAGE
    except KeyboardInterrupt:
        after_echo = "\n" if sys.stderr.isatty() else ""  # the terminal shows ^C behind a line that is rewritten
        log_line(f"{after_echo}interrupted; run the same command again to continue.")
        code = 128 + signal.SIGINT
    sys.exit(code)
