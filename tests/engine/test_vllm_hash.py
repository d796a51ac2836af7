"""Names of images as a stock vLLM computes them; tests/vllm/test_render.py compares the two."""

from __future__ import annotations

import io
import re

import pytest
from PIL import Image

from afferent.engines.vllm_hash import image_hash
from afferent.errors import InvalidMedia, UnsupportedMedia
from afferent.media.headers.header import is_read_as_rgb
from tests.images import encoded, in_mode, photo

MODES = {
    "PNG": ("RGB", "L", "P", "RGBA", "LA", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
}
CASES = [(format_, mode) for format_, modes in MODES.items() for mode in modes]


@pytest.mark.parametrize(("format_", "mode"), CASES)
def test_is_read_as_rgb_agrees_with_pillow(format_: str, mode: str) -> None:
    options = [{"lossless": True}, {"lossless": False}] if format_ == "WEBP" else [{}]
    for each in options:
        data = encoded(in_mode(photo(40, 30), mode), format_, **each)
        assert is_read_as_rgb(data) == (Image.open(io.BytesIO(data)).mode == "RGB")


@pytest.mark.parametrize("format_", MODES)
def test_header_that_is_cut_off_is_refused(format_: str) -> None:
    data = encoded(in_mode(photo(40, 30), MODES[format_][0]), format_)
    for length in range(len(data[:60])):
        try:
            found = is_read_as_rgb(data[:length])
        except (InvalidMedia, UnsupportedMedia):
            continue
        assert found == is_read_as_rgb(data), length


def test_image_hash_depends_on_file_model_and_algorithm() -> None:
    rgb, grey = (encoded(in_mode(photo(40, 30), mode), "PNG") for mode in ("RGB", "L"))
    names = {
        image_hash(file, model=model, algorithm=algorithm)
        for file in (rgb, grey)
        for model in ("a", "b")
        for algorithm in ("blake3", "sha256", "sha512")
    }
    assert len(names) == 12
    assert all(re.fullmatch("[0-9a-f]{64}([0-9a-f]{64})?", name) for name in names)
    again = image_hash(memoryview(rgb), model="a", algorithm="blake3")
    assert again in names
