"""A changed message needs a new version, since processes of both versions meet in an upgrade."""

from __future__ import annotations

import importlib
from typing import Annotated, get_args

import pytest
from msgspec import Meta, Struct, defstruct, structs

from afferent.engines import references
from afferent.engines.remote import messages as remote
from afferent.media.families.plan import FeaturePlan
from afferent.media.workers.jobs import Job
from afferent.store.protocol import hello, requests, results
from afferent.store.protocol.replies import Reply, result_type
from tests.wire_schema import digest

STORE = (
    hello.Hello,
    hello.Bye,
    hello.Welcome,
    Reply,
    *requests.VERBS,
    *map(result_type, requests.VERBS),
    # Payloads that the daemon passes from process to process.
    results.Fetching,
    results.Keeping,
    Job,
    FeaturePlan,
)
ENGINE = (remote.FromFrontend, remote.ToFrontend)
REFERENCES = (references.Reference,)


@pytest.mark.parametrize(
    ("module", "types"),
    [(hello, STORE), (remote, ENGINE), (references, REFERENCES)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_schema_that_changes_needs_another_version(module: object, types: tuple[object]) -> None:
    version, _, recorded = module.SCHEMA.partition("-")
    found = digest(*types)
    assert recorded == found, (
        f"messages of {module.__name__} have changed: raise its VERSION by one, "
        f'and write SCHEMA = "{module.VERSION + 1}-{found}"'
    )
    assert version == str(module.VERSION), "SCHEMA begins with VERSION"


def test_all_messages_of_the_store_are_in_the_digest() -> None:
    """The test finds messages that are new, or that no other message contains."""
    modules = ("hello", "items", "replies", "requests", "results")
    names = [f"afferent.store.protocol.{name}" for name in modules]
    defined = {
        value
        for name in names
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, type) and issubclass(value, Struct) and value.__module__ == name
    }
    for each in defined - {requests.Request}:
        assert any(each in _within(found) for found in STORE), f"{each.__name__} is in no digest"


def _within(declared: object) -> set[object]:
    """Return the structs that a message is made of."""
    found: set[object] = set()
    for part in get_args(declared):
        found |= _within(part)
    if isinstance(declared, type) and issubclass(declared, Struct):
        found.add(declared)
        for field in structs.fields(declared):
            found |= _within(field.type)
    return found


A, B = ("a", int), ("b", str, "")
ONE = defstruct("One", [A, B], array_like=True, tag="one")
CHANGED = {
    "a field of another type": defstruct("One", [("a", float), B], array_like=True, tag="one"),
    "a limit": defstruct("One", [("a", Annotated[int, Meta(ge=0)]), B], array_like=True, tag="one"),
    "another default": defstruct("One", [A, ("b", str, "x")], array_like=True, tag="one"),
    "another name of a field": defstruct("One", [("c", int), B], array_like=True, tag="one"),
    "another order": defstruct("One", [("b", str), ("a", int)], array_like=True, tag="one"),
    "a field more": defstruct("One", [A, B, ("c", int, 0)], array_like=True, tag="one"),
    "a field less": defstruct("One", [A], array_like=True, tag="one"),
    "another tag": defstruct("One", [A, B], array_like=True, tag="two"),
    "a map": defstruct("One", [A, B], tag="one"),
    "unknown fields": defstruct(
        "One", [A, B], array_like=True, tag="one", forbid_unknown_fields=True
    ),
}


@pytest.mark.parametrize("changed", CHANGED.values(), ids=CHANGED)
def test_digest_of_a_changed_message_differs(changed: type[Struct]) -> None:
    assert digest(changed) != digest(ONE)
    assert digest(list[changed]) != digest(list[ONE])  # type: ignore[valid-type]


def test_digest_of_a_renamed_class_is_the_same() -> None:
    renamed = defstruct("Another", [A, B], array_like=True, tag="one")
    assert digest(renamed) == digest(ONE)
