"""The answer to Q3: what communication costs, as measured and by subtraction."""

from collections.abc import Sequence

from pipeline.experiment.point_label import format_number
from pipeline.report.answer_words import (
    NO_RESULT,
    PART,
    RUN,
    basis_of,
    between,
    describe_own,
    not_answered,
    percent,
    possible_part,
    source_of,
    submit_again,
)
from pipeline.report.build_tables import Tables
from pipeline.report.fit_figures import is_fit_for_answer, kind_of
from pipeline.report.row_types import CommunicationRow, Q3Row, Row
from pipeline.system.errors import pluralize


def answer_communication(tables: Tables) -> str:
    """Return the measured share of exposed communication, and beside it the share that subtraction gives.

    The largest and the smallest share are of points above the noise.
    """
    rows = tables.communication
    measured = [row for row in rows if row.exposed_comm_time_s is not None and row.step_time_s]
    known = [row for row in tables.Q3 if row.comm_time_subtraction_s is not None and row.epoch_time_s]
    subtracted = [row for row in known if is_fit_for_answer(row, "comm_time_subtraction_s")]
    if measured:
        most = max(row["num_gpus"] for row in measured)
        said = describe_measured([row for row in measured if row["num_gpus"] == most], measured)
        if not known:
            return f"{said}{PART}To compare with an estimate by subtraction {RUN.format('q3')}."
        return said + compare_subtraction([row for row in subtracted if row["num_gpus"] == most], subtracted)
    if subtracted:
        most_by = max(subtracted, key=subtracted_share)
        return (
            f"Not measured here. Subtraction says up to {percent(subtracted_share(most_by))} of the epoch "
            f"({source_of(most_by, subtracted, also='num_gpus')}), but it counts every cost that does not shrink with "
            f"N.{PART}To measure it {RUN.format('communication')}."
        )
    if lost := [row for row in rows if row.status in NO_RESULT]:
        return f"Not answered yet: points that measure communication have no result; {submit_again(lost)}."
    why = "no point on several GPUs measures communication"
    if known:
        why += ", and subtraction fails, counts waiting for data or shows no more than noise"
    return not_answered(why, "communication")


def compare_subtraction(rows: Sequence[Q3Row], subtracted: Sequence[Q3Row]) -> str:
    """Return what subtraction says where communication was measured too; empty if no row has both."""
    both = [row for row in rows if describe_measured_share(row)]
    if not both:
        return ""
    row = max(both, key=subtracted_share)
    where = f"where {describe_measured_share(row)} ({describe_own(row, subtracted)})"
    return f" Subtraction says {percent(subtracted_share(row))} of the epoch {where}."


def describe_measured_share(row: Q3Row) -> str:
    """Return in words the share of the epoch that was measured; empty if it was not, or is more than the epoch.

    Epoch and communication were measured apart, so the noise of one may make a share above 1.
    """
    exposed_s, low_s, epoch_s = row.exposed_comm_time_s, row.exposed_comm_time_low_s, row.epoch_time_s or 1.0
    if part := possible_part(exposed_s, low_s, epoch_s):
        return f"{between(part[0] / epoch_s, 1)} is measured: the noise is larger than the gap to the whole epoch"
    if exposed_s is None or exposed_s > epoch_s:
        return ""
    noise = ", inside the noise" if "measured_exposure_is_noise" in map(kind_of, row.notes) else ""
    return f"{percent(exposed_s / epoch_s, 1)} is measured{noise}"


def describe_measured(rows: Sequence[CommunicationRow], measured: Sequence[CommunicationRow]) -> str:
    """Return the largest and the smallest share of communication in these rows, and how many rows show none."""
    noisy, negative = (
        [row for row in rows if kind in map(kind_of, row.notes)] for kind in ("exposure_is_noise", "exposure_negative")
    )
    told = [row for row in rows if row not in noisy and row not in negative]
    what = f"On {rows[0]['num_gpus']} GPUs all-reduces of gradients that computation does not hide take"
    said = []
    if told:
        worst, best = (choose(told, key=exposed_share) for choose in (max, min))
        exposed, step = 1e6 * (worst.exposed_comm_time_s or 0.0), worst.step_time_s or 1.0
        length = f"{format_number(exposed, ',.0f')} us of a step of {format_number(1e3 * step, ',.2f')} ms"
        said.append(f"{what} {length}: {describe_exposed(worst, measured)}.")
        if len(told) > 1:
            smallest = describe_exposed(best, measured)
            said.append(f"Of {len(told)} points it is the largest share; the smallest is {smallest}.")
    if noisy:
        they = f"In {pluralize(len(noisy), 'other point')} they take" if told else what
        said.append(
            f"{they} no more time than the noise, which is up to "
            f"{percent(max(map(noise_share, noisy)), 1)} of the step."
        )
    if negative:
        points = pluralize(len(negative), "other point" if told or noisy else "point")
        said.append(f"In {points} DDP was faster than DDP without all-reduces; the records do not say why.")
    return " ".join(said)


def noise_share(row: CommunicationRow) -> float:
    """Return the noise of exposed communication as a share of the step."""
    return (row.noise_floor_time_s or 0.0) / (row.step_time_s or 1.0)


def exposed_share(row: CommunicationRow) -> float:
    """Return exposed communication as a share of the step."""
    return (row.exposed_comm_time_s or 0.0) / (row.step_time_s or 1.0)


def describe_exposed(row: CommunicationRow, rows: Sequence[Row]) -> str:
    """Return that share in words, with its interval and its source."""
    low, high, step = row.exposed_comm_time_low_s, row.exposed_comm_time_high_s, row.step_time_s or 1.0
    ends = (
        f"interval {between(low / step, high / step)}{basis_of(row)}, " if low is not None and high is not None else ""
    )
    return f"{percent(exposed_share(row), 1)} ({ends}{source_of(row, rows)})"


def subtracted_share(row: Q3Row) -> float:
    """Return communication by subtraction as a share of the epoch."""
    return (row.comm_time_subtraction_s or 0.0) / (row.epoch_time_s or 1.0)
