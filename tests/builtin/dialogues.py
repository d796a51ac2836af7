"""Conversations and requests made from them, to test that each API reads back what was written."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import strategies as st

from afferent.builtin.apis.openai import scored_token
from afferent.builtin.pipeline.call import Answer, Reply
from afferent.builtin.pipeline.collector import AnswerCollector
from afferent.builtin.pipeline.request import (
    End,
    Message,
    Output,
    Part,
    PromptInfo,
    Role,
    TextDelta,
    TextPart,
    Usage,
)
from afferent.items.request import MediaPart
from afferent.media.body.cutter import MediaKeys
from afferent.media.body.raw import RawMedia
from afferent.media.body.received import ReceivedBody
from afferent.types import Modality
from tests.media.json_bodies import cut

REQUEST_ID = "id_1"
LONG = b"\x89PNG\r\n\x1a\n" + bytes(range(248))
"""Media that are long enough to be cut out of a body; `BASE64` is the same."""
BASE64 = base64.b64encode(LONG).decode()


@dataclass(frozen=True, slots=True)
class Image:
    """An image in the request itself (bytes), or behind a URL."""

    source: bytes | str

    @property
    def base64(self) -> str:
        assert isinstance(self.source, bytes)
        return base64.b64encode(self.source).decode()

    @property
    def url(self) -> str:
        if isinstance(self.source, str):
            return self.source
        return f"data:image/png;base64,{self.base64}"


@dataclass(frozen=True, slots=True)
class Turn:
    role: Role
    parts: tuple[str | Image, ...]


_texts = st.text(max_size=20)
_images = (st.binary(min_size=1, max_size=120) | st.just("https://example.com/a.png")).map(Image)
_user = st.lists(_texts | _images, min_size=1, max_size=4)
_turns = st.one_of(
    st.tuples(st.just("user"), _user),
    st.tuples(st.sampled_from(["system", "assistant"]), st.lists(_texts, min_size=1, max_size=2)),
)
dialogues = st.lists(_turns.map(lambda turn: Turn(turn[0], tuple(turn[1]))), min_size=1, max_size=5)


def received(body: Any, keys: MediaKeys, *, chunk_nbytes: int = 1 << 20) -> ReceivedBody:
    """Return the body as the server receives it: media under these keys are cut out."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    done, items = cut(data, chunk_nbytes, keys=keys)
    media = {
        item.marker: RawMedia("data", len(found), data=found)
        for item, found in zip(done.media, items.items, strict=True)
    }
    by_marker = {item.marker: item for item in done.media}
    return ReceivedBody(done.json, media, len(data), by_marker)


def meant(turns: list[Turn]) -> list[Message]:
    return [Message(turn.role, tuple(_part(part) for part in turn.parts)) for turn in turns]


def _part(part: str | Image) -> Part:
    return TextPart(part) if isinstance(part, str) else MediaPart(Modality.IMAGE, part.url)


def spelled_out(messages: tuple[Message, ...]) -> list[Message]:
    """Return the messages with the media that were cut out as URLs again."""
    return [Message(m.role, tuple(_spelled_out(part) for part in m.parts)) for m in messages]


def _spelled_out(part: Part) -> Part:
    match part:
        case MediaPart(Modality.IMAGE, RawMedia(data=bytes(data))):
            return MediaPart(Modality.IMAGE, Image(data).url, part.detail)
        case _:
            return part


PROMPT_INFO = PromptInfo((), 12)
SCORED = scored_token("a", -0.5, [("a", -0.5), ("\ufffd", -1.5)])


def outputs(*pieces: str, end: End | None = None, scored: bool = False) -> list[Output]:
    """Return the outputs of one answer, with one token for each piece."""
    deltas = [TextDelta(piece, 0, (SCORED,) if scored else ()) for piece in pieces]
    return [PROMPT_INFO, *deltas, end or End("stop", Usage(12, len(pieces)))]


def complete(said: list[Output]) -> list[Answer]:
    collector = AnswerCollector()
    for output in said:
        collector.add(output)
    return collector.complete()


def stream(reply: Reply, said: list[Output]) -> list[dict[str, Any]]:
    """Return the events of a whole stream; check that the data of each repeat its name."""
    frames = [*reply.begin(), *(frame for output in said for frame in reply.output(output))]
    return events([*frames, *reply.finish()])


def events(frames: list[bytes]) -> list[dict[str, Any]]:
    found = []
    for frame in frames:
        name, data, *rest = frame.split(b"\n")
        assert rest == [b"", b""]
        event = msgspec.json.decode(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        found.append(event)
    return found
