"""The table of ablations, with a seed that fails without each safeguard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

Replace = Callable[[Any, Any, Any], None]


@dataclass(frozen=True, slots=True)
class Ablation:
    """A safeguard that can be switched off.

    Attributes:
        what: The rule that it enforces.
        seed: A seed that fails without it.
        missed_as: The kind of violation with which the seed fails.
    """

    name: str
    what: str
    switch_off: Callable[[Replace], None]
    seed: int
    missed_as: str

    def applied(self) -> AbstractContextManager[None]:
        return switched_off(self.switch_off)


@contextmanager
def switched_off(switch_off: Callable[[Replace], None]) -> Iterator[None]:
    """Switch a safeguard, or a part of one, off in this context."""
    before: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: Any, new: Any) -> None:
        # A KeyError means that the safeguard's code has moved.
        before.append((owner, name, _parts(owner)[name]))
        _set(owner, name, new)

    try:
        switch_off(replace)
        yield
    finally:
        for owner, name, old in reversed(before):
            _set(owner, name, old)


ABLATIONS: list[Ablation] = []

MISSED: dict[str, tuple[int, str]] = {
    "pins": (41, "bytes"),
    "doomed-blocks": (5, "exception"),
    "generations": (336, "bytes"),
    "epochs": (333, "bytes"),
    "death-by-pidfd": (23, "freed"),
    "jobs-wait-for-death": (134, "freed"),
    "recovery": (381, "two at once"),
    "written-down": (0, "written down"),
    "start-times": (147, "liveness"),
    "retired-maps": (23, "two at once"),
    "hello-lets-go": (1, "liveness"),
    "pinned-for-workers": (295, "freed"),
    "sources": (2011, "derived"),
    "single-flight": (43, "makers"),
    "strikes": (17, "strikes"),
    "overdue-jobs": (112, "leak"),
    "overdue-fetches": (377, "leak"),
    "fetches-in-vain": (77, "rules"),
    "kept-pins": (1377, "freed"),
    "hand-on": (306, "rules"),
    "abandoned-jobs": (29, "rules"),
    "place-waiting": (37, "rules"),
    "retried-creates": (10, "rules"),
    "promises": (10, "passed"),
    "backing": (9, "memory"),
    "no-passing": (15, "passed"),
    "first-come": (27, "passed"),
    "retired-permits": (3, "leak"),
    "settled-permits": (28, "leak"),
    "settled-room": (10, "rules"),
    "trimmed-tails": (0, "rules"),
    "withdrawals": (2, "given up"),
    "deadlines": (112, "deadline"),
    "released-calls": (66, "deadline"),
    "new-numbers": (43, "exception"),
    "refused-calls": (6, "given up"),
    "lost-clients": (2043, "rules"),
    "absent-clients": (205, "rules"),
    "own-answers": (6, "exception"),
    "torn-messages": (63, "unanswered"),
    "heard-goodbyes": (5, "leak"),
    "coming-back": (4, "liveness"),
    "answers-at-an-end": (94, "prompt"),
    "answers-at-a-death": (50, "prompt"),
    "failed-calls": (118, "prompt"),
    "sent-releases": (0, "leak"),
    "stirred-clients": (4, "prompt"),
    "woken-threads": (13, "leak"),
    "other-kinds": (10, "rules"),
    "idle-keepers": (77, "rules"),
    "last-objects": (5, "rules"),
    "withdrawn-room": (2, "given up"),
    "withdrawn-permits": (57, "given up"),
    "heard-blocking-goodbyes": (5, "leak"),
    "settled-releases": (10, "rules"),
    "settled-drops": (190, "rules"),
    "settled-returns": (75, "rules"),
    "released-permits": (3, "leak"),
    "lost-permits": (10, "leak"),
    "needed-victims": (83, "waste"),
    "free-first": (10, "waste"),
    "refused-first": (2420, "waste"),
    "step-pins": (497, "names"),
    "step-views": (1569, "names"),
    "step-views-last": (847, "names"),
    "living-core": (319, "names"),
    "no-zeros": (47, "names"),
    "places-of-the-step": (69, "names"),
    "bounded-waits": (897, "still"),
}
"""The seed that fails without each ablation's safeguard, and the kind of violation."""


def ablation(what: str) -> Callable[[Callable[[Replace], None]], Callable[[Replace], None]]:
    """Register a function that switches a safeguard off."""

    def register(switch_off: Callable[[Replace], None]) -> Callable[[Replace], None]:
        name = switch_off.__name__.strip("_").replace("_", "-")
        ABLATIONS.append(Ablation(name, what, switch_off, *MISSED[name]))
        return switch_off

    return register


def _parts(owner: Any) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)


def _set(owner: Any, name: Any, new: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = new
    else:
        setattr(owner, name, new)
