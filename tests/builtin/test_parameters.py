"""The table of parameters agrees with its page in the docs and with each API."""

from __future__ import annotations

import asyncio
import json
from typing import Any, get_args

import httpx2 as httpx
import msgspec
import pytest

from afferent.builtin.apis import parameters
from afferent.builtin.apis.api import Api
from afferent.builtin.apis.parameters import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PARAMETERS,
    RESPONSES,
    Only,
    Use,
)
from afferent.builtin.apis.registry import APIS, CONVERSATIONS, TOKENS
from afferent.builtin.pipeline.call import Call
from afferent.builtin.pipeline.request import GenerateRequest
from afferent.engines.protocol import EngineInfo, SamplingExtra, SamplingField
from afferent.errors import InvalidRequest, UnsupportedParameter
from afferent.media.body.received import ReceivedBody
from tests.builtin.frontends import ScriptedEngine, WordEngine, frontend
from tools import parameters_page

BY_NAME = {api.name: api for api in APIS}
SHOWN = set(BY_NAME)
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"model": "shapes", "messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"model": "shapes", "input": "hi", "store": False},
    MESSAGES: {
        "model": "shapes",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 20,
    },
    COMPLETIONS: {"model": "shapes", "prompt": "hi"},
}
SOMETHING_ELSE = ["else", 7.25, {"else": [1]}]
SCHEMA_TEXT = '{"type": "object"}'
SCHEMA_FORMAT = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
VALUES: dict[str, tuple[Any, str, Any]] = {
    "max_tokens": (7, "max_tokens", 7),
    "max_completion_tokens": (7, "max_tokens", 7),
    "max_output_tokens": (7, "max_tokens", 7),
    "temperature": (0.5, "temperature", 0.5),
    "top_p": (0.5, "top_p", 0.5),
    "top_k": (-1, "top_k", 0),
    "min_p": (0.25, "min_p", 0.25),
    "repetition_penalty": (1.5, "repetition_penalty", 1.5),
    "frequency_penalty": (-1, "frequency_penalty", -1.0),
    "presence_penalty": (2, "presence_penalty", 2.0),
    "logit_bias": ({"7": 100, "8": -0.5}, "logit_bias", ((7, 100.0), (8, -0.5))),
    "seed": (-3, "seed", -3),
    "n": (2, "n", 2),
    "stop": (["a", "b"], "stop", ("a", "b")),
    "stop_sequences": (["a", "b"], "stop", ("a", "b")),
    "stop_token_ids": ([9, 7, 9], "stop_token_ids", (9, 7)),
    "include_stop_str_in_output": (True, "includes_stop", True),
    "min_tokens": (3, "min_tokens", 3),
    "ignore_eos": (True, "ignore_eos", True),
    "skip_special_tokens": (False, "skips_special", False),
    "chat_template_kwargs": ({"a": [1, "b"]}, "template.variables", {"a": [1, "b"]}),
    "add_generation_prompt": (False, "template.begins_answer", False),
    "response_format": (SCHEMA_FORMAT, "json_schema", SCHEMA_TEXT),
    "text": ({"format": SCHEMA_FORMAT}, "json_schema", SCHEMA_TEXT),
    "output_config": ({"effort": "low", "format": SCHEMA_FORMAT}, "json_schema", SCHEMA_TEXT),
    "output_format": (SCHEMA_FORMAT, "json_schema", SCHEMA_TEXT),
    "structured_outputs": ({"choice": ["a", "b"]}, "choice", ("a", "b")),
    "guided_json": (SCHEMA_TEXT, "json_schema", SCHEMA_TEXT),
    "guided_regex": ("a+", "regex", "a+"),
    "guided_choice": (["a"], "choice", ("a",)),
    "reasoning_effort": ("low", "template.variables", {"reasoning_effort": "low"}),
    "reasoning": ({"effort": "low"}, "template.variables", {"reasoning_effort": "low"}),
}
"""The value in a request, the field of the internal request, and its value there."""
SEEN_ELSEWHERE = {
    *("model", "messages", "input", "instructions", "system", "previous_response_id", "store"),
    "conversation",
    *("prompt", "stream", "stream_options", "logprobs", "top_logprobs", "include", "metadata"),
    "continue_final_message",
    *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"),
}
"""The API's own tests cover these."""


def parse(api: Api, *, refuses_unknown: bool = False, **given: Any) -> Call:
    body = json.dumps({**ASKED[api.name], **given}).encode()
    received = ReceivedBody(body, {}, len(body))
    return api.parse(received, request_id="r", model="shapes", refuses_unknown=refuses_unknown)


def rows(use: type | Use) -> list[Any]:
    return [
        pytest.param(BY_NAME[api], one, id=f"{api}-{one.name}")
        for one in PARAMETERS
        for api, how in one.uses.items()
        if api in SHOWN
        if how is use or (isinstance(use, type) and isinstance(how, use))
    ]


