"""Features of a step, as a worker reads them."""

from __future__ import annotations

import os
import select
import time
from typing import Final

from afferent.engines.vllm.plugin.step import ArenaIdentity, FeaturesLost, Step
from afferent.errors import StaleHandle
from afferent.store.arena import ArenaMap
from afferent.store.client.daemon_store import DaemonStore

_MAP_TIMEOUT_S: Final = 10.0
_LOOK_AGAIN_S: Final = 0.005


class StepReader:
    """Reads features under the pins of the engine core; it asks no store.

    So it reads while the store daemon is stopped, or gone. Copies are valid if the core was alive
    after they were made (`check_core`): until then, no daemon can have reused their memory.
    """

    def __init__(self, store: DaemonStore) -> None:
        self._store = store
        self._map = store.arena
        self._core, self._pidfd = -1, -1

    def follow(self, step: Step) -> None:
        """Note the core of a step, for `check_core`."""
        if step.core != self._core:
            self.close()
            try:
                self._core, self._pidfd = step.core, os.pidfd_open(step.core)
            except ProcessLookupError:
                self._core = -1

    def block(self, step: Step, key: bytes) -> memoryview:
        """Return the bytes of an item's features, read-only: to be copied before the step ends.

        Raises:
            FeaturesLost: The step does not contain the item, or its arena is not mapped here.
        """
        if (where := step.items.get(key)) is None:
            raise FeaturesLost("an item is to be encoded that the core has not pinned")
        try:
            return self._map_of(where.arena).pinned_elsewhere(
                where.handle.offset, where.handle.nbytes
            )
        except StaleHandle as error:
            raise FeaturesLost("a block outside of the arena") from error

    def check_core(self) -> None:
        """Check that the engine core lives, and with it its pins.

        Raises:
            FeaturesLost: What was copied may be of other items.
        """
        if self._core < 0:
            raise FeaturesLost("the engine core is gone")
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if poll.poll(0):
            raise FeaturesLost("the engine core is gone")

    def close(self) -> None:
        if self._core >= 0:
            os.close(self._pidfd)
            self._core = -1

    def _map_of(self, arena: ArenaIdentity) -> ArenaMap:
        """Return the map of an arena, kept also when this process has got another one."""
        deadline = time.monotonic() + _MAP_TIMEOUT_S
        while self._map.identity != arena:
            if self._store.arena.identity == arena:
                self._map = self._store.arena
            elif time.monotonic() > deadline:
                raise FeaturesLost("the arena of the features is not mapped here")
            else:
                time.sleep(_LOOK_AGAIN_S)
        return self._map
