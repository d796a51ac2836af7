"""The number of bytes that the gate charges for a forwarded item."""

from __future__ import annotations

import pytest
from PIL import Image

from afferent.config import ServeConfig
from afferent.items.forwarded import tensor_nbytes
from afferent.items.item import ReceivedItem
from afferent.media.body.raw import RawMedia
from afferent.media.headers.probe import Accepted, ForwardedHeader, ImageHeader, probe_accepted
from afferent.types import ContentKey, Modality
from tests.images import encoded

KEY = ContentKey(bytes(32))


def item(
    header: ImageHeader | ForwardedHeader | None,
    *,
    modality: Modality = Modality.IMAGE,
    nbytes: int = 1000,
) -> ReceivedItem:
    raw = RawMedia("data", nbytes, data=bytes(nbytes))
    return ReceivedItem(modality=modality, digest=b"", key=KEY, copies=[raw], header=header)


@pytest.mark.parametrize("format", ["AVIF", "TIFF", "BMP", "JPEG2000", "PPM", "TGA", "PNG"])
def test_tensor_nbytes_of_an_image_follow_its_sides(format: str) -> None:
    """The size of the file does not matter."""
    image = Image.new("RGB", (1000, 700))
    data = encoded(image, format)
    header = probe_accepted(data, ServeConfig(), Accepted.KNOWN)
    assert tensor_nbytes(item(header, nbytes=len(data))) == 1000 * 700 * 12


def test_tensor_nbytes_of_an_icon_follow_its_largest_image() -> None:
    data = encoded(Image.new("RGB", (256, 256)), "ICO", sizes=[(16, 16), (128, 128)])
    header = probe_accepted(data, ServeConfig(), Accepted.KNOWN)
    assert tensor_nbytes(item(header, nbytes=len(data))) == 128 * 128 * 12


def test_tensor_nbytes_of_an_image_with_a_side_of_one_pixel_follow_its_sides() -> None:
    data = encoded(Image.new("RGB", (1, 40)), "PNG")
    header = probe_accepted(data, ServeConfig(), Accepted.KNOWN)
    assert tensor_nbytes(item(header)) == 40 * 12


def test_tensor_nbytes_of_frames_count_all_of_them() -> None:
    frames = item(ForwardedHeader(3 * 640 * 480), modality=Modality.VIDEO)
    assert tensor_nbytes(frames) == 3 * 640 * 480 * 12


@pytest.mark.parametrize(
    ("modality", "growth"), [(Modality.IMAGE, 32), (Modality.VIDEO, 64), (Modality.AUDIO, 16)]
)
def test_tensor_nbytes_of_other_files_follow_their_size(modality: Modality, growth: int) -> None:
    assert tensor_nbytes(item(None, modality=modality)) == growth * 1000
    assert tensor_nbytes(item(ForwardedHeader(), modality=modality)) == growth * 1000
