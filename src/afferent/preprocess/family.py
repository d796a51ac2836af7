"""What has to be known of a model family to prepare its media: the protocol, and one file each.

A family is a frozen `msgspec.Struct` with a tag: it travels to the frontends, which plan from a
header, to the preprocess workers, which process, and to the engine's workers, which finish what is
cheaper there. Its module imports neither torch nor transformers (`docs/adr/0004`); what needs them
is in modules of its own, which load them when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self

import msgspec
from msgspec import Struct

from afferent.errors import ConfigError
from afferent.ingest.probe import ImageHeader, MediaHeader
from afferent.preprocess.media import Array, Media
from afferent.preprocess.plan import FeaturePlan
from afferent.preprocess.resize import ResizeRule
from afferent.types import Modality

MAX_SAMPLED_FRAMES: Final = 768
"""Most frames that are taken of a video, if nobody says otherwise."""


class MediaTokens(Struct, frozen=True, forbid_unknown_fields=True):
    """Ids of the token that the chat template writes for an item, and of the one that stands for
    each row of its embeddings; often the same.
    """

    marker: int
    embed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorLayout:
    """How a model's own processor lays out the features of an image.

    Attributes:
        plan: What it makes of an image with this header.
        arguments: What it has to be called with, to keep the family's own limits.
    """

    plan: Callable[[ImageHeader], FeaturePlan]
    arguments: Mapping[str, Any]


class Family(Protocol):
    """How one family of models wants its media. Adding one: `docs/adding-a-family.md`.

    `afferent.preprocess.families.plain.PlainFamily` answers what most families answer alike.
    """

    @property
    def tokens(self) -> Mapping[Modality, MediaTokens]:
        """For each modality that the model takes."""

    @property
    def sample_rate_hz(self) -> int:
        """What audio is resampled to; 0 for models that take none."""

    @property
    def processor_layout(self) -> ProcessorLayout | None:
        """``None`` where features are made here in any case, never by the model's own processor."""

    def plan(self, header: MediaHeader) -> FeaturePlan | None:
        """What an item becomes; exact if the header is. ``None``: only the model's own processor
        knows, so a worker has to be asked.

        Raises:
            InvalidMedia: Nothing that the model can take.
        """

    def plan_exactly(self, header: MediaHeader) -> FeaturePlan:
        """`plan`; where only the model's own processor knows, by asking it. Workers only."""

    def without_paths(self) -> Self:
        """The same, as it would be of the same model in another folder."""

    def sampling(self, max_frames: int) -> Self:
        """The same, which takes no more than ``max_frames`` frames of a video."""

    def bounded(self, max_pixels: int) -> Self:
        """The same, which makes no more than ``max_pixels`` pixels of an image; itself, where the
        size of an image does not follow the image's own, or never is more.
        """

    def resizing(self, rule: ResizeRule) -> Self:
        """The same, with images and frames resized by this rule; itself, where the model's own
        processor resizes them.
        """

    def load(self) -> None:
        """Load what `process` will need, so that a zygote's forks have it. Imports torch."""

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        """Write the features of ``media`` into ``out``, laid out as `plan` of its header says."""

    def model_inputs(self, features: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the model's encoder from the features' torch tensors, on their device:
        where a model normalizes linearly, features are bytes until here.
        """


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model's folder.

    Raises:
        ConfigError: It is missing or malformed.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, msgspec.MsgspecError) as error:  # UnicodeDecodeError among them
        raise ConfigError(f"{path} can't be read: {error}") from error


def processor_settings(folder: Path, part: str = "image_processor") -> dict[str, Any]:
    """From the processor's own file, or from its part of the whole processor's.

    Args:
        part: ``image_processor``, ``video_processor`` or ``feature_extractor`` (audio).

    Raises:
        ConfigError: The folder does not say.
    """
    settings = whole_processor_settings(folder).get(part)
    if isinstance(settings, dict):
        return settings
    name = "video_preprocessor_config" if part == "video_processor" else "preprocessor_config"
    own = folder / f"{name}.json"
    if own.exists():
        return read_json(own)
    raise ConfigError(f"{folder} does not say how its media are processed ({part})")


def whole_processor_settings(folder: Path) -> dict[str, Any]:
    """The whole processor's own, beside those of its parts; none where the folder does not say.

    Raises:
        ConfigError: Its file is malformed.
    """
    path = folder / "processor_config.json"
    return read_json(path) if path.exists() else {}
