"""Synthetic images: one coloured shape on a background, with its right answer.

The built-in model is trained on the ``train`` split and evaluated on the ``held_out`` split. The
two share no image size, no position of the shape and no kind of background, so that a right answer
on ``held_out`` is not memorized.
"""

from __future__ import annotations

import colorsys
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Split = Literal["train", "held_out"]
Rgb = NDArray[np.float64]

SHAPES = ("circle", "square", "triangle", "star")

# Hue ranges in degrees. The gaps between them keep every colour nameable by a person.
_HUES: dict[str, tuple[float, float]] = {
    "red": (-10.0, 8.0),
    "yellow": (50.0, 63.0),
    "green": (95.0, 150.0),
    "blue": (208.0, 248.0),
    "purple": (277.0, 302.0),
}
COLOURS = tuple(_HUES)

_MIN_SIDE, _MAX_SIDE = 100, 1000
_SIDE_BAND = 25
_POSITION_CELLS = 6
_MIN_CONTRAST = 0.4
_MAX_PALE_SATURATION = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnImage:
    """Drawn image, with its colour and shape."""

    colour: str
    shape: str
    image: Image.Image

    @property
    def answer(self) -> str:
        """Expected answer of the built-in model, such as ``"a red circle"``."""
        return f"a {self.colour} {self.shape}"

    def encode(self, format: Literal["JPEG", "PNG"] = "JPEG", *, quality: int = 90) -> bytes:
        """Return the image as the bytes of a file; ``quality`` applies to JPEG."""
        out = io.BytesIO()
        self.image.save(out, format=format, **({"quality": quality} if format == "JPEG" else {}))
        return out.getvalue()


def draw_image(
    rng: np.random.Generator,
    *,
    split: Split = "held_out",
    colour: str | None = None,
    shape: str | None = None,
    max_side: int = _MAX_SIDE,
) -> DrawnImage:
    """Draw one image.

    Args:
        rng: The only source of randomness.
        split: Split of sizes, positions and backgrounds to draw from.
        colour: One of `COLOURS`; drawn at random when not given.
        shape: One of `SHAPES`; drawn at random when not given.
        max_side: Upper limit of both sides in pixels, 150 to 1000.
    """
    colour = colour or str(rng.choice(COLOURS))
    shape = shape or str(rng.choice(SHAPES))
    width, height = (_draw_side(rng, split, max_side) for _ in range(2))
    rgb = _draw_colour(rng, colour)
    background = _draw_background(rng, split, width, height, avoid=rgb)
    radius = min(width, height) * rng.uniform(0.19, 0.47)
    centre = _draw_centre(rng, split, width, height, radius)
    mask = _shape_mask(rng, shape, width, height, centre, radius)
    pixels = background * (1.0 - mask) + rgb * mask
    if rng.random() < 0.3:
        pixels = pixels + rng.normal(0.0, rng.uniform(0.005, 0.04), pixels.shape)
    return DrawnImage(colour=colour, shape=shape, image=_to_image(pixels))


