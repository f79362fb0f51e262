"""The rendezvous of torchrun's agent on a single node: there is nobody to meet, so it opens no port.

torchrun's own (c10d) listens on every interface and unpickles what it is sent: whoever reached the port ran code as the
user.
"""

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

NAME = "one_node"


class OneNodeRendezvous(RendezvousHandler):
    """The agent of one node, alone. Its store is in this process; the ranks have a store of their own."""

    use_agent_store = False

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id

    def get_backend(self) -> str:
        return NAME

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        no_address = RendezvousStoreInfo("localhost", 0)  # MASTER_ADDR and MASTER_PORT, which no rank reads
        return RendezvousInfo(HashStore(), 0, 1, no_address)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: no other node could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def register() -> None:
    """Make the rendezvous known to torchrun's agent by its name."""
    rendezvous_handler_registry.register(NAME, OneNodeRendezvous)
