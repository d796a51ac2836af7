"""A real Valkey or Redis server: full, dead, slow, half open, with a password and with TLS."""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from afferent.conformance import CHECKS_OF_TIERS, check_tier
from afferent.errors import ConfigError, TierUnavailable
from afferent.tier.protocol import PART_NBYTES, Value, Wanted
from afferent.tier.redis_tier import RedisTier
from afferent.tier.registry import open_tier, without_secrets
from afferent.tier.sealed import Sealer
from afferent.tier.vault import REJECTED, Body, Vault, Wish
from afferent.types import ContentKey, ObjectKind
from tests.server import wait_until
from tests.tier.servers import BadLink, RedisServer, server_program

NAME = b"n" * 32
BODY = memoryview(bytes(range(256)) * (4 * PART_NBYTES // 256))
TIMEOUT_S = 0.5
SLACK_S = 5.0
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


def test_a_name_that_no_resolver_answers_for_costs_one_time_out(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, is_over = RedisTier(f"redis://localhost:{server.port}/0"), threading.Event()
    resolve = socket.getaddrinfo

    def hang(*args: Any, **options: Any) -> Any:
        is_over.wait()
        return resolve(*args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    for call in calls(tier):
        assert_unavailable(call)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert tier.exists_many([b"m" * 32], deadline_s=soon(20.0)) == [None], "others hang still"
    is_over.set()
    tier.close()


def drip() -> Callable[[bytes], bytes]:
    """Return a fault that sends a byte from time to time, so that no single wait is long."""

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
    """Return whether the value is read; the end of a cut connection may arrive late."""
    try:
        return read(tier) == bytes(BODY)
    except TierUnavailable:
        return False


def test_an_idle_connection_that_was_cut_is_not_used(tier: RedisTier, link: BadLink) -> None:
    assert read(tier) == bytes(BODY)
    link.cut()
    wait_until(lambda: reads_again(tier))


def test_no_answer_of_before_is_taken_for_another(tier: RedisTier, link: BadLink) -> None:
    """A late answer is not taken for that of the next call."""

    def late(piece: bytes) -> bytes:
        time.sleep(0.2)
        return piece

    link.fault = late
    with pytest.raises(TierUnavailable):
        tier.exists_many([NAME], deadline_s=soon(0.05))
    link.fault = None
    for _ in range(20):
        assert tier.exists_many([b"m" * 32], deadline_s=soon(20.0)) == [None]


@pytest.mark.parametrize("change", ["longer", "shorter", "far longer", "another type"])
def test_fetch_of_a_part_of_another_length_is_rejected_and_deleted(
    server: RedisServer, change: str
) -> None:
    """An absent part has another meaning: the server may evict any entry."""
    vault = Vault(RedisTier(server.url), Sealer())
    key = ContentKey(change.encode().ljust(32))
    vault.put([Body(key, ObjectKind.FEATURES, BODY)], ttl_s=60.0, deadline_s=soon(20.0))
    (head,) = vault.look_up([key], deadline_s=soon(20.0))
    assert head is not None
    part = b"afferent:{%s}:2" % vault.name_of(key).hex().encode()
    with server.client() as client:
        match change:
            case "longer":
                client.append(part, b"x")
            case "shorter":
                client.set(part, bytes(BODY[2 * PART_NBYTES : 3 * PART_NBYTES - 1]))
            case "far longer":
                client.setrange(part, 64 * PART_NBYTES, b"x")
            case "another type":
                client.delete(part)
                client.rpush(part, b"x")
    before = REJECTED.labels("body").values[0]
    wish = Wish(head, memoryview(bytearray(head.nbytes)))
    assert vault.fetch([wish], deadline_s=soon(20.0)) == [False]
    assert REJECTED.labels("body").values[0] == before + 1
    assert not [each for each in server.all_keys() if vault.name_of(key).hex().encode() in each]
    vault.close()


@pytest.mark.parametrize(
    "entry", [b"abc", struct.pack("<QB", 1 << 44, 1), bytes(300 << 10), b"", [b"x"]]
)
def test_look_up_of_a_foreign_entry_is_rejected_and_deleted(
    server: RedisServer, entry: bytes | list[bytes]
) -> None:
    vault, key = Vault(RedisTier(server.url), Sealer()), ContentKey(b"f" * 32)
    head = b"afferent:{%s}:head" % vault.name_of(key).hex().encode()
    with server.client() as client:
        client.rpush(head, *entry) if isinstance(entry, list) else client.set(head, entry)
        before = REJECTED.labels("head").values[0]
        assert vault.look_up([key], deadline_s=soon(20.0)) == [None]
        is_rejected = entry != b""  # an empty string looks like an absent one
        assert REJECTED.labels("head").values[0] == before + is_rejected
        assert bool(client.exists(head)) != is_rejected
        client.delete(head)
    vault.close()


def test_delete_of_an_entry_with_a_bogus_length_asks_for_few_parts(server: RedisServer) -> None:
    tier = RedisTier(server.url)
    head = b"afferent:{%s}:head" % (b"d" * 32).hex().encode()
    with server.client() as client:
        client.set(head, struct.pack("<QB", 1 << 44, 1))
        before = client.info("stats")["total_net_input_bytes"]  # type: ignore[index]
        assert tier.delete_many([b"d" * 32], deadline_s=soon(20.0)) == 1
        grown = client.info("stats")["total_net_input_bytes"] - before  # type: ignore[index]
    assert grown < 64 << 10
    tier.close()


def test_a_connection_with_unread_answers_is_not_used_again(tier: RedisTier, link: BadLink) -> None:
    """A read fails while the next answer is still on its way."""
    names, bodies = [b"1" * 32, b"2" * 32, b"3" * 32], [b"one", b"two", b"far"]
    values = [Value(name, b"", memoryview(b)) for name, b in zip(names, bodies, strict=True)]
    tier.put_many(values, ttl_s=60, deadline_s=soon(20.0))
    have_come: dict[threading.Thread, bytes] = {}

    def lag(piece: bytes) -> bytes:
        """Delay the second answer of the first used connection until the third."""
        if have_come and threading.current_thread() not in have_come:
            return piece
        before = have_come.get(threading.current_thread(), b"")
        come = have_come[threading.current_thread()] = before + piece
        sent = come[:9] if len(come) <= 18 else come
        return sent[len(before[:9]) :]

    def fail(_: int) -> bool:
        raise ZeroDivisionError

    link.fault = lag
    wanted = [Wanted(name, memoryview(bytearray(3)), fail) for name in names[:2]]
    with pytest.raises(ZeroDivisionError):
        tier.get_many_into(wanted, deadline_s=soon(20.0))
    wait_until(lambda: list(have_come.values()) == [b"$3\r\none\r\n$3\r\ntwo\r\n"])
    target = memoryview(bytearray(3))
    assert tier.get_many_into([Wanted(names[2], target)], deadline_s=soon(20.0)) == [True]
    assert bytes(target) == b"far"


def test_an_idle_connection_that_has_an_answer_is_not_used(tier: RedisTier, link: BadLink) -> None:
    """The second copy of the answer arrives with the first one, or after it."""
    found = tier.exists_many([NAME], deadline_s=soon(20.0))
    has_come = threading.Event()

    def twice(piece: bytes) -> bytes:
        has_come.set()
        return piece + piece

    link.fault = twice
    assert tier.exists_many([NAME], deadline_s=soon(20.0)) == found
    assert has_come.is_set()
    link.fault = None
    for _ in range(3):
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


def test_value_of_one_part_is_written_by_one_command(server: RedisServer) -> None:
    """Two nodes write one name at the same time: no header meets the other's body."""
    tier = RedisTier(server.url)
    name = b"1" * 32
    with server.client() as client:
        client.config_resetstat()
        values = [Value(name, bytes([i]) * 9, memoryview(bytes([i]) * 100)) for i in range(2)]
        assert tier.put_many(values, ttl_s=60, deadline_s=soon(20.0)) == [True, True]
        (found,) = tier.exists_many([name], deadline_s=soon(20.0))
        target = memoryview(bytearray(100))
        assert tier.get_many_into([Wanted(name, target)], deadline_s=soon(20.0)) == [True]
        assert found is not None
        assert (found.head, bytes(target)) == (b"\1" * 9, b"\1" * 100)
        stats: Any = client.info("commandstats")
        assert (stats["cmdstat_mset"]["calls"], "cmdstat_set" in stats) == (2, False)
        keys = [key for key in server.all_keys() if name.hex().encode() in key]
        assert len(keys) == 2
        assert all(0 < int(str(client.pttl(key))) <= 60_000 for key in keys), "both expire"
    tier.close()


@pytest.fixture
def without(server: RedisServer) -> Iterator[Callable[[str], RedisTier]]:
    """Return a tier whose user may run all commands but those of one group."""
    tiers: list[RedisTier] = []
    with server.client() as client:

        def limited(rights: str) -> RedisTier:
            client.execute_command(
                "ACL", "SETUSER", "limited", "on", ">pass", "~*", "+@all", rights
            )
            tiers.append(RedisTier(server.url.replace("://", "://limited:pass@")))
            return tiers[-1]

        yield limited
        for tier in tiers:
            tier.close()
        client.execute_command("ACL", "DELUSER", "limited")


def test_refused_release_of_a_claim_is_known(without: Callable[[str], RedisTier]) -> None:
    """A node that believes that it has released a claim would wait for itself."""
    tier, name = without("-@scripting"), b"3" * 32
    claim = {"holder": b"h" * 16, "deadline_s": soon(20.0)}
    assert tier.claim_many([name], ttl_s=60.0, **claim) == [True]
    with pytest.raises(TierUnavailable, match=r"(?i)perm"):
        tier.release_many([name], **claim)


def test_value_that_may_not_expire_is_not_left(
    without: Callable[[str], RedisTier], server: RedisServer
) -> None:
    tier, name = without("-pexpire"), b"4" * 32
    with pytest.raises(TierUnavailable, match=r"(?i)perm"):
        tier.put_many([Value(name, b"head", memoryview(b"body"))], ttl_s=60, deadline_s=soon(20.0))
    assert not any(name.hex().encode() in key for key in server.all_keys())


def test_full_server_keeps_the_old_value_of_one_part(server: RedisServer) -> None:
    tier = RedisTier(server.url)
    value = Value(b"2" * 32, b"head", memoryview(b"body"))
    assert tier.put_many([value], ttl_s=60, deadline_s=soon(20.0)) == [True]
    with server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
        try:
            new = Value(value.name, b"new", memoryview(b"new"))
            assert tier.put_many([new], ttl_s=60, deadline_s=soon(20.0)) == [False]
        finally:
            client.config_set("maxmemory", 0)
    (found,) = tier.exists_many([value.name], deadline_s=soon(20.0))
    assert found is not None
    assert found.head == b"head"
    tier.close()


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
