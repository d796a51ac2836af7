"""Waiting for several tasks, or for a thread, in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from afferent.errors import AfferentError

P = ParamSpec("P")
Result = TypeVar("Result")


async def in_thread(work: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """Run ``work`` in a thread, and return its result.

    A cancelled call still waits for the thread: the memory that it writes into may be reused after
    that.
    """
    return await _ended(asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs)))


async def in_pool(
    pool: Executor, work: Callable[[], Result], undo: Callable[[Result], object] | None = None
) -> Result:
    """Run ``work`` in a thread of ``pool``; all else is as for `in_thread`.

    Args:
        undo: Called, in the pool, with a result that a cancelled call does not return.
    """
    loop = asyncio.get_running_loop()
    running = loop.run_in_executor(pool, work)
    try:
        return await _ended(running)
    except asyncio.CancelledError:
        if undo is not None and not running.cancelled() and running.exception() is None:
            try:
                undoing = loop.run_in_executor(pool, undo, running.result())
            except RuntimeError:  # the pool has ended meanwhile
                undo(running.result())
            else:
                await until_done(undoing)
        raise


async def uninterrupted(work: Coroutine[Any, Any, Result]) -> Result:
    """Await ``work``; a cancelled call still waits for its end."""
    return await _ended(asyncio.ensure_future(work))


async def _ended(running: asyncio.Future[Result]) -> Result:
    """Return the result of a call, and wait for its end in every case."""
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await until_done(running)
        raise


async def until_done(running: asyncio.Future[Any]) -> None:
    """Wait for the end of a call, also if cancelled meanwhile."""
    while not running.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([running])
    if not running.cancelled():
        running.exception()  # marks the exception as retrieved


async def open_in_thread(open_: Callable[[], Result], close: Callable[[Result], object]) -> Result:
    """Run ``open_`` in a thread, and return its result.

    A cancelled call does not wait for the thread; its result is closed.
    """
    opened: list[Result] = []
    is_left = False

    def work() -> None:
        opened.append(open_())
        if is_left:
            close_it()

    def close_it() -> None:
        with suppress(IndexError):  # the other side has closed it
            close(opened.pop())

    try:
        await asyncio.to_thread(work)
    except asyncio.CancelledError:
        is_left = True
        close_it()
        raise
    return opened.pop()


async def gather(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results in order; the first failure cancels the others and is raised itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except* AfferentError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
