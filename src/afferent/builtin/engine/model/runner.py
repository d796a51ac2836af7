"""Runner of a multimodal `transformers` model: one rank of it, in this process."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
import torch
from transformers import AutoConfig, AutoModelForMultimodalLM, AutoModelForSpeechSeq2Seq

from afferent.builtin.engine.asked_form import form_of
from afferent.builtin.engine.launch import refuse_longer
from afferent.builtin.engine.model.attention import GROWTH
from afferent.builtin.engine.model.chunks import Decoder, RunningSequence, SequenceChunk
from afferent.builtin.engine.model.cross import CrossDecoder
from afferent.builtin.engine.model.embeddings import Embeddings, Features, PlacedItem
from afferent.builtin.engine.model.form_guide import FormGuide, TokenMask
from afferent.builtin.engine.model.group import Group
from afferent.builtin.engine.model.logit_rules import LogitRules
from afferent.builtin.engine.model.packed import PackedDecoder
from afferent.builtin.engine.model.rehearsal import Rehearsal
from afferent.builtin.engine.model.sampling import Wanted, choose, logprobs
from afferent.builtin.engine.model.shards import keep_shard
from afferent.engines.protocol import Chosen, EngineInfo, SamplingExtra
from afferent.errors import ConfigError, InternalError, UnsupportedModel, in_a_line
from afferent.media.families.adapter import AdapterFamily
from afferent.media.families.family import Family, read_json
from afferent.media.families.tokens import special_names
from afferent.schedule.step import Chunk, Reuse
from afferent.types import Failure, FormField, Modality, Sampling

log = logging.getLogger(__name__)


class Runner:
    """Model in this process. Sequences have the ids that their caller chose.

    Invariants:
        - A sequence exists from `begin` to `drop`.
        - Chunks of a sequence are computed in order, without gaps.
        - All ranks get the same calls; rank 0 chooses the tokens.
    """

    def __init__(
        self,
        folder: Path,
        family: Family,
        *,
        max_model_len: int = 0,
        group: Group | None = None,
    ) -> None:
        """Load the model from a local folder; onto the GPU, if there is one.

        Args:
            folder: Config, weights and generation config, as `transformers` saves them.
            family: The model's family; it finishes the features.
            max_model_len: Limit of prompt and answer in tokens; 0 takes the model's own limit,
                which it may not exceed.
            group: The other ranks of the model, which get the same steps; waited for here.

        Raises:
            UnsupportedModel: Its answers would be wrong here, it does not encode media by
                themselves, or it can't be sharded for ranks.
            ConfigError: It can't be divided among so many ranks, or takes no requests of that
                length.
        """
        self._family, self._group = family, group
        model = load_model(folder)
        tried = None
        if isinstance(family, AdapterFamily) and family.native is None:
            tried = Rehearsal.of(model, family)
        self._model = _place(model, group)
        is_pair = bool(self._model.config.is_encoder_decoder)
        if not is_pair:
            _check_encoders(self._model, family)
        self._decoder: Decoder = (
            CrossDecoder(self._model) if is_pair else PackedDecoder(self._model, family)
        )
        self._sequences: dict[str, RunningSequence] = {}
        self.info = self._describe(folder, max_model_len)
        self.failed: dict[str, Failure] = {}
        """Sequences of the last `run` for which no token could be chosen."""
        # Rank 0 chooses for all.
        self._guide = self._form_guide(folder) if group is None or group.rank == 0 else None
        if tried is not None:
            tried.compare(model, self._decoder, self.encode(Modality.IMAGE, tried.features))

    @torch.inference_mode()
    def encode(self, modality: Modality, features: Features) -> Embeddings:
        """Return the embeddings of one item.

        The features are read in place, without a copy unless it is to another device. They are not
        needed any more when this returns.
        """
        device, dtype = self._model.device, self._model.dtype
        tensors = {
            name: torch.utils.dlpack.from_dlpack(array).to(device, non_blocking=True)
            for name, array in features.items()
        }
        copied = torch.cuda.current_stream().record_event() if device.type == "cuda" else None
        try:
            inputs = {
                name: value.to(dtype) if torch.is_floating_point(value) else value
                for name, value in self._family.model_inputs(tensors).items()
            }
            out = self._encode(modality, inputs)
        finally:
            if copied is not None:
                copied.synchronize()
        if isinstance(out, torch.Tensor):
            return Embeddings(_rows(out))
        layers = getattr(out, "deepstack_features", None) or ()
        return Embeddings(_rows(out.pooler_output), tuple(map(_rows, layers)))

    def begin(
        self,
        sequence_id: str,
        token_ids: list[int],
        items: Sequence[PlacedItem],
        sampling: Sampling,
        *,
        num_answered: int = 0,
        form_nbytes: int = 0,
        has_answer: bool = True,
        reuse: Reuse | None = None,
    ) -> None:
        """Add a new sequence, or again one that was dropped; nothing is computed.

        Args:
            sequence_id: The sequence's id from now on.
            token_ids: Its prompt, and the tokens chosen before it was dropped.
            items: The items in prompt order.
            sampling: Parameters for the choice of tokens; the caller draws the seed.
            num_answered: Number of ``token_ids`` that were chosen.
            form_nbytes: Memory that the format of its answer takes, if it has one.
            has_answer: Whether a token is chosen behind the prompt.
            reuse: The sequence whose KV cache it begins with; the tokens and items are the same.

        Raises:
            InvalidPlaceholders: Items overlap, or are not in prompt order.
            InvalidForm: The request has two response formats.
            InternalError: An item does not fit the prompt, or there is no such sequence to reuse.
        """
        state = self._decoder.begin(token_ids, items)
        num_computed = 0
        if reuse is not None:
            source = self._sequence(reuse.source_id).state
            num_computed = reuse.num_tokens
            self._decoder.reuse(state, source, num_tokens=num_computed, is_move=reuse.is_move)
            if reuse.is_move:
                self.drop(reuse.source_id)
        rules = LogitRules.of(
            sampling,
            token_ids,
            num_answered=num_answered,
            eos_token_ids=self.info.eos_token_ids,
        )
        answered = token_ids[len(token_ids) - num_answered :]
        self._follow(sequence_id, sampling, nbytes=form_nbytes, answered=answered)
        self._sequences[sequence_id] = RunningSequence(
            sequence_id, list(token_ids), sampling, state, rules, has_answer, num_computed
        )

    def extend(
        self,
        sequence_id: str,
        token_ids: list[int],
        items: Sequence[PlacedItem],
        sampling: Sampling,
        *,
        form_nbytes: int = 0,
        has_answer: bool = True,
    ) -> None:
        """Append input to a sequence, behind its answer; nothing is computed. O(the input).

        Args:
            items: Their placeholders count from the input's first token.
            sampling: Parameters of the answer to it.
            form_nbytes: As in `begin`, and so is ``has_answer``.

        Raises:
            InvalidPlaceholders: Items overlap, or are not in prompt order.
            InvalidForm: The request has two response formats.
            InternalError: There is no such sequence, or an item does not fit the input.
        """
        sequence = self._sequence(sequence_id)
        self._decoder.extend(sequence.state, len(sequence.token_ids), token_ids, items)
        sequence.token_ids += token_ids
        sequence.sampling, sequence.has_answer = sampling, has_answer
        sequence.rules = LogitRules.of(
            sampling, sequence.token_ids, num_answered=0, eos_token_ids=self.info.eos_token_ids
        )
        self.finish(sequence_id)
        self._follow(sequence_id, sampling, nbytes=form_nbytes, answered=[])

    @torch.inference_mode()
    def run(
        self,
        chunks: Sequence[Chunk],
        decode: Sequence[str],
        embeddings: Mapping[bytes, Embeddings],
    ) -> list[Chosen]:
        """Compute chunks of prompts, and the last tokens of other sequences.

        Args:
            chunks: Each of another sequence, and from the end of its computed positions.
            decode: Sequences of which all but the last token is computed.
            embeddings: By key; the items that the chunks touch must be among them.

        Returns:
            The next token of each sequence that samples, first those of ``chunks``. It is invalid
            for the sequences in `failed`.

        Raises:
            UnusableEmbeddings: Names one sequence; nothing has been computed.
        """
        wanted = [self._of_sequence(chunk) for chunk in chunks]
        for sequence_id in decode:
            start = len(self._sequence(sequence_id).token_ids) - 1
            wanted.append(self._of_sequence(Chunk(sequence_id, start, 1, samples=True)))
        if not wanted:
            return []
        for each in wanted:
            self._decoder.check(each, embeddings)
        logits = self._decoder.logits(wanted, embeddings)
        for each in wanted:
            each.sequence.num_computed = each.end
        sequences = [each.sequence for each in wanted if each.samples]
        chosen_by = self._wanted(sequences)
        is_usable = logits.amax(-1).isfinite()
        if not is_usable.all():
            self._fail(sequences, is_usable.tolist())
            logits = logits.masked_fill(~is_usable.unsqueeze(1), 0.0)
        tokens = choose(logits, chosen_by)
        if self._group is not None:
            tokens = self._group.broadcast(tokens)
        if self._guide is not None:
            ids = [each.sequence_id for each in sequences]
            self._guide.advance(list(zip(ids, tokens, strict=True)))
        return list(map(_chosen, sequences, tokens, logits))

    def _follow(
        self, sequence_id: str, sampling: Sampling, *, nbytes: int, answered: list[int]
    ) -> None:
        """Follow an answer from now on, if it has a format."""
        form = form_of(sampling)
        if form is not None and self._guide is not None:
            self._guide.begin(
                sequence_id,
                form,
                nbytes=nbytes,
                answered=answered,
                max_tokens=0 if sampling.ignore_eos else sampling.max_tokens,
            )

    def finish(self, sequence_id: str) -> None:
        """Forget what chooses a sequence's tokens; its positions stay, to be reused."""
        if self._guide is not None:
            self._guide.drop(sequence_id)

    def drop(self, sequence_id: str) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._sequences.pop(sequence_id, None)
        self.finish(sequence_id)

    def _wanted(self, sequences: Sequence[RunningSequence]) -> list[Wanted]:
        masks: Sequence[TokenMask | None] = [None] * len(sequences)
        optional: Sequence[int | None] = [None] * len(sequences)
        self.failed = {}
        if self._guide is not None:
            ids = [each.sequence_id for each in sequences]
            masks, self.failed = self._guide.masks(ids)
            optional = list(map(self._guide.optional, ids))
        return [
            Wanted(each.sampling, len(each.token_ids), each.rules, mask, call)
            for each, mask, call in zip(sequences, masks, optional, strict=True)
        ]

    def _fail(self, sequences: Sequence[RunningSequence], are_usable: Sequence[bool]) -> None:
        """Fail the sequences for which the model has computed no numbers."""
        failure = Failure(InternalError.code, "the model's numbers overflow for this request")
        ids = [each.sequence_id for each in sequences]
        lost = [id_ for id_, is_usable in zip(ids, are_usable, strict=True) if not is_usable]
        log.warning("the model's numbers overflow", extra={"requests": str(lost)})
        self.failed |= dict.fromkeys(lost, failure)

    def _form_guide(self, folder: Path) -> FormGuide | None:
        """Return the guide; if there is none, remove response formats from `info`."""
        info = self.info
        guide = FormGuide.of(folder, eos_token_ids=info.eos_token_ids, vocab_size=info.vocab_size)
        if guide is None:
            supported = tuple(name for name in info.supported if name not in get_args(FormField))
            self.info = msgspec.structs.replace(info, supported=supported)
        return guide

    def _encode(self, modality: Modality, inputs: dict[str, Any]) -> Any:
        if self.info.cross_attention:
            return self._model.get_encoder()(**inputs, return_dict=True).last_hidden_state
        encode = _encoder_of(self._model, modality)
        if encode is None:
            raise InternalError(f"the model has no encoder of {modality}")
        return encode(**inputs, return_dict=True)

    def _sequence(self, sequence_id: str) -> RunningSequence:
        if sequence_id not in self._sequences:
            raise InternalError("a step is about a sequence that has not begun")
        return self._sequences[sequence_id]

    def _of_sequence(self, chunk: Chunk) -> SequenceChunk:
        sequence = self._sequence(chunk.sequence_id)
        end = chunk.start + chunk.num_tokens
        if chunk.start != sequence.num_computed:
            raise InternalError("a step does not go on where its sequence is")
        length = len(sequence.token_ids)
        samples = end == length and sequence.has_answer
        if chunk.num_tokens < 1 or end > length or chunk.samples != samples:
            raise InternalError("a step does not end where its sequence does")
        return SequenceChunk(sequence, chunk.start, end, chunk.samples)

    def _describe(self, folder: Path, max_model_len: int) -> EngineInfo:
        config = self._model.config
        text = config.get_text_config()
        own = getattr(text, "max_position_embeddings", 0) or getattr(
            config, "max_target_positions", 0
        )
        limit = int(own or 4096)
        refuse_longer(max_model_len, limit)
        eos_token_ids = (
            _token_ids(self._model.generation_config.eos_token_id)
            or _token_ids(getattr(text, "eos_token_id", None))
            or _token_ids(end_token_id(folder))
        )
        row_nbytes = int(text.hidden_size) * self._model.dtype.itemsize
        head = self._model.get_output_embeddings()
        return EngineInfo(
            max_model_len=max_model_len or limit,
            eos_token_ids=eos_token_ids,
            embed_nbytes=row_nbytes * self._decoder.num_embed_layers,
            can_split_items=self._decoder.can_split_items,
            cross_attention=bool(config.is_encoder_decoder),
            kv_token_nbytes=self._kv_token_nbytes(),
            supported=get_args(SamplingExtra),
            vocab_size=0 if head is None else int(head.weight.shape[0]),
            has_sessions=self._decoder.can_extend,
        )

    def _kv_token_nbytes(self) -> int:
        """Return the bytes of all layers and all heads, on all ranks."""
        model = self._model
        if model.config.is_encoder_decoder or model.device.type != "cpu":
            return 0  # most memory is for items, or the memory is a GPU's
        text = model.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return int(GROWTH * 2 * text.num_hidden_layers * heads * head_dim * model.dtype.itemsize)


