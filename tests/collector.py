"""Objects that garbage collections of a test don't visit."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Exclude existing objects from garbage collections.

    After the block, collections visit them again, except in a test run: `conftest.py` has excluded
    the modules of all tests, and no call tells them from the others.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()  # noqa: TID251
