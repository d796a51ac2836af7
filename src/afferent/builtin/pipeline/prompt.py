"""Conversion of messages to prompt tokens, and of answer tokens to text.

It uses `tokenizers` and Jinja directly: `transformers` would load torch, with 300 MB and three
seconds, in every frontend.
"""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import DecodeStream

from afferent.builtin.pipeline.call_reader import CallReader
from afferent.builtin.pipeline.chat_template import STAND_IN, ChatTemplate
from afferent.builtin.pipeline.prompt_memory import PromptMemory
from afferent.builtin.pipeline.request import (
    CallPart,
    Message,
    SamplingDefaults,
    TemplateOptions,
    TextPart,
    ToolUse,
    Truncation,
)
from afferent.builtin.pipeline.segment_tokens import SegmentTokens
from afferent.builtin.pipeline.vllm_messages import Written, as_vllm
from afferent.errors import (
    ConfigError,
    InternalError,
    InvalidRequest,
    Param,
    UnsupportedParameter,
)
from afferent.items.request import MediaPart
from afferent.media.families.family import Family, MediaTokens, read_json
from afferent.media.families.plan import Prompt as ItemPrompt
from afferent.media.families.plan import numbered
from afferent.media.families.registry import facts_of
from afferent.media.families.tokenizer import read_tokenizer
from afferent.types import Modality, Placeholder, ToolForm

_MAX_PIECES = 4096
_ASKED, _ANSWERED = "Why?", "So."
"""Messages before those whose tokens behind others are requested."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt tokens with one placeholder for each item, in the items' order.

    ``spans`` are the ranges of all tokens of each item, of which its placeholder may be a part.
    """

    token_ids: list[int]
    placeholders: list[Placeholder]
    spans: list[Placeholder]


