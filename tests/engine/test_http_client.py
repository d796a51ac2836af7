"""The HTTP client of an upstream's servers: retries, ejection, draining, certificates and keys."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from afferent.engines.http_upstream import client as client_module
from afferent.engines.http_upstream import placement as placement_module
from afferent.engines.http_upstream import server as server_module
from afferent.engines.http_upstream.client import EJECTIONS, RETRIES, HttpClient
from afferent.engines.http_upstream.server import trust_of
from afferent.engines.http_upstream.sources import Sources, source
from afferent.engines.openai.settings import OpenAISettings
from afferent.engines.openai.traits import OpenAITraits
from afferent.engines.upstream import UpstreamRequest
from afferent.errors import ConfigError, EngineUnavailable, StoreRestarted
from tests.end_to_end.replicas import CHAT, Replica, Replicas
from tests.server import wait_until

KEY = bytes(32)
WRONG_PIN = "#sha256=" + "00" * 32
BODY = b'{"messages": [{"role": "user", "content": "hello"}]}'


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    with Replicas(3).running() as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(client_module, "_LOOK_S", 0.05)
    monkeypatch.setattr(client_module, "_SOURCES_LOOK_S", 0.05)
    monkeypatch.setattr(server_module, "_LOOK_TIMEOUT_S", 0.2)
    yield
    replicas.hold(is_held=False)
    replicas.reset()


class Body:
    """Body that counts how often it was sent."""

    def __init__(self) -> None:
        self.num_sent = 0

    @property
    def nbytes(self) -> int:
        return len(BODY)

    async def chunks(self) -> AsyncIterator[bytes]:
        self.num_sent += 1
        yield BODY[:10]
        yield BODY[10:]


def request(body: object = BODY, *, placement: bytes = KEY, **headers: str) -> UpstreamRequest:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    pairs.append((b"content-type", b"application/json"))
    return UpstreamRequest(
        method="POST",
        target=CHAT,
        headers=pairs,
        body=body,  # type: ignore[arg-type]
        placement=placement,
    )


async def asked(client: HttpClient, sent: UpstreamRequest) -> tuple[int, bytes]:
    async with client.forward(sent) as answer:
        return answer.status, b"".join([chunk async for chunk in answer.chunks])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def run(
    replicas: Replicas,
    life: Callable[[HttpClient], Awaitable[None]],
    *,
    settings: OpenAISettings | None = None,
    urls: list[str] | None = None,
) -> None:
    """Run ``life`` with a client of the servers, once all of them are ready."""
    settings = settings or OpenAISettings(engine_url=tuple(urls or replicas.urls))

    async def main() -> None:
        trust = trust_of(settings.engine_ca) if settings.engine_ca else None
        async with HttpClient.over(
            Sources(settings.sources()),
            title="the engine",
            traits=OpenAITraits(settings),
            trust=trust,
            route_header=settings.route_header,
        ) as client:
            await until(lambda: all(each.is_ready for each in client._placement.replicas))
            await life(client)

    asyncio.run(main())


def first_of(replicas: Replicas) -> Replica:
    """Return the server that got the only request."""
    (found,) = [each for each in replicas.all if each.got]
    return found


async def favourite(client: HttpClient, replicas: Replicas) -> Replica:
    status, _ = await asked(client, request())
    assert status == 200
    found = first_of(replicas)
    found.got.clear()
    return found


async def held(
    client: HttpClient, replicas: Replicas, number: int = 1
) -> tuple[Replica, list[asyncio.Task[tuple[int, bytes]]]]:
    """Return a server that answers no request, and requests that it has."""
    server = await favourite(client, replicas)
    replicas.hold(is_held=True, replicas=[server])
    waiting = [asyncio.create_task(asked(client, request())) for _ in range(number)]
    await until(lambda: server.num_running == number)
    return server, waiting


@pytest.mark.parametrize("failure", ["status", "hangs_up"])
def test_failed_request_goes_to_another_server(replicas: Replicas, failure: str) -> None:
    async def life(client: HttpClient) -> None:
        bad = await favourite(client, replicas)
        bad.status, bad.hangs_up = (503, False) if failure == "status" else (200, True)
        body = Body()
        status, text = await asked(client, request(body))
        assert (status, body.num_sent) == (200, 2)
        assert bad.name.encode() not in text
        assert RETRIES.labels().values == [1.0]
        (other,) = [each for each in replicas.all if each.got and each is not bad]
        assert other.got[0].body == BODY
        assert other.got[0].headers["content-length"] == str(len(BODY))

    run(replicas, life)


def test_stopped_server_is_left_at_once_and_found_again(replicas: Replicas) -> None:
    async def life(client: HttpClient) -> None:
        bad = await favourite(client, replicas)
        bad.health = 503
        await until(lambda: sum(each.is_ready for each in client._placement.replicas) == 2)
        assert (await asked(client, request()))[0] == 200
        assert not bad.got
        bad.health = 404  # a server without a health check
        await until(lambda: all(each.is_ready for each in client._placement.replicas))

    run(replicas, life)


def test_all_servers_failing_gives_their_last_answer(replicas: Replicas) -> None:
    async def life(client: HttpClient) -> None:
        for each in replicas.all:
            each.status = 503
        status, text = await asked(client, request())
        assert status == 503
        assert b"replica-" in text
        assert sum(len(each.got) for each in replicas.all) == 3

    run(replicas, life)


def test_body_that_is_streamed_is_not_sent_again(replicas: Replicas) -> None:
    async def life(client: HttpClient) -> None:
        (await favourite(client, replicas)).hangs_up = True
        with pytest.raises(EngineUnavailable):
            await asked(client, request(Body().chunks()))

    run(replicas, life)


class Arriving(Body):
    """Body of which the second half arrives later, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.rest: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def chunks(self) -> AsyncIterator[bytes]:
        yield BODY[:10]
        yield await self.rest


