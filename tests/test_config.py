from __future__ import annotations

from pathlib import Path

import pytest

from afferent import cli, config
from afferent.errors import ConfigError
from afferent.types import GiB, MiB


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "afferent.toml"
    file.write_text('port = 1\nhost = "file"\nlog_level = "info"\narena_nbytes = "2GiB"\n')
    loaded = config.load(
        {"port": "3"},
        environ={"AFFERENT_PORT": "2", "AFFERENT_HOST": "env", "HOME": "x"},
        file=file,
    )
    assert (loaded.config.port, loaded.config.host, loaded.config.log_level) == (3, "env", "info")
    assert loaded.config.arena_nbytes == 2 * GiB
    assert loaded.config.model == "shapes"
    sources = loaded.sources
    assert (sources["port"], sources["host"], sources["model"]) == (
        "flag",
        "environment",
        "default",
    )
    assert sources["log_level"] == str(file)


def test_the_variables_of_a_kubernetes_service_of_our_name_are_not_ours() -> None:
    environ = {
        "AFFERENT_SERVICE_HOST": "10.0.0.1",
        "AFFERENT_SERVICE_PORT": "8000",
        "AFFERENT_PORT": "tcp://10.0.0.1:8000",
        "AFFERENT_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "AFFERENT_HOST": "0.0.0.0",
    }
    loaded = config.load(environ=environ)
    assert (loaded.config.host, loaded.config.port) == ("0.0.0.0", 8000)


@pytest.mark.parametrize(
    ("flags", "environ", "toml", "words"),
    [
        ({"prot": "1"}, {}, "", ["prot", "flag"]),
        ({}, {"AFFERENT_PROT": "1"}, "", ["prot", "environment"]),
        ({}, {}, "prot = 1", ["prot", "afferent.toml"]),
        ({"port": "many"}, {}, "", ["port", "many"]),
        ({"port": "70000"}, {}, "", ["port", "65535"]),
        ({"arena_nbytes": "1 banana"}, {}, "", ["arena_nbytes", "banana"]),
        ({"arena_nbytes": "1"}, {}, "", ["arena_nbytes"]),
        ({"preprocess_workers": "-1"}, {}, "", ["preprocess_workers"]),
        ({"log_level": "loud"}, {}, "", ["log_level", "loud"]),
        ({}, {}, 'port = "8000x"', ["port"]),
        ({}, {}, "port = ", ["afferent.toml"]),
        ({}, {}, "explain = 3", ["explain"]),
        # No client could ever send it: what stands around a key in a header is dropped.
        ({}, {"AFFERENT_API_KEY": "acme-key-0123456789\n"}, "", ["api_key", "environment"]),
    ],
)
def test_bad_settings_are_refused_with_their_origin(
    tmp_path: Path, flags: dict, environ: dict, toml: str, words: list[str]
) -> None:
    file = tmp_path / "afferent.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        config.load(flags, environ=environ, file=file)
    for word in words:
        assert word in caught.value.message


def test_every_setting_has_a_flag_a_help_text_and_a_default() -> None:
    for key in config.field_names():
        text, default = config.describe(key)
        assert text
        assert getattr(config.ServeConfig(), key) == default


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1", 1), ("512MiB", 512 * MiB), (" 1.5 GiB ", GiB * 3 // 2), ("2k", 2048)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert config.parse_nbytes(text) == nbytes


def test_config_show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFFERENT_PORT", "9000")
    assert cli.main(["config", "show", "--arena-nbytes", "256MiB"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["port"] == ["port", "9000", "environment"]
    assert lines["arena_nbytes"] == ["arena_nbytes", "256MiB", "flag"]
    assert lines["host"] == ["host", "127.0.0.1", "default"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "/nowhere"], ["/nowhere", "config.json"]),
        (["serve", "nothing-built-in"], ["nothing-built-in"]),
        (["serve", "--port", "x"], ["port", "flag"]),
        (["serve", "--arena-nbytes", "900GiB"], ["900.0 GiB", "--arena-nbytes"]),
        (["serve", "--config", "/nowhere.toml"], ["/nowhere.toml"]),
    ],
)
def test_serve_refuses_before_it_starts_anything(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert "error: " in said
    for word in words:
        assert word in said


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for key in config.field_names():
        if key != "model" and not config.is_table(key):
            assert "--" + key.replace("_", "-") in text


_TENANTS = """
[[tenants]]
name = "acme"
api_keys = ["acme-key-0123456789"]
max_requests = 4

[[tenants]]
name = "other"
api_keys = ["other-key-0123456789", "other-key-9876543210"]
"""


def test_tenants_are_tables_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "afferent.toml"
    file.write_text(_TENANTS)
    acme, other = config.load(environ={}, file=file).config.tenants
    assert (acme.name, acme.max_requests) == ("acme", 4)
    assert (other.api_keys, other.max_requests) == (
        ("other-key-0123456789", "other-key-9876543210"),
        0,
    )


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        (_TENANTS.replace("acme-key-0123456789", "short"), ["api_keys"]),
        (
            _TENANTS.replace("other-key-9", "acme-key-0").replace("876543210", "123456789"),
            ["twice"],
        ),
        (_TENANTS.replace('"other"', '"acme"'), ["name", "twice"]),
        (_TENANTS.replace("max_requests", "max_request"), ["max_request"]),
        (_TENANTS.replace('"acme"', '"../acme"'), ["name"]),
        (_TENANTS.replace('"acme"', '"acme\\n"'), ["name"]),
        (_TENANTS.replace("acme-key-0123456789", "acme-key-0123456789\\n"), ["api_keys"]),
        ('tenants = "acme"', ["tables"]),
        ('api_key = "too short"', ["api_key"]),
        (_TENANTS + 'api_key = "acme-key-0123456789"', ["api_key"]),
    ],
)
def test_bad_tenants_are_refused_and_no_key_is_shown(
    tmp_path: Path, toml: str, words: list[str]
) -> None:
    file = tmp_path / "afferent.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        config.load(environ={}, file=file)
    for word in words:
        assert word in caught.value.message
    assert "0123456789" not in caught.value.message


def test_keys_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "afferent.toml"
    file.write_text(_TENANTS)
    arguments = ["config", "show", "--config", str(file), "--api-key", "secret-0123456789"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "0123456789" not in shown
    assert "(hidden)" in shown


def test_settings_are_checked_without_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["config", "check", "--arena-nbytes", "64MiB"]) == 0
    assert "warning" not in capsys.readouterr().out
    assert cli.main(["config", "check", "--arena-nbytes", "64MiB", "--host", "0.0.0.0"]) == 0
    assert "no API key" in capsys.readouterr().out
    assert cli.main(["config", "check", str(tmp_path)]) == 2
    assert cli.main(["config", "check", "--arena-nbytes", "64TiB"]) == 2
