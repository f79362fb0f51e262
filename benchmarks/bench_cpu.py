"""Times epochs on the CPU by layout of memory, by turns in one process. Part of `make bench`."""

import tabulate
import torch
from bench_epochs import NUM_WINDOWS, by_turns, ours

from pipeline.experiment.spec import Spec
from pipeline.plan.axes import MemoryLayout
from pipeline.training.process_group import Rank

BATCH_SIZE, NUM_STEPS = 32, 3
LAYOUTS: tuple[MemoryLayout, ...] = ("contiguous", "channels_last")


def point(layout: MemoryLayout) -> Spec:
    """Return a point: a few steps of ResNet-18 in fp32 on synthetic images."""
    return Spec(
        strategy="single",
        num_gpus=1,
        batch_size_per_gpu=BATCH_SIZE,
        device="cpu",
        dataset="synthetic",
        input="synthetic",
        precision="fp32",
        num_samples=BATCH_SIZE * NUM_STEPS,
        layout=layout,
    )


def main() -> None:
    """Print the epoch time of each layout beside that of the default."""
    rank = Rank(0, 1, torch.device("cpu"))
    rows = by_turns("cpu", [ours(layout, point(layout), rank, None) for layout in LAYOUTS], NUM_WINDOWS)
    shown = [
        {
            "layout": row.name,
            "step s": row.median_s / NUM_STEPS,
            "min": min(row.windows_s) / NUM_STEPS,
            "max": max(row.windows_s) / NUM_STEPS,
            "n": len(row.windows_s),
            "times as fast": rows[0].median_s / row.median_s,
        }
        for row in rows
    ]
    print(f"ResNet-18, batch {BATCH_SIZE}, fp32, {torch.get_num_threads()} threads")
    print(tabulate.tabulate(shown, headers="keys", tablefmt="github", floatfmt=".3f"))


if __name__ == "__main__":
    main()
