"""make golden: a figure that changes is named by the digests of what shows it."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import golden
import pytest
from conftest import ROOT

from pipeline.plan.grid import spec_from_fields
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
