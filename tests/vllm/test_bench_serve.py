"""vLLM's own benchmark client runs unmodified through a gateway to two servers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.server import Server
from tests.vllm.servers import ENV, SHAPES, python

pytestmark = pytest.mark.vllm

NUM_PROMPTS, NUM_IMAGES = 20, 2
SENT = 'afferent_items_total{modality="image",outcome="made"}'


def test_random_images_come_through_a_gateway(tmp_path: Path) -> None:
    with Server() as one, Server() as other:
        urls = f"{one.url},{other.url}"
        with Server("--engine", "openai", "--engine-url", urls) as gateway:
            command = [str(python()), "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
            command += ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
            command += ["--base-url", gateway.url, "--model", "shapes", "--tokenizer", str(SHAPES)]
            command += ["--dataset-name", "random-mm", "--num-prompts", str(NUM_PROMPTS)]
            command += ["--random-input-len", "20", "--random-output-len", "8"]
            command += ["--random-mm-base-items-per-request", str(NUM_IMAGES)]
            command += ["--random-mm-num-mm-items-range-ratio", "0"]
            command += ["--random-mm-limit-mm-per-prompt", '{"image": 4, "video": 0}']
            command += ["--random-mm-bucket-config", "{(256, 256, 1): 1.0}"]
            command += ["--save-result", "--result-dir", str(tmp_path)]
            command += ["--result-filename", "result.json"]
            done = subprocess.run(
                command,
                env={**os.environ, **ENV},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr[-3000:]
            result = json.loads((tmp_path / "result.json").read_text())
            made = [each.metrics().get(SENT, 0) for each in (one, other)]
    print({name: result[name] for name in ("completed", "failed", "mean_ttft_ms")})
    assert (result["completed"], result["failed"]) == (NUM_PROMPTS, 0)
    assert sum(made) == NUM_PROMPTS * NUM_IMAGES
    assert min(made) > 0, "both servers get images"
