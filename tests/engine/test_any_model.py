"""Models without a family: served with their own code, or refused with a reason."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from afferent.builtin.engine.form import main as form_process
from afferent.builtin.engine.model import rehearsal
from afferent.builtin.engine.model.runner import Runner, load_model
from afferent.errors import AfferentError, ConfigError, UnsupportedModel
from afferent.media.families.adapter import AdapterFamily
from afferent.media.families.measure import measure
from afferent.media.families.registry import describe
from tests.engine.any_model import REFUSED, SERVED, TORCHVISION, make
from tests.engine.beside_generate import ours, pictures, theirs
from tests.models import make_llava


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def run(folder: Path) -> Runner:
    """Load the model as a server does, in one process."""
    return Runner(folder, describe(folder) or measure(folder))


@pytest.mark.parametrize("model_type", SERVED)
def test_served_through_its_own_processor(model_type: str, tmp_path: Path) -> None:
    make(tmp_path, model_type, SERVED[model_type])
    assert describe(tmp_path) is None
    media = pictures(seed=1)
    assert ours(tmp_path, media) == theirs(tmp_path, media)


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_in_a_line(model_type: str, tmp_path: Path) -> None:
    kind, why = REFUSED[model_type]
    if why == TORCHVISION:
        if find_spec("torchvision"):
            pytest.skip("torchvision is installed: these are for who has none")
        why = re.escape("it needs torchvision; install the extra with pip install '.[torchvision]'")
    make(tmp_path, model_type, kind)
    with pytest.raises(AfferentError, match=why) as caught:
        run(tmp_path)
    assert "\n" not in caught.value.message
    assert model_type in caught.value.message


def test_what_is_computed_otherwise_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-test notices a fault in any step of the computation."""
    make(tmp_path, "paddleocr_vl", SERVED["paddleocr_vl"])
    family = measure(tmp_path)
    Runner(tmp_path, family)
    with monkeypatch.context() as patch:
        patch.setattr(rehearsal, "POSITION_FEATURES", frozenset())
        with pytest.raises(UnsupportedModel, match="paddleocr_vl"):
            Runner(tmp_path, family)
    real = Runner.encode
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "encode", lambda *given: _reversed(real(*given)))
        with pytest.raises(UnsupportedModel, match="not computed here as it computes itself"):
            Runner(tmp_path, family)
    with monkeypatch.context() as patch:
        patch.setattr(AdapterFamily, "model_inputs", lambda *_: {})
        with pytest.raises((UnsupportedModel, TypeError)):
            Runner(tmp_path, family)


def _reversed(embeddings: rehearsal.Embeddings) -> rehearsal.Embeddings:
    return rehearsal.Embeddings(embeddings.rows.flip(0))


def test_weights_that_are_missing(tmp_path: Path) -> None:
    """`transformers` would fill missing tensors with random numbers."""
    make_llava(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    dropped = sorted(name for name in tensors if "mlp" in name)
    save_file({n: t for n, t in tensors.items() if n not in dropped}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=f"lack {len(dropped)} of the model's tensors"):
        load_model(tmp_path)


@pytest.mark.parametrize("names_one", [True, False])
def test_no_end_token_in_the_configuration(names_one: bool, tmp_path: Path) -> None:
    """The tokenizer's end token is used; without one, answers end at their maximal length."""
    make_llava(tmp_path)
    set_end(tmp_path, None)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    assert settings["eos_token"] == "</s>"
    if not names_one:
        path.write_text(json.dumps({**settings, "eos_token": None}))
    assert run(tmp_path).info.eos_token_ids == ([1] if names_one else [])
    assert form_process.load_tokenizer(tmp_path) is not None, "forms can be tested all the same"


def test_end_token_may_have_the_id_0(tmp_path: Path) -> None:
    make_llava(tmp_path)
    set_end(tmp_path, 0)
    assert run(tmp_path).info.eos_token_ids == [0]
    assert form_process.load_tokenizer(tmp_path) is not None


def set_end(folder: Path, token_id: int | None) -> None:
    """Name the end token in the model's configuration; ``None``: name none."""
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        for part in (config, config.get("text_config", {})):
            part.pop("eos_token_id", None)
            if token_id is not None or part.get("model_type") == "llama":
                part["eos_token_id"] = token_id
        (folder / name).write_text(json.dumps(config))
