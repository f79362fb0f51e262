"""What benchmarks/ makes and reads: digests, mutations, docs/faults.md, docs/schema, the site and the campaign."""

import importlib.util
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import campaign
import docs_site
import golden
import jsonschema
import pytest
from conftest import PointCounts, count_points, wait_for
from factories import ROOT, make_experiment, make_record, make_spec, slurm_submission
from fault_matrix import ROW, UNTESTED, find_tests, render_page
from referencing import Registry
from rendered import PUBLISHED, published_experiment
from run_mutations import Mutation, OldTextNotUnique, load_mutations
from schema_files import schema_files

from pipeline.plan.grid import expand_grid, spec_from_fields
from pipeline.report.collected import indented_json
from pipeline.system.errors import CommandError

NAME = "dp-notebook"


def compare(published: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"{ROOT}/benchmarks/golden.py", "--published", str(published), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.seconds
def test_a_changed_figure_turns_the_digests_of_its_experiment_red(tmp_path: Path) -> None:
    for name in (NAME, "dp-report"):
        shutil.copytree(ROOT / "published" / name, tmp_path / name)
    record = next((tmp_path / NAME / "records").glob("dp-1gpu-b32-*.json"))
    record.write_text(record.read_text().replace('"epoch_time_ns": 25860000000', '"epoch_time_ns": 25960000000'))
    changed = compare(tmp_path, f"published/{NAME}", "published/dp-report")
    assert changed.returncode == 1, changed.stderr
    parts = ("collect", "csv", "report.html", "report.md", "svg", "tables.json")
    assert changed.stdout.splitlines() == [
        *(f"differs: published/{NAME}/{part}" for part in parts),
        "12 digests, 6 of them not as in golden.json",
    ]


def test_a_name_that_is_new_or_gone_is_a_change() -> None:
    assert golden.name_changes({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "4", "d": "5"}) == [
        *("differs: b", "gone: c", "new: d"),
    ]


def test_the_committed_digests_are_sorted_and_one_a_line() -> None:
    lines = golden.DIGESTS.read_text().splitlines()[1:-1]
    assert lines == sorted(lines)
    assert len(lines) == len(json.loads(golden.DIGESTS.read_text())) > 300


def test_half_of_the_random_points_are_valid_and_each_axis_takes_part() -> None:
    num_valid, seen = 0, set[str]()
    for seed in range(1000):
        fields = golden.draw_fields(random.Random(seed))
        seen |= fields.keys()
        try:
            spec_from_fields(fields, "point")
        except CommandError:
            continue
        num_valid += 1
    assert 300 < num_valid < 700
    assert seen == golden.VALUES.keys() | {"measure"}


MUTATION = Mutation("name", "file.py", "a + b", "a - b", "tests/test_file.py::test_sum")


@pytest.mark.parametrize(("text", "problem"), [("b + a", "old text not found"), ("a + b, a + b", "found 2 times")])
def test_an_old_text_that_is_not_there_exactly_once_is_an_error(text: str, problem: str) -> None:
    with pytest.raises(OldTextNotUnique, match=problem):
        MUTATION.apply(text)


def test_each_mutation_changes_a_file_that_there_is_and_names_a_test_that_there_is() -> None:
    for mutation in load_mutations():
        text = (ROOT / mutation.file).read_text()
        assert mutation.apply(text) != text, mutation
        path, function = mutation.test.partition("[")[0].split("::")
        assert f"\ndef {function}(" in (ROOT / path).read_text(), mutation


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
    assert count_points(tmp_path) == PointCounts(lost=0, doubled=1)
    for launch_id in ("2", "7"):  # that of the second one's record, and another
        folder = experiment.scratch_folder / f"{(second if launch_id == '2' else fourth).run_id()}.{launch_id}"
        folder.mkdir(parents=True)
        (folder / "result.json").touch()
    with experiment.edit_manifest() as manifest:
        manifest.submissions.append(slurm_submission(*([spec] for spec in (*points, make_spec(repeat=9)))))
    assert count_points(tmp_path) == PointCounts(lost=2, doubled=1)


@pytest.mark.parametrize(
    ("page", "link", "placed"),
    [
        ("README.md", "[a](docs/trust.md#two)", "[a](trust.md#two)"),
        ("README.md", "![p](docs/q2.svg)", "![p](q2.svg)"),
        ("docs/recipes/ci.md", "[a](../../README.md)", "[a](../index.md)"),
        ("docs/trust.md", "[`a`](../tests/conftest.py)", "`a`"),
        ("docs/trust.md", "[a](https://example.org/x.md), [b](#here)", "[a](https://example.org/x.md), [b](#here)"),
    ],
)
def test_a_link_leads_to_the_page_of_the_site_or_becomes_text(page: str, link: str, placed: str) -> None:
    assert docs_site.place_links(link, ROOT / page) == placed


@pytest.mark.seconds
@pytest.mark.skipif(importlib.util.find_spec("zensical") is None, reason="the extra docs is not installed")
def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_two_pages(folder: Path) -> None:
        (folder / "pages").mkdir(parents=True)
        (folder / "pages/index.md").write_text("# A\n\n[b](b.md#there)\n")
        (folder / "pages/b.md").write_text(f"# B\n\n## {heading}\n")
        (folder / "zensical.toml").write_text(docs_site.CONFIG.format(nav='["index.md", "b.md"]'))

    monkeypatch.setattr(docs_site, "write_pages", write_two_pages)
    codes = []
    for heading in ("there", "elsewhere"):
        codes.append(docs_site.build_site(tmp_path / heading) == 0)
    assert codes == [True, False]


LIST = ROOT / "benchmarks" / "campaign.yaml"
BENCHES = """
- {name: counts, minutes: 0.1, rank: 1, command: 'echo run >> $OUT/runs'}
- {name: fails-once, minutes: 0.1, command: 'test -e $OUT/tried || { touch $OUT/tried; exit 1; }'}
- {name: long, minutes: 60, command: 'touch $OUT/begun'}
- {name: needs-gpus, gpus: 99, minutes: 0.1, command: 'true'}
"""


def sit(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    (folder / "list.yaml").write_text(BENCHES)
    monkeypatch.setattr(sys, "argv", ["campaign", str(folder / "list.yaml"), "--out", str(folder / "out"), *more])
    return campaign.main()


def test_a_bench_runs_until_it_ends_well_and_then_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sit(tmp_path, monkeypatch, "--dry-run") == 0
    assert capsys.readouterr().out.splitlines()[0] == "0 of 3 benches are done; the others take about 60 min:"
    assert not (tmp_path / "out").exists()
    assert [sit(tmp_path, monkeypatch) for _ in range(3)] == [1, 0, 0]
    assert (tmp_path / "out/counts/runs").read_text() == "run\n"
    assert not (tmp_path / "out/long").exists(), "it does not fit into a sitting of nine minutes"
    assert json.loads((tmp_path / "out/fails-once/done.json").read_text())["commit"]
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        assert "out/counts/runs" in archive.getnames()


@pytest.mark.seconds
def test_a_bench_is_ended_with_what_it_started_when_the_sitting_ends(tmp_path: Path) -> None:
    bench = campaign.Bench("slow", "sleep 60 & echo $! > $OUT/pid; wait", 0.01)
    assert campaign.run_bench(bench, tmp_path, limit_s=1) is False
    state = Path(f"/proc/{(tmp_path / 'slow/pid').read_text().strip()}/stat")
    assert wait_for(lambda: not state.exists() or state.read_text().split()[2] == "Z")  # a killed process ends soon
    assert not campaign.is_done(bench, tmp_path)


def test_every_grid_of_the_list_gives_points_and_every_bench_fits_a_sitting() -> None:
    benches = campaign.read_benches(LIST, num_gpus=99)
    assert max(bench.minutes for bench in benches) <= campaign.SITTING_MINUTES
    assert len({bench.name for bench in benches}) == len(benches)
    grids = [re.fullmatch(r"\$SUBMIT\S* --grid (\S+)(?: --set (.+))?", bench.command) for bench in benches]
    for grid, overrides in (found.groups() for found in grids if found):
        assert expand_grid(grid, shlex.split(overrides or ""), has_gpus=True).points, grid
    assert sum(map(bool, grids)) >= 10


SCHEMAS = ROOT / "docs" / "schema"
RECORDS = sorted((ROOT / "published").rglob("records/*.json"))
MAX_RECORDS = 40  # of an interpreted validator; each experiment gives at least one


def validator(name: str) -> Any:
    """Return a validator with this schema, which may refer to the others by their names."""
    schemas = {path.name: json.loads(path.read_text()) for path in SCHEMAS.glob("*.json")}
    return jsonschema.Draft202012Validator(schemas[name], registry=Registry().with_contents(schemas.items()))


@pytest.mark.parametrize("name", ["record.json", "tables.json"])
def test_the_files_are_those_of_today(name: str) -> None:
    assert (SCHEMAS / name).read_bytes() == schema_files()[name], "run make schema"
    jsonschema.Draft202012Validator.check_schema(json.loads((SCHEMAS / name).read_text()))


def test_the_schema_has_no_pattern_that_python_alone_reads() -> None:
    for name in schema_files():
        assert re.findall(r"\\\\[AZ]", (SCHEMAS / name).read_text()) == []


def sampled_records() -> list[Path]:
    """One record of each experiment, and others at random."""
    by_folder = {path.parent: path for path in RECORDS}
    rest = sorted(set(RECORDS) - {*by_folder.values()})
    return [*by_folder.values(), *random.Random(0).sample(rest, max(0, MAX_RECORDS - len(by_folder)))]


def test_published_records_are_valid() -> None:
    records = validator("record.json")
    found = sampled_records()
    assert found
    for path in found:
        assert [*records.iter_errors(json.loads(path.read_bytes()))] == [], path


def test_the_tables_of_published_experiments_are_valid() -> None:
    tables = validator("tables.json")
    for name in PUBLISHED[::3]:  # of an interpreted validator
        assert [*tables.iter_errors(json.loads(indented_json(published_experiment(name).content)))] == [], name


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.update(attempt="first"),
        lambda record: record["spec"].update(strategy="fsdp2"),
        lambda record: record.pop("status"),
    ],
    ids=["a type", "an axis", "no status"],
)
def test_a_damaged_record_is_not_valid(damage: Callable[[dict[str, Any]], object]) -> None:
    record = json.loads(RECORDS[0].read_bytes())
    assert validator("record.json").is_valid(record)
    damage(record)
    assert not validator("record.json").is_valid(record)


def test_a_figure_that_no_column_declares_is_not_valid() -> None:
    content = json.loads(indented_json(published_experiment("a40-ddp").content))
    assert validator("tables.json").is_valid(content)
    content["Q1"][0]["epoch_time_ms"] = 1.0
    assert not validator("tables.json").is_valid(content)
