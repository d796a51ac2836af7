"""Media connector for vLLM: a reference becomes an item of ours, or bytes; others are refused."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from afferent.engines import place
from afferent.engines.references import SCHEME, FeaturesReference
from afferent.engines.vllm.plugin import names
from afferent.engines.vllm.plugin.arena import arena, told_to_the_client
from afferent.engines.vllm.plugin.labels import labelled
from afferent.types import Modality

NAME = "afferent"


@MEDIA_CONNECTOR_REGISTRY.register(NAME)
class ArenaConnector(MediaConnector):
    """Loads media from the arena alone: vLLM fetches and decodes no other URL.

    A server in front of vLLM has done that, within its limits.
    """

    def load_from_url(
        self, url: str, media_io: Any, *, fetch_timeout: int | None = None
    ) -> FeaturesReference | Any:
        """Return the reference itself where it has features; else the item that vLLM decodes from
        the bytes.

        Raises:
            ValueError: It is no reference, or is no longer valid; a client's error to vLLM.
        """
        if place.is_offline() and not url.startswith(SCHEME):  # a program's own media
            return super().load_from_url(url, media_io, fetch_timeout=fetch_timeout)
        with told_to_the_client(url):
            reference = arena("api").verify(url)
            names.check_tenants(reference.of)
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

    def fetch_image_embedding(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse embeddings of a client, which this server's limits do not cover.

        vLLM takes them where a KV connector is configured, too.

        Raises:
            ValueError: Always; a client's error to vLLM.
        """
        raise ValueError("this server takes media from Afferent only, and no embeddings")

    fetch_audio_embedding = fetch_video_embedding = fetch_image_embedding

    async def fetch_image_embedding_async(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse embeddings, as `fetch_image_embedding`."""
        self.fetch_image_embedding()

    fetch_audio_embedding_async = fetch_video_embedding_async = fetch_image_embedding_async

    def _check_frames(self, reference: FeaturesReference) -> None:
        """Check that vLLM takes the frames of the features.

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
        """Run `load_from_url` in a thread: it may wait, for the store or for a decoder."""
        return await asyncio.to_thread(
            self.load_from_url, url, media_io, fetch_timeout=fetch_timeout
        )
