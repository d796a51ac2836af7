"""What the engine core and its workers say to each other: schema'd msgpack.

Frontends come to the same socket, with the messages of `afferent.engine.remote`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from afferent.engine.protocol import Chosen, EngineInfo
from afferent.engine.reference.asked_form import Form
from afferent.engine.remote.messages import FromFrontend
from afferent.schedule.step import Chunk
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
    """A worker is there, and waits for the others. Rank 0 says at which port it listens for them,
    if there are any.
    """

    rank: NonNegative
    port: Annotated[int, Meta(ge=0, le=65535)] = 0


# Who tries forms of answers to core, and back.


class FormsHello(_Message, tag="forms"):
    """Who tries forms of answers is there."""


class TryForm(_Message, tag="try"):
    """Can answers of this form be had?"""

    number: NonNegative
    form: Form


class FormTried(_Message, tag="tried"):
    """``failure``: what a client is told; ``None``: they can. ``nbytes``: memory that it takes."""

    number: NonNegative
    failure: Failure | None
    nbytes: NonNegative


# Core to worker and back.


class Rendezvous(_Message, tag="rendezvous"):
    """All workers are there: meet at rank 0's port, and load the model."""

    port: int


class WorkerReady(_Message, tag="ready"):
    """The model is loaded. Rank 0 says what it is; ``weights`` is the digest of its weights, empty
    if no embeddings are shared.
    """

    client: NonNegative
    """What the store calls this worker, so that the core can pin for it."""
    info: EngineInfo
    weights: bytes


class Grid(_Message):
    """A small array."""

    dtype: str
    shape: tuple[NonNegative, ...]
    data: bytes


class BegunItem(_Message):
    """An item of a sequence. What has a say in positions comes along: the features may be gone."""

    modality: Modality
    key: KeyBytes
    placeholder: Placeholder
    grids: dict[str, Grid]


class Begin(_Message):
    """A new sequence, or one that begins again with what it had answered by then: the last
    ``num_answered`` tokens. ``form_nbytes``: memory that the form of its answer takes.
    """

    sequence_id: str
    token_ids: list[int]
    items: list[BegunItem]
    sampling: Sampling
    num_answered: NonNegative = 0
    form_nbytes: NonNegative = 0


class EncodeItem(_Message):
    """Have the embeddings of this item: view them if they are ``found``, make them otherwise."""

    sequence_id: str
    key: KeyBytes
    modality: Modality
    handle: Handle
    found: bool


class Work(_Message, tag="work"):
    """A step, or the half of one: what may fail on some workers alone goes out before what computes
    with it.

    To be done in the order of the fields, by all workers alike; each answers with `WorkDone`.
    ``lease`` is the request that the step's objects are pinned under. The core has pinned them for
    ``pinned_for``, which are workers as the store calls them; who is called otherwise by now pins
    them himself. Each lets go of them in any case.
    """

    number: NonNegative
    drop: list[str] = []
    evict: list[bytes] = []
    lease: str = ""
    pinned_for: list[int] = []
    encode: list[EncodeItem] = []
    begin: list[Begin] = []
    prefill: list[Chunk] = []
    decode: list[str] = []


class WorkDone(_Message, tag="done"):
    """What was chosen, and what failed: items by key, sequences by id. Spans are of a sequence."""

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
