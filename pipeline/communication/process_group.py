"""A process group that counts, silences or delays every collective of a training that does not change.

It needs torch alone. Use:

    controller = install()                    # before the training wraps its model
    dist.init_process_group("nccl")           # as always; so are new_group, DeviceMesh, device_id, "cuda:nccl,cpu:gloo"
    controller.set_mode("silent")             # or "real", or "delay", delay_s=0.002, delay_s_per_byte=0.0
    controller.set_mode("silent", but=(DDP_MODULE,))  # what this module calls stays real: the buffers of DDP
    with controller.counting() as calls: ...  # calls: Counter[Call]; call.collective, .num_bytes, .stays_real
    controller.delayed_s()                    # sum of this rank's delays since it was last asked

Every group, also one that exists already, becomes a MeasuredGroup around the group that torch makes of NCCL or Gloo; a
model that was wrapped before keeps the old one. The backend keeps its name (`dist.get_backend()`), its options and its
watchdog. A mode holds for all groups of the process from the next call on. Set it between updates, on all ranks at the
same one.

"silent": a collective returns at once, and its result is finite and of usual size. Reductions in place keep the rank's
own value, as a no-op hook of DDP does; a gather has the rank's own part in every place, a reduce-scatter the rank's own
value of its part. What is written there is the one cost that stays.

Some collectives stay real in "silent", on all ranks alike, with the reason in `stays_real`: those whose result the host
is likely to read, since ranks would part ways or fail (integers: sizes, counts, pickled objects; single numbers: norms,
logged losses, a scaler's flag), and those that leave no own value to stand in (point to point, scatter, parts whose
sizes differ). Integer buffers of DDP are silent: the host does not read them. DDP rebuilds its buckets in its second
update, by integers of rank 0: let it run a few updates before a mode changes.

"delay": on GPUs a kernel sleeps on the stream before the collective. An asynchronous call has a stream of its own for
that, so what overlaps the collective also overlaps its delay; a synchronous one holds its caller's stream, as NCCL
does. On the CPU a thread sleeps, then calls. Delays of a group follow each other, as on one link, also where FSDP
gathers on one stream and scatters on another. Barriers and `recv` are not delayed.
"""

import concurrent.futures
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work, _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d
from torch.futures import Future

Mode = Literal["real", "silent", "delay"]
Fill = Callable[[int, int, Any, Any], object]  # takes: rank, size, the first two arguments of a call

CALIBRATION_CYCLES = 20_000_000  # about 10 ms of a GPU
C10D_MODULES = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")
WRAPPING_MODULES = ("torch._compile", "torch._dynamo.eval_frame", "typing_extensions", "warnings")
"""Modules whose frames stand around what is not to be compiled, or is deprecated."""
BACKWARD_CALLERS = ("torch.autograd.graph", "")
DDP_MODULE, DDP_BUFFERS = "torch.nn.parallel.distributed", "_distributed_broadcast_coalesced"
SYNC_BATCHNORM_MODULE = "torch.nn.modules._functions"


class Call(NamedTuple):
    """A collective. `num_bytes`: of a gather the output, of every other operation the input.

    `caller` is the module that called torch.distributed; BACKWARD_CALLERS stand for C++ in a backward pass, such as the
    reducer of DDP.
    """

    collective: str
    num_bytes: int
    stays_real: str = ""  # why it is real when others are silent
    caller: str = ""
    in_backward: bool = False  # called while a backward pass runs
    num_ranks: int = 0  # of its group


