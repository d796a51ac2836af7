"""Access log: one event of one schema for each request that has ended."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from afferent.telemetry.trace import Trace


class AccessLine(Struct, frozen=True, kw_only=True):
    """Fields of the event ``request``, in addition to its time and process."""

    request_id: str
    client_request_id: str
    api: str
    path: str
    outcome: str
    where: str
    media: str
    items: str
    ms: float
    prompt_tokens: int
    completion_tokens: int
    copied_bytes: int

    @classmethod
    def of(cls, trace: Trace, *, api: str, outcome: str, seconds: float) -> AccessLine:
        return cls(
            request_id=trace.request_id,
            client_request_id=trace.client_request_id,
            api=api,
            path=trace.what,
            outcome=outcome,
            where="" if outcome == "ok" else trace.where,
            media=trace.media,
            items=", ".join(trace.items),
            ms=round(seconds * 1e3, 1),
            prompt_tokens=trace.num_prompt_tokens,
            completion_tokens=trace.num_answer_tokens,
            copied_bytes=sum(span.copied_nbytes for span in trace.spans),
        )

    def fields(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)