def running(client: HttpClient) -> int:
    return sum(each.num_running for each in client._placement.replicas)


def test_request_that_has_begun_is_not_sent_again(replicas: Replicas) -> None:
    async def life(client: HttpClient) -> None:
        bad, ends = await favourite(client, replicas), list[bool]()
        body = Arriving()
        begun = client.begin(request(body, more="x"), lambda: ends.append(True))
        await until(lambda: bad.arrived_nbytes > len(BODY))
        assert (running(client), ends) == (1, [])
        body.rest.set_result(BODY[10:])
        whole = Body()
        status, text = await asked(client, replace(request(whole), begun=begun))
        assert (status, whole.num_sent, ends) == (200, 0, [True])
        assert bad.name.encode() in text
        (got,) = bad.got
        assert (got.body, got.headers["more"]) == (BODY, "x")
        assert running(client) == 0

    run(replicas, life)


@pytest.mark.parametrize("failure", ["status", "hangs_up"])
def test_request_that_has_begun_and_fails_goes_to_another_server(
    replicas: Replicas, failure: str
) -> None:
    async def life(client: HttpClient) -> None:
        bad = await favourite(client, replicas)
        before = RETRIES.labels().values[0]
        bad.status, bad.hangs_up = (503, False) if failure == "status" else (200, True)
        body, whole = Arriving(), Body()
        body.rest.set_result(BODY[10:])
        begun = client.begin(request(body), lambda: None)
        status, _ = await asked(client, replace(request(whole), begun=begun))
        assert (status, whole.num_sent, len(bad.got)) == (200, 1, 1)
        assert RETRIES.labels().values == [before + 1]
        assert running(client) == 0

    run(replicas, life)


def test_request_that_is_closed_before_its_end_is_none(replicas: Replicas) -> None:
    async def life(client: HttpClient) -> None:
        bad, ends = await favourite(client, replicas), list[bool]()
        begun = client.begin(request(Arriving()), lambda: ends.append(True))
        await until(lambda: bad.arrived_nbytes > len(BODY))
        begun.close()
        begun.close()
        assert running(client) == 0
        await until(lambda: bad.num_arriving == 0)
        assert (bad.got, ends) == ([], [True])
        assert (await asked(client, request()))[0] == 200  # by another connection
        assert [got.body for got in bad.got] == [BODY]

    run(replicas, life)


def test_answer_before_the_end_of_a_body_closes_the_connection(replicas: Replicas) -> None:
    async def life(client: HttpClient) -> None:
        bad, ends = await favourite(client, replicas), list[bool]()
        bad.answers_early = True
        begun = client.begin(request(Arriving()), lambda: ends.append(True))
        await until(lambda: bool(ends))
        begun.close()
        bad.answers_early = False
        assert (await asked(client, request()))[0] == 200
        assert [got.body for got in bad.got] == [BODY]

    run(replicas, life)


