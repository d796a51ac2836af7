"""Arguments of ``vllm serve``, parsed by vLLM's own parser.

That parser knows underscores, abbreviations and files of arguments (``--config``); a search in the
words does not.
"""

from __future__ import annotations

import functools
import shlex
import subprocess
from typing import Final

import msgspec

from afferent.errors import ConfigError

WATCHED: Final = (
    *("uds", "host", "port", "model", "api_key", "served_model_name"),
    *("enable_mm_embeds", "enable_prompt_embeds", "enable_scale_out", "tokens_only"),
    *("trust_request_chat_template", "mm_processor_kwargs", "media_io_kwargs", "root_path"),
    *("video_pruning_rate", "tokenizer_mode", "config_format"),
    *("tokenizer", "hf_overrides", "hf_config_path"),
)
"""Attributes of the object that vLLM's parser returns."""
_TIMEOUT_S: Final = 300.0
_PARSE: Final = """
import json, sys
from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser(prog="vllm")
commands = parser.add_subparsers()
for command in cmd_init():
    command.subparser_init(commands)
watched, *words = sys.argv[1:]
usual, given = parser.parse_args(["serve", "MODEL"]), parser.parse_args(["serve", "MODEL", *words])
gone = object()
found = {n for n in watched.split() if getattr(usual, n, gone) != getattr(given, n, gone)}
print("FOUND" + json.dumps(sorted(found)))
"""


def split(text: str) -> list[str]:
    """Return the words of a text of arguments, as a shell splits them.

    Raises:
        ConfigError: A quotation mark is missing.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--engine-args can't be read: {error}") from error


@functools.lru_cache(maxsize=8)
def changed(python: str, text: str) -> frozenset[str]:
    """Return the members of `WATCHED` that some arguments change.

    It runs vLLM's parser, which takes 10 s; without arguments it returns at once.

    Args:
        python: The interpreter that has vLLM.
        text: The arguments.

    Raises:
        ConfigError: vLLM refuses them, or can't be run.
    """
    if not (words := split(text)):
        return frozenset()
    try:
        done = subprocess.run(
            [python, "-c", _PARSE, " ".join(WATCHED), *words],
            capture_output=True,
            check=False,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--engine-python {python}: can't be run: {error}") from error
    for line in done.stdout.splitlines():
        if line.startswith("FOUND"):
            return frozenset(msgspec.json.decode(line.removeprefix("FOUND"), type=list[str]))
    said = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing"]
    raise ConfigError(f"--engine-args: vLLM does not take them; it says: {said[-1].strip()}")
