"""Requests for prompts of vLLM: tools, calls and roles in three dialects, without a server."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import httpx2 as httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from afferent.builtin.apis.rendering.prompt_readers import READERS
from afferent.builtin.pipeline.prompt import PromptBuilder
from afferent.builtin.pipeline.request import GenerateRequest, Truncation, VllmRules
from afferent.engines.render import Renderer, RenderLink
from afferent.errors import InvalidRequest, ModelNotFound, UnsupportedParameter
from afferent.media.body.received import ReceivedBody
from afferent.media.families.registry import describe
from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from afferent.types import Modality
from tests.builtin.frontends import frontend
from tests.examples import examples
from tests.vllm.render_requests import HERMES, MISTRAL

SHAPES = BUILT_IN_MODELS / "shapes"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COMPLETIONS = "/v1/completions"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
PIXEL = "data:image/png;base64,aa"
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Wie <heiß>?", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
RULES = VllmRules(merges_system=False, excludes_unused_tools=False)


def folder_with(tmp_path: Path, template: str) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(SHAPES / name, tmp_path)
    shutil.copy(SHAPES / "preprocessor_config.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template.replace("MARKER", IMAGE))
    return tmp_path


def builder_of(folder: Path) -> PromptBuilder:
    family = describe(folder)
    assert family is not None
    return PromptBuilder(folder, family, as_vllm=True)


@pytest.fixture
def hermes(tmp_path: Path) -> Path:
    return folder_with(tmp_path, HERMES)


def read(path: str, rules: VllmRules = RULES, **body: Any) -> GenerateRequest:
    return read_text(path, json.dumps({"model": "tiny", **body}), rules)


def read_text(path: str, body: str, rules: VllmRules = RULES) -> GenerateRequest:
    (request,) = read_all(path, body, rules)
    return request


def read_all(path: str, body: str, rules: VllmRules = RULES) -> list[GenerateRequest]:
    received = ReceivedBody(body.encode(), {}, len(body))
    return READERS[path].read(received, request_id="r", served="tiny", rules=rules)


def text_of(folder: Path, request: GenerateRequest) -> str:
    """Return the text of a request's prompt; each image has one token."""
    builder = builder_of(folder)
    prompt = builder.build(request.messages, [(1,)] * len(request.media), request.template)
    return builder.text_of(prompt.token_ids)


