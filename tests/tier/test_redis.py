"""Valkey or Redis, a real one: full, dead, slow, half open, behind a password and TLS."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from afferent.errors import ConfigError, TierUnavailable
from afferent.testing import CHECKS_OF_TIERS, check_tier
from afferent.tier.protocol import PART_NBYTES, Value, Wanted
from afferent.tier.redis_tier import RedisTier
from afferent.tier.registry import open_tier, without_secrets
from tests.server import wait_until
from tests.tier.servers import BadLink, RedisServer, server_program

NAME = b"n" * 32
BODY = memoryview(bytes(range(256)) * (4 * PART_NBYTES // 256))
TIMEOUT_S = 0.5
SLACK_S = 2.0
"""The machine may be busy."""


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def link(server: RedisServer) -> Iterator[BadLink]:
    with BadLink(server.port) as link:
        yield link


@pytest.fixture
def tier(link: BadLink) -> Iterator[RedisTier]:
    tier = RedisTier(link.url)
    tier.put_many([Value(NAME, b"head", BODY)], ttl_s=60, deadline_s=soon(20.0))
    yield tier
    tier.close()


def soon(timeout_s: float = TIMEOUT_S) -> float:
    return time.monotonic() + timeout_s


def read(tier: RedisTier, *, timeout_s: float = 20.0) -> bytes | None:
    target = memoryview(bytearray(len(BODY)))
    (is_there,) = tier.get_many_into([Wanted(NAME, target)], deadline_s=soon(timeout_s))
    return bytes(target) if is_there else None


def calls(tier: RedisTier) -> list[Callable[[], object]]:
    return [
        lambda: tier.exists_many([NAME], deadline_s=soon()),
        lambda: read(tier, timeout_s=TIMEOUT_S),
        lambda: tier.put_many([Value(b"p" * 32, b"", BODY)], ttl_s=9, deadline_s=soon()),
        lambda: tier.delete_many([NAME], deadline_s=soon()),
        lambda: tier.health(deadline_s=soon()),
        lambda: tier.claim_many([NAME], holder=b"h", ttl_s=1, deadline_s=soon()),
    ]


def assert_unavailable(call: Callable[[], object]) -> None:
    start_s = time.monotonic()
    with pytest.raises(TierUnavailable):
        call()
    assert time.monotonic() - start_s < TIMEOUT_S + SLACK_S


def drip() -> Callable[[bytes], bytes]:
    """A byte now and then: no single wait is long."""

    def fault(piece: bytes) -> bytes:
        time.sleep(0.02)
        return piece[:1]

    return fault


@pytest.mark.parametrize("fault", [lambda _: None, drip(), lambda piece: b"#" + piece])
def test_every_call_ends_by_its_deadline(tier: RedisTier, link: BadLink, fault: object) -> None:
    link.fault = fault  # type: ignore[assignment]
    for call in calls(tier):
        assert_unavailable(call)
    link.fault = None
    assert read(tier) == bytes(BODY), "and then it is as before"


def test_a_link_that_ends_midway(tier: RedisTier, link: BadLink) -> None:
    num_nbytes = 0

    def cut(piece: bytes) -> bytes:
        nonlocal num_nbytes
        num_nbytes += len(piece)
        if num_nbytes > 2 * PART_NBYTES:
            link.cut()
        return piece

    link.fault = cut
    assert_unavailable(lambda: read(tier, timeout_s=TIMEOUT_S))
    link.fault = None
    wait_until(lambda: reads_again(tier))


def reads_again(tier: RedisTier) -> bool:
    """The end of a connection that was cut may be on its way still."""
    try:
        return read(tier) == bytes(BODY)
    except TierUnavailable:
        return False


def test_an_idle_connection_that_was_cut_is_not_used(tier: RedisTier, link: BadLink) -> None:
    assert read(tier) == bytes(BODY)
    link.cut()
    wait_until(lambda: reads_again(tier))


def test_no_answer_of_before_is_taken_for_another(tier: RedisTier, link: BadLink) -> None:
    """What was asked for and came too late is not what the next one gets."""

    def late(piece: bytes) -> bytes:
        time.sleep(0.2)
        return piece

    link.fault = late
    with pytest.raises(TierUnavailable):
        tier.exists_many([NAME], deadline_s=soon(0.05))
    link.fault = None
    for _ in range(20):
        assert tier.exists_many([b"m" * 32], deadline_s=soon(20.0)) == [None]


def test_what_was_evicted_in_part_is_absent(tier: RedisTier, server: RedisServer) -> None:
    keys = [key for key in server.all_keys() if NAME.hex().encode() in key and key.endswith(b":2")]
    with server.client() as client:
        assert client.delete(*keys) == 1
    assert read(tier) is None
    assert tier.exists_many([NAME], deadline_s=soon(20.0)) != [None], "only its head is left"


def test_a_full_server_says_so_and_keeps_no_part(tier: RedisTier, server: RedisServer) -> None:
    with server.client() as client:
        used: int = client.info("memory")["used_memory"]  # type: ignore[index]
        client.config_set("maxmemory", used + 2 * PART_NBYTES)
        client.config_set("maxmemory-policy", "noeviction")
        try:
            large = Value(b"l" * 32, b"head", memoryview(bytes(16 * PART_NBYTES)))
            assert tier.put_many([large], ttl_s=60, deadline_s=soon(20.0)) == [False]
        finally:
            client.config_set("maxmemory", 0)
    assert not any(large.name.hex().encode() in key for key in server.all_keys())
    assert read(tier) == bytes(BODY)


def test_a_server_that_dies_and_comes_again() -> None:
    with RedisServer() as server:
        tier = RedisTier(server.url)
        value = Value(NAME, b"head", BODY)
        assert tier.put_many([value], ttl_s=60, deadline_s=soon(20.0)) == [True]
        server.kill()
        for call in calls(tier):
            assert_unavailable(call)
        server.start()
        assert tier.exists_many([NAME], deadline_s=soon(20.0)) == [None]
        assert tier.put_many([value], ttl_s=60, deadline_s=soon(20.0)) == [True]
        assert read(tier) == bytes(BODY)
        tier.close()


def test_a_server_that_only_reads_is_unavailable_for_writing(server: RedisServer) -> None:
    with RedisServer("--replicaof", "127.0.0.1", str(server.port)) as replica:
        tier = RedisTier(replica.url)
        value = Value(b"r" * 32, b"head", BODY)
        assert_unavailable(lambda: tier.put_many([value], ttl_s=60, deadline_s=soon()))
        tier.close()


def test_it_tells_what_its_operator_should_change(server: RedisServer) -> None:
    tier = RedisTier(server.url)
    health = tier.health(deadline_s=soon(20.0))
    assert health.used_nbytes is not None
    assert health.max_nbytes is None
    assert [advice for advice in health.advice if "maxmemory" in advice]
    with server.client() as client:
        client.config_set("maxmemory", 1 << 30)
        client.config_set("maxmemory-policy", "allkeys-lfu")
        health = tier.health(deadline_s=soon(20.0))
        client.config_set("maxmemory", 0)
    assert (health.max_nbytes, health.advice) == (1 << 30, ())
    tier.close()


def test_who_has_no_password_is_turned_away() -> None:
    with RedisServer(password="open/sesame") as server:
        for password in ("", ":wrong@"):
            wrong = RedisTier(f"redis://{password}127.0.0.1:{server.port}")
            assert_unavailable(lambda: wrong.exists_many([NAME], deadline_s=soon()))  # noqa: B023
            wrong.close()
        right = open_tier(f"valkey://:{quote('open/sesame', safe='')}@127.0.0.1:{server.port}/2")
        check_tier("what_was_put_is_there_whole", right)
        right.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl is installed, and a certificate is needed")
    server_program()
    folder = tmp_path_factory.mktemp("tls")
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("name", CHECKS_OF_TIERS)
def test_tls(name: str, certificate: Path, tls_server: RedisServer) -> None:
    tier = open_tier(tls_url(tls_server, certificate))
    check_tier(name, tier)
    tier.close()


def tls_url(server: RedisServer, certificate: Path | None) -> str:
    trusts = f"?ssl_ca_certs={certificate / 'cert.pem'}" if certificate is not None else ""
    return f"rediss://127.0.0.1:{server.tls_port}/0{trusts}"


@pytest.fixture(scope="module")
def tls_server(certificate: Path) -> Iterator[RedisServer]:
    with RedisServer(certificate=certificate) as server:
        yield server


def test_a_certificate_that_nobody_vouches_for_is_refused(tls_server: RedisServer) -> None:
    tier = RedisTier(tls_url(tls_server, None))
    assert_unavailable(lambda: tier.exists_many([NAME], deadline_s=soon()))
    tier.close()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis", "must be a URL"),
        ("nonsense://host", "nonsense"),
        ("redis://host/0?no_such_option=1", "no_such_option"),
        ("redis://host:port", "ort"),
    ],
)
def test_what_is_no_tier_is_refused_at_once(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        open_tier(url)


def test_a_url_is_shown_without_its_secrets() -> None:
    shown = without_secrets("rediss://me:secret@host:6380/0?password=secret")
    assert shown == "rediss://host:6380/0"
    assert without_secrets("file:///srv/tier") == "file:///srv/tier"
