"""All features of all clients: text, image, stream, structured output, tool, usage, errors.

Each run tests the clients of the default environment with the built-in engine; ``--clients`` (`make
test-clients`) tests the others, and ``--vllm`` all clients in front of a real vLLM.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.clients.table import (
    BENCHMARKS,
    CLIENTS,
    FEATURES,
    LARGE,
    NUM_REQUESTS,
    OPTIONAL,
    URL,
    Benchmark,
    Client,
)
from tests.pages import ROOT
from tests.server import Server, ask, data_url
from tests.vllm.servers import TOOLS, supervised
from tools import clients_env, clients_page

QUESTION = "What is in the picture?"
TIMEOUT_S = 300
_LIKELIEST = (
    *("--override-generation-config", '{"temperature": 0}'),
    "--structured-outputs-config",
    '{"backend": "xgrammar", "disable_any_whitespace": true}',
)
_NO_MODEL = {
    "built-in": "the model 'another' is not served here: 'shapes' is",
    "vllm": "The model `another` does not exist",
}


@dataclass(frozen=True, slots=True)
class Ran:
    """The output of a section, and its error."""

    printed: str
    failure: str


def _cases() -> Iterator[Any]:
    for client in CLIENTS:
        marks = [pytest.mark.clients] if client.environment else []
        for feature in client.parts()[1]:
            name = f"{client.path.stem}-{feature}"
            yield pytest.param(client, feature, id=name, marks=marks)


@dataclass(frozen=True, slots=True)
class Served:
    """A server, with the model of the programs."""

    server: Server
    engine: str
    usage: tuple[int, int]
    """Numbers of tokens of the question with the picture, and of its answer."""


@pytest.fixture(scope="session", params=["built-in", pytest.param("vllm", marks=pytest.mark.vllm)])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    if request.param == "built-in":
        server: Server = request.getfixturevalue("server")
        yield _served(server, request.param)
        return
    with supervised("--served-model-name", "shapes", vllm=(*TOOLS, *_LIKELIEST)) as server:
        yield _served(server, request.param)


def _served(server: Server, engine: str) -> Served:
    picture = data_url((ROOT / "docs" / "pictures" / "one.jpg").read_bytes())
    counted = server.post(ask([picture], QUESTION)).json()["usage"]
    return Served(server, engine, (counted["prompt_tokens"], counted["completion_tokens"]))


@pytest.fixture
def ran(client: Client, served: Served) -> Mapping[str, Ran]:
    """Return the results of the client's sections."""
    if served.engine == "vllm" and not client.runs_before_vllm:
        pytest.skip("in front of vLLM, with the small model, this program did not end in time")
    if client.environment in LARGE and not home_of(client).exists():
        pytest.skip(f"its environment is large: make setup-{client.environment}")
    return run_all(client.program, served.server.url)


@cache
def run_all(program: str, url: str) -> Mapping[str, Ran]:
    """Run all sections of a program: once, not for each feature, as this takes some seconds."""
    (client,) = (each for each in CLIENTS if each.program == program)
    if client.path.suffix == ".py":  # in one process, because the imports take most of the time
        done = start(client, "python", "-m", "tests.clients.sections", program, url)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        return {feature: Ran(**each) for feature, each in found.items()}
    beginning, sections = client.parts()
    return {
        feature: run(client, (beginning + text).replace(URL, url))
        for feature, text in sections.items()
    }


def run(client: Client, text: str) -> Ran:
    """Run one section behind the program's beginning."""
    if client.environment == clients_env.NODE:
        file = home_of(client) / client.program  # Node.js searches modules beside the file
        file.write_text(text)
        done = start(client, "node", str(file))
    else:
        done = start(client, "bash", "-e", "-c", text)
    return Ran(done.stdout, "" if done.returncode == 0 else done.stderr)


def home_of(client: Client | Benchmark) -> Path:
    return clients_env.FOLDER / client.environment


def start(client: Client | Benchmark, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the client's environment, as if it were activated."""
    programs = home_of(client) / "bin" if client.environment else Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "OPENAI_API_KEY": "none",
    }
    running = subprocess.Popen(
        ["/usr/bin/env", *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with running:
        try:
            printed, failed = running.communicate(timeout=TIMEOUT_S)
        finally:
            with suppress(ProcessLookupError):  # also the servers that a program starts
                os.killpg(running.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, running.returncode, printed, failed)


@pytest.mark.parametrize(("client", "feature"), [*_cases()])
def test_a_feature(feature: str, client: Client, ran: Mapping[str, Ran], served: Served) -> None:
    if served.engine == "vllm" and feature in client.lacks_before_vllm:
        with pytest.raises(AssertionError):
            _check(feature, ran[feature], served)
        return
    _check(feature, ran[feature], served)


def _check(feature: str, found: Ran, served: Served) -> None:
    assert not found.failure, found.failure
    said = found.printed.strip()
    match feature:
        case "text":
            assert said == "There is no picture."
        case "image":
            assert said == "a red circle"
        case "stream":
            assert said.replace("|", "") == "a red circle"
            assert len([piece for piece in said.split("|") if piece]) > 1 or "|" not in said
        case "structured" | "forced":
            assert json.loads(said) == {"colour": "red", "shape": "circle"}
        case "tool":
            called, *answer = said.splitlines()
            assert re.search(r"\bred\b", called)
            assert answer in ([], ["a red circle"])  # the call alone ends some loops
        case "session":
            assert said == "a red circle, a red circle, 4"
        case "usage":
            assert [int(number) for number in re.findall(r"\d+", said)][:2] == [*served.usage]
        case "errors":
            assert "404" in said
            assert re.search(_NO_MODEL[served.engine], said)


@pytest.mark.clients
@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=[each.path.stem for each in BENCHMARKS])
def test_a_benchmark_client(benchmark: Benchmark, served: Served) -> None:
    """Each of its requests is answered, and has a picture."""
    before = served.server.metrics()
    text = benchmark.path.read_text().replace(URL, served.server.url)
    done = start(benchmark, "bash", "-e", "-c", text)
    assert done.returncode == 0, done.stdout + done.stderr
    after = served.server.metrics()
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    found = 'afferent_items_total{modality="image",outcome="%s"}'
    assert sum(grown[found % outcome] for outcome in ("made", "hit")) >= NUM_REQUESTS
    refused = {name: value for name, value in grown.items() if "rejections" in name and value}
    assert not refused


def test_the_page_of_clients_is_up_to_date() -> None:
    """If it fails: ``python -m tools.clients_page --write``."""
    assert clients_page.PAGE.read_text() == clients_page.page()


def test_a_section_is_what_its_feature_says() -> None:
    """Each program has sections for all features that the client supports."""
    for client in CLIENTS:
        _, sections = client.parts()
        absent = {*client.lacks, *({*OPTIONAL} - {*sections})}
        assert [*sections] == [each for each in FEATURES if each not in absent], client.title
        assert URL in client.path.read_text()