def reference(folder: Path, messages: list[dict[str, Any]], **options: Any) -> str:
    """Return the text that transformers renders, of messages as vLLM hands them over."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {"add_generation_prompt": True, **options}
    ids = tokenizer.apply_chat_template(messages, return_dict=False, **options)
    text: str = tokenizer.decode(ids)
    return text


def text(said: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": said}]


def call(arguments: dict[str, Any], name: str = "weather") -> dict[str, Any]:
    function = {"arguments": arguments, "name": name}
    return {"id": "c1", "function": function, "type": "function"}


def test_tools_in_three_dialects_give_the_prompt_of_transformers(hermes: Path) -> None:
    """The conversation has a call, its result with an image, and a reason."""
    image = {"type": "image_url", "image_url": {"url": PIXEL}}
    arguments = json.dumps({"place": "Köln"})
    chat = read(
        CHAT,
        tools=[TOOL],
        messages=[
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [image, *text("How hot?")]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "I ask.",
                "tool_calls": [
                    {
                        "type": "function",
                        "id": "c1",
                        "function": {"name": "weather", "arguments": arguments},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": text("21 degrees")},
            {"role": "user", "content": "Und?"},
        ],
    )
    source = {"type": "base64", "media_type": "image/png", "data": "aa"}
    messages = read(
        MESSAGES,
        max_tokens=9,
        system=[{"type": "text", "text": "x-anthropic-billing-header: 1"}, *text("Be short.")],
        tools=[{"name": "weather", "description": "Wie <heiß>?", "input_schema": SCHEMA}],
        messages=[
            {"role": "user", "content": [{"type": "image", "source": source}, *text("How hot?")]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I ask.", "signature": "s"},
                    {"type": "tool_use", "id": "c1", "name": "weather", "input": {"place": "Köln"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": text("21 degrees")},
                    *text("Und?"),
                ],
            },
        ],
    )
    responses = read(
        RESPONSES,
        instructions="Be short.",
        tools=[{"type": "function", **FUNCTION}, {"type": "web_search"}],
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": PIXEL, "detail": "low"},
                    {"type": "input_text", "text": "How hot?"},
                ],
            },
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "I ask."}],
            },
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c1", "output": "21 degrees"},
            {"role": "user", "content": "Und?"},
        ],
    )
    expected = reference(
        hermes,
        [
            {"role": "system", "content": text("Be short.")},
            {"role": "user", "content": [{"type": "image"}, *text("How hot?")]},
            {
                "role": "assistant",
                "content": [],
                "reasoning_content": "I ask.",
                "tool_calls": [call({"place": "Köln"})],
            },
            {"role": "tool", "content": "21 degrees"},
            {"role": "user", "content": text("Und?")},
        ],
        tools=[TOOL],
    )
    assert IMAGE in expected
    assert '"arguments": {"place": "Köln"}' in expected
    assert "Wie <heiß>?" in expected
    for request in (chat, messages, responses):
        assert text_of(hermes, request) == expected
    assert responses.media[0].detail == "auto"  # vLLM does not use it


@pytest.mark.parametrize(
    ("given", "arguments"),
    [('{"a": 1}', {"a": 1}), ("", {}), ("[1]", {}), ("{broken", {}), (None, {}), ({"a": 2}, {})],
)
def test_arguments_of_a_call_are_an_object(given: Any, arguments: dict[str, Any]) -> None:
    """A chat template expects one; the text of a model may be anything."""
    function = {"name": "f", "arguments": given}
    turn = {"role": "assistant", "tool_calls": [{"function": function, "type": "function"}]}
    (message,) = read(CHAT, messages=[turn]).messages
    expected = {"a": 2} if given == {"a": 2} else arguments
    assert message.extra["tool_calls"][0]["function"]["arguments"] == expected


def test_call_as_json_has_the_order_of_vllm(tmp_path: Path) -> None:
    """A template may write a call as JSON; vLLM's schemas differ between the dialects."""
    folder = folder_with(tmp_path, MISTRAL)
    written = {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}}
    user, last = {"role": "user", "content": "?"}, {"role": "user", "content": "!"}
    chat = read(
        CHAT, messages=[user, {"role": "assistant", "content": "", "tool_calls": [written]}, last]
    )
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    responses = read(RESPONSES, input=[user, called, last])
    assert '[{"id": "c", "function": {"arguments": {}, "name": "f"}, "type": "function"}]' in (
        text_of(folder, chat)
    )
    assert '[{"id": "c", "function": {"name": "f", "arguments": {}}, "type": "function"}]' in (
        text_of(folder, responses)
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "?"}], "tools": [TOOL]}),
        (
            MESSAGES,
            {
                "messages": [{"role": "user", "content": "?"}],
                "max_tokens": 1,
                "tools": [{"name": "f", "input_schema": {}}],
            },
        ),
        (RESPONSES, {"input": "?", "tools": [{"type": "custom", "name": "f"}]}),
    ],
)
def test_unused_tools_are_rendered_unless_the_server_excludes_them(
    path: str, body: dict[str, Any]
) -> None:
    choice: Any = {"type": "none"} if path == MESSAGES else "none"
    rules = VllmRules(merges_system=False, excludes_unused_tools=True)
    assert len(read(path, **body, tool_choice=choice).template.variables["tools"]) == 1
    assert "tools" not in read(path, rules, **body, tool_choice=choice).template.variables
    assert "tools" in read(path, rules, **body).template.variables


def test_input_schema_without_type_is_an_object() -> None:
    tools = [{"name": "f", "input_schema": {"properties": {}}, "strict": True}]
    read_ = read(MESSAGES, max_tokens=1, messages=[{"role": "user", "content": "?"}], tools=tools)
    (tool,) = read_.template.variables["tools"]
    assert json.dumps(tool["function"]) == json.dumps(
        {
            "name": "f",
            "description": None,
            "parameters": {"properties": {}, "type": "object"},
            "strict": True,
        }
    )


