"""Tokens of a prompt by its segments are those of the whole text, with any tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from afferent.builtin.pipeline import segment_tokens
from afferent.builtin.pipeline.segment_tokens import SegmentTokens
from afferent.media.families.tokenizer import read_tokenizer
from afferent.operations.supervisor.checks import BUILT_IN_MODELS

WORDS = ("one", "two", "e", "é", "\N{COMBINING ACUTE ACCENT}", " ", "  ", "\n", "▁", ".", "A")
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "<|im", "[X]", "[L]", "[R]", "[N]")


def wordpieces(**normalizer: Any) -> Tokenizer:
    pieces = ["[UNK]", "o", "n", "e", "t", "w", "##n", "##e", "##w", "##o", ".", "a", "A", "▁", "é"]
    made = Tokenizer(models.WordPiece({each: at for at, each in enumerate(pieces)}))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.normalizer = normalizers.BertNormalizer(**normalizer)
    return made


def characters(pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    """Return a tokenizer of single characters, with two merges."""
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), "▁", *"é.", "\n", " "]
    vocabulary = {each: at for at, each in enumerate(dict.fromkeys([*alphabet, "on", "one"]))}
    made = Tokenizer(models.BPE(vocabulary, [("o", "n"), ("on", "e")]))
    made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    return made


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: characters(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "bytes, prefix": lambda: characters(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "first": lambda: characters(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "always": lambda: characters(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "never": lambda: characters(pre_tokenizers.Metaspace(prepend_scheme="never")),
    "prepend": lambda: characters(pre_tokenizers.Split(" ", "isolated"), normalizers.Prepend("▁")),
    "strip": lambda: characters(
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]),
    ),
    "words": lambda: wordpieces(lowercase=True),
}


def with_special(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL[:5]])
    tokenizer.add_special_tokens(
        [
            AddedToken("[L]", special=True, lstrip=True),
            AddedToken("[R]", special=True, rstrip=True),
            AddedToken("[N]", special=True, normalized=True),
        ]
    )
    return tokenizer


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.lists(st.sampled_from([*WORDS, *SPECIAL]), max_size=30).map("".join))
def test_tokens_are_those_of_the_whole_text(name: str, text: str) -> None:
    tokenizer = with_special(TOKENIZERS[name]())
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    segments = SegmentTokens(tokenizer)
    for _ in range(2):
        assert segments.tokens(text, tenant="") == expected


def test_built_in_models_have_segments() -> None:
    for folder in BUILT_IN_MODELS.iterdir():
        if (folder / "tokenizer.json").exists():
            assert SegmentTokens(read_tokenizer(folder))._is_sound


class Counting:
    """Tokenizer that counts its texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.texts = tokenizer, list[str]()

    def encode(self, text: str, **options: Any) -> Any:
        self.texts.append(text)
        return self._tokenizer.encode(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_only_new_segments_are_encoded_for_each_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    counting: Any = Counting(with_special(TOKENIZERS["bytes"]()))
    segments = SegmentTokens(counting)
    counting.texts.clear()

    def encoded(text: str, tenant: str = "a") -> list[str]:
        segments.tokens(text, tenant=tenant)
        new, counting.texts = counting.texts, []
        return new

    assert encoded("one<s>two") == ["one", "<s>two"]
    assert encoded("one<s>two<s>") == ["<s>"]
    assert encoded("one<s>two", tenant="b") == ["one", "<s>two"]
    long = "<s>" + "e" * 3000
    assert encoded(long) == encoded(long) == [long]
    monkeypatch.setattr(segment_tokens, "_MOST_SEGMENTS", 5)
    assert encoded("one") == []
    assert encoded("[X]three<s>four") == ["[X]three", "<s>four"]
    assert encoded("one[X]three<s>four") == []  # the last used are kept


def test_segments_of_many_threads_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_tokens, "_MOST_IN_ALL", 40)
    tokenizer = with_special(TOKENIZERS["bytes"]())
    segments, texts = SegmentTokens(tokenizer), [f"<s>{'e' * number}" for number in range(20)]
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]

    def encoded(_: int) -> list[list[int]]:
        return [segments.tokens(text, tenant="") for text in texts]

    with ThreadPoolExecutor(4) as threads:
        assert all(found == expected for found in threads.map(encoded, range(40)))
    assert sum(len(text) for _, text in segments._known) == segments._num_characters <= 40
