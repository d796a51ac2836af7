"""Types that all stages share: plain values without behaviour or I/O.

They are `msgspec` structs: one definition is the type, the wire schema and its check.
"""

from __future__ import annotations

import operator
import os
import time
from enum import StrEnum
from typing import Annotated, Literal, NewType, Self, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from afferent.errors import AfferentError, FormatError, Shortage, error_from

T = TypeVar("T")

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30

ContentKey = NewType("ContentKey", bytes)
"""32 bytes of BLAKE3 that identify an object. See `afferent.keys`."""

ClientId = int
Lease = tuple[ClientId, str | int]
"""A request of a client of the store; jobs of the store itself have numbers."""

Ticket = tuple[ClientId, int]
"""A waiting client of the store, and the number of its call."""

NonNegative = Annotated[int, Meta(ge=0, le=2**62)]
Positive = Annotated[int, Meta(gt=0)]
Nbytes = Annotated[int, Meta(ge=1, le=2**48)]
KEY_NBYTES = 32
KeyBytes = Annotated[bytes, Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]
RequestId = Annotated[str, Meta(min_length=1, max_length=64)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
"""Value added to a logit."""

FormField = Literal["json_schema", "regex", "choice", "tools"]
"""Fields of `Sampling` that request structured output."""

MAX_FORM_NBYTES = 64 * KiB
"""Size limit of a structured-output request; for ``choice``, of all its texts together."""
MAX_TOOLS_NBYTES = 256 * KiB
"""Size limit of a `ToolForm`."""


class Modality(StrEnum):
    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"


class DocumentKind(StrEnum):
    DOCUMENT = "document"
    """File with pages, each of which becomes an item."""


DOCUMENT = DocumentKind.DOCUMENT
FileKind = Modality | DocumentKind
"""Kind of a file in a request."""
FILE_KINDS: tuple[FileKind, ...] = (*Modality, DOCUMENT)


class ObjectKind(StrEnum):
    RAW = "raw"
    FEATURES = "features"
    EMBEDDINGS = "embeddings"
    RECORDS = "records"
    """Records of the frontends: conversations, clients' ids of items, plans."""


class TensorSpec(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tensor without its bytes.

    Attributes:
        dtype: A numpy name such as ``"float32"``.
        shape: Lengths of its axes; none for a single number.
    """

    dtype: str
    shape: tuple[NonNegative, ...]


class Handle(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Location of an object: about 30 bytes on the wire, for an object of any size.

    Attributes:
        segment: The arena's epoch, which ends with the store's daemon.
        offset: Offset of its block in the arena.
        nbytes: Length of the block.
        generation: New each time a block is reused.
    """

    segment: NonNegative
    offset: NonNegative
    nbytes: NonNegative
    generation: NonNegative


class Placeholder(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Range ``[offset, offset + length)`` of prompt positions that one item fills.

    Attributes:
        offset: The first position.
        length: The number of positions.
    """

    offset: NonNegative
    length: Annotated[int, Meta(ge=1, le=2**31)]


class Item(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Image, audio clip or video of a request, ready for the engine.

    Attributes:
        modality: Which of these it is.
        key: The content key of its features: equal for equal ones, so that it may be a cache key.
        handle: Location of its features.
        placeholder: Positions of the prompt that it fills.
    """

    modality: Modality
    key: KeyBytes
    handle: Handle
    placeholder: Placeholder


class CreateItem(Struct, array_like=True, forbid_unknown_fields=True):
    """Object to create; without a key, only its handle leads to it."""

    kind: ObjectKind
    nbytes: Nbytes
    key: KeyBytes | None = None


class ReserveItem(Struct, array_like=True, forbid_unknown_fields=True):
    """Space for one object, rounded up like an object's block."""

    kind: ObjectKind
    nbytes: Nbytes


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Options of the choice of tokens.

    Logits pass these in the order of vLLM: ``min_tokens``, ``logit_bias``, ``repetition_penalty``,
    ``frequency_penalty``, ``presence_penalty``; then, for a sampled token, ``temperature``,
    ``min_p``, ``top_k``, ``top_p``.

    At most one of ``json_schema``, ``regex`` and ``choice`` is given. Then the whole answer matches
    it, unless ``max_tokens`` or a stop token or string ends it first. With ``tools``, too, it is
    either such an answer or calls of tools.

    Attributes:
        max_tokens: Most tokens of the answer.
        temperature: 0 is greedy.
        top_p: Tokens are drawn from the likeliest ones that have this probability together.
        top_k: Tokens are drawn from this many likeliest ones; 0 is off.
        min_p: Tokens are drawn from those that are at least this part as likely as the likeliest.
        repetition_penalty: For each token in the prompt or the answer, a positive logit is divided
            by this, and a negative one is multiplied.
        frequency_penalty: Subtracted from a token's logit for each time that the answer has it.
        presence_penalty: Subtracted from the logit of each token that the answer has.
        logit_bias: Tokens, and the value added to each one's logit; no token twice.
        seed: Equal seeds sample equally; ``None``: a random one.
        ignore_eos: Whether to continue after an end-of-sequence token, which is then part of the
            answer.
        min_tokens: Number of tokens before which no token that ends the answer is chosen.
        stop_token_ids: Further tokens that end the answer.
        num_logprobs: Log-probabilities of each chosen token, and of this many most likely ones, as
            the model gives them; ``None``: none.
        json_schema: The answer is JSON of this schema, which is JSON itself.
        regex: The answer matches this regular expression as a whole.
        choice: The answer is one of these.
        tools: The answer may call these tools, or must: `ToolForm` as JSON.
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
    tools: Annotated[str, Meta(max_length=MAX_TOOLS_NBYTES)] | None = None


class ToolFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """Function that an answer may call.

    Attributes:
        name: Its name.
        parameters: JSON schema of its arguments, which are an object.
        is_strict: Whether a keyword of the schema that can't be enforced is refused, not ignored.
    """

    name: str
    parameters: Raw
    is_strict: bool = False


class ToolForm(Struct, frozen=True, forbid_unknown_fields=True):
    """Format of tool calls in an answer: ``begin``, a JSON object of ``name`` and ``arguments``,
    ``end``, and any number of these behind each other.

    Attributes:
        functions: What may be called.
        begin: Text before a call.
        end: Text after a call.
        is_special: Whether both are special tokens of the model's tokenizer.
        must_call: Whether the answer consists of calls; otherwise they may follow a text.
        is_parallel: Whether there may be several calls.
    """

    functions: list[ToolFunction]
    begin: str
    end: str
    is_special: bool
    must_call: bool = False
    is_parallel: bool = True


class TokenLogprobs(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Log-probabilities of a chosen token and of its alternatives.

    Attributes:
        logprob: Of the chosen token.
        top: The most likely ones with their log-probabilities, best first.
    """

    logprob: float
    top: list[tuple[int, float]]


class Span(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Stage of one request in one process, for the trace of the request.

    Attributes:
        process: Name of the process in the trace.
        pid: Id of the process.
        stage: A declared stage (`afferent.engines.declare_stages`).
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
    """Return the span of this process's stage, from ``start_ns`` (`time.monotonic_ns`) to now."""
    now = time.monotonic_ns()
    return Span(process, os.getpid(), stage, start_ns, now, copied_nbytes, note)


class Failure(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Error in a form that travels to another process; see `afferent.errors.error_from`.

    Attributes:
        code: Code of the error's class.
        message: Text that a client may see.
        shortage: For `StoreFull`, the state of the arena.
    """

    code: Annotated[str, Meta(max_length=64)]
    message: Annotated[str, Meta(max_length=2048)]
    shortage: Shortage | None = None

    @classmethod
    def of(cls, error: AfferentError) -> Self:
        """Return the failure to send for an error."""
        return cls(error.code, error.message, getattr(error, "shortage", None))

    def error(self) -> AfferentError:
        """Return the error that was sent."""
        return error_from(self.code, self.message, self.shortage)


def encode(value: object) -> bytes:
    """Encode any of these values as msgpack.

    Raises:
        FormatError: It can't be encoded.
    """
    try:
        return msgspec.msgpack.encode(value, enc_hook=_as_integer)
    except (OverflowError, UnicodeEncodeError) as error:
        raise FormatError(f"a value can't be sent: {error}") from error


def _as_integer(value: object) -> int:
    """Convert numpy integers, which computed sizes often are."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise FormatError(f"a value of type {type(value).__name__} can't be sent") from None


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    """Decode a message of another process or a block of shared memory.

    Raises:
        FormatError: Not msgpack, or not of the decoder's schema.
    """
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError("a message does not follow its schema") from error
