"""Preprocess worker: gets a job, reads the media in the arena, writes the features there."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import signal
import time
import warnings
from collections.abc import Iterator
from types import FrameType, ModuleType

import numpy as np

from afferent.config import Limits
from afferent.errors import AfferentError, InternalError, InvalidMedia, MediaTooLarge
from afferent.media.decode import audio, frames, page, pdf, pillow, tiff
from afferent.media.decode.audio import decode_audio, probe_audio
from afferent.media.decode.image import decode_image, read_image_header
from afferent.media.decode.page import RenderedPage
from afferent.media.decode.video import open_video
from afferent.media.decoded import Media
from afferent.media.families.reencoded import ReencodedFamily
from afferent.media.families.registry import AnyFamily
from afferent.media.headers.document_format import DocumentFormat, document_format_of
from afferent.media.headers.probe import AudioHeader, ImageHeader, MediaHeader, VideoHeader
from afferent.media.workers import sandbox
from afferent.media.workers.jobs import (
    InputRange,
    Job,
    ListedPages,
    ListPages,
    MakeFeatures,
    PlanFile,
    PlanImage,
    Planned,
    RenderPages,
    job_decoder,
    write_pages,
)
from afferent.store.block import codec
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.protocol.results import Order
from afferent.types import Failure, Modality, Span, decode, encode, span_since

log = logging.getLogger(__name__)

_PAGE_TIMES = 2
"""Limit of a page's job, in times of the limit for its rendering."""
_MOST_NOTED = 8
_LAZY = ("av.subtitles.codeccontext", "av.subtitles.stream", "numpy.fft", "numpy.ma")


def load_lazy_modules() -> None:
    """Import modules that libraries import on first use, and prepare these for workers.

    A confined worker can load no library, and each worker would repeat the import.
    """
    for name in _LAZY:
        importlib.import_module(name)
    audio.load()
    pillow.prepare_worker()
    page.prepare_worker()
    pdf.prepare_worker()
    warnings.simplefilter("ignore")  # Pillow would warn of each broken tag of a hostile file