def field(generate: GenerateRequest, path: str) -> Any:
    value: Any = generate
    for name in path.split("."):
        value = getattr(value, name)
    return value


# The table


def test_the_page_is_written_from_the_table() -> None:
    assert parameters_page.PAGE.read_text() == parameters_page.page()


def test_no_api_knows_a_name_twice() -> None:
    names = [(api, one.name) for one in PARAMETERS for api in one.uses]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("api", [*APIS, *(each.api for each in TOKENS)], ids=lambda api: api.name)
def test_the_schema_reads_what_is_honoured(api: Api) -> None:
    known = parameters.of_api(api.name)
    honoured = {name for name, one in known.items() if one.uses[api.name] is Use.HONOURED}
    fields = {each.name for each in msgspec.structs.fields(api.request_type)}
    assert honoured <= fields
    if api in APIS:
        assert fields <= set(known)


def test_all_that_an_engine_may_lack_stands_in_the_table() -> None:
    needed = {one.needs for one in PARAMETERS if one.needs}
    assert needed == {*get_args(SamplingField), *get_args(SamplingExtra)}


# Values


@pytest.mark.parametrize(("api", "one"), rows(Use.HONOURED))
def test_what_is_honoured_arrives(api: Api, one: parameters.Parameter) -> None:
    if one.name in SEEN_ELSEWHERE:
        return
    value, path, becomes = VALUES[one.name]
    assert field(parse(api, **{one.name: value}).generate, path) == becomes
    assert field(parse(api).generate, path) != becomes, "it has a value of its own"
    if one.name != "max_tokens":
        parse(api, **{one.name: None})


def test_going_on_arrives() -> None:
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It"}]
    for api in CONVERSATIONS:
        name = "input" if api.name == RESPONSES else "messages"
        options = parse(api, **{name: begun}, continue_final_message=True).generate.template
        assert (options.continues_last, options.begins_answer) == (True, False)
        options = parse(api, **{name: begun}, continue_final_message=False).generate.template
        assert (options.continues_last, options.begins_answer) == (False, True)
        # Without the parameter, only the Messages API continues the last message.
        assert parse(api, **{name: begun}).generate.template.continues_last is (
            api.name == MESSAGES
        )


@pytest.mark.parametrize(
    "given",
    [
        {"continue_final_message": True},
        {"input": [], "messages": [{"role": "assistant", "content": "a"}]}
        | {"continue_final_message": True, "add_generation_prompt": True},
    ],
)
def test_what_can_not_be_gone_on_with(given: dict[str, Any]) -> None:
    given = {name: value for name, value in given.items() if name != "input"}
    with pytest.raises(InvalidRequest, match=r"goe?s? on with"):
        parse(BY_NAME[CHAT], **given)


@pytest.mark.parametrize(("api", "one"), rows(Use.ACCEPTED))
def test_what_is_accepted_changes_nothing(api: Api, one: parameters.Parameter) -> None:
    for value in [None, True, *SOMETHING_ELSE]:
        call = parse(api, **{one.name: value})
        assert call.generate == parse(api).generate
        assert call.ignored == ()


@pytest.mark.parametrize(("api", "one"), rows(Only))
def test_what_is_not_served_is_refused_by_name(api: Api, one: parameters.Parameter) -> None:
    use = one.uses[api.name]
    assert isinstance(use, Only)
    for value in [None, *use.values]:
        assert parse(api, **{one.name: value}).generate == parse(api).generate
    for value in SOMETHING_ELSE:
        with pytest.raises(UnsupportedParameter, match=rf"^{one.name} is not supported") as caught:
            parse(api, **{one.name: value})
        assert caught.value.param == one.name


def test_tools_that_may_not_be_called_mean_nothing() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 1000}}]
    for api in CONVERSATIONS:
        none: Any = {"type": "none"} if api.name == MESSAGES else "none"
        assert parse(api, tools=tools, tool_choice=none).generate == parse(api).generate
    chat = BY_NAME[CHAT]
    assert parse(chat, functions=tools, function_call="none").generate == parse(chat).generate


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": 101}),
        ("min_tokens", -1),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1] * 257),
        ("ignore_eos", 1),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"a": "x" * 16_385}),
        ("chat_template_kwargs", {"a": [[[[[[[[1]]]]]]]]}),
        ("chat_template_kwargs", {f"n{number}": 1 for number in range(65)}),
    ],
)
def test_values_out_of_range(name: str, value: Any) -> None:
    for api in APIS:
        if name not in parameters.of_api(api.name):
            continue
        with pytest.raises(InvalidRequest, match=name):
            parse(api, **{name: value})


# Unknown names


