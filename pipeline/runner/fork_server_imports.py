"""The imports of agent and ranks, done once in the fork server of start_ranks, from which both are forked.

Nothing here touches a device. Import this module nowhere else: it makes the importing process end with its parent. A
failed import raises nothing here: it fails again in the rank, and the point's record holds the error. The second error
may be another, since torch keeps what the first import has left, so the rank finds the first in `import_error`.

TorchDynamo, 1.0 s of CPU, is among them, since torch's optimizers import it, and then every rank for itself.
"""

import contextlib
import gc
import importlib
import os

from pipeline.system import host, source_digest

SERVER_PID = os.getpid()  # the parent of every process that is forked from here
ENVIRON = dict(os.environ)  # of the first launch; imports may add variables
host.die_with_parent(int(os.environ["PIPELINE_LAUNCHER_PID"]))  # its ranks end with it
import_error: Exception | None = None
try:
    gc.disable()  # it would look at all imported objects again and again: a second of CPU
    importlib.import_module("pipeline.runner.rank_process")
    importlib.import_module("pipeline.runner.agent")
    importlib.import_module("torch._dynamo")
except Exception as error:
    import_error = error
gc.freeze()  # they live as long as the process
gc.enable()
with contextlib.suppress(Exception):
    source_digest.imported_source()  # once for all ranks, and early: the source on disk may change later
