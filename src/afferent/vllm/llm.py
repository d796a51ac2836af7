"""`vllm.LLM` whose images are prepared by a pool of workers while the engine runs."""

from __future__ import annotations

import importlib
import os
import queue
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, tee
from pathlib import Path
from typing import Any, Final, Self

from PIL import Image

from afferent.batch.feature_maker import Features
from afferent.batch.item_features import FailedItem
from afferent.batch.item_routes import InStore, ResultOptions, ThroughStore, pipeline
from afferent.engines import place
from afferent.engines.references import FeaturesReference, Of, sign
from afferent.engines.vllm.kind import takes_features_of
from afferent.engines.vllm.media import TakenMedia
from afferent.errors import (
    AfferentError,
    ConfigError,
    StoreFull,
    StoreRestarted,
    UnsupportedMedia,
)
from afferent.media.families import mistral
from afferent.proxy.prompts import PromptTokens
from afferent.store.block import codec
from afferent.store.client.steps import run
from afferent.types import GiB, Modality
from afferent.vllm.prompt_images import (
    Finder,
    of_chat,
    of_prompt,
    with_references,
    with_urls,
)

_VALID_S: Final = 7 * 24 * 3600.0
_SPACE_POLL_S: Final = 0.05
_MAX_RUNS: Final = 4
_NUM_AHEAD: Final = 64
"""Prompts that are prepared ahead of the engine, which takes all of them at its next step."""


