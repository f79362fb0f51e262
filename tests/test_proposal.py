"""`pipeline.proposal`: the hours of the asked work, where efficiency falls, and what is refused."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from browser import CHROMIUM, needs_chromium
from conftest import Command, assert_refused, run_unprivileged, succeeded
from factories import (
    H200,
    NOISY,
    ROOT,
    assert_says,
    beside,
    ends,
    make_experiment,
    make_record,
    timed,
    windowed,
    with_rank_epochs,
)
from rendered import published_tables

from pipeline.plan.point_label import in_terms
from pipeline.records.folder import Experiment
from pipeline.records.record import Environment, Gpu, Record
from pipeline.report.collected import collect_experiment, sibling_predictions
from pipeline.report.proposal import Proposal, propose, share_of_other
from pipeline.report.table import Row
from pipeline.system.errors import CommandError

EPOCH_S = {1: 8.0, 2: 4.4, 4: 3.2}  # efficiency 100, 91 and 62.5 %
NUM_SAMPLES = 50_000  # of an epoch


def scaling(counts: Sequence[int] = (1, 2, 4), **fields: Any) -> list[Record]:
    return [timed(EPOCH_S[count], 128, count, **fields) for count in counts]


def proposal_of(folder: Path, *found: Record, num_gpus: int | None = None, num_samples: int = 10**9) -> Proposal:
    return propose(collect_experiment(make_experiment(folder / "x", *found)).tables, num_samples, num_gpus, list)


def test_the_page_has_the_hours_and_where_efficiency_falls(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "x", *scaling())
    answer = pipeline("proposal", tmp_path / "x", "--samples", "1e9")
    assert (answer.returncode, answer.stderr) == (0, "")
    wall_h = 3.2 * 1e9 / NUM_SAMPLES / 3600
    assert_says(
        answer.stdout,
        f"1,000,000,000 images on 4 GPUs, ddp, 128 per GPU: {wall_h:.1f} h, {4 * wall_h:.1f} GPU-hours",
        "efficiency falls below 70 % at 4 GPUs, where it is 62.5 %; on 2 it is 90.9 %.",
    )
    assert (tmp_path / "x" / "proposal.md").read_text() == answer.stdout
    page = (tmp_path / "x" / "proposal.html").read_text()
    assert page.count("<figure") == 1  # no strong scaling was measured
    assert ("62.5 %" in page, "http" in page.partition("</head>")[2]) == (True, False)


def test_an_interval_of_the_time_is_one_of_the_hours_and_of_the_efficiency(tmp_path: Path) -> None:
    records = [windowed([EPOCH_S[count] * factor for factor in NOISY], 128, count) for count in EPOCH_S]
    found = proposal_of(tmp_path, *records)
    hours_s = [factor * 4 * 3.2 * 1e9 / NUM_SAMPLES / 3600 for factor in (0.95, 1, 1.05)]
    assert ends(found.weak[-1]["gpu_hours"]) == pytest.approx(hours_s)
    assert found.weak[-1]["parallel_efficiency"].high > found.weak[-1]["parallel_efficiency"]
    assert "(67.6 to 74.7)" in found.answers[0]
    assert "within one run" in " ".join(found.assumptions)


def test_the_row_on_one_gpu_is_that_of_the_configuration(tmp_path: Path) -> None:
    """DDP ran on one GPU, too, and so did DDP with a static graph, which is slower."""
    graph = {"static_graph": True}
    found = [
        timed(s, 128, n, strategy="ddp", **more) for s, n, more in ((8.0, 1, {}), (9.0, 1, graph), (5.0, 2, graph))
    ]
    alone = proposal_of(tmp_path / "gpus", *found, timed(4.4, 128, 2))
    assert [row["gpu_hours"] * 3600 * NUM_SAMPLES / 1e9 for row in alone.weak] == pytest.approx([8.0, 8.8])


def test_the_share_of_other_time_is_of_gpus_where_some_points_ran_on_cpus() -> None:
    hours = [("ok_timed", 3.0, None), ("ok_other", 1.0, None), ("ok_timed", None, 1.0), ("ok_other", None, 9.0)]
    rows = [Row({}, {"ending": word, "gpu_hours": gpu, "process_hours": cpu}) for word, gpu, cpu in hours]
    said = [share_of_other({"cost": found}) for found in (rows, rows[2:])]
    assert [re.findall(r"\d+ %", text) for text in said] == [["25 %"], ["90 %"]]


A40 = Environment(gpus=(Gpu(name="NVIDIA A40"),))
ON_A40 = [msgspec.structs.replace(record, environment=A40) for record in scaling(seed=1)]
LENET_FASTER = [timed(0.1, 128, model="lenet"), timed(0.05, 128, 2, model="lenet")]


@pytest.mark.parametrize(
    ("found", "num_gpus", "hours", "efficiency", "assumed"),
    [
        pytest.param(
            [
                windowed([time_s * factor for factor in NOISY], 128, num)
                for num, time_s in ((1, 8.0), (2, 8 / 2 / 0.69))
            ],
            *(None, "", "); its interval contains 70 %", ""),
            id="an interval of the efficiency that contains 70 %",
        ),
        pytest.param(scaling(), 2, "images on 2 GPUs", "", "", id="fewer GPUs than were measured"),
        pytest.param(scaling(), 1, "images on 1 GPU,", "", "", id="one GPU"),
        pytest.param(
            scaling((2, 4)),
            *(None, "GPU-hours", "no configuration on several GPUs has one on one GPU to compare with", ""),
            id="no baseline: hours and no efficiency",
        ),
        pytest.param(
            scaling((1,)),
            None,
            "",
            "since no configuration on several GPUs was timed",
            "The configuration is 128 per GPU. Hours are",
            id="one point: nothing beyond",
        ),
        pytest.param(
            [
                with_rank_epochs(record, lambda rank: {"data_time_ns": (rank.epoch_time_ns or 0) // 2})
                for record in scaling()
            ],
            *(None, "", "unfit for an answer"),
            "Its hours and scaling are limited by data loading.",
            id="every point waits for its loader",
        ),
        pytest.param(
            [*scaling(), *ON_A40],
            *(None, H200.gpus[0].name, ""),
            "Other GPU models were measured too and are left out: NVIDIA A40.",
            id="of two GPU models one is the subject",
        ),
        pytest.param(
            [*scaling(), *LENET_FASTER],
            *(None, "", ""),
            "Other models were measured too and are left out: lenet.",
            id="of two models the first is the subject even if the other is faster",
        ),
        pytest.param(
            scaling(),
            *(None, "", ""),
            "There are no intervals: they need 6 timed epochs, or repeats. Energy was not measured.",
            id="no energy and no intervals",
        ),
        pytest.param(
            [*scaling(), timed(1.0, 512, 4, input="synthetic")],
            *(None, "ddp, 128 per GPU", "", ""),
            id="synthetic batches are left out",
        ),
        pytest.param(
            [*scaling(), *beside(timed(1.0, 256, 4), timed(1.0, 512, 4))],
            *(None, "ddp, 128 per GPU", ""),
            "other configurations ran on its node at the same time",
            id="shared nodes are left out and named",
        ),
        pytest.param(
            [*scaling(), timed(9.0, 128, 4, num_nodes=2)],
            None,
            f"ddp, 1 node, 128 per GPU: {3.2 * 1e9 / NUM_SAMPLES / 3600:.1f} h",
            "where it is 62.5 %",
            "The configuration is ddp, 1 node, 128 per GPU",
            id="a slower configuration on more nodes is another one",
        ),
        pytest.param(
            [*scaling(), windowed([9.0] * 6, 128, 4)],
            *(None, f": {3.2 * 1e9 / NUM_SAMPLES / 3600:.1f} h", "where it is 62.5 %", ""),
            id="of two lengths of a run the faster one is meant",
        ),
    ],
)
def test_what_a_proposal_says(
    tmp_path: Path, found: list[Record], num_gpus: int | None, hours: str, efficiency: str, assumed: str
) -> None:
    proposed = proposal_of(tmp_path, *found, num_gpus=num_gpus)
    for words, said in zip(
        (hours, efficiency, assumed),
        (*map(in_terms, proposed.answers), in_terms(" ".join(proposed.assumptions))),
        strict=True,
    ):
        assert words in said


def test_of_one_gpu_nothing_follows_for_several(tmp_path: Path) -> None:
    assert proposal_of(tmp_path, *scaling((1,))).strong == []
    for counts in ((1,), (2, 4), (1, 2)):
        (work, *_) = proposal_of(tmp_path / str(counts), *scaling(counts)).answers
        assert ("; " in work) is (counts == (1, 2))  # the hours on one GPU, beside those on several
    with pytest.raises(CommandError, match=r"no configuration on 2 GPUs was timed.*--grid scaling"):
        proposal_of(tmp_path, num_gpus=2)


def test_ingested_times_are_said() -> None:
    stated = propose(published_tables("a40-ddp"), 10**9, None, list)
    assert "Times were stated elsewhere, and not measured here." in stated.assumptions


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--samples", "0"), 2, ("--samples", "from 1 to 1e18")),
        (("--samples", "nan"), 2, ("--samples",)),
        (("--samples", "many"), 2, ("--samples",)),
        (("--samples", "1e9", "--num-gpus", "0"), 2, ("--num-gpus", "from 1")),
        (("--samples", "1e9", "--num-gpus", "3"), 2, ("no configuration on 3 GPUs was timed", "1, 2, 4", "up to 8")),
        (("--samples", "1e9", "--num-gpus", "9"), 2, ("no configuration on 9 GPUs was timed", "1, 2, 4, or up to 8")),
    ],
)
def test_work_that_follows_from_nothing_measured_is_refused(
    pipeline: Command, tmp_path: Path, arguments: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    make_experiment(tmp_path / "x", *scaling())
    assert_refused(pipeline("proposal", tmp_path / "x", *arguments), code, *words)
    assert not (tmp_path / "x" / "proposal.md").exists()


def test_no_folder_no_experiment_and_several_are_refused(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "all" / "untimed", make_record(status="oom", reason="full"))
    make_experiment(tmp_path / "all" / "x", *scaling())
    (tmp_path / "empty").mkdir()
    for folder, code, words in (
        ("absent", 2, ("cannot read",)),
        ("empty", 3, ("no experiment under",)),
        ("all/untimed", 3, ("no epoch with a known number of samples",)),
        ("all", 2, ("several experiments", "untimed, x")),
    ):
        assert_refused(pipeline("proposal", tmp_path / folder, "--samples", "1e9"), code, *words)


def test_a_folder_of_others_gets_no_file_and_the_page_is_printed(tmp_path: Path) -> None:
    folder = make_experiment(tmp_path / "x", *scaling()).folder
    folder.chmod(0o555)
    tmp_path.chmod(0o755)
    answer = run_unprivileged("proposal", folder, "--samples", "1e9")
    assert (answer.returncode, "only printed" in answer.stderr) == (0, True), answer.stderr
    assert answer.stdout.startswith("# Compute proposal: x")


def test_beyond_the_measured_the_two_models_have_columns_and_no_interval() -> None:
    """The published experiment, with the predictions of the one beside it that measured communication."""
    experiment = Experiment(ROOT / "published" / "h200x4" / "scaling")
    tables = collect_experiment(experiment, predict_to=8).tables
    found = propose(tables, 10**9, 8, lambda: sibling_predictions(experiment, [], 8))
    measured, beyond = found.beyond
    assert beyond["gpu_hours"] is measured["no_change_gpu_hours"] is measured["none_hidden_gpu_hours"] is None
    assert beyond["no_change_gpu_hours"] == measured["gpu_hours"]
    assert beyond["none_hidden_gpu_hours"] > beyond["no_change_gpu_hours"]
    assert type(beyond["none_hidden_gpu_hours"]) is float
    assert "if nothing gets slower, " in found.answers[0]
    assert " if none is hidden (not measured)" in found.answers[0]
    between = propose(tables, 10**9, 6, lambda: sibling_predictions(experiment, [], 8))
    assert between.beyond[1]["none_hidden_gpu_hours"] is None, "the predictions are of 8 GPUs"
    alone = propose(tables, 10**9, 8, list)
    assert (alone.beyond[1]["none_hidden_gpu_hours"], "measure: communication" in alone.assumptions[-1]) == (None, True)
    assert "if none is hidden" not in alone.answers[0]


def test_the_rows_of_strong_scaling_state_their_batch(pipeline: Command, tmp_path: Path) -> None:
    found = [*scaling(), *(timed(EPOCH_S[count], 128 // count, count) for count in (2, 4))]
    make_experiment(tmp_path / "x", *found)
    page = succeeded(pipeline("proposal", tmp_path / "x", "--samples", "1e9")).stdout
    assert "| ddp      |    2 |             64 |" in page


def test_the_published_proposal_is_of_the_cheapest_configuration_with_one_gpu_beside() -> None:
    """It was of 32 images per GPU, 125 GPU-hours, since the faster ones wait for their loader."""
    tables = published_tables("h200x4/scaling")
    first, *others = map(in_terms, propose(tables, 10**9, None, list).answers)
    assert "on 4 GPUs, ddp, 512 per GPU: 10.5 h, 41.9 GPU-hours; 38.4 GPU-hours on 1 GPU" in first
    assert all("unfit for an answer" in said for said in others)
    # of one GPU all ran side by side, so all count
    assert "on 1 GPU, 8,192 per GPU" in in_terms(propose(tables, 10**9, 1, list).answers[0])


@pytest.mark.browser
@needs_chromium
@pytest.mark.parametrize(("name", "num_gpus"), [("h200x4", "8"), ("h200x2", "4")])
def test_the_page_prints_on_one_pages(pipeline: Command, tmp_path: Path, name: str, num_gpus: str) -> None:
    shutil.copytree(ROOT / "published" / name / "scaling", tmp_path / "x")
    shutil.copytree(ROOT / "published" / name / "communication", tmp_path / "communication")
    succeeded(pipeline("proposal", tmp_path / "x", "--samples", "1e9", "--num-gpus", num_gpus))
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--print-to-pdf={tmp_path / 'page.pdf'}"]
    subprocess.run([*command, f"file://{tmp_path}/x/proposal.html"], capture_output=True, timeout=120, check=True)
    assert len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "page.pdf").read_bytes())) == 2
