"""The rank of a point that measures a user's script: it starts the script under the probe, and leads its blocks.

Each rank runs the script in a process of its own (script_probe), which has nothing of this project in it. The ranks of
a point and their probes meet in a store in the process of rank 0. That process also decides what each block of updates
is: warm-up while something compiles or the allocator takes new memory, then timed blocks until the time is precise
enough. The record calls them epochs: the first is the last block of the warm-up, and each later one a timed block.
"""

import contextlib
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from traceback import FrameSummary
from typing import Any, TypeVar

import msgspec
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from pipeline.figures.exposed_communication import NO_OP, is_communication_precise_enough
from pipeline.figures.stopping_rule import LEAD_IN_STEPS, is_time_precise_enough
from pipeline.plan.point_label import BATCHES
from pipeline.plan.spec import MIN_WINDOWS_FOR_INTERVAL
from pipeline.records.record import Communication, Measurement, ObservedScript, StepSeries, VariantName, short_text
from pipeline.runner.failures import classify, signal_name
from pipeline.runner.launch_options import PYTHONPATH_ROOT
from pipeline.runner.rank_files import PointTask, RankFiles
from pipeline.runner.script_blocks import (
    Block,
    ScriptProblem,
    Timed,
    batch_of,
    build_epoch,
    build_memory,
    check_observed,
    find_mistakes,
    flops_of,
    has_long_updates,
    num_timed_updates,
    num_uneven_updates,
    precision_of,
    takes_a_batch_a_pass,
    transfers_of,
    with_fed_ranks,
    without_left_out,
    without_read_ahead,
)
from pipeline.runner.script_process import WAIT_SIGNAL, ScriptProcess, find_users, line_of
from pipeline.system import host
from pipeline.system.errors import ESCAPE_SEQUENCE, log_line, shorten_list
from pipeline.training.flop_count import FlopCount

PROBE = Path(__file__).with_name("script_probe.py")
PROCESS_GROUP = Path(__file__).parents[1] / "communication" / "process_group.py"
FLOP_COUNTER = Path(__file__).parents[1] / "training" / "flop_counter.py"
POLL_S = 0.005
STORE_TIMEOUT_S = 300
STALL_LIMIT = "DDPSCALE_STALL_S"  # a variable: how long no rank may compute, or a rank may evaluate alone
STALL_LIMIT_S = 300
BLOCK_LIMIT = "DDPSCALE_BLOCK_S"  # likewise: how long the updates of a block may take
BLOCK_LIMIT_S = 3600
TICK_S = 5
MAX_IDLE_SHARE = 0.02  # of a CPU, by a process that waits
STALLED, MEASURED, ENDED = "stalled", "measured", "ended"  # keys of the store
ENOUGH = "enough"  # a key, too: from here on a script that ends by itself is measured
MAX_NAMED_RANKS = MAX_NAMED_SAVES = 4
MAX_WARM_UP_BLOCKS = MAX_REPEATED_BLOCKS = 10
MAX_LEAD_IN_STEPS = LEAD_IN_STEPS + 3
LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
OF_SRUN = {
    "SLURM_PROCID": "RANK",
    "SLURM_LOCALID": "LOCAL_RANK",
    "SLURM_NTASKS": "WORLD_SIZE",
    "SLURM_NPROCS": "WORLD_SIZE",
}
"""Variables by which scripts that srun starts know their rank: srun has started one launcher on each node here."""
WANTS_LAUNCHER = (*LAUNCHER_VARIABLES, "distributed", "process group", "torchrun")
"""Words of an error for want of the variables, or of the line that raises it."""
SERVER = "server"  # key of the file store

T = TypeVar("T")


