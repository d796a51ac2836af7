"""Afferent: the multimodal data plane for LLM serving.

The public interface is ``__all__``, here and in `afferent.engines`, `afferent.schedule`,
`afferent.ray`, `afferent.vllm` and `afferent.conformance`: stable within a minor version, and
documented. All other names are private by convention, with or without an underscore.

    >>> import numpy as np
    >>> from afferent import DaemonStore, ItemCache, MiB, StoreServer, keys
    >>> def decode(key: bytes) -> dict[str, np.ndarray]:
    ...     return {"pixels": np.ones((3, 4))}
    >>> key = keys.frame(b"my-decoder/v1", b"the file's bytes")
    >>> with (
    ...     StoreServer(16 * MiB) as server,  # a daemon, and its arena
    ...     DaemonStore(server.address, name="me", writable=True) as store,
    ... ):
    ...     cache = ItemCache(store)  # other processes see its items in place
    ...     tree = cache.get_or_make("request-1", [key], decode, max_nbytes=MiB)[key]
    ...     print(tree["pixels"].sum())
    ...     del tree  # else it keeps its memory pinned after the release
    ...     cache.release("request-1")
    12.0

Begin with:

- `Features` for a model's inputs from files, images and clips
- `ItemCache` for a cache of items
- `Store` for its verbs
- `Gate` for admission
- `Engine` and `afferent.engines` to put an engine behind the server
- `afferent.schedule` for the scheduler
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from afferent.lazy import face

__version__ = "0.2.0"

__all__ = [
    "Absent",
    "Accepted",
    "AsyncDaemonStore",
    "AsyncFeatures",
    "AsyncItemCache",
    "Claim",
    "ClientInfo",
    "Collator",
    "ContentKey",
    "CreateItem",
    "DaemonStore",
    "Engine",
    "EngineEvent",
    "EngineInfo",
    "EngineRequest",
    "EngineStats",
    "Evicted",
    "Failed",
    "FailedItem",
    "Failure",
    "FeatureDataset",
    "FeaturePlan",
    "Features",
    "Fetch",
    "Find",
    "Finished",
    "Gate",
    "GiB",
    "Handle",
    "Hit",
    "InFlight",
    "Item",
    "ItemCache",
    "ItemFeatures",
    "Join",
    "KeptSession",
    "KiB",
    "Loaded",
    "LocalStore",
    "Made",
    "MiB",
    "Modality",
    "ObjectInfo",
    "ObjectKind",
    "Order",
    "Outcome",
    "Owner",
    "Placeholder",
    "PreparedSample",
    "Progress",
    "Queue",
    "ReserveItem",
    "Sample",
    "Sampling",
    "Scheduled",
    "SealItem",
    "SessionEngine",
    "SharedItem",
    "Slot",
    "Span",
    "Statistics",
    "Store",
    "StoreServer",
    "TensorSpec",
    "TokenLogprobs",
    "Tokens",
    "View",
    "__version__",
    "codec",
    "conformance",
    "contracts",
    "engines",
    "errors",
    "keys",
    "schedule",
]

if TYPE_CHECKING:
    from afferent import conformance, contracts, engines, errors, keys, schedule
    from afferent.admission.gate import Gate
    from afferent.batch.async_feature_maker import AsyncFeatures
    from afferent.batch.feature_maker import Features
    from afferent.batch.item_features import FailedItem, ItemFeatures, Progress
    from afferent.batch.shared_item import SharedItem
    from afferent.batch.torch_dataset import Collator, FeatureDataset, PreparedSample, Sample
    from afferent.engines.protocol import (
        Accepted,
        Engine,
        EngineEvent,
        EngineInfo,
        EngineRequest,
        EngineStats,
        Finished,
        KeptSession,
        SessionEngine,
        Tokens,
    )
    from afferent.media.families.plan import FeaturePlan
    from afferent.store.block import codec
    from afferent.store.client.async_item_cache import AsyncItemCache
    from afferent.store.client.async_store import AsyncDaemonStore
    from afferent.store.client.daemon_store import DaemonStore
    from afferent.store.client.item_cache import ItemCache
    from afferent.store.client.local_store import LocalStore
    from afferent.store.client.operations import Loaded
    from afferent.store.client.steps import Slot
    from afferent.store.client.store import Store
    from afferent.store.client.views import View
    from afferent.store.daemon.server import StoreServer
    from afferent.store.protocol.items import Claim, Fetch, Find, Join, Queue, SealItem
    from afferent.store.protocol.results import (
        Absent,
        ClientInfo,
        Evicted,
        Failed,
        Hit,
        InFlight,
        Made,
        ObjectInfo,
        Order,
        Outcome,
        Owner,
        Scheduled,
        Statistics,
    )
    from afferent.types import (
        ContentKey,
        CreateItem,
        Failure,
        GiB,
        Handle,
        Item,
        KiB,
        MiB,
        Modality,
        ObjectKind,
        Placeholder,
        ReserveItem,
        Sampling,
        Span,
        TensorSpec,
        TokenLogprobs,
    )
else:  # a test compares this table with the imports above
    __getattr__, __dir__ = face(
        globals(),
        homes={
            "afferent.admission.gate": "Gate",
            "afferent.batch.async_feature_maker": "AsyncFeatures",
            "afferent.batch.feature_maker": "Features",
            "afferent.batch.item_features": "FailedItem ItemFeatures Progress",
            "afferent.batch.shared_item": "SharedItem",
            "afferent.batch.torch_dataset": "Collator FeatureDataset PreparedSample Sample",
            "afferent.engines.protocol": (
                "Accepted Engine EngineEvent EngineInfo EngineRequest EngineStats Finished "
                "KeptSession SessionEngine Tokens"
            ),
            "afferent.media.families.plan": "FeaturePlan",
            "afferent.store.client.async_item_cache": "AsyncItemCache",
            "afferent.store.client.async_store": "AsyncDaemonStore",
            "afferent.store.client.daemon_store": "DaemonStore",
            "afferent.store.client.item_cache": "ItemCache",
            "afferent.store.client.local_store": "LocalStore",
            "afferent.store.client.operations": "Loaded",
            "afferent.store.client.steps": "Slot",
            "afferent.store.client.store": "Store",
            "afferent.store.client.views": "View",
            "afferent.store.daemon.server": "StoreServer",
            "afferent.store.protocol.items": "Claim Fetch Find Join Queue SealItem",
            "afferent.store.protocol.results": (
                "Absent ClientInfo Evicted Failed Hit InFlight Made ObjectInfo Order Outcome Owner "
                "Scheduled Statistics"
            ),
            "afferent.types": (
                "ContentKey CreateItem Failure GiB Handle Item KiB MiB Modality ObjectKind "
                "Placeholder ReserveItem Sampling Span TensorSpec TokenLogprobs"
            ),
        },
        modules={
            "codec": "afferent.store.block.codec",
            "conformance": "afferent.conformance",
            "contracts": "afferent.contracts",
            "engines": "afferent.engines",
            "errors": "afferent.errors",
            "keys": "afferent.keys",
            "schedule": "afferent.schedule",
        },
    )
