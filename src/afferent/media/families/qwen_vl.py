"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: patches of an image at nearly its own size and aspect ratio.

The patches of an image are bytes, and are stored once, although the encoder needs each of them
``temporal_patch_size`` times: an eighth of the processor's own floats. `QwenVlFamily.model_inputs`
makes these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import numpy as np
from msgspec import Struct

from afferent.errors import ConfigError, InvalidMedia, UnsupportedMedia
from afferent.media.decoded import Array, DecodedImage, Media, Video
from afferent.media.families.entry import EngineFacts, Entry
from afferent.media.families.family import MediaTokens, ProcessorLayout, processor_settings
from afferent.media.families.plain import PlainFamily
from afferent.media.families.plan import FeaturePlan
from afferent.media.families.qwen_video import (
    Generation,
    VideoSettings,
    plan_video,
    process_video,
    video_settings,
)
from afferent.media.families.settings import CLIP_COLOURS, PLAIN_COLOURS, Defaults, pixel_settings
from afferent.media.headers.probe import ImageHeader, MediaHeader, VideoHeader
from afferent.media.transforms.normalize import Arithmetic, Normalization
from afferent.media.transforms.patches import patch_views
from afferent.media.transforms.resize import Resampling
from afferent.types import Modality, TensorSpec

_MAX_ASPECT = 200
_NOT_TAKEN = "the model takes no such media"
_IMAGE_TOKEN_ID, _VIDEO_TOKEN_ID = 151_655, 151_656  # defaults if the configuration omits them

GENERATIONS: Mapping[str, Generation] = {
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2_5",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3",
}

PROCESSORS: Final[Defaults] = {
    "Qwen2VLImageProcessor": {
        **CLIP_COLOURS,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    },
    "Qwen2VLVideoProcessor": {
        **CLIP_COLOURS,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    },
    "Qwen3VLVideoProcessor": {
        **PLAIN_COLOURS,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "patch_size": 16,
    },
}
"""Defaults of the processors' classes."""


class QwenVideo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens and processing of the family's videos."""

    tokens: MediaTokens
    settings: VideoSettings
    resampling: Resampling
    normalization: Normalization


