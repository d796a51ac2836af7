"""What has to be known of a model to prepare its pictures: sizes, tokens, identity. Pure data.

A frontend plans features from a picture's width and height alone, so this needs neither torch nor
transformers. `describe` reads the families whose features depend on the picture's size; every other
family is measured once by running its own processor (`afferent.preprocess.measure`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from afferent import keys
from afferent.errors import ConfigError, InvalidMedia
from afferent.store import codec
from afferent.types import TensorSpec


class FeaturePlan(Struct, frozen=True):
    """What one picture becomes: the tensors by name, and its rows of embeddings."""

    specs: dict[str, TensorSpec]
    num_embeds: int

    @property
    def nbytes(self) -> int:
        """Exact size of the features' block in the arena."""
        return codec.plan(self.specs).nbytes


class FixedFamily(Struct, tag="fixed", frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every picture becomes the same shapes (LLaVA and others that crop or stretch)."""

    image_token_id: int
    specs: dict[str, TensorSpec]
    num_embeds: int

    def plan(self, width: int, height: int) -> FeaturePlan:
        return FeaturePlan(self.specs, self.num_embeds)


class Qwen2VlFamily(Struct, tag="qwen2_vl", frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Qwen2-VL and Qwen2.5-VL: patches of the picture at nearly its own size and aspect ratio."""

    image_token_id: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int

    def plan(self, width: int, height: int) -> FeaturePlan:
        """Raises: InvalidMedia: The aspect ratio is over 200."""
        resized_width, resized_height = self.resized(width, height)
        rows, columns = resized_height // self.patch_size, resized_width // self.patch_size
        num_patches = rows * columns
        patch_values = 3 * self.temporal_patch_size * self.patch_size**2
        specs = {
            "pixel_values": TensorSpec("float32", (num_patches, patch_values)),
            "image_grid_thw": TensorSpec("int64", (1, 3)),
        }
        return FeaturePlan(specs, num_patches // self.merge_size**2)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """The size that a picture is brought to: whole merged patches, pixels within the limits.

        The rule is the model family's own; `transformers` calls it ``smart_resize``.
        """
        if max(width, height) > 200 * min(width, height):
            raise InvalidMedia("the picture's sides differ by more than a factor of 200")
        unit = self.patch_size * self.merge_size
        fitted = [round(side / unit) * unit for side in (width, height)]
        if math.prod(fitted) > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            fitted = [max(unit, int(side / shrink / unit) * unit) for side in (width, height)]
        elif math.prod(fitted) < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            fitted = [math.ceil(side * grow / unit) * unit for side in (width, height)]
        return fitted[0], fitted[1]


Family = FixedFamily | Qwen2VlFamily


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model's folder.

    Raises:
        ConfigError: It is missing or malformed.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error


def describe(folder: Path) -> Family | None:
    """The family of the model in ``folder``; ``None`` if it has to be measured.

    Raises:
        ConfigError: The folder holds no model.
    """
    config = read_json(folder / "config.json")
    if config.get("model_type") not in ("qwen2_vl", "qwen2_5_vl"):
        return None
    settings = _image_processor_settings(folder)
    size: Mapping[str, int] = settings.get("size") or {}
    return Qwen2VlFamily(
        image_token_id=config["image_token_id"],
        patch_size=settings.get("patch_size", 14),
        merge_size=settings.get("merge_size", 2),
        temporal_patch_size=settings.get("temporal_patch_size", 2),
        min_pixels=settings.get("min_pixels") or size.get("shortest_edge", 56 * 56),
        max_pixels=settings.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280),
    )


def _image_processor_settings(folder: Path) -> dict[str, Any]:
    """From the image processor's own file, or from its part of the whole processor's."""
    own = folder / "preprocessor_config.json"
    if own.exists():
        return read_json(own)
    settings = read_json(folder / "processor_config.json").get("image_processor")
    if not isinstance(settings, dict):
        raise ConfigError(f"{folder} does not say how its images are processed")
    return settings


def fingerprint(folder: Path) -> bytes:
    """Digest of all that shapes features besides the picture: settings and libraries' versions."""
    names = ("config.json", "preprocessor_config.json", "processor_config.json")
    files = [folder / name for name in names]
    contents = [path.read_bytes() if path.exists() else b"" for path in files]
    versions = [metadata.version(name).encode() for name in ("pillow", "transformers", "numpy")]
    return keys.frame(b"afferent/processor/v1", *contents, *versions)
