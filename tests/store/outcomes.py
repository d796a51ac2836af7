"""Parts of outcomes, for tests that expect them."""

from __future__ import annotations

from collections.abc import Iterable

from afferent.store.protocol.results import Failed, Hit, Made, Outcome, Owner
from afferent.types import Failure, Handle


def handle_of(outcome: Outcome) -> Handle:
    """Return the handle of an object that exists or that the request makes."""
    assert isinstance(outcome, Hit | Made | Owner), outcome
    return outcome.handle


def failure_of(outcome: Outcome) -> Failure:
    assert isinstance(outcome, Failed), outcome
    return outcome.failure


def states(outcomes: Iterable[Outcome]) -> list[str]:
    """Return the names of the outcomes, such as ``"in_flight"``."""
    return [str(outcome.__struct_config__.tag) for outcome in outcomes]
