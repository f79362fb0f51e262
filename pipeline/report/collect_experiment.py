"""The outcomes and tables of one experiment from its folder, with the links that experiments beside it measured."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from pipeline.experiment import record_store
from pipeline.experiment.folder import Experiment, is_experiment
from pipeline.experiment.outcomes import CollectedOutcomes, collect_outcomes
from pipeline.figures.ring_model import Link
from pipeline.report.link import MeasuredLinks, is_swept, measured_links
from pipeline.report.table import Row, Tables
from pipeline.report.tables import build_tables, flatten
from pipeline.report.time_to_target import FROM_BASELINE, Targets
from pipeline.system.errors import CommandError


@dataclass(frozen=True, eq=False)
class CollectedExperiment:
    """An experiment, the outcomes of its points, and its tables."""

    experiment: Experiment
    collected: CollectedOutcomes
    tables: Tables

    @cached_property
    def content(self) -> dict[str, Any]:
        """Return the rows of the tables and the coverage, as JSON has them."""
        return {**flatten(self.tables), "coverage": msgspec.to_builtins(self.collected.coverage)}


def collect_experiment(
    experiment: Experiment,
    link: Link | None = None,
    links_by_folder: dict[Path, MeasuredLinks] | None = None,
    targets: Targets = FROM_BASELINE,
    predict_to: int | None = None,
    peak_tflops: float | None = None,
) -> CollectedExperiment:
    """Return the outcomes and tables of one experiment. Raises CommandError.

    `links_by_folder` keeps what was read of sibling experiments, for the next call.
    """
    collected = collect_outcomes(experiment)
    expected = [outcome.spec for outcome in collected.outcomes]
    sibling_links: MeasuredLinks = {}
    if any(spec.num_gpus > 1 and spec.is_whole_epoch for spec in expected) and not any(map(is_swept, expected)):
        sibling_links = find_sibling_links(experiment, {} if links_by_folder is None else links_by_folder)
    tables = build_tables(collected.outcomes, link, sibling_links, targets, predict_to, peak_tflops)
    return CollectedExperiment(experiment, collected, tables)


def find_sibling_links(experiment: Experiment, links_by_folder: dict[Path, MeasuredLinks]) -> MeasuredLinks:
    """Return the fastest link that experiments in the same folder measured on each kind of place."""
    links: MeasuredLinks = {}
    for path in siblings_of(experiment):
        if path not in links_by_folder:
            links_by_folder[path] = read_links(Experiment(path))
        for key, gb_s in links_by_folder[path].items():
            links[key] = max(gb_s, links.get(key, 0.0))
    return links


def siblings_of(experiment: Experiment) -> list[Path]:
    """Return the other experiments in the same folder; none if it may be entered and not listed."""
    own = experiment.folder.resolve()
    try:
        return [path for path in sorted(own.parent.iterdir()) if path != own and is_experiment(path)]
    except OSError:
        return []


def sibling_predictions(experiment: Experiment, own: Sequence[Row], predict_to: int | None) -> list[Row]:
    """Return its own predictions, then those of experiments in the same folder that measured communication."""
    rows = list(own)
    for path in siblings_of(experiment):
        with contextlib.suppress(CommandError, OSError):
            manifest = Experiment(path).read_manifest()
            if manifest and any(spec.measure == "communication" for spec in manifest.points):
                rows += collect_experiment(Experiment(path), predict_to=predict_to).tables["prediction"]
    return rows


def read_links(experiment: Experiment) -> MeasuredLinks:
    """Return the links that an experiment measured; none if it has no manifest or cannot be read."""
    try:
        manifest = experiment.read_manifest()
        swept = {spec.run_id() for spec in manifest.points if is_swept(spec)} if manifest else set()
        found, _ = record_store.load_folder(experiment.records_folder, for_tables=True) if swept else ([], [])
    except (CommandError, OSError):
        return {}
    return measured_links(record for record in found if record.run_id in swept)
