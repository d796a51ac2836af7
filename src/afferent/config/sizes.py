"""Sizes in the syntax of users."""

from __future__ import annotations

import re

from afferent.errors import ConfigError
from afferent.types import GiB, KiB, MiB

_TiB = 1024 * GiB
_UNITS = {
    "": 1,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": _TiB,
    "k": KiB,
    "m": MiB,
    "g": GiB,
    "t": _TiB,
}
_DECIMAL = {"kb": ("KiB", 10**3), "mb": ("MiB", 10**6), "gb": ("GiB", 10**9), "tb": ("TiB", 10**12)}


def parse_nbytes(text: str) -> int:
    """Parse ``"512MiB"``, ``"2 GiB"`` or ``"1048576"`` as bytes.

    Raises:
        ConfigError: It is no size, or its unit is a power of ten, which is often mistaken for a
            power of two.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is not None and (decimal := _DECIMAL.get(match[2].lower())):
        name, factor = decimal
        raise ConfigError(
            f"{match[2]} is no unit here: write {match[1]}{name}, or "
            f"{int(float(match[1]) * factor)} bytes; KiB, MiB, GiB and TiB are powers of two"
        )
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{text!r} is not a size: write bytes, KiB, MiB, GiB or TiB, such as 512MiB"
        )
    return int(float(match[1]) * unit)


def format_nbytes(nbytes: int) -> str:
    """Return the shortest text that `parse_nbytes` reads as the same."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return str(nbytes)
