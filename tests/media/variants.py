"""Variants of the compiled part, as parameters of tests."""

from __future__ import annotations

import pytest

from afferent.media import native

VARIANTS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            native.compiled is None or name not in native.compiled.VARIANTS,
            reason="there is no compiled part, or the processor lacks the variant",
        ),
    )
    for name in ("avx512", "avx2", "portable")
]
