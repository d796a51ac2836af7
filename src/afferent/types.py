"""The words that all stages share: plain values, no behaviour, no I/O.

They are `msgspec` structs, so the same definition is the type, the wire schema and its check.
"""

from __future__ import annotations

import os
import time
from enum import StrEnum
from typing import Annotated, NewType, TypeVar

import msgspec
from msgspec import Meta, Struct

from afferent.errors import FormatError

T = TypeVar("T")

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30

ContentKey = NewType("ContentKey", bytes)
"""32 bytes of BLAKE3: *what* an object is. See `afferent.keys`."""

ClientId = int
Lease = tuple[ClientId, str | int]
"""A request of a client of the store; jobs of the store itself have numbers."""

Ticket = tuple[ClientId, int]
"""Who waits for something of the store, and the number of its call."""

NonNegative = Annotated[int, Meta(ge=0, le=2**62)]
KEY_NBYTES = 32
KeyBytes = Annotated[bytes, Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]
RequestId = Annotated[str, Meta(min_length=1, max_length=64)]


class Modality(StrEnum):
    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"


class ObjectKind(StrEnum):
    RAW = "raw"
    FEATURES = "features"
    EMBEDDINGS = "embeddings"
    RECORDS = "records"
    """What the frontends write down: conversations, clients' names of items, plans."""


class TensorSpec(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor without its bytes; ``dtype`` is a numpy name such as ``"float32"``."""

    dtype: str
    shape: tuple[NonNegative, ...]


class Handle(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """*Where* an object is: about 30 bytes on the wire, whatever the object weighs.

    ``segment`` names the arena's epoch, ``generation`` is new each time a block is reused.
    """

    segment: NonNegative
    offset: NonNegative
    nbytes: NonNegative
    generation: NonNegative


class Placeholder(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The prompt positions ``[offset, offset + length)`` that one item fills."""

    offset: NonNegative
    length: Annotated[int, Meta(ge=1, le=2**31)]


class Item(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One image, audio clip or video of a request, ready for the engine."""

    modality: Modality
    key: KeyBytes
    handle: Handle
    placeholder: Placeholder


class Sampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen. ``temperature`` 0 is greedy; ``top_k`` 0 is off."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**20)]
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 0.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**20)] = 0
    seed: int | None = None
    ignore_eos: bool = False
    num_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Log-probabilities of each chosen token, and of this many most likely ones; ``None``: none."""


class TokenLogprobs(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How likely a chosen token was, and the most likely ones in its place, best first."""

    logprob: float
    top: list[tuple[int, float]]


class Span(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One stage of one request in one process, for the trace of the request.

    Times are `time.monotonic_ns`, which all processes of a machine share. ``copied_nbytes`` counts
    the bytes that the stage wrote to memory because it copied them.
    """

    process: str
    pid: int
    stage: str
    start_ns: int
    end_ns: int
    copied_nbytes: int = 0
    note: str = ""


def span_since(
    start_ns: int, process: str, stage: str, *, copied_nbytes: int = 0, note: str = ""
) -> Span:
    """The span of a stage of this process, from ``start_ns`` (`time.monotonic_ns`) to now."""
    now = time.monotonic_ns()
    return Span(process, os.getpid(), stage, start_ns, now, copied_nbytes, note)


class Failure(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An error on its way to another process; see `afferent.errors.error_from`."""

    code: Annotated[str, Meta(max_length=64)]
    message: Annotated[str, Meta(max_length=2048)]


def encode(value: object) -> bytes:
    """Any of these values as msgpack."""
    return msgspec.msgpack.encode(value)


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    """What another process, or a block of shared memory, says.

    Raises:
        FormatError: Not msgpack, or not of the decoder's schema.
    """
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError("a message does not follow its schema") from error
