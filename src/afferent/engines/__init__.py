"""Engine interface: the contract of all engines, the registry, and the built-in engine.

This package is for authors of engines that a server loads by ``afferent serve --engine
MODULE:FACTORY``. An `EngineKind` describes the engine; its `Settings` stand beside the server's;
each of its processes is a `ChildProcess`. `RemoteKind` and `EngineHost` run any `afferent.Engine`
in a process of its own. An engine declares its metrics by `counter` and its like. `to_tree`
describes the items of vLLM's processors as trees that a store takes.
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
    "Group",
    "RemoteKind",
    "RemoteLink",
    "Settings",
    "counter",
    "declare_stages",
    "from_tree",
    "gauge",
    "histogram",
    "listening",
    "push_counts",
    "run_until_terminated",
    "setting",
    "to_tree",
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
    )
    from afferent.engines.remote.host import EngineHost
    from afferent.engines.remote.kind import RemoteKind, RemoteLink, listening
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
                "Backend Caller EngineKind EnginePlan EngineProcess EngineSite"
            ),
            "afferent.engines.remote.host": "EngineHost",
            "afferent.engines.remote.kind": "RemoteKind RemoteLink listening",
            "afferent.engines.vllm.items": "from_tree to_tree",
            "afferent.media.families.registry": "AnyFamily",
            "afferent.runtime.process": "ChildProcess run_until_terminated",
            "afferent.telemetry.pushing": "push_counts",
            "afferent.telemetry.registry": "counter gauge histogram",
            "afferent.telemetry.trace": "declare_stages",
        },
        modules={},
    )
