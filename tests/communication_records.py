"""Communication points, what was measured of them, and an NVLink: shared by the tests of what communication costs."""

from collections.abc import Sequence
from typing import Any

from factories import make_collective, make_communication, make_spec

from pipeline.experiment.measurement import Communication, Profile, SweptCollective, VariantName
from pipeline.experiment.spec import Spec
from pipeline.figures.ring_model import Link

US = 1e-6
DRIFT_US = (200, 400, 0, 500, 100, 300)  # from round to round, far larger than any difference: it must fall out
LARGE, SMALL = 26_000_000, 8_000_000  # of two buckets, in bytes
SIZES = (8_192, 131_072, 2_097_152, 44_695_848, 268_435_456)
NVLINK = Link(latency_s=5 * US, bandwidth_bytes_per_s=300e9)
BUCKETS = (26_000_000, 9_000_000)


def point(strategy: str = "ddp", num_gpus: int = 2, **fields: Any) -> Spec:
    given = {"measure": "communication", "input": "synthetic", "windows": 6, **fields}
    return make_spec(strategy=strategy, num_gpus=num_gpus, **given)


def profile(traced_us: int = 40) -> Profile:
    """Two steps on two ranks: gradients take 100 us on the link, 10 of the mean rank's are waiting."""
    return Profile(
        num_steps=2,
        collectives=(
            make_collective(80, (7, 7), (7, 7), kind="buffers", operation="broadcast"),
            make_collective(LARGE, (80, 90), (100, 80)),
            make_collective(SMALL, (20, 30), (20, 30)),
        ),
        comm_ns=(200_000, 240_000),
        compute_ns=(1_800_000, 1_800_000),
        overlap_ns=(200_000 - 2_000 * traced_us, 0),
    )


def five_times(
    exposed_us: Sequence[float] = (38, 39, 40, 40, 41, 42), again_us: Sequence[float] = ()
) -> dict[VariantName, Sequence[float]]:
    """Window times by variant; `exposed_us` is what the collectives add round by round, `again_us` A/A differences."""
    rounds = range(len(exposed_us))
    no_op_us = [900.0 + DRIFT_US[number] for number in rounds]
    ddp_us = [no_op_us[number] + exposed_us[number] for number in rounds]
    noise_us = again_us or (3, -1, 0, 0, 1, -2)
    times: dict[VariantName, Sequence[float]] = {
        "plain": [800.0] * len(rounds),
        "ddp_one": [820.0] * len(rounds),
        "no_sync": [time_us - 50 for time_us in no_op_us],
        "no_op_hook": no_op_us,
        "no_collectives": [time_us - 30 for time_us in no_op_us],
        "ddp": ddp_us,
        "ddp_again": [ddp_us[number] + noise_us[number] for number in rounds],
    }
    return times


def measured(*exposed_us: float, again_us: Sequence[float] = (), **fields: Any) -> Communication:
    times = five_times(exposed_us, again_us) if exposed_us else five_times(again_us=again_us)
    sweep = (SweptCollective(num_bytes=LARGE, times_ns=(70_000, 64_000, 60_000), is_bucket=True),)
    given = {"profile": profile(round(exposed_us[0]) if exposed_us else 40), "sweep": sweep, **fields}
    return make_communication(times, **given)


def steady(*exposed_us: float) -> Communication:
    """Rounds of a step of 5 ms that does not drift, of which the collectives take so much."""
    ddp_us = [5000 + value for value in exposed_us]
    times: dict[VariantName, Sequence[float]] = {
        "no_op_hook": [5000.0] * len(ddp_us),
        "ddp": ddp_us,
        "ddp_again": ddp_us,
    }
    return make_communication(times)