class ScriptRank:
    """A rank of a script: its process, and on rank 0 the blocks that have been measured."""

    def __init__(self, point: PointTask, rank_files: RankFiles, store: Path | None) -> None:
        self.spec, self.rank_files = point.spec, rank_files
        self.rank, self.world_size = int(os.environ["RANK"]), point.spec.world_size
        self.workdir = point.modules_folder or Path.cwd()
        folder = Path(os.path.realpath(rank_files.folder))
        self.report, self.traces = folder / f"rank{self.rank}.script.json", folder / f"rank{self.rank}.where.txt"
        self.host, self.port, self.store = self.meet(store)
        self.blocks: list[Timed] = []  # the last of the warm-up, then those that are timed
        self.num_blocks = 0  # that have ended
        self.block: dict[str, Any] | None = None  # that runs, after the first one
        self.num_compiled = 0  # of all ranks, up to the end of the last block
        self.num_repeated = 0  # blocks
        self.stall_limit_s = float(os.environ.get(STALL_LIMIT, STALL_LIMIT_S))
        self.block_limit_s = float(os.environ.get(BLOCK_LIMIT, BLOCK_LIMIT_S))
        self.ticked_s = self.block_began_s = time.monotonic()
        self.advanced_s = self.ticked_s  # when the last rank computed, or a block ended
        self.num_oom_kills = host.num_oom_kills()
        self.busy_s, self.stalled_block = 0.0, -1
        self.last_line = ""  # that the script printed
        self.is_timed = False
        no_op = str(NO_OP.get(self.spec.strategy))
        self.variants: list[VariantName] = [self.spec.strategy, f"{self.spec.strategy}_again", no_op]
        self.windows: dict[VariantName, list[Timed]] = {variant: [] for variant in self.variants}
        self.order: list[VariantName] = []  # that are left in this round
        self.variant: VariantName = ""  # of the block that runs
        self.random = random.Random(0)
        self.reads_by_passes = self.is_uneven = False
        self.num_uneven = 0  # of the blocks, with an update that is far longer than the others
        self.has_launcher_variables = self.world_size > 1

    def meet(self, store: Path | None) -> tuple[str, int, Store]:
        """Return host, port and client of the store of this point, which lives in the process of rank 0."""
        timeout = timedelta(seconds=STORE_TIMEOUT_S)
        if store is None and self.world_size > 1:  # several nodes: torchrun's agent has said where
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            return address, port, TCPStore(address, port, is_master=self.rank == 0, timeout=timeout)
        address = "127.0.0.1"
        if self.rank == 0:
            server = TCPStore(address, 0, is_master=True, timeout=timeout)
            if store is not None:
                FileStore(str(store), self.world_size).set(SERVER, str(server.port))
            return address, server.port, server
        port = int(FileStore(str(store), self.world_size).get(SERVER))
        return address, port, TCPStore(address, port, is_master=False, timeout=timeout)

    def gather(self, value: T, kind: type[T], name: str) -> list[T]:
        """Return the values of all ranks, in their order. All ranks must call it."""
        self.store.set(f"{name}/{self.rank}", msgspec.json.encode(value).decode())
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        return [msgspec.json.decode(self.store.get(key), type=kind) for key in keys]

    def leave(self) -> None:
        """Let rank 0 know that this rank no longer needs the store, which ends with rank 0. Rank 0 waits for all."""
        self.store.set(f"left/{self.rank}", "")
        if self.rank == 0:
            self.store.wait([f"left/{rank}" for rank in range(self.world_size)])

    # the process

    def run(self) -> None:
        """Run the script until it is measured. Raises ScriptProblem."""
        exit_code = self.run_once()
        if not self.has_launcher_variables and self.needs_launcher_variables():
            log_line("the script needs the variables of torchrun: it starts again with them")
            self.has_launcher_variables = True
            exit_code = self.run_once()
        if self.store.check([MEASURED]):  # it may end as it likes
            return
        if not self.store.check([ENOUGH]) or self.read_report().get("exit") != 0:
            raise self.explain_exit(exit_code)
        self.wait_for_others()

    def wait_for_others(self) -> None:
        """Wait until the script has ended by itself on all ranks. Raises ScriptProblem."""
        self.store.set(f"{ENDED}/{self.rank}", "")
        try:
            keys = [f"{ENDED}/{rank}" for rank in range(self.world_size)]
            self.store.wait(keys, timedelta(seconds=self.stall_limit_s))
        except RuntimeError as error:
            late = shorten_list([*map(str, self.late_ranks(ENDED))], MAX_NAMED_RANKS)
            problem = f"rank {late} has not ended {self.stall_limit_s:g} s after rank {self.rank}"
            raise ScriptProblem(f"{problem}; let all ranks step alike", "timeout") from error

    def run_once(self) -> int:
        """Run the script in a new process, and return its exit code."""
        config = {"host": self.host, "port": self.port, "rank": self.rank, "report": str(self.report)}
        config["warmup_updates"] = self.spec.warmup_updates
        config["root"], config["update_by"] = str(PYTHONPATH_ROOT), self.spec.update_by
        is_communication = self.spec.measure == "communication"
        config["process_group"] = str(PROCESS_GROUP) if is_communication else None
        config["flop_counter"] = str(FLOP_COUNTER)
        config["traces"], config["wait_signal"] = str(self.traces), WAIT_SIGNAL
        self.report.unlink(missing_ok=True)
        command = [sys.executable, "-u", str(PROBE), json.dumps(config), *self.spec.script_command.words]
        process = ScriptProcess(command, self.workdir, self.environment(), self.traces)
        try:
            while process.poll() is None:
                if self.rank == 0:
                    self.lead()
                if time.monotonic() - self.ticked_s > TICK_S:
                    self.watch(process)
                    self.ticked_s = time.monotonic()
                time.sleep(POLL_S)
        finally:
            exit_code = process.end()
            self.last_line = process.last_line()
        return exit_code

    def environment(self) -> dict[str, str]:
        """Return the variables that the script would have under torchrun; a single process has those of the user.

        It sees as many GPUs as the configuration has: trainers take all that they see, with DataParallel if need be.
        """
        environ = dict(os.environ)
        environ |= self.spec.script_command.variables
        num_gpus = self.spec.gpus_per_node if self.spec.device == "cuda" else 0
        shown = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus)))).split(",")
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(shown[:num_gpus])
        environ.pop("PYTHONSAFEPATH", None)
        folders = environ.pop("PYTHONPATH", "").split(os.pathsep)
        if users := [folder for folder in folders if folder and folder != str(PYTHONPATH_ROOT)]:
            environ["PYTHONPATH"] = os.pathsep.join(users)
        environ |= {"MASTER_ADDR": self.host, "MASTER_PORT": str(self.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        environ |= {name: environ[own] for name, own in OF_SRUN.items() if name in environ and own in environ}
        if not self.has_launcher_variables:
            for name in [name for name in environ if name in LAUNCHER_VARIABLES or name.startswith("TORCHELASTIC_")]:
                del environ[name]
        return environ

    def read_report(self) -> dict[str, Any]:
        """Return why the script ended early; empty if it did not say."""
        return dict(json.loads(self.report.read_bytes())) if self.report.exists() else {}

    def needs_launcher_variables(self) -> bool:
        """True if the script failed before its first update, and its error may be for want of variables of torchrun."""
        report = self.read_report()
        said = " ".join([report.get("text", ""), *report.get("lines", ())])
        return not report.get("updates") and any(word in said for word in WANTS_LAUNCHER)

    def explain_exit(self, exit_code: int) -> ScriptProblem:
        """Return why the script gave no measurement, with the last line that it printed."""
        report, name = self.read_report(), self.spec.model
        after = f"after {report.get('updates') or 0} updates"
        said = f'; its last line is "{self.last_line}"' if self.last_line else ""
        if exit_code < 0:
            is_kill = -exit_code == signal.SIGKILL
            is_oom = is_kill and host.num_oom_kills() > self.num_oom_kills
            hint = ": its memory limit is reached" if is_oom else ", often for want of host memory" * is_kill
            cure = "; lower the batch, or ask for more memory" * is_kill
            killed = f"{name} was killed by {signal_name(-exit_code)}{hint}{cure}{said}"
            return ScriptProblem(killed, "host_oom" if is_oom else "signal")
        if not report:
            return ScriptProblem(
                f"{name} left its process (os._exit or exec, exit code {exit_code}) before it was measured{said}",
                "exit",
            )
        if "types" in report:
            names, text = set(report["types"]), ESCAPE_SEQUENCE.sub("", report["text"])
            kind = classify(names, text, uses_gpu=self.spec.device == "cuda", did_allocator_refuse=lambda: False)
            own = find_users(FrameSummary(*one, lookup_line=False) for one in report["frames"])
            place = f" (at {line_of(own)} in {own.name})" if own else ""
            if report["unsaved"]:
                after += (
                    f"; while its collectives are silent {report['unsaved'][0]} writes nothing: turn checkpoints off"
                )
            return ScriptProblem(f"{report['types'][0]}: {text.partition(chr(10))[0]}{place}, {after}\n{text}", kind)
        if report["exit"]:
            return ScriptProblem(f"{name} exited with {report['exit']} {after}{report['text']}{said}", "exit")
        if report["updates"] is None:
            return ScriptProblem(f"{name} ended and never imported torch{said}", "exit")
        if not report["updates"]:
            why = "no optimizer of torch made a step in its process; train in the process that is started, "
            why += "with updates left to make, and call ddpscale.update() after one that no optimizer of torch makes"
            if stepped := report["optimizers"]:
                numbered = ", ".join(f"{number} {one}" for number, one in enumerate(stepped, 1))
                why = f"update_by={self.spec.update_by} is none of its optimizers, {numbered}; name one of them"
            return ScriptProblem(f"{name} ended and no update was seen: {why}{said}")
        return ScriptProblem(f"{name} ended {after}, too few to time; {self.updates_cure(report['updates'])}{said}")

    def updates_cure(self, num_updates: int) -> str:
        """Return how a script can be measured that makes so few updates."""
        warm_up = self.blocks[0].ranks[0].updates if self.is_timed else 2 * self.spec.warmup_updates
        num_series = len(self.variants) if self.spec.measure == "communication" else 1
        windows = min(MIN_WINDOWS_FOR_INTERVAL, self.spec.windows)
        each = (num_updates - warm_up) // (windows * num_series) - MAX_LEAD_IN_STEPS
        return "give the script more data or epochs" + f", or measure less: --updates {each * windows}" * (each > 0)

    # the blocks, on rank 0

    def lead(self) -> None:
        """Answer the probes, if all ranks have reported their block. Raises ScriptProblem."""
        if self.late_ranks(self.block_key):
            return
        keys = [f"{self.block_key}/{rank}" for rank in range(self.world_size)]
        ranks = [msgspec.json.decode(self.store.get(key), type=Block) for key in keys]
        ranks = with_fed_ranks(ranks)
        if self.num_blocks == 1:  # in the first one a stream fills its buffer
            self.reads_by_passes = takes_a_batch_a_pass(self.spec, ranks[0])
        if self.reads_by_passes:
            ranks = [without_read_ahead(block) for block in ranks]
        reported = Timed(without_left_out(ranks))
        self.block = self.next_block(reported)
        if self.block is None:
            self.store.set(MEASURED, "")
        self.store.set(f"{self.block_key}/order", json.dumps(self.block))
        self.num_blocks += 1

    @property
    def block_key(self) -> str:
        """The key below which each rank reports the end of the block."""
        return f"ddpscale/{self.num_blocks}"

    def late_ranks(self, key: str) -> list[int]:
        """Return the ranks that have reported nothing below this key."""
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        return [] if self.store.check(keys) else [rank for rank, key in enumerate(keys) if not self.store.check([key])]

    def watch(self, process: ScriptProcess) -> None:
        """Tell the other ranks whether this one computes, and where it waits if one asks.

        Raises ScriptProblem on a rank whose collective does not end, and on rank 0 if no block ends.
        """
        self.store.set(f"busy/{self.rank}", str(process.busy_s()))
        if hung := process.hung_collective():
            places = self.find_places(range(self.world_size), process)
            raise ScriptProblem(f"{hung}: {places}; let all ranks call the same collectives", "timeout")
        if self.store.check([STALLED]):
            self.store.set(f"where/{self.rank}", process.waits_in())
        if self.rank != 0:
            return
        late, now_s = self.late_ranks(self.block_key), time.monotonic()
        keys = [f"busy/{rank}" for rank in range(self.world_size)]
        busy_s = sum(float(self.store.get(key)) for key in keys) if self.store.check(keys) else math.inf
        has_computed = busy_s - self.busy_s > MAX_IDLE_SHARE * TICK_S * self.world_size
        is_even = len(late) in (0, self.world_size)
        if self.stalled_block != self.num_blocks:
            self.advanced_s = self.block_began_s = now_s
            self.stalled_block = self.num_blocks
        elif is_even and has_computed:
            self.advanced_s = now_s
        self.busy_s = busy_s
        is_stalled = now_s - self.advanced_s > self.stall_limit_s
        if is_stalled or now_s - self.block_began_s > self.block_limit_s:
            raise self.explain_stall(late, process, is_stalled)

    def find_places(self, ranks: Sequence[int], process: ScriptProcess) -> str:
        """Return the line of the script in which each of these ranks is, if it answers. `process` is this rank's."""
        self.store.set(STALLED, "")
        self.store.set(f"where/{self.rank}", process.waits_in())
        keys = {rank: f"where/{rank}" for rank in ranks}
        with contextlib.suppress(RuntimeError):  # a rank does not answer
            self.store.wait(list(keys.values()), timedelta(seconds=4 * TICK_S))
        found = {rank: self.store.get(key).decode() for rank, key in keys.items() if self.store.check([key])}
        return shorten_list([f"rank {rank} is at {place}" for rank, place in found.items()], MAX_NAMED_RANKS)

    def explain_stall(self, late: Sequence[int], process: ScriptProcess, is_stalled: bool) -> ScriptProblem:
        """Return why no block ends, with the line of the script in which each late rank is."""
        places = self.find_places(late, process)
        names = shorten_list(list(map(str, late)), MAX_NAMED_RANKS)
        if not is_stalled:
            return ScriptProblem(
                f"the script computes, and a block of updates has not ended in {self.block_limit_s:g} s, after "
                f"{self.num_blocks} blocks: {places}; let an optimizer of torch step in this process, not in one "
                "that the script starts (leave its option for processes out), or call ddpscale.update(); "
                f"{BLOCK_LIMIT} sets another limit, and fewer warmup_updates make a shorter block",
                "timeout",
            )
        limit = f"{self.stall_limit_s:g} s"
        if len(late) < self.world_size:
            return ScriptProblem(
                f"rank {names} has made fewer updates than the others for {limit}: let all ranks step alike; {places}"
            )
        return ScriptProblem(f"no rank has computed for {limit}: {places}; {STALL_LIMIT} sets another limit", "timeout")

    def next_block(self, reported: Timed) -> dict[str, Any] | None:
        """Return the block that follows this one; None if the script may end."""
        if self.num_blocks == 1:
            check_observed(self.spec, reported.ranks[0])
        before, self.num_compiled = self.num_compiled, sum(block.activity[0] for block in reported.ranks)
        if not self.is_timed:
            was_quiet = bool(self.blocks) and self.activity_of(self.blocks[0]) == self.activity_of(reported)
            self.blocks[:] = [reported]
            if not was_quiet and self.num_blocks + 1 < MAX_WARM_UP_BLOCKS:
                return {"lead_in": 0, "updates": self.spec.warmup_updates, "mode": "real"}
            self.is_timed, self.num_uneven = True, int(has_long_updates(reported))
        elif self.num_compiled != before and self.num_repeated < MAX_REPEATED_BLOCKS:
            self.num_repeated += 1
            log_line("something was compiled in a timed block, which is repeated")
            return self.block
        elif self.variant:
            self.windows[self.variant].append(reported)
        else:
            self.blocks.append(reported)
            self.num_uneven += has_long_updates(reported)
            is_early = self.num_uneven > 1 and self.num_rounds < MIN_WINDOWS_FOR_INTERVAL
            if is_early and not self.is_uneven and self.has_longer_windows():
                log_line("some updates are far longer than the others: longer windows begin anew")
                self.is_uneven = True
                del self.blocks[1:]
        if self.num_rounds >= MIN_WINDOWS_FOR_INTERVAL:
            self.store.set(ENOUGH, "")
        return self.next_round() if self.spec.measure == "communication" else self.next_window()

    def has_longer_windows(self) -> bool:
        """True if windows for uneven updates would be twice as long as the last one, at least."""
        num_updates: int = self.block["updates"] if self.block else 0
        return num_uneven_updates(self.spec, num_updates) >= 2 * num_updates

    @property
    def num_rounds(self) -> int:
        """The rounds that have ended: timed blocks, or blocks of every variant."""
        is_communication = self.spec.measure == "communication"
        return min(map(len, self.windows.values())) if is_communication else len(self.blocks) - 1

    def next_window(self) -> dict[str, Any] | None:
        """Return the next timed block; None if the time is precise enough."""
        self.log_block()
        times = [block.update_ns for block in self.blocks[1:]]
        num_updates = sum(len(block.ranks[0].steps) for block in self.blocks[1:])
        most = min(MIN_WINDOWS_FOR_INTERVAL, self.spec.windows) if self.is_uneven else self.spec.windows
        is_enough = len(times) >= most or num_updates >= self.spec.updates
        if is_enough or is_time_precise_enough(times):
            return None
        return self.timed_block(min(block.update_ns for block in self.blocks), "real")

    def next_round(self) -> dict[str, Any] | None:
        """Return the next block of a round, which has one of each variant in a random order; None if it is enough."""
        if not self.order:
            if self.num_rounds:
                log_line(f"round {self.num_rounds} of {self.spec.windows}")
                if self.num_rounds >= self.spec.windows or is_communication_precise_enough(self.communication()):
                    return None
            self.order = list(self.variants)
            self.random.shuffle(self.order)
        self.variant = self.order.pop()
        mode = "silent" if self.variant == self.variants[-1] else "real"
        return self.timed_block(self.blocks[0].update_ns, mode)

    def timed_block(self, update_ns: float, mode: str) -> dict[str, Any]:
        """Return an order for a block. What comes every few updates would fall into all lead-ins of one length."""
        lead_in = self.random.randint(LEAD_IN_STEPS, MAX_LEAD_IN_STEPS)
        num_updates = num_timed_updates(self.spec, update_ns)
        if self.is_uneven:
            num_updates = num_uneven_updates(self.spec, num_updates)
        return {"lead_in": lead_in, "updates": num_updates, "mode": mode}

    def communication(self) -> Communication:
        """Return the windows of each variant in the rounds that have ended, and what rank 0 sends in an update."""
        rounds = {variant: found[: self.num_rounds] for variant, found in self.windows.items() if self.num_rounds}
        series = [
            StepSeries(
                variant=variant,
                window_times_ns=tuple(tuple(block.time for block in window.ranks) for window in windows),
            )
            for variant, windows in rounds.items()
        ]
        first = self.blocks[0].ranks[0]
        last = self.windows[self.variants[0]][-1].ranks[0] if series else first
        transfers, notes = transfers_of(first)
        saves = shorten_list([f"{what} ({count})" for what, count in last.skipped], MAX_NAMED_SAVES)
        if saves:
            notes.append(f"not saved, since a step without collectives changes the weights: {saves}")
        return Communication(
            steps_per_window=num_timed_updates(self.spec, self.blocks[0].update_ns),
            series=tuple(series),
            transfers=tuple(transfers),
            notes=tuple(notes),
            mistakes=tuple(find_mistakes(self.spec, first, transfers)),
        )

    def activity_of(self, reported: Timed) -> list[list[int]]:
        return [block.activity for block in reported.ranks]

    def log_block(self) -> None:
        """Write a line to the log, from which `submit` reads the progress."""
        number, last = len(self.blocks), self.blocks[-1]
        update = f"{last.update_ns / 1e6:.4g} ms an update"
        log_line(f"window {number} of {self.spec.epochs}: {last.time_ns / 1e9:.4g} s, {update}")

    def measurement(self) -> Measurement:
        """Return what the blocks have measured."""
        spec, last, is_communication = self.spec, self.blocks[-1], self.spec.measure == "communication"
        seen = last.ranks[0].seen
        size, batches = batch_of(self.blocks[0].ranks[0])  # as checked; a timed block may cross the end of the data
        flops = FlopCount() if is_communication else flops_of(spec, last.ranks[0])
        merit = next((block.ranks[0].merit for block in reversed(self.blocks) if block.ranks[0].merit), None)
        return Measurement(
            epochs=()
            if is_communication
            else tuple(build_epoch(number, block, spec) for number, block in enumerate(self.blocks, 1)),
            communication=self.communication() if is_communication else None,
            num_parameters=seen["num_parameters"] or None,
            gradient_bytes=seen["gradient_bytes"] or None,
            memory=tuple(build_memory(rank, block.memory) for rank, block in enumerate(last.ranks)),
            precision_used=precision_of(seen["number_type"]),
            num_threads=seen["num_threads"],
            execution_used="compile" if seen["is_compiled"] else "eager",
            unit=short_text(last.ranks[0].unit) or (BATCHES if spec.counts_batches and size != 1 else "samples"),
            merit=short_text(merit[1]) if merit else None,
            flops_per_sample=flops.per_sample,
            flops_note=flops.note,
            better="lower" if merit and merit[2] == "lower" else "higher",
            script=ObservedScript(
                command=tuple(spec.script_command.words),
                world_size=seen["world_size"],
                backend=seen["backend"],
                wrappers=tuple(map(short_text, seen["wrappers"])),
                optimizers=tuple(map(short_text, seen["optimizers"])),
                batch_size=size,
                batches_per_update=batches,
                parameter_type=seen["parameter_type"],
                autocast=seen["autocast"],
                is_compiled=seen["is_compiled"],
                num_warm_up_updates=self.blocks[0].ranks[0].updates,
                has_launcher_variables=self.has_launcher_variables,
            ),
        )
