"""Messages between the engine core and its workers: schema'd msgpack.

Frontends connect to the same socket, with the messages of `afferent.engines.remote`.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from afferent.builtin.engine.asked_form import Form
from afferent.engines.protocol import Chosen, EngineInfo
from afferent.engines.remote.messages import FromFrontend
from afferent.schedule.step import Chunk, Reuse
from afferent.types import (
    Failure,
    Handle,
    KeyBytes,
    Modality,
    NonNegative,
    Placeholder,
    Sampling,
    Span,
)


class _Message(Struct, array_like=True, forbid_unknown_fields=True):
    pass


# Worker to core.


class WorkerHello(_Message, tag="worker"):
    """A worker has started, and waits for the others. Rank 0 names the port at which it listens for
    them, if there are any.
    """

    rank: NonNegative
    port: Annotated[int, Meta(ge=0, le=65535)] = 0


# Process that tests response formats to core, and back.


class FormsHello(_Message, tag="forms"):
    """The process that tests response formats has started."""


class TryForm(_Message, tag="try"):
    """Request to test whether answers of this format are possible."""

    number: NonNegative
    form: Form


class FormTried(_Message, tag="tried"):
    """Result of a test. ``failure``: the client's error; ``None``: the format is possible.

    ``nbytes``: memory that it takes.
    """

    number: NonNegative
    failure: Failure | None
    nbytes: NonNegative


# Core to worker and back.


class Rendezvous(_Message, tag="rendezvous"):
    """All workers have started: they connect at rank 0's port, and load the model."""

    port: int


class WorkerReady(_Message, tag="ready"):
    """The model is loaded. Rank 0 describes it; ``weights`` is the digest of its weights, empty if
    no embeddings are shared.
    """

    client: NonNegative
    """The worker's id in the store, so that the core can pin for it."""
    info: EngineInfo
    weights: bytes


class Grid(_Message):
    """Small array."""

    dtype: str
    shape: tuple[NonNegative, ...]
    data: bytes


class BegunItem(_Message):
    """Item of a sequence, with the features that affect positions: the other features may be
    gone.
    """

    modality: Modality
    key: KeyBytes
    placeholder: Placeholder
    grids: dict[str, Grid]


MAX_WORK_NBYTES: Final = 1 << 30
"""Limit of a message to a worker.

A step may begin all sequences at once, each with its prompt and the form of its answer.
"""


class Begin(_Message):
    """New sequence, or a preempted one that begins again with its answer so far: the last
    ``num_answered`` tokens. ``form_nbytes``: memory that the format of its answer takes.
    ``has_answer``: a token is chosen behind the prompt.
    ``reuse``: it begins with the KV cache of a sequence that has ended.
    """

    sequence_id: str
    token_ids: list[int]
    items: list[BegunItem]
    sampling: Sampling
    num_answered: NonNegative = 0
    form_nbytes: NonNegative = 0
    has_answer: bool = True
    reuse: Reuse | None = None


class Extend(_Message):
    """Input behind all tokens of a session's sequence. Placeholders count from its first token."""

    sequence_id: str
    token_ids: list[int]
    items: list[BegunItem]
    sampling: Sampling
    form_nbytes: NonNegative = 0
    has_answer: bool = True


class EncodeItem(_Message):
    """Item whose embeddings a worker needs: it copies them if they are ``found``, and encodes
    otherwise.
    """

    sequence_id: str
    key: KeyBytes
    modality: Modality
    handle: Handle
    found: bool


class Work(_Message, tag="work"):
    """Step, or the half of one: work that may fail on some workers alone goes out before the
    computation.

    All workers do it in the order of the fields; each answers with `WorkDone`. ``finished``
    sequences choose no more tokens; their KV caches stay until ``drop`` names them. ``lease`` is
    the request id of the step's pins. The core has pinned the objects for ``pinned_for``, ids of
    workers in the store; a worker that has another id by now pins them itself. Each worker releases
    them in any case.
    """

    number: NonNegative
    finished: list[str] = []
    drop: list[str] = []
    evict: list[bytes] = []
    lease: str = ""
    pinned_for: list[int] = []
    encode: list[EncodeItem] = []
    begin: list[Begin] = []
    extend: list[Extend] = []
    prefill: list[Chunk] = []
    decode: list[str] = []


class WorkDone(_Message, tag="done"):
    """Chosen tokens, and failures: items by key, sequences by id. Each span has its sequence."""

    number: NonNegative
    client: NonNegative
    chosen: list[Chosen]
    failed_items: list[tuple[bytes, Failure]]
    failed_sequences: list[tuple[str, Failure]]
    spans: list[tuple[str, Span]]
    num_encoded: NonNegative


FromWorker = WorkerHello | WorkerReady | WorkDone
ToCore = FromFrontend | FromWorker | FormsHello | FormTried
ToWorker = Rendezvous | Work

to_core_decoder = msgspec.msgpack.Decoder(ToCore)
to_worker_decoder = msgspec.msgpack.Decoder(ToWorker)
to_forms_decoder = msgspec.msgpack.Decoder(TryForm)
