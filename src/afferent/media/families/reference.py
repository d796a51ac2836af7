"""Processor of a model, as `transformers` loads it. Imported by preprocess workers only."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor

from afferent.errors import InternalError, InvalidMedia, UnsupportedModel, in_a_line
from afferent.media.decoded import Array, DecodedImage
from afferent.media.families.family import MediaTokens, ProcessorLayout
from afferent.media.families.plan import FeaturePlan
from afferent.media.headers.probe import ImageHeader
from afferent.types import TensorSpec

_PROBE_SIZES = ((97, 61), (64, 64), (61, 97))
_PROBE_TEXTS = ("It ", "is", "", "not")
"""Texts before, between and after images of these sizes."""


class Reference:
    """Processing of images by `transformers`."""

    def __init__(self, folder: str, tokens: MediaTokens, layout: ProcessorLayout | None) -> None:
        """Load a model's processor.

        Args:
            folder: Folder of the model.
            tokens: Tokens of an image.
            layout: The processor's layout of features; ``None`` if only itself can determine it.

        Raises:
            UnsupportedModel: `transformers` can't load or use the processor here.
        """
        self._processor = (
            WholeProcessor(folder, tokens) if layout is None else KnownProcessor(folder, layout)
        )

    def plan(self, header: ImageHeader) -> FeaturePlan:
        """Return the exact plan; this may run the processor.

        Raises:
            InvalidMedia: The processor takes no image of this size.
        """
        with _refusing():
            return self._processor.plan(header)

    def whole(self, image: DecodedImage, text: str) -> Mapping[str, Any]:
        """Return all outputs of the processor for a prompt of this image and a text.

        Raises:
            InternalError: It is not loaded as a whole, since the family is known.
        """
        if not isinstance(self._processor, WholeProcessor):
            raise InternalError("only the image processor is loaded")
        return self._processor.run(Image.fromarray(image.pixels), text)

    def process(self, image: DecodedImage, out: Mapping[str, Array]) -> None:
        """Write the processor's features into ``out``.

        Raises:
            InvalidMedia: The processor does not take this image.
            InternalError: They differ from the plan.
        """
        with _refusing():
            made = self._processor.run(Image.fromarray(image.pixels))
        for name, target in out.items():
            array = np.asarray(made[name])
            if array.dtype != target.dtype or array.shape != target.shape:
                raise InternalError(f"{name} is {array.dtype} {array.shape}, not as planned")
            np.copyto(target, array)


@contextmanager
def _refusing() -> Iterator[None]:
    """Report a value that the processor refuses: it is the client's image.

    Raises:
        InvalidMedia: The processor refuses it.
    """
    try:
        yield
    except ValueError as error:
        raise InvalidMedia(
            f"the model's own processor refuses the image: {in_a_line(error)}"
        ) from error


class KnownProcessor:
    """Image processor alone, for a family whose prompt and shapes are known."""

    def __init__(self, folder: str, layout: ProcessorLayout) -> None:
        self.run = functools.partial(load_images(folder), return_tensors="np", **layout.arguments)
        self.plan = layout.plan


class WholeProcessor:
    """Image processor and tokenizer together.

    Running them finds the prompt of an image, and processing a blank image finds the shapes of its
    features.
    """

    def __init__(self, folder: str, tokens: MediaTokens) -> None:
        """Load and check the processor.

        Raises:
            UnsupportedModel: It can't be loaded, or its text can't be distinguished from the tokens
                of the image.
        """
        self._processor = load_processor(folder)
        self._tokenizer = self._processor.tokenizer
        self._embed = tokens.embed
        self._marker = self._tokenizer.convert_ids_to_tokens(tokens.marker)
        if self._marker is None:
            raise UnsupportedModel(
                f"the tokenizer has no token {tokens.marker}, which is an image's"
            )
        alone = self._tokenizer(self._marker)["input_ids"]
        self._before = alone.index(tokens.marker)
        self._after = len(alone) - self._before - 1
        probe = Image.new("RGB", _PROBE_SIZES[0])
        made = self.run(probe)
        # Outputs of the image processor that the whole one keeps are for the model.
        images = load_images(folder)
        self._names = set(made) & set(images(probe, return_tensors="np"))
        self._check(made)
        self._check_around()

    def run(self, image: Image.Image, text: str = "") -> Mapping[str, Any]:
        """Return the model's inputs for a prompt of this image and the text.

        By the whole processor: it may have other settings for the image processor.
        """
        made: Mapping[str, Any] = self._processor(
            text=f"{self._marker}{text}", images=image, return_tensors="np"
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
        """Check that the text, which was decoded from tokens, gives the same tokens again."""
        pieces = self._prompt(made)
        same = self._ids(self._written(pieces)) == np.asarray(made["input_ids"])[0].tolist()
        if not same or not any(isinstance(piece, int) for piece in pieces):
            raise UnsupportedModel("the processor's prompt can't be taken apart into text")

    def _check_around(self) -> None:
        """Check that an image's prompt does not depend on the text around it, nor change it."""
        images = [Image.new("RGB", size) for size in _PROBE_SIZES]
        asked = self._marker.join(_PROBE_TEXTS)
        made = self._processor(text=asked, images=images, return_tensors="np")["input_ids"]
        written = [self._written(self.plan(ImageHeader(*size)).prompt) for size in _PROBE_SIZES]
        text = "".join(map("".join, zip(_PROBE_TEXTS, [*written, ""], strict=True)))
        if self._ids(text) != np.asarray(made)[0].tolist():
            raise UnsupportedModel("its processor changes what stands around images, too")

    def _written(self, pieces: Sequence[int | str]) -> str:
        embed = self._tokenizer.convert_ids_to_tokens(self._embed)
        return "".join(piece if isinstance(piece, str) else embed * piece for piece in pieces)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids


@functools.cache
def load_images(folder: str) -> Any:
    """Return the image processor, loaded once for each process and its forks.

    Raises:
        UnsupportedModel: It can't be loaded here.
    """
    return _load(AutoImageProcessor, folder)


def load_processor(folder: str) -> Any:
    """Return the whole processor, tokenizer included.

    Raises:
        UnsupportedModel: It can't be loaded here, or is none for images.
    """
    processor = _load(AutoProcessor, folder)
    if not hasattr(processor, "image_processor"):
        raise UnsupportedModel("the model's processor takes no images")
    return processor


def _all_said(error: BaseException | None) -> str:
    """Return the messages of an error and of all its causes."""
    said = ""
    while error is not None:
        said, error = f"{said}\n{error}", error.__cause__ or error.__context__
    return said


def _load(auto: Any, folder: str) -> Any:
    try:
        return auto.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # their types and causes differ widely
        hint = in_a_line(error)
        if find_spec("torchvision") is None and "torchvision" in _all_said(error).casefold():
            hint = (
                "it needs torchvision; install the extra with pip install '.[torchvision]' in the "
                "clone of Afferent"
            )
        raise UnsupportedModel(f"transformers can't load the model's processor: {hint}") from error
