"""What this node has said that it makes, so that others wait for it."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Sequence

from afferent.errors import TierUnavailable
from afferent.tier.vault import Vault
from afferent.types import ContentKey

_SPARE_S = 1.0
"""A claim lasts as long as another node would wait for it, and so much more."""


class HeldClaims:
    """For several threads. A claim that is not given back ends by itself, in the tier and here."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault
        self._holder = secrets.token_bytes(16)
        self._until_s: dict[ContentKey, float] = {}
        self._lock = threading.Lock()

    def claim(self, wanted: Sequence[tuple[ContentKey, float]], *, deadline_s: float) -> list[bool]:
        """Whether each is this node's to make: keys, and for how long one would wait for them.

        Raises:
            TierUnavailable: Nobody can say.
        """
        if not wanted:
            return []
        ttl_s = max(wait_s for _, wait_s in wanted) + _SPARE_S
        keys = [key for key, _ in wanted]
        now_s = time.monotonic()
        are_ours = self._vault.claim(keys, holder=self._holder, ttl_s=ttl_s, deadline_s=deadline_s)
        with self._lock:
            self._until_s = {key: at for key, at in self._until_s.items() if at > now_s}
            for key, is_ours in zip(keys, are_ours, strict=True):
                if is_ours:
                    self._until_s[key] = now_s + ttl_s
        return are_ours

    def give_back(self, key: ContentKey, timeout_s: float) -> None:
        """It has been made and is there for others, or will not be; never fails."""
        with self._lock:
            until_s = self._until_s.pop(key, 0.0)
        now_s = time.monotonic()
        if until_s > now_s:
            with contextlib.suppress(TierUnavailable):
                self._vault.release([key], holder=self._holder, deadline_s=now_s + timeout_s)
