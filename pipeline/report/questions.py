"""Every table of an experiment with its rows, and every question with its answer, in order.

The words of an answer stand with its question, in q1 to q5, memory and int8.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, get_args

from pipeline.figures.exposed_communication import group_by_training
from pipeline.figures.formulas import Link
from pipeline.figures.intervals import ends_of
from pipeline.figures.pooling import pool_outcomes
from pipeline.figures.scaling import pair_with_baselines, strong_pairs
from pipeline.plan.point_label import Terms, in_terms
from pipeline.plan.strategies import STRATEGIES
from pipeline.records.outcomes import PointOutcome
from pipeline.report.claims import SUBMIT, SeparateAxis, Tile, grid_command
from pipeline.report.cost import COST, cost_rows
from pipeline.report.int8 import INT8, INT8_HISTOGRAMS, int8_claims, int8_histogram_rows, int8_rows
from pipeline.report.link import (
    BANDWIDTH,
    SWEEP,
    TRANSFERS,
    bandwidth_rows,
    measured_links,
    sweep_rows,
    transfer_row,
)
from pipeline.report.memory import MEMORY_BOUNDARY, OOM, memory_rows, oom_row
from pipeline.report.network import NETWORK, OTHER_LINK, network_rows, other_link_rows
from pipeline.report.next_step import advise_all
from pipeline.report.prediction import PREDICTION, prediction_rows
from pipeline.report.q1 import Q1, batch_size_claims, q1_row
from pipeline.report.q2 import NODES, Q2, WITHOUT_LOADER, node_claims, node_rows, q2_row, speedup_claims
from pipeline.report.q3 import COMMUNICATION, Q3, communication_claims, exposed_row, q3_row
from pipeline.report.q4 import Q4, large_batch_claims, q4_rows
from pipeline.report.q5 import use_claims
from pipeline.report.step_parts import SPLIT, split_row
from pipeline.report.table import Row, Table, Tables
from pipeline.report.time_to_target import FROM_BASELINE, TIME_TO_TARGET, Targets, time_to_target_rows

LEFT_OUT_IF_EMPTY = ("int8", "int8_histograms", "nodes", "network", "other_link")
TABLES_OF_GPUS = ("Q1", "Q2", "communication", "split", "memory")

TABLES = {
    table.name: table
    for table in (
        *(Q1, MEMORY_BOUNDARY, Q2, NODES),
        *(COMMUNICATION, NETWORK, OTHER_LINK, Q3, BANDWIDTH, SWEEP, TRANSFERS, SPLIT, PREDICTION),
        *(Q4, TIME_TO_TARGET, INT8, INT8_HISTOGRAMS, OOM, COST),
    )
}
"""Every table by name, in the order of the report."""

FIGURE_NAMES = {column.key: column.name for table in reversed(TABLES.values()) for column in table.columns}
"""The figures that notes name, in words. JSON and CSV have the key."""


def build_tables(
    outcomes: Sequence[PointOutcome],
    link: Link | None = None,
    targets: Targets = FROM_BASELINE,
    predict_to: int | None = None,
    peak_tflops: float | None = None,
) -> Tables:
    """Return the tables of an experiment, rows in the order of the grid.

    Predictions are for `link` and up to `predict_to` GPUs, times to target for `targets`, and MFU is of `peak_tflops`
    if it is stated.
    """
    pooled, over_gpus = pool_outcomes(outcomes), pool_outcomes(outcomes, by_gpu=False)
    trained = [point for point in over_gpus if point.spec.measure == "epochs"]
    points = [point for point in pooled if point.spec.measure == "epochs"]
    measured = [point for point in pooled if point.spec.measure == "communication"]
    distributed = [point for point in measured if point.spec.is_distributed]
    delayed = [point for point in pooled if point.spec.measure == "network"]
    reducing = [point for point in distributed if STRATEGIES[point.spec.strategy].has_all_reduces_alone]
    plain = [point for point in points if not point.spec.remedies]
    quantized = [point for point in over_gpus if point.spec.measure == "quantize"]
    weak = pair_with_baselines(plain, "weak")
    links = measured_links(record for point in distributed for record in point.ok_records)
    advices = advise_all(plain, distributed, peak_tflops)
    trained_alike, measured_alike = group_by_training(points), group_by_training(measured)
    found: dict[str, Iterable[Row]] = {
        "Q1": (q1_row(point, peak_tflops) for point in plain if point.spec.num_gpus == 1),
        "Q2": (
            *(
                q2_row(point, baseline, "weak", peak_tflops, advices.get(id(point), {}), measured_alike)
                for point, baseline in weak
            ),
            *(q2_row(point, baseline, "strong", peak_tflops) for point, baseline in strong_pairs(plain)),
        ),
        "nodes": node_rows(plain, measured_alike, advices),
        "Q3": (q3_row(point, baseline, measured_alike, links) for point, baseline in weak if point.spec.num_gpus > 1),
        "Q4": (row for point in trained for row in q4_rows(point)),
        "oom": (oom_row(point) for point in pooled if any(outcome.status == "oom" for outcome in point.outcomes)),
        "communication": (exposed_row(point, advices.get(id(point), {})) for point in distributed),
        "network": (row for point in delayed for row in network_rows(point)),
        "other_link": other_link_rows(delayed, distributed),
        "bandwidth": (row for point in reducing for row in bandwidth_rows(point)),
        "sweep": (row for rows in sweep_rows(distributed).values() for row in rows),
        "transfers": (transfer_row(point, trained_alike) for point in measured),
        "split": (split_row(point) for point in measured if STRATEGIES[point.spec.strategy].uses_threads),
        # processes share the CPUs of a machine, so more of them compute more slowly: the model says nothing of that
        "prediction": prediction_rows([point for point in reducing if point.spec.device == "cuda"], link, predict_to),
        "memory": memory_rows([point for point in pooled if point.spec.measure == "memory"]),
        "cost": cost_rows(outcomes),
        "time_to_target": time_to_target_rows(trained, targets),
        "int8": (row for point in quantized for row in int8_rows(point)),
        "int8_histograms": (row for point in quantized for row in int8_histogram_rows(point)),
    }
    return {name: list(found[name]) for name in TABLES}


def flatten(tables: Tables) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of JSON and CSV, by table. Those of int8 and of nodes are left out where they have none."""
    names = [name for name in TABLES if tables[name] or name not in LEFT_OUT_IF_EMPTY]
    return {name: [flatten_row(row, TABLES[name]) for row in tables[name]] for name in names}


