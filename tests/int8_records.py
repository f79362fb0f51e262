"""Records of a network of one layer in int8, six seeds, with figures worked by hand."""

from typing import Any

import msgspec
from factories import make_measurement, make_record, make_spec

from pipeline.experiment.measurement import Histogram, Quantization, StageResult
from pipeline.experiment.record import Record
from pipeline.experiment.spec import Spec

NUM_TEST = 1000
FP32_CORRECT = (600, 610, 620, 630, 640, 650)
CHANGES = (-1, -2, 3, -4, -5, 1)


def point(seed: int) -> Spec:
    fields: dict[str, Any] = {"device": "cpu", "model": "lenet", "precision": "fp32", "input": "gpu"}
    return make_spec(**fields, batch_size_per_gpu=64, evaluate=True, measure="quantize", seed=seed)


def int8_result(correct: int | None, problem: str | None = None) -> StageResult:
    scale: dict[str, Any] = {"stage": "biases", "scale_rule": "three_sigma", "granularity": "per_channel"}
    if correct is None:
        return StageResult(**scale, problem=problem)
    return StageResult(**scale, num_correct=correct, num_agreeing=correct + 300, num_ties=20, num_bytes=63_682)


def record_of(seed: int, result: StageResult) -> Record:
    fp32 = StageResult(
        stage="fp32", num_correct=FP32_CORRECT[seed], num_agreeing=NUM_TEST, num_ties=0, num_bytes=248_024
    )
    drawn = Histogram(
        layer="conv1", tensor="weights", low=-1.0 - seed, high=1.0, counts=(1, 2, 1), mean=0.25, sigma=0.5
    )
    found = Quantization(
        weights_sha256="0" * 64,
        num_calibration_samples=400,
        num_test_samples=NUM_TEST,
        results=(fp32, result),
        histograms=(drawn,),
    )
    spec = point(seed)
    return make_record(spec, measurement=msgspec.structs.replace(make_measurement(spec), quantization=found))


RECORDS = [record_of(seed, int8_result(FP32_CORRECT[seed] + change)) for seed, change in enumerate(CHANGES)]
