"""vLLM's arguments, read by an interpreter with a stand-in for vLLM's parser."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from afferent.engines.vllm import arguments
from afferent.engines.vllm.kind import VllmUpstream
from afferent.engines.vllm.settings import VllmSettings
from afferent.errors import ConfigError
from afferent.operations.supervisor.checks import BUILT_IN_MODELS

SHAPES = BUILT_IN_MODELS / "shapes"
PARSER = """
import argparse
class FlexibleArgumentParser(argparse.ArgumentParser):
    def parse_args(self, words):
        return super().parse_args(["--" + word[2:].replace("_", "-") if word[:2] == "--" else word
                                   for word in words])
"""
SERVE = """
class Serve:
    def subparser_init(self, commands):
        parser = commands.add_parser("serve")
        parser.add_argument("model_tag")
        parser.add_argument("--enable-mm-embeds", action="store_true")
        parser.add_argument("--mm-processor-kwargs")
        parser.add_argument("--root-path")
        parser.add_argument("--tokens-only", action="store_true")
        parser.add_argument("--media-io-kwargs")
        parser.add_argument("--video-pruning-rate", type=float)
        parser.add_argument("--max-model-len", type=int)
def cmd_init():
    return [Serve()]
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Return an interpreter with a stand-in for `vllm` that has the two imported modules."""
    files = {
        "vllm-0.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.0\n",
        "vllm/__init__.py": "",
        "vllm/utils/__init__.py": "",
        "vllm/utils/argparse_utils.py": PARSER,
        "vllm/entrypoints/__init__.py": "",
        "vllm/entrypoints/cli/__init__.py": "",
        "vllm/entrypoints/cli/serve.py": SERVE,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", set()),
        ("--max-model-len 2048", set()),
        ("--enable_mm_embeds", {"enable_mm_embeds"}),
        ("--enable-mm-emb", {"enable_mm_embeds"}),
        ("""--mm_processor_kwargs '{"a": 1}'""", {"mm_processor_kwargs"}),
        ("--media-io={} --video_pruning=0.5", {"media_io_kwargs", "video_pruning_rate"}),
    ],
)
def test_every_spelling_counts(python: str, text: str, names: set[str]) -> None:
    assert arguments.changed(python, text) == names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("--enable_mm_embeds", "--enable-mm-embeds"),
        ("--enable-mm-emb", "--enable-mm-embeds"),
        ("--tokens_only", "--tokens-only"),
        ("--tokens-on", "--tokens-only"),
    ],
)
def test_a_way_around_the_limits_is_refused(python: str, text: str, name: str) -> None:
    settings = VllmSettings(engine_args=text, engine_python=python)
    with pytest.raises(ConfigError, match=f"{name} would lead around"):
        VllmUpstream().check(SHAPES, settings)


def test_options_of_the_processor_leave_features_to_vllm(python: str) -> None:
    settings = VllmSettings(engine_args="--mm_proc={}", engine_python=python)
    assert not VllmUpstream().takes_features(SHAPES, settings)


def test_what_vllm_does_not_take_is_told_in_its_words(python: str) -> None:
    with pytest.raises(ConfigError, match=r"it says: .*unrecognized arguments: --nonsense"):
        arguments.changed(python, "--nonsense")
    with pytest.raises(ConfigError, match="can't be run"):
        arguments.changed(f"{python}-that-is-none", "--nonsense")


@pytest.mark.parametrize("text", ["--root-path /x", "--root_path=/x", "--root-pat /x"])
def test_second_paths_of_endpoints_are_refused(python: str, text: str) -> None:
    settings = VllmSettings(engine_args=text, engine_python=python)
    with pytest.raises(ConfigError, match="--root-path would lead around"):
        VllmUpstream().check(SHAPES, settings)
