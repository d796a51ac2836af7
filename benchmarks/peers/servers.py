"""The compared servers: vLLM's, also with its best settings, and Afferent's."""

from __future__ import annotations

import contextlib
import getpass
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from afferent.types import MiB
from benchmarks.children import command, cpu_s, free_port, wait_until_it_answers
from benchmarks.gate_memory import pss_nbytes, trees
from tools import vllm_env

ARENA_NBYTES = 1024 * MiB
MODEL = "pages"
_START_TIMEOUT_S = 300.0
_LONGEST_EDGE = 28 * 28 * 4096
_ENGINE = re.compile(r"VLLM::(EngineCore|Worker)")
_WORKER = re.compile(r"VLLM::Worker")
_QUEUE = re.compile(r"^vllm:request_queue_time_seconds_sum\S* (\S+)$", re.MULTILINE)
_NO_VIDEO = ("--limit-mm-per-prompt", '{"video":0}')
BEST = ("--api-server-count", "2", "--mm-processor-cache-type", "shm")


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the layers of a Qwen2.5-VL."""

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    dtype: str


TINY = Size(
    text={
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_theta": 10_000.0, "mrope_section": [8, 4, 4]},
    },
    vision={
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [],
    },
    dtype="float32",
)
"""A model so small that the engine does not dominate the results: only window attention."""
REAL = Size(
    text={
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_theta": 1_000_000.0, "mrope_section": [16, 24, 24]},
    },
    vision={
        "depth": 32,
        "hidden_size": 1280,
        "num_heads": 16,
        "intermediate_size": 3420,
        "out_hidden_size": 2048,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    dtype="bfloat16",
)
"""The layers of Qwen2.5-VL-3B."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device of the engines: the model that fits it, and vLLM's settings for it."""

    size: Size
    arguments: tuple[str, ...]
    env: Mapping[str, str]