@dataclass(frozen=True, slots=True)
class _Made:
    """Image whose features are pinned for the engine, until `release`."""

    reference: FeaturesReference
    ticket: InStore

    def is_pinned(self) -> bool:
        """Return whether the store has the features under this pin."""
        verbs, request = self.ticket.steps.verbs, self.ticket.submitted.request
        return bool(verbs.check_pins(request, [self.reference.handle]))

    def release(self) -> None:
        self.ticket.steps.abandon(self.ticket.submitted)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Prompt for the engine, and its pinned images."""

    index: int
    prompt: Any
    made: Sequence[_Made]


class LLM:
    """`vllm.LLM` whose images are prepared by a pool of workers while the engine runs.

    `chat` and `generate` return the outputs of vLLM's own, in the same order. All other attributes
    are those of the `vllm.LLM` that this object creates, such as ``get_tokenizer``.

    Prepared are images of prompts whose media are images only: ``data:`` URLs, PIL images, and
    ``file:`` URLs in vLLM's ``allowed_local_media_path``; in prompts of `generate` also paths,
    bytes of files, and arrays. vLLM prepares all others itself, in this process: other media, other
    formats of files, prompts with ``mm_processor_kwargs``, and models without features for vLLM.

    Invariants: the features of an image are pinned until its request has ended. Images are prepared
    in order, as far as the store's space goes; then the next ones wait for the end of a request.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        features: Features | None = None,
        num_workers: int | None = None,
        arena_nbytes: int = 2 * GiB,
        max_running: int = 512,
        **arguments: Any,
    ) -> None:
        """Start the pool and vLLM's engine; a process can have one such engine.

        Args:
            model: Folder as `transformers` saves models, a built-in model, or a name on a hub.
            features: Features of the model with ``backend="torchvision"`` and a store, such as
                those of a node of Ray; they are not closed. ``None``: a pool of this object.
            num_workers: Workers of the pool; ``None``: one for each core.
            arena_nbytes: Shared memory of the pool; allocated as it is filled.
            max_running: Most requests that the engine has at a time.
            arguments: As for `vllm.LLM`.

        Raises:
            ConfigError: vLLM or the decoders are not installed, there is such an engine already, or
                the features are not those of vLLM.
        """
        if place.find_store() is not None:
            raise ConfigError(
                f"{place.STORE} is set: this process has an engine with Afferent already"
            )
        try:
            stock = importlib.import_module("vllm").LLM
        except ModuleNotFoundError as error:
            raise ConfigError(f"afferent.vllm needs {error.name}: install vLLM") from error
        self._is_own = features is None
        self._features = features or Features(
            *(model,),
            where="pool",
            num_workers=num_workers,
            backend="torchvision",
            revision=str(arguments.get("revision") or ""),
            arena_nbytes=arena_nbytes,
        )
        self._max_running, self._secret = max_running, secrets.token_bytes(32)
        allowed = arguments.get("allowed_local_media_path")
        self._allowed = Path(allowed) if allowed else None
        folder, family = self._features.folder, self._features._workplace.model.family
        is_read_alike = not (mistral.has_format(folder) or arguments.get("mm_processor_kwargs"))
        self._is_preparing = is_read_alike and takes_features_of(folder)
        self._taken = TakenMedia.of(family, folder)
        self._tokens = PromptTokens(folder, family) if self._is_preparing else None
        self._released: queue.SimpleQueue[Sequence[_Made]] = queue.SimpleQueue()
        self._num_held = 0
        """Images of prompts that were prepared and have not ended; only the thread uses it."""
        try:
            self._check(features)
            os.environ |= {
                place.STORE: str(self._features.address),
                place.SECRET: self._secret.hex(),
                place.OFFLINE: "1",
            }
            self.llm: Any = stock(str(folder), **arguments)
        except BaseException:
            self.close()
            raise

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Any = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: Any = None,
        **arguments: Any,
    ) -> list[Any]:
        """Return the outputs of conversations, as `vllm.LLM.chat` does.

        Args:
            messages: Conversations, or one.
            sampling_params: One for all, or one for each conversation.
            use_tqdm: Whether to show a bar, or a function that creates one.
            lora_request: As ``sampling_params``.
            priority: Likewise.
            arguments: As for `vllm.LLM.chat`.

        Raises:
            InvalidMedia: An image can't be used; no output of this call is returned.
            StoreFull: The images of one prompt do not fit into the store.
            StoreRestarted: The store died several times.
        """
        is_one = bool(messages) and isinstance(messages[0], dict)
        conversations = [messages] if is_one else messages
        each = _for_each(len(conversations), sampling_params, lora_request, priority)

        def enqueue(item: _Prepared) -> list[str]:
            urls = [sign(made.reference, self._secret) for made in item.made]
            prompt = with_urls(item.prompt, urls) if urls else item.prompt
            found: list[str] = self.llm.enqueue_chat(
                [prompt], **each(item.index), **arguments, use_tqdm=False
            )
            return found

        def images(conversation: Any) -> Any:
            return of_chat(conversation, self._allowed)

        finder = None if arguments.get("mm_processor_kwargs") else images
        return self._run(conversations, finder, enqueue, use_tqdm)

    def generate(
        self,
        prompts: Any,
        sampling_params: Any = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: Any = None,
        **arguments: Any,
    ) -> list[Any]:
        """Return the outputs of prompts, as `vllm.LLM.generate` does.

        Args:
            prompts: As for `vllm.LLM.generate`. Images in ``multi_modal_data`` may also be paths,
                or bytes of files.
            sampling_params: One for all, or one for each prompt.
            use_tqdm: As for `chat`.
            lora_request: As ``sampling_params``.
            priority: Likewise.
            arguments: As for `vllm.LLM.generate`.

        Raises:
            InvalidMedia: As `chat`.
            StoreFull: Likewise.
        """
        is_one = isinstance(prompts, str | dict) or bool(prompts and isinstance(prompts[0], int))
        prompts = [prompts] if is_one else prompts
        each = _for_each(len(prompts), sampling_params, lora_request, priority)

        def enqueue(item: _Prepared) -> list[str]:
            prompt = with_references(item.prompt, [made.reference for made in item.made])
            found: list[str] = self.llm.enqueue(
                [prompt], **each(item.index), **arguments, use_tqdm=False
            )
            return found

        finder = None if arguments.get("mm_processor_kwargs") else of_prompt
        return self._run(prompts, finder, enqueue, use_tqdm)

    def close(self) -> None:
        """End the pool. vLLM's engine ends with the process, or as vLLM ends it."""
        for name in (place.STORE, place.SECRET, place.OFFLINE):
            os.environ.pop(name, None)
        if self._is_own:
            self._features.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name == "llm":  # before it is created
            raise AttributeError(name)
        return getattr(self.llm, name)

    def _check(self, features: Features | None) -> None:
        """Check features that were given.

        Raises:
            ConfigError: They have no store, or are not those of vLLM.
        """
        if features is None:
            return
        if features.address is None:
            raise ConfigError("features= need a store: a pool's, a server's or NodeStores'")
        theirs = features._workplace.model
        ours = type(theirs).load(theirs.folder, backend="torchvision", limits=theirs.limits)
        if ours.fingerprint != theirs.fingerprint:
            raise ConfigError(
                'features=: vLLM resizes with torchvision; give backend="torchvision"'
            )

    # Inside

    def _run(
        self,
        prompts: Sequence[Any],
        finder: Finder | None,
        enqueue: Callable[[_Prepared], list[str]],
        use_tqdm: bool | Callable[..., Any],
    ) -> list[Any]:
        """Run all prompts; those whose features were lost with the store run again."""
        outputs: list[Any] = [None] * len(prompts)
        bar = _bar(use_tqdm, len(prompts))
        left = list(range(len(prompts)))
        for _ in range(_MAX_RUNS):
            prepared = self._prepare([(index, prompts[index]) for index in left], finder)
            for item, output in self._outputs(prepared, enqueue):
                outputs[item.index] = output
                bar()
            left = [index for index in left if outputs[index] is None]
            if not left:
                return outputs
        raise StoreRestarted(f"{len(left)} prompts lost their images with the store each time")

    def _outputs(
        self, prepared: Generator[_Prepared], enqueue: Callable[[_Prepared], list[str]]
    ) -> Iterator[tuple[_Prepared, Any]]:
        """Yield the outputs of prompts, except for those whose features were lost.

        A thread prepares the next prompts, while this one steps the engine.
        """
        engine = self.llm.llm_engine
        running: dict[str, _Prepared] = {}
        with ThreadPoolExecutor(1, thread_name_prefix="afferent-prepare") as thread:
            ahead = deque(thread.submit(next, prepared, None) for _ in range(_NUM_AHEAD))
            try:
                while ahead or running:
                    has_space = len(running) < self._max_running
                    if ahead and has_space and (not running or ahead[0].done()):
                        item = ahead.popleft().result()
                        if item is None:
                            continue
                        ahead.append(thread.submit(next, prepared, None))
                        try:
                            for request in enqueue(item):
                                running[_name(request)] = item
                        except BaseException as error:
                            is_lost = isinstance(error, ValueError) and self._is_lost(item)
                            self._released.put(item.made)
                            if not is_lost:
                                raise
                        continue
                    for output in engine.step():
                        if output.finished and (item := running.pop(output.request_id, None)):
                            is_lost = _has_failed(output) and self._is_lost(item)
                            self._released.put(item.made)
                            if not is_lost:
                                yield item, output
            except BaseException:
                engine.abort_request(list(running), internal=False)
                raise
            finally:
                for each in ahead:
                    each.cancel()
                thread.submit(self._end, prepared, ahead, list(running.values())).result()

    def _prepare(
        self, prompts: Sequence[tuple[int, Any]], finder: Finder | None
    ) -> Generator[_Prepared]:
        """Yield prompts in order, with their images in the store; runs in the thread."""
        tokens = self._tokens
        if tokens is None or finder is None:
            for index, prompt in prompts:
                yield _Prepared(index, prompt, ())
            return

        route = _Referring(self._features, tokens, self._has_released_all)
        # The pipeline is ahead by its items in flight: only these images are kept.
        all_images, images_again = tee(self._accepted(finder(prompt)) for _, prompt in prompts)
        in_flight = self._features._workplace.num_in_flight(None)
        made = pipeline(chain.from_iterable(all_images), route, in_flight=in_flight)
        try:
            for (index, prompt), images in zip(prompts, images_again, strict=True):
                results = [self._following(made, each, route) for each in images]
                good = [each for each in results if isinstance(each, _Made)]
                for each in results:
                    if isinstance(each, FailedItem):
                        for one in good:
                            one.release()
                        good = []
                        if not isinstance(each.error, UnsupportedMedia):
                            raise each.error
                self._num_held += len(good)
                yield _Prepared(index, prompt, good)
        finally:
            made.close()

    def _accepted(self, images: list[Any] | None) -> list[Any]:
        """Return images of which features here have vLLM's bits; for others vLLM makes its own."""
        for image in images or ():
            file = memoryview(image) if isinstance(image, bytes | bytearray | memoryview) else None
            try:
                if not self._taken.takes(Modality.IMAGE, file):
                    return []
            except UnsupportedMedia:
                return []
            if isinstance(image, Image.Image) and image.mode.startswith("I"):
                return []
        return images or []

    def _following(
        self, made: Iterator[_Made | FailedItem], source: Any, route: _Referring
    ) -> _Made | FailedItem:
        """Return the next image; if the store is full, requests of the engine end first."""
        result = next(made)
        while isinstance(result, FailedItem) and isinstance(result.error, StoreFull):
            if not self._collect_released(wait_s=_SPACE_POLL_S) and not self._num_held:
                return result
            (result,) = pipeline([source], route, in_flight=1)
        return result

    def _collect_released(self, *, wait_s: float) -> bool:
        """Unpin the images of requests that have ended; return whether there were any."""
        has_any = False
        while True:
            try:
                found = self._released.get(block=wait_s > 0 and not has_any, timeout=wait_s or None)
            except queue.Empty:
                return has_any
            has_any = True
            self._num_held -= len(found)
            for each in found:
                each.release()

    def _has_released_all(self) -> bool:
        """Whether no prompt has images, so that the space of other processes is worth a wait."""
        self._collect_released(wait_s=0.0)
        return not self._num_held

    def _is_lost(self, item: _Prepared) -> bool:
        """Return whether features of a prompt were lost with a store daemon."""
        try:
            return not all(made.is_pinned() for made in item.made)
        except AfferentError:
            return True

    def _end(
        self,
        prepared: Generator[_Prepared],
        ahead: Iterable[Future[_Prepared | None]],
        running: Sequence[_Prepared],
    ) -> None:
        """Unpin the images of all prompts that have not ended."""
        prepared.close()
        done = (each for each in ahead if not each.cancelled() and each.exception() is None)
        for item in (*running, *(each.result() for each in done)):
            if item is not None:
                self._released.put(item.made)
        self._collect_released(wait_s=0.0)


