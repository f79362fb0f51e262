"""Runs a user's training script and times its updates. Started in place of the script, in a process of its own.

    python script_probe.py CONFIG SCRIPT ARGUMENTS...      CONFIG is JSON: see run_once() of script_rank
    python script_probe.py CONFIG -m MODULE ARGUMENTS...

It imports nothing of this project, so that it shadows no module of the user's, and torch only after the script has done
so, because a script may set variables first. An update is a step of an optimizer: torch calls a hook for each. A step
that a GradScaler skips counts, too, so that all ranks count alike, and so does each replay of a captured one. The
script runs in blocks of updates. After each one the ranks wait until their devices are idle, and report to the rank
process of the launcher, which answers with the next block or the end (script_rank). Nothing synchronizes within a
block.
"""

import contextlib
import dataclasses
import faulthandler
import gc
import importlib.util
import io
import itertools
import json
import math
import os
import runpy
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from importlib.machinery import ModuleSpec
from typing import Any

MAX_OTHER_STEPS = 50  # then the counted optimizer has been replaced
MAX_UNCOUNTED_STEPS = 1000  # of other optimizers, or backward passes without one, before the first update
MAX_PARTS = 100  # of a batch, and of a list in it, in which its size is looked for
AMPERE = (8, 0)  # the first GPUs with TF32
COMPILED = ("torch._dynamo.eval_frame", "OptimizedModule")
EXIT_LIMIT_S = 30  # for what the script does after its end
STORE_TIMEOUT_S = 1800  # until the other ranks end their block


Source = tuple[int | bool, ...]
"""The ids of a data set and of what draws from it, and whether gradients are computed where the batch is fetched."""


class Enough(BaseException):
    """Ends the script after its last update. No `except Exception` catches it."""


class NoUpdate(BaseException):
    """Ends a script without the optimizer that counts: it has others, or none of torch."""


@dataclasses.dataclass
class Capture:
    """The steps, backward passes and collectives of a CUDA graph, which each replay makes."""

    parts: list[Any]  # optimizers that step, and None for a backward pass
    num_collectives: int


