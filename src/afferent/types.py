"""The words that all stages share: plain values, no behaviour, no I/O.

They are `msgspec` structs, so the same definition is the type, the wire schema and its check.
"""

from __future__ import annotations

import operator
import os
import time
from enum import StrEnum
from typing import Annotated, Literal, NewType, Self, TypeVar

import msgspec
from msgspec import Meta, Struct

from afferent.errors import AfferentError, FormatError, Shortage, error_from

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
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
"""What is added to a logit."""

FormField = Literal["json_schema", "regex", "choice"]
"""The fields of `Sampling` that say which form an answer has."""

MAX_FORM_NBYTES = 64 * KiB
"""Of what says which form an answer has; of several texts together."""


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
    """A tensor without its bytes.

    Attributes:
        dtype: A numpy name such as ``"float32"``.
        shape: Lengths of its axes; none for a single number.
    """

    dtype: str
    shape: tuple[NonNegative, ...]


class Handle(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """*Where* an object is: about 30 bytes on the wire, whatever the object weighs.

    Attributes:
        segment: The arena's epoch, which ends with the store's daemon.
        offset: Of its block in the arena.
        nbytes: Length of the block.
        generation: New each time a block is reused.
    """

    segment: NonNegative
    offset: NonNegative
    nbytes: NonNegative
    generation: NonNegative


class Placeholder(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The prompt positions ``[offset, offset + length)`` that one item fills.

    Attributes:
        offset: The first of them.
        length: How many they are.
    """

    offset: NonNegative
    length: Annotated[int, Meta(ge=1, le=2**31)]


class Item(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One image, audio clip or video of a request, ready for the engine.

    Attributes:
        modality: Which of these it is.
        key: The content key of its features: equal for equal ones, so that a cache may go by it.
        handle: Where its features are.
        placeholder: Which positions of the prompt it fills.
    """

    modality: Modality
    key: KeyBytes
    handle: Handle
    placeholder: Placeholder


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How tokens are chosen.

    Logits go through these in the order of vLLM: ``min_tokens``, ``logit_bias``,
    ``repetition_penalty``, ``frequency_penalty``, ``presence_penalty``; then, where a token is
    drawn, ``temperature``, ``min_p``, ``top_k``, ``top_p``.

    At most one of ``json_schema``, ``regex`` and ``choice`` is given. Then the whole answer is such
    a text, unless ``max_tokens`` or a token or string that was to end it comes first.

    Attributes:
        max_tokens: Most tokens of the answer.
        temperature: 0 is greedy.
        top_p: Tokens are drawn from the likeliest ones that have this probability together.
        top_k: Tokens are drawn from so many likeliest ones; 0 is off.
        min_p: Tokens are drawn from those that are at least this part as likely as the likeliest.
        repetition_penalty: Of each token that the prompt or the answer has, a positive logit is
            divided by this, and another is multiplied.
        frequency_penalty: Subtracted from a token's logit for each time that the answer has it.
        presence_penalty: Subtracted from the logit of each token that the answer has.
        logit_bias: Tokens, and what is added to their logits; no token twice.
        seed: Equal ones draw alike; ``None``: any will do.
        ignore_eos: Whether to go on behind a token that ends the sequence, which is said then.
        min_tokens: Before so many tokens none is chosen that would end the answer.
        stop_token_ids: Tokens that end the answer, too.
        num_logprobs: Log-probabilities of each chosen token, and of this many most likely ones, as
            the model gives them; ``None``: none.
        json_schema: The answer is JSON of this schema, which is JSON itself.
        regex: The answer matches this regular expression as a whole.
        choice: The answer is one of these.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=2**20)]
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 0.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**20)] = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    logit_bias: tuple[tuple[TokenId, Bias], ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Meta(ge=0, le=2**20)] = 0
    stop_token_ids: tuple[TokenId, ...] = ()
    num_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    json_schema: Annotated[str, Meta(max_length=MAX_FORM_NBYTES)] | None = None
    regex: Annotated[str, Meta(max_length=MAX_FORM_NBYTES)] | None = None
    choice: Annotated[tuple[str, ...], Meta(max_length=MAX_FORM_NBYTES)] = ()


class TokenLogprobs(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How likely a chosen token was, and others in its place.

    Attributes:
        logprob: Of the chosen token.
        top: The most likely ones with their log-probabilities, best first.
    """

    logprob: float
    top: list[tuple[int, float]]


class Span(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One stage of one request in one process, for the trace of the request.

    Attributes:
        process: What it is called in the trace.
        pid: Of the process.
        stage: One that was declared (`afferent.engine.declare_stages`).
        start_ns: By `time.monotonic_ns`, which all processes of a machine share.
        end_ns: Likewise.
        copied_nbytes: Bytes that the stage wrote to memory because it copied them.
        note: A few words for the trace.
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
    """An error on its way to another process; see `afferent.errors.error_from`.

    Attributes:
        code: Of the error's class.
        message: What a client may be told.
        shortage: Of `StoreFull`, what there was of the arena.
    """

    code: Annotated[str, Meta(max_length=64)]
    message: Annotated[str, Meta(max_length=2048)]
    shortage: Shortage | None = None

    @classmethod
    def of(cls, error: AfferentError) -> Self:
        """The error, to be sent."""
        return cls(error.code, error.message, getattr(error, "shortage", None))

    def error(self) -> AfferentError:
        """The error that was sent."""
        return error_from(self.code, self.message, self.shortage)


def encode(value: object) -> bytes:
    """Any of these values as msgpack.

    Raises:
        FormatError: It has no place there.
    """
    try:
        return msgspec.msgpack.encode(value, enc_hook=_as_integer)
    except (OverflowError, UnicodeEncodeError) as error:
        raise FormatError(f"a value can't be sent: {error}") from error


def _as_integer(value: object) -> int:
    """Sizes that were computed are often numpy's."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise FormatError(f"a value of type {type(value).__name__} can't be sent") from None


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    """What another process, or a block of shared memory, says.

    Raises:
        FormatError: Not msgpack, or not of the decoder's schema.
    """
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError("a message does not follow its schema") from error
