"""Conformance checks of the promises of `afferent.engines.protocol`, for authors of engines.

Each check is a coroutine; `CHECKS` has them by name. With pytest, for example:

    @pytest.mark.parametrize("name", CHECKS)
    def test_my_engine(name: str) -> None:
        async def run() -> None:
            async with my_engine() as subject:
                await check(name, subject)

        asyncio.run(run())

``subject`` is a `Subject`: the engine, the store's address, and questions with known answers. A
broken promise raises `NotConforming`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from afferent.conformance.engine_extras import does_what_it_supports
from afferent.conformance.engine_trial import (
    NotConforming,
    Said,
    Subject,
    Trial,
    require,
    require_answer,
)
from afferent.engines.protocol import EngineRequest, Tokens
from afferent.errors import (
    AfferentError,
    EngineUnavailable,
    InvalidRequest,
    StaleHandle,
    StoreRestarted,
    Unavailable,
    UnsupportedParameter,
)
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.types import Handle, Item, ObjectKind, Placeholder

_NUM_ROUNDS = 4
_NUM_AT_ONCE = 24
_LONG_ANSWER = 1024
_TOLERANCE = 1e-3


async def check(name: str, subject: Subject) -> None:
    """Run one of `CHECKS`. After ``says_when_it_is_unavailable`` the engine is gone.

    Raises:
        NotConforming: The engine does not keep that promise.
    """
    store = await AsyncDaemonStore.connect(subject.store_address, name="trial", writable=True)
    try:
        await CHECKS[name](Trial(subject, store))
    finally:
        await store.close()


async def accepts_once_and_first(trial: Trial) -> None:
    """Check for `Accepted`, then tokens, then `Finished`, with the right answer."""
    for number in range(_NUM_ROUNDS):
        question = trial.question(number)
        require_answer(await trial.ask(question), question)
    await trial.engine.stats()  # its result may be None


async def keeps_what_it_accepted(trial: Trial) -> None:
    """Check that the engine has its own pins at `Accepted`.

    The caller releases its pins, and all unpinned memory is evicted and overwritten, before the
    next event is requested.
    """
    for number in range(_NUM_ROUNDS):
        question = trial.question(number)
        request = await trial.place(question)
        async with trial.accepted(request) as events:
            await trial.store.release(request.request_id)
            await trial.overwrite(_handles(request))
            require_answer(await trial.rest(events), question)
        await trial.stop_overwriting()


async def keeps_what_others_share(trial: Trial) -> None:
    """Check that the end of one request keeps features that another request shares."""
    question = trial.question(0)
    first = await trial.place(question)
    second = msgspec.structs.replace(first, request_id=f"{first.request_id}-again")
    async with trial.accepted(second) as events:
        async with trial.accepted(first):
            await trial.store.release(first.request_id)
        await trial.overwrite(_handles(first))
        require_answer(await trial.rest(events), question)
    await trial.stop_overwriting()


async def gives_back_at_the_end(trial: Trial) -> None:
    for number in range(_NUM_ROUNDS):
        await trial.ask(trial.question(number))
    await trial.require_nothing_held("after the last answer")


async def gives_back_when_encoded(trial: Trial) -> None:
    """Check that features are released after encoding, and not at the end of a long answer."""
    question, info = trial.question(0), trial.engine.info
    room = (info.max_model_len if info is not None else 0) - len(question.token_ids)
    most = min(room, _LONG_ANSWER)
    request = await trial.place(question, max_tokens=most, ignore_eos=True)
    async with trial.accepted(request) as events:
        await trial.store.release(request.request_id)
        num_tokens = 0
        while await trial.held_nbytes():
            event = await trial.next(events)
            num_tokens += len(event.token_ids) if isinstance(event, Tokens) else most
            is_half_way = num_tokens > most // 2
            require(not is_half_way, f"features are still held after half of {most} tokens")


async def gives_back_when_closed_after_acceptance(trial: Trial) -> None:
    """Check that closing the iterator aborts the request."""
    await _abort(trial, num_events=0)


async def gives_back_when_closed_between_tokens(trial: Trial) -> None:
    await _abort(trial, num_events=1)


async def gives_back_when_closed_at_once(trial: Trial) -> None:
    """Check an abort before `Accepted`."""
    for number in range(_NUM_ROUNDS):
        request = await trial.place(trial.question(number))
        events = trial.engine.submit(request)
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await events.aclose()
        await trial.store.release(request.request_id)
    await trial.require_nothing_held("after requests that were aborted before they were accepted")
    await accepts_once_and_first(trial)


async def refuses_stale_handles(trial: Trial) -> None:
    """Check for `StaleHandle` or `StoreRestarted`, and that all other pins are released."""
    request = await trial.place(trial.question(0))
    await trial.store.release(request.request_id, _handles(request)[-1:])
    await trial.store.evict(ObjectKind.FEATURES)
    await _require_refusal(trial, request, StaleHandle)
    last = request.items[-1]
    handle = msgspec.structs.replace(last.handle, segment=last.handle.segment + 1)
    former = _with_last(request, msgspec.structs.replace(last, handle=handle))
    await _require_refusal(trial, former, StoreRestarted)
    await trial.store.release(request.request_id)
    await trial.require_nothing_held("after requests that were refused")


async def refuses_wrong_placeholders(trial: Trial) -> None:
    """Check placeholders outside of the prompt, and two items at one position."""
    request = await trial.place(trial.question(0))
    last = request.items[-1]
    for offset in (len(request.token_ids) - 1, len(request.token_ids)):
        outside = msgspec.structs.replace(last, placeholder=Placeholder(offset, 2))
        await _require_refusal(trial, _with_last(request, outside), InvalidRequest)
    twice = msgspec.structs.replace(request, items=[*request.items, last])
    await _require_refusal(trial, twice, InvalidRequest)
    await trial.store.release(request.request_id)
    await trial.require_nothing_held("after requests that were refused")


async def respects_max_tokens(trial: Trial) -> None:
    question = trial.question(0)
    for max_tokens in range(1, len(question.answer)):
        said = await trial.ask(question, max_tokens=max_tokens)
        wanted = Said(question.answer[:max_tokens], reason="length")
        require(said == wanted, f"with max_tokens={max_tokens} it says {said}")


async def respects_the_end_of_sequence(trial: Trial) -> None:
    """Check that the end token ends the answer and is not part of it, unless ignored."""
    question, info = trial.question(0), trial.engine.info
    ends = set(info.eos_token_ids if info is not None else [])
    require(bool(ends), "the engine names no end-of-sequence token")
    require_answer(await trial.ask(question), question)
    num_answer, num_tokens = len(question.answer), len(question.answer) + 4
    said = await trial.ask(question, max_tokens=num_tokens, ignore_eos=True)
    goes_on = len(said.token_ids) == num_tokens and said.reason == "length"
    require(goes_on, f"with ignore_eos it ends early: {said}")
    require(said.token_ids[:num_answer] == question.answer, "ignore_eos changes the answer")
    require(said.token_ids[num_answer] in ends, "with ignore_eos the end token is left out")


async def gives_logprobs_when_asked(trial: Trial) -> None:
    """Check logprobs: one entry for each token, with the requested alternatives, best first.

    Without a request there are none. Frontends request none from an engine whose `info` lists them
    as unsupported.
    """
    question, info = trial.question(0), trial.engine.info
    require(not (await trial.ask(question)).logprobs, "nobody asked for logprobs")
    if info is not None and "num_logprobs" in info.unsupported:
        return
    for num_logprobs in (0, 3):
        with contextlib.suppress(UnsupportedParameter):
            _check_logprobs(await trial.ask(question, num_logprobs=num_logprobs), num_logprobs)
    await trial.require_nothing_held("after a request for logprobs")


async def answers_many_at_once(trial: Trial) -> None:
    """Check that concurrent requests get their own answers, while others are aborted."""

    async def one(number: int) -> None:
        question = trial.question(number)
        if number % 3 == 0:
            request = await trial.place(question)
            async with trial.accepted(request) as events:
                trial.store.forget(request.request_id)
                await trial.next(events)
        else:
            require_answer(await trial.ask(question), question)

    ended = await asyncio.gather(*map(one, range(_NUM_AT_ONCE)), return_exceptions=True)
    for error in ended:
        if error is not None:
            raise error
    await trial.require_nothing_held("after many requests at once")


async def says_when_it_is_unavailable(trial: Trial) -> None:
    """Check that running requests fail retryably, and new ones with `EngineUnavailable`."""
    question, info = trial.question(0), trial.engine.info
    room = (info.max_model_len if info is not None else 0) - len(question.token_ids)
    request = await trial.place(question, max_tokens=room, ignore_eos=True)
    later = await trial.place(question)
    async with trial.accepted(request) as events:
        if inspect.isawaitable(stopping := trial.subject.stop()):
            await stopping
        num_tokens = 0
        try:
            while (event := await trial.next(events)) is not None:
                num_tokens += len(event.token_ids) if isinstance(event, Tokens) else 0
        except AfferentError as error:
            require(isinstance(error, Unavailable), f"an engine that is gone says {error!r}")
        else:  # a fast engine may have sent all of it already
            require(num_tokens == room, "a request comes to its end though the engine is gone")
    await trial.require_gone()  # its last events may arrive before the news of its end
    await _require_refusal(trial, later, EngineUnavailable)
    for held in (request, later):
        await trial.store.release(held.request_id)
    await trial.require_nothing_held("by an engine that is gone")


_ALL: Sequence[Callable[[Trial], Awaitable[None]]] = (
    accepts_once_and_first,
    keeps_what_it_accepted,
    keeps_what_others_share,
    gives_back_at_the_end,
    gives_back_when_encoded,
    gives_back_when_closed_at_once,
    gives_back_when_closed_after_acceptance,
    gives_back_when_closed_between_tokens,
    refuses_stale_handles,
    refuses_wrong_placeholders,
    respects_max_tokens,
    respects_the_end_of_sequence,
    gives_logprobs_when_asked,
    does_what_it_supports,
    answers_many_at_once,
    says_when_it_is_unavailable,
)

CHECKS = {promise.__name__: promise for promise in _ALL}
"""All checks by name, in an order in which they can run one after another on one engine."""


async def _abort(trial: Trial, *, num_events: int) -> None:
    for number in range(_NUM_ROUNDS):
        request = await trial.place(trial.question(number))
        async with trial.accepted(request) as events:
            await trial.store.release(request.request_id)
            for _ in range(num_events):
                await trial.next(events)
    await trial.require_nothing_held("after requests that were aborted")
    await accepts_once_and_first(trial)


async def _require_refusal(
    trial: Trial, request: EngineRequest, expected: type[AfferentError]
) -> None:
    """Require that the request fails with this error, and is never accepted."""
    events = trial.engine.submit(request)
    try:
        event = await trial.next(events)
    except expected:
        return
    except AfferentError as error:
        raise NotConforming(f"it says {error!r} instead of {expected.__name__}") from error
    finally:
        await events.aclose()
    raise NotConforming(f"it says {event} instead of {expected.__name__}")


def _check_logprobs(said: Said, num_logprobs: int) -> None:
    same = len(said.logprobs) == len(said.token_ids)
    require(same, f"{len(said.logprobs)} logprobs for {len(said.token_ids)} tokens")
    for token_id, entry in zip(said.token_ids, said.logprobs, strict=True):
        values = [value for _, value in entry.top]
        require(len(values) == num_logprobs, f"{len(values)} of {num_logprobs} alternatives")
        require(values == sorted(values, reverse=True), "the alternatives are not best first")
        require(max([entry.logprob, *values]) <= _TOLERANCE, "a probability is more than 1")
        if values:
            is_best = entry.top[0][0] == token_id and abs(entry.logprob - values[0]) < _TOLERANCE
            require(is_best, "greedy decoding did not choose the likeliest token")


def _handles(request: EngineRequest) -> list[Handle]:
    return [item.handle for item in request.items]


def _with_last(request: EngineRequest, item: Item) -> EngineRequest:
    return msgspec.structs.replace(request, items=[*request.items[:-1], item])
