"""Make a frontend of `afferent serve` log the cost of its callbacks: see `tests.callbacks`.

Every interpreter with this folder on its path runs this file first; only a server's frontends are
changed. uvloop does not allow its callbacks to be timed, so asyncio's own loop replaces it.
"""

from __future__ import annotations

import asyncio
import os
import sys

if {"afferent.builtin.frontend", "afferent.proxy.frontend"}.intersection(sys.orig_argv):
    import uvloop

    from tests import callbacks

    callbacks.tell(os.environ[callbacks.LOG])
    uvloop.run = asyncio.run  # type: ignore[assignment]
