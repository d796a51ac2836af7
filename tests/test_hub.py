"""A model by its name is downloaded from a local hub by the real `huggingface_hub`, or refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from afferent import cli
from afferent.builtin.engine.settings import ReferenceSettings
from afferent.config import load
from afferent.engines import registry
from afferent.errors import ConfigError
from afferent.media.families import hub as ours
from afferent.operations.supervisor.checks import BUILT_IN_MODELS, Checked, check, model_folder
from tests.hub import Hub, Repo, running_hub
from tests.server import Server, ask

SHAPES = BUILT_IN_MODELS / "shapes"
NAME = "somebody/shapes-1"


@pytest.fixture(scope="module")
def running() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def hub(running: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub with one model, and an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    _be_at(running.url, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    others = {"pytorch_model.bin": b"a pickle", "onnx/model.safetensors": b"for another program"}
    running.repos = {NAME: Repo.of(SHAPES, **others)}
    running.fetched.clear()
    return running


def _be_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    files = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)


def download(name: str = NAME, *, revision: str = "", **chosen: bool) -> Path:
    return ours.download(name, revision=revision, **{"needs_weights": True, **chosen})


def checked(flags: dict[str, str]) -> Checked:
    return check(load(flags, extra=(ReferenceSettings,)), may_download=True)


def refusal(name: str = NAME, **arguments: str | bool) -> str:
    """Return the error message, which is one line."""
    with pytest.raises(ConfigError) as caught:
        download(name, **arguments)  # type: ignore[arg-type]
    assert "\n" not in caught.value.message
    return caught.value.message


def test_what_is_needed_is_downloaded_once(hub: Hub) -> None:
    folder = download()
    wanted = {path.name for path in SHAPES.iterdir()}
    assert set(hub.fetched) == {path.name for path in folder.iterdir()} == wanted
    assert "model.safetensors" in hub.fetched
    hub.fetched.clear()
    assert download() == folder
    assert hub.fetched == []


def test_no_weights_for_an_engine_that_has_its_own(hub: Hub) -> None:
    folder = download(needs_weights=False)
    assert (folder / "tokenizer.json").is_file()
    assert not list(folder.glob("*.safetensors"))


def test_the_weights_of_mistrals_format_where_there_are_no_others(hub: Hub) -> None:
    """Pixtral-12B is released in this format alone; later models have both formats."""
    mistrals = {"params.json": b"{}", "tekken.json": b"[]", "consolidated.safetensors": b"x"}
    hub.repos["a/mistral"] = Repo(mistrals)
    for needs_weights in (True, False):
        assert "has no config.json" in refusal("a/mistral", needs_weights=needs_weights)
    hub.repos["a/both"] = Repo({"config.json": b"{} ", **mistrals})
    assert "no safetensors in the form of transformers" in refusal("a/both")
    assert "consolidated.safetensors" not in hub.fetched

    hub.repos["a/other"] = Repo(mistrals)
    found = download("a/other", takes_mistrals=True)
    assert {path.name for path in found.iterdir()} == set(mistrals)
    hub.repos[NAME].files |= mistrals
    found = download(takes_mistrals=True)
    assert [path.name for path in found.glob("*.safetensors")] == ["model.safetensors"]


def test_vllm_takes_mistrals_format(hub: Hub) -> None:
    files = {"params.json": b"{}", "tekken.json": b"[]", "consolidated.safetensors": b"x"}
    hub.repos["a/mistral"] = Repo(files)
    for engine, takes in (("vllm", True), ("reference", False)):
        settings = registry.find(engine).settings_type
        loaded = load({"model": "a/mistral", "engine": engine}, extra=(settings,))
        if takes:
            assert (model_folder(loaded, may_download=True) / "consolidated.safetensors").is_file()
        else:
            with pytest.raises(ConfigError, match=r"has no config\.json"):
                model_folder(loaded, may_download=True)


def test_revisions(hub: Hub) -> None:
    hub.repos[NAME].revisions = ("main", "v1.2")
    assert download(revision="v1.2") == download(revision="a" * 40)
    assert refusal(revision="v3") == f"{NAME!r} has no revision 'v3' on {hub.url}"


def test_a_private_model_needs_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos[NAME].token = "hf_secret"
    assert "set HF_TOKEN" in refusal()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert download().is_dir()


def test_what_cannot_be_had(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal("somebody/unheard-of")
    assert said.startswith(
        f"'somebody/unheard-of' is neither a folder here nor a model on {hub.url}"
    )
    hub.repos["a/gated"] = Repo.of(SHAPES)
    hub.repos["a/gated"].gated = True
    assert refusal("a/gated").startswith(f"'a/gated' is gated: ask for access at {hub.url}/a/gated")
    files = dict(hub.repos[NAME].files)
    del files["model.safetensors"]
    hub.repos["a/pickle"] = Repo(files)
    assert f"'a/pickle' on {hub.url} has no safetensors" in refusal("a/pickle")
    hub.repos["a/gguf"] = Repo({"README.md": b"", "q4.gguf": b"x"})
    assert f"'a/gguf' on {hub.url} has no config.json" in refusal("a/gguf")
    assert "neither a folder here nor a model's name" in refusal("a/b--c")
    assert hub.fetched.count("pytorch_model.bin") == 0


def test_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached model is served; another one is refused, with the folder that was searched."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    where = f"in {constants.HF_HUB_CACHE}"
    incomplete = f"{NAME!r} is no folder here, is not complete {where}"
    assert refusal() == f"{incomplete}, and HF_HUB_OFFLINE forbids to download it"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = download()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert download() == folder
    (folder / "config.json").unlink()
    assert refusal().startswith(incomplete)


def test_a_hub_that_cannot_be_reached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    _be_at("http://127.0.0.1:9", monkeypatch)
    assert "http://127.0.0.1:9 can't be reached: ConnectError" in refusal()


@pytest.mark.parametrize("name", ["nowhere", "/no/such/folder", "./no/folder", "a/b/c"])
def test_what_is_no_name_either(name: str, hub: Hub) -> None:
    with pytest.raises(
        ConfigError, match=r"must be a folder with a config\.json on this machine, a model's name"
    ):
        checked({"model": name})
    assert hub.fetched == []


def test_a_folder_is_not_looked_for_on_the_hub(hub: Hub) -> None:
    Path("somebody/shapes-1").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"the folder has no config\.json"):
        checked({"model": NAME})
    for model in ("shapes", str(SHAPES)):
        with pytest.raises(ConfigError, match="is no model on a hub"):
            checked({"model": model, "revision": "v1"})
    assert hub.fetched == []


def test_the_name_is_what_clients_call_it(hub: Hub) -> None:
    found = checked({"model": NAME})
    assert found.model_name == NAME
    assert found.folder.parent.name == "snapshots"
    assert checked({"model": NAME, "served_model_name": "s"}).model_name == "s"


def test_who_only_looks_downloads_nothing(hub: Hub) -> None:
    with pytest.raises(ConfigError, match="afferent serve would download it"):
        check(load({"model": NAME}, extra=(ReferenceSettings,)))
    assert hub.fetched == []


def test_the_command_line_says_it_in_a_line(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "somebody/unheard-of"]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert error.startswith("error: 'somebody/unheard-of' is neither a folder here nor a model on")


def test_its_own_variables_and_a_server(hub: Hub, tmp_path: Path) -> None:
    """A complete start shows the download's progress; the next one finds the model offline."""
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    with Server(NAME, "--preprocess-workers", "1", env=env) as server:
        assert server.get("/v1/models").json()["data"][0]["id"] == NAME
        answer = server.post({**ask([], "Hello"), "model": NAME, "max_tokens": 3})
        assert answer.status_code == 200, answer.text
    assert hub.fetched.count("model.safetensors") == 1
    assert any("Fetching" in line and "100%" in line for line in server.lines)
    env = {**os.environ, **env, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "afferent.cli", "config", "check", NAME, "--port", "0"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert hub.fetched.count("model.safetensors") == 1
