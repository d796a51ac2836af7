"""Traits of servers that speak OpenAI's chat completions."""

from __future__ import annotations

from typing import Final

from afferent.engines.http_upstream.client import ServerTraits
from afferent.engines.openai.settings import Namers, OpenAISettings
from afferent.media.headers.header import is_exact, read_header
from afferent.media.headers.image_format import format_of
from afferent.media.headers.image_sizes import read_sizes
from afferent.media.headers.media_types import format_name
from afferent.types import Modality

_UNKNOWN_NAME: Final[dict[Namers, frozenset[int]]] = {
    "none": frozenset(),
    "afferent": frozenset({409}),
    "vllm": frozenset({400}),
}


class OpenAITraits(ServerTraits):
    """Traits of such servers: they read no arena, and some formats of images only."""

    reads_arena = False
    needs_health = False
    has_metrics = False

    def __init__(self, settings: OpenAISettings) -> None:
        self.unknown_name_statuses = _UNKNOWN_NAME[settings.engine_names]
        self._formats = frozenset(settings.engine_image_formats)
        self._max_pixels = settings.engine_max_pixels
        self.takes_videos = not settings.engine_video_frames
        self.takes_salt = settings.engine_cache_salt
        self.min_streamed_nbytes = settings.engine_stream_nbytes

    def takes(self, modality: Modality, file: bytes | memoryview | None) -> bool:
        """Whether a file that is made here replaces an image: it has another format than those
        that the engine reads, or too many pixels.
        """
        if modality is not Modality.IMAGE or file is None:
            return False
        if format_name(file) not in self._formats:
            return True
        if not self._max_pixels:
            return False
        if not is_exact(format_of(file)):
            return any(width * height > self._max_pixels for width, height in read_sizes(file))
        stored = read_header(file)
        return stored.width * stored.height > self._max_pixels