class PromptBuilder:
    """Chat template and tokenizer of one model."""

    def __init__(self, folder: Path, family: Family, *, as_vllm: bool = False) -> None:
        """Read the model's folder.

        Args:
            as_vllm: Whether prompts are those of vLLM: messages reach the chat template in vLLM's
                format, and clients' text that spells out a special token becomes that token.
                Tokens of media never do.

        Raises:
            ConfigError: The folder has no usable tokenizer or chat template.
        """
        self._tokenizer = read_tokenizer(folder)
        # For clients' text that spells out special tokens: there they are plain text.
        self._plain_tokenizer = copy.deepcopy(self._tokenizer)
        self._plain_tokenizer.encode_special_tokens = True
        # Tokens of media are not special in every model, but clients must not write them in any.
        media = {token for tokens in family.tokens.values() for token in _ids(tokens)}
        written = [name for name in map(self._tokenizer.id_to_token, media) if name is not None]
        self._plain_tokenizer.add_special_tokens(
            [AddedToken(name, special=True) for name in written]
        )
        added = self._tokenizer.get_added_tokens_decoder()
        special = [token.content for token in added.values() if token.special]
        special = [] if as_vllm else special
        self._special = tuple(dict.fromkeys([*special, *written]))
        self._tokens = family.tokens
        self._numbers_items = facts_of(folder).numbers_items
        self._modality_of = {tokens.marker: kind for kind, tokens in family.tokens.items()}
        self.max_token_characters = max(map(len, self._tokenizer.get_vocab()))
        """Upper bound of the characters in one token."""
        self._template, self._as_vllm = ChatTemplate(folder), as_vllm
        marks = self._template.call_marks
        self._special_marks = marks is not None and {*marks} <= {*special}
        self._memory = PromptMemory(self._marked)
        self._segments = SegmentTokens(self._tokenizer)
        self._pieces: dict[str, list[int]] = {}

    def build(
        self,
        messages: Sequence[Message],
        written: Sequence[ItemPrompt],
        options: TemplateOptions | None = None,
        *,
        tenant: str = "",
    ) -> Prompt:
        """Return the prompt's tokens, with each item's marker expanded to its tokens.

        Args:
            written: Form of each item in the prompt, in order.
            tenant: Tenant of the messages.

        Raises:
            InvalidRequest: The model's chat template refuses the messages or leaves out an item, or
                a text is not valid Unicode.
        """
        options = options or TemplateOptions()
        marked = (
            self._memory.tokens(messages, options, tenant=tenant)
            if self._template.is_constant
            else self._marked(messages, options, tenant)
        )
        # A template may move items before the text, but not past others of their kind.
        media = [p for message in messages for p in message.parts if isinstance(p, MediaPart)]
        waiting: dict[Modality, deque[int]] = {kind: deque() for kind in self._tokens}
        numbers: list[int] = []
        for index, part in enumerate(media):
            numbers.append(len(waiting[part.modality]))
            waiting[part.modality].append(index)
        token_ids: list[int] = []
        placeholders: dict[int, Placeholder] = {}
        spans: dict[int, Placeholder] = {}
        for token in marked:
            kind = self._modality_of.get(token)
            if kind is None:
                token_ids.append(token)
            elif not waiting[kind]:
                raise InternalError("the chat template names an item that there is not")
            else:
                index, start = waiting[kind].popleft(), len(token_ids)
                item = written[index]
                if self._numbers_items:
                    item = numbered(item, numbers[index])
                placeholders[index] = self._open(kind, item, token_ids)
                spans[index] = Placeholder(start, len(token_ids) - start)
        if len(placeholders) != len(media):
            raise InvalidRequest(
                f"the model's chat template shows {len(placeholders)} of the {len(media)} media "
                "of these messages: move the others into messages of the user",
                param=Param.MESSAGES,
            )
        in_order = range(len(media))
        return Prompt(token_ids, [placeholders[i] for i in in_order], [spans[i] for i in in_order])

    def appended(
        self,
        messages: Sequence[Message],
        written: Sequence[ItemPrompt],
        options: TemplateOptions,
        *,
        after: str,
        is_open: bool,
        end_token: int | None,
        tenant: str = "",
    ) -> Prompt:
        """Return the tokens of messages behind others; as `build` for the first messages.

        Args:
            after: Role of the last message before them; empty: there is none.
            is_open: Whether that message is an answer as the model wrote it: the tokens behind its
                text come first.
            end_token: Token that ended that answer, which is not repeated.
            tenant: As for `build`.
        """
        if not after:
            return self.build(messages, written, options, tenant=tenant)
        asked = Message("user", (TextPart(_ASKED),))
        before = [asked]
        if after == "assistant":
            before.append(Message("assistant", (TextPart(_ANSWERED),)))
        elif after != "user":
            before = [Message(after, (TextPart(_ASKED),))]
        known = len(self._head(before, [], is_open, end_token))
        prompt = self.build([*before, *messages], written, options, tenant=tenant)
        return Prompt(
            prompt.token_ids[known:],
            [Placeholder(each.offset - known, each.length) for each in prompt.placeholders],
            [Placeholder(each.offset - known, each.length) for each in prompt.spans],
        )

    def _head(
        self,
        before: Sequence[Message],
        written: Sequence[ItemPrompt],
        is_open: bool,
        end_token: int | None,
    ) -> list[int]:
        """Return the tokens of the messages before those of `appended`, up to the last token that
        the sequence has: of an answer, the token that ended it, if the template writes that one.
        """
        whole = self.build(before, written, TemplateOptions(begins_answer=False)).token_ids
        if not is_open:  # else the last message is an answer, without media
            return whole
        begun = self.build(before[:-1], written).token_ids
        head = [*begun, *self._tokenizer.encode(_ANSWERED, add_special_tokens=False).ids]
        if end_token is not None and whole[len(head) : len(head) + 1] == [end_token]:
            head.append(end_token)
        return head

    @cached_property
    def can_append(self) -> bool:
        """Whether the tokens of messages are the same behind any others, so that `appended` gives
        them: not if the chat template or the family counts pictures, or if the template drops the
        text of earlier answers.
        """
        if self._numbers_items:
            return False
        text = Message("user", (TextPart("What is it? "),))
        answer = Message("assistant", (TextPart(_ANSWERED),))
        system = Message("system", (TextPart("Be brief."),))
        item: ItemPrompt = (2,)
        kinds = [kind for kind in self._tokens if self.can_show(kind)]
        shown = [Message("user", (MediaPart(kind, ""),)) for kind in kinds]
        dialogues = [[text, text, answer, text], [text, answer, answer, text, text]]
        dialogues += [[each, text, each, each, answer, each] for each in shown]
        dialogues += [[system, *dialogue] for dialogue in dialogues]
        try:
            return all(
                self._is_appended(dialogue, cut, item)
                for dialogue in dialogues
                for cut in range(1, len(dialogue))
            )
        except (InternalError, InvalidRequest):
            return False

    def _is_appended(self, messages: Sequence[Message], cut: int, item: ItemPrompt) -> bool:
        def written(some: Sequence[Message]) -> list[ItemPrompt]:
            return [item for message in some for _ in message.media]

        first, rest, options = messages[:cut], messages[cut:], TemplateOptions()
        after = first[-1].role
        is_open = after == "assistant"
        before = self._head(first, written(first), is_open, None)
        more = self.appended(
            *(rest, written(rest), options), after=after, is_open=is_open, end_token=None
        )
        whole = self.build(messages, written(messages), options)
        # No text of a message may join the tokens on both sides of the cut.
        fixed = self._tokenizer.get_added_tokens_decoder()
        is_fixed = before[-1] in fixed or more.token_ids[0] in fixed
        return is_fixed and [*before, *more.token_ids] == whole.token_ids

    def tool_form(self, use: ToolUse) -> ToolForm:
        """Return the format of calls that the model's chat template has.

        Raises:
            UnsupportedParameter: It has none.
        """
        if (marks := self._template.call_marks) is None:
            raise UnsupportedParameter(
                "tools are not supported: the model's chat template has no calls in the format of "
                "Hermes and Qwen, which are JSON between <tool_call> and </tool_call>",
                param="tools",
            )
        begin, end = marks
        if self._template.calls_have_lines:
            begin, end = f"{begin}\n", f"\n{end}"
        return ToolForm(
            functions=list(use.functions),
            begin=begin,
            end=end,
            is_special=self._special_marks,
            must_call=use.must_call,
            is_parallel=use.is_parallel,
        )

    def call_reader(self, use: ToolUse | None, index: int) -> CallReader | None:
        """Return the reader of calls in an answer of a request with tools."""
        marks = self._template.call_marks
        return None if use is None or marks is None else CallReader(index, *marks)

    @property
    def merges_system(self) -> bool:
        """Whether the chat template takes system messages at the start only."""
        return self._template.merges_system

    def _marked(
        self, messages: Sequence[Message], options: TemplateOptions, tenant: str
    ) -> list[int]:
        """Return the tokens of messages, with each item's marker."""
        quoted: list[str] = []
        written: Sequence[Written] = [self._as_dict(message, quoted) for message in messages]
        if self._as_vllm:
            written = as_vllm(written, has_developer_role=self._template.has_developer_role)
        rendered = self._template.render(
            written,
            self._quote_in(options.variables, quoted),
            begins_answer=options.begins_answer,
            continues_last=options.continues_last,
        )
        return self._encode(rendered, quoted, tenant)

    def can_show(self, kind: Modality) -> bool:
        """Whether the chat template places an item of this modality in the prompt."""
        asked = Message("user", (MediaPart(kind, ""), TextPart("?")))
        try:
            self.build([asked], [(1,)])
        except (InternalError, InvalidRequest):
            return False
        return True

    def plain(
        self,
        given: str | Sequence[int],
        *,
        adds_special: bool = True,
        truncation: Truncation | None = None,
    ) -> list[int]:
        """Return the tokens of a text that is the whole prompt; special tokens are parsed.

        Args:
            adds_special: Whether the tokenizer adds its special tokens around a text.
            truncation: Limit on the tokens, at least 0; more are cut off.

        Raises:
            InvalidRequest: It contains a token of media; in prompts of vLLM, which computes it as
                any other token, it may.
        """
        token_ids = list(
            self._text_tokens(given, adds_special, truncation) if isinstance(given, str) else given
        )
        if truncation is not None:
            token_ids = _cut(token_ids, truncation.num_tokens, truncation.side or "left")
        of_media = {token for tokens in self._tokens.values() for token in _ids(tokens)}
        if not self._as_vllm and not of_media.isdisjoint(token_ids):
            raise InvalidRequest(
                "media stand in messages: a prompt of text has no tokens of theirs",
                param=Param.MESSAGES,
            )
        return token_ids

    def _text_tokens(
        self, text: str, adds_special: bool, truncation: Truncation | None
    ) -> Sequence[int]:
        if truncation is None or truncation.side is not None:
            return self._tokenizer.encode(text, add_special_tokens=adds_special).ids
        # As a tokenizer's own truncation in vLLM: the special tokens that it adds stay.
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        added = self._tokenizer.num_special_tokens_to_add(False) if adds_special else 0
        encoding.truncate(max(0, truncation.num_tokens - added), direction="left")
        return self._tokenizer.post_process(encoding, add_special_tokens=adds_special).ids

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of all tokens, including special ones."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _open(self, kind: Modality, written: ItemPrompt, token_ids: list[int]) -> Placeholder:
        """Append the tokens of an item; return its range of embedding rows."""
        first = last = len(token_ids)
        for piece in written:
            if isinstance(piece, str):
                token_ids += self._piece_ids(piece)
            else:
                first = first if last > first else len(token_ids)
                token_ids += [self._tokens[kind].embed] * piece
                last = len(token_ids)
        return Placeholder(first, last - first)

    def _piece_ids(self, piece: str) -> list[int]:
        """Return the tokens of a family's own text around items, cached: such texts are few."""
        known = self._pieces.get(piece)
        if known is None:
            if len(self._pieces) >= _MAX_PIECES:  # such as the times of very many frames
                self._pieces.clear()
            known = self._tokenizer.encode(piece, add_special_tokens=False).ids
            self._pieces[piece] = known
        return known

    def detokenizer(self, *, skips_special: bool = True) -> Detokenizer:
        return Detokenizer(self._tokenizer, skips_special=skips_special)

    def _as_dict(self, message: Message, quoted: list[str]) -> Written:
        content: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        for part in message.parts:
            match part:
                case MediaPart(modality):
                    content.append({"type": str(modality)})
                case TextPart(text):
                    content.append({"type": "text", "text": self._quote(text, quoted)})
                case CallPart() if self._template.has_calls:
                    calls.append(self._quote_in(_as_call(part), quoted))
                case CallPart(name, arguments):
                    call = f'{{"name": {_encode(name)}, "arguments": {arguments}}}'
                    text = f"<tool_call>\n{call}\n</tool_call>"
                    text = f"\n{text}" if content else text
                    content.append({"type": "text", "text": self._quote(text, quoted)})
        is_known = message.role != "tool" or self._template.has_tool_role or self._as_vllm
        # The renderer for vLLM takes any role, which a template may write.
        role = self._quote(message.role, quoted) if is_known else "user"
        written: dict[str, Any] = {"role": role, "content": content}
        if calls:
            written["tool_calls"] = calls
        return written | self._quote_in(message.extra, quoted) if message.extra else written

    def _quote(self, text: str, quoted: list[str]) -> str:
        """Return ``text``, or a placeholder for it if it spells out a special token."""
        if not any(special in text for special in self._special) and STAND_IN not in text:
            return text
        quoted.append(text)
        return f"{STAND_IN}{len(quoted) - 1}{STAND_IN}"

    def _quote_in(self, value: Any, quoted: list[str]) -> Any:
        """Quote all text within a value, which is not deeply nested."""
        match value:
            case str():
                return self._quote(value, quoted)
            case Mapping():
                return {
                    self._quote(key, quoted): self._quote_in(each, quoted)
                    for key, each in value.items()
                }
            case list():
                return [self._quote_in(each, quoted) for each in value]
        return value

    def _encode(self, rendered: str, quoted: list[str], tenant: str) -> list[int]:
        token_ids: list[int] = []
        with _naming_surrogates():
            for index, piece in enumerate(rendered.split(STAND_IN)):
                if index % 2:
                    text, tokenizer = quoted[int(piece)], self._plain_tokenizer
                    token_ids += tokenizer.encode(text, add_special_tokens=False).ids
                else:
                    token_ids += self._segments.tokens(piece, tenant=tenant)
        return token_ids


