"""Running a multimodal `transformers` model: features in, one token at a time out."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForMultimodalLM, DynamicCache

from afferent.engine.protocol import EngineInfo
from afferent.errors import InternalError
from afferent.preprocess.family import Family
from afferent.schedule.window import WindowIndex
from afferent.types import Modality, Placeholder, Sampling

Features = Mapping[str, NDArray[Any]]

_TYPES = {Modality.IMAGE: 1, Modality.VIDEO: 2, Modality.AUDIO: 3}
"""How `transformers` tells the tokens of media from those of text, which are 0."""


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """An item after `Runner.encode`: where it goes, its grids if it has any, its embeddings."""

    modality: Modality
    placeholder: Placeholder
    grids: Features
    embeddings: list[torch.Tensor]


@dataclass(slots=True)
class _Sequence:
    """A sequence's cache in the model, and where its next token goes."""

    cache: Any
    next_position: int
    last_token: int
    sampling: Sampling
    generator: torch.Generator | None


class Runner:
    """One model in this process. Sequences are known by the ids their caller chose."""

    def __init__(self, folder: Path, family: Family, *, max_model_len: int = 0) -> None:
        """Load the model from a local folder.

        Args:
            folder: What `transformers` saves: config, weights, generation config.
            family: Of the model; it finishes the features.
            max_model_len: Limit of prompt and answer in tokens; 0 takes the model's own.
        """
        self._model: Any = AutoModelForMultimodalLM.from_pretrained(folder, dtype="auto").eval()
        self._family = family
        config = self._model.config
        text = config.get_text_config()
        limit = int(getattr(text, "max_position_embeddings", 0) or 4096)
        parameters = inspect.signature(self._model.forward).parameters
        self._takes_encoder_outputs = "mm_encoder_outputs" in parameters
        self._is_mrope = hasattr(self._model.model, "get_rope_index")
        self._sequences: dict[str, _Sequence] = {}
        eos = self._model.generation_config.eos_token_id or text.eos_token_id or []
        self.info = EngineInfo(
            max_model_len=min(max_model_len, limit) if max_model_len else limit,
            eos_token_ids=[eos] if isinstance(eos, int) else list(eos),
        )

    @torch.inference_mode()
    def encode(self, modality: Modality, features: Features) -> list[torch.Tensor]:
        """The embeddings of one item's features, each ``(num_embeds, hidden)``.

        The features are read where they are: the tensors are views over the same memory.
        """
        tensors = {name: torch.utils.dlpack.from_dlpack(array) for name, array in features.items()}
        encode = getattr(self._model, f"get_{modality}_features")
        out = encode(**self._family.model_inputs(tensors), return_dict=True).pooler_output
        return [out] if isinstance(out, torch.Tensor) and out.dim() == 2 else list(out)

    @torch.inference_mode()
    def prefill(
        self,
        sequence_id: str,
        token_ids: list[int],
        items: list[EncodedItem],
        sampling: Sampling,
    ) -> int:
        """Run the prompt; the first token of the answer.

        Args:
            sequence_id: A new one.
            token_ids: The prompt, each placeholder filled with the model's image token.
            items: In prompt order.
            sampling: How to choose this and the following tokens.
        """
        index = WindowIndex((item.placeholder, item) for item in items)
        if index.end > len(token_ids):
            raise InternalError("an item's placeholder lies outside of the prompt")
        items = [index[ordinal] for ordinal in index.in_window(0, len(token_ids))]
        input_ids = torch.tensor([token_ids])
        types = torch.zeros_like(input_ids, dtype=torch.int32)
        for item in items:
            start, length = item.placeholder.offset, item.placeholder.length
            embed = self._family.tokens[item.modality].embed
            is_embed = input_ids[0, start : start + length] == embed
            if sum(len(part) for part in item.embeddings) != int(is_embed.sum()):
                raise InternalError("an item's embeddings do not fill its placeholder")
            types[0, start : start + length][is_embed] = _TYPES[item.modality]
        positions, next_position = self._positions(input_ids, types, items)
        cache = DynamicCache(config=self._model.config.get_text_config())
        prompt = self._with_embeddings(input_ids, types, items)
        logits = self._forward(positions, cache, **prompt)
        generator = None
        if sampling.seed is not None:
            generator = torch.Generator().manual_seed(sampling.seed % 2**63)
        token = choose(logits, sampling, generator)
        self._sequences[sequence_id] = _Sequence(cache, next_position, token, sampling, generator)
        return token

    @torch.inference_mode()
    def decode(self, sequence_id: str) -> int:
        """The next token of a sequence."""
        sequence = self._sequences[sequence_id]
        positions = torch.tensor([[sequence.next_position]])
        if self._is_mrope:
            positions = positions.expand(3, 1, 1)
        input_ids = torch.tensor([[sequence.last_token]])
        logits = self._forward(positions, sequence.cache, input_ids=input_ids)
        sequence.next_position += 1
        sequence.last_token = choose(logits, sequence.sampling, sequence.generator)
        return sequence.last_token

    def drop(self, sequence_id: str) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._sequences.pop(sequence_id, None)

    def _with_embeddings(
        self, input_ids: torch.Tensor, types: torch.Tensor, items: list[EncodedItem]
    ) -> dict[str, Any]:
        """The prompt with its items, as arguments of the model."""
        if not items:
            return {"input_ids": input_ids}
        encoded: dict[str, list[torch.Tensor]] = {}
        for item in items:
            encoded.setdefault(item.modality, []).extend(item.embeddings)
        if self._takes_encoder_outputs:
            outputs = {
                name: SimpleNamespace(pooler_output=parts) for name, parts in encoded.items()
            }
            return {"input_ids": input_ids, "mm_encoder_outputs": outputs}
        embeddings = self._model.get_input_embeddings()(input_ids)
        for modality, parts in encoded.items():
            rows = torch.cat(parts).to(embeddings.dtype)
            embeddings[types == _TYPES[Modality(modality)]] = rows
        return {"inputs_embeds": embeddings}

    def _positions(
        self, input_ids: torch.Tensor, types: torch.Tensor, items: list[EncodedItem]
    ) -> tuple[torch.Tensor, int]:
        """Position ids of a prompt, and the position after it.

        They are always passed explicitly: what the model would remember of its last call belongs to
        whatever sequence ran last.
        """
        length = input_ids.shape[1]
        if not self._is_mrope:
            return torch.arange(length)[None], length
        if not items:
            return torch.arange(length).expand(3, 1, length), length
        grids: dict[str, list[NDArray[Any]]] = {}
        for item in items:
            for name, grid in item.grids.items():
                grids.setdefault(name, []).append(grid)
        joined = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in grids.items()}
        positions, deltas = self._model.model.get_rope_index(
            input_ids, mm_token_type_ids=types, **joined
        )
        return positions, length + int(deltas.item())

    def _forward(self, positions: torch.Tensor, cache: Any, **arguments: Any) -> torch.Tensor:
        """Logits of the last position, ``(vocabulary,)``."""
        out = self._model(
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **arguments,
        )
        logits: torch.Tensor = out.logits[0, -1]
        return logits


def choose(
    logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None = None
) -> int:
    """A token from the ``(vocabulary,)`` logits of one position."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    scaled = logits.float() / sampling.temperature
    if sampling.top_k:
        kth = scaled.topk(min(sampling.top_k, len(scaled))).values[-1]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    probabilities = scaled.softmax(-1)
    if sampling.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        # Keep the smallest set of tokens that reaches top_p, the first in any case.
        outside = ordered.cumsum(-1) - ordered >= sampling.top_p
        probabilities[order[outside]] = 0.0
    return int(torch.multinomial(probabilities, 1, generator=generator))
