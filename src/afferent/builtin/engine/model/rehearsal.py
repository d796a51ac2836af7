"""Self-test of a model without a built-in family: whether it is computed here as it computes
itself.

Tests cover the known families. The processor, encoder and layers of any other model may do more
than the engine knows. So the model is tested once, before it is served: a blank image, a few
tokens, and a comparison of the logits with its own.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from afferent.builtin.engine.model.chunks import Decoder, RunningSequence, SequenceChunk
from afferent.builtin.engine.model.embeddings import Embeddings, Features, PlacedItem
from afferent.errors import AfferentError, UnsupportedModel, in_a_line
from afferent.media.decoded import DecodedImage
from afferent.media.families.adapter import AdapterFamily
from afferent.media.families.registry import POSITION_FEATURES
from afferent.types import Modality, Placeholder, Sampling

_NUM_STEPS: Final = 3
_SIZE: Final = (90, 60)
_KEY: Final = b"rehearsal"
_TEXT: Final = " What is it?"
_LARGEST_ERROR: Final = 0.03
"""Largest error, as a part of the logits' own spread: rounding causes less, a wrong mask or
position more.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Results of the model itself.

    Attributes:
        token_ids: The prompt, and the tokens that the model chose.
        features: Features of the image.
        placeholder: Its positions in the prompt.
        logits: ``(steps, vocabulary)``.
    """

    token_ids: list[int]
    features: Features
    placeholder: Placeholder
    logits: torch.Tensor

    @classmethod
    def of(cls, model: Any, family: AdapterFamily) -> Rehearsal:
        """Run the model by `transformers`, with the complete output of its processor.

        Raises:
            UnsupportedModel: The run fails.
        """
        image = DecodedImage(_picture())
        plan = family.plan_exactly(image.header)
        features = {name: np.zeros(spec.shape, spec.dtype) for name, spec in plan.specs.items()}
        family.process(image, features)
        made = family.reference().whole(image, _TEXT)
        prompt = np.asarray(made["input_ids"])[0].tolist()
        places = [at for at, token in enumerate(prompt) if token == family.image.embed]
        with _named(model, "can't be run by transformers"), torch.inference_mode():
            out = model.generate(
                **{name: _tensor(value, model) for name, value in made.items()},
                max_new_tokens=_NUM_STEPS,
                min_new_tokens=_NUM_STEPS,
                do_sample=False,
                num_beams=1,
                output_logits=True,
                return_dict_in_generate=True,
            )
        chosen = out.sequences[0, -_NUM_STEPS:].tolist()
        return cls(
            token_ids=prompt + chosen[: len(out.logits) - 1],
            features=features,
            placeholder=Placeholder(places[0], places[-1] - places[0] + 1),
            logits=torch.cat(out.logits),
        )

    def compare(self, model: Any, decoder: Decoder, embeddings: Embeddings) -> None:
        """Compute the same here, and compare the logits.

        Args:
            model: The same model.
            decoder: The model's decoder, as it is used here.
            embeddings: The image's embeddings, as they are computed here.

        Raises:
            UnsupportedModel: The logits differ.
        """
        grids = {name: each for name, each in self.features.items() if name in POSITION_FEATURES}
        item = PlacedItem(Modality.IMAGE, self.placeholder, _KEY, grids)
        num_prompt = len(self.token_ids) - len(self.logits) + 1
        with _named(model, "can't be computed here"), torch.inference_mode():
            state = decoder.begin(self.token_ids[:num_prompt], [item])
            sequence = RunningSequence("rehearsal", self.token_ids, Sampling(max_tokens=1), state)
            rows, start = [], 0
            for end in range(num_prompt, len(self.token_ids) + 1):
                chunk = SequenceChunk(sequence, start, end, samples=True)
                decoder.check(chunk, {_KEY: embeddings})
                rows.append(decoder.logits([chunk], {_KEY: embeddings}))
                start = end
        ours, own = torch.cat(rows).float().cpu(), self.logits.float().cpu()
        finite = torch.isfinite(own)
        error = (ours - own)[finite].abs().max() / own[finite].std()
        if not error < _LARGEST_ERROR:  # also true for NaN
            raise UnsupportedModel(
                f"{model.config.model_type} is not computed here as it computes itself: logits "
                f"differ by {float(error):.2g} of their spread"
            )


@contextlib.contextmanager
def _named(model: Any, what: str) -> Iterator[None]:
    """Convert errors in a model into `UnsupportedModel`."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # warnings here are expected
            yield
    except AfferentError as error:
        raise UnsupportedModel(f"{model.config.model_type} {what}: {error.message}") from error
    except Exception as error:
        raise UnsupportedModel(f"{model.config.model_type} {what}: {in_a_line(error)}") from error


def _picture() -> Any:
    """Return a picture of several colours: a plain one would not reveal missing features."""
    width, height = _SIZE
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 4, columns * 2, rows + columns], axis=-1).astype(np.uint8)


def _tensor(value: Any, model: Any) -> torch.Tensor:
    tensor = torch.as_tensor(np.asarray(value))
    return tensor.to(model.dtype) if torch.is_floating_point(tensor) else tensor
