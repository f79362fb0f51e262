"""The rows of Q1 to Q4, and of points that ran out of memory."""

from collections.abc import Sequence

from pipeline.experiment.learning_rate import peak_learning_rate
from pipeline.experiment.measurement import Epoch
from pipeline.experiment.record import Record
from pipeline.figures import formulas
from pipeline.figures.comparability import gpu_model
from pipeline.figures.notes import NoteKind, make_note
from pipeline.figures.pooling import PooledPoint, group_pairs
from pipeline.figures.time_to_target import states_every_time, training_times_s
from pipeline.plan.model_name import is_image_model
from pipeline.report.definitions import Q4
from pipeline.report.table import Row, make_row

DIVERGED = NoteKind("diverged", "{count} of {repeats} diverged", badge="diverged")
TEST_LOSS_NOT_FINITE = NoteKind("test_loss_not_finite", "the test loss is not finite in {count} of {repeats}")


def q4_rows(point: PooledPoint) -> list[Row]:
    """Return a row for every epoch with a loss. A point that has remedies but no loss has one row without figures.

    Losses and accuracies pool all GPU models. Training times are those on the model of most records.
    """
    stated = [record for record in point.ok_records if states_every_time(record)]
    timed = [record for record in stated if gpu_model(record) in ("", point.gpu)]
    times_s = {id(record): training_times_s(record) for record in timed}
    found = [(record, epoch) for record in point.ok_records for epoch in learnt_epochs(record)]
    repeats = group_pairs((epoch.epoch, epoch) for _, epoch in found)
    ends_s = group_pairs((e.epoch, times_s[id(r)][e.epoch - 1]) for r, e in found if id(r) in times_s)
    rows = [q4_row(point, repeats[number], ends_s.get(number, ())) for number in sorted(repeats)]
    if not rows and point.spec.remedies:
        rows.append(make_row(Q4, point, remedies=list(point.spec.remedies)))
    return rows


def learnt_epochs(record: Record) -> list[Epoch]:
    epochs = record.measurement.epochs if record.measurement and not record.spec.is_probe else ()
    return [epoch for epoch in epochs if epoch.loss is not None or epoch.diverged_at_update is not None]


def q4_row(point: PooledPoint, epochs: Sequence[Epoch], times_s: Sequence[float]) -> Row:
    """Return the medians over the repeats of one epoch. A loss that diverged is None, with its update.

    `times_s` are the training seconds up to its end, of the repeats on the model `point.gpu` that state them.
    """
    diverged = [epoch.diverged_at_update for epoch in epochs if epoch.diverged_at_update is not None]
    has_loss = is_image_model(point.spec.model)  # evaluate() of another model need not return one
    untold = sum(has_loss and epoch.test_accuracy is not None and epoch.test_loss is None for epoch in epochs)
    notes = []
    if diverged:
        notes.append(make_note(DIVERGED, count=len(diverged), repeats=len(epochs)))
    if untold:
        notes.append(make_note(TEST_LOSS_NOT_FINITE, count=untold, repeats=len(epochs)))
    learnt = ("loss", "accuracy", "test_loss", "test_accuracy", "merit")
    return make_row(
        Q4,
        point,
        n=len(epochs),
        remedies=list(point.spec.remedies),
        epoch=epochs[0].epoch,
        num_updates=epochs[0].num_updates,
        training_time_s=formulas.median_of_known(times_s),
        learning_rate=peak_learning_rate(point.spec) if has_known_rate(point) else None,
        **{key: formulas.median_of_known(getattr(epoch, key) for epoch in epochs) for key in learnt},
        diverged_at_update=min(diverged, default=None),
        notes=notes,
    )


def has_known_rate(point: PooledPoint) -> bool:
    """True if the learning rate follows from the point: of image models, unless others measured them."""
    return is_image_model(point.spec.model) and any(record.measured for record in point.ok_records)
