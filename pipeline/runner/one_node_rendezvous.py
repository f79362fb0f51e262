"""The rendezvous of torchrun's agent on a single node: there is nobody to meet, so it opens no port.

torchrun's own (c10d) listens on every interface and unpickles what it is sent: whoever reached the port ran code as the
user. On a file store it waits up to 0.3 s at random before it begins, opens a port for a moment, and unpickles the file
again and again while the ranks measure.
"""

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

NAME = "one_node"


class OneNodeRendezvous(StaticTCPRendezvous):
    """The agent of one node, alone. Its store is in this process; the ranks have a store of their own."""

    use_agent_store = False

    def get_backend(self) -> str:
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        no_address = RendezvousStoreInfo("localhost", 0)  # MASTER_ADDR and MASTER_PORT, which no rank reads
        return RendezvousInfo(HashStore(), 0, 1, no_address)


def create(parameters: RendezvousParameters) -> OneNodeRendezvous:
    return OneNodeRendezvous("localhost", 0, 0, 1, parameters.run_id, 0)


def register() -> None:
    """Make the rendezvous known to torchrun's agent by its name. A second call changes nothing."""
    rendezvous_handler_registry.register(NAME, create)