class Probe:
    """Counts and times the updates of this rank. torch is the module, imported by the script."""

    def __init__(self, torch: Any, config: Mapping[str, Any]) -> None:
        self.torch, self.rank, self.update_by = torch, config["rank"], config["update_by"]
        timeout = timedelta(seconds=STORE_TIMEOUT_S)
        self.store = torch.distributed.TCPStore(config["host"], config["port"], is_master=False, timeout=timeout)
        self.device: Any = None  # of the parameters, on a GPU
        self.optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # and their numbers
        self.optimizer_names: list[str] = []  # of all that have stepped, also of those that are gone
        self.counted: int | None = None  # the optimizer whose steps are updates
        self.steps: list[int] = []  # the optimizers whose steps run now, the outermost first
        self.num_updates = self.num_steps = 0
        self.num_passes_since_step = 0  # backward ones, since an optimizer stepped: others have passes of their own
        self.num_all_passes = 0  # of all optimizers, since the start of a block's timed part
        self.num_passes_uncounted = 0  # of these, before the update whose FLOPs are counted
        self.num_others: Counter[int] = Counter()  # steps since the last update, by optimizer
        self.fetched: dict[Source, Counter[int]] = {}  # batches since the last update, by source: others evaluate
        self.source: Source = ()  # from which the last batch came: that of the training, at an update
        self.sources: list[Any] = []  # of the batches since the last update, which keep their ids while they are here
        self.num_passes_before = 0  # before the first batch of this source
        self.autocast: Counter[str] = Counter()
        self.unit = ""
        self.merit: tuple[float | None, str, str] | None = None  # the last one
        self.turn = 0
        self.has_ended = self.is_skipping = self.is_child = False
        os.register_at_fork(after_in_child=self.leave_child)
        path = config["process_group"]
        self.controller = load_module("ddpscale_process_group", path).install() if path else None
        self.flop_counter_path = config["flop_counter"]
        self.counter: Any = None  # of FLOPs, while it counts
        self.flops: list[Any] | None = None  # of an update, as script_blocks.Block has them
        self.flops_by_type: Counter[tuple[str, bool]] = Counter()  # as FlopCounter has them
        self.is_in_optimizer = False  # that computes no gradients
        self.num_closure_passes = 0  # backward ones, within the step that runs now
        self.repeats_passes = False  # an optimizer within its step, for the same samples
        self.has_new_batch = False  # since the last pass that was counted
        self.capturing: list[Any] | None = None  # the parts of a capture that is under way
        self.captures: weakref.WeakKeyDictionary[Any, Capture] = weakref.WeakKeyDictionary()  # by CUDA graph
        self.num_replayed = 0  # collectives
        self.skipped: Counter[str] = Counter()  # saves, by what was to be written, the first one first
        self.is_silenced = False  # from the first silent update on, after which the weights are not those of a training
        self.begin_block({"lead_in": 0, "updates": max(2, config["warmup_updates"]), "mode": "real"})

    # what torch calls

    def before_step(self, optimizer: Any, *words: Any) -> None:
        """Note the start of an optimizer's step, and whether it computes gradients by a closure."""
        if id(optimizer) in self.steps and not is_within_step(optimizer):  # an earlier one has failed
            self.steps.clear()
            self.num_closure_passes = 0
        self.steps.append(id(optimizer))
        self.number_of(optimizer)
        if len(self.steps) == 1 and self.counted in (None, id(optimizer)):
            self.step_started = self.mark()
        self.is_in_optimizer = not any(callable(word) for word in (*words[0][1:], *words[1].values()))

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Count an update if this is the end of the outermost step of the counted optimizer."""
        while self.steps and self.steps.pop() != id(optimizer):  # one within it has failed
            pass
        if not self.steps:
            self.is_in_optimizer = False
            self.num_steps += 1
            is_new = self.has_new_batch or not self.num_passes_since_step
            if self.num_closure_passes == 1 and is_new:  # the pass of a batch, as of Lightning
                self.count_pass()
            self.repeats_passes = self.repeats_passes or self.num_closure_passes > 1
            self.num_closure_passes = 0
            self.end_update(optimizer)

    def end_update(self, optimizer: Any) -> None:
        """Count an update of the first optimizer that has ended one, and end the block after its last."""
        if self.is_child:
            return
        if self.capturing is not None:
            self.capturing.append(optimizer)
            return
        num_passes, self.num_passes_since_step = self.num_passes_since_step, 0
        self.num_others[id(optimizer)] += 1
        is_gone = all(id(one) != self.counted for one in (*self.optimizers, self))
        is_replaced = self.num_others[id(optimizer)] > MAX_OTHER_STEPS and self.counted != id(self)
        if (is_gone or is_replaced) and self.may_count(optimizer):
            self.counted = id(optimizer)
        if id(optimizer) != self.counted:
            if self.counted is None and self.num_others.total() > MAX_UNCOUNTED_STEPS:
                raise NoUpdate
            return
        self.num_others.clear()
        self.num_updates += 1
        self.left -= 1
        self.count_flops()
        mark = self.mark()
        self.num_passes += num_passes
        self.sizes += self.fetched.pop(self.source, Counter())
        for source, sizes in self.fetched.items():
            self.other_sizes += sizes if source[-1] else Counter()  # without gradients it is an evaluation
        self.fetched.clear()
        self.sources.clear()
        if self.left > self.block["updates"]:
            return
        if self.left == self.block["updates"]:
            self.start_clock(mark)
        else:
            self.marks.append(mark)
            if self.step_started is not None:
                self.optimizer_marks.append((self.step_started, mark))
        if self.left == 0:
            self.end_block()

    def count_flops(self) -> None:
        """Begin to count FLOPs before the last update of the first block, and end it after that one.

        What a script has compiled would run in parts there, and so would what has modes of its own: these do not count.
        Neither does a script that replays CUDA graphs, in which no operation is seen.
        """
        if self.counter is not None:
            items = sum(map(float, self.items)) if self.items else None
            sizes = sorted(self.fetched.get(self.source, Counter()).items())
            num_passes = self.num_all_passes - self.num_passes_uncounted
            self.flops = [self.counter.flops, items, sorted(self.counter.without_formula), sizes, num_passes]
            self.flops_by_type = self.counter.flops_by_type
            self.stop_counter()
        is_before_last = self.turn == 0 and self.left == 1 and not self.captures
        if is_before_last and not self.activity()[0] and not self.torch._C._len_torch_dispatch_stack():
            self.items.clear()
            self.num_passes_uncounted = self.num_all_passes
            counter = load_module("ddpscale_flop_counter", self.flop_counter_path)
            self.counter = counter.FlopCounter(is_paused=lambda: self.is_in_optimizer or self.is_skipping)
            self.stance = self.torch.compiler.set_stance("force_eager")  # for what is first compiled now
            self.torch._C._push_on_torch_dispatch_stack(self.counter)

    def leave_child(self) -> None:
        """Count nothing in a forked child, which has the connection of this process to the launcher."""
        self.is_child = True
        self.stop_counter()

    def stop_counter(self) -> None:
        """Leave the counter of FLOPs, and keep the modes that the script has entered since."""
        if self.counter is None:
            return
        stack = self.torch._C
        modes = [stack._pop_torch_dispatch_stack(None) for _ in range(stack._len_torch_dispatch_stack())]
        for mode in reversed([mode for mode in modes if mode is not self.counter]):
            stack._push_on_torch_dispatch_stack(mode)
        self.stance.__exit__(None, None, None)
        self.counter = None

    def may_count(self, optimizer: Any) -> bool:
        """True if the steps of this optimizer may be updates: of any one, or of the one that the user names."""
        return self.update_by in (None, type(optimizer).__name__, str(self.number_of(optimizer)))

    def number_of(self, optimizer: Any) -> int:
        """Return the number of an optimizer, in the order of their first steps. Note one that is new."""
        if optimizer not in self.optimizers:
            self.optimizer_names.append(type(optimizer).__name__)
            self.optimizers[optimizer] = len(self.optimizer_names)
        return self.optimizers[optimizer]

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for data, unless another thread than that of the training waits."""
        started_ns, before = time.perf_counter_ns(), self.mark()
        try:
            yield
        finally:
            if threading.current_thread() is threading.main_thread():
                self.wait_ns += time.perf_counter_ns() - started_ns
                self.waits.append((before, self.mark()))

    def begin_epoch(self, begin: Callable[[Any], Any], loader: Any) -> Any:
        """Return the loader's iterator; note how long its workers take to start."""
        if self.is_skipping:
            return begin(loader)
        with self.waiting():
            return begin(loader)

    def next_batch(self, fetch: Callable[[Any], Any], iterator: Any) -> Any:
        """Return the loader's next batch; note its size, and how long host and device wait for it."""
        if self.is_skipping:
            return fetch(iterator)
        with self.waiting():
            batch = fetch(iterator)
        self.has_new_batch = True
        source = self.begin_source(iterator._dataset, iterator._index_sampler)
        size = None
        with contextlib.suppress(Exception):  # of a class of the user's
            size = size_of(batch, self.torch.Tensor, getattr(iterator, "num_asked", None))
        if size is not None:
            self.fetched.setdefault(source, Counter())[size] += 1  # which an update in another thread may have cleared
        return batch

    def next_index(self, draw: Callable[[Any], Any], iterator: Any) -> Any:
        """Return what the loader fetches next; note the most samples of which it was asked to make a batch."""
        index = draw(iterator)
        if iterator._auto_collation and hasattr(index, "__len__"):
            iterator.num_asked = max(getattr(iterator, "num_asked", 0), len(index))
        return index

    def begin_source(self, *loader: Any) -> Source:
        """Return the source of a batch of this loader, and note it.

        What was computed without gradients since the last batch of another source was an evaluation if no backward pass
        was among it. Its FLOPs do not count.
        """
        source = (*map(id, loader), self.torch.is_grad_enabled())
        if source not in self.fetched:
            self.sources.append(loader)
        if source == self.source:
            return source
        if self.counter is not None:
            if self.num_all_passes == self.num_passes_before:
                self.counter.flops_by_type -= self.counter.without_grad
            self.counter.without_grad.clear()
        self.source, self.num_passes_before = source, self.num_all_passes
        return source

    def pass_back(self, backward: Callable[..., Any], *words: Any, **named: Any) -> Any:
        """Run a backward pass and count it: not one inside of another (checkpoints), nor beside others in a step."""
        if self.torch._C._current_graph_task_id() == -1 and not self.is_skipping:
            if self.steps:
                self.num_closure_passes += 1
            else:
                self.count_pass()
        return backward(*words, **named)

    def count_pass(self) -> None:
        """Count a backward pass, or note it in the CUDA graph that captures it."""
        if self.capturing is not None:
            self.capturing.append(None)
            return
        self.num_passes_since_step += 1
        self.num_all_passes += 1
        self.has_new_batch = False
        if self.counted is None and self.num_all_passes == MAX_UNCOUNTED_STEPS and not self.has_optimizer():
            raise NoUpdate

    def has_optimizer(self) -> bool:
        """True if the script has made an optimizer of torch: it may step later."""
        return bool(instances_of(self.torch.optim.Optimizer))

    def begin_capture(self, begin: Callable[..., None], graph: Any, *words: Any, **named: Any) -> None:
        """Begin to note what a CUDA graph captures. Nothing of it runs before a replay."""
        begin(graph, *words, **named)
        self.capturing, self.num_before_capture = [], self.num_collectives() or 0
        if self.controller is not None:  # which counts only some blocks
            self.counts_before_capture, self.controller.counts = self.controller.counts, Counter()

    def end_capture(self, end: Callable[[Any], None], graph: Any) -> None:
        """End the capture, which may have failed, and keep its passes and the last step of each optimizer.

        Raises RuntimeError for collectives that must be silenced, since a replay repeats them.
        """
        parts, self.capturing = self.capturing or [], None
        num_collectives = (self.num_collectives() or 0) - self.num_before_capture
        if self.controller is not None:
            num_collectives = sum(self.calls().values())
            self.controller.counts = self.counts_before_capture
        end(graph)
        kept = [part for place, part in enumerate(parts, 1) if part is None or part not in parts[place:]]
        self.captures[graph] = Capture(kept, num_collectives)
        if self.controller is not None and num_collectives:
            raise RuntimeError(
                "a CUDA graph has captured collectives, and nothing can silence them; do not capture them"
            )

    def replay(self, replay: Callable[[Any], None], graph: Any) -> None:
        """Replay a CUDA graph, and count what it has captured."""
        replay(graph)
        capture = self.captures.get(graph, Capture([], 0))
        self.num_replayed += capture.num_collectives
        for optimizer in capture.parts:
            if optimizer is None:
                self.count_pass()
            else:
                self.step_started = None  # it is not known when within the graph
                self.end_update(optimizer)

    def scaled_step(self, step: Callable[..., Any], scaler: Any, optimizer: Any, *words: Any, **named: Any) -> Any:
        """Let a GradScaler step. A step that it skips is an update, too: the other ranks may not skip theirs."""
        before = self.num_steps
        self.step_started = self.mark()
        result = step(scaler, optimizer, *words, **named)
        if self.num_steps == before:
            self.num_steps += 1
            self.number_of(optimizer)
            self.end_update(optimizer)
        return result

    def save(self, save: Callable[..., Any], what: str, words: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Call a function that writes weights; from the first silent update on skip it, if it would write a file."""
        values = [*words, *named.values()]
        opened = [value.name for value in values if isinstance(value, io.IOBase) and hasattr(value, "name")]
        named_paths = [value for value in values if isinstance(value, str | os.PathLike)]
        paths = [os.path.basename(str(path)) for path in (*named_paths, *opened)]
        if self.is_silenced and (paths or what != "torch.save"):
            self.skipped[" ".join([what, *paths[:1]])] += 1
            saved: Future[None] = Future()  # a script waits for that of async_save; the others return nothing
            saved.set_result(None)
            return saved
        return save(*words, **named)

    # what the script says, by the words of ddpscale.py

    def add_items(self, count: Any, unit: str) -> None:
        """Add what the rank has trained on. A tensor is read after the block, when nothing has to wait for it."""
        self.items.append(count)
        self.unit = unit

    def count_items(self) -> float | None:
        """Return what the rank has trained on in a block, if the script says so. Raises ValueError for no count."""
        count = sum(map(float, self.items)) if self.items else None
        if count is not None and not 0 < count < math.inf:
            raise ValueError(f"ddpscale.items() has counted {count:g} in a block of updates; give numbers above 0")
        return count

    def mark_update(self) -> None:
        """Count an update; the steps of optimizers no longer count."""
        self.counted = id(self)
        self.step_started = None
        self.end_update(self)

    @contextlib.contextmanager
    def skip(self) -> Iterator[None]:
        """Leave out the update in which the body runs, and the batches that it takes."""
        self.is_skipping = True
        try:
            yield
        finally:
            self.is_skipping = False
            self.left_out.add(len(self.marks) - 1)

    def note_merit(self, value: float, name: str, better: str) -> None:
        """Note a figure of merit for the record."""
        figure = float(value)
        self.merit = (figure if math.isfinite(figure) else None, name, better)

    # time

    def mark(self) -> Any:
        """Return a mark of now on the timeline of the device: an event; on the CPU, and in a capture, a time in ns."""
        if self.device is None or self.capturing is not None:
            return time.perf_counter_ns()
        event = self.torch.cuda.Event(enable_timing=True)
        event.record(self.torch.cuda.current_stream(self.device))
        return event

    def between_ns(self, first: Any, last: Any) -> int:
        """Return the time between two marks. The device has reached both, unless the first is of before it was used."""
        if isinstance(first, int) or isinstance(last, int):
            return last - first if isinstance(first, int) and isinstance(last, int) else 0
        return int(first.elapsed_time(last) * 1e6)

    def start_clock(self, mark: Any) -> None:
        """Begin the timed part of a block, after its first updates."""
        self.marks, self.wait_ns, self.started_unix_ns = [mark], 0, time.time_ns()
        self.items: list[Any] = []
        self.left_out: set[int] = set()  # steps of this block
        self.optimizer_marks: list[tuple[Any, Any]] = []
        self.waits: list[tuple[Any, Any]] = []
        self.sizes: Counter[int] = Counter()
        self.other_sizes: Counter[int] = Counter()  # of batches of a second loader
        self.num_passes = self.num_all_passes = self.num_passes_before = 0
        self.collectives_before = self.num_collectives()

    # blocks

    def begin_block(self, block: Mapping[str, Any]) -> None:
        """Begin a block of updates: `lead_in` of them are not timed, `updates` are."""
        self.block, self.left = block, block["lead_in"] + block["updates"]
        self.num_known = len(self.optimizer_names)  # optimizers of earlier blocks
        if self.controller is not None:
            self.controller.set_mode(block["mode"])
            self.controller.counts = None if block["lead_in"] else Counter()  # of the warm-up
            self.is_silenced = self.is_silenced or block["mode"] == "silent"
        self.step_started = self.mark()
        self.start_clock(self.mark())

    def end_block(self) -> None:
        """Report the block to the launcher, and begin the next one or end the script."""
        self.synchronize()
        if not self.block["lead_in"]:  # in the warm-up, since it looks at every object
            self.seen = self.describe()
        order = self.exchange(self.report_block())
        if order is None:
            self.end()
        else:
            self.begin_block(order)

    def exchange(self, report: Mapping[str, Any]) -> Any:
        """Give a report to the launcher, and return its answer once all ranks have reported."""
        self.store.set(f"ddpscale/{self.turn}/{self.rank}", json.dumps(report))
        order = json.loads(self.store.get(f"ddpscale/{self.turn}/order"))
        self.turn += 1
        return order

    def synchronize(self) -> None:
        """Wait until the device is idle. After the first updates also find which device that is."""
        cuda = self.torch.cuda
        if self.device is None and cuda.is_available() and cuda.is_initialized():
            places = [parameter.device for parameter in self.parameters() if parameter.device.type == "cuda"]
            self.device = places[0] if places else self.torch.device("cuda", cuda.current_device())
        if self.device is not None:
            cuda.synchronize(self.device)

    def report_block(self) -> dict[str, Any]:
        """Return what a block has measured. All times are in ns."""
        of_device = [self.between_ns(*pair) for pair in self.waits]
        return {
            "time": self.between_ns(self.marks[0], self.marks[-1]),
            "steps": [self.between_ns(*pair) for pair in zip(self.marks, self.marks[1:])],  # noqa: B905
            "optimizer": sum(self.between_ns(*pair) for pair in self.optimizer_marks) if self.optimizer_marks else None,
            "wait": self.wait_ns if self.waits else None,
            "data": sum(of_device) if of_device else None,
            "sizes": sorted(self.sizes.items()),
            "other_sizes": sorted(self.other_sizes),
            "passes": self.num_passes,
            "all_passes": self.num_all_passes,
            "items": self.count_items(),
            "unit": self.unit,
            "left_out": sorted(self.left_out),
            "merit": self.merit,
            "started": self.started_unix_ns,
            "updates": self.num_updates,
            "activity": self.activity(),
            "calls": [[*call[:3], call.in_backward, n] for call, n in self.calls().items()],
            "flops": self.flops,
            "skipped": list(self.skipped.items()),
            "seen": self.seen,
            "memory": self.memory(),
        }

    def calls(self) -> Mapping[Any, int]:
        """Return the number of each collective in this block, if they are counted."""
        counts = self.controller.counts if self.controller is not None else None
        return {call: count for call, count in (counts or {}).items() if call.num_ranks > 1}  # others send nothing

    def num_collectives(self) -> int | None:
        """Return the collectives that this rank has called, as its groups number them; None if one does not."""
        dist = self.torch.distributed
        groups = dist.distributed_c10d._world.pg_map if dist.is_initialized() else ()
        try:
            called = sum(int(group._get_sequence_number_for_group()) for group in groups)
        except (AttributeError, RuntimeError):
            return None
        return called + self.num_replayed

    def collectives_of_block(self) -> int | None:
        """Return how many collectives this rank has called in this block; None if it is not known."""
        if self.controller is not None:
            return sum(self.calls().values())
        before, now = self.collectives_before, self.num_collectives()
        return None if before is None or now is None else now - before

    def activity(self) -> list[int]:
        """Return counts that grow while something compiles or the allocator takes new memory."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        compiled = sum(sum(found.values()) for found in dynamo.counters.values()) if dynamo else 0
        statistics = self.torch.cuda.memory_stats(self.device) if self.device is not None else {}
        return [compiled, statistics.get("segment.all.allocated", 0)]

    def end(self) -> None:
        """End the script: at once, or by force if it goes on."""
        self.has_ended = True
        ending = threading.Timer(EXIT_LIMIT_S, os._exit, (0,))
        ending.daemon = True
        ending.start()
        raise Enough

    # what is seen

    def parameters(self) -> list[Any]:
        """Return the parameters of the optimizers that stepped in earlier blocks, each once; in the first one of all.

        What a script makes anew for some steps, as meta learning does, is no part of the model.
        """
        known = [one for one, number in self.optimizers.items() if number <= self.num_known]
        groups = (group["params"] for one in known or self.optimizers for group in one.param_groups)
        return list({id(parameter): parameter for group in groups for parameter in group}.values())

    def describe(self) -> dict[str, Any]:
        """Return what the script does, as seen from here."""
        dist = self.torch.distributed
        dtypes: Counter[str] = Counter()
        for parameter in self.parameters():
            dtypes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
        modules = instances_of(self.torch.nn.Module, is_wrapper)
        kinds = {name for one in modules for name in names_of(type(one))}
        names = {type(one).__name__ for one in self.optimizers}
        wrappers = sorted(name for module, name in kinds if spreads_model(module, name))
        if any(type(parameter).__name__ == "DTensor" for parameter in self.parameters()):
            wrappers = wrappers or ["DTensor"]
        shards = num_shards(modules)
        types = (self.autocast, sharded_types(modules), dtypes)
        autocast, sharded_type, parameter_type = (one.most_common(1)[0][0] if one else None for one in types)
        return {
            "world_size": dist.get_world_size() if dist.is_initialized() else 1,
            "backend": dist.get_backend() if dist.is_initialized() else None,
            "collectives": self.collectives_of_block(),
            "wrappers": wrappers,
            "optimizers": sorted(names),
            "num_parameters": sum(dtypes.values()) * shards,
            "gradient_bytes": sum(p.numel() * p.element_size() for p in self.parameters() if p.requires_grad) * shards,
            "parameter_type": parameter_type,
            "autocast": autocast,
            "repeats_passes": self.repeats_passes,
            "number_type": self.number_type(autocast or sharded_type or parameter_type or ""),
            "replays_graphs": bool(self.captures),
            "is_compiled": COMPILED in kinds or self.activity()[0] > 0,
            "num_threads": self.torch.get_num_threads(),
        }

    def number_type(self, expected: str) -> str:
        """Return the type of numbers in which most FLOPs are computed; `expected` where there are none.

        Where nothing was counted, fp32 parameters do not tell: a script may cast them itself. Then it is "".
        """
        if self.flops is None and expected == "float32":
            return ""
        by_type = self.flops_by_type or Counter({(expected, False): 1})
        number_type, is_convolution = by_type.most_common(1)[0][0]
        return "tf32" if number_type == "float32" and self.rounds_to_tf32(is_convolution) else number_type

    def rounds_to_tf32(self, is_convolution: bool) -> bool:
        """True if this GPU rounds fp32 numbers to TF32 in convolutions, or in matrix products."""
        if self.device is None or self.torch.cuda.get_device_capability(self.device) < AMPERE:
            return False
        backends = self.torch.backends
        part = backends.cudnn.conv if is_convolution else backends.cuda.matmul
        return bool(part.fp32_precision == "tf32")

    def memory(self) -> dict[str, Any]:
        """Return the peak memory of this rank, in bytes; on the CPU that of the process."""
        if self.device is None:
            with open("/proc/self/status") as file:
                peak = next(line for line in file if line.startswith("VmHWM:"))
            return {"device": "cpu", "allocated": int(peak.split()[1]) * 1024}
        cuda = self.torch.cuda
        return {
            "device": str(self.device),
            "allocated": cuda.max_memory_allocated(self.device),
            "reserved": cuda.max_memory_reserved(self.device),
            "usable": cuda.mem_get_info(self.device)[0] + cuda.memory_reserved(self.device),
            "retries": cuda.memory_stats(self.device).get("num_alloc_retries", 0),
        }


def instances_of(base: type, is_wanted: Callable[[type], bool] = lambda kind: True) -> list[Any]:
    """Return the objects of a class and its subclasses, of those that are wanted.

    A list of all objects would hold a tuple that another thread still builds, as the one that pins memory does: Python
    ends that thread with an error.
    """
    kinds, waiting = {base}, [base]
    while waiting:
        found: set[type] = set(type.__subclasses__(waiting.pop())) - kinds
        kinds |= found
        waiting += found
    wanted = tuple(filter(is_wanted, kinds))
    return [one for one in gc.get_referrers(*wanted) if issubclass(type(one), wanted)]


def names_of(kind: type) -> list[tuple[str, str]]:
    """Return the module and the name of a class and of each that it inherits from."""
    return [(base.__module__, base.__name__) for base in kind.__mro__]


def is_wrapper(kind: type) -> bool:
    """True for a class that spreads or compiles a model."""
    return any(name == COMPILED or spreads_model(*name) for name in names_of(kind))


def spreads_model(module: str, name: str) -> bool:
    """True for a class that spreads a model over ranks."""
    of_torch = module.startswith("torch.") and name in ("DistributedDataParallel", "FullyShardedDataParallel")
    return of_torch or (module.startswith("torch.distributed.") and name == "FSDPModule") or name == "DeepSpeedEngine"


def sharded_types(modules: Sequence[Any]) -> Counter[str]:
    """Return the types of numbers in which FSDP gives parameters to its modules, where it casts them."""
    policies = [one._get_fsdp_state()._mp_policy for one in modules if hasattr(one, "_get_fsdp_state")]  # FSDP2
    policies += [getattr(one, "mixed_precision", None) for one in modules]  # FSDP1
    found = [getattr(policy, "param_dtype", None) for policy in policies]
    return Counter(str(one).removeprefix("torch.") for one in found if one is not None)


def num_shards(modules: Sequence[Any]) -> int:
    """Return the number of ranks over which FSDP1 spreads parameters; the shards may hold some numbers of padding.

    FSDP2 gives parameters their whole size, FSDP1 that of this rank's shard.
    """
    first = [one for one in modules if type(one).__name__ == "FullyShardedDataParallel"]
    return max((one.world_size for one in first if one.sharding_strategy.name != "NO_SHARD"), default=1)


def is_within_step(optimizer: Any) -> bool:
    """True if a step of this optimizer calls its step: that of a subclass does."""
    frame: Any = sys._getframe()
    num_steps = 0
    while frame is not None:
        is_step = frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == "torch.optim.optimizer"
        if is_step and frame.f_locals.get("self") is optimizer:
            num_steps += 1
        frame = frame.f_back
    return num_steps > 1


def size_of(batch: Any, tensor: Any, num_asked: int | None = None) -> int | None:
    """Return the samples of a batch: the first dimension of its first array, or the number that it states.

    If another part is as long as the loader was asked to make it, that counts: then the first array holds parts of
    samples, such as their boxes, or the channels of one. None for none of these.
    """
    first = None
    for size, is_size in itertools.islice(sizes_in(batch, tensor), MAX_PARTS):
        if size == num_asked and size > 1:
            return size
        if is_size and first is None:
            first = size
            if num_asked is None:
                break
    return first


def sizes_in(batch: Any, tensor: Any, is_whole: bool = True) -> Iterator[tuple[int, bool]]:
    """Yield the length of each part of a batch, and if that is a size by itself: of an array, of texts, or stated.

    Packed sequences state the size at each place, graphs their number. Of the whole batch a list of tensors has no
    length that counts, since these are images and labels, say.
    """
    if isinstance(batch, tensor):
        if batch.ndim:
            yield int(batch.size(0)), True
        return
    for stated in ("num_graphs", "batch_sizes", "shape"):
        found = getattr(batch, stated, None)
        if isinstance(found, tensor | tuple) and len(found):
            found = found[0]
        if isinstance(found, int | tensor):
            yield int(found), True
            return
    if dataclasses.is_dataclass(batch):
        batch = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if isinstance(batch, list | tuple):
        is_text = bool(batch) and all(isinstance(part, str) for part in batch)
        if not (is_whole and any(isinstance(part, tensor) for part in batch)):
            yield len(batch), is_text
        if all(isinstance(part, int | float | str) for part in batch[:MAX_PARTS]):
            return
    if isinstance(batch, Mapping | list | tuple):
        for part in list(batch.values() if isinstance(batch, Mapping) else batch)[:MAX_PARTS]:
            yield from sizes_in(part, tensor, False)
    elif hasattr(type(batch), "__len__") and not isinstance(batch, str | bytes):
        with contextlib.suppress(TypeError):  # an array of one number has none
            yield len(batch), True


def install(torch: Any, config: Mapping[str, Any]) -> Probe:
    """Set the hooks of a probe in torch, which the script has just imported."""
    import torch.utils.data.dataloader as dataloader
    from torch.amp.autocast_mode import autocast
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import optimizer

    probe = Probe(torch, config)
    hidden: Any = torch._disable_dynamo  # from the compiler of a script that compiles its optimizer's step
    optimizer.register_optimizer_step_pre_hook(hidden(lambda *words: probe.before_step(*words)))
    optimizer.register_optimizer_step_post_hook(hidden(lambda *words: probe.after_step(*words)))
    iterator: Any = dataloader._BaseDataLoaderIter
    loader: Any = dataloader.DataLoader
    scaler: Any = GradScaler
    region: Any = autocast
    fetch, step, enter, backward = iterator.__next__, scaler.step, region.__enter__, torch.autograd.backward
    begin, draw = loader.__iter__, iterator._next_index
    graph: Any = torch.cuda.CUDAGraph
    begin_capture, end_capture, replay = graph.capture_begin, graph.capture_end, graph.replay
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]  # torch.distributed has a function of that name
    create_store = rendezvous._create_c10d_store

    def enter_autocast(own: Any) -> Any:
        if probe.turn == 0 and own._enabled:
            probe.autocast[str(own.fast_dtype).removeprefix("torch.")] += 1
        return enter(own)

    def meet(host: str, port: int, *words: Any, **named: Any) -> Any:
        if port != config["port"]:  # the script's own: there rank 0 listens, and no launcher
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        return create_store(host, port, *words, **named)

    rendezvous._create_c10d_store = meet
    loader.__iter__ = lambda own: probe.begin_epoch(begin, own)
    iterator.__next__ = lambda own: probe.next_batch(fetch, own)
    iterator._next_index = lambda own: probe.next_index(draw, own)
    scaler.step = lambda own, *words, **named: probe.scaled_step(step, own, *words, **named)
    region.__enter__ = enter_autocast
    graph.capture_begin = lambda own, *words, **named: probe.begin_capture(begin_capture, own, *words, **named)
    graph.capture_end = lambda own: probe.end_capture(end_capture, own)
    graph.replay = lambda own: probe.replay(replay, own)
    torch.autograd.backward = lambda *words, **named: probe.pass_back(backward, *words, **named)  # of a tensor, too
    skip_saves(probe, torch, ["save"])
    words: Any = probe
    sys.modules["_ddpscale_probe"] = words  # of ddpscale.py
    return probe


