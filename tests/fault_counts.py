"""Counts the points of the experiments that a test left: those that were lost, and those that were measured twice."""

import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from pipeline.experiment.folder import Experiment
from pipeline.experiment.record_store import load_folder
from pipeline.system.errors import CommandError


class PointCounts(NamedTuple):
    """Points of experiments: expected by their manifests, with a result (ok or OOM), lost, and doubled.

    A point is lost if its ranks wrote a result and its launch has no record, or if an array or a record names it and
    the manifest does not. It is doubled if two of its records are ok.
    """

    expected: int = 0
    with_result: int = 0
    lost: int = 0
    doubled: int = 0

    def plus(self, other: "PointCounts") -> "PointCounts":
        """Return the sums of both."""
        return PointCounts(*(own + more for own, more in zip(self, other, strict=True)))


def count_points(folder: Path) -> PointCounts:
    """Return the sums over the experiments below the folder whose manifests can be read."""
    counts = PointCounts()
    for path, _, files in os.walk(folder):  # passes over what is too deep
        if "manifest.json" in files:
            counts = counts.plus(count_experiment(Experiment(Path(path))))
    return counts


def count_experiment(experiment: Experiment) -> PointCounts:
    """Return the counts of one experiment, zeros if its manifest cannot be read."""
    try:
        manifest = experiment.read_manifest()
        found, _ = load_folder(experiment.records_folder)
    except (CommandError, OSError):
        return PointCounts()
    if manifest is None:
        return PointCounts()
    expected = {spec.run_id() for spec in manifest.points}
    arrays = [array for submission in manifest.submissions for array in submission.arrays]
    named = {run_id for array in arrays for element in array.elements for run_id in element}
    named |= {record.run_id for record in found}
    written = {path.parent.name for path in experiment.scratch_folder.glob("*/result.json")}
    recorded = {f"{record.run_id}.{record.launch_id}" for record in found}
    num_ok = Counter(record.run_id for record in found if record.status == "ok")
    return PointCounts(
        expected=len(expected),
        with_result=len({record.run_id for record in found if record.status in ("ok", "oom")} & expected),
        lost=len({name.partition(".")[0] for name in written - recorded} | (named - expected)),
        doubled=sum(count > 1 for count in num_ok.values()),
    )
