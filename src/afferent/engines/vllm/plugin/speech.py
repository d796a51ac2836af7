"""Files of vLLM's endpoints for transcriptions and translations: opened by their media handles."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from afferent.engines import place
from afferent.engines.references import SCHEME, Of, RawReference
from afferent.engines.vllm.plugin import names
from afferent.engines.vllm.plugin.arena import arena, told_to_the_client
from afferent.engines.vllm.plugin.hooks import OF_SPEECH
from afferent.engines.vllm.plugin.probe import missing
from afferent.errors import FormatError
from afferent.types import Modality


def config_of(stock: Any) -> Any:
    """Return ``get_speech_to_text_config`` of a model's subclass.

    The endpoints ask for it when they are created: vLLM's API server has imported them then, and
    no other process does.
    """

    def get_speech_to_text_config(cls: Any, model_config: Any, task_type: Any) -> Any:
        _register()
        return stock.get_speech_to_text_config(model_config, task_type)

    return classmethod(get_speech_to_text_config)


def _register() -> None:
    """Let the endpoints open media handles, and refuse all other files.

    Raises:
        RuntimeError: This vLLM lacks a part.
    """
    if lacks := missing(OF_SPEECH):
        raise RuntimeError(f"Afferent can't transcribe with this vLLM: {'; '.join(lacks)}")
    from vllm.entrypoints.speech_to_text.base.serving import SpeechToTextBaseServing

    stock = SpeechToTextBaseServing._preprocess_speech_to_text
    if getattr(stock, "_is_afferent", False):
        return

    @functools.wraps(stock)
    async def preprocess(self: Any, request: Any, audio_data: bytes, request_id: str) -> Any:
        if place.is_offline() and not audio_data.startswith(SCHEME.encode()):
            return await stock(self, request, audio_data, request_id)  # a program's own file
        data, of = await asyncio.to_thread(_opened, audio_data)
        try:
            prompts, *more = await stock(self, request, data, request_id)
        finally:
            await asyncio.to_thread(arena("api").leave, [of])
        if of.has_tenants:  # the form has no field for a salt: no other request finds its blocks
            for prompt in prompts:
                prompt.get("decoder_prompt", prompt)["cache_salt"] = of.request
        return prompts, *more

    preprocess._is_afferent = True  # type: ignore[attr-defined]
    SpeechToTextBaseServing._preprocess_speech_to_text = preprocess


def _opened(file: bytes) -> tuple[bytes, Of]:
    """Return the bytes of the file that a media handle stands for, and its request.

    Raises:
        ValueError: It is no media handle, or is no longer valid; a client's error to vLLM.
    """
    url = file.decode("latin-1")
    with told_to_the_client(url):
        reference = arena("api").verify(url)
        names.check_tenants(reference.of)
        if not isinstance(reference, RawReference) or reference.modality is not Modality.AUDIO:
            raise FormatError("a reference to something else stands for audio")
        arena("api").admit(reference.of, is_processed=False)
        data = arena("api").raw(reference.handle, reference.start, reference.nbytes)
    return data, reference.of
