"""The share of a request, signed by a gateway for the servers behind it.

Clients have keys of the gateway only. So the servers behind it learn the payer of a request from a
signed header, and keep the tenants of the gateway apart. The key of signatures is made from the
fleet's secret.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from typing import Final

import msgspec

from afferent.admission.shares import Share
from afferent.errors import NotAuthenticated

HEADER: Final = "x-afferent-tenant"
VALID_S: Final = 300.0
"""Time for which a signature is valid, by the clocks of both machines."""
_TAG: Final = b"afferent/signed-share/v1"

_decoder = msgspec.json.Decoder(Share)


class SignedShares:
    """Signs shares, and reads those that another server with the same secret has signed.

    A signature is valid for any request within `VALID_S`. So a program that reads the traffic
    between gateway and server can use it, as it can use a key: use TLS there.
    """

    def __init__(self, secret: bytes, *, clock: Callable[[], float] = time.time) -> None:
        """Create it.

        Args:
            secret: The fleet's.
            clock: Time in seconds since the epoch.
        """
        self._key = hmac.digest(secret, _TAG, hashlib.sha256)
        self._clock = clock

    def sign(self, share: Share) -> str:
        """Return the value of the header."""
        payload = urlsafe_b64encode(msgspec.json.encode(share)).decode()
        signed = f"{payload}.{round(self._clock())}"
        return f"{signed}.{self._signature(signed)}"

    def read(self, value: str) -> Share:
        """Return the share of a header.

        Raises:
            NotAuthenticated: It was signed with another secret, or too long ago, or by a machine
                whose clock differs by more than `VALID_S`.
        """
        signed, _, signature = value.rpartition(".")
        if not hmac.compare_digest(self._signature(signed).encode(), signature.encode()):
            raise NotAuthenticated(
                f"{HEADER} has another signature: the gateway needs the --fleet-secret of this "
                "server"
            )
        payload, _, signed_at = signed.partition(".")
        if abs(self._clock() - float(signed_at)) > VALID_S:
            raise NotAuthenticated(
                f"{HEADER} was signed more than {VALID_S:g} s ago or ahead of time: check the "
                "clocks of the gateway and of this server"
            )
        return _decoder.decode(urlsafe_b64decode(payload))

    def _signature(self, signed: str) -> str:
        return hmac.new(self._key, signed.encode(), hashlib.sha256).hexdigest()
