"""Connector of vLLM's encoder cache (an EC connector), which holds features while they are encoded.

It transfers nothing. In the scheduler it lets a request wait for its features, or fails it, before
the request is scheduled; in the workers it tells which features the scheduler has pinned. So a
result is named after its item alone: one that was computed from lost features does not exist.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from vllm.config import ECTransferConfig, VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from afferent.engines import place
from afferent.engines.vllm.plugin import names, probe
from afferent.engines.vllm.plugin.processing import FIELD, modality_of, unpack
from afferent.engines.vllm.plugin.step import Step, set_running_step
from afferent.engines.vllm.plugin.step_pins import PinnedStep, StepPins
from afferent.store.client.daemon_store import DaemonStore

log = logging.getLogger("vllm.afferent")

_IDLE_S: Final = 2e-3
"""Pause of a scheduler that can schedule nothing but requests that wait for their features."""


class StepMetadata(ECConnectorMetadata):
    """The step, for the workers; in the scheduler's process, its pins too."""

    def __init__(self, pinned: PinnedStep) -> None:
        self.step, self._pinned = pinned.step, pinned

    def __reduce__(self) -> Any:
        return _received, (self.step,)


def _received(step: Step) -> StepMetadata:
    return StepMetadata(PinnedStep(step, ()))


@dataclass(frozen=True, slots=True)
class _Item:
    """Item of ours in a request: its tokens, and the key of its features."""

    start: int
    end: int
    key: bytes


@dataclass(slots=True)
class _Items:
    """Items of ours in a request, by index; others are ``None``.

    Attributes:
        end: End of the last item's tokens.
        encoded: Items whose encoder outputs vLLM holds for this request.
        num_computed: Tokens that were computed at the last look: fewer after a preemption, which
            drops the outputs.
        is_reported: Whether the store knows that the request needs its features no more.
    """

    items: list[_Item | None] = field(default_factory=list)
    end: int = 0
    encoded: set[int] = field(default_factory=set)
    num_computed: int = 0
    is_reported: bool = False

    def read(self, features: Any) -> None:
        """Read those that have come since the last call: a session gets more of them."""
        for feature in features[len(self.items) :]:
            self.items.append(_item_of(feature))
            where = feature.mm_position
            self.end = max(self.end, where.offset + where.length)

    def keys_between(self, start: int, end: int) -> list[bytes]:
        """Return the keys of items with tokens in a window that are not encoded."""
        return [
            item.key
            for index, item in enumerate(self.items)
            if item is not None
            and index not in self.encoded
            and item.end > start
            and item.start < end
        ]


