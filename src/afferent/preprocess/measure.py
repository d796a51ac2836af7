"""Measure a model family that has no description of its own, by running its processor.

    python -m afferent.preprocess.measure FOLDER      prints a `FixedFamily` as JSON

A short-lived process, because it imports torch and transformers.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from afferent.errors import UnsupportedModel
from afferent.preprocess.family import Family, FixedFamily, describe
from afferent.types import TensorSpec

_SIZES = ((320, 240), (97, 411))
_TIMEOUT_S = 300.0


def family_of(folder: Path) -> Family:
    """The family of the model in ``folder``, measured in another process where need be.

    Raises:
        ConfigError: The folder holds no model.
        UnsupportedModel: Its processor can't be loaded, or its features depend on the picture's
            size in a way that is not known here.
    """
    if (known := describe(folder)) is not None:
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
    return msgspec.json.decode(done.stdout, type=FixedFamily)


def measure(folder: Path) -> FixedFamily:
    """Run the model's own processor on pictures of two sizes."""
    import numpy as np
    from PIL import Image
    from transformers import AutoConfig, AutoProcessor

    config = AutoConfig.from_pretrained(folder)
    token_id = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    if token_id is None:
        raise UnsupportedModel(f"a {config.model_type} model names no image token")
    processor = AutoProcessor.from_pretrained(folder)
    marker = processor.tokenizer.convert_ids_to_tokens(token_id)
    seen = []
    for size in _SIZES:
        out = processor(text=marker, images=Image.new("RGB", size), return_tensors="np")
        ids = np.asarray(out["input_ids"])[0].tolist()
        specs = {
            name: TensorSpec(array.dtype.name, array.shape)
            for name, array in ((n, np.asarray(a)) for n, a in out.items())
            if name not in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
        }
        first, count = ids.index(token_id), ids.count(token_id)
        extra = set(ids[first + count :]) | set(ids[:first])
        extra -= {processor.tokenizer.bos_token_id, processor.tokenizer.eos_token_id}
        if ids[first : first + count] != [token_id] * count or extra:
            raise UnsupportedModel(
                f"a {config.model_type} picture is written with more than its image tokens"
            )
        seen.append((specs, count))
    if seen[0] != seen[1]:
        raise UnsupportedModel(
            f"the features of {config.model_type} depend on the picture's size, "
            "and the family is not described yet"
        )
    return FixedFamily(image_token_id=token_id, specs=seen[0][0], num_embeds=seen[0][1])


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(measure(Path(sys.argv[1]))))
