"""Settings of the publisher's process, for the supervisor; imports no ZeroMQ."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

PUBLISHER: Final = "afferent.operations.item_events.main"
NAME: Final = "item-events"


class PublisherSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the publisher's process."""

    store_address: str
    endpoint: str
    """Address of the events; `requests_endpoint` has that of the requests."""
    key: str
    """Key that subscribers send; empty: none."""


def requests_endpoint(endpoint: str) -> str:
    """Return the address for requests: the next port, or the path with ``.requests``."""
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.requests"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + 1}"
