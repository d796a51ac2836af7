"""Every metric there is, and what one process has counted of them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Literal

from afferent import errors
from afferent.series import Counted, Label, Metric, Sample
from afferent.types import Modality, ObjectKind

APIS = ("openai_chat", "openai_responses", "anthropic_messages", "anthropic_count_tokens")
CODES = tuple(cls.code for cls in errors.walk())
OUTCOMES = ("ok", "client_gone", *CODES)
MEDIA = ("none", *Modality, "mixed", "unknown")
"""The modality of a request's media; unknown where its body was not read to the end."""
STAGES = (
    "read body",
    "parse JSON",
    "fetch",
    "header, digest",
    "template, tokens",
    "acquire",
    "into the arena",
    "room for features",
    "wait for a slot",
    "queue jobs",
    "plan",
    "read container",
    "wait for features",
    "decode",
    "process",
    "accept",
    "map views",
    "encode",
    "copy embeddings",
    "prefill",
    "first token",
    "decode tokens",
)
PLACES = ("body", "admission", "fetch", "preprocess", "engine")
"""Where a request may end that does not end well."""
SLOT_FAMILIES = ("preprocess", "tenant")

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SHORT = (0.0001, 0.0005, 0.001, 0.005, *_SECONDS[1:])


REGISTRY: dict[str, Metric] = {}
"""All of them, by name: what is not in here is neither counted nor shown."""


def _metric(
    name: str,
    kind: Literal["counter", "gauge", "histogram"],
    help: str,
    buckets: Sequence[float] = (),
    /,
    **labels: Sequence[str],
) -> Metric:
    found = tuple(Label(label, frozenset(words)) for label, words in labels.items())
    metric = REGISTRY[name] = Metric(name, kind, help, found, tuple(buckets))
    return metric


# Counted by processes

REQUESTS = _metric(
    "afferent_requests_total",
    "counter",
    "Requests by API and outcome: ok, client_gone, or the code of an error",
    api=APIS,
    outcome=OUTCOMES,
)
REQUEST_SECONDS = _metric(
    "afferent_request_seconds",
    "histogram",
    "Seconds from a request's arrival to the end of its answer",
    _SECONDS,
    api=APIS,
)
REJECTIONS = _metric(
    "afferent_rejections_total",
    "counter",
    "Requests that did not end well, by the error's code, where they had come to, and their media",
    code=OUTCOMES,
    where=PLACES,
    media=MEDIA,
)
IN_FLIGHT = _metric("afferent_requests_in_flight", "gauge", "Requests being answered")
STAGE_SECONDS = _metric(
    "afferent_stage_seconds",
    "histogram",
    "Seconds of each stage that a request has completed, by the modality of its media",
    _SHORT,
    stage=STAGES,
    media=MEDIA,
)
COPIED_BYTES = _metric(
    "afferent_copied_bytes_total",
    "counter",
    "Bytes that stages copied, by the modality of the request's media",
    stage=STAGES,
    media=MEDIA,
)
MEDIA_BYTES = _metric(
    "afferent_media_bytes_total",
    "counter",
    "Bytes of media as they came, by where from: in the body, or fetched",
    modality=tuple(Modality),
    origin=("data", "fetch"),
)
ITEMS = _metric(
    "afferent_items_total",
    "counter",
    "Media items by modality and outcome: hit, made, joined or failed",
    modality=tuple(Modality),
    outcome=("hit", "made", "joined", "failed"),
)
CONVERSATIONS = _metric(
    "afferent_conversations_total",
    "counter",
    "Conversations by outcome: kept, too_long or no_room; resumed or unknown",
    outcome=("kept", "too_long", "no_room", "resumed", "unknown"),
)
TOKENS = _metric(
    "afferent_tokens_total",
    "counter",
    "Tokens of prompts and of answers",
    kind=("prompt", "completion"),
)
ADMISSION_SECONDS = _metric(
    "afferent_admission_seconds",
    "histogram",
    "Seconds that a request waited for room in the arena, whether it came to it or not",
    (0.001, *_SECONDS[1:]),
)
SLOT_SECONDS = _metric(
    "afferent_slot_seconds",
    "histogram",
    "Seconds that a request waited for its turn at the count gate, whether it came or not",
    (0.001, *_SECONDS[1:]),
)
LOOP_SECONDS = _metric(
    "afferent_event_loop_late_seconds",
    "histogram",
    "Seconds by which a frontend's event loop came late to a timer, ten times a second",
    (0.001, *_SHORT[3:]),
)

