"""What vLLM calls in each of its processes."""

from __future__ import annotations

import os

from afferent.engine.vllm import place
from afferent.runtime.process import die_with_parent


def register() -> None:
    """Have models read the arena, and media come from nowhere else.

    Does nothing where the environment does not say where the store is. May be called again.
    """
    if place.find() is None:
        return
    if os.environ.get(place.SUPERVISED):
        # vLLM's API server dies with ours, by the kernel's word; so do those that it has started.
        die_with_parent(os.getppid())
    from afferent.engine.vllm.plugin import connector, models, probe  # only now: they import vLLM

    probe.check()
    os.environ["VLLM_MEDIA_CONNECTOR"] = connector.NAME
    models.register()
