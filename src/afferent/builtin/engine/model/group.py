"""Group of the ranks of one model: processes that each have a shard of its language layers.

Ranks connect at an address of this machine, where rank 0 listens. Each gets the same steps and
computes with its shard; the sums are reduced inside the layers. Rank 0 chooses the tokens.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed

from afferent.errors import ConfigError, EngineUnavailable

_TIMEOUT: Final = timedelta(seconds=300)  # ranks load their models at different speeds
_LOOPBACK: Final = "127.0.0.1"
_Store: Any = vars(distributed)["TCPStore"]  # which its stubs leave out
_ERRORS: Final = (distributed.DistError, RuntimeError)


class Group:
    """Rank among ``size`` ranks; see `host` and `join`."""

    def __init__(self, store: Any, *, rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size

    @classmethod
    def host(cls, size: int) -> Group:
        """Return rank 0 of a new group, at a port that the system chooses; the others `join` it
        there.
        """
        # The store's own socket would listen at every address of the machine.
        listener = socket.create_server((_LOOPBACK, 0))
        store = _Store(
            _LOOPBACK,
            listener.getsockname()[1],
            size,
            is_master=True,
            wait_for_workers=False,
            timeout=_TIMEOUT,
            master_listen_fd=listener.detach(),
        )
        return cls(store, rank=0, size=size)

    @classmethod
    def join(cls, port: int, *, rank: int, size: int) -> Group:
        """Return another rank, of a group whose rank 0 listens on this machine.

        Raises:
            ConfigError: There is no such rank in the group.
            EngineUnavailable: No process listens there.
        """
        if not 0 < rank < size:
            raise ConfigError(f"no rank {rank} can join a group of {size}")
        try:
            store = _Store(_LOOPBACK, port, size, is_master=False, timeout=_TIMEOUT)
        except _ERRORS as error:
            raise EngineUnavailable("rank 0 of the model is not there") from error
        return cls(store, rank=rank, size=size)

    @property
    def port(self) -> int:
        """Port at which rank 0 listens."""
        return int(self._store.port)

    def meet(self, device: torch.device) -> None:
        """Wait until all ranks are here.

        Raises:
            EngineUnavailable: They did not come.
        """
        if distributed.is_initialized():
            return
        # Otherwise gloo listens at the address of this machine's name.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        is_gpu = device.type == "cuda"
        try:
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
                store=self._store,
                rank=self.rank,
                world_size=self.size,
                timeout=_TIMEOUT,
            )
        except _ERRORS as error:
            raise EngineUnavailable("the other ranks of the model did not come") from error

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Replace this rank's tensor by the sum of all ranks' tensors, and return it."""
        distributed.all_reduce(values)
        return values

    def broadcast(self, token_ids: Sequence[int]) -> list[int]:
        """Return the token ids of rank 0 on all ranks; each rank passes as many."""
        agreed: Any = torch.tensor(token_ids, dtype=torch.int64)
        if len(token_ids):
            distributed.broadcast(agreed, src=0)
        return list(agreed.tolist())

    def close(self) -> None:
        """Leave the group; the others' next step fails."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