class AfferentConnector(ECConnectorBase):
    """The connector, in the scheduler or in a worker."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        self._items: dict[str, _Items] = {}
        self._is_deferring = False
        # The scheduler may look ahead by a few tokens; an item that it reaches anyway is pinned
        # when it is scheduled.
        self._window = 2 * vllm_config.scheduler_config.max_num_batched_tokens
        if role is ECConnectorRole.SCHEDULER:
            self._pins = StepPins(_open_store)
            _tell_of_arrivals()

    # In the thread that receives requests

    def expect(self, request: Any) -> None:
        """Ask the store for the features of a request that the scheduler has not seen yet.

        It comes while a step is computed, so the answer is there when the next one is scheduled.
        """
        arrived = _Items()
        arrived.read(request.mm_features)
        self._pins.expect(request.request_id, arrived.keys_between(0, self._window))

    # In the scheduler

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Pin the features that the request may need in this step; see the base class."""
        known = self._items_of(request)
        if num_computed_tokens < known.num_computed:
            known.encoded.clear()
        known.num_computed = num_computed_tokens
        if known.end <= num_computed_tokens:
            if known.end <= request.num_computed_tokens:  # not only found for a waiting request
                self._report(request.request_id, known)
            return True
        keys = known.keys_between(num_computed_tokens, num_computed_tokens + self._window)
        is_ready = self._pins.secure(request.request_id, keys)
        self._is_deferring |= not is_ready
        return is_ready

    def _report(self, request_id: str, known: _Items) -> None:
        """Report, once, that a request needs its features no more, unless it is preempted."""
        if not known.is_reported and known.items:
            known.is_reported = True
            keys = dict.fromkeys(item.key for item in known.items if item is not None)
            self._pins.report_encoded(request_id, keys)

    def take_unavailable_requests(self) -> set[str]:
        return self._pins.take_lost()

    def has_cache_item(self, identifier: str) -> bool:
        return False

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        known = self._items_of(request)
        if (item := known.items[index]) is not None:
            self._pins.use(item.key)
            known.encoded.add(index)

    def update_state_after_free(self, request: Any, index: int) -> None:
        if (known := self._items.get(request.request_id)) is not None:
            known.encoded.discard(index)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        if self._is_deferring and not scheduler_output.total_num_scheduled_tokens:
            time.sleep(_IDLE_S)
        self._is_deferring = False
        return StepMetadata(self._pins.end_step())

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        self._items.pop(request.request_id, None)
        self._pins.forget(request.request_id)
        return False, None

    def shutdown(self) -> None:
        if self.role is ECConnectorRole.SCHEDULER:
            self._pins.close()

    def _items_of(self, request: Any) -> _Items:
        known = self._items.setdefault(request.request_id, _Items())
        known.read(request.mm_features)
        return known

    # In a worker

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        set_running_step(connector_metadata.step)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        set_running_step(None)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Do nothing: the encoder runs for each item."""

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        """Do nothing; vLLM calls it for each item that was encoded."""


def _item_of(feature: Any) -> _Item | None:
    if feature.data is None:
        return None
    modality = modality_of(feature.data)
    if modality is None:
        return None
    key, _, _ = unpack(feature.data[FIELD.format(modality)].data)
    where = feature.mm_position
    return _Item(where.offset, where.offset + where.length, key)


def _open_store() -> DaemonStore:
    return DaemonStore(place.required_store().address, name=f"vllm core {os.getpid()}")


# Configuration


def _tell_of_arrivals() -> None:
    """Let engine cores tell their connector of each request that they receive, where they can."""
    if not probe.tells_of_arrivals():
        return
    from vllm.v1.engine.core import EngineCore  # this process has imported it

    stock = EngineCore.preprocess_add_request
    if getattr(stock, "_is_afferent", False):
        return

    @functools.wraps(stock)
    def preprocess(self: Any, request: Any) -> Any:
        received = stock(self, request)
        connector = self.scheduler.get_ec_connector()
        if isinstance(connector, AfferentConnector):
            try:
                connector.expect(received[0])
            except Exception:  # the scheduler asks, too
                log.exception("features were not asked for in advance")
        return received

    preprocess._is_afferent = True  # type: ignore[attr-defined]
    EngineCore.preprocess_add_request = preprocess


def register() -> None:
    """Let each engine have the connector, unless it is configured with another one.

    vLLM lets clients send embeddings where there is a connector that consumes some. This one
    does not, so vLLM decides about them as it does without it.
    """
    stock = VllmConfig._resolve_mm_embedding_inputs
    if getattr(stock, "_is_afferent", False):
        return

    @functools.wraps(stock)
    def resolve(self: Any) -> None:
        if names.is_ours(self.ec_transfer_config):
            self.ec_transfer_config = None
        stock(self)
        if self.ec_transfer_config is None and _takes_references(self):
            self.ec_transfer_config = ECTransferConfig(
                ec_connector=names.CONNECTOR,
                ec_connector_module_path=__name__,
                ec_role="ec_consumer",
            )
        names.describe_engine(
            has_connector=names.is_ours(self.ec_transfer_config),
            kv_transfer_config=repr(self.kv_transfer_config),
        )

    resolve._is_afferent = True  # type: ignore[attr-defined]
    VllmConfig._resolve_mm_embedding_inputs = resolve


def _takes_references(vllm_config: Any) -> bool:
    """Whether vLLM asks a connector about this model's items, and its workers see the core's
    process, as they may not with Ray.
    """
    model = vllm_config.model_config
    if model is None or model.multimodal_config is None or model.is_encoder_decoder:
        return False
    return str(vllm_config.parallel_config.distributed_executor_backend) != "ray"
