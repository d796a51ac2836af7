"""Completions, and the other endpoints beside conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any

import httpx2 as httpx
import openai
import pytest
from tokenizers import Tokenizer

from afferent.engines.protocol import EngineInfo
from afferent.types import Modality
from tests.builtin.frontends import SHAPES, ScriptedEngine, frontend

TOKENIZER = Tokenizer.from_file(str(SHAPES / "tokenizer.json"))
SAID = TOKENIZER.encode("a red circle", add_special_tokens=False).ids
PROMPT = "<|im_start|>user\nWhat?"

Talk = Callable[[httpx.AsyncClient], Awaitable[Any]]


def talk(address: str, conversation: Talk, **options: Any) -> Any:
    async def main() -> Any:
        async with frontend(address, **options) as client:
            return await conversation(client)

    return asyncio.run(main())


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


# Completions


@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT], ids(PROMPT), [ids(PROMPT)]])
def test_a_text_is_gone_on_with(address: str, prompt: Any) -> None:
    """The prompt is text or tokens; special tokens in it stay special tokens."""
    engine = ScriptedEngine(SAID[:1], SAID[1:])

    async def ask(http: httpx.AsyncClient) -> Any:
        client = openai.AsyncOpenAI(
            base_url="http://frontend/v1", api_key="none", max_retries=0, http_client=http
        )
        create = client.completions.create
        whole = await create(model="shapes", prompt=prompt, n=2, stop=["x"])
        stream = await create(
            model="shapes", prompt=prompt, stream=True, stream_options={"include_usage": True}
        )
        return whole, [chunk async for chunk in stream]

    whole, chunks = talk(address, ask, engine=engine)
    assert [choice.text for choice in whole.choices] == ["a red circle"] * 2
    assert (whole.choices[0].finish_reason, whole.object) == ("stop", "text_completion")
    assert whole.usage.prompt_tokens == len(ids(PROMPT))
    assert whole.usage.completion_tokens == 2 * len(SAID)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "a red circle"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == len(SAID)
    assert all(request.token_ids == ids(PROMPT) for request in engine.requests)
    assert engine.requests[0].sampling.max_tokens == 16, "as OpenAI has it"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompt": ["a", "b"]}, "one prompt"),
        ({"prompt": []}, "at least one token"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": [1.5]}, "text, or a list of tokens"),
        ({"prompt": [-1]}, "text, or a list of tokens"),
        ({"prompt": [5000]}, "names the token 5000"),
        ({"prompt": "<|image_pad|>"}, "no tokens of theirs"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": 1}, "logprobs"),
    ],
)
def test_prompts_that_are_refused(address: str, given: dict[str, Any], words: str) -> None:
    engine = ScriptedEngine(SAID)
    engine.info = EngineInfo(4096, [2], vocab_size=600)

    async def ask(http: httpx.AsyncClient) -> httpx.Response:
        return await http.post("/v1/completions", json={"model": "shapes", **given})

    answer = talk(address, ask, engine=engine)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert engine.requests == []


# Tokens


def test_text_to_tokens_and_back(address: str) -> None:
    async def ask(http: httpx.AsyncClient) -> list[httpx.Response]:
        said = {"messages": [{"role": "user", "content": "What?"}]}
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/tokenize", {"prompt": PROMPT}),
            ("/detokenize", {"tokens": ids(PROMPT)}),
            ("/tokenize", said),
            ("/tokenize", {**said, "add_generation_prompt": False}),
            ("/v1/chat/completions/render", said),
            ("/tokenize", {}),
            ("/tokenize", {**said, "prompt": "a"}),
            ("/detokenize", {"tokens": []}),
        ]
        return [await http.post(path, json={"model": "shapes", **body}) for path, body in bodies]

    to, back, chat, open_end, rendered, *refused = talk(address, ask)
    assert to.json() == {
        "count": len(ids(PROMPT)),
        "max_model_len": 4096,
        "tokens": ids(PROMPT),
        "token_strs": None,
    }
    assert back.json() == {"prompt": PROMPT}
    assert chat.json()["tokens"] == rendered.json()["token_ids"]
    begun = ids("<|im_start|>assistant\n")
    assert open_end.json()["tokens"] + begun == chat.json()["tokens"]
    assert [answer.status_code for answer in refused] == [400] * 3


# The server


def test_what_the_server_says_of_its_model(address: str) -> None:
    engine = ScriptedEngine(SAID)
    engine.info = EngineInfo(4096, [2], modalities=(Modality.IMAGE, Modality.AUDIO))

    async def ask(http: httpx.AsyncClient) -> list[Any]:
        return [(await http.get(path)).json() for path in ("/v1/models", "/version")]

    models, version = talk(address, ask, engine=engine)
    (model,) = models["data"]
    assert (model["max_model_len"], model["context_length"]) == (4096, 4096)
    assert model["architecture"] == {
        "input_modalities": ["text", "image"],  # the model has no audio, the engine no video
        "output_modalities": ["text"],
    }
    assert version == {"version": metadata.version("afferent-mm")}


@pytest.mark.parametrize("name", ["shapes", "latest", "openai/gpt"])
def test_model_of_several_names_answers_to_each_with_the_first(address: str, name: str) -> None:
    said = [{"role": "user", "content": "hello"}]
    bodies = {
        "/v1/chat/completions": {"messages": said},
        "/v1/completions": {"prompt": "hello", "max_tokens": 4},
        "/v1/messages": {"messages": said, "max_tokens": 4},
        "/v1/responses": {"input": "hello"},
    }

    async def ask(http: httpx.AsyncClient) -> list[Any]:
        answers = [
            (await http.post(path, json={"model": name, **body})).json()["model"]
            for path, body in bodies.items()
        ]
        tokenized = await http.post("/tokenize", json={"model": name, "prompt": "hello"})
        one = await http.get(f"/v1/models/{name}")
        return [*answers, tokenized.status_code, one.json()["id"], one.json()["root"]]

    aliases = ("latest", "openai/gpt")
    found = talk(address, ask, engine=ScriptedEngine(*[SAID] * 4), aliases=aliases)
    assert found == [*["shapes"] * 4, 200, name, "shapes"]


def test_model_of_several_names_is_listed_under_each(address: str) -> None:
    async def ask(http: httpx.AsyncClient) -> list[Any]:
        body = {"model": "other", "prompt": "hello"}
        refused = [await http.get("/v1/models/other"), await http.post("/tokenize", json=body)]
        listed = (await http.get("/v1/models")).json()["data"]
        return [[model["id"] for model in listed], *[each.json()["error"] for each in refused]]

    names, *errors = talk(address, ask, engine=ScriptedEngine(SAID), aliases=("latest",))
    assert names == ["shapes", "latest"]
    for error in errors:
        assert error["message"] == ("the model 'other' is not served here: 'shapes' or 'latest' is")


def test_a_browser_may_ask_from_the_pages_that_are_named(address: str) -> None:
    async def ask(http: httpx.AsyncClient) -> list[httpx.Response]:
        answers = []
        for origin in ("https://ours.example", "https://others.example"):
            headers = {
                "origin": origin,
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type",
            }
            answers.append(await http.options("/v1/chat/completions", headers=headers))
            answers.append(await http.get("/v1/models", headers={"origin": origin}))
        return answers

    asked, got, others_asked, others_got = talk(
        address, ask, cors_origins=("https://ours.example",)
    )
    allowed = "access-control-allow-origin"
    assert (asked.status_code, asked.headers[allowed]) == (200, "https://ours.example")
    assert "authorization" in asked.headers["access-control-allow-headers"].lower()
    assert (got.status_code, got.headers[allowed]) == (200, "https://ours.example")
    assert "x-request-id" in got.headers["access-control-expose-headers"]
    assert others_asked.status_code == 400
    assert allowed not in others_asked.headers
    assert allowed not in others_got.headers
    closed, plain, *_ = talk(address, ask)
    assert closed.status_code == 405
    assert allowed not in plain.headers
