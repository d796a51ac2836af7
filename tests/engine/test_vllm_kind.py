"""vLLM as the selected engine: refused settings, started processes, and the choice of a server."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from afferent.engines import place, registry
from afferent.engines.contract import EngineSite, UpstreamKind
from afferent.engines.http_upstream.kind import HttpLink
from afferent.engines.render import RenderKind, RenderSettings
from afferent.engines.vllm.kind import VllmUpstream
from afferent.engines.vllm.media import ItemHashes, TakenMedia
from afferent.engines.vllm.settings import VllmSettings
from afferent.engines.vllm.traits import VllmTraits
from afferent.engines.vllm_hash import image_hash
from afferent.errors import ConfigError, UnsupportedModel
from afferent.media.families.registry import describe
from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from afferent.types import Modality
from tests.engine import families
from tests.images import encoded, photo
from tests.media.folders import make_qwen
from tests.pages import DOCS
from tests.vllm import mistral_models

SHAPES = BUILT_IN_MODELS / "shapes"


OWN_ADDRESS = "/run/user/1000/afferent-sockets-0abc_123/store-00112233.sock"


def site(store_address: str, *, aliases: tuple[str, ...] = ()) -> EngineSite:
    return EngineSite(
        model_folder=SHAPES,
        model_name="shapes",
        family=None,
        store_address=store_address,
        shares={},
        left_nbytes=0,
        aliases=aliases,
    )


def test_it_is_chosen_by_name() -> None:
    found = registry.find("vllm")
    assert isinstance(found, UpstreamKind)
    assert found.takes_features(SHAPES, VllmSettings())
    for told in (
        "--mm-processor-kwargs '{\"max_pixels\": 9999}'",
        "--mm-processor-kwargs.max_pixels=9999",
    ):
        assert not found.takes_features(SHAPES, VllmSettings(engine_args=told))


@pytest.mark.parametrize(
    ("told", "are_ours"),
    [("", True), ("--media-io-kwargs {}", False), ("--video-pruning-rate=0.5", False)],
)
def test_videos_that_vllm_changes_go_as_bytes(tmp_path: Path, told: str, are_ours: bool) -> None:
    make_qwen(tmp_path)
    place = replace(site(OWN_ADDRESS), model_folder=tmp_path, family=describe(tmp_path))
    shared = HttpLink(urls=("unix:/x",), api_key="", secret=b"s")
    taken = VllmUpstream().link(place, VllmSettings(engine_args=told), shared).taken
    assert (taken.videos, taken.video_files) == (are_ours, True)


def test_a_folder_in_mistrals_format_is_read_as_vllm_reads_it(tmp_path: Path) -> None:
    """Without arguments, vLLM prefers this format to that of `transformers`, where both exist."""
    families.make_mistral3(tmp_path)
    upstream = VllmUpstream()
    assert upstream.config_of(tmp_path, VllmSettings()) is None
    assert upstream.takes_features(tmp_path, VllmSettings())
    for told in ("--tokenizer-mode mistral", "--config-format=mistral"):
        assert not upstream.takes_features(tmp_path, VllmSettings(engine_args=told))
    for name in ("params.json", "tekken.json"):
        (tmp_path / name).write_text("{}")
        assert upstream.config_of(tmp_path, VllmSettings()) is None
    (tmp_path / "consolidated.safetensors").touch()
    assert upstream.config_of(tmp_path, VllmSettings()) == {"model_type": ""}
    assert not upstream.takes_features(tmp_path, VllmSettings())
    mistral_models.make_pixtral(tmp_path)
    assert upstream.takes_features(tmp_path, VllmSettings())
    assert upstream.takes_features(tmp_path, VllmSettings(engine_url="http://vllm"))
    for told, takes in (
        ("--tokenizer-mode hf", False),
        ("--tokenizer-mode mistral --config-format=mistral --load-format mistral", True),
        ("--tokenizer-mode mistral --config-format hf", False),
        ("--tokenizer other", False),
        ("--hf-overrides {}", False),
    ):
        assert upstream.takes_features(tmp_path, VllmSettings(engine_args=told)) == takes
    with pytest.raises(ConfigError, match="Mistral's own format"):
        RenderKind().check(tmp_path, RenderSettings(render_for="vllm"))
    with pytest.raises(ConfigError, match="not proved to have the same bits"):
        upstream.check(tmp_path, VllmSettings(engine_hashes="vllm-blake3"))
    (tmp_path / "consolidated.safetensors").unlink()
    assert upstream.takes_features(tmp_path, VllmSettings())
    assert not upstream.takes_features(tmp_path, VllmSettings(engine_url="http://vllm"))
    mistral_models.make_pixtral(tmp_path)
    assert not TakenMedia.of(describe(tmp_path), tmp_path).video_files


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine_args": "--port 9000"}, "--port is set by this server"),
        ({"engine_args": "--served-model-name=x"}, "--served-model-name is set"),
        ({"engine_args": "--enable-mm-embeds"}, "around this server's limits"),
        ({"engine_args": "--enable-scale-out"}, "around this server's limits"),
        ({"engine_args": "--dtype 'float32"}, "can't be read"),
        ({"engine_python": "/no/such/python"}, "can't be run"),
        ({"engine_python": sys.executable}, "vLLM is not installed"),
    ],
)
def test_what_is_refused_before_a_start(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        VllmUpstream().check(SHAPES, VllmSettings(**settings))


def refused_flags() -> list[str]:
    """Return the options that the documentation calls refused at the start."""
    page = (DOCS / "vllm-options.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"## Refused at the start\n(.*?)\n## ", page, re.S)
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    return [flag for row in rows for flag in re.findall(r"`(--[a-z-]+)`", row)]


@pytest.mark.parametrize("flag", refused_flags())
def test_each_option_that_the_documentation_calls_refused(flag: str) -> None:
    known = {each for each in refused_flags() if each != "--compilation-config"}
    assert len(known) == 12
    if flag == "--compilation-config":  # the plugin refuses it: tests/vllm/inside.py
        return
    for text in (flag, f"{flag}=x", f"{flag} x", flag.replace("-", "_").replace("__", "--", 1)):
        with pytest.raises(ConfigError, match=f"--engine-args: {flag} (is set by|would lead)"):
            VllmUpstream().check(SHAPES, VllmSettings(engine_args=text))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine_url": ("unix:/a",), "engine_args": "--x"}, "runs elsewhere"),
        ({"engine_url": ("ftp://x",)}, "must be unix:PATH or"),
        ({"engine_url": ("/run/vllm.sock",)}, "must be unix:PATH or"),
        ({"engine_url": ("http://gpu:8000/v1",)}, "--engine-url http://gpu:8000/v1: must be"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        VllmSettings(**settings).check()


def test_one_that_is_started_is_told_where_the_store_is() -> None:
    settings = VllmSettings(engine_args="--max-model-len 2048", engine_python="/opt/python")
    plan = VllmUpstream().plan(site(OWN_ADDRESS, aliases=("s", "latest")), settings)
    (process,) = plan.processes
    command = process.settings.command  # type: ignore[attr-defined]
    assert command[0] == "/opt/python"
    assert command[command.index("--max-model-len") :][:2] == ("--max-model-len", "2048")
    names = command[command.index("--served-model-name") + 1 :]
    assert (names[:3], names[3][:2]) == (("shapes", "s", "latest"), "--")
    assert process.env[place.STORE] == OWN_ADDRESS
    assert bytes.fromhex(process.env[place.SECRET]) == plan.link.secret
    assert plan.link.urls == (f"unix:{command[-1]}",)
    assert VllmUpstream().reserved_nbytes(SHAPES, settings) > 0


def test_one_that_somebody_else_runs_finds_the_secret_beside_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = VllmSettings(engine_url=("unix:/run/vllm.sock",))
    with pytest.raises(ConfigError, match="needs --store-path"):
        VllmUpstream().plan(site(OWN_ADDRESS), settings)
    path = tmp_path / "store.sock"
    first = VllmUpstream().plan(site(str(path)), settings).link.secret
    plan = VllmUpstream().plan(site(str(path)), settings)
    assert plan.processes == ()
    assert plan.files == (tmp_path / "store.sock.secret",), "it goes with the server"
    assert plan.link.secret != first, "new at each start"
    monkeypatch.setenv(place.STORE, str(path))
    monkeypatch.delenv(place.SECRET, raising=False)
    found = place.find_store()
    assert found is not None
    assert (found.address, found.secret()) == (str(path), plan.link.secret)
    (tmp_path / "store.sock.secret").write_text("00")
    with pytest.raises(ConfigError, match="too short"):
        found.secret()
    (tmp_path / "store.sock.secret").unlink()
    with pytest.raises(ConfigError, match="no secret"):
        found.secret()


def test_an_engine_that_takes_features_says_when_there_are_none() -> None:
    with pytest.raises(UnsupportedModel):
        _ = site("").needed_family


class TestHashes:
    """Names of images as a stock vLLM computes them."""

    def hashes(self) -> ItemHashes:
        return ItemHashes(model="some/model", algorithm="blake3")

    def test_image_read_as_rgb_has_the_hash_of_its_file(self) -> None:
        file = encoded(photo(32, 24), "JPEG")
        expected = image_hash(file, model="some/model", algorithm="blake3")
        assert self.hashes().name_of(Modality.IMAGE, file).hex() == expected
        other = ItemHashes(model="other/model", algorithm="blake3")
        assert other.name_of(Modality.IMAGE, file).hex() != expected
        longer = ItemHashes(model="some/model", algorithm="sha512")
        assert len(longer.name_of(Modality.IMAGE, file)) == 64

    def test_converted_image_and_other_media_keep_their_keys(self) -> None:
        grey = encoded(photo(32, 24).convert("L"), "PNG")
        assert self.hashes().name_of(Modality.IMAGE, grey) == b""
        assert self.hashes().name_of(Modality.AUDIO, b"RIFF") == b""

    def test_traits_without_hashes_name_nothing(self) -> None:
        assert VllmTraits(TakenMedia(), None).name_of is None
        name_of = VllmTraits(TakenMedia(), self.hashes()).name_of
        assert name_of is not None
        assert len(name_of(Modality.IMAGE, encoded(photo(32, 24), "JPEG"))) == 32

    def test_model_whose_bits_may_differ_is_refused(self, tmp_path: Path) -> None:
        settings = VllmSettings(engine_url=("http://vllm",), engine_hashes="vllm-blake3")
        VllmUpstream().check(SHAPES, settings)
        (tmp_path / "config.json").write_text('{"model_type": "other"}')
        with pytest.raises(ConfigError, match="--engine-hashes vllm-blake3: features of a other"):
            VllmUpstream().check(tmp_path, settings)
