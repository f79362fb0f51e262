"""The process of torchrun's agent: it starts this node's ranks, and ends the others if one fails.

start_ranks starts it from the fork server, which has imported what the ranks need, and the agent forks them: the
launcher imports no torch.
"""

import logging
import os
import sys

from torch.distributed import DistError, HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing.spawn import ProcessExitedException
from torch.numa.binding import AffinityMode, NumaOptions

from pipeline.runner.failures import RankExit, describe_exception
from pipeline.runner.start_ranks import (
    MASTER_VARIABLE,
    ONE_NODE,
    RENDEZVOUS_TIMEOUT_S,
    NodeLaunch,
    supervise_rank,
)
from pipeline.system.host import name_shared_memory, node_name


def main(launch: NodeLaunch) -> dict[int, RankExit] | str:
    """Run the ranks until all have ended. Return the exits of those that failed, or why they could not be started."""
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(drop_traceback)
    config = AgentConfig(
        min_nodes=launch.num_nodes,
        max_nodes=launch.num_nodes,
        nproc_per_node=launch.num_ranks,
        run_id=launch.id,
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
        **launch.rendezvous,
        logs_specs=DefaultLogsSpecs(str(launch.private)),  # the default is TMPDIR, where nobody would remove them
    )
    try:
        elastic_launch(config, supervise_rank)(os.getpid(), launch.folder, launch.store)
    except ChildFailedError as error:
        return {rank: RankExit(failure.exitcode, failure.timestamp) for rank, failure in error.failures.items()}
    except SignalException as error:
        sys.exit(128 + error.sigval)  # the launcher, which has sent it, waits for no answer
    except DistError as error:
        timed_out = launch.rendezvous["rdzv_backend"] != ONE_NODE and "imed out" in str(error)
        return f"{explain_meeting(config)} ({describe_exception(error)})" if timed_out else describe_exception(error)
    except Exception as error:  # of the store, or a limit of this node
        if isinstance(error, OSError):
            name_shared_memory(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return describe_exception(error)
    return {}


class AgentConfig(LaunchConfig):
    """torchrun's configuration without the default that counts GPUs: a rank forked after that could not use CUDA."""

    def __post_init__(self) -> None:
        """Set the other defaults: torch counts the GPUs only where no options of NUMA are given."""
        self.numa_options = NumaOptions(AffinityMode.NODE)
        LaunchConfig.__post_init__(self)
        self.numa_options = None


def drop_traceback(line: logging.LogRecord) -> bool:
    """Remove the agent's own traceback from its log line about a rank that exited; keep a rank's traceback.

    This is a logging filter: True keeps the line.
    """
    if line.exc_info and isinstance(line.exc_info[1], ProcessExitedException):
        line.exc_info = None
    return True


def explain_meeting(config: LaunchConfig) -> str:
    """Return which node has not met the others, where, and the cure."""
    who = "the other nodes have not come to" if config.rdzv_configs["rank"] == 0 else f"{node_name()} cannot reach"
    return (
        f"{who} {config.rdzv_endpoint} within {RENDEZVOUS_TIMEOUT_S} s; see that no firewall drops the port, or name "
        f"another network by {MASTER_VARIABLE}"
    )


class OneNodeRendezvous(StaticTCPRendezvous):
    """The agent of one node, alone: there is nobody to meet, so it opens no port. The ranks have a store of their own.

    torchrun's own (c10d) listens on every interface and unpickles what it is sent: whoever reached the port ran code
    as the user. On a file store it waits up to 0.3 s at random before it begins, opens a port for a moment, and
    unpickles the file again and again while the ranks measure.
    """

    use_agent_store = False

    def get_backend(self) -> str:
        return ONE_NODE

    def next_rendezvous(self) -> RendezvousInfo:
        no_address = RendezvousStoreInfo("localhost", 0)  # MASTER_ADDR and MASTER_PORT, which no rank reads
        return RendezvousInfo(HashStore(), 0, 1, no_address)


rendezvous_handler_registry.register(ONE_NODE, lambda of: OneNodeRendezvous("localhost", 0, 0, 1, of.run_id, 0))
