"""Body that was received, apart from its media."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from afferent.files.known_files import NO_FILES, KnownFiles
from afferent.media.body.cutter import CutMedia
from afferent.media.body.raw import RawMedia


@dataclass(frozen=True, slots=True)
class ReceivedBody:
    """Body without its media.

    ``media`` has the media that were cut out, by the marker in the JSON at their place. ``cut`` has
    the cutter's details on them, by the same markers. ``files`` has the stored files that it names.
    """

    json: bytes
    media: dict[str, RawMedia]
    nbytes: int
    cut: Mapping[str, CutMedia] = field(default_factory=dict)
    files: KnownFiles = NO_FILES