def load_module(name: str, path: str) -> Any:
    """Return the module in a file of this project that needs torch alone."""
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


SAVES = {
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save", "save_state_dict"),
    "safetensors.torch": ("save_file", "save_model"),
}
"""The modules that write weights, beside torch, and their functions."""


def skip_saves(probe: Probe, module: Any, names: Sequence[str]) -> None:
    """Let the probe skip these functions of a module, which the script has just imported."""
    for name in names:
        save = getattr(module, name, None)
        if save is not None:
            what = f"{module.__name__.removesuffix('.state_dict_saver')}.{name}"
            setattr(
                module, name, lambda *words, _save=save, _what=what, **named: probe.save(_save, _what, words, named)
            )


class ImportWatch:
    """Finds modules as Python does, and calls a function with each of some modules once the script has imported it."""

    def __init__(self, then: Mapping[str, Callable[[Any], object]]) -> None:
        self.then = dict(then)
        self.searched = ""  # the module that the other finders look for

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Return the module spec of a watched module; None for others. A search need not lead to an import."""
        if name not in self.then or name == self.searched:
            return None
        self.searched = name
        try:
            found = importlib.util.find_spec(name)
        finally:
            self.searched = ""
        if found is not None and found.loader is not None:
            loader: Any = found.loader
            execute = loader.exec_module

            def execute_then(module: Any) -> None:
                execute(module)
                if then := self.then.pop(name, None):
                    then(module)

            loader.exec_module = execute_then
        return found


def run_script(words: Sequence[str]) -> None:
    """Run the script as Python would: `train.py ARGUMENTS`, or `-m package.train ARGUMENTS`."""
    if words[0] == "-m":
        sys.argv = list(words[1:])
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return the names of an error's types, its text, and its frames and their lines, the innermost first."""
    found = traceback.extract_tb(error.__traceback__)[::-1]
    frames, lines = [(one.filename, one.lineno, one.name) for one in found], [one.line for one in found]
    types = [kind.__name__ for kind in type(error).__mro__]
    return {"types": types, "text": str(error), "frames": frames, "lines": lines}


