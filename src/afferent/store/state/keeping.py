"""Write-behind queue: new objects that the tier process copies to the tier. Pure.

No request waits for a copy. Objects that are not handed out in time are dropped:

- when the queue is full;
- when the object is gone;
- when a reservation waits for the space that the copy would pin.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from typing import NamedTuple

from afferent.errors import AfferentError
from afferent.store.protocol.results import Keeping, Order
from afferent.store.state.object import ObjectState, StoredObject
from afferent.store.state.object_table import ObjectTable
from afferent.store.state.waiters import Answer
from afferent.types import ClientId, ContentKey, ObjectKind, encode

TIERED = frozenset({ObjectKind.FEATURES, ObjectKind.EMBEDDINGS})
"""Kinds of objects that always go to the tier. Other kinds go only with a stated production cost:
fetched files, and the results of URLs.
"""

MAX_WAITING = 1024
_REQUEST = "keep-"


class _Made(NamedTuple):
    cost_us: int
    made_us: int


class KeepQueue:
    """New objects for the tier; ``answers`` receives the answers to `Take`.

    Invariants:
        - At most `MAX_WAITING` objects wait; the oldest is dropped first.
        - Nothing waits while no tier process is connected.
    """

    def __init__(self, objects: ObjectTable, answers: list[Answer]) -> None:
        self._objects, self._answers = objects, answers
        self._made: OrderedDict[ContentKey, _Made] = OrderedDict()
        self._keepers: set[ClientId] = set()
        self._idle: deque[tuple[ClientId, int]] = deque()
        self._numbers = itertools.count()
        self._num_dropped = 0

    def __len__(self) -> int:
        return len(self._made)

    def is_demoting(self, item: StoredObject) -> bool:
        """Whether a tier process copies it now."""
        return any(
            client in self._keepers and isinstance(request, str) and request.startswith(_REQUEST)
            for client, request in item.pins
        )

    def add(self, item: StoredObject, *, cost_us: int, made_us: int) -> None:
        """Queue a new, sealed object of a kind that goes to the tier."""
        if not self._keepers or item.key is None:
            return
        self._made[item.key] = _Made(cost_us, made_us)
        if len(self._made) > MAX_WAITING:
            self._made.popitem(last=False)
            self._num_dropped += 1
        self._hand_out()

    def keeper_idle(self, client: ClientId, seq: int) -> None:
        """Note that a tier process waits for an object to copy."""
        self._keepers.add(client)
        self._idle.append((client, seq))
        self._hand_out()

    def client_lost(self, client: ClientId) -> None:
        """Forget a client whose connection has ended."""
        self._keepers.discard(client)
        self._idle = deque(entry for entry in self._idle if entry[0] != client)
        if not self._keepers:
            self._made.clear()

    def _hand_out(self) -> None:
        while self._idle and self._made:
            key, made = self._made.popitem(last=False)
            client, seq = self._idle[0]
            request = f"{_REQUEST}{next(self._numbers)}"
            item = self._pinned(client, request, key)
            if item is None:
                self._num_dropped += 1
                continue
            self._idle.popleft()
            dropped, tenant = self._num_dropped, item.tenant
            keeping = Keeping(key, item.kind, request, *made, dropped, tenant)
            self._num_dropped = 0
            order = Order(0, item.handle, [item.handle], encode(keeping))
            self._answers.append(Answer(client, seq, order))

    def _pinned(self, client: ClientId, request: str, key: ContentKey) -> StoredObject | None:
        """Pin the object; ``None`` if it is gone or a reservation waits for its space."""
        item = self._objects.find(key)
        if item is None or item.state is not ObjectState.SEALED:
            return None
        if self._objects.budget.is_awaited(item.kind):
            return None
        try:
            self._objects.pin((client, request), item)
        except AfferentError:
            return None
        return item
