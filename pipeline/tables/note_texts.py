"""The sentence of every kind of note."""

import string
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from pipeline.analysis.notes import Note
from pipeline.experiment.point_label import format_number
from pipeline.system.errors import shorten_list

MAX_LISTED_VALUES = 3
MAX_VALUE_CHARS = 40

TRACE_AGAINST_STEPS = "two methods differ: trace {traced_us:.0f} us exposed, step times {exposed_us:.0f}; "
TRACE_REASONS = {
    "trace_is_noisy": ("the trace is noisy: in two profiles without communication kernels differ by {noise_us:.0f} us"),
    "trace_counts_slowed_kernels": "the trace is too long: a slower kernel does not always make the step longer",
    "trace_slows_host": (
        "the trace is too long: the profiler slows the host, and ranks that start apart wait inside the collectives"
    ),
    "trace_omits_host": (
        "the trace is too short: the device computes {busy:.0%} of the step, and the host's time to launch "
        "collectives is exposed too"
    ),
    "trace_omits_slowed_kernels": (
        "the trace is too short: kernels may run slower beside a collective, which it cannot show"
    ),
    "trace_omits_gaps": "the trace is too short: gaps between kernels may be longer, which it does not count",
}

OF_DRIFT = "from the first half of a run to the second: its interval assumes steady times, so allow for the drift too"

NOTE_TEXTS = {kind: TRACE_AGAINST_STEPS + reason for kind, reason in TRACE_REASONS.items()} | {
    "text": "{text}",
    "not_stated": "not stated: {figures:figures}",
    # pooled points
    "repeats_not_ok": "{count} of {repeats} repeats: {statuses:list}",
    "mixed_facts": "{facts:mixed}",
    "other_source": "source {ours:short}, other points of this experiment {majority}",
    "source_edited": "source edited after it was imported",
    "model_edited": "the file of the model was edited after it was submitted",
    "other_fact": "{what} with another {fact} ({theirs:short} against {ours:short})",
    "other_node": "{what} from another node ({theirs:short} against {ours:short})",
    "other_boot": "{what} from another boot of its node",
    "other_gpu": "{what} ran on another GPU of the same model",
    "shared_node": "other points of this experiment on its node meanwhile: {others}",
    "other_shared_node": "{what}: other points of this experiment on its node meanwhile: {others}",
    # epoch times and their intervals
    "probe_fits": "probe of {steps} steps: it fits, and has no epoch time",
    "epochs_cut": "epochs end after {steps} of {full} steps: no epoch time",
    "whole_seconds": "stated in whole seconds: rounding alone is {share:.1%}",
    "only_warm_up": "epoch 1 warms up and epoch 2 was not run: no epoch time",
    "timed_epoch_not_stated": "the file does not state epoch 2",
    "parts_deviate": "the parts of an epoch add up to {share:,.1%} of its time",
    "too_few_values": "an interval needs {needed} windows or repeats, got {found}",
    "too_few_windows": "an interval needs {needed} windows, got {found}",
    "windows_pooled": (
        "range within the windows of {repeats} repeats together: too narrow if repeats differ more than their windows"
    ),
    "drifted": "{what:figures} drifted by {drift:+.1%} " + OF_DRIFT,
    "drifted_in_repeats": (
        "{what:figures} drifted in {count} of {repeats} repeats, at most by {drift:+.1%} " + OF_DRIFT
    ),
    "execution_chosen": "execution=auto used {execution}",
    "execution_captured": "execution={execution}: one graph is the whole step, so its parts have no times",
    "compile_time": "compiling or capturing took {time_s:.1f} s, before the clock started",
    "throttled": "throttled: {reasons:figures}",
    "no_energy": "no energy: {samples} samples of a GPU in the window are too few, or a GPU was not sampled",
    "allocator_retry": "memory was full once: the allocator freed its cache and tried again",
    "allocator_retries": "memory was full {count} times: the allocator freed its cache and tried again",
    "mfu_peak": "MFU is of {peak} TFLOP/s in {precision} ({source})",
    "no_peak": "no MFU: no peak of {gpu} in {precision} is known; collect --peak-tflops states one",
    "diverged": "{count} of {repeats} diverged",
    "test_loss_not_finite": "the test loss is not finite in {count} of {repeats}",
    "loader_bound": "loader-bound: the GPU that waits longest waits for data in {share:.0%} of the epoch",
    # time to target
    "seeds_missing": "no result of seed {seeds:list}",
    "reached_by_some": "{reached} seeds reached the target",
    "equal_global_batch": (
        "over the seeds, the ranges of the training loss of this row and of 1 GPU with the same global batch overlap "
        "in {count} of {epochs} epochs"
    ),
    "no_target": "no target: the baseline has no final test accuracy, or it diverged",
    # baselines and scaling
    "no_baseline": "no baseline: the experiment has no point on 1 GPU with these axes",
    "baseline_untimed": "no baseline: {strategy} on 1 GPU is {status}",
    "of_baseline": "baseline: {note}",
    "no_difference": "no difference from the baseline: 1 lies inside the interval",
    "baseline_runs": "baseline: n = {n}, so the interval of the speed-up is not between runs alone",
    "superlinear": "efficiency above 1: noise, a slow baseline, or a difference other than the number of GPUs",
    "superlinear_is_noise": (
        "the speed-up is above {num_gpus}, which lies inside its interval: the noise is larger than the gap"
    ),
    "subtraction_is_noise": "0 lies inside the interval of T(N) - T(1)/N: subtraction shows no communication",
    "subtraction_fails": "T(N) <= T(1)/N: subtraction cannot show the communication",
    "serial_fraction_above_1": "Karp-Flatt above 1: slower than one GPU, so the loss is overhead, not a serial part",
    "bandwidth_above_link": (
        "bandwidth above the {link_gb_s:.0f} GB/s of the measured link: comm by subtraction is too short"
    ),
    "ring_assumed": "a ring is assumed, which DataParallel does not use",
    # communication
    "own_collectives": (
        "the model or its loss calls collectives itself ({names:list}), in every timed step, the reference too: no "
        "exposed communication, no cost of the wrapper and no advice are told from it"
    ),
    "step_differs": (
        "the step that measured communication takes {measured_ms:.3g} ms, that of the epochs {epochs_ms:.3g} ms "
        "without the wait for data: no share and no advice are told from it"
    ),
    "exposure_is_noise": "exposed communication is not larger than the noise: no hidden share is stated",
    "measured_exposure_is_noise": "measured exposed communication is not larger than its noise of {noise_s:.3g} s",
    "exposure_may_be_zero": "0 lies inside the interval of exposed communication",
    "exposure_negative": "DDP was faster than DDP with the no-op hook; the records do not say why",
    "exposure_drifted": "exposed communication went from {before_us:.0f} to {after_us:.0f} us during the measurement",
    "launch_exposed": "more time is exposed than the transfer takes: the rest may be the host's time for launches",
    "no_bucket_profiled": "the profile shows none of the collectives that the strategy calls",
    "late_rank": "the other ranks wait {wait_us:,.0f} us of a step for rank {rank} ({where}): {known}",
    "size_not_swept": "no isolated all-reduce of this size was timed",
    "no_pause_in_training": "time on the fastest rank; isolated all-reduces follow a pause, this one does not",
    "sweep_waited_for_host": "the isolated all-reduces waited for the host: the link's limit lies higher",
    "sweeps_differ": "isolated all-reduces of some repeats were captured, of others not",
    "no_buffer_memory": "a rank had no memory for the buffer",
    # predictions, memory, int8, cost
    "latency_of_host": "the host issued the sweep's calls one by one: the latency is the host's, not the link's",
    "link_given": "the link is given, not measured",
    "no_link_fits": "no latency and bandwidth above 0 explain the sweep on {num_gpus}",
    "nothing_failed": "nothing failed in {trials} trials",
    "not_narrowed": "not narrowed to 1 % in {trials} trials",
    "saving_unclear": "peaks lie too far from a line to tell what is saved (standard error {error_gib:.2g} GiB)",
    "trial_failed": "failed at {batch_size}: {reason}",
    "too_few_seeds": "an interval needs {needed} seeds, got {found}",
    "convolutions_split": "from {batch_size} on activations have more than 2^31 elements, and convolutions are split",
    "times_unknown": "{count} without their times",
    "implied": "{count} more not run: a smaller batch ran out of memory",
}
"""Templates by kind. `{name:list}` joins all values, `{name:short}` the first few, each cut to a few characters.

`{name:figures}` joins names, in words for people, `{name:mixed}` writes out facts that differ.
"""


