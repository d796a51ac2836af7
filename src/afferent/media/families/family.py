"""Protocol of model families, and the settings that they need to prepare media; one file each.

A family is a frozen `msgspec.Struct` with a tag. It travels to three kinds of processes:

- the frontends, which plan from a header
- the preprocess workers, which process
- the engine's workers, which finish what is cheaper there

Its module imports neither torch nor transformers (`docs/adr/0004`). Code that needs them is in
modules of its own, which load them when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar, runtime_checkable

import msgspec
from msgspec import Struct

from afferent.errors import ConfigError
from afferent.media.decoded import Array, Media
from afferent.media.families.plan import FeaturePlan
from afferent.media.headers.probe import ImageHeader, MediaHeader
from afferent.media.transforms.normalize import Arithmetic
from afferent.media.transforms.resize import ResizeRule
from afferent.types import Modality

if TYPE_CHECKING:
    from tokenizers import Tokenizer

T = TypeVar("T")

NO_TOKEN: Final = -1
"""Token id if the prompt contains no item, or marks it with plain text."""
MAX_SAMPLED_FRAMES: Final = 768
"""Default limit of the frames that are taken of a video."""


class MediaTokens(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Token ids of an item; often equal.

    ``marker`` is the token that the chat template writes for an item, ``embed`` the one that stands
    for each row of its embeddings. Where the template writes plain text for an item, the marker is
    `NO_TOKEN`, and ``marker_text`` has the text.
    """

    marker: int
    embed: int
    marker_text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorLayout:
    """Layout of an image's features by the model's own processor.

    Attributes:
        plan: Returns the processor's plan of an image with this header.
        arguments: Arguments of the processor that apply the family's own limits.
    """

    plan: Callable[[ImageHeader], FeaturePlan]
    arguments: Mapping[str, Any]


class Family(Protocol):
    """Preparation of media for one family of models. To add one: `docs/adding-a-family.md`.

    `afferent.media.families.plain.PlainFamily` has the answers of most families.
    """

    @property
    def tokens(self) -> Mapping[Modality, MediaTokens]:
        """Tokens for each modality that the model supports."""

    @property
    def sample_rate_hz(self) -> int:
        """Rate that audio is resampled to; 0 for models without audio."""

    @property
    def processor_layout(self) -> ProcessorLayout | None:
        """Layout of the model's own processor; ``None`` if features are always made here."""

    def plan(self, header: MediaHeader) -> FeaturePlan | None:
        """Return the plan of an item; exact if the header is.

        ``None``: only the model's own processor can plan it, in a worker.

        Raises:
            InvalidMedia: The model does not support the item.
        """

    def plan_exactly(self, header: MediaHeader) -> FeaturePlan:
        """Return `plan`, by the model's own processor if necessary. Workers only."""

    def without_paths(self) -> Self:
        """Return an equal family without the path of the model's folder."""

    def sampling(self, max_frames: int) -> Self:
        """Return a family that takes at most ``max_frames`` frames of a video."""

    def bounded(self, max_pixels: int) -> Self:
        """Return a family that makes at most ``max_pixels`` pixels of an image.

        It is itself if the size does not depend on the image's own, or never exceeds it.
        """

    def resizing(self, rule: ResizeRule) -> Self:
        """Return a family that resizes images and frames by this rule.

        It is itself if the model's own processor resizes them.
        """

    def load(self) -> None:
        """Load all that `process` will need, so that a zygote's forks have it. Imports torch."""

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        """Write the features of ``media`` into ``out``, with the layout of `plan` of its header."""

    def model_inputs(self, features: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the model's encoder from the features' torch tensors.

        They are on the tensors' device. If a model normalizes linearly, features are bytes until
        here.
        """


@runtime_checkable
class ProcessorArithmetic(Protocol):
    """Family that can give the floats of the model's own processor, from its own bytes."""

    def processor_inputs(
        self, features: Mapping[str, Array], arithmetic: Arithmetic
    ) -> dict[str, Array]:
        """Return the encoder's arguments as the processor makes them, equal to the last bit."""


@runtime_checkable
class OwnTokenizer(Protocol):
    """Family of models whose folder has no tokenizer of `transformers`."""

    def tokenizer(self) -> Tokenizer:
        """Return a tokenizer of the texts in the family's prompts."""


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a model's folder.

    Raises:
        ConfigError: It is missing or malformed.
    """
    return read_json_as(path, dict[str, Any])


def read_json_as(path: Path, kind: type[T]) -> T:
    """Return a JSON file of a model's folder, as this type.

    Raises:
        ConfigError: It is missing or malformed.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError, msgspec.MsgspecError) as error:  # UnicodeDecodeError among them
        raise ConfigError(f"{path} can't be read: {error}") from error


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a model's config that is about its language model.

    A model that also speaks has it in the part of its thinker.
    """
    thinker = config.get("thinker_config")
    whole = thinker if isinstance(thinker, dict) else config
    text = whole.get("text_config")
    return text if isinstance(text, dict) else whole


def longest_prompt(config: Mapping[str, Any]) -> int | None:
    """Return the longest prompt by a model's config; ``None`` if it sets no limit."""
    limit = text_config(config).get("max_position_embeddings") or config.get("max_target_positions")
    return limit if isinstance(limit, int) else None


def processor_settings(folder: Path, part: str = "image_processor") -> dict[str, Any]:
    """Return the settings from the processor's own file, or from the whole processor's.

    Args:
        part: ``image_processor``, ``video_processor`` or ``feature_extractor`` (audio).

    Raises:
        ConfigError: The folder has neither.
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
    """Return the whole processor's own settings, beside those of its parts; empty without a file.

    Raises:
        ConfigError: Its file is malformed.
    """
    path = folder / "processor_config.json"
    return read_json(path) if path.exists() else {}
