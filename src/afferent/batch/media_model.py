"""Model of `afferent.Features`: its family, its own processor, and the keys of its features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

import numpy as np

from afferent import keys
from afferent.batch.item_features import Form, Producer
from afferent.config import Limits
from afferent.errors import InvalidMedia, UnsupportedMedia, UnsupportedModel
from afferent.media.decoded import Array
from afferent.media.families.adapter import AdapterFamily
from afferent.media.families.family import ProcessorArithmetic, processor_settings
from afferent.media.families.plan import FeaturePlan
from afferent.media.families.registry import AnyFamily, fingerprint
from afferent.media.headers.image_format import is_container
from afferent.media.headers.probe import ImageHeader, MediaHeader
from afferent.media.transforms.normalize import Arithmetic
from afferent.media.transforms.resize import ResizeRule
from afferent.media.workers.discover import family_of
from afferent.types import ContentKey, Modality, TensorSpec
from afferent.wording import any_of

Backend = Literal["torchvision", "pil"]
"""Backend of the model's own processor, as `transformers` names it."""
RULES: Final[Mapping[Backend, ResizeRule]] = {"torchvision": "torchvision", "pil": "pillow"}

_UNKNOWN_FLOATS: Final = (
    'the model has no form="hf" here: its family neither knows the arithmetic of its own processor '
    "nor can run it; take the compact form and Features.model_inputs"
)


def default_backend() -> Backend:
    """Return the backend that `transformers` chooses here."""
    return "torchvision" if find_spec("torchvision") is not None else "pil"


@dataclass(frozen=True, kw_only=True)
class MediaModel:
    """Preparation of one model's media.

    Attributes:
        family: It makes the compact features.
        arithmetic: Arithmetic of the model's own processor.
        fingerprint: Part of the features' keys.
    """

    folder: Path
    family: AnyFamily
    arithmetic: Arithmetic
    fingerprint: bytes
    limits: Limits

    @classmethod
    def load(cls, folder: Path, *, backend: Backend, limits: Limits) -> MediaModel:
        """Load a model's settings; a model without a family takes seconds.

        Raises:
            ConfigError: The folder contains no model.
            UnsupportedModel: Its own processor, which is needed, can't be used here.
        """
        family = family_of(
            folder,
            max_sampled_frames=limits.max_sampled_frames,
            resize_rule=RULES[backend],
        )
        arithmetic: Arithmetic = "stepwise"
        if backend == "torchvision":
            arithmetic = "fused"
            if Modality.IMAGE in family.tokens:
                is_normalized = processor_settings(folder).get("do_normalize") is not False
                arithmetic = "fused" if is_normalized else "rescaled"
        return cls(
            folder=folder,
            family=family,
            arithmetic=arithmetic,
            fingerprint=fingerprint(folder, family),
            limits=limits,
        )

    def family_for(self, form: Form) -> AnyFamily:
        """Return the family that makes features, from which `in_form` makes this form.

        Raises:
            UnsupportedModel: The form is not available for this model.
        """
        return self.family if form == "compact" else self._for_floats

    def producer(self, form: Form) -> Producer:
        is_own = isinstance(self.family_for(form), AdapterFamily)
        return "transformers" if is_own else "afferent"

    def in_form(self, features: Mapping[str, Array], form: Form) -> dict[str, Array]:
        """Return features of `family_for` in this form."""
        family = self.family_for(form)
        if form == "hf" and isinstance(family, ProcessorArithmetic):
            return family.processor_inputs(features, self.arithmetic)
        return dict(features)

    def plan(self, header: MediaHeader, form: Form) -> FeaturePlan:
        """Return the plan of an item.

        Raises:
            InvalidMedia: The model does not support the item.
        """
        plan = self.family_for(form).plan_exactly(header)
        if form == "compact":
            return plan
        blank = {name: np.zeros(spec.shape, spec.dtype) for name, spec in plan.specs.items()}
        made = self.in_form(blank, form)
        specs = {name: TensorSpec(each.dtype.name, each.shape) for name, each in made.items()}
        return FeaturePlan(specs, plan.prompt)

    def modality(self, data: memoryview, requested: Modality | None) -> Modality:
        """Return the modality of a file; its first bytes decide if none is requested.

        Raises:
            UnsupportedMedia: The model takes none of it.
        """
        taken = self.family.tokens
        if requested is not None:
            if requested in taken:
                return Modality(requested)
            raise UnsupportedMedia(f"the model takes {any_of(taken)}, and no {requested}")
        others = [each for each in taken if each is not Modality.IMAGE]
        if Modality.IMAGE in taken and not (others and is_container(data)):
            return Modality.IMAGE
        return others[0]

    def key(self, data: memoryview, modality: Modality) -> ContentKey:
        """Return the key of the compact features of a file: the same as a server's."""
        media = keys.digest(data)
        return keys.item_key(
            tenant="", fingerprint=self.fingerprint, modality=modality, media=media
        )

    @cached_property
    def _for_floats(self) -> AnyFamily:
        family = self.family
        if isinstance(family, AdapterFamily | ProcessorArithmetic):
            return family
        if family.processor_layout is None or Modality.IMAGE not in family.tokens:
            raise UnsupportedModel(_UNKNOWN_FLOATS)
        image = family.tokens[Modality.IMAGE]
        return AdapterFamily(folder=str(self.folder), image=image, native=family)


def image_header_of(pixels: Array) -> ImageHeader:
    """Return the header of an image's pixels.

    Raises:
        InvalidMedia: They are no RGB image.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise InvalidMedia(
            "an image as an array is uint8 (height, width, 3), RGB; this one is "
            f"{pixels.dtype.name} {pixels.shape}. For other layouts, make a PIL image of it"
        )
    return ImageHeader(pixels.shape[1], pixels.shape[0])
