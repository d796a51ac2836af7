"""For authors of engines: does an engine keep the promises of `afferent.Engine`?

`check` runs one of the `CHECKS` against a `Subject`, which is your engine with `Question`s whose
answers you know; a broken promise is `NotConforming`.
"""

from afferent.testing.engine_conformance import CHECKS, check
from afferent.testing.engine_trial import NotConforming, Part, Question, Subject

__all__ = ["CHECKS", "NotConforming", "Part", "Question", "Subject", "check"]
