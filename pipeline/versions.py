"""The schema that a file says it has: one that a later version of this project wrote is sound, and not for us."""

import msgspec

from pipeline.files import Unreadable


class Newer(Unreadable):
    """A later version of this project wrote it: the file is sound, and we are old."""


class Versioned(msgspec.Struct):
    """What every file of ours says of its own form, whatever else it holds."""

    schema_version: int


def refuse_newer(raw: bytes, newest: int) -> None:
    """Raise Newer where the JSON has a schema past the newest that is known."""
    try:
        version = msgspec.json.decode(raw, type=Versioned).schema_version
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if version > newest:
        raise Newer(f"has schema {version} of a later version, and this one reads up to {newest}; update this one")
