"""Animated GIF and WebP files for tests, honest and hostile."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.images import photo, riff_chunk, webp

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class GifFrame:
    """Frame of a GIF file.

    Attributes:
        at: Its corner on the canvas.
        pixels: Indices into the palette, ``(height, width)``.
        delay: In hundredths of a second; ``None``: the frame has no control block.
        disposal: 0 to 3, as in the format.
        transparent: Index of the transparent colour.
        palette: Palette of its own, ``(256, 3)``.
    """

    pixels: Pixels
    at: tuple[int, int] = (0, 0)
    delay: int | None = 10
    disposal: int = 0
    transparent: int | None = None
    palette: Pixels | None = None


def gif(
    size: tuple[int, int], frames: Sequence[GifFrame], palette: Pixels, *, extra: bytes = b""
) -> bytes:
    """Return a GIF file.

    Args:
        palette: ``(256, 3)``, for all frames without one.
        extra: Blocks before each frame.
    """
    head = b"GIF89a" + struct.pack("<HHBBB", *size, 0xF7, 0, 0) + palette.tobytes()
    return head + b"".join(extra + _gif_frame(frame) for frame in frames) + b";"


def _gif_frame(frame: GifFrame) -> bytes:
    control = b""
    if frame.delay is not None:
        flags = frame.disposal << 2 | (frame.transparent is not None)
        control = b"!\xf9\4" + struct.pack("<BHBB", flags, frame.delay, frame.transparent or 0, 0)
    height, width = frame.pixels.shape
    flags = 0 if frame.palette is None else 0x87
    own = b"" if frame.palette is None else frame.palette.tobytes()
    place = b"," + struct.pack("<4HB", *frame.at, width, height, flags)
    return control + place + own + b"\x08" + _blocks(_packed(frame.pixels))


def _packed(pixels: Pixels) -> bytes:
    """Return pixels as codes of 9 bits, with a clear code before these would need 10."""
    codes: list[int] = []
    for index, value in enumerate(pixels.ravel().tolist()):
        codes += [256, value] if index % 250 == 0 else [value]
    bits = sum(code << 9 * index for index, code in enumerate([*codes, 257]))
    return bits.to_bytes((9 * (len(codes) + 1) + 7) // 8, "little")


def _blocks(data: bytes) -> bytes:
    pieces = [data[start : start + 255] for start in range(0, len(data), 255)]
    return b"".join(bytes([len(piece)]) + piece for piece in pieces) + b"\0"


def comment(data: bytes) -> bytes:
    """Return a comment block of a GIF file."""
    return b"!\xfe" + _blocks(data)


def palette(seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (256, 3), dtype=np.uint8)


def drawn_gif(rng: np.random.Generator, *, num_frames: int = 8) -> bytes:
    """Return a GIF file whose frames are of all kinds: in parts, transparent, with palettes."""
    width, height = (int(each) for each in rng.integers(8, 40, 2))
    frames = []
    for _ in range(num_frames):
        across, down = (int(rng.integers(1, side + 1)) for side in (width, height))
        at = int(rng.integers(0, width - across + 1)), int(rng.integers(0, height - down + 1))
        frames.append(
            GifFrame(
                pixels=rng.integers(0, 256, (down, across), dtype=np.uint8) // 16,
                at=at,
                delay=int(rng.integers(0, 30)) if rng.random() < 0.9 else None,
                disposal=int(rng.integers(0, 4)),
                transparent=int(rng.integers(0, 16)) if rng.random() < 0.6 else None,
                palette=palette(int(rng.integers(1000))) if rng.random() < 0.3 else None,
            )
        )
    return gif((width, height), frames, palette(), extra=comment(b"a comment" * 40))


def moving_webp(num_frames: int = 6, *, durations: list[int] | int = 100, lossless: bool) -> bytes:
    """Return a WebP file with transparent frames that are blended."""
    frames = []
    for index in range(num_frames):
        frame = Image.new("RGBA", (48, 32), (0, 0, 0, 0))
        frame.paste(photo(16, 12, index).convert("RGBA"), (4 * index, 3 * index))
        frames.append(frame)
    return saved("WEBP", frames, duration=durations, lossless=lossless)


def saved(format: str, frames: Sequence[Image.Image], **options: object) -> bytes:
    """Return a file with these frames, as Pillow writes it."""
    file = io.BytesIO()
    first, *others = frames
    first.save(file, format, save_all=True, append_images=others, **options)
    return file.getvalue()


def pillows_frames(data: bytes) -> list[Pixels]:
    """Return the frames of a file by Pillow, over white."""
    frames: list[Pixels] = []
    with Image.open(io.BytesIO(data)) as image:
        for number in range(getattr(image, "n_frames", 1)):
            image.seek(number)
            layer = image.convert("RGBA")
            canvas = Image.new("RGBA", layer.size, "white")
            canvas.alpha_composite(layer)
            frames.append(np.asarray(canvas.convert("RGB")))
    return frames


def hostile_animations() -> Iterator[tuple[str, bytes]]:
    """Yield files that are broken, or cost more than they should."""
    dot = GifFrame(pixels=np.zeros((2, 2), np.uint8))
    frame = _gif_frame(dot)
    head, end = gif((2, 2), [dot], palette()).split(frame)
    honest = drawn_gif(np.random.default_rng(3))
    moving = moving_webp(lossless=True)
    yield "100,000 frames", head + frame * 100_000 + end
    yield "huge canvas", gif((65_535, 65_535), [dot] * 2, palette())
    yield (
        "huge frame",
        gif((8, 8), [dot, GifFrame(pixels=dot.pixels, at=(65_000, 65_000))], palette()),
    )
    yield "no frame", head + end
    yield "many empty comments", head + b"!\xfe\0" * 3_000_000 + frame + end
    yield "tiny blocks", head + b"!\xfe" + b"\1a" * 4_500_000 + b"\0" + frame + end
    yield "no pixels", head + frame[:-6] + b"\0" + frame + end
    yield "zero-size canvas", gif((0, 0), [GifFrame(pixels=np.zeros((1, 1), np.uint8))], palette())
    yield "WebP with 100,000 frames", many_webp_frames(100_000)
    yield (
        "WebP with a huge canvas",
        webp(
            [riff_chunk(b"VP8X", b"\2\0\0\0" + b"\xff\x3f\0" * 2), riff_chunk(b"ANIM", b"\0" * 6)]
        ),
    )
    yield "WebP without frames", moving[:44]
    for name, file in (("GIF", honest), ("WebP", moving)):
        for cut in (7, 14, 30, len(file) // 2, len(file) - 3):
            yield f"{name} cut at {cut}", file[:cut]


def many_webp_frames(number: int) -> bytes:
    """Return an animated WebP file with frames that are not there."""
    frame = riff_chunk(b"ANMF", b"\0" * 16)
    return webp(
        [
            riff_chunk(b"VP8X", b"\2\0\0\0" + b"\x0f\0\0" * 2),
            riff_chunk(b"ANIM", b"\0" * 6),
            frame * number,
        ]
    )