def _as_call(part: CallPart) -> dict[str, Any]:
    """Return a call in the format that chat templates expect: its arguments are an object."""
    try:
        arguments = json.loads(part.arguments)
    except (ValueError, RecursionError):
        arguments = part.arguments
    return {"type": "function", "function": {"name": part.name, "arguments": arguments}}


def _encode(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@contextmanager
def _naming_surrogates() -> Iterator[None]:
    """Name the error of a tokenizer.

    Raises:
        InvalidRequest: A text is not valid Unicode.
    """
    try:
        yield
    except TypeError as error:
        raise InvalidRequest(
            "a text of the messages has half of a surrogate pair, which is no Unicode character",
            param=Param.MESSAGES,
        ) from error


def _cut(token_ids: list[int], limit: int, side: str) -> list[int]:
    """Return at most ``limit`` tokens; more are cut off at this side."""
    if side == "left":
        return token_ids[max(0, len(token_ids) - limit) :]
    return token_ids[:limit]


def _ids(tokens: MediaTokens) -> tuple[int, ...]:
    """Return the existing tokens: an encoder-decoder model has none in its prompt."""
    return tuple(token for token in (tokens.marker, tokens.embed) if token >= 0)


class Detokenizer:
    """Conversion of tokens to text, piece by piece: a character comes with its last token."""

    def __init__(self, tokenizer: Tokenizer, *, skips_special: bool = True) -> None:
        """Create it; with ``skips_special``, special tokens produce no text."""
        self._tokenizer, self._skips_special = tokenizer, skips_special
        self._stream = DecodeStream(skip_special_tokens=skips_special)
        self._waiting: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._feed, token_ids))

    def flush(self) -> str:
        """Return U+FFFD for a character whose last token does not come."""
        waiting, self._waiting = self._waiting, []
        return self._tokenizer.decode(waiting, skip_special_tokens=self._skips_special)

    def _feed(self, token_id: int) -> str:
        self._waiting.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # has no class of its own: the bytes now decode to other text than before
            self._stream = DecodeStream(ids=[token_id], skip_special_tokens=self._skips_special)
            return self.flush()
        if not text:
            return ""
        self._waiting.clear()
        return text

    def text_of(self, token_id: int) -> str:
        """Return the text of one token, as inside a text; U+FFFD for a part of a character."""
        # Tokenizers drop the space before the first word of a text.
        once, twice = (
            self._tokenizer.decode([token_id] * times, skip_special_tokens=False)
            for times in (1, 2)
        )
        return twice[len(once) :]