def load_model(folder: Path) -> Any:
    """Load a model with its weights into this machine's memory, with code of `transformers` alone.

    Raises:
        ConfigError: Some of its weights or files are missing.
        UnsupportedModel: The engine does not support its kind.
    """
    config, auto = _config_of(folder)
    is_pair = bool(config.is_encoder_decoder)
    if type(config) not in auto._model_mapping:
        kind = "other than of speech" if is_pair else "that take no media"
        what = "encoder-decoder models" if is_pair else "models"
        raise UnsupportedModel(
            f"{config.model_type} is not served: {what} {kind} are not done by the built-in engine"
        )
    # Without code of the folder's own, and without pickles.
    safe: dict[str, Any] = {"trust_remote_code": False, "use_safetensors": True}
    try:
        model, loaded = auto.from_pretrained(
            folder, config=config, dtype="auto", output_loading_info=True, **safe
        )
    except OSError as error:
        raise ConfigError(f"the model in {folder} can't be loaded: {in_a_line(error)}") from error
    if missing := sorted(loaded["missing_keys"]):
        raise ConfigError(
            f"the weights in {folder} lack {len(missing)} of the model's tensors: {missing[0]}, ..."
        )
    return model.eval()


def model_class(folder: Path) -> Any:
    """Return the model's class, whose module is imported; its weights are not read."""
    config, auto = _config_of(folder)
    return auto._model_mapping[type(config)]


