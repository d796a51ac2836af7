"""Headers of an answer that report what Afferent did for the request.

- ``x-afferent-items``: outcomes of its media items, such as ``hit=2, made=1``
- ``x-afferent-max-tokens``: limit of the answer's tokens, if the model has room for fewer than the
  request asked for
- ``server-timing``: durations of its stages until the answer began, in milliseconds
- ``x-ratelimit-limit-requests`` and ``x-ratelimit-remaining-requests``: the tenant's limit of
  running requests, and the rest of it beside this request
- ``x-request-id``: the client's own id if it sent one, and Afferent's otherwise
- ``x-afferent-request-id``: Afferent's id, beside the client's
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from afferent.telemetry.trace import Trace

Headers = Sequence[tuple[bytes, bytes]]

REPORTED: Final = (
    "x-afferent-items",
    "server-timing",
    "x-afferent-request-id",
    "x-afferent-max-tokens",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
)
"""Names of these headers without ``x-request-id``."""
_ITEMS, _TIMING, _OWN_ID, _REDUCED, _LIMIT, _LEFT = (name.encode() for name in REPORTED)
_OF_REQUESTS: Final = {_LIMIT, _LEFT, b"x-ratelimit-reset-requests"}
_ID: Final = b"x-request-id"
_CLIENT_ID: Final = re.compile(rb"[!-~]{1,128}")
_STAGE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_STAGES: Final = 24


def client_id_in(headers: Headers) -> str:
    """Return the id that a client gives its request; empty if there is none, or it is malformed.

    Args:
        headers: With lower-case names.
    """
    sent = next((value for name, value in headers if name == _ID), b"")
    return sent.decode() if _CLIENT_ID.fullmatch(sent) else ""


def with_report(answer: Headers, trace: Trace) -> list[tuple[bytes, bytes]]:
    """Return an answer's headers with those of this module."""
    own_id, client_id = trace.request_id.encode(), trace.client_request_id.encode()
    if client_id:
        answer = [(name, value) for name, value in answer if name.lower() != _ID]
    if trace.max_requests:  # replaces the limit of an upstream, which concerns all tenants
        answer = [(name, value) for name, value in answer if name.lower() not in _OF_REQUESTS]
    found = [*answer]
    if client_id or not any(name.lower() == _ID for name, _ in found):
        found.append((_ID, client_id or own_id))
    if client_id:
        found.append((_OWN_ID, own_id))
    if trace.outcomes:
        items = ", ".join(f"{word}={number}" for word, number in sorted(trace.outcomes.items()))
        found.append((_ITEMS, items.encode()))
    if trace.reduced_to:
        found.append((_REDUCED, str(trace.reduced_to).encode()))
    if trace.max_requests:
        found.append((_LIMIT, str(trace.max_requests).encode()))
        found.append((_LEFT, str(trace.num_requests_left).encode()))
    if durations := _durations(trace):
        found.append((_TIMING, durations))
    return found


def _durations(trace: Trace) -> bytes:
    """Return the time of each stage; that of a stage with several spans is their sum."""
    stages: dict[str, int] = {}
    for span in trace.spans:
        if _STAGE.fullmatch(span.stage):  # one of another package's engine may be any text
            stages[span.stage] = stages.get(span.stage, 0) + span.end_ns - span.start_ns
    named = list(stages.items())[:_MAX_STAGES]
    return ", ".join(f"{name};dur={nanos / 1e6:.1f}" for name, nanos in named).encode()
