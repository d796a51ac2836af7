"""A bare process for `benchmarks.preprocess`: it makes features as engines do, or only decodes.

    python -m benchmarks.bare MODE NUM_THREADS FOLDER

Each line of its input has a number of pictures and the files to take them from; each line of its
output has the seconds that they took. ``MODE`` is one of

- ``hf``: Pillow, then the model's own processor, as in vLLM, SGLang and LMDeploy, on a thread or a
  pool of threads;
- ``decode``: Afferent's decoders alone.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor

from afferent.config import Limits
from afferent.media.decode.image import decode_image, read_image_header

Work = Callable[[bytes], Any]


def main() -> None:
    mode, num_threads, folder = sys.argv[1:]
    torch.set_num_threads(1)
    work = _decode if mode == "decode" else _hugging_face(folder)
    print("ready", flush=True)
    with ThreadPoolExecutor(int(num_threads)) as threads:
        run = map if num_threads == "1" else threads.map
        for line in sys.stdin:
            number, *files = line.split()
            pictures = [Path(file).read_bytes() for file in files]
            start = time.perf_counter()
            for _ in run(work, [pictures[i % len(pictures)] for i in range(int(number))]):
                pass
            print(time.perf_counter() - start, flush=True)


def _decode(data: bytes) -> None:
    limits = Limits()
    decode_image(memoryview(data), read_image_header(data, limits), limits)


def _hugging_face(folder: str) -> Work:
    processor = AutoImageProcessor.from_pretrained(folder)

    def work(data: bytes) -> Any:
        with Image.open(io.BytesIO(data)) as image:
            return processor(images=image.convert("RGB"), return_tensors="pt")

    return work


if __name__ == "__main__":
    main()
