"""Response formats in the parameters of each API: which are accepted, and which are refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from afferent.builtin.apis.api import Api
from afferent.builtin.apis.parameters import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from afferent.builtin.apis.registry import APIS
from afferent.builtin.pipeline.request import GenerateRequest
from afferent.engines.protocol import EngineInfo, EngineRequest
from afferent.errors import InvalidForm, InvalidRequest, UnsupportedParameter
from afferent.types import MAX_FORM_NBYTES
from tests.builtin.frontends import ScriptedEngine, frontend
from tests.builtin.test_parameters import ASKED, BY_NAME, parse

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
FLAT = {"type": "json_schema", "name": "n", "strict": True, "schema": SCHEMA}
ANY_OBJECT = {"type": "object"}
PARAMS = {
    CHAT: "response_format",
    COMPLETIONS: "response_format",
    RESPONSES: "text",
    MESSAGES: "output_config",
}


def of_format(api: str, form: Any) -> dict[str, Any]:
    """Return the request field that sets a response format in this API."""
    name = PARAMS[api]
    return {name: form if name == "response_format" else {"format": form}}


def asked(api: str, **given: Any) -> GenerateRequest:
    return parse(BY_NAME[api], **given).generate


@pytest.mark.parametrize("api", PARAMS)
def test_a_schema_in_the_words_of_each_api(api: str) -> None:
    generate = asked(api, **of_format(api, NAMED if api in (CHAT, COMPLETIONS) else FLAT))
    assert json.loads(generate.json_schema or "") == SCHEMA
    assert (generate.form_param or "").startswith(PARAMS[api])
    for nothing in (None, {"type": "text"}):
        assert asked(api, **of_format(api, nothing)) == asked(api)
    generate = asked(api, **of_format(api, {"type": "json_object"}))
    assert json.loads(generate.json_schema or "") == ANY_OBJECT


@pytest.mark.parametrize("api", PARAMS)
@pytest.mark.parametrize(
    ("form", "error"),
    [
        ({"type": "json_schema"}, InvalidRequest),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, InvalidRequest),
        ({"type": "json_schema", "schema": None}, InvalidRequest),
        ({"type": "grammar", "grammar": "root ::= x"}, UnsupportedParameter),
        ({"type": "structural_tag"}, UnsupportedParameter),
        ({"type": 7}, InvalidRequest),
        ({"schema": {}}, InvalidRequest),
        ("json", InvalidRequest),
        ({"type": "json_schema", "schema": {"const": "x" * MAX_FORM_NBYTES}}, InvalidForm),
    ],
)
def test_formats_that_are_refused(api: str, form: Any, error: type[InvalidRequest]) -> None:
    with pytest.raises(error) as caught:
        asked(api, **of_format(api, form))
    assert type(caught.value) is error
    assert str(caught.value.param).startswith(PARAMS[api])


@pytest.mark.parametrize("api", PARAMS)
@pytest.mark.parametrize(
    ("form", "field", "value"),
    [
        ({"json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
        ({"json": True}, "json_schema", "true"),
        ({"json_object": True}, "json_schema", '{"type":"object"}'),
        ({"regex": "a|b"}, "regex", "a|b"),
        ({"choice": ["b", "a", "b"]}, "choice", ("b", "a")),
        ({"regex": "a", "json": None, "grammar": None}, "regex", "a"),
        ({"regex": "a", "disable_any_whitespace": False}, "regex", "a"),
    ],
)
def test_structured_outputs(api: str, form: dict[str, Any], field: str, value: Any) -> None:
    generate = asked(api, structured_outputs=form)
    assert getattr(generate, field) == value
    assert generate.form_param == "structured_outputs"


@pytest.mark.parametrize("api", PARAMS)
@pytest.mark.parametrize(
    ("form", "error"),
    [
        ({"regex": "a", "choice": ["a"]}, InvalidRequest),
        ({"json": {}, "json_object": True}, InvalidRequest),
        ({"grammar": "root ::= x"}, UnsupportedParameter),
        ({"structural_tag": "{}"}, UnsupportedParameter),
        ({"regex": "a", "whitespace_pattern": " "}, UnsupportedParameter),
        ({"json": {}, "disable_any_whitespace": True}, UnsupportedParameter),
        ({"json": {}, "disable_additional_properties": True}, UnsupportedParameter),
        ({"jsn": {}}, InvalidRequest),
        ({"choice": []}, InvalidForm),
        ({"choice": [1]}, InvalidRequest),
        ({"choice": ["x" * 1024] * 65}, InvalidForm),
        ({"regex": "é" * (MAX_FORM_NBYTES // 2 + 1)}, InvalidForm),
    ],
)
def test_structured_outputs_that_are_refused(
    api: str, form: Any, error: type[InvalidRequest]
) -> None:
    with pytest.raises(error) as caught:
        asked(api, structured_outputs=form)
    assert (type(caught.value), caught.value.param) == (error, "structured_outputs")


@pytest.mark.parametrize("api", PARAMS)
def test_an_answer_has_one_form(api: str) -> None:
    with pytest.raises(InvalidRequest, match="an answer has one form") as caught:
        asked(api, **of_format(api, FLAT), structured_outputs={"regex": "a"})
    assert caught.value.param == "structured_outputs"
    assert asked(api, **of_format(api, {"type": "text"}), structured_outputs={"regex": "a"}).regex


def test_older_names() -> None:
    for api in (CHAT, COMPLETIONS):
        assert asked(api, guided_json=SCHEMA).json_schema == json.dumps(SCHEMA)
        with pytest.raises(InvalidRequest, match="only one"):
            asked(api, guided_regex="a", guided_choice=["a"])
    with pytest.raises(InvalidRequest, match="only one"):
        asked(MESSAGES, output_format=FLAT, output_config={"format": FLAT})
    with pytest.raises(UnsupportedParameter):
        asked(CHAT, guided_grammar="root ::= x")


def test_misspelt_options_are_no_plain_text() -> None:
    with pytest.raises(InvalidRequest):
        asked(RESPONSES, text={"fromat": FLAT})
    with pytest.raises(InvalidRequest):
        asked(MESSAGES, output_config={"fromat": FLAT})
    with pytest.raises(InvalidRequest):
        asked(RESPONSES, text={"verbosity": "extreme"})


def test_responses_repeat_the_format() -> None:
    call = parse(BY_NAME[RESPONSES], text={"format": FLAT, "verbosity": "low"})
    (created, *_) = call.reply.begin()
    said = json.loads(created.split(b"data: ")[1])
    assert said["response"]["text"] == {"format": FLAT}


class RefusesForms(ScriptedEngine):
    """An engine that refuses the response format when it is to accept the request."""

    info = EngineInfo(4096, [2], supported=("json_schema",))

    async def submit(self, request: EngineRequest) -> Any:
        raise InvalidForm("there is no such form")
        yield


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
@pytest.mark.parametrize("stream", [False, True])
def test_what_an_engine_refuses_is_a_400_that_names_the_parameter(
    address: str, api: Api, stream: bool
) -> None:
    async def main() -> Any:
        async with frontend(address, engine=RefusesForms([10])) as client:
            given = {**ASKED[api.name], **of_format(api.name, FLAT), "stream": stream}
            return await client.post(api.path, json=given)

    answer = asyncio.run(main())
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "there is no such form" in error["message"]
    if api.name != MESSAGES:
        assert error["param"].startswith(PARAMS[api.name])


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_a_form_ends_where_it_is_complete(address: str, api: Api) -> None:
    engine = ScriptedEngine([10])
    engine.info = EngineInfo(4096, [2], supported=("regex",))

    async def main() -> Any:
        async with frontend(address, engine=engine) as client:
            given = {"structured_outputs": {"regex": "a"}, "ignore_eos": True}
            return await client.post(api.path, json={**ASKED[api.name], **given})

    answer = asyncio.run(main())
    assert answer.status_code == 400
    assert "ignore_eos" in answer.text
