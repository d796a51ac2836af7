"""For authors of engines and tiers: does one keep the promises of `afferent.Engine`, or of a tier?

`check` runs one of the `CHECKS` against a `Subject`, which is your engine with `Question`s whose
answers you know; `check_tier` runs one of the `CHECKS_OF_TIERS` against your tier. A broken promise
is `NotConforming`.
"""

from afferent.testing.engine_conformance import CHECKS, check
from afferent.testing.engine_trial import NotConforming, Part, Question, Subject
from afferent.testing.tier_conformance import CHECKS_OF_TIERS, check_tier

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