class Controller:
    """Tells all groups of this process what to do, and counts their calls. Only set_mode() changes `mode`."""

    def __init__(self) -> None:
        self.mode: Mode = "real"
        self.counts: Counter[Call] | None = None
        self.but: Collection[str] = ()
        self._delay_s = self._delay_s_per_byte = 0.0
        self._cycles_per_s = 0.0
        self._delays: list[Callable[[], float]] = []

    def set_mode(
        self, mode: Mode, delay_s: float = 0.0, delay_s_per_byte: float = 0.0, but: Collection[str] = ()
    ) -> None:
        """Change the mode of the next calls. A delay is `delay_s` + `delay_s_per_byte` x bytes of the call.

        Calls of the modules `but` are not silent. On GPUs "delay" waits for the device, to measure the clock that
        counts the delay.
        """
        self._delay_s, self._delay_s_per_byte, self.but = delay_s, delay_s_per_byte, but
        if mode == "delay" and torch.cuda.is_available():
            torch.cuda.synchronize()
            self._cycles_per_s = CALIBRATION_CYCLES / measure_sleep(CALIBRATION_CYCLES)()
        self.mode = mode

    @contextlib.contextmanager
    def in_mode(self, mode: Mode, *how: Any, **named: Any) -> Iterator[None]:
        """Enter a mode, as set_mode() does; the block ends in "real"."""
        self.set_mode(mode, *how, **named)
        try:
            yield
        finally:
            self.set_mode("real")

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counter[Call]]:
        """Yield the number of each call of this rank while the block runs."""
        before, self.counts = self.counts, Counter()
        try:
            yield self.counts
        finally:
            self.counts = before

    def delayed_s(self) -> float:
        """Return the sum of the delays since the last call of this function; on GPUs it waits for the device."""
        if self._cycles_per_s:
            torch.cuda.synchronize()
        total = sum(length() for length in self._delays)
        self._delays.clear()
        return total

    def pause(self, num_bytes: int, device: torch.device) -> None:
        """Sleep as long as a call of so many bytes is delayed: the current stream of a GPU, or this thread."""
        seconds = self._delay_s + self._delay_s_per_byte * num_bytes
        if device.type == "cuda":
            self._delays.append(measure_sleep(round(seconds * self._cycles_per_s)))
            return
        started = time.perf_counter()
        time.sleep(seconds)
        length = time.perf_counter() - started
        self._delays.append(lambda: length)


def measure_sleep(cycles: int) -> Callable[[], float]:
    """Keep the current stream busy. Return a function that waits until it is over, and gives its length in s."""
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started.record()
    torch.cuda._sleep(cycles)
    ended.record()

    def length_s() -> float:
        ended.synchronize()
        return float(started.elapsed_time(ended)) / 1e3

    return length_s


def flatten(tensors: Any) -> list[Tensor]:
    """Return the tensors of nested lists."""
    if isinstance(tensors, Tensor):
        return [tensors]
    return [part for tensor in tensors for part in flatten(tensor)] if isinstance(tensors, list | tuple) else []


def keep(rank: int, size: int, tensors: Any, others: Any) -> None:
    """Leave the rank's own value."""


def fill_gathered(rank: int, size: int, output: Any, own: Any) -> None:
    """Write the rank's own part into every place of a gather's output, for each tensor of lists."""
    if isinstance(output, Tensor) and isinstance(own, Tensor):
        places, flat = output.view(size, -1), own.reshape(-1)
        places[:rank].copy_(flat)
        places[rank + 1 :].copy_(flat)
        if places[rank].data_ptr() != flat.data_ptr():  # FSDP gathers in place
            places[rank].copy_(flat)
    elif isinstance(own, Tensor):
        torch._foreach_copy_(list(output), [own] * len(output))
    else:
        for one_output, one in zip(output, own, strict=bool(output)):
            fill_gathered(rank, size, one_output, one)


def fill_scattered(rank: int, size: int, output: Any, whole: Any) -> None:
    """Write the rank's own value of its part into a reduce-scatter's output, for each tensor of lists."""
    if isinstance(output, Tensor):
        part = whole.view(size, -1)[rank] if isinstance(whole, Tensor) else whole[rank]
        output.copy_(part.view_as(output))
    else:
        for one_output, one in zip(output, whole, strict=True):
            fill_scattered(rank, size, one_output, one)


def fill_exchanged(rank: int, size: int, output: Any, own: Any) -> None:
    """Write what the rank sends into what it receives, of an all-to-all of equal parts."""
    output.view(-1).copy_(own.reshape(-1))


NO_OWN_VALUE = "the receiver has no value of its own"
METHODS: dict[
    str, tuple[str, Fill | str]
] = {  # of a ProcessGroup -> the collective; what a silent one does, or why not
    "allreduce": ("all_reduce", keep),
    "allreduce_coalesced": ("all_reduce", keep),
    "allgather": ("all_gather", fill_gathered),
    "allgather_coalesced": ("all_gather", "its lists are by rank"),
    "allgather_into_tensor_coalesced": ("all_gather", fill_gathered),
    "_allgather_base": ("all_gather", fill_gathered),
    "all_gather_single": ("all_gather", fill_gathered),  # of later torch
    "reduce_scatter": ("reduce_scatter", fill_scattered),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", fill_scattered),
    "_reduce_scatter_base": ("reduce_scatter", fill_scattered),
    "reduce_scatter_single": ("reduce_scatter", fill_scattered),
    "broadcast": ("broadcast", keep),
    "reduce": ("reduce", keep),
    "gather": ("gather", fill_gathered),
    "alltoall_base": ("all_to_all", fill_exchanged),
    "alltoall": ("all_to_all", "its parts may differ in size"),
    "scatter": ("scatter", NO_OWN_VALUE),
    "send": ("send", NO_OWN_VALUE),
    "recv": ("recv", NO_OWN_VALUE),
    "recv_anysource": ("recv", NO_OWN_VALUE),
    "barrier": ("barrier", "it orders the ranks"),
}
NOT_DELAYED = ("barrier", "recv")


