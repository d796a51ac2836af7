"""Contracts of engines and upstreams, for authors of either.

A server loads them by ``afferent serve --engine MODULE:FACTORY``. Its `Settings` stand beside the
server's; each of its processes is a `ChildProcess`.

- An **engine** takes token ids and handles. An `EngineKind` describes it; `RemoteKind` and
  `EngineHost` run any `afferent.Engine` in a process of its own.
- An **upstream** is a server with its own API. An `UpstreamKind` describes it, an
  `HttpUpstreamKind` one that speaks HTTP. It gets the media of a request as references, which
  `verify` reads: the handles of features, or of bytes.

Both declare their metrics by `counter` and its like. `to_tree` describes the items of vLLM's
processors as trees that a store takes. `afferent.conformance` checks the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from afferent.lazy import face

__all__ = [
    "AnyFamily",
    "Backend",
    "Caller",
    "ChildProcess",
    "EngineHost",
    "EngineKind",
    "EnginePlan",
    "EngineProcess",
    "EngineSite",
    "FeaturesReference",
    "Group",
    "HttpLink",
    "HttpSettings",
    "HttpUpstreamKind",
    "NamedBody",
    "Place",
    "RawReference",
    "Reference",
    "RemoteKind",
    "RemoteLink",
    "RepeatableBody",
    "Settings",
    "Upstream",
    "UpstreamAnswer",
    "UpstreamKind",
    "UpstreamRequest",
    "UpstreamSocket",
    "UpstreamStats",
    "counter",
    "declare_stages",
    "find_store",
    "from_tree",
    "gauge",
    "histogram",
    "listening",
    "push_counts",
    "run_until_terminated",
    "setting",
    "sign",
    "to_tree",
    "verify",
]

if TYPE_CHECKING:
    from afferent.config import Group, Settings, setting
    from afferent.engines.contract import (
        Backend,
        Caller,
        EngineKind,
        EnginePlan,
        EngineProcess,
        EngineSite,
        UpstreamKind,
    )
    from afferent.engines.http_upstream.kind import HttpLink, HttpUpstreamKind
    from afferent.engines.http_upstream.settings import HttpSettings
    from afferent.engines.place import Place, find_store
    from afferent.engines.references import (
        FeaturesReference,
        RawReference,
        Reference,
        sign,
        verify,
    )
    from afferent.engines.remote.host import EngineHost
    from afferent.engines.remote.kind import RemoteKind, RemoteLink, listening
    from afferent.engines.upstream import (
        NamedBody,
        RepeatableBody,
        Upstream,
        UpstreamAnswer,
        UpstreamRequest,
        UpstreamSocket,
        UpstreamStats,
    )
    from afferent.engines.vllm.items import from_tree, to_tree
    from afferent.media.families.registry import AnyFamily
    from afferent.runtime.process import ChildProcess, run_until_terminated
    from afferent.telemetry.pushing import push_counts
    from afferent.telemetry.registry import counter, gauge, histogram
    from afferent.telemetry.trace import declare_stages
else:
    __getattr__, __dir__ = face(
        globals(),
        homes={
            "afferent.config": "Group Settings setting",
            "afferent.engines.contract": (
                "Backend Caller EngineKind EnginePlan EngineProcess EngineSite UpstreamKind"
            ),
            "afferent.engines.http_upstream.kind": "HttpLink HttpUpstreamKind",
            "afferent.engines.http_upstream.settings": "HttpSettings",
            "afferent.engines.place": "Place find_store",
            "afferent.engines.references": ("FeaturesReference RawReference Reference sign verify"),
            "afferent.engines.remote.host": "EngineHost",
            "afferent.engines.remote.kind": "RemoteKind RemoteLink listening",
            "afferent.engines.upstream": (
                "NamedBody RepeatableBody Upstream UpstreamAnswer UpstreamRequest UpstreamSocket "
                "UpstreamStats"
            ),
            "afferent.engines.vllm.items": "from_tree to_tree",
            "afferent.media.families.registry": "AnyFamily",
            "afferent.runtime.process": "ChildProcess run_until_terminated",
            "afferent.telemetry.pushing": "push_counts",
            "afferent.telemetry.registry": "counter gauge histogram",
            "afferent.telemetry.trace": "declare_stages",
        },
        modules={},
    )
