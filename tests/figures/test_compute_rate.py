"""The peaks of GPUs by the names that drivers report."""

import pytest

from pipeline.figures.compute_rate import Peak, find_peak


@pytest.mark.parametrize(
    ("gpu", "precision", "tflops"),
    [
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "fp32", 15.7),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("Tesla V100-PCIE-16GB", "fp32", 14),
        ("NVIDIA A40", "bf16", 149.7),
        ("A40", "tf32", 74.8),
        ("NVIDIA A40", "fp32", 37.4),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA A100 80GB PCIe", "fp16", 312),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 PCIe", "tf32", 378),
        ("NVIDIA H100 PCIe", "fp32", 51),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 80GB HBM3", "tf32", 494),
        ("NVIDIA H200", "tf32", 494),
        ("NVIDIA H200", "fp32", 67),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA L4", "bf16", 121),  # 242 with sparsity
        ("NVIDIA L4", "tf32", 60),
        ("NVIDIA L40S", "fp16", 362.05),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),  # products that accumulate in fp32
        ("NVIDIA B200", "bf16", 2250),  # 4,500 with sparsity
        ("NVIDIA B200", "tf32", 1100),
    ],
)
def test_the_peak_is_that_of_the_data_sheet_in_the_precision_that_computes(
    gpu: str, precision: str, tflops: float
) -> None:
    assert find_peak(gpu, precision) == Peak(tflops, "data sheet")


@pytest.mark.parametrize(
    ("gpu", "precision"),
    [
        ("Tesla V100-SXM2-32GB", "bf16"),  # it computes bf16 without its tensor cores
        ("Tesla V100-SXM2-32GB", "tf32"),
        ("Tesla V100S-PCIE-32GB", "fp16"),
        ("NVIDIA V100", "fp16"),  # of which kind?
        ("NVIDIA H100 NVL", "bf16"),
        ("NVIDIA H200 NVL", "bf16"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("NVIDIA A400", "bf16"),
        ("NVIDIA A40 and NVIDIA H200", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("Tesla T4", "bf16"),
        ("NVIDIA A10G", "bf16"),
        ("NVIDIA H200", ""),
        ("", "fp32"),
    ],
)
def test_an_unknown_gpu_or_precision_has_a_peak_only_if_it_is_stated(gpu: str, precision: str) -> None:
    assert (find_peak(gpu, precision), find_peak(gpu, precision, 165.2)) == (None, Peak(165.2, "stated"))


def test_a_stated_peak_replaces_that_of_the_data_sheet() -> None:
    assert find_peak("NVIDIA H200", "tf32", 400.0) == Peak(400.0, "stated")
