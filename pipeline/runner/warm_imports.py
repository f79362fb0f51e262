"""What the process imports that ranks are forked from: all that a rank needs, and nothing that touches a device.

For that process alone: importing this module ends the importer when its parent ends. An import that fails is left to
the rank, which says so in its record.
"""

import contextlib
import importlib

from pipeline.system import host, source_digest

host.die_with_parent()  # and its ranks with it
with contextlib.suppress(Exception):
    importlib.import_module("pipeline.runner.worker")
    source_digest.imported_source()  # once for all ranks, and before an edit that none of them runs
