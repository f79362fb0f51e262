"""What ranks exchange: it arrives as it was sent, and nothing that arrives runs."""

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from port_attacker import Canary
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn

from pipeline.communication.trace import RankTrace, TracedCollective
from pipeline.experiment.measurement import DeviceMemory, RankEpoch
from pipeline.training import process_group
from pipeline.training.loop import RankEpochSeries


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone_in_a_group")
def test_values_arrive_as_they_were_sent() -> None:
    memory = [DeviceMemory(rank=0, device="cpu", peak_allocated_bytes=2**40, usable_bytes=None)]
    trace = RankTrace([TracedCollective("all_reduce", 516, 0.5, 3.0)], 3, 2, 1)
    assert process_group.all_gather(True, bool) == [True]
    assert process_group.all_gather(0.1 + 0.2, float) == [0.30000000000000004]
    assert process_group.all_gather({"ddp": 2**62}, dict[str, int]) == [{"ddp": 2**62}]
    assert process_group.all_gather(memory, list[DeviceMemory]) == [memory]
    for sent in ((trace, None), (None, "rank 0: no profile")):
        assert process_group.all_gather(sent, tuple[RankTrace | None, str | None]) == [sent]


@pytest.mark.usefixtures("alone_in_a_group")
def test_an_epoch_that_diverged_arrives_with_its_part_times() -> None:
    parts_ns = np.arange(6).reshape(3, 2)
    sent = RankEpochSeries(RankEpoch(rank=0, num_samples=5), parts_ns, [0.5, math.nan, math.inf], [2, 2, 1], 4)
    (found,) = process_group.all_gather(sent, RankEpochSeries)
    assert (found.times, found.sizes, found.num_correct) == (sent.times, [2, 2, 1], 4)
    assert found.parts_ns.dtype == np.int64
    assert found.parts_ns.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert math.isnan(found.losses[1])
    assert found.losses[::2] == [0.5, math.inf]


@pytest.mark.usefixtures("alone_in_a_group")
def test_what_has_no_form_for_other_ranks_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="cannot exchange a Tensor"):
        process_group.all_gather(torch.zeros(1), torch.Tensor)


def gather_beside_an_attacker(rank: int, folder: str) -> None:
    """Gather a value from rank 1, which sends a pickle instead."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    if rank == 0:
        with pytest.raises(msgspec.MsgspecError):
            process_group.all_gather(True, bool)
        Path(folder, "refused").touch()
    else:
        raw = torch.frombuffer(bytearray(Canary(Path(folder, "canary")).pickled()), dtype=torch.uint8)
        process_group.gather_tensors(torch.tensor([len(raw)]))
        process_group.gather_tensors(raw)
    dist.destroy_process_group()


@pytest.mark.training
@pytest.mark.fault("F42")
def test_a_pickle_from_another_rank_is_refused_and_does_not_run(tmp_path: Path) -> None:
    spawn(gather_beside_an_attacker, (str(tmp_path),), 2)
    assert (tmp_path / "refused").exists()
    assert not (tmp_path / "canary").exists()