def say_why(error: BaseException | None) -> dict[str, Any]:
    """Return the report of a script that ended, by itself or by an error, before it was measured."""
    if error is None or isinstance(error, NoUpdate) or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return {"exit": 0}
    if isinstance(error, SystemExit):
        is_code = isinstance(error.code, int)
        return {"exit": error.code if is_code else 1, "text": "" if is_code else f": {error.code}"}
    return describe_error(error)


def main() -> None:
    """Run the script under a probe, and leave a report of why it ended early, if it did."""
    config, words = json.loads(sys.argv[1]), sys.argv[2:]
    traces = open(config["traces"], "a")  # noqa: SIM115 it stays open
    # a signal writes the stack of this thread, also where it waits in C++
    faulthandler.register(config["wait_signal"], traces, all_threads=False)
    probes: list[Probe] = []

    def watch_saves(module: Any) -> None:
        skip_saves(probes[0], module, SAVES[module.__name__])

    watched: dict[str, Callable[[Any], object]] = dict.fromkeys(SAVES, watch_saves)
    sys.meta_path.insert(0, ImportWatch({**watched, "torch": lambda torch: probes.append(install(torch, config))}))
    found: BaseException | None = None
    sys.path.append(config["root"])  # for `import ddpscale`, behind all that the user has
    try:
        run_script(words)
    except BaseException as error:
        found = error
    has_ended = bool(probes) and probes[0].has_ended
    if not has_ended:
        if found is not None and not isinstance(found, SystemExit | NoUpdate):
            traceback.print_exception(found)
        updates = probes[0].num_updates if probes else None
        stepped = probes[0].optimizer_names if probes else []
        unsaved = list(probes[0].skipped) if probes else []
        report = {"updates": updates, "optimizers": stepped, "unsaved": unsaved, **say_why(found)}
        with open(config["report"], "w") as file:
            json.dump(report, file)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0 if has_ended else 1)


if __name__ == "__main__":
    main()
