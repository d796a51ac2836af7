"""Sizes as people write them."""

from __future__ import annotations

import re

from afferent.errors import ConfigError
from afferent.types import GiB, KiB, MiB

_UNITS = {"": 1, "kib": KiB, "mib": MiB, "gib": GiB, "k": KiB, "m": MiB, "g": GiB}


def parse_nbytes(text: str) -> int:
    """``"512MiB"``, ``"2 GiB"`` or ``"1048576"`` as bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{text!r} is not a size: write bytes, KiB, MiB or GiB, such as 512MiB")
    return int(float(match[1]) * unit)


def format_nbytes(nbytes: int) -> str:
    """The shortest text that `parse_nbytes` reads as the same."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return str(nbytes)
