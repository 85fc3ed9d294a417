"""Rendezvous of ranks on one machine, at a port that only this machine can reach."""

from __future__ import annotations

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

NAME = "effloop-loopback"
_HOST = "127.0.0.1"


class Loopback(RendezvousHandler):
    """The rendezvous of a single launcher.

    torch's own (c10d) listens on every interface, resolves the machine's name, and unpickles what it receives.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._socket = socket.create_server((_HOST, 0), backlog=1024)
        port = self._socket.getsockname()[1]
        self._info = RendezvousStoreInfo(master_addr=_HOST, master_port=port)
        self._store = TCPStore(
            _HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=self._socket.detach()
        )

    def get_backend(self) -> str:
        return NAME

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, self._info)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register() -> None:
    """Register it with torch's launcher."""
    rendezvous_handler_registry.register(NAME, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return Loopback(parameters.run_id)
