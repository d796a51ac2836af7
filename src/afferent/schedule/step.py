"""What the scheduler is told and what it answers: plain values that travel as they are.

A step says what is new. What a worker knows (prompts, items, how far each sequence is) is not said
again: a decoded token costs its sequence's id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from msgspec import Struct

from afferent.errors import ConfigError
from afferent.quota.shares import NAMELESS, Share
from afferent.types import Placeholder

UNLIMITED = 2**62


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The budgets. What is not said is not limited.

    Raises:
        ConfigError: One is below 1, or a step's tokens could be used up by decoding alone.
    """

    max_num_seqs: int
    """Sequences that run at a time: they hold a part of the KV cache."""
    max_step_decodes: int = UNLIMITED
    """Sequences that have a token of their answer in a step. Where more run, each request gets as
    many tokens as the others; the first ``max_step_decodes`` sequences are admitted when their
    prompts fit, the others only when their whole answers fit as well.
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
    lookahead_tokens: int = 0
    """Items that begin this close behind a chunk are encoded with it, if there is room. The
    reference engine encodes what a step needs, and sets none: it is for engines that encode beside.
    """
    can_split_items: bool = True
    """Whether a chunk may end inside an item; not where its positions attend to each other."""

    @property
    def max_item_tokens(self) -> int:
        """Positions that one item may take.

        What is computed whole must fit beside all the others decoding, or it might wait for ever.
        """
        return (
            UNLIMITED
            if self.can_split_items
            else self.max_num_batched_tokens - self.most_decodes + 1
        )

    @property
    def most_decodes(self) -> int:
        """Tokens of answers in a step, at the most."""
        return min(self.max_num_seqs, self.max_step_decodes)

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name in ("lookahead_tokens", "can_split_items") else 1
            if getattr(self, field.name) < least:
                raise ConfigError(f"{field.name} is below {least}")
        if self.max_num_batched_tokens < self.most_decodes:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.most_decodes}): prompts would wait until decoding ends"
            )


class EncoderInput(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One item as the scheduler sees it: its embeddings' key, where they go, what they weigh.

    There is one row of embeddings for each position of the placeholder.
    """

    key: bytes
    placeholder: Placeholder
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A sequence to be: its prompt's length, its items in prompt order, its answer's limit.

    A *session* (``session_tokens`` above 0) stays after its answer and takes more input with
    `Scheduler.append`, up to ``session_tokens`` positions in all, answers included. Its items are
    forgotten once they are computed, so it can't begin again and is never preempted: it is
    admitted when its part of the KV cache is free, all of it. No API of the server has sessions;
    engines that listen while they speak do (``examples/simulated_engine.py``).
    """

    id: str
    num_tokens: int
    max_tokens: int
    items: Sequence[EncoderInput] = ()
    session_tokens: int = 0
    share: Share = NAMELESS
    """Tenant and weight: prompts and answers are computed by fair shares."""
    answer_of: str = ""
    """The request that this sequence answers, where several sequences answer one: together they get
    the share of one request. Empty: the sequence is a request of its own.
    """
    cross_attention: bool = False
    """The model is an encoder-decoder: its items are all at offset 0, beside the prompt."""


class Placed(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The next input of a session, in the order of appending, begins at position ``start``."""

    sequence_id: str
    start: int


class Encode(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Make an item's embeddings and keep them under ``key``; ``item`` is its ordinal."""

    sequence_id: str
    item: int
    key: bytes


class Chunk(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Compute the positions ``[start, start + num_tokens)`` of a sequence.

    A chunk at 0 begins the sequence, or begins it again after it was preempted. With ``samples``,
    the chunk ends at the last known token, and the next one is to be chosen.
    """

    sequence_id: str
    start: int
    num_tokens: int
    samples: bool


class Step(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the workers do next, in this order. Deltas only."""

    drop: list[str]
    """Sequences that ended or are preempted: forget what was computed of them."""
    evict: list[bytes]
    """Embeddings to forget."""
    placed: list[Placed]
    encode: list[Encode]
    prefill: list[Chunk]
    decode: list[str]
    """Sequences that compute the token chosen last, and choose the next."""

    @property
    def is_empty(self) -> bool:
        lists = (self.drop, self.evict, self.placed, self.encode, self.prefill, self.decode)
        return not any(lists)
