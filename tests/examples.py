"""How much of what can be generated the tests look at: some by default, more with ``--storm``."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

_SHORT, _LONG = "short", "long"


def choose(*, is_long: bool) -> None:
    """Before any test is collected."""
    for name in (_SHORT, _LONG):
        settings.register_profile(
            name,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow],  # a busy machine is
        )
    settings.load_profile(_LONG if is_long else _SHORT)


def examples(number: int, *, storm: int, **more: Any) -> settings:
    """So many, and with ``--storm`` so many; ``more`` are settings of Hypothesis."""
    is_long = settings.get_current_profile_name() == _LONG
    return settings(max_examples=storm if is_long else number, **more)