class Worker:
    """Worker that does jobs, one at a time, until it is stopped."""

    def __init__(
        self,
        store: DaemonStore,
        family: AnyFamily,
        *,
        name: str,
        limits: Limits,
        item_cpu_s: float,
    ) -> None:
        """Work for ``store``.

        Args:
            name: Name of this process in traces of requests.
            item_cpu_s: Processor time for one job; the kernel ends a worker that takes more.
        """
        self._store, self._family, self._name = store, family, name
        self._limits, self._item_cpu_s = limits, item_cpu_s
        self._is_idle = self._is_stopping = self._has_own_process = False

    def run(self) -> None:
        """Work until SIGTERM; a running job is finished.

        Raises:
            StoreUnavailable: The store is gone.
        """
        signal.signal(signal.SIGTERM, self._stop)
        self._has_own_process = True
        while True:
            self._is_idle = True
            # After that line: a signal before it only sets the flag, and one behind it ends us.
            if self._is_stopping:
                return
            order = self._store.take()
            self._is_idle = False
            sandbox.allow_cpu(self._item_cpu_s)
            self._do(order)

    def _stop(self, _signum: int, _frame: FrameType | None) -> None:
        self._is_stopping = True
        if self._is_idle:
            os._exit(0)  # an exception could be lost, in a `__del__` for example

    def _do(self, order: Order) -> None:
        spans: list[Span] = []
        used_nbytes, failure = 0, None
        try:
            used_nbytes = self._make(order, spans)
        except AfferentError as error:
            failure = Failure(error.code, error.message)
        except MemoryError:
            text = "the item takes more memory to decode than a worker may use"
            failure = Failure(MediaTooLarge.code, text)
        except Exception:
            log.exception("an item could not be processed")
            failure = Failure(InternalError.code, "an item could not be processed")
        self._store.finish(order, used_nbytes=used_nbytes, failure=failure, spans=spans)

    def _make(self, order: Order, spans: list[Span]) -> int:
        """Do one job; return the number of bytes written."""
        job: Job = decode(job_decoder, order.payload)
        block = self._store.block(order.target)
        match job:
            case PlanImage(header, max_pixels):
                plan = self._bounded(max_pixels).plan_exactly(header)
                return _write(Planned(header, plan), block)
            case PlanFile(modality, file, max_pixels):
                with self._span("read_container", spans):
                    found = self._probe(modality, self._file(order, file))
                plan = self._bounded(max_pixels).plan_exactly(found)
                return _write(Planned(found, plan), block)
            case MakeFeatures(header, file, max_pixels):
                raw = self._file(order, file)
                with self._open(header, raw, spans) as media:
                    return self._process(self._bounded(max_pixels), media, block, spans)

            case ListPages(is_video, file):
                if not is_video:
                    self._allow_page()
                with self._span("list_pages", spans):
                    return _write(ListedPages(self._listed(job, self._file(order, file))), block)
            case RenderPages(is_video, file, pages):
                if not is_video:
                    self._allow_page()
                numbers = ", ".join(str(number) for number, _ in pages[:_MOST_NOTED])
                with self._span("render", spans, note=f"page {numbers}"):
                    rendered = self._rendered(job, self._file(order, file))
                    return write_pages(((each.image, each.text) for each in rendered), block)

    def _allow_page(self) -> None:
        """Limit the processor time of a job for a document's page.

        Rendering ends itself in time; the kernel ends a worker whose page takes long to parse.
        """
        seconds = _PAGE_TIMES * self._limits.max_page_s
        if self._has_own_process:
            sandbox.allow_cpu(min(self._item_cpu_s, seconds))

    def _listed(self, job: ListPages, raw: memoryview) -> dict[int, tuple[int, int]]:
        """Return the sizes of the pages or frames that a job lists, by their numbers."""
        if job.is_video:
            return frames.frame_sizes(raw, self._limits)
        _, sizes = _reader_of(raw).page_sizes(
            raw, first=job.first, last=job.last, dpi=job.dpi, limits=self._limits
        )
        return dict(enumerate(sizes, job.first))

    def _rendered(self, job: RenderPages, raw: memoryview) -> Iterator[RenderedPage]:
        """Yield the pages or frames of a job, one at a time."""
        if job.is_video:
            sized = [(number, size) for number, size in job.pages if size is not None]
            yield from frames.render_frames(raw, sized, self._limits)
            return
        reader = _reader_of(raw)
        for number, size in job.pages:
            yield reader.render_page(raw, number, size, has_text=job.has_text, limits=self._limits)

    def _file(self, order: Order, file: InputRange) -> memoryview:
        whole = self._store.block(order.inputs[0])
        if file.start + file.nbytes > len(whole):
            raise InternalError("a job's file lies outside of its input")
        return whole[file.start : file.start + file.nbytes]

    def _bounded(self, max_pixels: int) -> AnyFamily:
        return self._family.bounded(max_pixels) if max_pixels else self._family

    def _process(
        self, family: AnyFamily, media: Media, block: memoryview, spans: list[Span]
    ) -> int:
        if isinstance(family, ReencodedFamily):
            with self._span("write_file", spans):
                features, write = family.making(media)
        else:
            features = family.plan_exactly(media.header)
            write = functools.partial(family.process, media)
        plan = codec.plan(features.tree)
        if plan.nbytes > len(block):
            raise InvalidMedia("the file holds more than its header says")
        with self._span("process", spans, copied_nbytes=plan.nbytes):
            views = codec.lay_out(plan, block)
            write({name: views[name] for name in features.specs})
        return plan.nbytes

    @contextlib.contextmanager
    def _open(self, header: MediaHeader, raw: memoryview, spans: list[Span]) -> Iterator[Media]:
        match header:
            case ImageHeader(width, height):
                note = f"{width} x {height}"
                with self._span("decode", spans, copied_nbytes=3 * width * height, note=note):
                    image = decode_image(raw, header, self._limits)
                yield image
            case AudioHeader():
                with self._span("decode", spans):
                    rate = self._family.sample_rate_hz
                    clip = decode_audio(raw, rate, self._limits)
                yield clip
            case VideoHeader():  # its frames are decoded one by one during the processing
                with open_video(raw, self._limits) as video:
                    yield video

    def _probe(self, modality: Modality, raw: memoryview) -> MediaHeader:
        """Return the header of a file: exact for an image or a video, a bound for audio.

        A video's packets are counted, which takes milliseconds. Some audio formats only allow a
        guess; the excess is released.
        """
        if modality is Modality.IMAGE:
            return read_image_header(raw, self._limits)
        if modality is Modality.VIDEO:
            with open_video(raw, self._limits) as video:
                return video.header
        claimed = probe_audio(raw, self._limits)
        bound = claimed.num_frames + claimed.num_frames // 8 + claimed.sample_rate_hz
        return AudioHeader(claimed.sample_rate_hz, claimed.num_channels, bound)

    @contextlib.contextmanager
    def _span(
        self, stage: str, spans: list[Span], *, copied_nbytes: int = 0, note: str = ""
    ) -> Iterator[None]:
        start_ns = time.monotonic_ns()
        yield
        made = span_since(start_ns, self._name, stage, copied_nbytes=copied_nbytes, note=note)
        spans.append(made)


def _reader_of(data: memoryview) -> ModuleType:
    """Return the reader of a document's format: its `page_sizes` and `render_page`."""
    return tiff if document_format_of(data) is DocumentFormat.TIFF else pdf


def _write(record: Planned | ListedPages, block: memoryview) -> int:
    data = encode(record)
    if len(data) > len(block):
        raise InternalError("a plan is too long")
    np.copyto(np.frombuffer(block, np.uint8)[: len(data)], np.frombuffer(data, np.uint8))
    return len(data)