def test_what_nobody_knows_is_ignored_or_refused() -> None:
    for api in APIS:
        call = parse(api, flavour=1, colour=None)
        assert call.generate == parse(api).generate
        assert call.ignored == ("flavour", "colour")
        with pytest.raises(InvalidRequest, match=r"there is no parameter 'flavour'$") as caught:
            parse(api, refuses_unknown=True, flavour=1)
        assert caught.value.param == "flavour"
    with pytest.raises(InvalidRequest, match="more than 64"):
        parse(BY_NAME[CHAT], **{f"n{number}": 1 for number in range(65)})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("Temperature", "temperature"),
        ("respons_format", "response_format"),
        ("repeat_penalty", "repetition_penalty"),
        ("presence_penality", "presence_penalty"),
        ("topP", "top_p"),
    ],
)
def test_nearly_a_known_name_is_refused(name: str, meant: str) -> None:
    with pytest.raises(InvalidRequest, match=f"'{name}': is it '{meant}' that is meant"):
        parse(BY_NAME[CHAT], **{name: 1})


def test_the_name_of_another_api_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_output_tokens"):
        parse(BY_NAME[RESPONSES], max_tokens=5)
    with pytest.raises(InvalidRequest, match="stop_sequences"):
        parse(BY_NAME[MESSAGES], stop=["x"])


@pytest.mark.parametrize("name", ["top_a", "top_n", "stops_at", "best", "tfs_z", "mirostat"])
def test_short_names_are_no_misspellings(name: str) -> None:
    assert parse(BY_NAME[CHAT], **{name: 1}).ignored == (name,)


def test_the_answer_says_what_was_ignored(address: str) -> None:
    async def main() -> list[httpx.Response]:
        async with frontend(address, engine=WordEngine()) as client:
            path, asked = BY_NAME[CHAT].path, ASKED[CHAT]
            odd = {"flavour": 1, "b\r\nx: y": 2, "é": 3}
            bodies: list[dict[str, Any]] = [{**asked, **odd}, {**asked, **odd, "stream": True}]
            return [await client.post(path, json=body) for body in [*bodies, asked]]

    whole, stream, plain = asyncio.run(main())
    assert whole.status_code == stream.status_code == 200
    assert whole.headers["x-ignored-parameters"] == "flavour"
    assert stream.headers["x-ignored-parameters"] == "flavour"
    assert "x-ignored-parameters" not in plain.headers


# Engines


EXTRAS: dict[str, Any] = {
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "frequency_penalty": 1,
    "presence_penalty": 1,
    "logit_bias": {"7": 1},
    "min_tokens": 2,
    "stop_token_ids": [7],
}
FORMS: dict[str, Any] = {
    "json_schema": {"json": {"type": "object"}},
    "regex": {"regex": "a+"},
    "choice": {"choice": ["a"]},
}


def test_an_engine_that_lists_nothing_is_not_asked_for_more(address: str) -> None:
    assert {*EXTRAS, *FORMS, "tools"} == set(get_args(SamplingExtra))
    engine = ScriptedEngine([10])

    async def main() -> list[tuple[str, httpx.Response]]:
        async with frontend(address, engine=engine) as client:
            return [
                (name, await client.post(api.path, json={**ASKED[api.name], name: value}))
                for api in APIS
                for name, value in EXTRAS.items()
            ]

    for name, answer in asyncio.run(main()):
        assert answer.status_code == 400, name
        assert f"the engine does not do {name}" in answer.text
    assert engine.requests == [], "nothing was done for them"


def test_an_engine_that_does_no_forms_is_not_asked_for_any(address: str) -> None:
    engine = ScriptedEngine([10])
    engine.info = EngineInfo(4096, [2], supported=("regex",))

    async def main() -> list[tuple[str, httpx.Response]]:
        async with frontend(address, engine=engine) as client:
            return [
                (
                    name,
                    await client.post(
                        api.path, json={**ASKED[api.name], "structured_outputs": form}
                    ),
                )
                for api in APIS
                for name, form in FORMS.items()
            ]

    for name, answer in asyncio.run(main()):
        if name == "regex":
            assert answer.status_code == 200
            continue
        assert answer.status_code == 400, name
        assert f"the engine does not do {name}, which structured_outputs asks for" in answer.text
    assert {request.sampling.regex for request in engine.requests} == {"a+"}


def test_an_engine_gets_what_it_says_that_it_does(address: str) -> None:
    engine = ScriptedEngine([10])
    engine.info = EngineInfo(4096, [2], supported=get_args(SamplingExtra), vocab_size=400)

    async def main() -> list[httpx.Response]:
        async with frontend(address, engine=engine) as client:
            bodies = [EXTRAS, {"logit_bias": {"400": 1}}, {"stop_token_ids": [400]}]
            bodies += [{"min_tokens": 30, "max_tokens": 20}]
            path = BY_NAME[CHAT].path
            return [await client.post(path, json={**ASKED[CHAT], **body}) for body in bodies]

    fine, *refused = asyncio.run(main())
    assert fine.status_code == 200
    (request,) = engine.requests
    assert request.sampling.logit_bias == ((7, 1.0),)
    assert request.sampling.stop_token_ids == (7,)
    assert [answer.status_code for answer in refused] == [400] * 3
    params = [answer.json()["error"]["param"] for answer in refused]
    assert params == ["logit_bias", "stop_token_ids", "min_tokens"]
