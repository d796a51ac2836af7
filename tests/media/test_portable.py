"""The sums of `native/portable.c`, for machines without AVX2, with the sanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

SOURCES = Path(__file__).parents[2] / "src/afferent/media/native"
LANES = 16

PROGRAM = """
#include <stdio.h>
#include <stdlib.h>
#include "portable.c"

/* TAPS SHIFT WEIGHT..., and TAPS times 16 bytes on standard input. */
int main(int argc, char **argv) {
    const int taps = atoi(argv[1]), shift = atoi(argv[2]);
    int32_t weights[64], packed[64];
    uint8_t from[(64 + SPARE_TAPS) * LANES] = {0}, out[LANES];
    for (int i = 0; i < taps; i++) weights[i] = (int32_t)strtol(argv[3 + i], NULL, 10);
    if (fread(from, LANES, (size_t)taps, stdin) != (size_t)taps) return 3;
    pack(weights, taps, 1, packed);
    weigh(from, LANES, packed, taps, 1, shift, out);
    fwrite(out, 1, LANES, stdout);
    return 0;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no compiler here")
    folder = tmp_path_factory.mktemp("portable")
    (folder / "main.c").write_text(PROGRAM)
    flags = ["-std=c11", "-O1", f"-I{SOURCES}"]
    flags += ["-fsanitize=undefined", "-fno-sanitize-recover=undefined"]
    built = subprocess.run(
        [compiler, *flags, "main.c", "-o", "main"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    if "ubsan" in built.stderr:
        pytest.skip("the compiler has no sanitizer")
    assert built.returncode == 0, built.stderr
    return folder / "main"


def wrapped(weights: list[int], rows: np.ndarray, shift: int) -> np.ndarray:
    """Return wrapping 32-bit sums, rounded and clipped to bytes."""
    with np.errstate(over="ignore"):
        sums = np.full(LANES, 1 << (shift - 1), np.uint32)
        for weight, row in zip(weights, rows, strict=True):
            sums += np.uint32(weight % 2**32) * row.astype(np.uint32)
    return np.clip(sums.view(np.int32) >> shift, 0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    ("weights", "shift"),
    [
        ([1 << 22], 22),  # weight 1
        ([-(1 << 19), 5 << 20, -(1 << 19)], 22),  # a filter with negative lobes
        ([1 << 13] * 8, 16),
        ([2**31 - 1, 2**31 - 1], 30),
        ([-(2**31), 2**31 - 1, -(2**31)], 22),
        ([2**30] * 63, 1),
    ],
)
def test_weigh_portable_has_no_undefined_overflow(
    program: Path, weights: list[int], shift: int
) -> None:
    rows = np.random.default_rng(len(weights)).integers(0, 256, (len(weights), LANES), np.uint8)
    rows[:, 0], rows[:, 1] = 255, 0
    command = [str(program), str(len(weights)), str(shift), *map(str, weights)]
    done = subprocess.run(command, input=rows.tobytes(), capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == wrapped(weights, rows, shift).tobytes()