class Range(NamedTuple):
    """The smallest and the largest value of a quantity, in notes that differ in it."""

    low: float
    high: float


class NoteFormatter(string.Formatter):
    """str.format with lists, names of figures and notes about another point."""

    def __init__(self, words: Mapping[str, str]) -> None:
        self.words = words

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return one value as text."""
        if format_spec == "list":
            return ", ".join(value)
        if format_spec == "figures":
            return ", ".join(self.words.get(key, key) for key in ([value] if isinstance(value, str) else value))
        if format_spec == "short":
            return shorten_values(value)
        if format_spec == "mixed":
            return "; ".join(f"mixed {fact}: {shorten_values(values)}" for fact, values in value.items())
        if isinstance(value, Range):
            low, high = (self.format_field(end, format_spec) for end in value)
            return f"{low.removesuffix(' %')} to {high}"
        if isinstance(value, Note):
            return render_note(value, self.words)
        if isinstance(value, float) and format_spec:
            return format_number(value, format_spec).replace("%", " %")
        return str(super().format_field(value, format_spec))


def shorten_values(values: Collection[str]) -> str:
    """Return the first values in order, each cut to a few characters."""
    return shorten_list([value[:MAX_VALUE_CHARS] for value in sorted(values)], MAX_LISTED_VALUES)


def render_note(note: Note, words: Mapping[str, str] | None = None) -> str:
    """Return the sentence of a note, with `words` (by key) for the figures that it names."""
    return NoteFormatter(words or {}).vformat(NOTE_TEXTS[note.kind], (), note.values)


def render_notes(notes: Iterable[Note]) -> str | None:
    """Return the sentences of a row's notes, joined; None without notes."""
    return "; ".join(map(render_note, notes)) or None
