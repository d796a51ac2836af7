"""Models of many families in whole servers: tokens of prompt and answer are those of `generate`.

Also, model folders that can't be served, each with its error message. `tests/engine` runs each
family in one process (`test_ten_families.py`); here, ``--storm`` chooses all families.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soundfile
from PIL import Image
from tokenizers import Tokenizer

from afferent.media.decoded import DecodedAudio, Media
from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from tests.engine import any_model
from tests.engine.beside_generate import NUM_TOKENS, QUESTION, clip, pictures, theirs
from tests.engine.test_ten_families import FAMILIES
from tests.server import Server

SHAPES = BUILT_IN_MODELS / "shapes"
ALWAYS = ("glm_ocr",)


def make(folder: Path, name: str) -> None:
    folder.mkdir()
    if name in FAMILIES:
        FAMILIES[name](folder)
    else:
        any_model.make(folder, name, any_model.SERVED[name])


def part_of(media: Media) -> dict[str, Any]:
    file = io.BytesIO()
    if isinstance(media, DecodedAudio):
        soundfile.write(file, media.samples, 16_000, format="WAV", subtype="FLOAT")
        data = base64.b64encode(file.getvalue()).decode()
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    Image.fromarray(media.pixels).save(file, "PNG")  # type: ignore[union-attr]
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ALWAYS else pytest.param(name, marks=pytest.mark.storm)
        for name in (*FAMILIES, *any_model.SERVED)
    ],
)
def test_a_server_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    make(folder, name)
    media = clip(seed=1) if name == "voxtral" else pictures(seed=2)
    content = [
        part for each in media for part in (part_of(each), {"type": "text", "text": QUESTION})
    ]
    body = {"model": name, "messages": [{"role": "user", "content": content}]}
    expected = theirs(folder, media)
    with Server(str(folder), "--preprocess-workers", "1") as server:
        prompt = server.client().post("/chat/completions/render", body=body, cast_to=dict[str, Any])
        body |= {"max_tokens": NUM_TOKENS, "temperature": 0}
        asked = {**body, "logprobs": True, "ignore_eos": True, "skip_special_tokens": False}
        answer = server.post(asked)
        assert answer.status_code == 200, answer.text
    assert prompt["token_ids"] == expected.prompt
    (choice,) = answer.json()["choices"]
    texts = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert texts == [_text(folder, token) for token in expected.tokens]
    assert answer.json()["usage"]["prompt_tokens"] == len(expected.prompt)


def _text(folder: Path, token_id: int) -> str:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).decode(
        [token_id], skip_special_tokens=False
    )


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": 5}')


def broken_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for message in messages %}")


def a_layer_more(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    text["num_hidden_layers"] += 1
    text.pop("layer_types", None)
    path.write_text(json.dumps(config))


def unheard_of(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "qwen9_vl"}))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (no_template, "chat template"),
        (no_tokenizer, "has no tokenizer.json"),
        (broken_tokenizer, "tokenizer.json can't be read"),
        (broken_template, "is broken at line"),
        (a_layer_more, "of the model's tensors: "),
        (unheard_of, "knows no models of the type 'qwen9_vl'"),
    ],
)
def test_a_folder_that_cannot_be_served(
    spoil: Callable[[Path], None], why: str, tmp_path: Path
) -> None:
    """The server prints one error line and exits without a restart."""
    folder = tmp_path / "spoilt"
    shutil.copytree(SHAPES, folder)
    spoil(folder)
    command = [sys.executable, "-m", "afferent.cli", "serve", str(folder), "--port", "0"]
    done = subprocess.run(
        [*command, "--preprocess-workers", "1", "--arena-nbytes", "64MiB"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (1, 2)
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert why in error
    assert "Traceback" not in done.stderr
    assert "starting it again" not in done.stderr
