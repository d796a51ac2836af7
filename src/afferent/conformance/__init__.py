"""Conformance suites, for authors of engines, upstreams, families and tiers.

- `check` runs one of the `CHECKS` against a `Subject`: your engine, with `Question`s and their
  known answers.
- `check_upstream` runs one of the `CHECKS_OF_UPSTREAMS` against an `UpstreamSubject`: the
  description of your upstream, and `UpstreamItem`s with known answers.
- `check_family` runs one of the `CHECKS_OF_FAMILIES` against your family.
- `check_tier` runs one of the `CHECKS_OF_TIERS` against your tier.

A broken promise raises `NotConforming`.
"""

from afferent.conformance.engine import CHECKS, check
from afferent.conformance.engine_trial import NotConforming, Part, Question, Subject
from afferent.conformance.family import CHECKS_OF_FAMILIES, check_family
from afferent.conformance.tier import CHECKS_OF_TIERS, check_tier
from afferent.conformance.upstream import (
    CHECKS_OF_UPSTREAMS,
    UpstreamItem,
    UpstreamSubject,
    check_upstream,
)

__all__ = [
    "CHECKS",
    "CHECKS_OF_FAMILIES",
    "CHECKS_OF_TIERS",
    "CHECKS_OF_UPSTREAMS",
    "NotConforming",
    "Part",
    "Question",
    "Subject",
    "UpstreamItem",
    "UpstreamSubject",
    "check",
    "check_family",
    "check_tier",
    "check_upstream",
]
