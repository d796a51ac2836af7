"""The family of a model: read from its folder, or measured in another process where need be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from afferent.errors import UnsupportedModel
from afferent.preprocess.families.adapter import AdapterFamily
from afferent.preprocess.family import MAX_SAMPLED_FRAMES
from afferent.preprocess.registry import AnyFamily, describe

_MEASURE: Final = "afferent.preprocess.measure"
_TIMEOUT_S = 300.0


def family_of(
    folder: Path, *, reference: bool = False, max_sampled_frames: int = MAX_SAMPLED_FRAMES
) -> AnyFamily:
    """The family of the model in ``folder``, measured in another process where need be.

    Args:
        folder: As `transformers` saves models.
        reference: Let the model's own processor make the features, even if the family is known.
        max_sampled_frames: Most frames that are taken of a video.

    Raises:
        ConfigError: The folder holds no model.
        UnsupportedModel: Its processor can't be loaded or used here.
    """
    known = describe(folder, reference=reference, max_sampled_frames=max_sampled_frames)
    if known is not None:
        return known
    done = subprocess.run(
        [sys.executable, "-m", _MEASURE, str(folder)],
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip().rsplit("\n", 1)[-1]
        raise UnsupportedModel(f"the model in {folder} can't be served: {reason}")
    return msgspec.json.decode(done.stdout, type=AdapterFamily)
