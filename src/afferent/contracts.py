"""All contracts that other packages can implement, with their conformance suites.

| contract | chosen by | suite in `afferent.conformance` |
|---|---|---|
| `EngineKind`, `Engine` | ``--engine`` | `check` |
| `UpstreamKind`, `HttpUpstreamKind`, `Upstream` | ``--engine`` | `check_upstream` |
| `Reference`: `sign`, `verify` | an upstream | `check_upstream` |
| `Family`, `Entry` | the model's type | `check_family` |
| `Tier`, `Claims` | ``--tier`` | `check_tier` |

`afferent.engines` has what else an engine's package needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from afferent.lazy import face

__all__ = [
    "Claims",
    "Engine",
    "EngineKind",
    "Entry",
    "Family",
    "FeaturePlan",
    "FeaturesReference",
    "HttpUpstreamKind",
    "RawReference",
    "Reference",
    "Tier",
    "Upstream",
    "UpstreamKind",
    "sign",
    "verify",
]

if TYPE_CHECKING:
    from afferent.engines.contract import EngineKind, UpstreamKind
    from afferent.engines.http_upstream.kind import HttpUpstreamKind
    from afferent.engines.protocol import Engine
    from afferent.engines.references import (
        FeaturesReference,
        RawReference,
        Reference,
        sign,
        verify,
    )
    from afferent.engines.upstream import Upstream
    from afferent.media.families.entry import Entry
    from afferent.media.families.family import Family
    from afferent.media.families.plan import FeaturePlan
    from afferent.tier.protocol import Claims, Tier
else:
    __getattr__, __dir__ = face(
        globals(),
        homes={
            "afferent.engines.contract": "EngineKind UpstreamKind",
            "afferent.engines.http_upstream.kind": "HttpUpstreamKind",
            "afferent.engines.protocol": "Engine",
            "afferent.engines.references": "FeaturesReference RawReference Reference sign verify",
            "afferent.engines.upstream": "Upstream",
            "afferent.media.families.entry": "Entry",
            "afferent.media.families.family": "Family",
            "afferent.media.families.plan": "FeaturePlan",
            "afferent.tier.protocol": "Claims Tier",
        },
        modules={},
    )