def find_caller() -> tuple[str, str]:
    """Return the module and the function that called torch.distributed."""
    frame: FrameType | None = sys._getframe(1).f_back  # None in a thread of C++, such as that of a backward pass
    while frame is not None and frame.f_globals.get("__name__") in (*C10D_MODULES, *WRAPPING_MODULES):
        frame = frame.f_back
    return (str(frame.f_globals.get("__name__")), frame.f_code.co_name) if frame is not None else ("", "")


def describe_call(
    collective: str, fill: Fill | str, args: Sequence[Any], caller: tuple[str, str] = ("", ""), num_ranks: int = 0
) -> Call:
    """Return the call with its bytes, and with the reason if it stays real: the same on all ranks."""
    stays_real = "" if caller == (DDP_MODULE, DDP_BUFFERS) else why_real(collective, fill, args)
    in_backward = torch._C._current_graph_task_id() != -1 or caller[0] in BACKWARD_CALLERS
    return Call(collective, measure_bytes(collective, args), stays_real, caller[0], in_backward, num_ranks)


def measure_bytes(collective: str, args: Sequence[Any]) -> int:
    """Return the bytes of a call: of a gather the output, of every other operation the input."""
    first, second = tensors_of(args)
    return sum(map(bytes_of, second if second and collective != "all_gather" else first))


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor, of a sparse one those of its indices and values."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def tensors_of(args: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors of the first two arguments: of a call out of place the output and the input."""
    return flatten(args[0]) if args else [], flatten(args[1]) if len(args) > 1 else []


def why_real(collective: str, fill: Fill | str, args: Sequence[Any]) -> str:
    """Return why a call stays real, the same on all ranks; "" if it can be silent."""
    if isinstance(fill, str):
        return fill
    first, second = tensors_of(args)
    own = second or first
    if not all(tensor.is_floating_point() or tensor.is_complex() for tensor in own):
        return "integers, which the host may read"
    if sum(tensor.numel() for tensor in own) <= 1:
        return "a single number, which the host may read"
    has_places = len(first) != len(second) and collective in ("all_gather", "reduce_scatter", "gather")
    if has_places and len({tensor.shape for tensor in [*first, *second]}) > 1 and not isinstance(args[0], Tensor):
        return "its parts differ in size"
    if collective == "all_to_all" and any(len(split) for split in args[2:4]):
        return "its parts may differ in size"
    return ""


