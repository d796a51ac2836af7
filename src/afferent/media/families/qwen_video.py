"""Videos for Qwen2-VL, Qwen2.5-VL and Qwen3-VL: choice, size and order of frames.

The rules are those of `transformers`' video processors, so that the same frames of the same size
result, in the same order. Features are bytes; the engine normalizes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import numpy as np
from msgspec import Struct

from afferent.errors import InvalidMedia
from afferent.media.decoded import Array, Video
from afferent.media.families.plan import FeaturePlan
from afferent.media.headers.probe import VideoHeader
from afferent.media.transforms.patches import patch_views
from afferent.media.transforms.resize import Resampling
from afferent.types import TensorSpec

Generation = Literal["qwen2", "qwen2_5", "qwen3"]

_MAX_ASPECT: Final = 200
_FRAMES_PER_S: Final = 2.0
_BUDGET: Final = 0.9  # part of its tokens that Qwen2-VL spends on a video
_ROOM: Final = 1.05  # factor of a frame's pixels above the least


class VideoSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a video processor, under its own names except the pixels' bounds.

    Attributes:
        fps: Frames taken of each second; ``None``: all of them, or ``num_frames``.
        max_frames: Limit in any case.
        min_pixels: Of a frame; for Qwen3-VL of a whole video.
        max_pixels: Likewise.
    """

    generation: Generation
    patch_size: int
    min_pixels: int
    max_pixels: int
    merge_size: int = 2
    temporal_patch_size: int = 2
    fps: float | None = _FRAMES_PER_S
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 128_000

    @property
    def factor(self) -> int:
        """Unit of the sides of a resized frame."""
        return self.patch_size * self.merge_size


def video_settings(given: Mapping[str, Any], generation: Generation) -> VideoSettings:
    """Return the settings of the video processor's file.

    A released Qwen2-VL or Qwen2.5-VL does not define the sampling of frames. `transformers` then
    takes all frames by default; Afferent takes as many as for Qwen3-VL, as Qwen's own tools do.
    ``do_sample_frames: false`` in the file is followed.
    """
    is_third = generation == "qwen3"
    size = {
        "shortest_edge": 128 * (32 if is_third else 28) ** 2,
        "longest_edge": 768 * (32 if is_third else 28) ** 2,
        **(given.get("size") or {}),
    }
    sampled = given.get("do_sample_frames", True)
    num_frames = given.get("num_frames") if sampled else None
    fps = (given.get("fps") or _FRAMES_PER_S) if sampled and num_frames is None else None
    return VideoSettings(
        generation=generation,
        patch_size=given.get("patch_size") or (16 if is_third else 14),
        merge_size=given.get("merge_size") or 2,
        temporal_patch_size=given.get("temporal_patch_size") or 2,
        min_pixels=(None if is_third else given.get("min_pixels")) or size["shortest_edge"],
        max_pixels=(None if is_third else given.get("max_pixels")) or size["longest_edge"],
        fps=fps,
        num_frames=num_frames,
        min_frames=given.get("min_frames") or 4,
        max_frames=given.get("max_frames") or 768,
        cap_pixels_per_frame=bool(given.get("cap_pixels_per_frame")),
        max_video_tokens=given.get("max_video_tokens") or (768 if is_third else 128_000),
    )


def sampled_indices(settings: VideoSettings, header: VideoHeader) -> list[int]:
    """Return the frames that the model sees, in order; at least one."""
    total = header.num_frames
    if settings.fps is None and settings.num_frames is None and total <= settings.max_frames:
        return list(range(total))
    if settings.generation == "qwen3":
        return _third_generation(settings, total, header.frames_per_s)
    return _first_generations(settings, total, header.frames_per_s)


def _first_generations(settings: VideoSettings, total: int, frames_per_s: float) -> list[int]:
    pair = settings.temporal_patch_size
    most = math.floor(min(settings.max_frames, total) / pair) * pair
    if settings.num_frames is not None:
        wanted: float = min(round(settings.num_frames / pair) * pair, most)
    elif settings.fps is not None:
        wanted = min(max(total / frames_per_s * settings.fps, settings.min_frames), most)
    else:
        wanted = most
    count = math.floor(wanted / pair) * pair
    if count == 0:  # fewer frames than the encoder takes at a time
        return list(range(min(total, pair)))
    step = total / count
    # In float32, as torch counts; the last bit of torch's result depends on the machine.
    places = (np.arange(math.ceil(total / step)) * step).astype(np.float32)
    return [min(int(place), total - 1) for place in places]


def _third_generation(settings: VideoSettings, total: int, frames_per_s: float) -> list[int]:
    if settings.num_frames is not None:
        count = min(settings.num_frames, settings.max_frames, total)
    elif settings.fps is not None:
        count = int(total / frames_per_s * settings.fps)
        count = min(max(count, settings.min_frames), settings.max_frames, total)
    else:
        count = min(max(total, settings.min_frames), settings.max_frames, total)
    places: list[int] = np.linspace(0, total - 1, max(1, count)).round().astype(int).tolist()
    return places


