"""Environment variables that a record keeps: those of the libraries that compute and communicate, by prefix."""

import re
from collections.abc import Mapping

from pipeline.experiment.measurement import short_text
from pipeline.experiment.record import variable_use
from pipeline.system.errors import REDACTED, redact_credentials

# where something lies changes no time, and may name people
PATH_NAME = re.compile(
    r"_(HOME|ROOT|DIR(S|ECTORY)?|PATHS?|PREFIX|INCLUDE|LIB|TRACE|(DEBUG|TEMP)\w*_FILE)$|_LOG(S|DEST)?(_|$)"
)
# in their values a word before a colon is no user of a password: expandable_segments:True, allreduce:tree, a.so:b.so
COLON_NAME = re.compile(r"NCCL_(ALGO|PROTO)|\w+_CONF|GLIBC_TUNABLES|LD_PRELOAD")
CREDENTIAL = re.compile(
    r"://[^/\s]*@"  # the user of a URL
    r"|\bbearer\b"
    r"|(?:token|key|secret|pass\w*|auth\w*|credentials?|cookie|signature)\s*="
    r"|\b[a-z_][\w.@-]*:(?!:|//|\d{1,3}(?!\w))[^\s,;]",  # user:password; a number after the colon is a port (mlx5_0:1)
    re.IGNORECASE,
)


def recorded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may change a measurement. One that looks like a credential is redacted whole."""
    found = {}
    for name in sorted(filter(variable_use, environ)):
        if not PATH_NAME.search(name):
            found[short_text(name)] = "redacted" if is_credential(name, environ[name]) else short_text(environ[name])
    return found


def is_credential(name: str, value: str) -> bool:
    """True if the name or the value is that of a password, key or token."""
    looks_like_one = CREDENTIAL.search(value) and not COLON_NAME.fullmatch(name)
    return bool(looks_like_one) or REDACTED in redact_credentials(f"{name}={value}")
