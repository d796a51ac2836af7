"""Events of a client of OpenAI Realtime: schema and translation.

Unknown keys are ignored: clients send back items as they got them.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from afferent.builtin.apis import openai, schema
from afferent.builtin.pipeline.live_session import Settings, Window
from afferent.builtin.pipeline.request import Message, Part, Role, TextPart
from afferent.errors import InvalidMedia, InvalidRequest, UnsupportedParameter
from afferent.items.request import Detail, MediaPart
from afferent.media.body.cutter import MediaKeys
from afferent.media.body.raw import RawMedia
from afferent.types import Modality

MEDIA_KEYS: Final = MediaKeys(urls=("image_url",))
"""Keys of media that are cut out of an event while it is read."""
AUDIO_RATE_HZ: Final = 24_000
"""Rate of audio: 16-bit little-endian samples of one channel."""
SAMPLE_NBYTES: Final = 2

EventId = Annotated[str, Meta(max_length=512)]
ItemId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,64}\Z")]
_Text = Annotated[str, Meta(max_length=2**20)]
_MaxTokens = schema.MaxTokens | Literal["inf"]


# Parameters of a session


class _Format(Struct):
    type: str = "audio/pcm"
    rate: int | None = None


class _AudioInput(Struct):
    format: _Format | None = None
    turn_detection: Any = None
    transcription: Any = None
    noise_reduction: Any = None


class _Audio(Struct):
    input: _AudioInput | None = None
    output: Any = None


class _TokenLimits(Struct):
    post_instructions: Annotated[int, Meta(ge=1)] | None = None


class _RetentionRatio(Struct, tag="retention_ratio"):
    retention_ratio: Annotated[float, Meta(ge=0.0, le=1.0)]
    token_limits: _TokenLimits | None = None


class _WindowParams(Struct, forbid_unknown_fields=True):
    """Window of a session: limits that its items stay within; ``None``: no limit."""

    seconds: Annotated[float, Meta(gt=0)] | None = None
    items: Annotated[int, Meta(ge=1)] | None = None
    tokens: Annotated[int, Meta(ge=1)] | None = None


class _AnswerParams(Struct, kw_only=True):
    """Parameters of answers, common to sessions and responses."""

    instructions: _Text | UnsetType = UNSET
    max_output_tokens: _MaxTokens | UnsetType | None = UNSET
    output_modalities: list[Literal["text", "audio"]] | UnsetType = UNSET
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | UnsetType | None = UNSET
    tools: Any = None
    prompt: Any = None

    def changes(self, where: str) -> dict[str, Any]:
        """Return the settings that change.

        Args:
            where: Name of these parameters in errors.

        Raises:
            UnsupportedParameter: A parameter has a value that is not supported.
        """
        if self.output_modalities is not UNSET and self.output_modalities != ["text"]:
            raise UnsupportedParameter(
                "answers are text: output_modalities is ['text']",
                param=f"{where}.output_modalities",
            )
        if self.tools:
            raise UnsupportedParameter("sessions have no tools", param=f"{where}.tools")
        if self.prompt:
            raise UnsupportedParameter("there are no stored prompts", param=f"{where}.prompt")
        most = self.max_output_tokens
        given = {
            "instructions": self.instructions,
            "max_output_tokens": None if most == "inf" else most,
            "temperature": self.temperature,
        }
        return {name: value for name, value in given.items() if value is not UNSET}


class SessionParams(_AnswerParams, kw_only=True):
    """Parameters of a session; those that are left out keep their values."""

    type: str = "realtime"
    model: schema.Name | UnsetType = UNSET
    truncation: Literal["auto", "disabled"] | _RetentionRatio | UnsetType = UNSET
    window: _WindowParams | UnsetType | None = UNSET
    audio: _Audio | None = None
    tool_choice: Any = None


class ResponseParams(_AnswerParams, kw_only=True):
    """Parameters of one response; those that are left out are the session's."""

    conversation: str | None = None
    input: Any = None
    metadata: schema.Metadata | None = None


# Items


class _InputText(Struct, tag="input_text"):
    text: str


class _OutputText(Struct, tag="output_text"):
    text: str


class _InputImage(Struct, tag="input_image"):
    image_url: str
    detail: openai.ImageDetail | None = None


class _InputAudio(Struct, tag="input_audio"):
    audio: bytes


_Part = _InputText | _OutputText | _InputImage | _InputAudio


class ItemParams(Struct):
    """Item that a client adds to the conversation."""

    type: Annotated[str, Meta(max_length=64)] = "message"
    id: ItemId | None = None
    role: Literal["system", "user", "assistant"] | None = None
    content: list[_Part] | None = None


# Events


class ClientEvent(Struct, kw_only=True, tag_field="type"):
    event_id: EventId | None = None


class SessionUpdate(ClientEvent, tag="session.update"):
    session: SessionParams


class ItemCreate(ClientEvent, tag="conversation.item.create"):
    item: ItemParams
    previous_item_id: ItemId | None = None


class _ItemEvent(ClientEvent, kw_only=True):
    item_id: ItemId


class ItemRetrieve(_ItemEvent, tag="conversation.item.retrieve"):
    pass


class ItemDelete(_ItemEvent, tag="conversation.item.delete"):
    pass


class ItemTruncate(_ItemEvent, tag="conversation.item.truncate"):
    content_index: int = 0
    audio_end_ms: int = 0


class ResponseCreate(ClientEvent, tag="response.create"):
    response: ResponseParams | None = None


class ResponseCancel(ClientEvent, tag="response.cancel"):
    response_id: Annotated[str, Meta(max_length=64)] | None = None