class _Generation(msgspec.Struct):
    """Fields of ``generation_config.json``; ``null`` means the default."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """Return the sampling of the model's ``generation_config.json``; greedy by default.

    Raises:
        ConfigError: It can't be read.
    """
    path = folder / "generation_config.json"
    try:
        said = msgspec.convert(read_json(path) if path.exists() else {}, _Generation)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    always = SamplingDefaults(repetition_penalty=said.repetition_penalty or 1.0)
    if not said.do_sample:
        return always
    return replace(
        always,
        temperature=said.temperature or 1.0,
        top_p=said.top_p or 1.0,
        top_k=said.top_k or 0,
        min_p=said.min_p or 0.0,
    )


def check_folder(folder: Path, family: Family) -> None:
    """Check a model's folder: read all files that a frontend reads, and build a prompt.

    Raises:
        ConfigError: A file is missing or invalid, or the files do not fit together.
    """
    prompts = PromptBuilder(folder, family)
    sampling_defaults(folder)
    if any(tokens.marker_text for tokens in family.tokens.values()):
        raise ConfigError(
            f"{folder}: its chat template marks media with plain text, which only vLLM reads"
        )
    marked = [kind for kind, tokens in family.tokens.items() if tokens.marker >= 0]
    if marked and not any(prompts.can_show(kind) for kind in marked):
        raise ConfigError(
            f"{folder}: its chat template and its tokenizer leave no place for {marked[0]} items "
            f"(token {family.tokens[marked[0]].marker})"
        )
