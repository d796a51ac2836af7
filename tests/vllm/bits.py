"""Comparison of features with the tensors of vLLM's own processor; `test_bits.py` runs it there.

python -m tests.vllm.bits FOLDER     FOLDER has models/NAME, and features/NAME-IMAGE.npz of images/*
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import ProcessorInputs, TimingContext

from afferent.engines.vllm.plugin.features import FeatureReader, in_rows
from afferent.types import Modality


class _Model(torch.nn.Module):
    """A model of which the reader sees the device, and whether it normalizes pixels itself."""

    def __init__(self, *, normalizes: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        dtype = torch.uint8 if normalizes else torch.float32
        self.input_norm: Any = SimpleNamespace(input_dtype=dtype)


def difference(folder: Path, model: str, image: Path) -> dict[str, str]:
    """Return the fields of vLLM's processor that differ from ours, each with the reason."""
    model_config = ModelConfig(
        model=str(folder / "models" / model), dtype="float32", limit_mm_per_prompt={"image": 1}
    )
    processor = MULTIMODAL_REGISTRY.create_processor(model_config)
    items = processor.info.parse_mm_data({"image": [Image.open(image).convert("RGB")]})
    prompt = processor.dummy_inputs.get_dummy_text({"image": 1})
    ids = processor.info.get_tokenizer().encode(prompt, add_special_tokens=False)
    done = processor.apply(ProcessorInputs(prompt=ids, mm_data_items=items), TimingContext())
    (item,) = done["mm_kwargs"]["image"]
    theirs = {
        name: value for name, value in item.get_data().items() if isinstance(value, torch.Tensor)
    }
    normalizes = theirs["pixel_values"].dtype == torch.uint8
    reader = FeatureReader(_Model(normalizes=normalizes), model_config)
    with np.load(folder / "features" / f"{model}-{image.stem}.npz") as made:
        tree = {name: torch.from_numpy(made[name]) for name in made.files}
    ours = in_rows(reader.inputs(Modality.IMAGE, tree), dict(item))
    found = {}
    for name, expected in theirs.items():
        if name not in ours:
            found[name] = "it is missing"
        elif ours[name].flatten().tolist() != expected.flatten().tolist():
            found[name] = f"{ours[name].dtype} {tuple(ours[name].shape)}, {expected.dtype}"
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    found = {
        f"{model.name} {image.name}": difference(folder, model.name, image)
        for model in sorted((folder / "models").iterdir())
        for image in sorted((folder / "images").iterdir())
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