def test_effort_and_documents_are_variables() -> None:
    """The request's own options precede those of ``chat_template_kwargs``, as in vLLM."""
    options = {"reasoning_effort": "low", "add_generation_prompt": False, "top_k": None}
    request = read(
        CHAT,
        messages=[{"role": "user", "content": "?"}],
        chat_template_kwargs=options,
        reasoning_effort="none",
        documents=[{"title": "a", "text": "b"}],
        cache_salt="salt",
    )
    assert request.template.variables == {
        "reasoning_effort": "none",
        "enable_thinking": False,
        "documents": [{"title": "a", "text": "b"}],
    }
    assert (request.template.begins_answer, request.cache_salt) == (True, "salt")
    assert request.template.num_characters >= 10
    disabled = read(
        MESSAGES,
        max_tokens=1,
        messages=[{"role": "user", "content": "?"}],
        thinking={"type": "disabled"},
        output_config={"effort": "high"},
    )
    assert disabled.template.variables == {"reasoning_effort": "none", "enable_thinking": False}


def test_system_messages_move_to_the_start_if_the_template_refuses_them(tmp_path: Path) -> None:
    folders = {}
    for name, template in (("h", HERMES), ("m", MISTRAL)):
        (tmp_path / name).mkdir()
        folders[name] = folder_with(tmp_path / name, template)
    merges = {name: builder_of(folder).merges_system for name, folder in folders.items()}
    assert merges == {"h": False, "m": True}
    body = {
        "system": "One.",
        "max_tokens": 1,
        "messages": [
            {"role": "user", "content": "?"},
            {"role": "system", "content": "Two."},
            {"role": "user", "content": "!"},
        ],
    }
    rules = VllmRules(merges_system=True, excludes_unused_tools=False)
    merged = text_of(folders["m"], read(MESSAGES, rules, **body))
    assert "[SYS]One.Two.[/SYS]" in merged
    inline = text_of(folders["h"], read(MESSAGES, **body))
    assert "[system]Two." in inline


def test_developer_becomes_the_system_if_the_template_does_not_know_it(hermes: Path) -> None:
    messages = [
        {"role": "system", "content": "One."},
        {"role": "user", "content": "?"},
        {"role": "developer", "content": "Two.", "tools": []},
    ]
    expected = reference(
        hermes,
        [{"role": "system", "content": "One.\n\nTwo."}, {"role": "user", "content": text("?")}],
    )
    assert text_of(hermes, read(CHAT, messages=messages)) == expected


@pytest.mark.parametrize("content", ["it is ", text("it is ")])
def test_continued_answer_ends_with_its_text(hermes: Path, content: Any) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    expected = reference(hermes, messages, **options)
    assert text_of(hermes, read(CHAT, messages=messages, **options)) == expected
    begun = [{"type": "output_text", "text": "it is "}]
    last = {"type": "message", "role": "assistant", "status": "in_progress", "content": begun}
    assert text_of(hermes, read(RESPONSES, input=[messages[0], last])) == expected


