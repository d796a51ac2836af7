"""Model folders that can't be served: copies of the built-in one, each with one defect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from afferent.operations.supervisor.checks import BUILT_IN_MODELS

_GOOD = BUILT_IN_MODELS / "shapes"


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _with(name: str, text: str | bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)  # a link to the original
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)

    return write


def _changed(name: str, **values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        _with(name, json.dumps(json.loads((folder / name).read_text()) | values))(folder)

    return change


def _text_changed(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["text_config"] |= values
        _with("config.json", json.dumps(config))(folder)

    return change


def _both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


_INDEX = "model.safetensors.index.json"
_NO_WEIGHTS = _without("model.safetensors")
_INDEXED = '{"weight_map": {"a": "%s"}}'

FOLDERS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "no config": (_without("config.json"), ["has no config.json"]),
    "config not JSON": (_with("config.json", "{"), ["config.json can't be read"]),
    "config a list": (_with("config.json", "[]"), ["config.json can't be read"]),
    "config not UTF-8": (_with("config.json", b'{"model_type": "\xff"}'), ["config.json"]),
    "no type": (_changed("config.json", model_type=None), ["names no model_type"]),
    "nonsense": (_changed("config.json", model_type="nonsense"), ["of the type 'nonsense'"]),
    "no weights": (_NO_WEIGHTS, ["no weights"]),
    "weights empty": (_with("model.safetensors", b""), ["model.safetensors can't be read"]),
    "weights broken": (_with("model.safetensors", b"x" * 99), ["model.safetensors can't be read"]),
    "weights pickled": (
        _both(_NO_WEIGHTS, _with("pytorch_model.bin", b"x")),
        ["pickle", "save_pretrained"],
    ),
    "index not JSON": (_both(_NO_WEIGHTS, _with(_INDEX, "{")), [_INDEX]),
    "index of nothing": (_both(_NO_WEIGHTS, _with(_INDEX, _INDEXED % "x")), ["x can't be read"]),
    "index outside": (_both(_NO_WEIGHTS, _with(_INDEX, _INDEXED % "../x")), ["no file of its"]),
    "other vocabulary": (_text_changed(vocab_size=769), ["768 x 128, not 769 x 128"]),
    "other width": (_text_changed(hidden_size=64), ["768 x 128, not 768 x 64"]),
    "no processor": (_without("preprocessor_config.json"), ["how its media are processed"]),
    "processor not JSON": (_with("preprocessor_config.json", "no"), ["preprocessor_config.json"]),
    "no tokenizer": (_without("tokenizer.json"), ["has no tokenizer.json"]),
    "tokenizer not JSON": (_with("tokenizer.json", "{"), ["tokenizer.json can't be read"]),
    "tokenizer empty": (_with("tokenizer.json", "{}"), ["tokenizer.json can't be read"]),
    "tokenizer settings": (_with("tokenizer_config.json", "["), ["tokenizer_config.json"]),
    "no template": (_without("chat_template.jinja"), ["has no chat template"]),
    "template broken": (_with("chat_template.jinja", "a\n{% if"), ["is broken at line 2"]),
    "template binary": (_with("chat_template.jinja", b"\xff\xfe"), ["chat_template.jinja"]),
    "template of text": (
        _with("chat_template.jinja", "{{ messages|length }}"),
        ["no place for image items"],
    ),
    "token of another model": (
        _changed("config.json", image_token_id=4000, video_token_id=4001),
        ["no place for image items", "4000"],
    ),
    "generation not JSON": (_with("generation_config.json", "{"), ["generation_config.json"]),
    "generation of words": (
        _with("generation_config.json", '{"temperature": "hot"}'),
        ["generation_config.json", "temperature"],
    ),
}
"""The change to a valid folder, and words of the line that refuses it."""


def make_folder(parent: Path, name: str) -> Path:
    folder = parent / name.replace(" ", "-")
    folder.mkdir()
    for path in _GOOD.iterdir():
        (folder / path.name).symlink_to(path)
    FOLDERS[name][0](folder)
    return folder
