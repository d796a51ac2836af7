"""Reading of a request's body, common to all endpoints that take media."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from starlette.requests import Request

from afferent.admission.gate import Gate
from afferent.builtin.pipeline.pipeline import Pipeline
from afferent.files.file_store import FileStore
from afferent.items.file_ids import look_up
from afferent.media.body.cutter import MediaKeys
from afferent.media.body.received import ReceivedBody
from afferent.proxy.app_settings import AppSettings
from afferent.proxy.body import BodyReader
from afferent.proxy.request_scope import RequestScope


class BodyReceiver:
    """Reads bodies with media, for one frontend."""

    def __init__(
        self, pipeline: Pipeline, gate: Gate, settings: AppSettings, files: FileStore | None = None
    ) -> None:
        """Create it.

        Args:
            files: Store of the files that requests name, if there is one.
        """
        self._pipeline, self._gate = pipeline, gate
        self._settings, self._files = settings, files

    async def receive(
        self,
        request: Request,
        own: RequestScope,
        media_keys: MediaKeys,
        *,
        begins_early: bool = False,
    ) -> ReceivedBody:
        """Return the body of an admitted request, with its media and the files that it names.

        Args:
            begins_early: Whether features of images are made while the rest arrives.

        Raises:
            InvalidRequest: It is too large or too slow, or its media are at the wrong places.
            Unavailable: Try again.
        """
        trace, share = own.trace, own.share
        trace.media = "unknown"
        start_ns = time.monotonic_ns()
        reader = BodyReader(
            *(self._pipeline.store, self._gate, own.id),
            *(self._settings.limits_of(share), media_keys),
            tenant=share.tenant,
            knows=partial(self._pipeline.knows, own.id, share.tenant),
            early=self._pipeline.early(share) if begins_early else None,
            heap=self._pipeline.heap,
        )
        body = await reader.read(request)
        files = await look_up(body.json, self._files, tenant=share.tenant)
        copied = sum(item.nbytes for item in body.media.values())
        trace.stage(start_ns, "read_body", copied_nbytes=copied, note=f"{body.nbytes} bytes")
        return replace(body, files=files)