def resized(settings: VideoSettings, num_frames: int, header: VideoHeader) -> tuple[int, int]:
    """Return height and width of resized frames, if ``num_frames`` are taken.

    Raises:
        InvalidMedia: One side is more than 200 times the other.
    """
    height, width, factor = header.height, header.width, settings.factor
    num_frames = max(num_frames, settings.temporal_patch_size)
    is_third = settings.generation == "qwen3"
    if is_third and min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > _MAX_ASPECT:
        raise InvalidMedia(f"the video's sides may differ by a factor of {_MAX_ASPECT}")
    # Qwen3-VL's bounds are for all frames, paired; the others' for each.
    weight = num_frames if is_third else 1
    pair = settings.temporal_patch_size
    rounded = round(num_frames / pair) * pair if is_third else 1
    most = _max_pixels(settings, num_frames)
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if rounded * tall * wide > most:
        beta = math.sqrt((weight * height * width) / most)
        tall = max(factor, math.floor(height / beta / factor) * factor)
        wide = max(factor, math.floor(width / beta / factor) * factor)
    elif rounded * tall * wide < settings.min_pixels:
        beta = math.sqrt(settings.min_pixels / (weight * height * width))
        tall = math.ceil(height * beta / factor) * factor
        wide = math.ceil(width * beta / factor) * factor
    return tall, wide


def _max_pixels(settings: VideoSettings, num_frames: int) -> int:
    """Return the limit of a frame, or of a Qwen3-VL video; if capped, long videos get less."""
    most, least = settings.max_pixels, int(settings.min_pixels * _ROOM)
    if not settings.cap_pixels_per_frame:
        return most
    tokens = settings.max_video_tokens * settings.factor**2
    if settings.generation == "qwen3":
        return max(min(tokens, most // num_frames), least) * num_frames
    share = int(tokens * _BUDGET) * settings.temporal_patch_size // num_frames
    return max(min(most, share), least)


def plan_video(settings: VideoSettings, header: VideoHeader) -> FeaturePlan:
    """Return the plan of a video: patches, their grid, and its prompt.

    The prompt's pieces replace only the chat template's video token: the template's own
    ``<|vision_start|>`` and ``<|vision_end|>`` stay around them.

    Raises:
        InvalidMedia: Its frames are too narrow.
    """
    indices = sampled_indices(settings, header)
    groups, rows, columns = _grid(settings, len(indices), header)
    patch_nbytes = 3 * settings.temporal_patch_size * settings.patch_size**2
    specs = {
        "pixel_values_videos": TensorSpec("uint8", (groups * rows * columns, patch_nbytes)),
        "video_grid_thw": TensorSpec("int64", (1, 3)),
    }
    num_embeds = rows * columns // settings.merge_size**2
    if settings.generation == "qwen2_5":
        specs["second_per_grid_ts"] = TensorSpec("float32", (1,))
    if settings.generation != "qwen3":
        return FeaturePlan(specs, (groups * num_embeds,))
    pieces: list[int | str] = []
    for time_s in _timestamps(settings, indices, header.frames_per_s):
        pieces += [f"<{time_s:.1f} seconds><|vision_start|>", num_embeds, "<|vision_end|>"]
    return FeaturePlan(specs, tuple(pieces))


def _grid(settings: VideoSettings, num_frames: int, header: VideoHeader) -> tuple[int, int, int]:
    height, width = resized(settings, num_frames, header)
    groups = -(-num_frames // settings.temporal_patch_size)
    return groups, height // settings.patch_size, width // settings.patch_size


def _timestamps(
    settings: VideoSettings, indices: list[int], frames_per_s: float
) -> Iterator[float]:
    """Yield the middle of each group of frames, in seconds."""
    for group in _groups(indices, settings.temporal_patch_size):
        yield (group[0] / frames_per_s + group[-1] / frames_per_s) / 2


def _groups(indices: list[int], size: int) -> Iterator[list[int]]:
    """Yield groups of ``size``; the last frame is repeated to fill the last group."""
    for start in range(0, len(indices), size):
        group = indices[start : start + size]
        yield group + group[-1:] * (size - len(group))


def process_video(
    settings: VideoSettings, video: Video, out: Mapping[str, Array], resampling: Resampling
) -> None:
    """Write a video's features into ``out``, with one frame in memory at a time.

    Args:
        out: Arrays of `plan_video` of the video's header.

    Raises:
        InvalidMedia: A frame can't be decoded.
    """
    indices = sampled_indices(settings, video.header)
    groups, rows, columns = _grid(settings, len(indices), video.header)
    patches = out["pixel_values_videos"].reshape(groups, rows * columns, -1)
    pair = settings.temporal_patch_size
    for number, frame in enumerate(video.frames(indices)):
        frames = patch_views(
            patches[number // pair],
            rows,
            columns,
            patch_size=settings.patch_size,
            merge_size=settings.merge_size,
            num_frames=pair,
        )
        resampling.write(frame, frames[number % pair])
        if number == len(indices) - 1:  # the last frame fills its group
            frames[number % pair + 1 :] = frames[number % pair]
    out["video_grid_thw"][:] = (groups, rows, columns)
    if settings.generation == "qwen2_5":
        sampled_per_s = len(indices) / video.header.num_frames * video.header.frames_per_s
        out["second_per_grid_ts"][:] = settings.temporal_patch_size / sampled_per_s
