"""vLLM's media connector: a reference becomes an item of ours, or bytes; all else is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from afferent.engine.references import FeaturesReference
from afferent.engine.vllm.plugin.arena import Gone, arena
from afferent.engine.vllm.plugin.labels import labelled
from afferent.errors import AfferentError, FormatError
from afferent.types import Modality

NAME = "afferent"


@MEDIA_CONNECTOR_REGISTRY.register(NAME)
class ArenaConnector(MediaConnector):
    """Media come from the arena alone: whatever else a URL says, vLLM neither fetches nor decodes
    it. A server in front has done that, within its limits.
    """

    def load_from_url(
        self, url: str, media_io: Any, *, fetch_timeout: int | None = None
    ) -> FeaturesReference | Any:
        """The reference itself where features are made; else what vLLM makes of the bytes.

        Raises:
            ValueError: It is no reference, or leads nowhere any more; a client's error to vLLM.
        """
        with _told_to_the_client():
            reference = arena("api").verify(url)
            if isinstance(reference, FeaturesReference):
                self._check_frames(reference)
                arena("api").admit(reference.of, is_processed=True)
                return reference
            arena("api").admit(reference.of, is_processed=False)
            data = arena("api").raw(reference.handle, reference.start, reference.nbytes)
        if reference.is_frames:
            item = media_io.load_base64("video/jpeg", data.decode())
        else:
            item = media_io.load_bytes(data)
        return labelled(item, reference.of)

    def _check_frames(self, reference: FeaturesReference) -> None:
        """
        Raises:
            ValueError: This vLLM would take other frames of the video.
        """
        if reference.modality is Modality.VIDEO and self.media_io_kwargs.get("video"):
            raise ValueError(
                "this vLLM was started with --media-io-kwargs for videos, so that Afferent needs "
                "--engine-video-bytes"
            )

    async def load_from_url_async(
        self, url: str, media_io: Any, *, fetch_timeout: int | None = None
    ) -> FeaturesReference | Any:
        """`load_from_url`, in a thread: it may wait, for the store or for a decoder."""
        return await asyncio.to_thread(self.load_from_url, url, media_io)


@contextmanager
def _told_to_the_client() -> Iterator[None]:
    """Raises: ValueError: What is wrong with a reference; a client's error to vLLM."""
    try:
        yield
    except FormatError as error:
        raise ValueError(f"this server takes media from Afferent only: {error}") from error
    except (Gone, AfferentError) as error:
        raise ValueError(f"the media are not there any more: {error}") from error
