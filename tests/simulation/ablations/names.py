# ruff: noqa: ARG005 - a replacement has the parameters of the method that it replaces
"""Safeguards of results that are named after their item alone, in front of vLLM."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from afferent.engines.vllm.plugin import step_pins
from afferent.engines.vllm.plugin.step_reader import StepReader
from afferent.store.arena import ArenaMap
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.client.verbs import Verbs
from afferent.store.client.views import VIEWS
from afferent.store.protocol import requests
from afferent.store.protocol.requests import NO_REPLY
from tests.simulation import vllm
from tests.simulation.ablations.table import Replace, ablation
from tests.simulator import threads


@ablation("the core pins the features of a step until the step has ended")
def _step_pins(replace: Replace) -> None:
    pin = step_pins._Pin
    replace(step_pins, "_Pin", lambda where, view, since_s: pin(where, view.copy(), since_s))


@ablation("the core views the features of a step, so that a new daemon waits for its end")
def _step_views(replace: Replace) -> None:
    def without_a_view(self: DaemonStore, request: str, handle: Any) -> Any:
        copy = np.array(self.block(handle))
        self._tell(requests.Get(NO_REPLY, VIEWS, [handle]))
        weakref.finalize(copy, self._dropped_pins.note, handle).atexit = False
        return copy

    replace(Verbs, "bytes_for", without_a_view)


@ablation("the core's views outlive the daemon of their pins")
def _step_views_last(replace: Replace) -> None:
    retire = ArenaMap.retire

    def at_once(self: ArenaMap, on_unused: Any) -> None:
        process = threads.current_process()
        if process is not None and process.name == vllm.CORE:
            on_unused()
        else:
            retire(self, on_unused)

    replace(ArenaMap, "retire", at_once)


@ablation("a worker believes what it has read if the core lives")
def _living_core(replace: Replace) -> None:
    replace(StepReader, "check_core", lambda self: None)


@ablation("a worker that can't read features ends the step")
def _no_zeros(replace: Replace) -> None:
    replace(vllm, "read", vllm.read_or_nothing)


@ablation("a worker reads features where the core has pinned them, not where the frontend had them")
def _places_of_the_step(replace: Replace) -> None:
    replace(vllm, "read", vllm.read_there)


@ablation("a scheduler waits for the store for some milliseconds")
def _bounded_waits(replace: Replace) -> None:
    replace(step_pins, "longest_wait_s", lambda step_s: 30.0)
