"""Entry point that vLLM calls in each of its processes."""

from __future__ import annotations

import os

from afferent.engines import place
from afferent.runtime.process import die_with_parent


def register() -> None:
    """Make models read the arena, and restrict media to the arena.

    Does nothing where the environment does not name the store. May be called again.
    """
    if place.find_store() is None:
        return
    if os.environ.get(place.SUPERVISED):
        # The kernel ends vLLM's API server with our process, and its children with it.
        die_with_parent(os.getppid())
    from afferent.engines.vllm.plugin import probe  # only now: these import vLLM

    probe.check()
    from afferent.engines.vllm.plugin import connector, models

    os.environ["VLLM_MEDIA_CONNECTOR"] = connector.NAME
    models.register()
    if probe.has_stable_names():
        from afferent.engines.vllm.plugin import ec

        ec.register()
