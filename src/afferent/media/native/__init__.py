"""Compiled part: it resizes, and undoes the filters of PNG; libraries do both without it, too."""

from typing import Any

compiled: Any
"""The module `_native`; ``None`` if it could not be built."""
variant: str
"""Variant of the compiled part: the fastest that this processor has. Tests select others."""
try:
    from afferent.media.native import _native

    compiled, variant = _native, _native.VARIANTS[0]
except ImportError:
    compiled, variant = None, ""
