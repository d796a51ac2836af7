"""The number of generated examples: a default, and a higher one with ``--storm``."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

_SHORT, _LONG = "short", "long"


def choose(*, is_long: bool) -> None:
    """Choose the profile; call this before any test is collected."""
    for name in (_SHORT, _LONG):
        settings.register_profile(
            name,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow],  # the machine may be busy
        )
    settings.load_profile(_LONG if is_long else _SHORT)


def examples(number: int, *, storm: int, **more: Any) -> settings:
    """Return settings for ``number`` examples, or ``storm`` with ``--storm``.

    Args:
        more: Other settings of Hypothesis.
    """
    is_long = settings.get_current_profile_name() == _LONG
    return settings(max_examples=storm if is_long else number, **more)
