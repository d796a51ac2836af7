"""Media handles: a signed handle is read back as it was, and any other one is refused."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afferent.engines.references import (
    NUMBER_RUN,
    SCHEME,
    FeaturesReference,
    RawReference,
    sign,
    verify,
)
from afferent.errors import FormatError, MediaTooLarge
from afferent.types import Handle, Modality

SECRET, OTHER = bytes(range(32)), bytes(32)
HANDLE = Handle(3, 4096, 6400, 17)


def features(**changes: object) -> FeaturesReference:
    values: dict[str, object] = {
        "modality": Modality.IMAGE,
        "key": bytes(range(32)),
        "handle": HANDLE,
        "marker": (5,),
        "embed": 5,
        "prompt": ((5, 64),),
        "small": {"image_grid_thw": [1, 16, 16]},
        "expires_s": 1000.0,
    }
    return FeaturesReference(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "reference", [features(), RawReference(Modality.AUDIO, HANDLE, 12, 300, 1000.0)]
)
def test_what_is_signed_comes_back(reference: FeaturesReference | RawReference) -> None:
    url = sign(reference, SECRET)
    assert url.startswith(SCHEME)
    assert len(url) < 300
    assert verify(url, SECRET, now_s=999.0) == reference


def test_video_of_768_frames_comes_back() -> None:
    """Each pair of frames has a text with its time; 270 s of a video were refused by the plugin."""
    times = [(1000 + digit, 1) for digit in range(10)]
    prompt = tuple(run for _ in range(384) for run in (*times, (5, 400)))
    url = sign(features(prompt=prompt), SECRET)
    assert len(url) > 16_384
    verified = verify(url, SECRET, now_s=999.0)
    assert isinstance(verified, FeaturesReference)
    assert verified.prompt == prompt
    with pytest.raises(MediaTooLarge):
        sign(features(prompt=prompt * 8), SECRET)


def test_it_expires_and_is_of_one_secret() -> None:
    url = sign(features(), SECRET)
    with pytest.raises(FormatError, match="expired"):
        verify(url, SECRET, now_s=1000.0)
    with pytest.raises(FormatError, match="not made here"):
        verify(url, OTHER, now_s=1.0)


@given(st.data())
def test_whatever_is_changed_is_refused(data: st.DataObject) -> None:
    """The MAC covers every bit."""
    raw = bytearray(base64.urlsafe_b64decode(sign(features(), SECRET)[len(SCHEME) :]))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(FormatError):
        verify(SCHEME + base64.urlsafe_b64encode(raw).decode(), SECRET, now_s=1.0)


@given(st.text(max_size=200))
def test_other_text_is_refused(text: str) -> None:
    for url in (text, SCHEME + text, SCHEME):
        with pytest.raises(FormatError):
            verify(url, SECRET, now_s=1.0)


_OTHER_BLOCKS = (Handle(3, 4096, 6400, 18), Handle(4, 4096, 6400, 17))


def test_name_contains_no_block() -> None:
    assert features().name == bytes(range(32)).hex()
    assert {features(handle=each).name for each in _OTHER_BLOCKS} == {features().name}
    assert features(key=bytes(32)).name == "00" * 32


def test_name_of_block_is_of_one_generation() -> None:
    """Results of lost features must not be found for the new ones."""
    references = [
        *(features(), features(key=bytes(32))),
        *(features(handle=each) for each in _OTHER_BLOCKS),
    ]
    found = {each.name_of_block for each in references}
    assert len(found) == 4
    assert all(len(bytes.fromhex(name)) == 32 and name == name.lower() for name in found)


def test_tokens_and_rows() -> None:
    tiled = features(marker=(9,), embed=7, prompt=((3, 1), (7, 4), (2, 1), (7, 4), (4, 1)))
    assert tiled.num_embeds == 8
    assert tiled.token_ids() == [3, 7, 7, 7, 7, 2, 7, 7, 7, 7, 4]
    assert not tiled.is_numbered
    numbered = features(marker=(9,), embed=7, prompt=((3, 1), NUMBER_RUN, (0, 1), (7, 2)))
    assert numbered.is_numbered
    assert numbered.num_embeds == 2
    assert numbered.token_ids([8, 5]) == [3, 8, 5, 0, 7, 7]
