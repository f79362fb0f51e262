"""The learning rate of every update: one pure function of the point, for the training loop and for the tables."""

import math

from pipeline.experiment.spec import Spec


def learning_rate_at(spec: Spec, update: int) -> float:
    """Return the learning rate of an update, counted from 0.

    Linear scaling multiplies the rate by global_batch_size / reference_batch_size (Goyal et al. 2017). Warm-up ramps it
    up linearly over the updates of the warm-up epochs, from near 0; theirs begins at the unscaled rate. After them
    `cosine` lowers it from its peak towards 0 at the end of the run: peak x (1 + cos(pi x share of the remaining
    updates that are done)) / 2 (Loshchilov & Hutter 2017).
    """
    rate = spec.learning_rate
    if "linear_scaling" in spec.remedies:
        rate *= spec.global_batch_size / spec.reference_batch_size
    num_warm_up = num_warm_up_updates(spec)
    if update < num_warm_up:
        rate *= (update + 1) / num_warm_up
    elif spec.schedule == "cosine":
        done = (update - num_warm_up) / (spec.epochs * spec.steps_per_epoch - num_warm_up)
        rate *= (1 + math.cos(math.pi * done)) / 2
    return rate


def num_warm_up_updates(spec: Spec) -> int:
    return spec.warmup_epochs * spec.steps_per_epoch if "warmup" in spec.remedies else 0


def peak_learning_rate(spec: Spec) -> float:
    """Return the largest rate of the run: that of the first update after warm-up, or of the last if there is none."""
    return learning_rate_at(spec, min(num_warm_up_updates(spec), spec.epochs * spec.steps_per_epoch - 1))
