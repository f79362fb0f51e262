"""The imports of a rank, done once in the fork server of start_ranks, from which every rank is forked.

Nothing here touches a device. Import this module nowhere else: it makes the importing process end with its parent. A
failed import raises nothing here: it fails again in the rank, and the point's record holds the error.

The imports take 2.8 s of CPU, 1.0 of them for TorchDynamo, which torchvision imports. To import torchvision only where
a model needs it saves nothing: torch's optimizers import TorchDynamo too, and then every rank does so for itself. A
launch of two ranks took 4.8 s of CPU in place of 3.7.
"""

import contextlib
import importlib

from pipeline.system import host, imports, source_digest

host.die_with_parent()  # its ranks end with it
with contextlib.suppress(Exception), imports.without_garbage_collector():
    importlib.import_module("pipeline.runner.rank_process")
    source_digest.imported_source()  # once for all ranks, and early: the source on disk may change later