def flatten_row(row: Row, table: Table) -> dict[str, Any]:
    """Return a row of JSON and CSV: axes, figures with the ends of their intervals, n, note."""
    flat = dict(row.axes)
    for column in table.columns:
        value = row.figures[column.key]
        flat |= {
            key: float(part) if isinstance(part, float) else str(part) if isinstance(part, str) else part
            for key, part in zip(column.keys, (value, *ends_of(value)), strict=False)
        }
    return flat | {"n": row.n, "note": row["note"]}


def values_of(tables: Tables, axis: str) -> list[str]:
    """Return what the points have on an axis, such as their GPU models, in the order of their rows."""
    found = (row.axes.get(axis) for name in TABLES_OF_GPUS for row in tables[name])
    return [value for value in dict.fromkeys(found) if value]


def part_of(tables: Tables, axis: str, value: str) -> Tables:
    """Return the tables without the rows of other values of an axis; rows that state none stay."""
    return {name: [row for row in rows if row.axes.get(axis) in (value, None)] for name, rows in tables.items()}


BY: tuple[SeparateAxis, ...] = get_args(SeparateAxis)

TOPICS = {
    "Q5": "Recommendation",
    "Q1": "Batch size",
    "Q2": "Scaling",
    "Q3": "Communication",
    "Q4": "Accuracy",
    "int8": "Accuracy in int8",
}
"""Each question in a word or two, in the order in which a reader meets them: first what to use."""

ASKED_ABOUT = {
    "Q1": "the batch size that keeps one $GPU busy",
    "Q2": "scaling over $GPUs",
    "Q3": "communication",
    "Q4": "the accuracy of large batches",
}
"""What an experiment that does not ask a question leaves out."""


OPTIONS_OF_RUN = {"scaling": "--num-gpus 1,2", "communication": "--num-gpus 2 --measure communication"}
"""The options of `ddpscale run` that measure of a script what a grid measures."""


