"""Work that an event loop waits for to its end: several tasks, or a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from afferent.errors import AfferentError

P = ParamSpec("P")
Result = TypeVar("Result")


async def in_thread(work: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """What ``work`` returns, done by a thread. Of a call that is cancelled, the thread is over too:
    what it writes into may be somebody else's after that.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # nobody asks for it any more
        raise


async def open_in_thread(open_: Callable[[], Result], close: Callable[[Result], object]) -> Result:
    """What ``open_`` returns, done by a thread; closed where its caller was cancelled meanwhile,
    which does not wait for the thread.
    """
    opened: list[Result] = []
    is_left = False

    def work() -> None:
        opened.append(open_())
        if is_left:
            close_it()

    def close_it() -> None:
        with suppress(IndexError):  # the other side has seen to it
            close(opened.pop())

    try:
        await asyncio.to_thread(work)
    except asyncio.CancelledError:
        is_left = True
        close_it()
        raise
    return opened.pop()


async def gather(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results in order; the first failure cancels the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except* AfferentError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
