"""Apply each mutation of tests/mutations.yaml to a copy of the repository, and run the test that must see it.

    python benchmarks/run_mutations.py            all of them, in minutes
    python benchmarks/run_mutations.py WORD ...   those whose name or file holds a word

Exit codes: 0 every test failed under its mutation, 1 at least one passed or could not run, or an old text is not there.
Run it after each larger change of the tests: a test that was merged or dropped may have been the only one that saw it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
WORDS = {0: "PASSED, although it must fail", 1: "seen"}
"""Exit code of pytest -> what it says of a mutation."""


class OldTextNotUnique(ValueError):
    """The file does not hold the old text of a mutation exactly once."""


class Mutation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A defect: in `file` the text `old` becomes `new`, and the test with the pytest id `test` fails."""

    name: str
    file: str
    old: str
    new: str
    test: str

    def apply(self, text: str) -> str:
        """Return the text of the file with the defect. Raises OldTextNotUnique."""
        if text.count(self.old) != 1:
            problem = "old text not found" if self.old not in text else f"old text found {text.count(self.old)} times"
            raise OldTextNotUnique(f"{problem} in {self.file}: {self.old!r}; bring tests/mutations.yaml up to date.")
        return text.replace(self.old, self.new)


def load_mutations() -> list[Mutation]:
    """Return the mutations of tests/mutations.yaml."""
    return msgspec.yaml.decode((ROOT / "tests/mutations.yaml").read_bytes(), type=list[Mutation])


def copy_repository(target: Path) -> None:
    """Copy every file and link that git tracks or would track, as it is in the working tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(command, cwd=ROOT, text=True).split("\0"):
        if name and os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name, follow_symlinks=False)


def run_tests(copy: Path, tests: Iterable[str]) -> subprocess.CompletedProcess[str]:
    """Run the tests in the copy. No bytecode is written: it could be older than a mutation of the same second."""
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)


def see_mutation(copy: Path, mutation: Mutation) -> str:
    """Return "seen", or why the mutation was not seen."""
    path = copy / mutation.file
    text = path.read_text()
    try:
        path.write_text(mutation.apply(text))
        done = run_tests(copy, [mutation.test])
    except OldTextNotUnique as error:
        return str(error)
    finally:
        path.write_text(text)
    return WORDS.get(done.returncode) or f"{mutation.test} could not run:\n{done.stdout}{done.stderr}"


def main(words: Sequence[str]) -> int:
    """Try the mutations and print a line for each. Return the exit code."""
    chosen = [one for one in load_mutations() if not words or any(word in one.name + one.file for word in words)]
    if not chosen:
        print(f"no mutation has {' or '.join(words)} in its name or file; python {sys.argv[0]} tries all.")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_repository(copy)
        done = run_tests(copy, dict.fromkeys(mutation.test for mutation in chosen))
        if done.returncode:
            print(f"the tests must pass without a mutation:\n{done.stdout}{done.stderr}")
            return 1
        num_seen = 0
        for mutation in chosen:
            verdict = see_mutation(copy, mutation)
            num_seen += verdict == "seen"
            print(f"{mutation.file}: {mutation.name}: {verdict}", flush=True)
    print(f"{num_seen} of {len(chosen)} mutations seen")
    return 0 if num_seen == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
