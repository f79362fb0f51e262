"""What a record may hold: parts that fit together, and times that a training can have written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from factories import make_communication, make_communication_record, make_record, make_spec

from pipeline.experiment.measurement import (
    Collective,
    Communication,
    DeviceMemory,
    Histogram,
    LayerScales,
    MemorySearch,
    SplitPart,
    SweptCollective,
    Telemetry,
    short_text,
)
from pipeline.experiment.record import Environment, Failure, Gpu
from pipeline.experiment.record_store import load_folder, publish_record


@pytest.mark.parametrize(
    ("series", "profile", "message"),
    [
        ({"ddp": [[1, 2]], "plain": [[1, 2], [1, 2]]}, {}, "all variants need the same number of windows"),
        ({"ddp": [[1, 2], [1]]}, {}, "all variants need the same number of windows"),
        ({"ddp": []}, {}, "all variants need the same number of windows"),
        ({"ddp": [[]]}, {}, "all variants need the same number of windows"),
        ({"ddp": [[0]]}, {}, "Expected `int` >= 1"),
        ({"ddp": [[1]]}, {"comm_ns": [1], "compute_ns": [1, 2]}, "every rank in each total"),
        ({"ddp": [[1]]}, {"comm_ns": [1, 2], "compute_ns": [1, 2]}, "every rank in each total"),
        ({"ddp": [[1]]}, {"comm_ns": [1], "compute_ns": [1], "overlap_ns": [1], "no_op_compute_ns": [1, 2]}, "every"),
        ({"ddp": [[1]]}, {"collectives": [[[], []]]}, "every rank in each total"),
        ({"ddp": [[1]]}, {"collectives": [[[1, 2], [1, 2], [1, 2]]]}, "every rank in each total"),
        ({"ddp": [[1]]}, {"collectives": [[[1, 2], [1]]]}, "every rank in each total"),
    ],
)
def test_a_communication_that_does_not_fit_together_is_refused(
    series: dict[str, list[list[int]]], profile: dict[str, Any], message: str
) -> None:
    collectives = [
        {"kind": "gradients", "operation": "all_reduce", "num_bytes": 4, "durations_ns": durations}
        for durations in profile.pop("collectives", [])
    ]
    found = {
        "steps_per_window": 1,
        "series": [{"variant": name, "window_times_ns": windows} for name, windows in series.items()],
        "profile": {"num_steps": 2, "collectives": collectives, **profile},
    }
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(found, Communication)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (SplitPart, {"part": "gather", "times_ns": []}),
        (SplitPart, {"part": "gather", "times_ns": [0]}),
        (SweptCollective, {"num_bytes": 4, "times_ns": [0]}),
    ],
)
def test_nothing_takes_no_time(kind: type, found: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match="times_ns"):
        msgspec.convert(found, kind)


def test_a_variant_has_one_series() -> None:
    series = {"variant": "ddp", "window_times_ns": [[1]]}
    with pytest.raises(msgspec.ValidationError, match="each variant may have only one series"):
        msgspec.convert({"steps_per_window": 1, "series": [series, series]}, Communication)


NAMES: dict[str, tuple[type, Callable[[str], dict[str, Any]]]] = {
    "operation": (Collective, lambda text: {"kind": "gradients", "operation": text, "num_bytes": 4}),
    "part": (SplitPart, lambda text: {"part": text, "times_ns": [1]}),
    "device": (DeviceMemory, lambda text: {"rank": 0, "device": text, "peak_allocated_bytes": 1, "usable_bytes": 1}),
    "layer": (
        LayerScales,
        lambda text: {
            **{"layer": text, "weight_scales": [], "input_scale": 1.0, "output_scale": 1.0},
            **{"max_weight": 1, "max_bias": 1, "max_accumulator": 1},
        },
    ),
    "histogram": (
        Histogram,
        lambda text: {
            **{"layer": text, "tensor": "weights", "low": 0.0, "high": 1.0, "counts": [1]},
            **{"mean": 0.5, "sigma": 0.1},
        },
    ),
    "GPU": (Gpu, lambda text: {"name": text}),
    "node": (Environment, lambda text: {"nodes": [text]}),
    "variable": (Environment, lambda text: {"variables": {text: "1"}}),
    "value": (Environment, lambda text: {"slurm": {"SLURM_JOB_ID": text}}),
    "telemetry": (Telemetry, lambda text: {"interval_s": 1.0, "notes": [text]}),
}


@pytest.mark.fault("F45")
@pytest.mark.parametrize("char", ["\x00", "\x0b", "\x1b", "\x7f", "\x9b", "\n", "\u2028"])
@pytest.mark.parametrize(("kind", "make"), NAMES.values(), ids=NAMES.keys())
def test_a_name_has_no_control_character(kind: type, make: Callable[[str], dict[str, Any]], char: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="Expected `str` matching regex"):
        msgspec.convert(make(f"conv{char}1"), kind)
    assert msgspec.convert(make(short_text(f"Größe{char}1")), kind) == msgspec.convert(make("Größe 1"), kind)


def test_a_record_whose_name_has_one_is_rejected_in_words(tmp_path: Path) -> None:
    path = publish_record(make_record(environment=Environment(gpus=(Gpu(name="GPU X"),))), tmp_path)
    path.write_text(path.read_text().replace("GPU X", "GPU\\u001b[31m"))
    _, (rejected,) = load_folder(tmp_path)
    assert rejected.reason == "a name has a control character - at `$.environment.gpus[0].name`"


def test_a_message_keeps_what_a_process_printed() -> None:
    said = "\x1b[31mRuntimeError\x1b[0m\r\n  at \x85"
    assert msgspec.json.decode(msgspec.json.encode(Failure("exception", said)), type=Failure).message == said


def trial(batch_size: int, fits: bool) -> dict[str, Any]:
    return {"batch_size_per_gpu": batch_size, "fits": fits, "time_ns": 1}


@pytest.mark.fault("F45")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"largest_fitting": 300}, "must be those of the trials"),
        ({"largest_fitting": 128}, "must be those of the trials"),  # it fits, but 256 does too
        ({"largest_fitting": 512}, "must be those of the trials"),  # it fits, but 384 failed
        ({"smallest_failing": None}, "must be those of the trials"),
        ({"smallest_failing": 400}, "must be those of the trials"),
        ({"trials": []}, "must be those of the trials"),
        ({"trials": [trial(256, True), trial(384, False)]}, "a prediction needs two trials that fit"),
    ],
)
def test_a_memory_search_says_what_its_trials_say(changes: dict[str, Any], said: str) -> None:
    trials = [trial(128, True), trial(256, True), trial(512, True), trial(384, False)]
    sound = {"trials": trials, "predicted": 390, "largest_fitting": 256, "smallest_failing": 384}
    assert msgspec.convert(sound, MemorySearch).largest_fitting == 256
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert(sound | changes, MemorySearch)


def damaged(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> str:
    """Why a record of two ranks over two epochs is rejected, once its epochs were changed by hand."""
    written = publish_record(make_record(make_spec(strategy="ddp", num_gpus=2)), path)
    shape = json.loads(written.read_text())
    change(shape["measurement"]["epochs"])
    written.write_text(json.dumps(shape))
    _, (rejected,) = load_folder(path)
    return rejected.reason


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda epochs: epochs.clear(), "at least 2 of 2 epochs, and not 0"),
        (lambda epochs: epochs.pop(), "at least 2 of 2 epochs, and not 1"),
        (lambda epochs: epochs.append({**epochs[1], "epoch": 3}), "at least 2 of 2 epochs, and not 3"),
        (lambda epochs: epochs.append(epochs[1]), "epochs count from 1, one after another"),
        (lambda epochs: epochs.reverse(), "epochs count from 1, one after another"),
        (lambda epochs: epochs[0].update(epoch=2), "epochs count from 1, one after another"),
        (lambda epochs: epochs[1]["ranks"].pop(), "epoch 2 needs the time of each of 2 ranks"),
        (lambda epochs: epochs[1]["ranks"].clear(), "length >= 1"),
        (lambda epochs: epochs[1]["ranks"].reverse(), "epoch 2 needs the time of each of 2 ranks, in their order"),
        (lambda epochs: epochs[1]["ranks"][1].update(rank=7), "epoch 2 needs the time of each of 2 ranks"),
        (lambda epochs: epochs[1]["ranks"][1].pop("epoch_time_ns"), "epoch 2 needs the time of each of 2 ranks"),
        (lambda epochs: epochs[1].update(num_updates=9999), "epoch 2 cannot end after 9999 updates"),
    ],
)
def test_epochs_that_no_training_writes_are_no_result(
    tmp_path: Path, change: Callable[[list[dict[str, Any]]], object], said: str
) -> None:
    assert said in damaged(tmp_path, change)


def test_a_point_that_may_stop_early_has_the_windows_of_an_interval() -> None:
    spec = make_spec(windows=12, epochs=13)
    assert make_record(spec, [1.0] * 7).measurement is not None
    with pytest.raises(ValueError, match="at least 7 of 13 epochs, and not 6"):
        make_record(spec, [1.0] * 6)


def test_a_round_from_which_a_rank_was_cut_is_no_result(tmp_path: Path) -> None:
    spec = make_spec(strategy="ddp", num_gpus=2, input="synthetic", measure="communication")
    path = publish_record(make_communication_record(spec, make_communication({"ddp": [1.0, 2.0]})), tmp_path)
    shape = json.loads(path.read_text())
    windows = shape["measurement"]["communication"]["series"][0]["window_times_ns"]
    shape["measurement"]["communication"]["series"][0]["window_times_ns"] = [window[:1] for window in windows]
    path.write_text(json.dumps(shape))
    _, (rejected,) = load_folder(tmp_path)
    assert "every window of ddp needs the times of 2 ranks" in rejected.reason
