"""The figures and rows that an answer may use.

A row of a table shows every figure. If one is not fit, a note says why.
"""

from collections.abc import Iterable

from pipeline.analysis.notes import Note
from pipeline.report.row_types import Q2Row, Row

SPEEDUPS = ("speedup", "parallel_efficiency", "serial_fraction_karp_flatt")
SUBTRACTIONS = ("comm_time_subtraction_s", "bandwidth_subtraction_gb_s")

UNFIT_FIGURES: dict[str, tuple[str, ...]] = {
    "loader_bound": (*SPEEDUPS, *SUBTRACTIONS),
    "superlinear": SPEEDUPS,  # an efficiency above 1, and with it a Karp-Flatt fraction below 0
    "superlinear_is_noise": ("serial_fraction_karp_flatt",),  # an answer gives the possible part of the speed-up
    "serial_fraction_above_1": ("serial_fraction_karp_flatt",),
    "bandwidth_above_link": SUBTRACTIONS,
    "subtraction_is_noise": SUBTRACTIONS,
    "no_pause_in_training": ("link_share",),  # this note and the next stand at a link share above 1
    "sweep_waited_for_host": ("link_share",),
}
"""Kind of note -> the figures of the row that no answer may use. A note about the row's baseline counts too."""


def is_fit_for_answer(row: Row, figure: str) -> bool:
    """True if the row has this figure and no note of the row makes it unfit (UNFIT_FIGURES)."""
    return row[figure] is not None and not any(figure in UNFIT_FIGURES.get(kind_of(note), ()) for note in row.notes)


def kind_of(note: Note) -> str:
    """Return the kind of a note. For a note of kind `of_baseline` it is the kind of the note inside."""
    return kind_of(note.values["note"]) if note.kind == "of_baseline" else note.kind


def q2_answer_rows(rows: Iterable[Q2Row]) -> list[Q2Row]:
    """Return the rows of Q2 on several GPUs that have a fit speed-up and are not loader-bound.

    A row is left out too if `is_loader_bound` is None (not known).
    """
    return [
        row
        for row in rows
        if row["num_gpus"] > 1 and row.is_loader_bound is False and is_fit_for_answer(row, "speedup")
    ]
