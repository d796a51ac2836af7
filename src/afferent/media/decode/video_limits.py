"""Limits of videos, for each decoder."""

from __future__ import annotations

from afferent.config import Limits
from afferent.errors import MediaTooLarge


def check_pixels(width: int, height: int, limits: Limits) -> None:
    """Refuse frames with too many pixels."""
    if width * height > limits.max_frame_pixels:
        raise MediaTooLarge(
            f"the video is {width} x {height} pixels; at most {limits.max_frame_pixels} "
            "in all are accepted (--max-frame-pixels)"
        )


def check_length(num_frames: int, duration_s: float, limits: Limits) -> None:
    """Refuse a video with too many frames, or of too long a duration."""
    if num_frames > limits.max_video_frames:
        raise too_many(limits)
    if duration_s > limits.max_video_s:
        raise MediaTooLarge(
            f"the video lasts {duration_s:.0f} seconds; at most {limits.max_video_s:.0f} "
            "are accepted (--max-video-s)"
        )


def check_decoded(num_frames: int, width: int, height: int, limits: Limits) -> None:
    """Refuse to decode so many frames."""
    nbytes = num_frames * width * height * 3
    if nbytes > limits.max_video_decoded_nbytes:
        raise MediaTooLarge(
            f"the frames taken from the video have {nbytes} bytes; at most "
            f"{limits.max_video_decoded_nbytes} are accepted (--max-video-decoded-nbytes)"
        )


def too_many(limits: Limits) -> MediaTooLarge:
    """Return the error of a video with too many frames."""
    return MediaTooLarge(
        f"the video has more than {limits.max_video_frames} frames (--max-video-frames)"
    )
