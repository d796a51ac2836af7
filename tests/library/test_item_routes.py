"""A batch's way to its results, over a store with space for one item."""

from __future__ import annotations

from dataclasses import dataclass, field

from afferent.batch.item_features import FailedItem
from afferent.batch.item_routes import Route, pipeline
from afferent.errors import StoreFull


@dataclass(slots=True)
class OneAtATime(Route[str, str]):
    """Has space for one item, from its submission until ``release``."""

    holder: str = ""
    submitted: list[str] = field(default_factory=list)

    def submit(self, source: str, *, may_wait: bool) -> str:
        self.submitted.append(source)
        if self.holder:
            raise StoreFull(f"{self.holder} has the space")
        self.holder = source
        return source

    def collect(self, ticket: str) -> str:
        return ticket

    def release(self) -> None:
        self.holder = ""


def test_no_later_item_takes_the_space_of_one_that_found_none() -> None:
    route = OneAtATime()
    made = pipeline(["a", "b", "c"], route, in_flight=3)
    assert next(made) == "a"
    failed = next(made)
    assert isinstance(failed, FailedItem)
    assert failed.index == 1
    assert isinstance(failed.error, StoreFull)
    assert route.submitted[-1] == "b"
    route.release()
    assert list(pipeline(["b"], route, in_flight=1)) == ["b"]
    route.release()
    assert list(made) == ["c"]
