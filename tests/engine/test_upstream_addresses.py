"""Addresses of an upstream's servers, and where they come from."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from afferent.engines.http_upstream.addresses import Address, parse
from afferent.engines.http_upstream.sources import Sources, source
from afferent.engines.openai.settings import OpenAISettings
from afferent.errors import ConfigError

PIN = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/a.sock", Address(url="unix:/run/a.sock")),
        ("http://a:8000", Address(url="http://a:8000")),
        ("http://a:8000/", Address(url="http://a:8000")),
        ("https://[::1]:8443", Address(url="https://[::1]:8443")),
        (f"https://b#sha256={PIN.upper()}", Address(url="https://b", sha256=PIN)),
    ],
)
def test_address_is_read(text: str, address: Address) -> None:
    assert parse(text) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", "unix:", "a:8000", "ftp://a", "http://", "http://a/v1", "http://a?x=1", "http://a:x"),
        *("http://u@a", "http://a:0", "http://a:99999", f"http://a#sha256={PIN}"),
        *("https://a#sha256=12", "https://a#other", "dns+unix:/a", "file:relative", "dns+a:1"),
    ],
)
def test_malformed_address_raises_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="must be"):
        source(text)


def look(sources: Sources) -> dict[str, Address]:
    return asyncio.run(sources.look())


def test_all_addresses_of_a_name_are_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    ips = ["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1"]

    async def addresses(_: Any, host: str, port: int, **__: Any) -> Any:
        assert (host, port) == ("engines", 8000)
        if not ips:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ips]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", addresses)
    sources = Sources([source("dns+http://engines:8000", api_key="key")])
    assert not sources.is_fixed
    found = look(sources)
    assert [address.ip for address in found.values()] == ["10.0.0.1", "10.0.0.2", "fd00::1"]
    assert {(each.url, each.api_key) for each in found.values()} == {("http://engines:8000", "key")}
    ips.clear()
    assert look(sources) == found, "a name that can't be looked up keeps its addresses"
    assert list(sources.failures.values()) == ["no such name"]
    ips.append("10.0.0.9")
    assert [address.ip for address in look(sources).values()] == ["10.0.0.9"]
    assert not sources.failures


def test_file_is_read_again_and_a_malformed_one_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "engines"
    file.write_text(f"# two\nhttp://a:1\n\nhttps://b:2#sha256={PIN} own-key\n")
    sources = Sources([source(f"file:{file}", api_key="key"), source("http://c:3")])
    found = look(sources)
    assert list(found) == ["http://a:1", "https://b:2", "http://c:3"]
    assert [each.api_key for each in found.values()] == ["key", "own-key", ""]
    file.write_text("http://a:1\nnonsense\n")
    assert look(sources) == found
    assert "line 2" in next(iter(sources.failures.values()))
    file.unlink()
    assert look(sources) == found
    file.touch()
    assert look(sources) == found
    file.write_text("# none\n")
    assert list(look(sources)) == ["http://c:3"]
    file.write_text("http://a:1")
    assert list(look(sources)) == ["http://a:1", "http://c:3"]
    file.write_text("x" * (1 << 20) + "y")
    assert list(look(sources)) == ["http://a:1", "http://c:3"]
    assert "bytes" in next(iter(sources.failures.values()))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"engine_url": ("http://a/v1",)}, "--engine-url http://a/v1: must be"),
        ({"engine_url": ("http://a",), "engine_api_key": ("x", "y")}, "2 keys"),
        ({"route_header": "Content-Length"}, "--route-header"),
        ({"engine_convert_to": "jpeg", "engine_image_formats": ("png",)}, "--engine-convert-to"),
    ],
)
def test_settings_that_make_no_sense_raise_config_error(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OpenAISettings(**given).check()


def test_each_server_has_its_key() -> None:
    urls = ("http://a", "http://b")
    settings = OpenAISettings(engine_url=urls, engine_api_key=("one", "two"))
    assert [each.api_key for each in look(Sources(settings.sources())).values()] == ["one", "two"]
    settings = OpenAISettings(engine_url=urls, engine_api_key=("one",))
    assert [each.api_key for each in look(Sources(settings.sources())).values()] == ["one", "one"]
