"""Variants of the compiled part, as parameters of tests, and memory whose end is guarded."""

from __future__ import annotations

import subprocess
import sys

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

_GUARDED = """
import ctypes, mmap, sys
import numpy as np
from afferent.media import native

def before_a_guarded_page():
    size = 4 * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin + size), mmap.PAGESIZE, 0) == 0
    return np.frombuffer(memory, np.uint8, size)
"""


def assert_ends_well(program: str, variant: str) -> None:
    """Run lines that call ``before_a_guarded_page``; ``sys.argv[1]`` is the variant."""
    command = [sys.executable, "-c", f"{_GUARDED}{program}print('done')", variant]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
