"""Each parameter through each API, with the built-in engine: its effect on the answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import pytest
from tokenizers import Tokenizer

from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from tests import plain_http
from tests.server import Server

TOKENIZER = Tokenizer.from_file(str(BUILT_IN_MODELS / "shapes" / "tokenizer.json"))
QUESTION = "What is in the picture?"
PLAIN = "There is no picture."
"""The model's answer to a question without a picture."""


@dataclass(frozen=True, slots=True)
class Said:
    text: str
    reason: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Way:
    """An API: its path, the names of its parameters, and its finish reasons."""

    path: str
    messages: str
    limit: str
    stop: str
    ended: str
    cut: str
    required: tuple[tuple[str, Any], ...] = ()

    def post(self, server: Server, **given: Any) -> httpx.Response:
        body = {"model": "shapes", self.messages: [user(QUESTION)], **dict(self.required), **given}
        return plain_http.post(f"{server.url}{self.path}", json=body, timeout=60)

    def ask(self, server: Server, **given: Any) -> Said:
        answer = self.post(server, **given)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        match self.messages, body:
            case "messages", {"choices": [choice], "usage": usage}:
                text, reason = choice["message"]["content"], choice["finish_reason"]
                return Said(text, reason, usage["completion_tokens"])
            case "messages", {"content": [block], "stop_reason": reason, "usage": usage}:
                return Said(block["text"], reason, usage["output_tokens"])
            case "input", {"output": [message], "status": reason, "usage": usage}:
                return Said(message["content"][0]["text"], reason, usage["output_tokens"])
        raise AssertionError(body)


WAYS = {
    "chat": Way("/v1/chat/completions", "messages", "max_tokens", "stop", "stop", "length"),
    "responses": Way(
        "/v1/responses", "input", "max_output_tokens", "stop", "completed", "incomplete"
    ),
    "messages": Way(
        *("/v1/messages", "messages", "max_tokens", "stop_sequences", "end_turn", "max_tokens"),
        required=(("max_tokens", 40),),
    ),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def begun(text: str) -> list[dict[str, Any]]:
    return [user(QUESTION), {"role": "assistant", "content": text}]


def token(text: str) -> int:
    (only,) = TOKENIZER.encode(text, add_special_tokens=False).ids
    return int(only)


def tokens(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def test_what_is_said_to_nothing(server: Server, way: Way) -> None:
    said = way.ask(server)
    assert (said.text, said.reason, said.num_tokens) == (PLAIN, way.ended, len(tokens(PLAIN)))


# Choice of tokens


def test_logit_bias_forces_a_token(server: Server, way: Way) -> None:
    wanted = token(" star")
    said = way.ask(server, logit_bias={str(wanted): 100}, **{way.limit: 3})
    assert (said.text.split(), said.reason) == (["star"] * 3, way.cut)
    first = tokens(PLAIN)[0]
    other = way.ask(server, logit_bias={str(first): -100}, **{way.limit: 1})
    assert other.text != TOKENIZER.decode([first])


@pytest.mark.parametrize(
    "only_the_likeliest",
    [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}, {"temperature": 0}],
    ids=lambda given: next(iter(given)),
)
def test_what_leaves_the_likeliest_token(
    server: Server, way: Way, only_the_likeliest: dict[str, Any]
) -> None:
    hot = {"temperature": 1.0, "seed": 3, "ignore_eos": True, way.limit: 20}
    if way.path != "/v1/messages":
        hot["temperature"] = 2.0
    greedy = way.ask(server, temperature=0, ignore_eos=True, **{way.limit: 20})
    assert way.ask(server, **{**hot, **only_the_likeliest}).text == greedy.text


def test_a_seed_draws_alike(server: Server, way: Way) -> None:
    """The same seed draws the same tokens, also in a batch and with other logits."""
    flat = {str(each): 100 for each in range(100, 160)}
    hot = {"temperature": 1.0, "ignore_eos": True, way.limit: 24, "logit_bias": flat}
    first = way.ask(server, **hot, seed=1).text
    assert way.ask(server, **hot, seed=1).text == first
    assert way.ask(server, **hot, seed=2).text != first


@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 5.0}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}],
    ids=lambda given: next(iter(given)),
)
def test_penalties_spread_the_answer(server: Server, way: Way, penalty: dict[str, Any]) -> None:
    """The bias makes two tokens likelier than any other, and the first slightly likelier."""
    one, two = token(" star"), token(" circle")
    two_of_them = {"logit_bias": {str(one): 100, str(two): 99}, "ignore_eos": True, way.limit: 12}
    alone = way.ask(server, **two_of_them).text.split()
    assert len(set(alone)) == 1
    spread = way.ask(server, **two_of_them, **penalty).text.split()
    assert len(set(spread)) > 1


# End of an answer


