"""From RGB pixels to features: the protocol, and the adapter for Hugging Face image processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from afferent.errors import InternalError
from afferent.preprocess.family import Family


class Processor(Protocol):
    """Turns one picture into the tensors that `Family.plan` announced, by name."""

    def process(self, image: Image.Image) -> dict[str, NDArray[Any]]: ...


class HuggingFaceProcessor:
    """Any image processor that `transformers` loads from a folder, one picture at a time."""

    def __init__(self, folder: Path, family: Family) -> None:
        from transformers import AutoImageProcessor

        self._processor = AutoImageProcessor.from_pretrained(folder)
        self._family = family

    def process(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        """The features of one picture, first dimension counting pictures or their patches."""
        planned = self._family.plan(*image.size).specs
        out = self._processor(images=image, return_tensors="np")
        features = {name: np.asarray(out[name]) for name in planned}
        for name, spec in planned.items():
            array = features[name]
            if array.dtype.name != spec.dtype or array.shape != spec.shape:
                raise InternalError(f"{name} is {array.dtype} {array.shape}, planned was {spec}")
        return features
