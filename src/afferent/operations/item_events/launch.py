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
    """Address of the events; `afferent.engines.item_events.requests_endpoint` has that of the
    requests.
    """
    key: str
    """Key that subscribers send; empty: none."""