CPU = Device(TINY, (*vllm_env.ARGUMENTS, *_NO_VIDEO), vllm_env.ENV)
GPU = Device(
    REAL,
    (
        *("--dtype", "bfloat16", "--gpu-memory-utilization", "0.4"),
        *("--kv-cache-memory-bytes", str(8192 * MiB)),
        *("--chat-template-content-format", "openai", *_NO_VIDEO),
    ),
    {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
)
"""Two servers share one GPU; each gets less than half of its memory."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in bytes; shared pages count in part."""

    outside: float
    worker: float


@dataclass(frozen=True, slots=True)
class Parts:
    """Private and shared memory of processes in bytes; shared pages count in part."""

    private: float
    shared: float


@dataclass(slots=True)
class Side:
    """A server, and the resources of its processes."""

    name: str
    url: str
    popen: subprocess.Popen[bytes]
    arena_nbytes: int = 0
    uds: str = ""
    """The socket of the vLLM behind it."""

    def cpu_s(self) -> tuple[float, float]:
        """Return the processor time so far, outside of the engine and in it."""
        outside = engine = 0.0
        for pid, line in tree(self.popen.pid):
            ticks = cpu_s(pid)
            if _ENGINE.search(line):
                engine += ticks
            else:
                outside += ticks
        return outside, engine

    def queue_s(self) -> float:
        """Return the time for which vLLM's scheduler has held requests so far, all added up."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as answer:  # noqa: S310 - ours
            return sum(float(found[1]) for found in _QUEUE.finditer(answer.read().decode()))

    def memory_parts(self) -> Parts:
        """Return the memory of all processes."""
        found = [pss_nbytes(pid) for pid, _ in tree(self.popen.pid)]
        return Parts(sum(private for private, _ in found), sum(shmem for _, shmem in found))

    def memory(self) -> Memory:
        outside = worker = shared = 0.0
        for pid, line in tree(self.popen.pid):
            private, shmem = pss_nbytes(pid)
            shared += shmem
            if _WORKER.search(line):
                worker += private
            else:
                outside += private
        return Memory(outside + max(shared, self.arena_nbytes), worker)


def make_model(
    folder: Path, size: Size = TINY, *, max_positions: int = 4096, device: str = "cpu"
) -> Path:
    """Make a Qwen2.5-VL with random weights, which takes pages at their own size.

    Its tokenizer and chat template are those of the built-in model.

    Args:
        device: Where torch draws the weights.
    """
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    target, shapes = folder / MODEL, BUILT_IN_MODELS / "shapes"
    tokenizer = Tokenizer.from_file(str(shapes / "tokenizer.json"))
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            **size.text,
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": max_positions,
            "rope_parameters": {"rope_type": "default", **size.text["rope_parameters"]},
            "eos_token_id": 2,
        },
        vision_config={**size.vision, "patch_size": 14, "window_size": 112},
        image_token_id=5,
        video_token_id=6,
        vision_start_token_id=3,
        vision_end_token_id=4,
    )
    with torch.device(device):
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.to(getattr(torch, size.dtype)).save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(shapes / name, target)
    settings = json.loads((shapes / "preprocessor_config.json").read_text())
    settings["size"]["longest_edge"] = _LONGEST_EDGE
    (target / "preprocessor_config.json").write_text(json.dumps(settings))
    return target


@contextmanager
def stock(
    name: str, python: Path, model: Path, *arguments: str, device: Device = CPU
) -> Iterator[Side]:
    """Run ``vllm serve``."""
    port = free_port()
    line = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    line += [*device.arguments, "--served-model-name", MODEL, "--port", str(port), *arguments]
    url = f"http://127.0.0.1:{port}"
    with _running(name, line, url, "/health", env=device.env) as side:
        yield side


@contextmanager
def afferent(
    python: Path,
    model: Path,
    *arguments: str,
    flags: Sequence[str] = (),
    device: Device = CPU,
) -> Iterator[Side]:
    """Run ``afferent serve``, which starts its own vLLM.

    Args:
        arguments: Of vLLM.
        flags: Of Afferent.
    """
    port = free_port()
    line = [sys.executable, "-m", "afferent.cli", "serve", str(model), "--port", str(port)]
    line += ["--engine", "vllm", "--engine-python", str(python)]
    line += [f"--engine-args={shlex.join((*device.arguments, *arguments))}"]
    line += ["--arena-nbytes", str(ARENA_NBYTES), "--embeddings-share", "0.3", *flags]
    url = f"http://127.0.0.1:{port}"
    with _running("afferent", line, url, "/ready", env=device.env) as side:
        side.arena_nbytes = ARENA_NBYTES
        side.uds = _socket_of(side.popen.pid)
        yield side


@contextmanager
def nginx(uds: str) -> Iterator[str]:
    """Run nginx in front of a server, as the least that a proxy costs; return its socket."""
    with tempfile.TemporaryDirectory() as place:
        socket_path, config = f"{place}/nginx.sock", Path(place, "nginx.conf")
        temporary = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        config.write_text(
            f"user {getpass.getuser()}; daemon off; pid {place}/pid;\n"
            "error_log stderr; worker_processes 1;\n"
            "events { worker_connections 256; }\n"
            "http { access_log off; keepalive_requests 1000000;\n"
            + "".join(f"{name}_temp_path {place}/{name};\n" for name in temporary)
            + f"upstream behind {{ server unix:{uds}; keepalive 64; }}\n"
            f"server {{ listen unix:{socket_path}; location / {{ proxy_pass http://behind;\n"
            'proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; } } }\n'
        )
        with command(["nginx", "-c", str(config)]) as popen:
            while not Path(socket_path).exists():
                if popen.poll() is not None:
                    raise RuntimeError("nginx does not start")
                time.sleep(0.01)
            yield socket_path


@contextmanager
def stock_render(python: Path, model: Path, *, core: int | None = None) -> Iterator[Side]:
    """Run ``vllm launch render``, without an engine, on one core or on all."""
    port = free_port()
    line = [
        *_bound_to(core),
        str(python),
        "-m",
        "vllm.entrypoints.cli.main",
        "launch",
        "render",
        str(model),
    ]
    line += [*CPU.arguments, "--served-model-name", MODEL, "--port", str(port)]
    with _running("vllm-render", line, f"http://127.0.0.1:{port}", "/health") as side:
        yield side


@contextmanager
def afferent_render(model: Path, *flags: str, core: int | str | None = None) -> Iterator[Side]:
    """Run ``afferent serve`` with its own engine, which gets no requests.

    Args:
        core: The only core, or those that a list like ``0-11`` names; otherwise all.
    """
    port = free_port()
    line = [*_bound_to(core), sys.executable, "-m", "afferent.cli", "serve", str(model)]
    line += ["--port", str(port), *flags]
    with _running("afferent", line, f"http://127.0.0.1:{port}", "/ready") as side:
        yield side


@contextmanager
def afferent_prompts(model: Path, *flags: str, core: int | None = None) -> Iterator[Side]:
    """Run ``afferent render`` with the hashes of vLLM, on one core or on all."""
    port = free_port()
    line = [*_bound_to(core), sys.executable, "-m", "afferent.cli", "render", str(model)]
    line += ["--port", str(port), "--render-hashes", "vllm-blake3", *flags]
    with _running("prompts", line, f"http://127.0.0.1:{port}", "/ready") as side:
        yield side


def _bound_to(core: int | str | None) -> list[str]:
    return [] if core is None else ["taskset", "-c", str(core)]


@contextmanager
def floor() -> Iterator[Side]:
    """Run a server that reads, decodes and digests, and does nothing else."""
    port = free_port()
    line = [sys.executable, "-m", "benchmarks.peers.floor", str(port)]
    with _running("floor", line, f"http://127.0.0.1:{port}", "/") as side:
        yield side


@contextmanager
def _running(
    name: str,
    line: Sequence[str],
    url: str,
    path: str,
    *,
    env: Mapping[str, str] = vllm_env.ENV,
) -> Iterator[Side]:
    log = Path(f"/tmp/afferent-bench-{name}-{url.rpartition(':')[2]}.log")  # noqa: S108 - to be looked at
    with (
        log.open("wb") as out,
        command(line, env=env, stdout=out, stderr=subprocess.STDOUT) as popen,
    ):
        wait_until_it_answers(
            popen, url + path, timeout_s=_START_TIMEOUT_S, log=f"its log is {log}"
        )
        yield Side(name, url, popen)
    log.unlink()


def tree(root: int) -> list[tuple[int, str]]:
    """Return all processes below one, itself included, with their command lines."""
    found = []
    for pid in trees([root]):
        with contextlib.suppress(OSError):  # it has just ended
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            found.append((pid, line.decode(errors="replace")))
    return found


def _socket_of(pid: int) -> str:
    """Return the socket of the vLLM below a process."""
    for _, line in tree(pid):
        if match := re.search(r"--uds (\S+)", line):
            return match[1]
    raise RuntimeError("no vLLM was found")
