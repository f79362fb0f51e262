"""Ranks as forks of a server that has imported torch and trained nothing: torch refuses forks of a process that has."""

import multiprocessing
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes

IMPORTED_ONCE = ["torch._dynamo", "pipeline.training.torch_strategies"]


def run_ranks(function: Callable[..., None], arguments: tuple[Any, ...], num_ranks: int) -> None:
    """Call the function with each rank and the arguments in a process of its own. Raises what one of them raises."""
    multiprocessing.set_forkserver_preload(IMPORTED_ONCE)
    start_processes(function, arguments, num_ranks, start_method="forkserver")
