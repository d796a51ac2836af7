"""The items of one step of vLLM's engine, as its core sends them to the workers."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from afferent.types import Handle

log = logging.getLogger("vllm.afferent")

ArenaIdentity = tuple[int, int]
"""Device and inode of an arena's memory."""


class FeaturesLost(Exception):
    """The features of an item can't be read, so that nothing may be computed for it."""


@dataclass(frozen=True, slots=True)
class Located:
    """Features that the engine core has pinned: a block of an arena."""

    arena: ArenaIdentity
    handle: Handle


@dataclass(frozen=True, slots=True)
class Step:
    """Features that the core has pinned for one step.

    Attributes:
        core: Process id of the core. While it lives, and until it drops the step, the features stay
            as they are, even if the store daemon dies.
        items: The features, by key.
        engine: Name of the engine, a new one after each start.
    """

    core: int
    items: Mapping[bytes, Located]
    engine: str = ""


class _Running:
    step: Step | None = None


def running_step() -> Step | None:
    """Return the step that this worker runs; ``None`` in an engine without our EC connector."""
    return _Running.step


def set_running_step(step: Step | None) -> None:
    _Running.step = step


def end_engine(step: Step, why: str) -> NoReturn:
    """End the engine, before anything is computed for the step.

    An error alone would not do in a worker with a process of its own: vLLM has sent it the next
    step already, which reads what this step should have written.

    Raises:
        FeaturesLost: The worker is in the core's process, which ends by the error.
    """
    log.critical("the engine ends: %s", why)
    if os.getpid() != step.core:
        logging.shutdown()
        os._exit(1)
    raise FeaturesLost(why)
