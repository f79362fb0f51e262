"""The int8 network of a kept library: onnxruntime's `quantize_static` with integer operators, as a reference."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from torch import nn

Array = npt.NDArray[Any]
OPSET, IR_VERSION = 13, 8


def to_onnx(model: nn.Module, image_shape: tuple[int, int, int], num_scores: int) -> Any:
    """Return the sequential model as ONNX, node by node."""
    nodes, tensors, value = [], [], "images"
    for index, module in enumerate(model.children()):
        output = f"output{index}"
        inputs = [value]
        attributes: dict[str, Any] = {}
        if isinstance(module, nn.Conv2d | nn.Linear):
            for name, parameter in module.named_parameters():
                tensors.append(numpy_helper.from_array(parameter.detach().numpy(), f"{name}{index}"))
                inputs.append(f"{name}{index}")
        if isinstance(module, nn.Linear):
            attributes = {"transB": 1}
        elif isinstance(module, nn.Conv2d):
            attributes = {"kernel_shape": list(module.kernel_size)}
        elif isinstance(module, nn.MaxPool2d):
            attributes = {"kernel_shape": [module.kernel_size] * 2, "strides": [module.stride] * 2}
        operator = {nn.Conv2d: "Conv", nn.Linear: "Gemm", nn.ReLU: "Relu", nn.MaxPool2d: "MaxPool"}
        kind = operator.get(type(module), type(module).__name__)
        nodes.append(helper.make_node(kind, inputs, [output], name=f"node{index}", **attributes))
        value = output
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", *image_shape])
    scores = helper.make_tensor_value_info(value, TensorProto.FLOAT, ["batch", num_scores])
    graph = helper.make_graph(nodes, "model", [images], [scores], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


class OneBatch(CalibrationDataReader):  # type: ignore[misc]
    """A calibration set of one batch."""

    def __init__(self, images: Array) -> None:
        self._batches: Iterator[dict[str, Array]] = iter([{"images": images}])

    def get_next(self) -> dict[str, Array] | None:
        return next(self._batches, None)


class OnnxNetwork:
    """The model after `quantize_static` with symmetric int8; `scales` and `tensors` are those that it chose."""

    def __init__(self, model: nn.Module, calibration: Array, folder: Path, per_channel: bool) -> None:
        num_scores = [module.out_features for module in model.children() if isinstance(module, nn.Linear)][-1]
        onnx.save(to_onnx(model, calibration.shape[1:], num_scores), folder / "fp32.onnx")
        quantize_static(
            folder / "fp32.onnx",
            folder / "int8.onnx",
            OneBatch(calibration),
            quant_format=QuantFormat.QOperator,
            per_channel=per_channel,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            extra_options={"ActivationSymmetric": True, "WeightSymmetric": True},
        )
        quantized = onnx.load(folder / "int8.onnx")
        self.operators = [node.op_type for node in quantized.graph.node]
        self.tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in quantized.graph.initializer}
        self._session = onnxruntime.InferenceSession(folder / "int8.onnx", providers=["CPUExecutionProvider"])

    def __call__(self, images: Array) -> Array:
        """Return the scores in fp32: int8 scores times their scale."""
        (scores,) = self._session.run(None, {"images": images})
        return np.asarray(scores)