def test_request_begins_only_while_a_server_is_ready(replicas: Replicas) -> None:
    async def life(client: HttpClient) -> None:
        for each in replicas.all:
            each.health = 503
        await until(lambda: not client.is_ready)
        with pytest.raises(EngineUnavailable):
            client.begin(request(Arriving()), lambda: None)
        assert running(client) == 0

    run(replicas, life)


def test_answer_that_breaks_off_is_not_asked_again(replicas: Replicas) -> None:
    async def life(client: HttpClient) -> None:
        (await favourite(client, replicas)).breaks_off = True
        with pytest.raises(EngineUnavailable, match="middle of an answer"):
            await asked(client, request(BODY[:-1] + b', "stream": true}'))
        assert sum(len(each.got) for each in replicas.all) == 1

    run(replicas, life)


def test_request_to_frozen_server_goes_to_another(replicas: Replicas) -> None:
    async def life(client: HttpClient) -> None:
        bad, (waiting,) = await held(client, replicas)
        bad.is_frozen = True  # no health check is answered any more
        status, text = await asyncio.wait_for(waiting, 30)
        assert status == 200
        assert bad.name.encode() not in text

    run(replicas, life)


def test_request_to_server_that_another_request_found_gone_goes_to_another(
    replicas: Replicas,
) -> None:
    """The next health check found no change, so that the waiting request was not told."""

    async def life(client: HttpClient) -> None:
        bad, (waiting,) = await held(client, replicas)
        bad.health = 503
        (server,) = [each for each in client._servers.values() if each.base == bad.url]
        await until(lambda: server.replica.is_ready)  # by a health check that was on its way
        server.replica.is_ready = False  # as after a connection that was refused
        status, text = await asyncio.wait_for(waiting, 30)
        assert status == 200
        assert bad.name.encode() not in text

    run(replicas, life)


def test_busy_server_keeps_its_requests_after_one_refused_connection(
    replicas: Replicas,
) -> None:
    """One missed health check then counted as three."""

    async def life(client: HttpClient) -> None:
        bad, (waiting,) = await held(client, replicas)
        (server,) = [each for each in client._servers.values() if each.base == bad.url]
        bad.is_frozen = True
        await until(lambda: server._num_unanswered == 1)
        server.replica.is_ready = False
        await until(lambda: server._num_unanswered == 2)
        assert not waiting.done()
        bad.is_frozen = False
        replicas.hold(is_held=False, replicas=[bad])
        assert bad.name.encode() in (await waiting)[1]

    run(replicas, life)


