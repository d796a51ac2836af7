"""Each verb is defined once: the daemon has a handler for it, and every client a method."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from afferent.admission.shares import NAMELESS
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.store import Store
from afferent.store.client.verbs import Call, Verbs
from afferent.store.protocol import requests
from afferent.store.protocol.replies import result_type
from afferent.store.protocol.requests import NO_REPLY, VERBS, Request
from afferent.store.protocol.results import Order, Outcome
from afferent.types import Handle, ObjectKind

HANDLE = Handle(1, 0, 64, 1)


class Recorder(Verbs):
    """A client that records its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Request[Any]] = []

    def block(self, handle: Handle) -> memoryview:
        raise NotImplementedError

    def _pin_dropper(self) -> Any:
        raise NotImplementedError

    @property
    def capacity_nbytes(self) -> int:
        raise NotImplementedError

    @property
    def client_number(self) -> int:
        raise NotImplementedError

    def _call(self, call: Call[Any]) -> None:
        self.asked.append(call.request)

    def _tell(self, request: Request[Any]) -> None:
        self.asked.append(request)


def test_each_verb_has_a_tag_of_its_own() -> None:
    assert not any(verb.__subclasses__() for verb in VERBS), "it would not be listed"
    assert len({verb.__struct_config__.tag for verb in VERBS}) == len(VERBS)


def test_a_result_is_of_the_type_that_the_verb_names() -> None:
    assert result_type(requests.Acquire) == list[Outcome]
    assert result_type(requests.Take) is Order
    assert result_type(requests.Abort) is type(None)


def test_each_verb_has_a_method() -> None:
    store: Any = Recorder()
    store.introduce("r", NAMELESS)
    store.acquire("r", [])
    store.wait("r", [])
    store.create("r", [])
    store.seal("r", [])
    store.abort("r", [HANDLE])
    store.get("r", [HANDLE])
    store.release("r")
    store.release_early("r", [HANDLE])
    store.report_encoded([bytes(32)])
    store.check_pins("r", [HANDLE])
    store.reserve("r", [])
    store.unreserve("r", [])
    store.acquire_permit("r", "preprocess", limit=1)
    store.release_permit("r", "preprocess")
    store.accept("r")
    store.delete([])
    store.evict(ObjectKind.RAW)
    store.list_objects()
    store.list_items()
    store.watch_items(0)
    store.find_items([])
    store.list_clients()
    store.list_tenants()
    store.take()
    store.finish(Order(1, HANDLE, [], b""))
    store.renew(Order(1, HANDLE, [], b""))
    store.stat()
    store.push_metrics(1, [])
    store.read_metrics()
    assert [type(request) for request in store.asked] == list(VERBS)
    numbers = [request.seq for request in store.asked if request.seq != NO_REPLY]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("client", [Store, AsyncDaemonStore])
def test_a_client_has_its_verbs_from_one_place(client: type[Verbs]) -> None:
    own = {name for name in vars(client) if not name.startswith("_")}
    verbs = {name for name, it in vars(Verbs).items() if hasattr(it, "__wrapped__")}
    assert own.isdisjoint(verbs)
    reserve = vars(Verbs)["reserve"]
    assert "nothing reserved" in inspect.getdoc(reserve)
    assert list(inspect.signature(reserve).parameters)[1:3] == ["request", "items"]


def test_what_is_given_up_is_taken_back() -> None:
    reserve = requests.Reserve(7, "r", [], True)
    assert reserve.withdrawal() == requests.Unreserve(NO_REPLY, "r", [], 7)
    assert requests.Create(7, "r", []).withdrawal() == requests.Unreserve(NO_REPLY, "r", [], 7)
    assert requests.Stat(7).withdrawal() is None
