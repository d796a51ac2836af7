"""Claims of this node: keys that it makes, so that other nodes wait for them."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence

from afferent.errors import TierUnavailable
from afferent.tier.vault import Vault
from afferent.types import ContentKey

_SPARE_S = 1.0
"""A claim lasts this much longer than another node would wait for it."""


class HeldClaims:
    """Claims of this node, thread-safe. An unreturned claim expires, in the tier and here."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault
        self._holder = secrets.token_bytes(16)
        self._until_s: dict[ContentKey, float] = {}
        self._lock = threading.Lock()

    def claim(self, wanted: Sequence[tuple[ContentKey, float]], *, deadline_s: float) -> list[bool]:
        """Claim keys with the time to wait for each; return for each whether this node makes it.

        An earlier claim of this node counts: its object was not made, or not kept.

        Raises:
            TierUnavailable: The tier does not answer.
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
            return [key in self._until_s for key in keys]

    def give_back(self, key: ContentKey, timeout_s: float) -> None:
        """Return a claim: its object is in the tier, or will not be; never fails."""
        with self._lock:
            until_s = self._until_s.pop(key, 0.0)
        now_s = time.monotonic()
        if until_s > now_s:
            try:
                self._vault.release([key], holder=self._holder, deadline_s=now_s + timeout_s)
            except TierUnavailable:  # the tier still has it, until it expires
                with self._lock:
                    self._until_s.setdefault(key, until_s)