class _Referring(ThroughStore[_Made]):
    """Way of an image to a reference, whose features stay pinned under its request."""

    _pins_results = True

    def __init__(
        self, features: Features, tokens: PromptTokens, has_released_all: Callable[[], bool]
    ) -> None:
        super().__init__(features._workplace, ResultOptions("compact", "numpy", Modality.IMAGE))
        self._tokens, self._has_released_all = tokens, has_released_all

    def submit(self, source: Any, *, may_wait: bool) -> InStore:
        has_released_all = self._has_released_all()
        return super().submit(source, may_wait=may_wait and has_released_all)

    def collect(self, ticket: InStore) -> _Made:
        steps, submitted = ticket.steps, ticket.submitted
        try:
            handle = run(steps.settled(submitted))
            steps.verbs.unpin(submitted.request, [submitted.file])  # the request may run for long
            tree: Any = codec.view(steps.verbs.block(handle))
            reference = self._tokens.reference(
                Modality.IMAGE,
                tree,
                tuple(tree["prompt"]),
                key=submitted.key,
                handle=handle,
                expires_s=time.time() + _VALID_S,
                of=Of(submitted.request),
            )
        except BaseException:
            self.abandon(ticket)
            raise
        return _Made(reference, ticket)


def _name(request: str) -> str:
    """Return the id of a request's output; vLLM adds random digits to it inside."""
    return request.partition("-")[0]


def _has_failed(output: Any) -> bool:
    """Return whether vLLM gave a request up, as our plugin tells it for lost features."""
    return any(each.finish_reason == "error" for each in output.outputs)


def _for_each(number: int, *options: Any) -> Callable[[int], dict[str, Any]]:
    """Return the arguments of a prompt, from options for all of them or for each."""
    names = ("sampling_params", "lora_request", "priority")
    for name, option in zip(names, options, strict=True):
        if isinstance(option, Sequence) and len(option) != number:
            raise ConfigError(f"{name} has {len(option)} elements for {number} prompts")

    def of(index: int) -> dict[str, Any]:
        return {
            name: option[index] if isinstance(option, Sequence) else option
            for name, option in zip(names, options, strict=True)
            if option is not None
        }

    return of


def _bar(use_tqdm: bool | Callable[..., Any], total: int) -> Callable[[], object]:
    """Return a function that notes the end of one prompt."""
    if not use_tqdm:
        return lambda: None
    create = use_tqdm if callable(use_tqdm) else importlib.import_module("tqdm").tqdm
    bar = create(total=total, desc="Processed prompts", dynamic_ncols=True)

    def note() -> None:
        bar.update(1)
        if bar.n >= total:
            bar.close()

    return note