class MeasuredGroup(dist.ProcessGroup):
    """A process group around another one, whose collectives do what the controller says."""

    def __init__(self, inner: dist.ProcessGroup, controller: Controller) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner, self._controller = inner, controller
        self._side: torch.cuda.Stream | None = None
        self._after: torch.cuda.Event | None = None  # the last delayed collective of a GPU
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "delayed collectives")
        self._last: concurrent.futures.Future[None] | None = None  # the last one that was given to the thread
        for device in inner._device_types:
            backend = inner._get_backend(device)
            kind = dist.Backend.backend_type_map.get(backend.name(), dist.ProcessGroup.BackendType.CUSTOM)
            self._register_backend(device, kind, backend)
            self._set_default_backend(kind)
        if inner.bound_device_id is not None:
            self.bound_device_id = inner.bound_device_id

    def getBackendName(self) -> str:
        return str(self.inner.name())

    def get_group_store(self) -> Any:
        return self.inner.get_group_store()

    def split_group(self, *args: Any, **keywords: Any) -> "MeasuredGroup | None":
        found = self.inner.split_group(*args, **keywords)
        return None if found is None else MeasuredGroup(found, self._controller)

    def shutdown(self) -> None:
        self._drain()
        self._thread.shutdown()
        super().shutdown()

    def _drain(self) -> None:
        """Wait for the collectives that the thread has not called yet: the order is the same on all ranks."""
        if self._last is not None:
            self._last.result()
            self._last = None

    def _call(self, name: str, call: Call, fill: Fill | str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        controller = self._controller
        is_silent = controller.mode == "silent" and not call.stays_real and call.caller not in controller.but
        if is_silent and not isinstance(fill, str):
            with torch.no_grad():
                fill(self.rank(), self.size(), args[0], args[1] if len(args) > 1 else None)
            return completed(args[0])
        method = getattr(self.inner, name)
        if controller.mode == "delay" and call.collective not in NOT_DELAYED:
            return self._delayed(method, call.num_bytes, args, keywords)
        self._drain()
        return method(*args, **keywords)

    def _delayed(self, method: Any, num_bytes: int, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        tensors = flatten(args)
        device = tensors[0].device if tensors else torch.device("cpu")
        if device.type == "cpu":
            return self._called_later(method, num_bytes, args, keywords)
        current = torch.cuda.current_stream(device)
        stream = current
        if getattr(keywords.get("opts", args[-1]), "asyncOp", True):
            self._side = stream = self._side or torch.cuda.Stream(device)
            stream.wait_stream(current)
        with torch.cuda.stream(stream):
            if self._after is not None:
                stream.wait_event(self._after)
            self._controller.pause(num_bytes, device)
            work = method(*args, **keywords)
            self._after = stream.record_event()
        for tensor in tensors:
            tensor.record_stream(stream)
        return work

    def _called_later(self, method: Any, num_bytes: int, args: tuple[Any, ...], keywords: dict[str, Any]) -> Work:
        future: Future[Any] = Future()
        is_grad_enabled = torch.is_grad_enabled()  # a thread has its own

        def call() -> None:
            try:
                self._controller.pause(num_bytes, torch.device("cpu"))
                with torch.set_grad_enabled(is_grad_enabled):
                    work = method(*args, **keywords)
                if work is not None:
                    work.wait()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(args[0])

        self._last = self._thread.submit(call)
        return WaitingWork(future)


class WaitingWork(Work):
    """The work of a future, whose wait() raises its error: that of _create_work_from_future() does not."""

    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: Any = None) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> Future[Any]:
        return self._future


def completed(result: Any) -> Work:
    """Return the work of a collective that is over, in the order of the current stream."""
    tensors = flatten(result)
    on_gpu = bool(tensors) and tensors[0].device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    future: Future[Any] = Future(devices=[tensors[0].device]) if on_gpu else Future()
    future.set_result(result)
    work: Work = _create_work_from_future(future)
    return work


def forward(name: str, collective: str, fill: Fill | str) -> Callable[..., Any]:
    """Return the method of that name for MeasuredGroup. Where a compiled model calls it, Dynamo would trace it."""

    # torch.compiler.disable() imports Dynamo at once, before a script has set its variables
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def method(self: MeasuredGroup, *args: Any, **keywords: Any) -> Any:
        call = describe_call(collective, fill, args, find_caller(), self.size())
        counts = self._controller.counts
        if counts is not None:
            counts[call] += 1
        return self._call(name, call, fill, args, keywords)

    return method


for method_name, (collective, fill) in METHODS.items():
    setattr(MeasuredGroup, method_name, forward(method_name, collective, fill))


def measure_group(group: dist.ProcessGroup, controller: Controller) -> MeasuredGroup:
    """Put a MeasuredGroup in the place of a group of torch, wherever torch looks it up. Return it."""
    c10d: Any = distributed_c10d
    world, name = c10d._world, group.group_name
    measured = MeasuredGroup(group, controller)
    for table in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag):
        table[measured] = table.pop(group)
    if group in world.pg_group_ranks:  # it existed before install(): who holds it goes on with it
        world.pg_group_ranks[measured] = world.pg_group_ranks[group]
    for groups in world.tags_to_pg.values():
        groups[:] = [measured if one is group else one for one in groups]
    if world.default_pg is group:
        world.default_pg = measured
    c10d._unregister_process_group(name)
    c10d._register_process_group(name, measured)
    return measured


installed: Controller | None = None


def install() -> Controller:
    """Let every process group of this process be measured. Return the controller, the same in each call."""
    global installed
    if installed is not None:
        return installed
    controller = installed = Controller()
    c10d: Any = distributed_c10d
    for group in list(c10d._world.pg_map):
        measure_group(group, controller)
    make_group = c10d._new_process_group_helper

    def make_measured_group(*args: Any, **keywords: Any) -> Any:
        group, store = make_group(*args, **keywords)
        is_new = isinstance(group, dist.ProcessGroup) and not isinstance(group, MeasuredGroup)
        return measure_group(group, controller) if is_new else group, store

    c10d._new_process_group_helper = make_measured_group
    return controller