def _config_of(folder: Path) -> tuple[Any, Any]:
    """Return the model's configuration, and the class that loads it."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return config, (
        AutoModelForSpeechSeq2Seq if config.is_encoder_decoder else AutoModelForMultimodalLM
    )


def _token_ids(value: int | Sequence[int] | None) -> list[int]:
    return [value] if isinstance(value, int) else list(value or ())


def end_token_id(folder: Path) -> int | None:
    """Return the token that ends the tokenizer's texts, for models that name none themselves."""
    ends = special_names(folder).get("eos_token")
    path = folder / "tokenizer.json"
    added = read_json(path).get("added_tokens") if ends and path.exists() else None
    return next((token["id"] for token in added or () if token.get("content") == ends), None)


def _encoder_of(model: Any, modality: Modality) -> Any:
    """Return the method that computes the embeddings of an item alone; ``None`` if there is
    none.
    """
    name = f"get_{modality}_features"
    return getattr(model, name, None) or getattr(getattr(model, "model", None), name, None)


def _check_encoders(model: Any, family: Family) -> None:
    """Check that the model has an encoder for each modality of the family.

    Raises:
        UnsupportedModel: It lacks one.
    """
    for modality in family.tokens:
        if _encoder_of(model, modality) is None:
            kind = model.config.model_type
            raise UnsupportedModel(
                f"{kind} does not give the embeddings of {modality} by themselves"
            )


def _place(model: Any, group: Group | None) -> Any:
    """Cut the model down to this rank's shard, on this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", group.rank if group else 0)
        torch.cuda.set_device(device)
    if group is not None:
        keep_shard(model, group)
        group.meet(device)
    return model.to(device)


def _rows(out: Any) -> torch.Tensor:
    """Return an item's rows as one matrix: some models split them into the item's own parts."""
    joined = out if isinstance(out, torch.Tensor) else torch.cat(list(out))
    return joined.reshape(-1, joined.shape[-1])


def _chosen(sequence: RunningSequence, token: int, logits: torch.Tensor) -> Chosen:
    sequence.choose(token)
    return Chosen(sequence.sequence_id, token, logprobs(logits, sequence.sampling, token))
