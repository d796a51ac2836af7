"""A training process of `benchmarks.rollouts`, which keeps the features of its rollouts.

    python -m benchmarks.rollout_holder

Its input are pickles: the image of each rollout, as features or as a reference, and ``None``, which
it answers with `Held` in JSON.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from afferent import SharedItem


class Held(Struct):
    """Features since the former answer.

    Attributes:
        open_ms: Time for each image until there were arrays.
        total: Sum of all values, which were read for it.
    """

    open_ms: list[float] = []
    total: int = 0


def total_of(features: Mapping[str, Any]) -> int:
    """Read all features of an image; return the sum of their values."""
    return sum(int(array.sum()) for array in features.values())


def main() -> None:
    kept, held = [], Held()
    with contextlib.suppress(EOFError):
        while True:
            image = pickle.load(sys.stdin.buffer)  # noqa: S301 - of our own parent
            if image is None:
                sys.stdout.buffer.write(msgspec.json.encode(held) + b"\n")
                sys.stdout.buffer.flush()
                held = Held()
                continue
            start = time.perf_counter()
            features = image.features() if isinstance(image, SharedItem) else image
            held.open_ms.append((time.perf_counter() - start) * 1e3)
            held.total += total_of(features)
            kept.append(features)


if __name__ == "__main__":
    main()
