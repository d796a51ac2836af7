"""A preprocess worker: takes a job, reads the media in the arena, writes the features there."""

from __future__ import annotations

import logging
import time

import msgspec

from afferent.errors import AfferentError, InternalError
from afferent.ingest.probe import ImageHeader
from afferent.preprocess.decode import decode_image
from afferent.preprocess.processor import Processor
from afferent.store import codec
from afferent.store.client import DaemonStore
from afferent.store.messages import Order
from afferent.types import Failure, Span, decode, span_since

log = logging.getLogger(__name__)

_header_decoder = msgspec.msgpack.Decoder(ImageHeader)


def work(store: DaemonStore, processor: Processor, *, process_name: str) -> None:
    """Do jobs until the store is gone."""
    while True:
        order = store.take()
        taken_ns = time.monotonic_ns()
        spans: list[Span] = []
        try:
            used_nbytes = _make_features(store, processor, order, spans, process_name)
        except AfferentError as error:
            failure = Failure(error.code, error.message)
            store.finish(order, failure=failure, spans=spans)
        except Exception:
            log.exception("an item could not be processed")
            text = "an item could not be processed"
            store.finish(order, failure=Failure(InternalError.code, text), spans=spans)
        else:
            store.finish(order, used_nbytes=used_nbytes, spans=spans)
        log.debug("a job is done", extra={"ms": (time.monotonic_ns() - taken_ns) / 1e6})


def _make_features(
    store: DaemonStore, processor: Processor, order: Order, spans: list[Span], process_name: str
) -> int:
    """One job; the bytes written."""
    header = decode(_header_decoder, order.payload)
    raw = store.block(order.inputs[0])
    start = time.monotonic_ns()
    image = decode_image(raw, header)
    note = f"{header.width} x {header.height}"
    spans.append(span_since(start, process_name, "decode image", copied_nbytes=len(raw), note=note))
    start = time.monotonic_ns()
    features = processor.process(image)
    note = "library not counted"
    spans.append(span_since(start, process_name, "processor", note=note))
    start = time.monotonic_ns()
    used_nbytes = codec.write_into(features, store.block(order.target))
    copied = sum(array.nbytes for array in features.values())
    spans.append(span_since(start, process_name, "write features", copied_nbytes=copied))
    return used_nbytes
