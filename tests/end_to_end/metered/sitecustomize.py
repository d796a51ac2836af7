"""Makes a frontend of `afferent serve` tell what its callbacks take: see `tests.callbacks`.

Every interpreter that finds this folder on its path runs this file before anything else; it is for
a server's frontends alone. uvloop has no place where its callbacks could be timed, so asyncio's own
loop runs the same callbacks in its stead.
"""

from __future__ import annotations

import asyncio
import os
import sys

if "afferent.builtin.frontend" in sys.orig_argv:
    import uvloop

    from tests import callbacks

    callbacks.tell(os.environ[callbacks.LOG])
    uvloop.run = asyncio.run  # type: ignore[assignment]
