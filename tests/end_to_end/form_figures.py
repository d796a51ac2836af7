"""Share of right JSON answers and tool calls of the built-in model, and their lengths.

    python -m tests.end_to_end.form_figures

Prints one line for each kind of request. "Ratio" is the median of an answer's tokens to the tokens
of its compact JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jsonschema import validators
from openai import OpenAI
from tokenizers import Tokenizer

from afferent.conformance.images import COLOURS, DrawnImage, draw_image
from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from tests import schemas
from tests.server import Server, data_url

_TOKENIZER = Tokenizer.from_file(str(BUILT_IN_MODELS / "shapes" / "tokenizer.json"))
_KINDS: dict[str, dict[str, Any]] = {
    "free string": {"type": "string"},
    "enumeration": {"type": "string", "enum": list(COLOURS)},
}
_MAX_TOKENS = 300

Ask = Callable[[int], tuple[bool, float]]
"""Sends the request of this number; returns whether the answer is right, and its ratio."""


class Figures:
    """Requests about the same drawn images, to one server."""

    def __init__(self, client: OpenAI, pictures: list[DrawnImage]) -> None:
        self._client, self._pictures = client, pictures

    def report(self, name: str, ask: Ask) -> None:
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(ask, range(len(self._pictures))))
        right = sum(is_right for is_right, _ in answers)
        ratio = statistics.median(ratio for _, ratio in answers if ratio)
        print(f"{name:60}  {right:4d} of {len(answers)} right  ratio {ratio:.2f}", flush=True)

    def colour(self, kind: dict[str, Any], temperature: float, *, has_tool: bool) -> Ask:
        """Return a request for the colour, as a forced call or as a response format."""
        schema = {"type": "object", "properties": {"colour": kind}, "required": ["colour"]}
        closed = {**schema, "additionalProperties": False}
        tool = {"type": "function", "function": {"name": "report_colour", "parameters": schema}}
        asked = (
            {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
            if has_tool
            else {"response_format": _format(closed)}
        )

        def ask(number: int) -> tuple[bool, float]:
            message, tokens = self._said(number, "What is in the picture?", temperature, **asked)
            text = message.tool_calls[0].function.arguments if has_tool else message.content
            written = f'<tool_call>{{"name":"report_colour","arguments":{text}}}</tool_call>'
            right = json.loads(text) == {"colour": self._pictures[number].colour}
            return right, tokens / _length(written if has_tool else text)

        return ask

    def schema(self, schema: list[dict[str, Any]]) -> Ask:
        """Return a request for an answer of a random schema; it is right if it ends."""

        def ask(number: int) -> tuple[bool, float]:
            form = _format(schema[number])
            message, tokens = self._said(
                number, "What is in the picture?", 1.0, response_format=form
            )
            if tokens == _MAX_TOKENS:
                return False, 0.0
            default = validators.Draft202012Validator
            validator = validators.validator_for(schema[number], default=default)
            validator(schema[number]).validate(json.loads(message.content))
            return True, tokens / _length(message.content)

        return ask

    def loop(self, number: int) -> tuple[bool, float]:
        """Go through a loop of an agent: a call, its result, the answer."""
        picture = self._pictures[number]
        parameters = {"type": "object", "properties": {"colour": {"type": "string"}}}
        function = {"name": "report_colour", "parameters": {**parameters, "required": ["colour"]}}
        tools = {"tools": [{"type": "function", "function": function}]}
        question = "Report the colour of the picture."
        called, _ = self._said(number, question, 0.0, **tools)
        if not called.tool_calls:
            return False, 0.0
        (call,) = called.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "ok"}
        ended, _ = self._said(number, question, 0.0, after=[called, result], **tools)
        is_called = json.loads(call.function.arguments) == {"colour": picture.colour}
        return is_called and ended.content == picture.answer, 1.0

    def _said(
        self, number: int, question: str, temperature: float, *, after: Any = (), **asked: Any
    ) -> tuple[Any, int]:
        image = {"type": "image_url", "image_url": {"url": data_url(self._pictures[number])}}
        content = [image, {"type": "text", "text": question}]
        messages: Any = [{"role": "user", "content": content}, *after]
        answer = self._client.chat.completions.create(
            model="shapes",
            messages=messages,
            temperature=temperature,
            seed=number,
            max_tokens=_MAX_TOKENS,
            **asked,
        )
        assert answer.usage is not None
        return answer.choices[0].message, answer.usage.completion_tokens


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def _length(text: str) -> int:
    return len(_TOKENIZER.encode(text, add_special_tokens=False).ids)


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge JSON answers and tool calls.")
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--seed", type=int, default=99)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    pictures = [draw_image(rng) for _ in range(args.pictures)]
    with Server() as server:
        figures = Figures(server.client(), pictures)
        for name, kind in _KINDS.items():
            for temperature in (0.0, 1.0):
                for has_tool in (True, False):
                    what = "forced call" if has_tool else "response format"
                    ask = figures.colour(kind, temperature, has_tool=has_tool)
                    figures.report(f"{what}, {name}, temperature {temperature:g}", ask)
        made = schemas.made(args.pictures, seed=args.seed)
        figures.report("random schema, temperature 1", figures.schema(made))
        figures.report("loop of an agent", figures.loop)


if __name__ == "__main__":
    main()
