"""Three APIs, two tenants and four frontends at once: right answers, and separate caches.

``--storm`` sends 500 requests.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from afferent.conformance.images import draw_image
from tests.server import Server, wait_until

NUM_FRONTENDS = 4
CONCURRENCY = 64
NUM_PICTURES = 40
NUM_ASKED = 48
MAX_TOKENS = 80
KEYS = {name: f"{name}-0123456789abcdef" for name in ("alone", "first", "second")}
SETTINGS = "".join(
    f'[[tenants]]\nname = "{name}"\napi_keys = ["{key}"]\n' for name, key in KEYS.items()
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about 0 to 8 pictures, which are JPEG files in base64."""

    pictures: tuple[str, ...]
    question: str


@dataclass(frozen=True, slots=True)
class Clients:
    """The official clients, with the key of one tenant."""

    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic

    async def close(self) -> None:
        await self.openai.close()
        await self.anthropic.close()


Way = Callable[[Clients, Asked, bool], Awaitable[str]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file: Path = tmp_path_factory.mktemp("settings") / "afferent.toml"
    file.write_text(SETTINGS)
    with Server("--config", str(file), "--frontends", str(NUM_FRONTENDS)) as running:
        yield running


def clients(server: Server, tenant: str) -> Clients:
    common: dict[str, Any] = {"api_key": KEYS[tenant], "max_retries": 0, "timeout": 300}
    return Clients(
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", **common),
        anthropic.AsyncAnthropic(base_url=server.url, **common),
    )


async def chat(with_: Clients, asked: Asked, stream: bool) -> str:
    urls = [f"data:image/jpeg;base64,{picture}" for picture in asked.pictures]
    content: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content.append({"type": "text", "text": asked.question})
    messages: list[Any] = [{"role": "user", "content": content}]
    create = with_.openai.chat.completions.create
    if not stream:
        whole = await create(model="shapes", messages=messages, max_tokens=MAX_TOKENS)
        return whole.choices[0].message.content or ""
    chunks = await create(model="shapes", messages=messages, max_tokens=MAX_TOKENS, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


async def responses(with_: Clients, asked: Asked, stream: bool) -> str:
    urls = [f"data:image/jpeg;base64,{picture}" for picture in asked.pictures]
    content: list[Any] = [{"type": "input_image", "image_url": url} for url in urls]
    content.append({"type": "input_text", "text": asked.question})
    given: list[Any] = [{"role": "user", "content": content}]
    create = with_.openai.responses.create
    if not stream:
        return (await create(model="shapes", input=given, max_output_tokens=MAX_TOKENS)).output_text
    events = await create(model="shapes", input=given, max_output_tokens=MAX_TOKENS, stream=True)
    return "".join([e.delta async for e in events if e.type == "response.output_text.delta"])


async def messages(with_: Clients, asked: Asked, stream: bool) -> str:
    content: list[Any] = [
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/jpeg", "data": picture},
        }
        for picture in asked.pictures
    ]
    content.append({"type": "text", "text": asked.question})
    given: list[Any] = [{"role": "user", "content": content}]
    parameters: dict[str, Any] = {"model": "shapes", "max_tokens": MAX_TOKENS, "messages": given}
    if not stream:
        said = await with_.anthropic.messages.create(**parameters)
        return "".join(block.text for block in said.content if block.type == "text")
    async with with_.anthropic.messages.stream(**parameters) as pieces:
        return "".join([text async for text in pieces.text_stream])


WAYS: tuple[Way, ...] = (chat, responses, messages)


def draw(rng: np.random.Generator) -> list[Asked]:
    drawn = [draw_image(rng, max_side=300).encode("JPEG") for _ in range(NUM_PICTURES)]
    files = [base64.b64encode(data).decode() for data in drawn]
    asked = []
    for number in range(NUM_ASKED):
        chosen = tuple(files[i] for i in rng.choice(NUM_PICTURES, number % 9, replace=False))
        which = int(rng.integers(1, len(chosen) + 1)) if len(chosen) > 1 else 0
        asked.append(Asked(chosen, f"What is in picture {which}?" if which else "What is it?"))
    return asked


def finished(figures: dict[str, float]) -> float:
    """Return the number of answered requests; frontends report it within a second."""
    name = "afferent_requests_total{"
    return sum(number for key, number in figures.items() if key.startswith(name) and "ok" in key)


@pytest.mark.timeout(600)
def test_many_ways_at_once(
    server: Server, rng: np.random.Generator, request: pytest.FixtureRequest
) -> None:
    """Each answer is the one that the request gets alone.

    Another order of floating-point sums may change a few close decisions of this model.
    """
    num_requests = 500 if request.config.getoption("--storm") else 120
    asked = draw(rng)
    picks = [*range(NUM_ASKED), *rng.integers(0, NUM_ASKED, num_requests).tolist()][:num_requests]

    async def main() -> list[tuple[str, str]]:
        alone = clients(server, "alone")
        truth = [await chat(alone, one, False) for one in asked]
        await alone.close()
        tenants = [clients(server, name) for name in ("first", "second")]
        places = asyncio.Semaphore(CONCURRENCY)

        async def ask(number: int) -> str:
            async with places:
                way, stream = WAYS[number % 3], number % 2 == 0
                return await way(tenants[number % 4 // 2], asked[picks[number]], stream)

        said = await asyncio.gather(*(ask(number) for number in range(num_requests)))
        for tenant in tenants:
            await tenant.close()
        return [(truth[pick], one) for pick, one in zip(picks, said, strict=True)]

    answers = asyncio.run(main())
    unlike = [pair for pair in answers if pair[0] != pair[1]]
    print(f"{len(unlike)} of {num_requests} unlike those alone", unlike)
    assert len(unlike) <= num_requests // 100
    wait_until(lambda: finished(server.metrics()) == NUM_ASKED + num_requests)
    figures = server.metrics()
    wanted = {
        name: {
            picture
            for number, pick in enumerate(picks)
            if number % 4 // 2 == tenant
            for picture in asked[pick].pictures
        }
        for tenant, name in enumerate(("first", "second"))
    }
    num_made = len({picture for one in asked for picture in one.pictures})
    num_made += sum(map(len, wanted.values()))
    # Each tenant's pictures are made once for each tenant, and never shared.
    assert figures['afferent_items_total{modality="image",outcome="made"}'] == num_made
    assert figures['afferent_items_total{modality="image",outcome="hit"}'] > 0
    wait_until(lambda: server.metrics()["afferent_requests_in_flight"] == 0)
    for name in ("afferent_arena_pinned_bytes", "afferent_arena_reserved_bytes"):
        wait_until(lambda: server.metric(name) == 0)  # noqa: B023
