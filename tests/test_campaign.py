"""The runner of the campaign: each bench once, over sittings; and its list, whose grids can be expanded."""

import json
import re
import shlex
import sys
import tarfile
from pathlib import Path

import campaign
import pytest
from conftest import ROOT, wait_for

from pipeline.plan.grid import expand_grid

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