class QwenVlFamily(PlainFamily, tag="qwen_vl", frozen=True, kw_only=True):
    """Family of Qwen's vision models; ``video`` is ``None`` if it supports none."""

    generation: Generation
    image: MediaTokens
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    resampling: Resampling
    normalization: Normalization
    video: QwenVideo | None = None

    @property
    def tokens(self) -> Mapping[Modality, MediaTokens]:
        if self.video is None:
            return {Modality.IMAGE: self.image}
        return {Modality.IMAGE: self.image, Modality.VIDEO: self.video.tokens}

    @property
    def processor_layout(self) -> ProcessorLayout:
        # Its limits may be stricter than the processor's own.
        size = {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}
        return ProcessorLayout(plan=self._float_plan, arguments={"size": size})

    def plan(self, header: MediaHeader) -> FeaturePlan:
        match header:
            case ImageHeader():
                return self._plan_image(header, "uint8", repeats=1)
            case VideoHeader() if self.video is not None:
                return plan_video(self.video.settings, header)
            case _:
                raise UnsupportedMedia(_NOT_TAKEN)

    def sampling(self, max_frames: int) -> Self:
        if self.video is None or self.video.settings.max_frames <= max_frames:
            return self
        settings = msgspec.structs.replace(self.video.settings, max_frames=max_frames)
        video = msgspec.structs.replace(self.video, settings=settings)
        return msgspec.structs.replace(self, video=video)

    def bounded(self, max_pixels: int) -> Self:
        if self.max_pixels <= max_pixels:
            return self
        fewest = min(self.min_pixels, max_pixels)
        return msgspec.structs.replace(self, min_pixels=fewest, max_pixels=max_pixels)

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        match media:
            case DecodedImage():
                self._process_image(media, out)
            case Video() if self.video is not None:
                process_video(self.video.settings, media, out, self.video.resampling)
            case _:
                raise UnsupportedMedia(_NOT_TAKEN)

    def model_inputs(self, features: Mapping[str, Any]) -> dict[str, Any]:
        inputs = dict(features)
        inputs.pop("second_per_grid_ts", None)  # only for positions
        if "pixel_values" in inputs:
            patches = inputs["pixel_values"]
            inputs["pixel_values"] = self._float_patches(patches, self.normalization)
        if "pixel_values_videos" in inputs and self.video is not None:
            patches = inputs["pixel_values_videos"]
            inputs["pixel_values_videos"] = self._float_patches(patches, self.video.normalization)
        return inputs

    def processor_inputs(
        self, features: Mapping[str, Array], arithmetic: Arithmetic
    ) -> dict[str, Array]:
        inputs, normalizations = dict(features), {"pixel_values": self.normalization}
        if self.video is not None:
            normalizations["pixel_values_videos"] = self.video.normalization
        for name in normalizations.keys() & inputs.keys():
            patches = inputs[name].reshape(len(inputs[name]), 3, -1, self.patch_size**2)
            floats = normalizations[name].floats(patches, arithmetic)
            inputs[name] = self._repeated_array(floats)
        return inputs

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the size of a resized image: whole merged patches, pixels within the limits.

        The rule is the model family's own; `transformers` calls it ``smart_resize``.

        Raises:
            InvalidMedia: The aspect ratio is over 200.
        """
        if max(width, height) > _MAX_ASPECT * min(width, height):
            raise InvalidMedia("the image's sides differ by more than a factor of 200")
        unit = self.patch_size * self.merge_size
        fitted = [round(side / unit) * unit for side in (width, height)]
        if math.prod(fitted) > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            fitted = [max(unit, int(side / shrink / unit) * unit) for side in (width, height)]
        elif math.prod(fitted) < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            fitted = [math.ceil(side * grow / unit) * unit for side in (width, height)]
        return fitted[0], fitted[1]

    def _float_plan(self, header: ImageHeader) -> FeaturePlan:
        return self._plan_image(header, "float32", repeats=self.temporal_patch_size)

    def _plan_image(self, header: ImageHeader, dtype: str, *, repeats: int) -> FeaturePlan:
        width, height = self.resized(header.width, header.height)
        num_patches = (width // self.patch_size) * (height // self.patch_size)
        specs = {
            "pixel_values": TensorSpec(dtype, (num_patches, 3 * repeats * self.patch_size**2)),
            "image_grid_thw": TensorSpec("int64", (1, 3)),
        }
        return FeaturePlan(specs, (num_patches // self.merge_size**2,))

    def _process_image(self, image: DecodedImage, out: Mapping[str, Array]) -> None:
        width, height = self.resized(image.header.width, image.header.height)
        rows, columns = height // self.patch_size, width // self.patch_size
        (view,) = patch_views(
            out["pixel_values"],
            rows,
            columns,
            patch_size=self.patch_size,
            merge_size=self.merge_size,
        )
        self.resampling.write(image.pixels, view)
        out["image_grid_thw"][0] = (1, rows, columns)

    def repeated(self, patches: Any) -> Any:
        """Return ``(num_patches, 3 * temporal_patch_size * patch_size**2)`` in the same type.

        ``patches`` have that layout, or one without repeated times.
        """
        times = patches.reshape(len(patches), 3, -1, self.patch_size**2)
        if times.shape[2] == 1:
            times = times.expand(-1, -1, self.temporal_patch_size, -1)
        return times.reshape(len(patches), -1)

    def _repeated_array(self, floats: Array) -> Array:
        """Return the same as `repeated`, of arrays ``(num_patches, 3, times, pixels)``."""
        num, colours, times, pixels = floats.shape
        if times < self.temporal_patch_size:
            out = np.empty((num, colours, self.temporal_patch_size, pixels), floats.dtype)
            out[...] = floats
            floats = out
        return floats.reshape(num, -1)

    def _float_patches(self, patches: Any, normalization: Normalization) -> Any:
        """Return `repeated` patches as float32, normalized before the repetition."""
        normalized = normalization.apply(patches.view(len(patches), 3, -1, self.patch_size**2))
        return self.repeated(normalized)


def describe(folder: Path, config: Mapping[str, Any]) -> QwenVlFamily | None:
    """Return the family of a model; ``None`` if its settings are not supported here.

    Raises:
        ConfigError: The folder does not define how images are processed.
    """
    cut = described_cut(folder, PROCESSORS)
    if cut is None:
        return None
    generation = GENERATIONS[config["model_type"]]
    return QwenVlFamily(
        generation=generation,
        image=_tokens(config, "image_token_id", _IMAGE_TOKEN_ID),
        **cut,
        video=_describe_video(folder, config, generation),
    )


def described_cut(folder: Path, processors: Defaults) -> dict[str, Any] | None:
    """Return `QwenVlFamily`'s settings of resizing and patches; ``None`` if not supported here.

    Raises:
        ConfigError: The folder does not define how images are processed.
    """
    settings = pixel_settings(processor_settings(folder), processors)
    if settings is None or settings.edges is None or settings.normalization is None:
        return None
    if not settings.do_resize:
        return None
    return {
        "patch_size": settings.patch_size,
        "merge_size": settings.merge_size,
        "temporal_patch_size": settings.temporal_patch_size,
        "min_pixels": settings.edges[0],
        "max_pixels": settings.edges[1],
        "resampling": Resampling(settings.resample),
        "normalization": settings.normalization,
    }


def _describe_video(
    folder: Path, config: Mapping[str, Any], generation: Generation
) -> QwenVideo | None:
    name = "Qwen3VLVideoProcessor" if generation == "qwen3" else "Qwen2VLVideoProcessor"
    settings = pixel_settings(_video_settings(folder), PROCESSORS, class_name=name)
    if settings is None or settings.edges is None or settings.normalization is None:
        return None
    if not settings.do_resize:
        return None
    given = _video_settings(folder)
    return QwenVideo(
        tokens=_tokens(config, "video_token_id", _VIDEO_TOKEN_ID),
        settings=video_settings(given, generation),
        resampling=Resampling(settings.resample),
        normalization=settings.normalization,
    )


def _video_settings(folder: Path) -> Mapping[str, Any]:
    """Return the settings of videos, or those of images if these have a file of their own.

    `transformers` uses this order, and the first models of the family have only the latter.
    """
    for part in ("video_processor", "image_processor"):
        try:
            if part == "video_processor" or (folder / "preprocessor_config.json").exists():
                return processor_settings(folder, part)
        except ConfigError:
            continue
    return {}


def _tokens(config: Mapping[str, Any], name: str, default: int) -> MediaTokens:
    token_id = config.get(name, default)
    return MediaTokens(token_id, token_id)


ENTRY = Entry(
    model_types=tuple(GENERATIONS),
    describe=describe,
    engine=EngineFacts(
        position_features=frozenset({"image_grid_thw", "video_grid_thw", "second_per_grid_ts"}),
        sharded_like={"qwen3_vl_text": "qwen3"},
        compared_with={"vllm": tuple(GENERATIONS)},
    ),
)
