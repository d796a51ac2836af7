"""Audio of a live transcription in front of vLLM: read, limited and admitted, event by event.

vLLM's WebSocket takes samples of 16 bits at 16 kHz in base64. It keeps all samples that its model
has not taken yet, as floats and without a limit. How far the model has come is visible only at the
end of a transcription, so that all audio since the last one counts.
"""

from __future__ import annotations

import itertools
import json
from typing import Any, Final

import msgspec

from afferent.admission.gate import Gate
from afferent.config import Limits
from afferent.errors import AfferentError, InvalidRequest, MediaTooLarge, Unavailable
from afferent.items.receive import MEDIA_BYTES
from afferent.proxy.request_scope import RequestScope
from afferent.proxy.statuses import failure_of, message_of
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.types import MiB, Modality

_RATE_HZ: Final = 16_000
_SAMPLE_NBYTES: Final = 2
_FLOAT_NBYTES: Final = 4
_LEAST_SAMPLES: Final = 64
"""Charge of a short event: vLLM has an object for each."""
_MOST_VALUES: Final = 1_000
_APPEND, _DONE = "input_audio_buffer.append", "transcription.done"


class _ErrorEvent(msgspec.Struct, tag_field="type", tag="error", omit_defaults=True):
    """Error in vLLM's format; `retry_after_s` is ours."""

    error: str
    code: str
    retry_after_s: float | None = None


class LiveAudio:
    """Audio that one WebSocket's client has sent since its last complete transcription.

    Invariants:
        - Audio is passed on only once the gate has admitted the floats that vLLM makes of it, in
          steps of one MiB. The permits are released when the transcription is complete.
        - Only a client without permits waits for one.
    """

    def __init__(
        self,
        store: AsyncDaemonStore,
        gate: Gate,
        own: RequestScope,
        limits: Limits,
        *,
        limit_nbytes: int,
    ) -> None:
        """Create it, without audio.

        Args:
            limit_nbytes: Limit of the gate for the audio of all live transcriptions.
        """
        self._store, self._gate, self._own = store, gate, own
        self._limit_nbytes = limit_nbytes
        # More than the gate ever admits would wait for itself.
        most_nbytes = max(limit_nbytes // MiB, 1) * MiB
        self._max_samples = min(int(limits.max_audio_s * _RATE_HZ), most_nbytes // _FLOAT_NBYTES)
        self._num_samples = 0
        self._leases: list[str] = []
        self._numbers = itertools.count()

    async def take(self, message: str) -> str | None:
        """Read a client's message, and wait at the gate with its audio.

        Returns:
            The event for the client if the message is not to be passed on; else ``None``.
        """
        try:
            nbytes = _audio_nbytes(message)
            if not nbytes:
                return None
            num_new = max(nbytes // _SAMPLE_NBYTES, _LEAST_SAMPLES)
            if self._num_samples + num_new > self._max_samples:
                raise MediaTooLarge(
                    f"there are more than {self._max_samples / _RATE_HZ:.1f} s of audio since the "
                    "last complete transcription (--max-audio-s, --arena-nbytes): complete it by "
                    "input_audio_buffer.commit with final"
                )
            await self._admit(num_new)
        except AfferentError as error:
            failure = failure_of(error)
            again_s = failure.retry_after_s if isinstance(failure, Unavailable) else None
            event = _ErrorEvent(message_of(failure), failure.code, again_s)
            return msgspec.json.encode(event).decode()
        self._num_samples += num_new
        MEDIA_BYTES.labels(Modality.AUDIO, "data").inc(nbytes)
        return None

    def hear(self, message: str) -> None:
        """Read a message of vLLM: a transcription may be complete."""
        if _DONE in message and _parsed(message).get("type") == _DONE:
            self.end()

    def end(self) -> None:
        """Release what the gate has admitted."""
        for lease in self._leases:
            self._store.forget(lease)
        self._leases.clear()
        self._num_samples = 0

    async def _admit(self, num_new: int) -> None:
        # A transcription may be complete while this waits: then less is needed.
        while len(self._leases) * MiB < (self._num_samples + num_new) * _FLOAT_NBYTES:
            lease = f"{self._own.id}-audio-{next(self._numbers)}"
            self._store.introduce(lease, self._own.share)
            try:
                await self._gate.admit_audio(
                    lease, limit_nbytes=self._limit_nbytes, may_wait=not self._leases
                )
            except BaseException:
                self._store.forget(lease)
                raise
            self._leases.append(lease)


def _audio_nbytes(message: str) -> int:
    """Return the bytes of a message's audio; 0 for any other message, which vLLM reads.

    Raises:
        InvalidRequest: Its shape is no event's.
    """
    event = _read(message)
    audio = event.get("audio") if event.get("type") == _APPEND else None
    return max(len(audio) * 3 // 4 - audio.count("=", -2), 0) if isinstance(audio, str) else 0


def _read(message: str) -> dict[str, Any]:
    """Return an event, read by vLLM's parser: no spelling may pass by the limits.

    Raises:
        InvalidRequest: Its shape is no event's.
    """
    if sum(map(message.count, "[{,")) > _MOST_VALUES:
        raise InvalidRequest("the event has too many values")
    try:
        return _parsed(message)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("the event can't be read") from error


def _parsed(message: str) -> dict[str, Any]:
    """Return an event; a text that is none is empty: vLLM refuses it, too."""
    try:
        event = json.loads(message)
    except json.JSONDecodeError:
        return {}
    return event if isinstance(event, dict) else {}
