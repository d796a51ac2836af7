"""Conformance suites, for authors of engines and tiers.

- `check` runs one of the `CHECKS` against a `Subject`: your engine, with `Question`s and their
  known answers.
- `check_tier` runs one of the `CHECKS_OF_TIERS` against your tier.

A broken promise raises `NotConforming`.
"""

from afferent.conformance.engine import CHECKS, check
from afferent.conformance.engine_trial import NotConforming, Part, Question, Subject
from afferent.conformance.tier import CHECKS_OF_TIERS, check_tier

__all__ = [
    "CHECKS",
    "CHECKS_OF_TIERS",
    "NotConforming",
    "Part",
    "Question",
    "Subject",
    "check",
    "check_tier",
]
