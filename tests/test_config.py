from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from afferent import cli, config
from afferent.builtin.engine.kind import ReferenceEngine
from afferent.builtin.engine.settings import ReferenceSettings
from afferent.config import Group, Setting, Settings, hints, setting
from afferent.config.loading import service_variable
from afferent.engines.contract import EnginePlan, EngineProcess, EngineSite
from afferent.engines.remote.kind import RemoteLink, listening
from afferent.errors import ConfigError
from afferent.types import GiB, MiB, ObjectKind


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


@pytest.mark.parametrize("value", ["tcp://10.0.0.1:8000", "udp://10.0.0.1:53"])
def test_service_variable_alone_is_ignored_and_named(value: str) -> None:
    """Some clusters set this variable only."""
    environ = {"AFFERENT_PORT": value, "AFFERENT_HOST": "0.0.0.0"}
    loaded = config.load(environ=environ)
    assert (loaded.config.host, loaded.config.port) == ("0.0.0.0", 8000)
    assert service_variable(environ) == f"AFFERENT_PORT={value}"
    assert service_variable({"AFFERENT_PORT": "9000"}) == ""
    assert config.load(environ={"AFFERENT_PORT": "9000"}).config.port == 9000


@pytest.mark.parametrize(
    ("flags", "environ", "toml", "words"),
    [
        ({"prot": "1"}, {}, "", ["prot", "flag"]),
        ({}, {"AFFERENT_PROT": "1"}, "", ["prot", "environment"]),
        ({}, {}, "prot = 1", ["prot", "afferent.toml"]),
        ({"port": "many"}, {}, "", ["port", "many"]),
        ({"port": "70000"}, {}, "", ["port", "65535"]),
        ({"arena_nbytes": "1 banana"}, {}, "", ["--arena-nbytes", "banana"]),
        ({"arena_nbytes": "1"}, {}, "", ["--arena-nbytes"]),
        ({"preprocess_workers": "-1"}, {}, "", ["--preprocess-workers"]),
        ({"log_level": "loud"}, {}, "", ["--log-level", "loud"]),
        ({}, {}, 'port = "8000x"', ["port"]),
        ({}, {}, "port = ", ["afferent.toml"]),
        ({}, {}, "explain = 3", ["explain"]),
        # No client can send this key: HTTP strips whitespace around a header's value.
        ({}, {"AFFERENT_API_KEY": "acme-key-0123456789\n"}, "", ["AFFERENT_API_KEY"]),
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
    for key, one in config.declared(config.ServeConfig).items():
        assert one.text
        assert getattr(config.ServeConfig(), key) == one.default


def test_what_is_shown_can_be_read_again() -> None:
    """Every setting with a flag is read back from its shown value, by flag and by variable."""
    known = config.declared(config.ServeConfig, *cli.engine_settings("reference")).values()
    shown = [one for one in known if not one.is_table]
    flags = {one.key: one.show(one.default) for one in shown}
    environ = {one.variable: one.show(one.default) for one in shown}
    extra = cli.engine_settings("reference")
    default = config.load(environ={}, extra=extra)
    for loaded in (
        config.load(flags, environ={}, extra=extra),
        config.load(environ=environ, extra=extra),
    ):
        assert dict(loaded.values()) == dict(default.values())
        assert {loaded.sources[one.key] for one in shown} < {"flag", "environment"}


def test_lists(tmp_path: Path) -> None:
    file = tmp_path / "afferent.toml"
    file.write_text('file_roots = ["/a", "/b"]\n')
    loaded = config.load({"fetch_allow": "a:1,b:2,"}, environ={}, file=file)
    assert loaded.config.fetch_allow == ("a:1", "b:2")
    assert loaded.config.file_roots == ("/a", "/b")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("512MiB", 512 * MiB),
        (" 1.5 GiB ", GiB * 3 // 2),
        ("2k", 2048),
        ("1TiB", 1024 * GiB),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert config.parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("256MB", "MB is no unit here: write 256MiB, or 256000000 bytes"),
        ("1.5gb", "gb is no unit here: write 1.5GiB, or 1500000000 bytes"),
        ("many", "'many' is not a size: write bytes, KiB, MiB, GiB or TiB, such as 512MiB"),
    ],
)
def test_what_is_no_size_is_told_the_units(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config.parse_nbytes(text)


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
        (["serve", "--port", "x"], ["--port x"]),
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


def help_of(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    return capsys.readouterr().out


def shows(page: str, one: Setting) -> bool:
    return re.search(rf"^  {one.flag}( |$)", page, re.MULTILINE) is not None


@pytest.mark.parametrize("command", ["serve", "config show", "doctor"])
def test_help_fits_on_a_screen(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(*command.split(), "--help", capsys=capsys)
    assert text == help_of(*command.split(), "--port", "1", "-h", capsys=capsys)
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 80
    assert f"afferent {command} --help GROUP, or --help all" in text
    for group in Group:
        assert group is Group.COMMON or f"  {group} " in text
    for one in config.declared(config.ServeConfig).values():
        assert shows(text, one) == (one.group is Group.COMMON and not one.is_table)


@pytest.mark.parametrize("command", ["serve", "config show", "doctor"])
def test_help_all_names_every_setting_and_each_group_its_own(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    whole = help_of(*command.split(), "--help", "all", capsys=capsys)
    assert max(map(len, whole.splitlines())) <= 80
    for group in Group:
        page = help_of(*command.split(), "--help", group, capsys=capsys)
        assert page.strip() in whole
        for one in config.declared(config.ServeConfig).values():
            assert shows(page, one) == (one.group is group and not one.is_table)


def refuse(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error, which is a single line."""
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--prot 9000", "there is no flag --prot; did you mean --port?"),
        ("--prot=9000", "there is no flag --prot; did you mean --port?"),
        ("--arena_nbytes 1", "there is no flag --arena_nbytes; here it is --arena-nbytes"),
        ("--served x", "there is no flag --served; did you mean --served-model-name?"),
        ("--confg x", "there is no flag --confg; did you mean --config?"),
        ("one --model two", "MODEL one: --model two names another one"),
        ("--tenants x", "there is no flag --tenants; tenants are tables of the file (--config)"),
        ("--tp 2", "there is no flag --tp; here it is --tensor-parallel-size"),
        (
            "--gpu-memory-utilization 0.9",
            "there is no flag --gpu-memory-utilization; memory is given in numbers, by "
            "--kv-cache-tokens and --arena-nbytes",
        ),
        (
            "--xyzzy",
            "there is no flag --xyzzy; if it is an engine's own, name that engine: --engine",
        ),
        ("one two", "'two' is one argument too many"),
        (
            "--help limit",
            "there is no group 'limit' of settings; there are common, engine, memory, "
            "preprocessing, fetching, tier, logging, timeouts, limits and all",
        ),
    ],
)
def test_typing_errors(arguments: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refuse("serve", *arguments.split(), capsys=capsys) == f"error: {line}"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("serv", "afferent: there is no 'serv'; did you mean serve?"),
        ("sevre --port 1", "afferent: there is no 'sevre'; did you mean serve?"),
        ("docter", "afferent: there is no 'docter'; did you mean doctor?"),
        (
            "xyzzy",
            "afferent: there is no 'xyzzy'; there are serve, render, features, store, top, tier, "
            "restart, config, doctor",
        ),
        ("config chek", "afferent config: there is no 'chek'; did you mean check?"),
        ("store stta", "afferent store: there is no 'stta'; did you mean stat?"),
        ("restart frontend", "afferent restart: there is no 'frontend'; did you mean frontends?"),
    ],
)
def test_command_mistyped_is_answered_with_the_nearest(
    arguments: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refuse(*arguments.split(), capsys=capsys) == f"error: {line}"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--interval 0", "argument --interval: 0 is not between 0.01 and 3600 seconds"),
        ("--interval nan", "argument --interval: nan is not between 0.01 and 3600 seconds"),
        ("--count -1", "argument --count: '-1' is not a number from 1"),
        ("--once --count 3", "argument --count: not allowed with argument --once"),
    ],
)
def test_top_with_invalid_frame_options_is_refused(
    arguments: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refuse("top", *arguments.split(), capsys=capsys) == f"error: {line}"


@pytest.mark.parametrize(
    ("environ", "toml", "words"),
    [
        ({"AFFERENT_PROT": "1"}, "", "did you mean AFFERENT_PORT?"),
        ({"AFFERENT_TP_SIZE": "2"}, "", "here it is AFFERENT_TENSOR_PARALLEL_SIZE"),
        ({}, "prot = 1", "did you mean port?"),
        ({}, "max_running_requests = 1", "here it is max_num_seqs"),
    ],
)
def test_hints_speak_the_language_of_their_origin(
    tmp_path: Path, environ: dict, toml: str, words: str
) -> None:
    file = tmp_path / "afferent.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        config.load(environ=environ, file=file, extra=[ReferenceSettings])
    assert caught.value.message.endswith(words)


def test_hints_name_settings_that_exist() -> None:
    known = config.declared(config.ServeConfig, *cli.engine_settings("reference"))
    for key, (_, ours) in hints.ELSEWHERE.items():
        assert key not in known
        assert set(ours) <= set(known)


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


def test_config_show_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--json", "--model", "shapes", "--arena-nbytes", "64MiB", "--log-level", "info"]
    assert cli.main(["config", "show", *arguments]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["refused"] is None
    settings = shown["settings"]
    assert set(settings) == set(config.declared(config.ServeConfig, ReferenceSettings))
    assert settings["log_level"] == {"value": "info", "source": "flag"}
    assert settings["arena_nbytes"] == {"value": 64 * MiB, "source": "flag", "resolved": 64 * MiB}
    assert Path(settings["model"]["resolved"]).is_dir()
    for key in ("frontends", "preprocess_workers", "preprocess_memory_nbytes"):
        assert settings[key]["value"] == 0
        assert settings[key]["resolved"] >= 1
    assert cli.main(["config", "show", "--json", "/nowhere"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "MODEL /nowhere" in shown["refused"]
    assert "resolved" not in shown["settings"]["arena_nbytes"]


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "JSON"])
def test_keys_are_not_shown(
    form: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "afferent.toml"
    file.write_text(_TENANTS)
    arguments = ["config", "show", "--config", str(file), "--api-key", "secret-0123456789"]
    assert cli.main([*arguments, *form]) == 0
    shown = capsys.readouterr().out
    assert "0123456789" not in shown
    assert "(hidden)" in shown


def test_all_that_is_wrong_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "afferent.toml"
    tenants = _TENANTS.replace("acme-key-0123456789", "short").replace('"other"', '"Other"')
    file.write_text(f'prot = 1\nport = "x"\nlumen = 3\napi_key = "short"\n{tenants}')
    assert cli.main(["config", "check", "--config", str(file)]) == 2
    key = "an API key needs 16 to 256 printable characters, none of them blank or beyond ASCII"
    assert capsys.readouterr().err.replace(str(file), "FILE").splitlines() == [
        "error: there is no setting 'prot' (FILE); did you mean port?",
        "error: port = 'x' (FILE): must be a whole number, at least 0, at most 65535",
        "error: there is no setting 'lumen' (FILE); if it is an engine's own, name that engine: "
        "--engine",
        f"error: api_key (FILE): {key}",
        f"error: tenant 'acme' (FILE): api_keys[0]: {key}",
        "error: tenant 'Other' (FILE): name: 1 to 32 characters of a-z, 0-9 and -, no dash first",
    ]
    assert cli.main(["config", "check", "--prot", "1", "--hots=x"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_settings_are_checked_without_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["config", "check", "--arena-nbytes", "64MiB", "--port", "0"]
    small += ["--max-body-nbytes", "16MiB"]
    assert cli.main(small) == 0
    assert "warning" not in capsys.readouterr().out
    assert cli.main([*small, "--host", "0.0.0.0"]) == 0
    assert "no API key" in capsys.readouterr().out
    assert cli.main(["config", "check", str(tmp_path)]) == 2
    assert cli.main([*small, "--arena-nbytes", "64TiB"]) == 2


def test_config_check_compares_bodies_with_the_arena(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["config", "check", "--arena-nbytes", "64MiB", "--port", "0", "--max-body-nbytes"]
    assert cli.main([*command, "21MiB"]) == 0
    assert "warning" not in capsys.readouterr().out
    assert cli.main([*command, "1GiB"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for word in ("--max-body-nbytes 1GiB", "choose 21MiB at most", "--raw-share", "--arena-nbytes"):
        assert word in line


class GoneEngine(ReferenceEngine):
    def plan(self, site: EngineSite, settings: ReferenceSettings) -> EnginePlan[RemoteLink]:
        at = listening("gone")
        told = RemoteLink(address=site.store_address)
        process = EngineProcess(name="gone", module="no_such.module", settings=told, fds=(at.fd,))
        return EnginePlan(processes=(process,), link=at.link)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--max-model-len", "1000000"],
            "--max-model-len 1,000,000 is more than the 32,768 tokens that the model has room for",
        ),
        (
            ["--engine", f"{__name__}:GoneEngine"],
            "no_such.module, the engine's process 'gone', can't run: "
            "ModuleNotFoundError: No module named 'no_such'",
        ),
        (
            ["--host", "192.0.2.1"],
            "--host 192.0.2.1, --port 0: can't listen on 192.0.2.1:0: Cannot assign requested "
            "address",
        ),
    ],
)
def test_what_serve_refuses_a_check_refuses_in_the_same_words(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    assert cli.main(["config", "check", "--port", "0", *arguments]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"
    assert len(list(Path("/proc/self/fd").iterdir())) <= num_open
    command = [sys.executable, "-m", "afferent.cli", "serve", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, f"error: {line}")


def test_a_port_that_is_taken_is_found_by_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert cli.main(["config", "check", "--port", port]) == 2
    assert capsys.readouterr().err.endswith(f"127.0.0.1:{port}: Address already in use\n")
    assert cli.main(["config", "check", "--port", port]) == 0, "nothing is left listening"


# An engine's own settings


class EchoSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a fake engine."""

    echo_delay_s: float = setting(0.5, "before each token", Group.ENGINE, gt=0)
    echo_cache_nbytes: int = setting(MiB, "what it remembers", Group.MEMORY, ge=1024)
    echo_loud: bool = setting(False, "in capitals", Group.COMMON)
    echo_voice: Literal["low", "high"] = setting("low", "its voice", Group.ENGINE)

    def check(self) -> None:
        if self.echo_loud and self.echo_voice == "low":
            raise ConfigError("echo_loud needs a high echo_voice")


class EchoEngine(ReferenceEngine):
    settings_type = EchoSettings  # type: ignore[assignment]


def test_an_engines_settings_stand_beside_the_servers(tmp_path: Path) -> None:
    file = tmp_path / "afferent.toml"
    file.write_text('port = 1\necho_cache_nbytes = "2MiB"\necho_voice = "high"\n')
    loaded = config.load(
        {"echo_loud": "true"},
        environ={"AFFERENT_ECHO_DELAY_S": "2"},
        file=file,
        extra=[EchoSettings],
    )
    assert loaded.config.port == 1
    assert loaded.of(EchoSettings) == EchoSettings(
        echo_delay_s=2.0, echo_cache_nbytes=2 * MiB, echo_loud=True, echo_voice="high"
    )
    assert loaded.sources["echo_delay_s"] == "environment"
    assert loaded.sources["echo_loud"] == "flag"
    assert loaded.sources["echo_voice"] == loaded.sources["port"] == str(file)
    assert dict(loaded.values())["echo_delay_s"] == 2.0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"echo_delay_s": "0"}, ["--echo-delay-s 0", "above 0"]),
        ({"echo_cache_nbytes": "1"}, ["--echo-cache-nbytes 1", "1KiB"]),
        ({"echo_voice": "middle"}, ["--echo-voice middle", "low, high"]),
        ({"echo_loud": "true"}, ["needs a high echo_voice"]),
        ({"echo_dely_s": "1"}, ["echo_dely_s", "echo_delay_s?"]),
    ],
)
def test_an_engines_settings_are_checked_likewise(flags: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(flags, environ={}, extra=[EchoSettings])
    for word in words:
        assert word in caught.value.message


def test_without_the_engine_its_settings_are_unknown() -> None:
    with pytest.raises(ConfigError, match="echo_voice"):
        config.load({"echo_voice": "high"}, environ={})


def test_names_that_clash_are_refused() -> None:
    class Port(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
        port: int = setting(1, "another port", Group.ENGINE)

    class Help(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
        help: int = setting(1, "what --help means already", Group.ENGINE)

    for struct, key in ((Port, "port"), (Help, "help"), (EchoSettings, "echo_delay_s")):
        with pytest.raises(ConfigError, match=f"{struct.__name__} declares '{key}'"):
            config.load(environ={}, extra=[EchoSettings, struct])


def test_every_field_is_declared_by_setting() -> None:
    class Bare(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
        bare: int = 1

    with pytest.raises(ConfigError, match=r"Bare\.bare"):
        config.declared(Bare)


def test_the_engine_is_known_before_its_settings(tmp_path: Path) -> None:
    """The engine's name is read in the usual order, and other settings are ignored."""
    file = tmp_path / "afferent.toml"
    file.write_text('engine = "file"\necho_voice = "high"\n')
    environ = {"AFFERENT_ENGINE": "environment", "AFFERENT_ECHO_LOUD": "true"}
    assert config.peek("engine", {"engine": "flag"}, environ=environ, file=file) == "flag"
    assert config.peek("engine", environ=environ, file=file) == "environment"
    assert config.peek("engine", environ={}, file=file) == "file"
    assert config.peek("engine", environ={}) == "reference"


def test_the_command_line_takes_the_engines_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = f"{__name__}:EchoEngine"
    arguments = ["--echo-delay-s", "3", "--port", "9"]
    assert cli.main(["config", "show", *arguments, "--engine", engine]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["echo_delay_s"] == ["echo_delay_s", "3", "flag"]
    assert lines["port"] == ["port", "9", "flag"]
    assert lines["echo_voice"] == ["echo_voice", "low", "default"]
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help", "engine", f"--engine={engine}"])
    assert "--echo-voice low|high" in capsys.readouterr().out
    assert cli.main(["config", "show", *arguments]) == 2
    assert "no flag --echo-delay-s; if it is an engine's own, name" in capsys.readouterr().err
    assert cli.main(["config", "show", "--engine", "eco"]) == 2
    assert "--engine eco: must be one of openai, reference, " in capsys.readouterr().err


def shares_of(**settings: Any) -> dict[ObjectKind, float]:
    return config.load(
        {key: str(value) for key, value in settings.items()}, environ={}
    ).config.shares


def test_features_get_what_the_other_kinds_leave() -> None:
    shares = shares_of(raw_share=0.2, embeddings_share=0.1, records_share=0.05)
    assert shares[ObjectKind.FEATURES] == pytest.approx(0.65)
    assert sum(shares.values()) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="leave nothing of the arena for features"):
        shares_of(raw_share=0.5, embeddings_share=0.4, records_share=0.1)


def test_records_have_room_in_a_small_arena_too() -> None:
    assert shares_of()[ObjectKind.RECORDS] == 0.02
    assert shares_of(arena_nbytes=256 * MiB)[ObjectKind.RECORDS] == 0.02
    assert shares_of(arena_nbytes=8 * MiB)[ObjectKind.RECORDS] == pytest.approx(1 / 8)
    tiny = shares_of(arena_nbytes=MiB, raw_share=0.2)
    assert tiny[ObjectKind.RECORDS] == pytest.approx(0.2)
    assert tiny[ObjectKind.FEATURES] == pytest.approx(0.6)