def test_answer_of_messages_is_not_continued(hermes: Path) -> None:
    """vLLM's renderer begins another one behind it."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "it"}]
    assert text_of(hermes, read(MESSAGES, max_tokens=1, messages=messages)).endswith(
        "[assistant]it[assistant]"
    )


USER = [{"role": "user", "content": "?"}]
SHOWN = {"type": "image_url", "image_url": {"url": PIXEL}}
NAMESPACE = {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]}
DEEP: dict[str, Any] = {}
for _ in range(80):
    DEEP = {"properties": DEEP}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": USER, "tools": []}, "tools"),
        (CHAT, {"messages": USER, "tool_choice": "auto"}, "tool_choice"),
        (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        (
            CHAT,
            {"messages": USER, "tools": [TOOL], "tool_choice": {"function": {"name": "other"}}},
            "tool_choice",
        ),
        (CHAT, {"messages": USER, "continue_final_message": True}, "continue_final_message"),
        (CHAT, {"messages": [{"role": "user", "content": [1]}]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "user", "content": [{"text": 1}]}]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": ["x"]}]}]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": {"a": 1}}]}]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0]"),
        (
            CHAT,
            {"messages": USER, "tools": [{"function": {"name": "f", "parameters": DEEP}}]},
            "tools",
        ),
        (RESPONSES, {"input": [{"type": "function_call", "call_id": "c"}]}, "input[0]"),
        (RESPONSES, {"input": "?", "tools": [{"type": "function"}]}, "tools"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": [1]}]}]}, "messages[0]"),
        (
            RESPONSES,
            {"input": [{"type": "function_call_output", "output": [{"type": [1]}]}]},
            "messages[0]",
        ),
        *(
            (RESPONSES, {"input": "?", "tools": [{**NAMESPACE, "tools": tools}]}, "tools")
            for tools in (5, ["a"], "abc")
        ),
        (RESPONSES, {"input": "?", "tools": [{**NAMESPACE, "name": [1]}]}, "tools"),
    ],
)
def test_invalid_request_is_refused(path: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(path, **body)
    assert not isinstance(refused.value, UnsupportedParameter)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": USER, "chat_template": "{{ messages }}"}, "chat_template"),
        (CHAT, {"messages": USER, "mm_processor_kwargs": {"max_pixels": 9}}, "mm_processor_kwargs"),
        (CHAT, {"messages": USER, "truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0]"),
        (RESPONSES, {"input": "?", "truncation": "auto"}, "truncation"),
        (RESPONSES, {"input": "?", "previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0]"),
    ],
)
def test_option_that_would_change_the_prompt_is_refused(
    path: str, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        read(path, **body)
    assert refused.value.param == param


def test_parameters_of_answers_are_ignored() -> None:
    body = {"messages": USER, "mm_processor_kwargs": {}, "max_tokens": 7, "bad_words": ["x"]}
    request = read(CHAT, **body, max_token=1, prompt_logprobs=3, n=5000, mm_payload="none")
    assert (request.max_tokens, request.n) == (7, 1)
    with pytest.raises(ModelNotFound):
        read(CHAT, messages=USER, model="another")


def test_completion_has_a_text_or_tokens() -> None:
    path = COMPLETIONS
    text = read(path, prompt="a red", echo=True, bad_words=["x"], cache_salt="salt")
    assert (text.prompt, text.max_tokens, text.cache_salt) == ("a red", 16, "salt")
    tokens = read(path, prompt=[[5, 6]], max_tokens=3)
    assert (tokens.prompt, tokens.max_tokens) == ((5, 6), 3)
    with pytest.raises(UnsupportedParameter):
        read(path, prompt="a", suffix="b")


def test_completion_has_several_prompts_with_the_same_options() -> None:
    options = {"add_special_tokens": False, "truncate_prompt_tokens": 2, "truncation_side": "right"}
    for prompts in (["a", "b", "a"], [[5, 6], [7]], ["a"] * 1024):
        body = json.dumps({"model": "tiny", "prompt": prompts, **options})
        requests = read_all(COMPLETIONS, body)
        assert [each.prompt for each in requests] == [
            each if isinstance(each, str) else tuple(each) for each in prompts
        ]
        assert {each.truncation for each in requests} == {Truncation(2, "right")}
        assert not any(each.adds_special for each in requests)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [[1], 2]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"prompt": "a", "truncation_side": "up"}, "truncation_side"),
    ],
)
def test_completion_with_invalid_prompts_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(COMPLETIONS, **body)
    assert refused.value.param == param


@examples(200, storm=5_000)
@given(
    text=st.text(st.sampled_from("ab \né<|im_end|>"), max_size=24),
    limit=st.integers(0, 12),
    side=st.sampled_from([None, "left", "right"]),
    adds_special=st.booleans(),
)
def test_truncated_text_has_the_tokens_of_the_tokenizer_of_vllm(
    framed: tuple[PromptBuilder, Any],
    text: str,
    limit: int,
    side: Literal["left", "right"] | None,
    adds_special: bool,
) -> None:
    """Its tokenizer cuts off the left side and keeps its special tokens; a side that the request
    names is cut off with them.
    """
    builder, tokenizer = framed
    whole: list[int] = tokenizer.encode(text, add_special_tokens=adds_special)
    cut = {"left": whole[max(0, len(whole) - limit) :], "right": whole[:limit]}
    truncation = Truncation(limit, side)
    assert builder.plain(whole, truncation=truncation) == cut[side or "left"]
    found = builder.plain(text, adds_special=adds_special, truncation=truncation)
    if side is not None or (adds_special and limit < 2):
        assert found == cut[side or "left"]
    else:
        options = {"truncation": True, "add_special_tokens": adds_special}
        assert found == tokenizer.encode(text, max_length=limit, **options)


@pytest.fixture(scope="module")
def framed(tmp_path_factory: pytest.TempPathFactory) -> tuple[PromptBuilder, Any]:
    """A tokenizer that adds a special token on both sides, here and as vLLM loads it."""
    folder = folder_with(tmp_path_factory.mktemp("framed"), HERMES)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = ("<|im_start|>", "<|im_end|>")
    pairs = [(name, tokenizer.token_to_id(name)) for name in names]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{names[0]} $A {names[1]}", special_tokens=pairs
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return builder_of(folder), AutoTokenizer.from_pretrained(folder, truncation_side="left")


def test_completion_contains_tokens_of_media_as_in_vllm(hermes: Path) -> None:
    builder = builder_of(hermes)
    token_ids = builder.plain("a<|image_pad|>")
    assert builder.plain(token_ids) == token_ids
    assert builder.text_of(token_ids) == "a<|image_pad|>"


def test_renderer_answers_each_prompt_of_a_completion(address: str) -> None:
    """The requests are those of llm-d's router, which forwards a client's body unchanged."""
    tokenizer = Tokenizer.from_file(str(SHAPES / "tokenizer.json"))
    common = {"model": "shapes", "max_tokens": 8, "cache_salt": "live"}
    texts = ["one two three", "four"]
    bodies: list[dict[str, Any]] = [
        {"prompt": texts},
        {"prompt": [[1, 2, 3, 4], [5, 6, 7, 8]], "truncate_prompt_tokens": 2},
        {"prompt": texts[0], "truncate_prompt_tokens": 3, "add_special_tokens": False},
        {"prompt": [9] * 40, "truncate_prompt_tokens": -1},
        {"prompt": [9] * 20, "max_tokens": 31},
        {"prompt": [9] * 20, "max_tokens": 0, "truncate_prompt_tokens": 33},
    ]

    async def ask() -> list[httpx.Response]:
        renderer = Renderer(RenderLink(max_model_len=32, is_for_vllm=True))
        async with frontend(address, engine=renderer) as client:
            path = "/v1/completions/render"
            return [await client.post(path, json={**common, **body}) for body in bodies]

    *answers, refused = asyncio.run(ask())
    assert all(each.status_code == 200 for each in answers), [each.text for each in answers]
    found = [each.json() for each in answers]
    tokens = [[one["token_ids"] for one in each] for each in found]
    assert tokens == [
        [tokenizer.encode(text).ids for text in texts],
        [[3, 4], [7, 8]],
        [tokenizer.encode(texts[0]).ids[-3:]],
        [[9] * 31],
        [[9] * 20],
    ]
    first, second = (one["request_id"] for one in found[0])
    assert (first[-2:], second[-2:], first[:-2]) == ("-0", "-1", second[:-2])
    assert {one["cache_salt"] for each in found for one in each} == {"live"}
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


def test_tool_changes_within_messages() -> None:
    """Blocks of the system add tools, by value or by name, and remove them."""
    definition = {"name": "two", "input_schema": {"type": "object"}}
    changes = [
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "one"}},
        {
            "type": "tool_addition",
            "tool": {"type": "tool_definition", "definition": definition},
        },
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "three"}},
    ]
    tools = [
        {"name": "one", "input_schema": {}, "defer_loading": True},
        {"name": "three", "input_schema": {}},
    ]
    messages = [*USER, {"role": "system", "content": changes}]
    request = read(MESSAGES, max_tokens=1, messages=messages, tools=tools)
    functions = [tool["function"] for tool in request.template.variables["tools"]]
    assert [each["name"] for each in functions] == ["one", "two"]
    assert "defer_loading" not in functions[0]
    unknown = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "x"}}
    with pytest.raises(InvalidRequest):
        read(MESSAGES, max_tokens=1, messages=[*USER, {"role": "system", "content": [unknown]}])


def test_template_for_tools_is_the_one_with_this_name(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, HERMES)
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    named = {"default": f"{IMAGE}plain", "tool_use": f"{IMAGE}tools"}
    settings["chat_template"] = [{"name": n, "template": t} for n, t in named.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}
        ]
    }
    assert text_of(folder, read(CHAT, **body)) == f"{IMAGE}plain"
    assert text_of(folder, read(CHAT, **body, tools=[TOOL])) == f"{IMAGE}tools"


def test_read_input_of_call_nested_deeply_is_refused_or_dropped() -> None:
    """Some depths pass the decoder of the body, and no step after it."""
    called = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "HERE"}
    text = json.dumps({"model": "tiny", "input": [called]})
    for depth in range(64, 1024):
        nested = text.replace('"HERE"', "[" * depth + "]" * depth)
        if depth < 512:
            with pytest.raises(InvalidRequest):
                read_text(RESPONSES, nested)
            continue
        with suppress(InvalidRequest):
            (message,) = read_text(RESPONSES, nested).messages
            assert message.extra["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("role", ["<|image_pad|>", "\ue000", "\ue0007\ue000"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_build_role_with_token_of_media_is_plain_text(hermes: Path, path: str, role: str) -> None:
    turn = {"role": role, "content": [SHOWN, *text("?")]}
    request = read(path, **{"messages" if path == CHAT else "input": [turn]})
    assert f"[{role}]{IMAGE}?" in text_of(hermes, request)
    (placeholder,) = builder_of(hermes).build(request.messages, [(1,)]).placeholders
    assert placeholder.length == 1


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        # The texts of the system are merged, and its images are lost.
        (
            [
                {"role": "system", "content": [SHOWN]},
                *USER,
                {"role": "developer", "content": "Be short."},
            ],
            {},
        ),
        # The prompt ends with the last text.
        (
            [*USER, {"role": "assistant", "content": [*text("it is "), SHOWN]}],
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
    ],
)
def test_build_item_that_the_template_leaves_out_raises_invalid_request(
    hermes: Path, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match="0 of the 1 media"):
        text_of(hermes, read(CHAT, messages=messages, **options))


def test_build_arguments_with_half_a_surrogate_pair_raises_invalid_request(hermes: Path) -> None:
    function = {"name": "f", "arguments": '{"a": "\\ud800"}'}
    turn = {"role": "assistant", "tool_calls": [{"function": function, "type": "function"}]}
    with pytest.raises(InvalidRequest, match="surrogate pair"):
        text_of(hermes, read(CHAT, messages=[*USER, turn]))


CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "aa", "url": ""}
COMMON = {"tool_choice": "auto", "chat_template_kwargs": {"a": 1}, "cache_salt": "s"}
COMPLETE: dict[str, dict[str, Any]] = {
    CHAT: {
        **COMMON,
        "tools": [{**TOOL, "function": {**FUNCTION, "strict": True}, "defer_loading": True}],
        "documents": [{"title": "a", "text": "b"}],
        "reasoning_effort": "low",
        "add_generation_prompt": True,
        "continue_final_message": False,
        "messages": [
            {"role": "system", "content": "?", "name": "n"},
            {
                "role": "user",
                "content": [
                    "?",
                    {"type": "text", "text": "?"},
                    {"type": "refusal", "refusal": "?"},
                    {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}},
                    {"type": "input_image", "image_url": PIXEL},
                ],
            },
            {"role": "assistant", "content": None, "reasoning": "?", "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "c", "content": text("?")},
            {"role": "developer", "content": "?", "tools": [TOOL]},
        ],
    },
    MESSAGES: {
        **COMMON,
        "tool_choice": {"type": "auto"},
        "max_tokens": 1,
        "system": text("?"),
        "tools": [{"name": "f", "input_schema": SCHEMA, "description": "d", "strict": True}],
        "output_config": {"effort": "low"},
        "thinking": {"type": "enabled"},
        "messages": [
            {"role": "user", "content": [{"type": "image", "source": SOURCE}, *text("?")]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "?"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [*text("?"), {"type": "image", "source": SOURCE}],
                    }
                ],
            },
            {
                "role": "system",
                "content": [
                    {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}}
                ],
            },
        ],
    },
    RESPONSES: {
        **COMMON,
        "instructions": "?",
        "tools": [
            {"type": "function", **FUNCTION},
            {"type": "custom", "name": "f", "description": "d"},
            NAMESPACE,
        ],
        "reasoning": {"effort": "low"},
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": PIXEL, "detail": "low"},
                    {"type": "input_text", "text": "?"},
                ],
            },
            {"type": "reasoning", "summary": text("?"), "content": text("?")},
            {
                "type": "function_call",
                "call_id": "c",
                "name": "f",
                "arguments": "{}",
                "namespace": "n",
            },
            {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "?"},
            {"type": "function_call_output", "call_id": "c", "output": "?"},
            {"type": "message", "role": "assistant", "status": "completed", "content": text("?")},
        ],
    },
}
"""Request of each API with most of the keys that change a prompt."""
OTHER_MEDIA = {
    "role": "user",
    "content": [
        {"type": "input_audio", "input_audio": {"data": "aa", "format": "wav"}, "uuid": "u"},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,aa"}, "uuid": "u"},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aa"}, "uuid": "u"},
    ],
}


def broken(whole: Any, value: str) -> Iterator[str]:
    """Yield the JSON of ``whole`` with ``value`` at the place of each value in it, in turn."""
    if isinstance(whole, dict | list):
        entries = list(whole.items() if isinstance(whole, dict) else enumerate(whole))
        texts = [json.dumps(each) for _, each in entries]
        for index, (_, each) in enumerate(entries):
            for changed in (value, *broken(each, value)):
                parts = [*texts[:index], changed, *texts[index + 1 :]]
                if isinstance(whole, list):
                    yield f"[{','.join(parts)}]"
                else:
                    names = map(json.dumps, whole)
                    yield f"{{{','.join(map(':'.join, zip(names, parts, strict=True)))}}}"


_words = st.sampled_from(["", "text", "tool", "system", "assistant", "developer", "image_url"])
_odd = st.sampled_from(["<|image_pad|>", "\ue000", "\ue0000\ue000", "\ud800", PIXEL])
_numbers = st.integers() | st.floats() | st.sampled_from([10**400, 1e308])
_values = st.recursive(
    st.none() | st.booleans() | _numbers | _words | _odd | st.text(max_size=3),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(_words | _odd, each, max_size=3),
    max_leaves=5,
).map(json.dumps)
_deep = st.sampled_from([7, 60, 70, 900, 970, 990]).map(lambda depth: "[" * depth + "]" * depth)
_any_json = _values | _deep
anywhere = _any_json | _any_json.map(json.dumps)


@pytest.fixture(scope="module")
def hermes_builder(tmp_path_factory: pytest.TempPathFactory) -> PromptBuilder:
    return builder_of(folder_with(tmp_path_factory.mktemp("hermes"), HERMES))


@pytest.mark.parametrize("path", COMPLETE)
def test_complete_requests_have_a_prompt(path: str, hermes_builder: PromptBuilder) -> None:
    request = read(path, **COMPLETE[path])
    assert hermes_builder.build(request.messages, [(1,)] * 9, request.template).token_ids


@pytest.mark.parametrize("path", COMPLETE)
@examples(60, storm=1000)
@given(value=anywhere)
def test_read_any_json_at_any_key_gives_a_prompt_or_invalid_request(
    path: str, value: str, hermes_builder: PromptBuilder
) -> None:
    for body in broken({"model": "tiny", **COMPLETE[path]}, value):
        with suppress(InvalidRequest):
            request = read_text(path, body)
            assert all(part.modality == Modality.IMAGE for part in request.media)
            written = [(1,)] * len(request.media)
            assert hermes_builder.build(request.messages, written, request.template).token_ids


@examples(60, storm=1000)
@given(value=anywhere)
def test_read_any_json_in_parts_of_other_media_gives_a_request_or_invalid_request(
    value: str,
) -> None:
    for body in broken({"model": "tiny", "messages": [OTHER_MEDIA]}, value):
        with suppress(InvalidRequest):
            assert read_text(CHAT, body).messages
