"""A program that calls the video processors of `transformers`, with a stand-in for torchvision.

Their modules import torchvision, which the called functions do not need. Each line of stdin is a
JSON list of ``[question, arguments]``, and each line of stdout the list of answers.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from typing import Any


class _Anything:
    def __getattr__(self, name: str) -> _Anything:
        return _Anything()

    def __call__(self, *_: Any, **__: Any) -> _Anything:
        return _Anything()


def _pretend(name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    module.__dict__.update(attributes)
    sys.modules[name] = module
    return module


_functional = _pretend("torchvision.transforms.v2.functional", InterpolationMode=_Anything())
_v2 = _pretend("torchvision.transforms.v2", functional=_functional)
_transforms = _pretend("torchvision.transforms", v2=_v2, InterpolationMode=_Anything())
_io = _pretend("torchvision.io")
_pretend("torchvision.transforms.functional", pil_to_tensor=_Anything())
_pretend("torchvision", transforms=_transforms, io=_io, __version__="0.30.0")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers.image_utils import SizeDict  # noqa: E402
from transformers.models.qwen2_vl import video_processing_qwen2_vl as second  # noqa: E402
from transformers.models.qwen3_vl import processing_qwen3_vl  # noqa: E402
from transformers.models.qwen3_vl import video_processing_qwen3_vl as third  # noqa: E402
from transformers.video_processing_utils import BaseVideoProcessor  # noqa: E402
from transformers.video_utils import VideoMetadata  # noqa: E402


def _answer_size(_self: Any, *, size: SizeDict, **_: Any) -> Any:
    return size.height, size.width


BaseVideoProcessor.resize = _answer_size


def _processor(generation: str, settings: dict[str, Any]) -> Any:
    of = third.Qwen3VLVideoProcessor if generation == "qwen3" else second.Qwen2VLVideoProcessor
    processor = object.__new__(of)
    processor.__dict__.update(settings)
    return processor


def sampled(generation: str, settings: dict[str, Any], total: int, fps: float) -> list[int]:
    metadata = VideoMetadata(total_num_frames=total, fps=fps)
    given = {"fps": settings["fps"], "num_frames": settings["num_frames"]}
    indices: list[int] = _processor(generation, settings).sample_frames(metadata, **given).tolist()
    return indices


def size(
    generation: str, settings: dict[str, Any], frames: int, height: int, width: int, cap: bool
) -> Any:
    processor = _processor(generation, settings)
    video = torch.empty(1, frames, 0, height, width)
    bounds = SizeDict(shortest_edge=settings["min_pixels"], longest_edge=settings["max_pixels"])
    factor = settings["patch_size"] * 2
    try:
        return processor.resize(
            video, bounds, None, factor=factor, temporal_factor=2, cap_pixels_per_frame=cap
        )
    except ValueError:
        return None


def patches(file: str, patch_size: int) -> Any:
    """Replace the frames in a file, ``(frames, height, width, 3)``, by patches; return the grid."""
    frames = torch.from_numpy(np.load(file)).permute(0, 3, 1, 2)[None]
    flat, *grid = second.Qwen2VLVideoProcessor.patchify(None, frames, patch_size, 2, 2)
    np.save(file, flat[0].numpy())
    return grid


def prompt(indices: list[int], fps: float, grid: list[int]) -> str:
    processor = types.SimpleNamespace(
        video_processor=types.SimpleNamespace(merge_size=2, temporal_patch_size=2),
        _calculate_timestamps=lambda *args: times(None, *args),
        vision_start_token="[",
        video_token="x",
        vision_end_token="]",
    )
    times = processing_qwen3_vl.Qwen3VLProcessor._calculate_timestamps
    inputs = {
        "video_grid_thw": np.array([grid]),
        "video_metadata": [VideoMetadata(len(indices), fps=fps, frames_indices=indices)],
    }
    replace = processing_qwen3_vl.Qwen3VLProcessor.replace_video_token
    text: str = replace(processor, inputs, 0)
    return text


if __name__ == "__main__":
    questions = {"sampled": sampled, "size": size, "patches": patches, "prompt": prompt}
    for line in sys.stdin:
        answers = [questions[name](*given) for name, given in json.loads(line)]
        print(json.dumps(answers), flush=True)
