"""Which figures an answer may use. A row shows every figure; a note says why one cannot carry an answer."""

from collections.abc import Iterable

from pipeline.analysis.notes import Note
from pipeline.report.row_types import Q2Row, Row

SPEEDUPS = ("speedup", "parallel_efficiency", "serial_fraction_karp_flatt")
SUBTRACTIONS = ("comm_time_subtraction_s", "bandwidth_subtraction_gb_s")

UNFIT_FIGURES: dict[str, tuple[str, ...]] = {
    "loader_bound": (*SPEEDUPS, *SUBTRACTIONS),
    "superlinear": SPEEDUPS,  # an efficiency above 1, and with it a Karp-Flatt fraction below 0
    "serial_fraction_above_1": ("serial_fraction_karp_flatt",),
    "bandwidth_above_link": SUBTRACTIONS,
    "no_pause_in_training": ("link_share",),  # of a share above 1, as the next
    "sweep_waited_for_host": ("link_share",),
}
"""By kind of note, the figures that no answer may use; also where the note is about the row's baseline."""


def is_fit_for_answer(row: Row, figure: str) -> bool:
    """True if the row has this figure and none of its notes forbids it in an answer."""
    return row[figure] is not None and not any(figure in UNFIT_FIGURES.get(kind_of(note), ()) for note in row.notes)


def kind_of(note: Note) -> str:
    """Return the kind of a note, or of the note about the baseline that it holds."""
    return kind_of(note.values["note"]) if note.kind == "of_baseline" else note.kind


def q2_answer_rows(rows: Iterable[Q2Row]) -> list[Q2Row]:
    """Return the rows of Q2 for an answer: on several GPUs, with a speed-up that may be used.

    A row of which it is not known whether it is loader-bound is left out too.
    """
    return [
        row
        for row in rows
        if row["num_gpus"] > 1 and row.is_loader_bound is False and is_fit_for_answer(row, "speedup")
    ]
