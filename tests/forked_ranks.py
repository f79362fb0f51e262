"""Ranks as forks of the tests' process: they need not import torch again."""

import warnings
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes


def run_ranks(function: Callable[..., None], arguments: tuple[Any, ...], num_ranks: int) -> None:
    """Call the function with each rank and the arguments in a process of its own. Raises what one of them raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # to pytest a warning is an error, also torch's to its compiler
        start_processes(function, arguments, num_ranks, start_method="fork")