def test_requests_that_fail_together_are_all_sent_again_and_cost_the_budget_once(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def life(client: HttpClient) -> None:
        client._budget.left = 2
        monkeypatch.setattr(placement_module, "_RETRIES_A_REQUEST", 0)
        bad, waiting = await held(client, replicas, 6)
        bad.health = 503
        assert {status for status, _ in await asyncio.gather(*waiting)} == {200}
        assert client._budget.left == 0, "it was below, so that the next requests had no retries"
        assert RETRIES.labels().values == [6.0]

    run(replicas, life)


def test_overload_is_answered_when_the_budget_of_retries_is_spent(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def life(client: HttpClient) -> None:
        client._budget.left = 2
        monkeypatch.setattr(placement_module, "_RETRIES_A_REQUEST", 0)
        (await favourite(client, replicas)).status = 503
        found = await asyncio.gather(*(asked(client, request()) for _ in range(6)))
        assert sorted(status for status, _ in found) == [200] * 2 + [503] * 4

    run(replicas, life)


def test_field_of_a_client_that_an_answer_repeats_fits(replicas: Replicas) -> None:
    async def life(client: HttpClient) -> None:
        bad = await favourite(client, replicas)
        bad.fields = {"x-request-id": "a" * 60_000}
        assert (await asked(client, request()))[0] == 200
        assert len(bad.got) == 1

    run(replicas, life)


def test_answer_that_can_not_be_read_is_not_asked_again(replicas: Replicas) -> None:
    async def life(client: HttpClient) -> None:
        bad = await favourite(client, replicas)
        bad.fields = {"x-request-id": "a" * 100_000}
        with pytest.raises(EngineUnavailable):
            await asked(client, request())
        assert sum(len(each.got) for each in replicas.all) == 1

    run(replicas, life)


@pytest.mark.parametrize("value", ["café".encode(), b"caf\xe9"])
def test_header_that_is_not_ascii_arrives(replicas: Replicas, value: bytes) -> None:
    async def life(client: HttpClient) -> None:
        sent = replace(request(), headers=[*request().headers, (b"x-title", value)])
        assert (await asked(client, sent))[0] == 200
        assert first_of(replicas).got[0].headers["x-title"] == "café"

    run(replicas, life)


def test_server_with_many_failures_gets_no_requests_for_a_while(replicas: Replicas) -> None:
    async def life(client: HttpClient) -> None:
        bad = await favourite(client, replicas)
        bad.status = 500
        statuses = [(await asked(client, request()))[0] for _ in range(3)]
        assert statuses == [500, 500, 500], "an answer of a server that is well is its own"
        assert EJECTIONS.labels().values == [1.0]
        assert [(await asked(client, request()))[0] for _ in range(5)] == [200] * 5
        assert len(bad.got) == 3

    run(replicas, life)


def test_client_that_leaves_ends_the_request(replicas: Replicas) -> None:
    async def life(client: HttpClient) -> None:
        replicas.hold(is_held=True)
        waiting = asyncio.create_task(asked(client, request()))
        await until(lambda: sum(each.num_running for each in replicas.all) == 1)
        waiting.cancel()
        await until(lambda: sum(each.num_running for each in replicas.all) == 0)
        assert sum(each.num_running for each in client._placement.replicas) == 0

    run(replicas, life)


def test_server_that_leaves_a_file_is_drained(replicas: Replicas, tmp_path: Path) -> None:
    file = tmp_path / "engines"
    file.write_text("\n".join(replicas.urls))

    async def life(client: HttpClient) -> None:
        leaving = await favourite(client, replicas)
        replicas.hold(is_held=True, replicas=[leaving])
        waiting = asyncio.create_task(asked(client, request()))
        await until(lambda: leaving.num_running == 1)
        file.write_text("\n".join(url for url in replicas.urls if url != leaving.url))
        await until(lambda: len(client._servers) == 2)
        leaving.got.clear()
        assert (await asked(client, request()))[0] == 200
        assert not leaving.got
        replicas.hold(is_held=False)
        assert leaving.name.encode() in (await waiting)[1], "it has ended its request"
        await until(lambda: not client._leaving)
        file.write_text("\n".join(replicas.urls))
        await until(lambda: sum(each.is_ready for each in client._placement.replicas) == 3)

    run(replicas, life, urls=[f"file:{file}"])


def test_turns_of_a_conversation_go_to_one_server(replicas: Replicas) -> None:
    def turn(user: str, *more: str) -> bytes:
        texts = [user, *more]
        messages = ", ".join(f'{{"role": "user", "content": "{text}"}}' for text in texts)
        return f'{{"messages": [{messages}]}}'.encode()

    async def life(client: HttpClient) -> None:
        for number in range(16):
            for body in (turn(f"{number}"), turn(f"{number}", "more"), turn(f"{number}", "x", "y")):
                await asked(client, request(body, placement=b""))
            assert first_of(replicas)
            used.add(first_of(replicas).name)
            replicas.reset()

    used = set[str]()
    run(replicas, life)
    assert len(used) > 1


def test_route_header_has_the_key_and_replaces_the_clients(replicas: Replicas) -> None:
    settings = OpenAISettings(engine_url=(replicas.urls[0],), route_header="X-Session-Id")

    async def life(client: HttpClient) -> None:
        await asked(client, request(**{"x-session-id": "forged"}))
        await asked(client, request(placement=b""))
        await asked(client, request(placement=b""))
        first, *texts = [got.headers["x-session-id"] for got in replicas.all[0].got]
        assert first == KEY.hex()
        assert texts[0] == texts[1] != first

    run(replicas, life, settings=settings)


def test_each_server_gets_its_own_key_in_place_of_the_clients(replicas: Replicas) -> None:
    settings = OpenAISettings(
        engine_url=tuple(replicas.urls), engine_api_key=("key-0", "key-1", "key-2")
    )

    async def life(client: HttpClient) -> None:
        for number in range(60):  # so many that each replica gets a request, on any ports
            sent = request(
                placement=bytes([number]), authorization="Bearer client", **{"x-api-key": "client"}
            )
            assert (await asked(client, sent))[0] == 200
        for number, each in enumerate(replicas.all):
            assert each.got
            for got in each.got:
                assert got.headers["authorization"] == f"Bearer key-{number}"
                assert "x-api-key" not in got.headers

    run(replicas, life, settings=settings)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a self-signed certificate for 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    command += ["-subj", "/CN=engine", "-addext", "subjectAltName=IP:127.0.0.1,DNS:engines.test"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def secure(certificate: Path) -> Iterator[Replicas]:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    with Replicas(1, tls=tls).running() as running:
        yield running


def test_certificate_is_verified_by_authority_or_by_its_digest(
    secure: Replicas, certificate: Path
) -> None:
    (url,) = secure.urls
    der = ssl.PEM_cert_to_DER_cert((certificate / "cert.pem").read_text())
    pin = hashlib.sha256(der).hexdigest()

    async def life(client: HttpClient) -> None:
        assert (await asked(client, request()))[0] == 200

    run(secure, life, urls=[f"{url}#sha256={pin}"])
    ca = str(certificate / "cert.pem")
    run(secure, life, settings=OpenAISettings(engine_url=(url,), engine_ca=ca))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each name have the address of the servers."""

    async def addresses(_: Any, __: str, port: int, **___: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", addresses)


@pytest.mark.usefixtures("names")
def test_server_of_a_name_is_reached_at_its_address(replicas: Replicas) -> None:
    port = replicas.urls[0].rpartition(":")[2]

    async def life(client: HttpClient) -> None:
        assert (await asked(client, request()))[0] == 200
        assert replicas.all[0].got[0].headers["host"] == f"engines.test:{port}"

    run(replicas, life, urls=[f"dns+http://engines.test:{port}"])


@pytest.mark.usefixtures("names")
def test_certificate_of_a_name_is_verified_at_its_address(
    secure: Replicas, certificate: Path
) -> None:
    port = secure.urls[0].rpartition(":")[2]
    ca = str(certificate / "cert.pem")

    async def life(client: HttpClient) -> None:
        assert (await asked(client, request()))[0] == 200

    good = OpenAISettings(engine_url=(f"dns+https://engines.test:{port}",), engine_ca=ca)
    run(secure, life, settings=good)


def connections_to(port: int) -> list[Any]:
    own = psutil.Process().net_connections("tcp")
    return [each for each in own if each.raddr and each.raddr.port == port]


@pytest.mark.parametrize(
    ("host", "pin", "is_known"),
    [
        ("127.0.0.1", "", False),
        ("127.0.0.1", "#sha256=" + "00" * 32, True),
        ("localhost", "", True),
    ],
)
def test_wrong_certificate_gets_no_request(
    secure: Replicas, certificate: Path, host: str, pin: str, is_known: bool
) -> None:
    """It is of an unknown authority, has another digest, or is that of another name."""
    port = secure.urls[0].rpartition(":")[2]
    trust = trust_of(str(certificate / "cert.pem")) if is_known else None

    async def main() -> None:
        sources = Sources([source(f"https://{host}:{port}{pin}")])
        async with HttpClient.over(sources, title="the engine", trust=trust) as client:
            (server,) = client._servers.values()
            assert not await server.look("the engine")
            with pytest.raises(EngineUnavailable):
                await asked(client, request())
        # aiohttp ends a refused TLS connection later, as its docs say.
        await asyncio.to_thread(wait_until, lambda: not connections_to(int(port)))

    secure.reset()
    asyncio.run(main())
    assert not secure.all[0].got


def test_missing_authority_is_a_config_error(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    with pytest.raises(ConfigError, match="--engine-ca"):
        trust_of(str(file))
    file.write_text("no certificate")
    with pytest.raises(ConfigError, match="--engine-ca"):
        trust_of(str(file))


def test_error_of_a_body_is_raised_as_it_is_and_no_failure_of_the_server(
    replicas: Replicas,
) -> None:
    class Lost(Body):
        async def chunks(self) -> AsyncIterator[bytes]:
            yield BODY[:10]
            raise StoreRestarted("the media were lost")

    async def life(client: HttpClient) -> None:
        with pytest.raises(StoreRestarted):
            await asked(client, request(Lost()))
        assert all(each.num_failed == 0 for each in client._placement.replicas)
        assert RETRIES.labels().values == [0.0]

    run(replicas, life)
