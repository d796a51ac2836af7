"""Input and output of the scheduler: plain values that travel as they are.

A step contains only news. It does not repeat what a worker knows (prompts, items, the progress of
each sequence): a decoded token costs its sequence's id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from msgspec import Struct

from afferent.admission.shares import NAMELESS, Share
from afferent.errors import ConfigError
from afferent.types import Placeholder

UNLIMITED = 2**62


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Budgets of the scheduler. An omitted one is unlimited.

    Raises:
        ConfigError: One is below 1, or decoding alone could use up a step's tokens.
    """

    max_num_seqs: int
    """Sequences that run at a time: each has a part of the KV cache."""
    max_step_decodes: int = UNLIMITED
    """Sequences that have a token of their answer in a step.

    If more run, each request gets as many tokens as the others. The first ``max_step_decodes``
    sequences are admitted when their prompts fit, the others only when their whole answers fit as
    well.
    """
    max_num_batched_tokens: int = UNLIMITED
    """Positions computed in a step, decoded tokens included."""
    max_step_prefills: int = UNLIMITED
    """Sequences that compute a chunk of prompt in a step."""
    max_num_batched_embeds: int = UNLIMITED
    """Embedding rows encoded in a step."""
    cache_num_embeds: int = UNLIMITED
    """Embedding rows that the encoder cache holds."""
    cache_nbytes: int = UNLIMITED
    """Bytes of embeddings that the encoder cache holds."""
    kv_num_blocks: int = UNLIMITED
    """Blocks of the KV cache."""
    kv_block_tokens: int = 16
    """Positions that fit in one block."""
    max_kept_tokens: int = 0
    """Positions of ended sequences whose KV caches stay, in blocks that no running one needs."""
    lookahead_tokens: int = 0
    """Distance after a chunk within which items are encoded with it, if there is space.

    The built-in engine encodes what a step needs, and sets none: it is for engines that encode in
    parallel.
    """
    can_split_items: bool = True
    """Whether a chunk may end inside an item; not if its positions attend to each other."""

    @property
    def max_item_tokens(self) -> int:
        """Positions that one item may take.

        An item that is computed whole must fit beside all others that decode, or it could wait
        forever.
        """
        if self.can_split_items:
            return UNLIMITED
        most_others = min(self.max_num_seqs - 1, self.max_step_decodes)
        return self.max_num_batched_tokens - most_others

    @property
    def most_decodes(self) -> int:
        """Largest number of answer tokens in a step."""
        return min(self.max_num_seqs, self.max_step_decodes)

    def __post_init__(self) -> None:
        for field in fields(self):
            least = (
                0 if field.name in ("lookahead_tokens", "max_kept_tokens", "can_split_items") else 1
            )
            if getattr(self, field.name) < least:
                raise ConfigError(f"{field.name} is below {least}")
        if self.max_num_batched_tokens < self.most_decodes:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.most_decodes}): prompts would wait until decoding ends"
            )


class EncoderInput(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One item of a prompt: the key, placeholder and size in bytes of its embeddings.

    There is one row of embeddings for each position of the placeholder.
    """

    key: bytes
    placeholder: Placeholder
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """New sequence: its prompt's length, its items in prompt order, its answer's limit.

    A *session* (``session_tokens`` above 0) stays after its answer and takes more input with
    `Scheduler.append`, up to ``session_tokens`` positions in all, answers included. Its items are
    dropped once they are computed, so it can't begin again and is never preempted: it is admitted
    when its whole part of the KV cache is free. The built-in engine has one for each live session.
    """

    id: str
    num_tokens: int
    max_tokens: int
    items: Sequence[EncoderInput] = ()
    session_tokens: int = 0
    share: Share = NAMELESS
    """Tenant and weight: prompts and answers are computed by fair shares."""
    answer_of: str = ""
    """The request that this sequence answers, if several sequences answer one.

    Together they get the share of one request. Empty: the sequence is a request of its own.
    """
    num_answers: int = 1
    """Number of sequences with this ``answer_of``: a large request for fair turns has many."""
    cross_attention: bool = False
    """The model is an encoder-decoder: its items are all at offset 0, beside the prompt."""
    token_ids: Sequence[int] = ()
    """The prompt's tokens, if it may begin with the KV cache of an earlier sequence (`Step.reuse`),
    and if later ones may begin with its own. `Scheduler.record` is given its answer's tokens, too.
    """


class Placed(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The next input of a session, in the order of appending, begins at position ``start``."""

    sequence_id: str
    start: int


class Encode(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Compute an item's embeddings and store them under ``key``; ``item`` is its ordinal."""

    sequence_id: str
    item: int
    key: bytes


class Chunk(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Compute the positions ``[start, start + num_tokens)`` of a sequence.

    A chunk at 0 begins the sequence, or begins it again after a preemption; `Step.reuse` begins
    others. With ``samples``, the
    chunk ends at the last known token, and the workers choose the next one.
    """

    sequence_id: str
    start: int
    num_tokens: int
    samples: bool


class Reuse(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Begin a sequence with the computed positions of one that has ended, which begins alike.

    Attributes:
        sequence_id: The sequence that begins; its chunks continue after these positions.
        source_id: The sequence that has ended; `Step.drop` has not named it.
        num_tokens: Number of the positions.
        is_move: Whether the source ends with this; if not, its positions are copied.
    """

    sequence_id: str
    source_id: str
    num_tokens: int
    is_move: bool


class Step(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Work of the workers, in the order of the fields. Deltas only."""

    drop: list[str]
    """Sequences that are preempted, or ended and are not kept: the workers drop their state."""
    evict: list[bytes]
    """Keys of embeddings to drop."""
    placed: list[Placed]
    encode: list[Encode]
    prefill: list[Chunk]
    decode: list[str]
    """Sequences that compute the token chosen last, and choose the next."""
    reuse: list[Reuse] = []
    """Sequences that begin in this step, before any chunk of it."""

    @property
    def is_empty(self) -> bool:
        lists = (self.drop, self.evict, self.placed, self.encode, self.prefill, self.decode)
        return not any(lists) and not self.reuse
