"""Evaluated trainings whose accuracies were made up."""

from collections.abc import Sequence
from typing import Any

from factories import make_record, make_spec, with_epochs

from pipeline.experiment.record import Record
from pipeline.plan.axes import Remedy


def trained(accuracies: Sequence[float], epoch_time_s: float = 1.0, **fields: Any) -> Record:
    """A record of an evaluated run with these test accuracies by epoch."""
    spec = make_spec(**{"evaluate": True, "epochs": len(accuracies), **fields})
    record = make_record(spec, [epoch_time_s] * spec.epochs, loss=1.0)
    return with_epochs(record, lambda epoch: {"test_accuracy": accuracies[epoch.epoch - 1]})


def learnt(size: int, accuracy: float, epochs: int = 4, epoch_time_s: float = 2.0, **fields: Any) -> Record:
    """A run whose test accuracy rises evenly to `accuracy`."""
    rising = [accuracy * epoch / epochs for epoch in range(1, epochs + 1)]
    return trained(rising, epoch_time_s, **{"batch_size_per_gpu": size, **fields})


def studied(
    size: int,
    accuracy: float,
    spread: float,
    *remedies: Remedy,
    epochs: int = 30,
    epoch_time_s: float = 1.0,
    **fields: Any,
) -> list[Record]:
    """Six seeds whose test accuracy rises evenly to `accuracy` + `spread` x seed."""
    return [
        learnt(size, accuracy + spread * seed, epochs, epoch_time_s, seed=seed, remedies=remedies, **fields)
        for seed in range(6)
    ]
