"""Records that answer every question, and the page of them."""

from collections.abc import Sequence
from pathlib import Path

from factories import (
    BUCKETS,
    comm_point,
    make_communication_record,
    make_measurement,
    make_record,
    make_spec,
    measured,
    resolved,
    with_epochs,
    with_rank_epochs,
)

from pipeline.plan.axes import Remedy
from pipeline.plan.point_label import OF_GPUS, Terms
from pipeline.plan.spec import Spec
from pipeline.records.folder import Experiment
from pipeline.records.record import Environment, Gpu, Record, SweptCollective
from pipeline.records.store import RejectedFile
from pipeline.report.collected import CollectedExperiment
from pipeline.report.html import Pages, build_plots
from pipeline.report.plots import Plot
from pipeline.report.questions import build_tables

ONE_GPU_S = {32: 12, 128: 5, 512: 4}  # epoch time by batch size
REMEDIES: tuple[tuple[Remedy, ...], ...] = ((), ("linear_scaling",), ("linear_scaling", "warmup"))
EVIL = '<script>alert("x")</script><img src=http://example.invalid/x.png>\u202e$\\frac{1}{2}$ ---'


PARTS = {"copy_ns": 0.1, "forward_ns": 0.3, "backward_ns": 0.5, "optimizer_ns": 0.1}  # of the time that computes


def timed_record(spec: Spec, time_s: float, **fields: float) -> Record:
    """A record whose timed epoch took so long, with every part of its steps."""
    record = make_record(spec, measurement=make_measurement(spec, (2 * time_s, time_s), **fields))
    return with_rank_epochs(
        record, lambda rank: {part: round(share * (rank.compute_time_ns or 0)) for part, share in PARTS.items()}
    )


def batch_records() -> list[Record]:
    """One GPU at three batch sizes, of which the next is out of memory."""
    timed = [timed_record(make_spec(batch_size_per_gpu=size), time_s) for size, time_s in ONE_GPU_S.items()]
    return [*timed, make_record(make_spec(batch_size_per_gpu=2048), status="oom", reason="out of GPU memory")]


def scaling_records(counts: Sequence[int] = (2, 4)) -> list[Record]:
    """DDP at the same batch sizes, 10 % slower than ideal."""
    return [
        timed_record(make_spec(strategy="ddp", num_gpus=count, batch_size_per_gpu=size), 1.1 * time_s / count)
        for count in counts
        for size, time_s in ONE_GPU_S.items()
    ]


def communication_records() -> list[Record]:
    """One DDP step with 40 us exposed, and a sweep over message sizes."""
    sweep = tuple(
        SweptCollective(
            num_bytes=size, operation="all_reduce", times_ns=(20_000 + size // 100,) * 6, is_bucket=size in BUCKETS
        )
        for size in (10_000, 1_000_000, *BUCKETS, 200_000_000)
    )
    return [make_communication_record(comm_point(), measured(38, 39, 40, 40, 41, 42, sweep=sweep))]


def remedy_records() -> list[Record]:
    """Four epochs with a small batch, and with a large one with and without remedies."""
    small = make_spec(batch_size_per_gpu=64, epochs=4, evaluate=True)
    large = [make_spec(batch_size_per_gpu=4096, epochs=4, evaluate=True, remedies=remedies) for remedies in REMEDIES]
    return [
        with_epochs(
            make_record(spec, (3.0, 2.0, 2.0, 2.0), loss=1.0),
            lambda epoch, lost=0.05 * rank: {"test_accuracy": 0.2 + 0.1 * epoch.epoch - lost},  # type: ignore[misc]
        )
        for rank, spec in enumerate([small, *large])
    ]


def every_question() -> list[Record]:
    return [*batch_records(), *scaling_records(), *communication_records(), *remedy_records()]


def hostile_records() -> list[Record]:
    place = Environment(gpus=(Gpu(name=EVIL),), torch=EVIL, git_commit=EVIL, cpu=EVIL, source=EVIL)
    return [
        make_record(environment=place),
        make_record(make_spec(batch_size_per_gpu=64), status="oom", reason=EVIL, environment=place),
        make_record(make_spec(batch_size_per_gpu=32), status="failed", reason=EVIL, environment=place),
    ]


def plots_of_records(*found: Record, terms: Terms = OF_GPUS) -> list[Plot]:
    outcomes = resolved(*found).outcomes
    return build_plots(build_tables(outcomes), terms)


def collected_in(
    folder: Path, *found: Record, missing: Sequence[Spec] = (), bad: Sequence[RejectedFile] = ()
) -> CollectedExperiment:
    """The experiment of these records, in a folder of its own."""
    collected = resolved(*found, missing=missing, bad=bad)
    folder.mkdir(parents=True, exist_ok=True)
    return CollectedExperiment(Experiment(folder), collected, build_tables(collected.outcomes))


def write_page(folder: Path, *found: Record, missing: Sequence[Spec] = (), name: str = "x") -> Path:
    """Write the page of these records, and return its path."""
    bad = [RejectedFile(Path("records") / "bad.json", None, name)]
    Pages(folder.parent, True).write(name, collected_in(folder, *found, missing=missing, bad=bad), {})
    return folder / "report.html"


def write_index(folder: Path, **found: Record) -> str:
    """Write the index over experiments of one record each, and return it."""
    pages = Pages(folder, True)
    for name, record in found.items():
        pages.write(name, collected_in(folder / name, record), {})
    pages.write_index()
    return (folder / "index.html").read_text()