def _draw_side(rng: np.random.Generator, split: Split, max_side: int) -> int:
    """Return a side in pixels; every fourth band of 25 pixels belongs to ``held_out``."""
    while True:
        side = round(math.exp(rng.uniform(math.log(_MIN_SIDE), math.log(max_side))))
        if (side // _SIDE_BAND % 4 == 1) == (split == "held_out"):
            return side


def _draw_centre(
    rng: np.random.Generator, split: Split, width: int, height: int, radius: float
) -> tuple[float, float]:
    """Return the shape's centre; every third diagonal of a 6 x 6 raster is ``held_out``."""
    while True:
        x = rng.uniform(min(radius, width / 2), max(width - radius, width / 2))
        y = rng.uniform(min(radius, height / 2), max(height - radius, height / 2))
        column = int(x / width * _POSITION_CELLS)
        row = int(y / height * _POSITION_CELLS)
        if ((column + row) % 3 == 2) == (split == "held_out"):
            return x, y


def _draw_colour(rng: np.random.Generator, colour: str) -> Rgb:
    low, high = _HUES[colour]
    if rng.random() < 0.3:  # the pure colour that most drawing programs use for the name
        pure = {"red": 0, "yellow": 60, "green": 120, "blue": 240, "purple": 300}[colour]
        value = 0.5 if colour in ("green", "purple") and rng.random() < 0.5 else 1.0
        return np.array(colorsys.hsv_to_rgb(pure / 360.0, 1.0, value))
    hue = rng.uniform(low, high) % 360.0 / 360.0
    lowest_value = 0.75 if colour == "yellow" else 0.5
    return np.array(colorsys.hsv_to_rgb(hue, rng.uniform(0.7, 1.0), rng.uniform(lowest_value, 1.0)))


def _draw_background(
    rng: np.random.Generator, split: Split, width: int, height: int, *, avoid: Rgb
) -> Rgb:
    """Return an ``(height, width, 3)`` background; all its colours are distant from ``avoid``."""
    first = _draw_background_colour(rng, avoid)
    if _saturation(first) > _MAX_PALE_SATURATION:  # two strong colours would look like shapes
        second = first * rng.uniform(0.6, 1.0)
    else:
        second = _draw_background_colour(rng, avoid, pale=True)
    names = tuple(_BACKGROUNDS[split])
    weight = _BACKGROUNDS[split][str(rng.choice(names))](rng, width, height)
    mixed = first + (second - first) * weight[..., None]
    return np.broadcast_to(mixed, (height, width, 3)).copy()


def _draw_background_colour(rng: np.random.Generator, avoid: Rgb, *, pale: bool = False) -> Rgb:
    """Return a colour that is clearly not ``avoid``; with ``pale``, never a strong one."""
    while True:
        kind = rng.random()
        if kind < 0.25:
            rgb = np.full(3, rng.uniform(0.0, 1.0))
        elif kind < 0.4:
            rgb = np.full(3, float(rng.integers(2)))
        elif kind < 0.85 or pale:
            saturation = rng.uniform(0.0, _MAX_PALE_SATURATION)
            rgb = np.array(colorsys.hsv_to_rgb(rng.random(), saturation, rng.uniform(0.1, 1.0)))
        else:
            rgb = rng.random(3)
        near = float(np.linalg.norm(rgb - avoid)) < _MIN_CONTRAST
        same_hue = _saturation(rgb) > 0.25 and _hue_distance(rgb, avoid) < 45.0
        if not near and not same_hue:
            return rgb


def _saturation(rgb: Rgb) -> float:
    return colorsys.rgb_to_hsv(*rgb.tolist())[1]


def _hue_distance(a: Rgb, b: Rgb) -> float:
    """Return the degrees between two hues, 0 to 180."""
    hue_a, hue_b = (colorsys.rgb_to_hsv(*rgb.tolist())[0] * 360.0 for rgb in (a, b))
    return abs((hue_a - hue_b + 180.0) % 360.0 - 180.0)


Weights = NDArray[np.float64]  # (height, width), 0 to 1: the share of the second colour


def _axes(width: int, height: int) -> tuple[Weights, Weights]:
    y, x = np.mgrid[0.0 : 1.0 : height * 1j, 0.0 : 1.0 : width * 1j]
    return x, y


def _plain(rng: np.random.Generator, width: int, height: int) -> Weights:
    return np.zeros((height, width))


def _gradient(rng: np.random.Generator, width: int, height: int) -> Weights:
    x, y = _axes(width, height)
    angle = rng.uniform(0.0, 2.0 * math.pi)
    ramp = x * math.cos(angle) + y * math.sin(angle)
    scaled: Weights = (ramp - ramp.min()) / max(float(np.ptp(ramp)), 1e-9)
    return scaled


def _noise(rng: np.random.Generator, width: int, height: int) -> Weights:
    return rng.random((height, width))


def _patches(rng: np.random.Generator, width: int, height: int) -> Weights:
    """Return soft patches: a coarse random raster, enlarged smoothly."""
    coarse = rng.random((int(rng.integers(2, 9)), int(rng.integers(2, 9)))).astype(np.float32)
    enlarged = Image.fromarray(coarse, mode="F").resize((width, height), Image.Resampling.BICUBIC)
    return np.clip(np.asarray(enlarged, dtype=np.float64), 0.0, 1.0)


def _stripes(rng: np.random.Generator, width: int, height: int) -> Weights:
    x, y = _axes(width, height)
    angle, num_stripes = rng.uniform(0.0, math.pi), rng.uniform(2.0, 12.0)
    wave = np.sin(2.0 * math.pi * num_stripes * (x * math.cos(angle) + y * math.sin(angle)))
    return (wave > 0.0).astype(np.float64)


def _checker(rng: np.random.Generator, width: int, height: int) -> Weights:
    x, y = _axes(width, height)
    columns, rows = rng.integers(2, 9, size=2)
    squares: Weights = ((x * columns).astype(int) + (y * rows).astype(int)) % 2.0
    return squares


def _glow(rng: np.random.Generator, width: int, height: int) -> Weights:
    """Return a round gradient around a random point."""
    x, y = _axes(width, height)
    distance = np.hypot(x - rng.random(), y - rng.random())
    scaled: Weights = np.clip(distance / rng.uniform(0.5, 1.2), 0.0, 1.0)
    return scaled


def _clouds(rng: np.random.Generator, width: int, height: int) -> Weights:
    """Return soft patches of several scales on top of each other, as in a sky or a wall."""
    total = np.zeros((height, width))
    for octave in range(4):
        cells = 2 ** (octave + 1)
        coarse = rng.random((cells, cells)).astype(np.float32)
        enlarged = Image.fromarray(coarse, mode="F").resize(
            (width, height), Image.Resampling.BICUBIC
        )
        total += np.asarray(enlarged, dtype=np.float64) / 2.0**octave
    scaled: Weights = (total - total.min()) / max(float(np.ptp(total)), 1e-9)
    return scaled


_BACKGROUNDS: dict[Split, dict[str, Callable[[np.random.Generator, int, int], Weights]]] = {
    "train": {
        "plain": _plain,
        "gradient": _gradient,
        "noise": _noise,
        "patches": _patches,
        "stripes": _stripes,
    },
    "held_out": {"checker": _checker, "glow": _glow, "clouds": _clouds},
}

# Corners on the unit circle: (number of corners, radius of every second corner or None).
_CORNERS: dict[str, tuple[int, float | None]] = {
    "square": (4, None),
    "triangle": (3, None),
    "star": (10, 0.42),
}


def _shape_mask(
    rng: np.random.Generator,
    shape: str,
    width: int,
    height: int,
    centre: tuple[float, float],
    radius: float,
) -> Weights:
    """Return ``(height, width, 1)``, 1 inside the shape, smooth at its edge."""
    scale = 2 if max(width, height) < 400 else 1
    x, y, r = centre[0] * scale, centre[1] * scale, radius * scale
    canvas = Image.new("L", (width * scale, height * scale), 0)
    pen = ImageDraw.Draw(canvas)
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=255)
    else:
        num_corners, inner = _CORNERS[shape]
        # Half of all shapes stand upright, as people draw them.
        upright = math.pi / 4 if shape == "square" else -math.pi / 2
        turn = upright if rng.random() < 0.5 else rng.uniform(0.0, 2.0 * math.pi)
        corners = []
        for i in range(num_corners):
            reach = r * inner if inner is not None and i % 2 else r
            angle = turn + 2.0 * math.pi * i / num_corners
            corners.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
        pen.polygon(corners, fill=255)
    if scale > 1:
        canvas = canvas.resize((width, height), Image.Resampling.BOX)
    return np.asarray(canvas, dtype=np.float64)[..., None] / 255.0


def _to_image(pixels: Rgb) -> Image.Image:
    return Image.fromarray((np.clip(pixels, 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8), mode="RGB")
