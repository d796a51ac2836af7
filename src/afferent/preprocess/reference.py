"""A model's own processor, as `transformers` loads it. Imported by preprocess workers only."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor

from afferent.errors import InternalError, UnsupportedModel
from afferent.ingest.probe import ImageHeader
from afferent.preprocess.family import MediaTokens, ProcessorLayout
from afferent.preprocess.media import Array, DecodedImage
from afferent.preprocess.plan import FeaturePlan
from afferent.types import TensorSpec

_PROBE_SIZE = (97, 61)


class Reference:
    """What `transformers` makes of images."""

    def __init__(self, folder: str, tokens: MediaTokens, layout: ProcessorLayout | None) -> None:
        """Load a model's processor.

        Args:
            folder: Of the model.
            tokens: Of an image.
            layout: How the processor lays out features; ``None`` if only itself can tell.

        Raises:
            UnsupportedModel: `transformers` can't load or use the processor here.
        """
        self._processor = (
            WholeProcessor(folder, tokens) if layout is None else KnownProcessor(folder, layout)
        )

    def plan(self, header: ImageHeader) -> FeaturePlan:
        """Exact, however much work that is."""
        return self._processor.plan(header)

    def process(self, image: DecodedImage, out: Mapping[str, Array]) -> None:
        """Write the processor's features into ``out``.

        Raises:
            InternalError: They are not what was planned.
        """
        made = self._processor.run(Image.fromarray(image.pixels))
        for name, target in out.items():
            array = np.asarray(made[name])
            if array.dtype != target.dtype or array.shape != target.shape:
                raise InternalError(f"{name} is {array.dtype} {array.shape}, not as planned")
            np.copyto(target, array)


class KnownProcessor:
    """The image processor alone, of a family whose prompt and shapes are known."""

    def __init__(self, folder: str, layout: ProcessorLayout) -> None:
        self.run = functools.partial(load_images(folder), return_tensors="np", **layout.arguments)
        self.plan = layout.plan


class WholeProcessor:
    """Image processor and tokenizer together: how an image is written in the prompt is found by
    letting them write it, and the shapes of its features by processing a blank one.
    """

    def __init__(self, folder: str, tokens: MediaTokens) -> None:
        """
        Raises:
            UnsupportedModel: It can't be loaded, or its text can't be told apart from the tokens
                of the image.
        """
        self._processor = load_processor(folder)
        self._tokenizer = self._processor.tokenizer
        self._embed = tokens.embed
        self._marker = self._tokenizer.convert_ids_to_tokens(tokens.marker)
        alone = self._tokenizer(self._marker)["input_ids"]
        self._before = alone.index(tokens.marker)
        self._after = len(alone) - self._before - 1
        probe = Image.new("RGB", _PROBE_SIZE)
        made = self.run(probe)
        # What the one makes of an image and the other does not drop is for the model.
        images = load_images(folder)
        self._names = set(made) & set(images(probe, return_tensors="np"))
        self._check(made)

    def run(self, image: Image.Image) -> Mapping[str, Any]:
        """The model's inputs for a prompt of nothing but this image.

        Not the image processor's alone: the whole one may have other settings for it.
        """
        made: Mapping[str, Any] = self._processor(
            text=self._marker, images=image, return_tensors="np"
        )
        return made

    def plan(self, header: ImageHeader) -> FeaturePlan:
        made = self.run(Image.new("RGB", (header.width, header.height)))
        arrays = {name: np.asarray(made[name]) for name in self._names}
        specs = {name: TensorSpec(each.dtype.name, each.shape) for name, each in arrays.items()}
        return FeaturePlan(specs, self._prompt(made))

    def _prompt(self, made: Mapping[str, Any]) -> tuple[int | str, ...]:
        ids = np.asarray(made["input_ids"])[0].tolist()
        pieces: list[int | str] = []
        written = ids[self._before : len(ids) - self._after]
        for is_embed, run in itertools.groupby(written, key=self._embed.__eq__):
            part = list(run)
            pieces.append(len(part) if is_embed else self._decode(part))
        return tuple(pieces)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _check(self, made: Mapping[str, Any]) -> None:
        """The text was decoded from tokens, and has to give the same tokens again."""
        embed = self._tokenizer.convert_ids_to_tokens(self._embed)
        pieces = self._prompt(made)
        text = "".join(piece if isinstance(piece, str) else embed * piece for piece in pieces)
        same = self._tokenizer(text)["input_ids"] == np.asarray(made["input_ids"])[0].tolist()
        if not same or not any(isinstance(piece, int) for piece in pieces):
            raise UnsupportedModel("the processor's prompt can't be taken apart into text")


def load_images(folder: str) -> Any:
    """The image processor.

    Raises:
        UnsupportedModel: It can't be loaded here.
    """
    return _load(AutoImageProcessor, folder)


def load_processor(folder: str) -> Any:
    """The whole processor, tokenizer included.

    Raises:
        UnsupportedModel: It can't be loaded here, or is none for images.
    """
    processor = _load(AutoProcessor, folder)
    if not hasattr(processor, "image_processor"):
        raise UnsupportedModel("the model's processor takes no images")
    return processor


def _load(auto: Any, folder: str) -> Any:
    try:
        return auto.from_pretrained(folder, trust_remote_code=False)
    except (ImportError, OSError, ValueError) as error:
        hint = "" if find_spec("torchvision") else "; many need torchvision, which is not installed"
        raise UnsupportedModel(f"transformers can't load the model's processor{hint}") from error