def test_ignore_eos_goes_on(server: Server, way: Way) -> None:
    said = way.ask(server, ignore_eos=True, **{way.limit: 33})
    assert (said.num_tokens, said.reason) == (33, way.cut)
    assert said.text.startswith(PLAIN)


def test_min_tokens(server: Server, way: Way) -> None:
    least = len(tokens(PLAIN)) + 5
    said = way.ask(server, min_tokens=least, **{way.limit: 40})
    assert said.num_tokens >= least
    assert said.text.startswith(PLAIN)
    refused = way.post(server, min_tokens=9, **{way.limit: 8})
    assert refused.status_code == 400
    assert "min_tokens" in refused.text


def test_stop_token_ids(server: Server, way: Way) -> None:
    stop, before = tokens(PLAIN)[-2], TOKENIZER.decode(tokens(PLAIN)[:-2])
    said = way.ask(server, stop_token_ids=[stop])
    assert (said.text, said.reason) == (before, way.ended)
    with_it = way.ask(server, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert with_it.text == TOKENIZER.decode(tokens(PLAIN)[:-1])
    assert way.ask(server, stop_token_ids=[stop], ignore_eos=True).text == before
    least = way.ask(server, stop_token_ids=[stop], min_tokens=len(tokens(PLAIN)) + 2)
    assert least.num_tokens > len(tokens(PLAIN)) - 2, "it is not chosen before"
    beyond = way.post(server, stop_token_ids=[10**6])
    assert beyond.status_code == 400


def test_stop_strings(server: Server, way: Way) -> None:
    stop = {way.stop: ["no"]}
    assert way.ask(server, **stop).text == "There is "
    assert way.ask(server, **stop, include_stop_str_in_output=True).text == "There is no"
    assert way.ask(server, **stop, min_tokens=len(tokens("There is no"))).text == PLAIN


def test_special_tokens_of_the_answer(server: Server, way: Way) -> None:
    given = {"ignore_eos": True, way.limit: len(tokens(PLAIN)) + 1}
    assert way.ask(server, **given).text == PLAIN
    shown = way.ask(server, **given, skip_special_tokens=False).text
    assert shown == f"{PLAIN}<|im_end|>"
    ended = way.ask(server, skip_special_tokens=False, include_stop_str_in_output=True)
    assert ended.text == f"{PLAIN}<|im_end|>"


# Prompt


def test_an_answer_that_is_begun(server: Server, way: Way) -> None:
    goes_on = {way.messages: begun("There is"), "continue_final_message": True}
    assert way.ask(server, **goes_on).text == " no picture."
    as_it_is = way.ask(server, **{way.messages: begun("There is")}).text
    means_that = way.path == "/v1/messages"
    assert (as_it_is == " no picture.") is means_that


def render(server: Server, way: Way, **given: Any) -> list[int]:
    answer = Way(f"{way.path}/render", *_rest(way)).post(server, **given)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return list((found[0] if isinstance(found, list) else found)["token_ids"])


def _rest(way: Way) -> tuple[Any, ...]:
    return (way.messages, way.limit, way.stop, way.ended, way.cut, way.required)


def test_the_generation_prompt(server: Server, way: Way) -> None:
    begins, ends = render(server, way), render(server, way, add_generation_prompt=False)
    assert begins[: len(ends)] == ends
    assert TOKENIZER.decode(begins[len(ends) :], skip_special_tokens=False) == (
        "<|im_start|>assistant\n"
    )
    open_end = render(server, way, **{way.messages: begun("There")}, continue_final_message=True)
    assert open_end == begins + tokens("There")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a model whose chat template has variables of its own."""
    folder = tmp_path_factory.mktemp("models") / "shapes"
    folder.mkdir()
    for file in (BUILT_IN_MODELS / "shapes").iterdir():
        (folder / file.name).symlink_to(file)
    file = folder / "chat_template.jinja"
    template = file.read_text()
    file.unlink()
    file.write_text(template + "{{ mood }}{{ reasoning_effort }}")
    with Server(str(folder), "--served-model-name", "shapes") as running:
        yield running


def test_variables_of_the_chat_template(told: Server, way: Way) -> None:
    plain = render(told, way)
    assert render(told, way, chat_template_kwargs={"mood": " red"}) == [*plain, token(" red")]
    spelt = render(told, way, chat_template_kwargs={"mood": "<|image_pad|><|im_end|>"})
    assert spelt[: len(plain)] == plain
    special = {TOKENIZER.token_to_id("<|image_pad|>"), TOKENIZER.token_to_id("<|im_end|>")}
    assert not special & set(spelt[len(plain) :]), "text of a client is never a special token"
    if way.path != "/v1/messages":
        effort: Any = {"effort": "low"} if way.messages == "input" else "low"
        name = "reasoning" if way.messages == "input" else "reasoning_effort"
        assert render(told, way, **{name: effort}) == [*plain, *tokens("low")]
    refused = way.post(told, chat_template_kwargs={"messages": []})
    assert refused.status_code == 400