class AudioAppend(ClientEvent, tag="input_audio_buffer.append"):
    audio: bytes


class AudioCommit(ClientEvent, tag="input_audio_buffer.commit"):
    pass


class AudioClear(ClientEvent, tag="input_audio_buffer.clear"):
    pass


AnyEvent = (
    SessionUpdate
    | ItemCreate
    | ItemRetrieve
    | ItemDelete
    | ItemTruncate
    | ResponseCreate
    | ResponseCancel
    | AudioAppend
    | AudioCommit
    | AudioClear
)


class EventHead(Struct):
    """Type and id of an event, which are read before the rest."""

    type: Annotated[str, Meta(max_length=64)]
    event_id: EventId | None = None


_decoder = msgspec.json.Decoder(AnyEvent)
_decoders = {each.__struct_config__.tag: msgspec.json.Decoder(each) for each in get_args(AnyEvent)}
_head_decoder = msgspec.json.Decoder(EventHead)


def read_head(text: bytes) -> EventHead:
    """Return the type and id of an event.

    Raises:
        InvalidRequest: It is not JSON, or has no type.
    """
    return schema.decode(_head_decoder, text, None)


def read_event(text: bytes, kind: str = "") -> AnyEvent:
    """Return an event.

    Args:
        kind: The type in its head; then an event with two types is refused before it is read.

    Raises:
        InvalidRequest: It is not of the schema, or of an unknown type.
    """
    event: AnyEvent = schema.decode(_decoders.get(kind, _decoder), text, None)
    return event


def updated(before: Settings, given: SessionParams) -> Settings:
    """Return the settings of a session after an update.

    Raises:
        UnsupportedParameter: A parameter has a value that is not supported.
    """
    if given.type != "realtime":
        raise UnsupportedParameter("sessions are of type 'realtime'", param="session.type")
    changed = given.changes("session")
    if given.audio is not None and given.audio.input is not None:
        _check_audio(given.audio.input)
    if given.truncation is not UNSET:
        changed |= _truncation(given.truncation)
    if given.window is not UNSET:
        window = given.window or _WindowParams()
        changed["window"] = Window(window.seconds, window.items, window.tokens)
    return msgspec.structs.replace(before, **changed)


def answered_with(before: Settings, given: ResponseParams) -> Settings:
    """Return the settings of one response.

    Raises:
        UnsupportedParameter: A parameter has a value that is not supported.
    """
    changed = given.changes("response")
    if given.conversation not in (None, "auto") or given.input is not None:
        raise UnsupportedParameter(
            "a response answers the session's conversation, and is added to it",
            param="response.input" if given.input is not None else "response.conversation",
        )
    return msgspec.structs.replace(before, **changed)


def read_item(item: ItemParams, media: Mapping[str, RawMedia]) -> Message:
    """Return the message that an item is.

    Args:
        media: Media of the event, by the marker in the JSON.

    Raises:
        InvalidRequest: It is not allowed there.
        InvalidMedia: Its audio is malformed.
        UnsupportedParameter: Its type is not supported.
    """
    if item.type != "message":
        raise UnsupportedParameter(
            f"items of type {item.type!r} are not supported", param="item.type"
        )
    if item.role is None or not item.content:
        raise InvalidRequest("a message has a role and content", param="item")
    left = dict(media)
    parts = [_part(part, left) for part in item.content]
    schema.check_all_taken(left, "item")
    if item.role != "user" and any(isinstance(part, MediaPart) for part in parts):
        raise InvalidRequest("media stand in messages of the user", param="item.content")
    role: Role = item.role
    return Message(role, tuple(parts))


def _part(part: _Part, media: dict[str, RawMedia]) -> Part:
    match part:
        case _InputText(text) | _OutputText(text):
            return TextPart(text)
        case _InputImage(url, detail):
            source = media.pop(url, url)
            given: Detail = openai.detail_of(detail)
            return MediaPart(Modality.IMAGE, source, given)
        case _InputAudio(audio):
            return MediaPart(Modality.AUDIO, as_wav(audio, "item.content"))


def as_wav(samples: bytes | bytearray, param: str) -> RawMedia:
    """Return samples as a WAV file.

    Raises:
        InvalidMedia: There are none, or the last one is incomplete.
    """
    if not samples or len(samples) % SAMPLE_NBYTES:
        raise InvalidMedia(
            "audio is 16-bit samples at 24 kHz: at least one, and whole", param=param
        )
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(SAMPLE_NBYTES)
        writer.setframerate(AUDIO_RATE_HZ)
        writer.writeframes(samples)
    data = file.getvalue()
    return RawMedia("data", len(data), data=data)


def _truncation(given: str | _RetentionRatio) -> dict[str, Any]:
    if isinstance(given, str):
        is_off = given == "disabled"
        return {"may_truncate": not is_off, "retention_ratio": None, "most_tokens": None}
    limits = given.token_limits
    return {
        "may_truncate": True,
        "retention_ratio": given.retention_ratio,
        "most_tokens": None if limits is None else limits.post_instructions,
    }


def _check_audio(given: _AudioInput) -> None:
    where = "session.audio.input"
    if given.format is not None and (
        given.format.type != "audio/pcm" or given.format.rate not in (None, AUDIO_RATE_HZ)
    ):
        raise UnsupportedParameter("audio is audio/pcm at a rate of 24000", param=f"{where}.format")
    if given.turn_detection is not None:
        raise UnsupportedParameter(
            "turns are manual: turn_detection is null", param=f"{where}.turn_detection"
        )
    if given.transcription is not None or given.noise_reduction is not None:
        raise UnsupportedParameter("audio is passed on as it is", param=where)
