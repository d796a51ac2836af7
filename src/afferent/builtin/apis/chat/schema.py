"""Schema of the supported part of OpenAI's chat completions.

Unknown keys in messages and content parts are ignored: clients send back keys of other servers and
libraries (``refusal``, ``annotations``, ``reasoning_content``, ``cache_control``). They mean
nothing to a model that takes text and media.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from afferent.builtin.apis import forms
from afferent.builtin.apis.openai import ImageDetail, InputFile, OpenAIRequest, StreamOptions
from afferent.builtin.apis.schema import MaxTokens, Name

Uuid = Annotated[str, Meta(min_length=1, max_length=256)]
"""Client's own id of an item; with it, the item itself may be omitted later."""


class TextContent(Struct, tag="text"):
    text: str


class RefusalContent(Struct, tag="refusal"):
    refusal: str


class ImageUrl(Struct):
    url: str | None = None
    detail: ImageDetail | None = None


class ImageContent(Struct, tag="image_url"):
    image_url: ImageUrl | None = None
    uuid: Uuid | None = None


class MediaUrl(Struct):
    url: str | None = None


class VideoContent(Struct, tag="video_url"):
    video_url: MediaUrl | None = None
    uuid: Uuid | None = None


class AudioUrlContent(Struct, tag="audio_url"):
    audio_url: MediaUrl | None = None
    uuid: Uuid | None = None


class InputAudio(Struct):
    """Audio data; ``format`` is a hint, as the bytes decide."""

    data: str | None = None
    format: Annotated[str, Meta(pattern="^[a-z0-9]{1,8}$")] = "wav"


class AudioContent(Struct, tag="input_audio"):
    input_audio: InputAudio | None = None
    uuid: Uuid | None = None


class FileContent(Struct, tag="file"):
    file: InputFile


Content = (
    TextContent
    | RefusalContent
    | ImageContent
    | VideoContent
    | AudioUrlContent
    | AudioContent
    | FileContent
)


class FunctionCall(Struct):
    """Tool call; ``arguments`` is JSON in a string, or from some clients the JSON itself."""

    name: Name | None = None
    arguments: Raw | UnsetType = UNSET


class CustomCall(Struct):
    """Call of a custom tool; its ``input`` is free text."""

    name: Name | None = None
    arguments: Raw | UnsetType = msgspec.field(name="input", default=UNSET)


AnyCall = FunctionCall | CustomCall


class ToolCall(Struct):
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class ChatMessage(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Content] | None = None
    # Parsed only in the assistant's messages; elsewhere they mean nothing.
    tool_calls: Raw | UnsetType = UNSET
    function_call: Raw | UnsetType = UNSET


class ChatRequest(OpenAIRequest, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    logprobs: bool | None = None
    reasoning_effort: Annotated[str, Meta(max_length=64)] | None = None
    response_format: forms.OutputFormat | None = None
    # Parsed only if the choice is not "none": without it, they mean nothing.
    tools: Raw | UnsetType = UNSET
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Raw | UnsetType = UNSET
    function_call: Any = None
    guided_json: forms.GivenSchema = UNSET
    guided_regex: str | None = None
    guided_choice: list[str] | None = None

    def form(self) -> forms.Form:
        """See `AnyRequest.form`."""
        return forms.of_completions(self, super().form())


tool_calls_decoder = msgspec.json.Decoder(list[ToolCall] | None)
function_call_decoder = msgspec.json.Decoder(FunctionCall | str | None)
"""A string selects the allowed function; it is not a call."""
