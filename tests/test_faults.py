"""docs/faults.md: each row has a test or says why not."""

from pathlib import Path

from conftest import PointCounts, count_points
from factories import make_experiment, make_record, make_spec, slurm_submission
from fault_matrix import ROOT, ROW, UNTESTED, find_tests, render_page

PAGE = (ROOT / "docs/faults.md").read_text()
ROWS = {row["fault"]: row for row in ROW.finditer(PAGE)}
EXPECTED = [*(f"F{number:02}" for number in range(1, 65)), *(f"G{number}" for number in range(1, 6))]


def test_the_page_has_every_row_once_and_in_order() -> None:
    assert [row["fault"] for row in ROW.finditer(PAGE)] == EXPECTED
    assert sum(line.startswith(("| F", "| G")) for line in PAGE.splitlines()) == len(EXPECTED)


def test_the_page_names_the_tests_that_show_each_fault_today() -> None:
    assert render_page(PAGE) == PAGE, "run make faults-page"


def test_a_fault_has_a_test_or_a_reason() -> None:
    for fault in EXPECTED:
        shown_by = ROWS[fault]["shown_by"]
        assert shown_by.startswith("[test_") or (shown_by.startswith(UNTESTED) and shown_by.endswith(".")), fault


def test_a_test_shows_a_fault_that_the_page_has() -> None:
    assert set(find_tests()) - set(EXPECTED) == set()


def test_points_that_were_lost_or_doubled_are_counted(tmp_path: Path) -> None:
    """Of five points the first has two ok records, the second one, the third an OOM, the fourth a result alone."""
    first, second, third, fourth, fifth = points = [make_spec(repeat=number) for number in range(5)]
    found = [make_record(first), make_record(first), make_record(second), make_record(third, status="oom")]
    experiment = make_experiment(tmp_path / "x", *found, missing=[fourth, fifth])
    assert count_points(tmp_path) == PointCounts(expected=5, with_result=3, lost=0, doubled=1)
    for launch_id in ("2", "7"):  # that of the second one's record, and another
        folder = experiment.launch_folder((second if launch_id == "2" else fourth).run_id(), launch_id)
        folder.mkdir(parents=True)
        (folder / "result.json").touch()
    with experiment.edit_manifest() as manifest:
        manifest.submissions.append(slurm_submission(*([spec] for spec in (*points, make_spec(repeat=9)))))
    assert count_points(tmp_path) == PointCounts(expected=5, with_result=3, lost=2, doubled=1)