# Known to the store

STORE = _metric(
    "afferent_store",
    "gauge",
    "The store's own figures over all kinds of objects",
    figure=(
        "segment",
        "capacity_nbytes",
        "used_nbytes",
        "held_nbytes",
        "granted_nbytes",
        "num_objects",
        "num_evicted",
        "num_jobs_queued",
        "num_jobs_running",
        "num_workers",
        "num_clients",
        "num_reservations_queued",
        "num_hits",
        "num_misses",
        "num_joined",
    ),
)
ARENA_BYTES = _metric(
    "afferent_arena_bytes",
    "gauge",
    "Bytes of each kind's share of the arena; held and granted together never exceed the capacity",
    kind=tuple(ObjectKind),
    part=("capacity", "used", "held", "granted", "largest_free"),
)
ARENA_OBJECTS = _metric(
    "afferent_arena_objects",
    "gauge",
    "Objects of each kind in the arena, and those of them that somebody holds",
    kind=tuple(ObjectKind),
    part=("all", "held"),
)
EVICTIONS = _metric(
    "afferent_evictions_total",
    "counter",
    "Objects that were evicted, by kind, since the store began",
    kind=tuple(ObjectKind),
)
ADMISSION_WAITING = _metric(
    "afferent_admission_waiting", "gauge", "Requests that wait for room in the arena"
)
SLOTS = _metric(
    "afferent_slots",
    "gauge",
    "Places of the count gate and of tenants' quotas: taken, and waited for",
    slot=SLOT_FAMILIES,
    part=("taken", "queued"),
)

# Known to the engine

ENGINE = _metric(
    "afferent_engine",
    "gauge",
    "The engine's own figures, since it was started and as they are now",
    figure=(
        "num_waiting",
        "num_running",
        "num_steps",
        "num_prompt_tokens",
        "num_decode_tokens",
        "num_preempted",
        "num_restarts",
        "num_embeddings_found",
        "cache_nbytes",
    ),
)
ENGINE_ENCODED = _metric(
    "afferent_engine_encoded_total",
    "counter",
    "Items that each engine worker has encoded since the engine was started",
    worker=tuple(map(str, range(64))),
)


class Metrics:
    """What this process counts. By ``source`` the store knows that it is the same process."""

    def __init__(self) -> None:
        self.source = secrets.randbits(62)
        self._counted: list[Counted] = []
        self.requests = self._count(REQUESTS)
        self.request_seconds = self._count(REQUEST_SECONDS)
        self.rejections = self._count(REJECTIONS)
        self.in_flight = self._count(IN_FLIGHT).labels()
        self.stage_seconds = self._count(STAGE_SECONDS)
        self.copied_nbytes = self._count(COPIED_BYTES)
        self.media_nbytes = self._count(MEDIA_BYTES)
        self.items = self._count(ITEMS)
        self.conversations = self._count(CONVERSATIONS)
        self.tokens = self._count(TOKENS)
        self.admission_seconds = self._count(ADMISSION_SECONDS).labels()
        self.slot_seconds = self._count(SLOT_SECONDS).labels()
        self.loop_seconds = self._count(LOOP_SECONDS).labels()

    def samples(self) -> list[Sample]:
        """All that was counted since this process began."""
        return [sample for counted in self._counted for sample in counted.samples()]

    def _count(self, metric: Metric) -> Counted:
        counted = Counted(metric)
        self._counted.append(counted)
        return counted
