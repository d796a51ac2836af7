"""``afferent top``: the activity of a server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.live import Live

from afferent.errors import ConfigError
from afferent.operations.commands import daemons, tables
from afferent.operations.commands.top_frame import frame
from afferent.operations.live_page.feed import WINDOW
from afferent.operations.live_page.observing import Observation, Observer
from afferent.operations.live_page.view import View, earliest, view

_NAME = "afferent top"
_QUIT = b"qQ\x03\x04"


def run(args: argparse.Namespace) -> int:
    """Show frames until ``q``, or a given number; without a terminal, one.

    Raises:
        ConfigError: The requested server is ambiguous, or does not answer.
    """
    folder = Path(daemons.choose_server(args.pid)).parent
    console = tables.make_console()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_show(Observer(folder, name=_NAME), args, console))
    return 0


async def _show(observer: Observer, args: argparse.Namespace, console: Console) -> None:
    is_screen = console.is_terminal and not args.once
    num_left = 1 if args.once or not (args.count or is_screen) else args.count
    looks = _Looks(observer)
    try:
        await looks.first()
        if not is_screen:
            while num_left:
                await asyncio.sleep(args.interval)
                console.print(frame(await looks.next(), width=console.width))
                num_left -= 1
            return
        with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            while num_left is None or num_left:
                draw = partial(_draw, looks.view(), live)
                draw()
                num_left = num_left and num_left - 1
                if num_left == 0 or await keys.quits_within(args.interval, draw):
                    return
                await looks.next()
    finally:
        await observer.close()


def _draw(seen: View, live: Live) -> None:
    console = live.console
    live.update(frame(seen, width=console.width, num_lines=console.height), refresh=True)


class _Looks:
    """Recent snapshots, over which rates are computed."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._seen: deque[Observation] = deque(maxlen=WINDOW)

    async def first(self) -> None:
        """Take the first snapshot.

        Raises:
            ConfigError: No frontend answers.
        """
        self._seen.append(await self._observer.observe())
        if not self._seen[0].frontends:
            raise ConfigError("no frontend of the server answers; it may be starting")

    async def next(self) -> View:
        self._seen.append(await self._observer.observe())
        return self.view()

    def view(self) -> View:
        return view(earliest(self._seen), self._seen[-1])


class _Keys:
    """Keyboard input and size changes of the terminal."""

    def __init__(self) -> None:
        self._stirred, self._is_quit = asyncio.Event(), False

    def on_typed(self) -> None:
        typed = os.read(sys.stdin.fileno(), 64)
        if not typed or any(key in _QUIT for key in typed):
            self._is_quit = True
            self._stirred.set()

    def on_resized(self) -> None:
        self._stirred.set()

    async def quits_within(self, timeout_s: float, draw: Callable[[], None]) -> bool:
        """Return whether the user quits in time; redraw when the size changes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._is_quit:
                    await self._stirred.wait()
                    self._stirred.clear()
                    draw()
        return self._is_quit


@contextlib.contextmanager
def _keys() -> Iterator[_Keys]:
    """Read single keys without echo; restore the terminal at the end."""
    keys, loop = _Keys(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, keys.on_resized)
    if not sys.stdin.isatty():
        yield keys
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    loop.add_reader(fd, keys.on_typed)
    try:
        yield keys
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
