"""Scope of a request: what lasts from its arrival to the end of its answer, and its access log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from afferent.admission.shares import NAMELESS, Share
from afferent.errors import AfferentError
from afferent.proxy import answer_headers, counting
from afferent.proxy.app_settings import AppSettings
from afferent.proxy.auth import Access
from afferent.proxy.responses import new_id
from afferent.proxy.statuses import failure_of
from afferent.runtime import logs
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.telemetry.journal import JOURNAL
from afferent.telemetry.registry import gauge
from afferent.telemetry.trace import Trace

if TYPE_CHECKING:
    from afferent.telemetry.explain import Explainer

log = logging.getLogger(__name__)

IN_FLIGHT = gauge("afferent_requests_in_flight", "Requests being answered")
_CLIENT_GONE = "client_gone"


class RequestScope:
    """One request: its id, trace, tenant share and deadline.

    Attributes:
        trace: Its stages, and its entry in the recent-requests buffer.
        share: Its tenant, once it is admitted.
        deadline: End of its time, on the event loop's clock.
        outcome: ``ok``, ``client_gone`` or the code of an error; empty until it is known.
    """

    def __init__(
        self, store: AsyncDaemonStore, access: Access, trace: Trace, *, timeout_s: float
    ) -> None:
        self._store, self._access = store, access
        self.trace = trace
        self.share: Share = NAMELESS
        self.deadline = asyncio.get_running_loop().time() + timeout_s
        self.outcome = ""
        self._is_released = False

    @property
    def id(self) -> str:
        """Id of the request, under which its objects are pinned in the store."""
        return self.trace.request_id

    async def admit(self, headers: Mapping[str, str], asgi: Scope) -> Share:
        """Find the request's tenant, and take one of its slots.

        Args:
            headers: With lower-case names.
            asgi: Names the client's address.

        Raises:
            NotAuthenticated: There is no key, or an unknown one.
            QuotaExceeded: The tenant has reached its limit of running requests.
            EngineUnavailable: No requests are admitted now.
        """
        client = asgi.get("client")
        self.share = await self._access.enter(self.trace, headers, host=client[0] if client else "")
        self.trace.tenant = self.share.tenant
        return self.share

    def fail(self, error: Exception) -> AfferentError:
        """Note an error as the outcome; return it as the client sees it."""
        failure = failure_of(error)
        self.outcome = failure.code
        return failure

    def leave(self) -> None:
        """Note that the client has gone before its answer was complete."""
        self.outcome = _CLIENT_GONE

    def note(self, outcome: str) -> None:
        """Set the outcome."""
        self.outcome = outcome

    def release(self) -> None:
        """Release the request's objects; only the first call has an effect."""
        if not self._is_released:
            self._is_released = True
            self._store.forget(self.id)

    def release_after(self, num_answers: int) -> Callable[[], None]:
        """Return a function whose ``num_answers``-th call releases the request's objects.

        An engine calls it for each answer for which it has its own pins.
        """
        left = num_answers

        def count() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self.release()

        return count


class RequestScopes:
    """Opens the scopes of one process's requests."""

    def __init__(self, store: AsyncDaemonStore, access: Access, settings: AppSettings) -> None:
        self._store, self._access, self._settings = store, access, settings
        self._explainer: Explainer | None = None
        if settings.explain:
            from afferent.telemetry import explain  # rich takes 2 MiB

            self._explainer = explain.Explainer(explain.make_console())

    @contextmanager
    def open(
        self, what: str, headers: Iterable[tuple[bytes, bytes]], *, id_prefix: str, api: str
    ) -> Iterator[RequestScope]:
        """Open the scope of a request.

        Its end releases the request's objects in the store, frees its tenant's slot, and counts,
        logs and records the request. An exception that passes is one of a client that has gone.

        Args:
            what: Method and path, for people.
            headers: For the trace of the client's own tracer.
            id_prefix: Begin of the request's id.
            api: Metric label.
        """
        headers = list(headers)
        client_id = answer_headers.client_id_in(headers)
        trace = Trace(new_id(id_prefix), what, client_request_id=client_id)
        logs.request_id.set(trace.request_id)
        if self._settings.tracing is not None:
            self._settings.tracing.begin(trace, headers)
        timeout_s = self._settings.request_timeout_s
        scope = RequestScope(self._store, self._access, trace, timeout_s=timeout_s)
        JOURNAL.begin(trace)
        ended_as = _CLIENT_GONE
        try:
            with IN_FLIGHT.labels().track():
                yield scope
            ended_as = "ok"
        finally:
            scope.release()
            self._access.leave(trace.request_id)
            counting.count_stages(trace)
            self._tell(trace, api, scope.outcome or ended_as)

    def _tell(self, trace: Trace, api: str, outcome: str) -> None:
        """Count, log, record and explain a finished request."""
        seconds = (time.monotonic_ns() - trace.start_ns) / 1e9
        JOURNAL.end(trace, outcome)
        counting.count_request(trace, api, outcome, seconds=seconds)
        log.info("request", extra=access_fields(trace, api=api, outcome=outcome, seconds=seconds))
        if trace.root is not None:
            trace.root.end(trace, api=api, outcome=outcome)
        if self._explainer is not None:
            self._explainer.show(trace, outcome)


def access_fields(trace: Trace, *, api: str, outcome: str, seconds: float) -> dict[str, Any]:
    """Return the fields of the event ``request`` in the access log."""
    return {
        "request_id": trace.request_id,
        "client_request_id": trace.client_request_id,
        "api": api,
        "path": trace.what,
        "outcome": outcome,
        "where": "" if outcome == "ok" else trace.where,
        "media": trace.media,
        "items": ", ".join(trace.items),
        "ms": round(seconds * 1e3, 1),
        "prompt_tokens": trace.num_prompt_tokens,
        "completion_tokens": trace.num_answer_tokens,
        "copied_bytes": sum(span.copied_nbytes for span in trace.spans),
    }
