"""Items of a live session: added when their features exist, and removed by its window."""

from __future__ import annotations

from typing import Final

from afferent.builtin.apis.realtime import events as ev
from afferent.builtin.apis.realtime import schema as api
from afferent.builtin.apis.schema import check_parts
from afferent.builtin.http.live_context import LiveContext
from afferent.builtin.pipeline.live_session import FIRST, Added, LiveItem, LiveSession, Removed
from afferent.builtin.pipeline.request import GenerateRequest, Message
from afferent.builtin.pipeline.stored_turns import Turn
from afferent.errors import InvalidRequest, NoPermitLeft, PromptTooLong
from afferent.items.request import MediaPart
from afferent.proxy.request_scope import RequestScope
from afferent.proxy.responses import new_id
from afferent.telemetry.registry import counter
from afferent.types import Modality

MOST_PREPARING: Final = 32
"""Items of a connection whose features are being made; further ones are refused at once, so that a
camera that is too fast for the server loses frames and gets no delay."""

LIVE_ITEMS = counter(
    "afferent_live_items_total",
    "Items of live sessions by outcome: added, refused, or removed by the window or the context",
    outcome=("added", "refused", "removed"),
)


class LiveItems:
    """Items of one connection's session, and the audio that becomes the next one.

    Invariants:
        - The items of ``_num_preparing`` are at most `MOST_PREPARING`.
    """

    def __init__(self, context: LiveContext) -> None:
        self._context = context
        self._pipeline, self._settings = context.pipeline, context.settings
        self._audio = bytearray()
        self._num_preparing = 0

    @property
    def _session(self) -> LiveSession:
        return self._context.log.session

    def get(self, item_id: str) -> LiveItem:
        """Return an item.

        Raises:
            InvalidRequest: There is none of this id.
        """
        item = self._session.get(item_id)
        if item is None:
            raise InvalidRequest(f"there is no item {item_id!r}", param="item_id")
        return item

    def begin(self) -> None:
        """Note that an item is about to be prepared, by `prepared`.

        Raises:
            NoPermitLeft: There are too many.
        """
        if self._num_preparing >= MOST_PREPARING:
            LIVE_ITEMS.labels("refused").inc()
            why = f"{MOST_PREPARING} items of this session are being prepared; send it again"
            raise NoPermitLeft(why)
        self._num_preparing += 1

    async def prepared(self, text: bytes) -> tuple[LiveItem, str | None]:
        """Return the item of an event, with features, and the id of the item before it."""
        try:
            async with self._context.request("conversation.item.create") as own:
                body = await self._context.read(own, text)
                event = api.read_event(body.json)
                if not isinstance(event, api.ItemCreate):
                    raise InvalidRequest("an event has one type", param="type")
                message = api.read_item(event.item, body.media)
                check_parts([message], self._settings.limits_of(own.share).max_parts)
                item = await self._made(own, event.item.id, message)
                return item, event.previous_item_id
        finally:
            self._num_preparing -= 1

    async def add(self, item: LiveItem, previous_id: str | None) -> None:
        """Add an item behind another one, or at the end.

        Raises:
            InvalidRequest: Its id is taken, or the other one does not exist, or is an answer that
                is being written and has other items behind it.
            PromptTooLong: The context has no room for it.
        """
        session = self._session
        if item.id in session or item.id == FIRST:
            raise InvalidRequest(f"there is an item {item.id!r} already", param="item.id")
        if previous_id not in (None, FIRST) and previous_id not in session:
            raise InvalidRequest(f"there is no item {previous_id!r}", param="previous_item_id")
        most, in_all = self._most_tokens, session.num_tokens + item.num_tokens
        if not session.settings.may_truncate and in_all > most:
            raise PromptTooLong(
                f"with this item of {item.num_tokens} tokens, the conversation has {in_all}; "
                f"the model has room for {most}, and truncation is disabled"
            )
        is_written = previous_id in (None, FIRST) or self._context.log.has(previous_id)
        if not is_written and previous_id == session.last_id:
            previous_id = None  # behind the answer that is being written, at the end
        elif not is_written:
            raise InvalidRequest(
                f"the item {previous_id!r} is being written and has others behind it; add this one "
                "when it is done",
                param="previous_item_id",
            )
        await self._context.log.append(Added(item, previous_id))
        LIVE_ITEMS.labels("added").inc()
        if self._context.sequence is not None and item.id != session.last_id:
            self._context.sequence.inserted()
        before, described = session.before(item.id), ev.item_json(item)
        for kind in ("conversation.item.added", "conversation.item.done"):
            await self._context.send(ev.event(kind, previous_item_id=before, item=described))
        await self.trim()
        self._context.has_new.set()

    async def trim(self) -> None:
        """Remove the items that the window or the model's context has no room for."""
        now_s = self._context.now_s()
        await self.forget(self._session.overdue(now_s, most_tokens=self._most_tokens))

    async def forget(self, ids: list[str]) -> None:
        """Remove items that the session can't keep."""
        if ids:
            await self.remove(ids)
            LIVE_ITEMS.labels("removed").inc(len(ids))

    async def remove(self, ids: list[str]) -> None:
        await self._context.log.append(Removed(ids))
        if self._context.sequence is not None:
            self._context.sequence.removed(ids)
        deleted = (ev.event("conversation.item.deleted", item_id=each) for each in ids)
        await self._context.send(*deleted)

    # Audio

    def hear(self, samples: bytes) -> None:
        """Append samples to the buffer.

        Raises:
            InvalidRequest: It would be too long.
        """
        most = self._settings.limits.max_audio_nbytes
        if len(self._audio) + len(samples) > most:
            raise InvalidRequest(
                f"the audio buffer would have more than {most} bytes (--max-audio-nbytes): "
                "commit or clear it",
                param="audio",
            )
        self._audio += samples

    def clear_audio(self) -> None:
        self._audio.clear()

    async def commit_audio(self) -> None:
        """Add the buffer as an item."""
        file = api.as_wav(self._audio, "audio")
        message = Message("user", (MediaPart(Modality.AUDIO, file),))
        async with self._context.request("input_audio_buffer.commit") as own:
            await self._context.admit(own)
            item = await self._made(own, None, message)
        self._audio.clear()
        before = self._session.last_id
        await self._context.send(
            ev.event("input_audio_buffer.committed", previous_item_id=before, item_id=item.id)
        )
        await self.add(item, None)

    # Inner steps

    async def _made(self, own: RequestScope, item_id: str | None, message: Message) -> LiveItem:
        """Return a new item, with features."""
        request = GenerateRequest(request_id=own.id, messages=(message,), share=own.share)
        digests, num_tokens = await self._pipeline.prompts.make_known_and_count(request, own)
        turn, now_s = Turn.of(message, iter(digests)), self._context.now_s()
        return LiveItem(item_id or new_id("item_"), turn, now_s, num_tokens)

    @property
    def _most_tokens(self) -> int:
        """Limit of the items' tokens: the rest of the context is for instructions and answers."""
        info = self._pipeline.engine.info
        if info is None:
            return 2**62
        settings = self._session.settings
        reserved = len(settings.instructions) + (settings.max_output_tokens or 0)
        return max(info.max_model_len - max(reserved, info.max_model_len // 8), 1)
