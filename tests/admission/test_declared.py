"""The declarations of small classes."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

import msgspec
import pytest

from afferent import admission, schedule
from afferent.admission.shares import Share
from afferent.schedule.step import Chunk, Encode, EncoderInput, Placed, Step
from afferent.store import state as store_state


def test_what_there_is_many_of_is_small() -> None:
    """Dataclasses of the store, of the scheduler and of quotas have slots."""
    folders = [store_state, schedule, admission]
    found = [
        kind
        for folder in folders
        for info in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}.")
        for kind in vars(importlib.import_module(info.name)).values()
        if dataclasses.is_dataclass(kind) and kind.__module__ == info.name
    ]
    assert len(found) > 15
    assert [kind for kind in found if "__slots__" not in vars(kind)] == []


@pytest.mark.parametrize("kind", [Share, EncoderInput, Placed, Encode, Chunk, Step])
def test_what_is_sent_is_short_and_has_nothing_else_in_it(kind: type[msgspec.Struct]) -> None:
    """These are sent between processes very often: as arrays, without field names."""
    config = kind.__struct_config__
    assert (config.frozen, config.array_like, config.forbid_unknown_fields) == (True, True, True)
