"""Metrics of a request, from its trace, and of the shared event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from afferent import errors
from afferent.items.request import DocumentPart, MediaPart
from afferent.telemetry.journal import JOURNAL
from afferent.telemetry.registry import SECONDS, SHORT_SECONDS, WAIT_SECONDS, counter, histogram
from afferent.telemetry.trace import STAGES, Trace, declare_stages
from afferent.types import FILE_KINDS

declare_stages("read_body", "parse_json", "tokenize", "digest", "into_the_arena", "acquire")
declare_stages("fetch", "room_for_features", "queue_jobs", "wait_for_a_permit", "first_token")
declare_stages("wait_for_features", "wait_for_embeddings", "convert")

APIS: set[str] = set()
"""Names of the APIs; each is added with its endpoint."""
MEDIA = ("none", *FILE_KINDS, "mixed", "unknown", "unread")
"""Kind of a request's media.

``unknown``: the body was not read to its end. ``unread``: the request was refused before, for
example without a known key.
"""
PLACES = ("body", "admission", "fetch", "preprocess", "engine")
"""Stages at which a failed request may end."""


class _Outcomes:
    """``ok``, ``client_gone``, or the code of any error, including those of plugins."""

    def __contains__(self, word: object) -> bool:
        return word in tuple(self)

    def __iter__(self) -> Iterator[str]:
        yield from ("ok", "client_gone")
        yield from (cls.code for cls in errors.walk())


REQUESTS = counter(
    "afferent_requests_total",
    "Requests by API and outcome: ok, client_gone, or the code of an error",
    api=APIS,
    outcome=_Outcomes(),
)
REQUEST_SECONDS = histogram(
    "afferent_request_seconds",
    "Seconds from a request's arrival to the end of its answer",
    SECONDS,
    api=APIS,
)
REJECTIONS = counter(
    "afferent_rejections_total",
    "Requests that did not end well, by the error's code, where they had come to, and their media",
    code=_Outcomes(),
    where=PLACES,
    media=MEDIA,
)
STAGE_SECONDS = histogram(
    "afferent_stage_seconds",
    "Seconds of each stage that a request has completed, by the modality of its media",
    SHORT_SECONDS,
    stage=STAGES,
    media=MEDIA,
)
COPIED_BYTES = counter(
    "afferent_copied_bytes_total",
    "Bytes that stages copied, by the modality of the request's media",
    stage=STAGES,
    media=MEDIA,
)
LOOP_SECONDS = histogram(
    "afferent_event_loop_late_seconds",
    "Seconds by which a frontend's event loop came late to a timer, ten times a second of work",
    (0.001, *SHORT_SECONDS[3:]),
)
TTFT_SECONDS = histogram(
    "afferent_time_to_first_token_seconds",
    "Seconds from a request's arrival to the first token of each answer, by its media",
    WAIT_SECONDS,
    media=MEDIA,
)
INTER_TOKEN_SECONDS = histogram(
    "afferent_inter_token_seconds",
    "Seconds between a token of an answer and the next one; tokens of one step share its time",
    SHORT_SECONDS,
)
PER_OUTPUT_TOKEN_SECONDS = histogram(
    "afferent_time_per_output_token_seconds",
    "Seconds that each token of an answer took after the first one, on average over the answer",
    SHORT_SECONDS,
)

_NO_ROOM = (errors.StoreFull.code, errors.ArenaTooSmall.code, errors.DeadlineExceeded.code)
"""Gate errors for a body; a late body is `BodyTooSlow`."""

_TICK_S, _IDLE_TICK_S = 0.1, 1.0
"""A wakeup costs some hundred microseconds, even on an idle machine."""


def media_of(parts: Sequence[MediaPart | DocumentPart]) -> str:
    """Return the kind of a request's media, as one word."""
    found = {part.modality for part in parts}
    if len(found) > 1:
        return "mixed"
    return str(found.pop()) if found else "none"


def count_request(trace: Trace, api: str, outcome: str, *, seconds: float) -> None:
    """Count a finished request: ``ok``, ``client_gone``, or the code of its error."""
    REQUESTS.labels(api, outcome).inc()
    REQUEST_SECONDS.labels(api).observe(seconds)
    if outcome != "ok":
        is_refused = trace.where == "body" and outcome in _NO_ROOM
        where = "admission" if is_refused else trace.where
        REJECTIONS.labels(outcome, where, trace.media).inc()


def count_stages(trace: Trace) -> None:
    """Count the completed stages of a request."""
    for span in trace.spans:
        labels = (span.stage, trace.media)
        STAGE_SECONDS.labels(*labels).observe((span.end_ns - span.start_ns) / 1e9)
        if span.copied_nbytes:
            COPIED_BYTES.labels(*labels).inc(span.copied_nbytes)


class AnswerTimes:
    """Arrival times of one answer's tokens, counted as they arrive."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._first_ns = self._latest_ns = self._num_later = 0

    def tokens(self, num_tokens: int, *, now_ns: int) -> None:
        """Count tokens that one step of the engine produced."""
        if num_tokens == 0:
            return
        if self._first_ns == 0:
            seconds = (now_ns - self._trace.start_ns) / 1e9
            TTFT_SECONDS.labels(self._trace.media).observe(seconds)
            self._first_ns = now_ns
        else:
            seconds = (now_ns - self._latest_ns) / 1e9 / num_tokens
            INTER_TOKEN_SECONDS.labels().observe(seconds, times=num_tokens)
            self._num_later += num_tokens
        self._latest_ns = now_ns

    def end(self) -> None:
        """Count the end of the answer, also after an error."""
        if self._num_later:
            seconds = (self._latest_ns - self._first_ns) / 1e9 / self._num_later
            PER_OUTPUT_TOKEN_SECONDS.labels().observe(seconds)


async def count_lateness() -> None:
    """Measure how late this event loop handles timers, until cancelled."""
    while True:
        tick_s = _TICK_S if JOURNAL.num_running else _IDLE_TICK_S
        due_s = time.monotonic() + tick_s
        await asyncio.sleep(tick_s)
        LOOP_SECONDS.labels().observe(max(0.0, time.monotonic() - due_s))
