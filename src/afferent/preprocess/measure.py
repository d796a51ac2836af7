"""Find the tokens of a model whose family is not known, by running its processor.

    python -m afferent.preprocess.measure FOLDER      prints an `AdapterFamily` as JSON

A short-lived process, because it imports torch and transformers.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from afferent.errors import UnsupportedModel
from afferent.ingest.probe import ImageHeader
from afferent.preprocess.families.adapter import AdapterFamily
from afferent.preprocess.families.qwen_vl import MAX_SAMPLED_FRAMES
from afferent.preprocess.family import MediaTokens
from afferent.preprocess.registry import AnyFamily, describe

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
        [sys.executable, "-m", "afferent.preprocess.measure", str(folder)],
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip().rsplit("\n", 1)[-1]
        raise UnsupportedModel(f"the model in {folder} can't be served: {reason}")
    return msgspec.json.decode(done.stdout, type=AdapterFamily)


def measure(folder: Path) -> AdapterFamily:
    """What the model's own processor says; imports transformers.

    Raises:
        UnsupportedModel: It can't be loaded or used here.
    """
    transformers: Any = importlib.import_module("transformers")
    reference: Any = importlib.import_module("afferent.preprocess.reference")
    config = transformers.AutoConfig.from_pretrained(folder)
    embed = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    if embed is None:
        raise UnsupportedModel(f"the configuration ({config.model_type}) names no image token")
    processor = reference.load_processor(str(folder))
    written = getattr(processor, "image_token", None)
    marker = processor.tokenizer.convert_tokens_to_ids(written) if written else embed
    family = AdapterFamily(folder=str(folder), image=MediaTokens(marker, embed))
    family.reference().plan(ImageHeader(64, 48))
    return family


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(measure(Path(sys.argv[1]))))
