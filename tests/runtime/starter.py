"""A process that becomes ready, ends or hangs, as its settings select."""

from __future__ import annotations

import signal
import sys
from typing import Literal

from msgspec import Struct

from afferent.proxy.launch import LEAVE_SIGNAL
from afferent.runtime.process import ChildProcess

What = Literal["ready", "end", "hang"]


class StarterSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    listener_fd: int = -1
    what: What


def main() -> None:
    child = ChildProcess.start()
    what = child.settings(StarterSettings).what
    signal.signal(LEAVE_SIGNAL, lambda *_: sys.exit(0))
    if what == "end":
        child.report("can't find what it needs")
        sys.exit(1)
    if what == "ready":
        child.report("here", ready=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