class Answer(NamedTuple):
    """The answer to a question: its claims, and the word for what the points ran on."""

    question: str
    claims: Sequence[Tile]
    terms: Terms

    @property
    def topic(self) -> str:
        """The question in a word or two; of a user's own model what it tests is no accuracy."""
        return "Large batches" if self.question == "Q4" and self.terms.own_model else TOPICS[self.question]

    @property
    def is_answered(self) -> bool:
        """True if a claim answers; False if all only say why there is no answer."""
        return any(claim.is_answer for claim in self.claims)

    @property
    def tiles(self) -> list[Tile]:
        """The tiles of what was asked. One that only says why there is no answer has the topic and the command."""
        found = (claim.in_words_of(self.terms) for claim in self.claims if claim.is_asked)
        return [
            tile._replace(command=self.in_own_words(tile.command))
            if tile.label
            else tile._replace(label=self.topic, command=self.command)
            for tile in found
        ]

    @property
    def command(self) -> str:
        """The command that measures what is missing; "" if nothing is, or if no shipped grid does so."""
        return self.in_own_words(next((claim.command for claim in self.claims if claim.command), ""))

    def in_own_words(self, command: str) -> str:
        """Return the command that measures of the user's script or model what `command` measures of a shipped one."""
        if command and self.terms.words_of_run:
            return run_command(command, self.terms.words_of_run)
        alone = ALONE_ON[self.terms.processors]
        if command and self.terms.own_model:
            return own_model_command(self.question, command, self.terms.own_model, alone)
        if command and self.terms.processors == "processes":  # which most grids refuse
            grid, *cures = command.removeprefix(grid_command("")).split()
            on_cpu = f"memory --set {alone}" if grid == "memory" else "laptop --set device=cpu"
            return grid_command(" ".join([on_cpu, *(() if WITHOUT_LOADER in command else cures)]))
        return command


def not_asked(answers: Iterable[Answer]) -> list[str]:
    """Return what an experiment leaves out."""
    return [in_terms(ASKED_ABOUT[answer.question], answer.terms) for answer in answers if not answer.tiles]


def run_command(command: str, words_of_run: str) -> str:
    """Return the command that measures of a user's script what one of a grid measures; "" where `run` cannot.

    A loader is the script's own.
    """
    grid, *cures = command.removeprefix(grid_command("")).split()
    options = [OPTIONS_OF_RUN[grid], *cures] if grid in OPTIONS_OF_RUN and WITHOUT_LOADER not in command else []
    return " ".join(["ddpscale run", *options, words_of_run]) if options else ""


ALONE_ON = {
    "GPUs": "strategy=single num_gpus=1",
    "processes": "device=cpu memory_limit_gib=1 strategy=single num_gpus=1 precision=fp32",
}
"""The words after --set that make one search of the grid `memory`."""


def own_model_command(question: str, command: str, model: str, alone: str) -> str:
    """Return the command that measures the same of a user's model; "" for Q4, which needs a test of the user's.

    `model` and `alone` have the words after --set.
    """
    if question == "Q4":
        return ""
    if "--grid memory" in command:
        return f"{SUBMIT} --grid memory --set {model} {alone}"
    return f"{SUBMIT} --grid own-model --set {model}"


def answers_of(tables: Tables, terms: Terms) -> list[Answer]:
    return [Answer(question, claims, terms) for question, claims in answer_questions(tables).items()]


def answer_questions(tables: Tables) -> dict[str, list[Tile]]:
    """Return the claims of each question. If the rows hold no answer, a claim has the command that measures one.

    Q5, what to use, comes first, and is left out where no epoch was timed. An experiment that quantizes has one
    question, what int8 costs.
    """
    if tables["int8"]:
        return {"int8": int8_claims(tables["int8"])}
    use = claims_of_each(tables, BY, use_claims)
    return ({"Q5": use} if use else {}) | {
        "Q1": claims_of_each(tables, BY, batch_size_claims),
        "Q2": claims_of_each(tables, BY, lambda own: [*speedup_claims(own), *node_claims(own)]),
        "Q3": claims_of_each(tables, BY, communication_claims),
        "Q4": large_batch_claims(tables["time_to_target"]),
    }


def claims_of_each(tables: Tables, axes: Sequence[SeparateAxis], claim: Callable[[Tables], list[Tile]]) -> list[Tile]:
    """Return the claims about times or memory, for each value of these axes apart if there are several."""
    if not axes:
        return claim(tables)
    axis, *others = axes
    values = values_of(tables, axis)
    if len(values) < 2:
        return claims_of_each(tables, others, claim)
    claims = {value: claims_of_each(part_of(tables, axis, value), others, claim) for value in values}
    told = [part.narrow(axis, value) for value in values for part in claims[value] if part.is_answer]
    return told or max(claims.values(), key=lambda own: any(part.is_asked for part in own))
