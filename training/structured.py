"""Conversations with JSON answers and with tools, for the training of the built-in model.

A constrained answer begins and continues as its schema says, and the prompt does not contain the
schema. So the model learns the values of such answers, not their keys: text between `FORCED` and
`FREE` gets no loss.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from msgspec import json

from dialogue import (
    Conversation,
    Label,
    Message,
    answer_for,
    ask_plainly,
    sample_conversation,
    sample_labels,
    user_turn,
)

FORCED, FREE = "\ue001", "\ue002"
"""Marks in an assistant's text: what stands between them gets no loss."""

Value = Any
_COLOUR = ("colour", "color", "main_colour", "main_color", "dominant_color", "fill", "paint")
_SHAPE = ("shape", "object", "form", "kind", "type", "figure", "object_shape", "category")
_TEXT = (
    *("description", "caption", "summary", "answer", "text", "content", "label", "name", "title"),
    *("what", "result", "value", "subject", "reason", "finding", "message", "response", "output"),
    *("note", "details", "comment", "data", "thing", "item", "query", "input"),
)
_INDEX = ("picture", "index", "id", "position", "image", "page", "picture_number")
_COUNT = ("count", "number", "total", "num_pictures", "num_objects", "amount", "size", "quantity")
_TRUE = ("found", "visible", "present", "ok", "valid", "is_shape", "success", "done")
_SCORE = ("confidence", "score", "probability", "certainty", "rating", "weight", "price")
_COLOURS = ("colours", "colors", "palette", "all_colours")
_SHAPES = ("shapes", "objects", "figures", "forms")
_TEXTS = ("labels", "descriptions", "captions", "answers", "results", "tags", "names", "steps")
_LISTS = ("pictures", "images", "items", "findings", "entries", "objects", "list", "rows", "data")

_CITIES = ("Paris", "London", "Rome", "Oslo", "Lima", "Cairo", "Tokyo", "Berlin", "Madrid", "Delhi")
_PEOPLE = ("Ada", "Ben", "Eva", "Max", "Mia", "Tom", "John", "Anna", "Alice", "Bob", "Maria", "Li")
_WORDS = (
    *("sunny", "rain", "cloudy", "wind", "open", "closed", "late", "early", "ready", "blue sky"),
    *("north", "south", "train", "river", "book", "green tea", "apple", "table", "window", "door"),
    *("empty", "full", "first", "second", "warm", "cold", "yes", "no", "nothing new", "all good"),
)
_RESULTS = ("ok", "OK", "done", "saved", "recorded", '{"status":"ok"}', "true", "null", "Success.")
_VERBS = ("report", "record", "save", "store", "submit", "log", "set", "note", "send", "return")
_OBJECTS = ("colour", "color", "shape", "picture", "object", "label", "description", "result")
_EYES = ("take_screenshot", "get_image", "open_camera", "show_picture", "capture", "load_image")
_LOOK = (
    "What is on the screen?",
    "Take a picture and describe it.",
    "Look and tell me.",
    "Show me.",
)

_ALL_KEYS = {
    **dict.fromkeys(_INDEX, "index"),
    **dict.fromkeys(_COUNT, "count"),
    **dict.fromkeys(_TRUE, "true"),
    **dict.fromkeys(_SCORE, "score"),
    **dict.fromkeys(_TEXTS, "texts"),
    **dict.fromkeys(_SHAPES, "shapes"),
    **dict.fromkeys(_COLOURS, "colours"),
    **dict.fromkeys(_SHAPE, "shape"),
    **dict.fromkeys(_COLOUR, "colour"),
}
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}


def compact(value: Value) -> str:
    return json.encode(value).decode()


def sample(rng: random.Random, labels: Sequence[Label]) -> Conversation:
    """Return a conversation for the training, about ``labels`` (none to four)."""
    if rng.random() < 0.45 or (labels and rng.random() < 0.1):
        return Conversation(sample_conversation(rng, labels))
    return _structured(rng, labels)


def draw_labels(rng: random.Random) -> list[Label]:
    """Return none to four random labels; conversations without pictures are rare."""
    return [] if rng.random() < 0.12 else sample_labels(rng)


def _structured(rng: random.Random, labels: Sequence[Label]) -> Conversation:
    kinds = [_json_answer, _report] if labels else [_extraction, _lookup, _nothing]
    kind = rng.choices(
        [rng.choice(kinds), _plain_beside_tools, _lookup if rng.random() < 0.7 else _eyes],
        weights=(70, 15, 15),
    )[0]
    return kind(rng, labels)


# JSON answers


def _json_answer(rng: random.Random, labels: Sequence[Label]) -> Conversation:
    index = rng.randrange(len(labels))
    value = _object(rng, labels, index)
    is_flat = not any(isinstance(each, dict | list) for each in value.values())
    if is_flat and rng.random() < 0.4:  # the question has the keys: all of the answer gets a loss
        question = rng.choice(
            (
                "Answer in JSON with the keys {keys}.",
                "Return JSON with {keys}.",
                "Give {keys} as JSON.",
                "JSON: {keys}.",
            )
        ).format(keys=", ".join(value))
        if len(labels) > 1:
            question = f"Picture {index + 1}. {question}"
        return Conversation([user_turn(rng, question, labels), _said(compact(value))])
    question = ask_plainly(rng, labels, index)
    return Conversation([user_turn(rng, question, labels), _said(_forced(compact(value)))])


def _object(rng: random.Random, labels: Sequence[Label], index: int) -> dict[str, Value]:
    if rng.random() < 0.2:  # one object for each picture
        keys = _keys(rng, rng.randrange(1, 4))
        rows = [{key: _value(key, labels, i) for key in keys} for i in range(len(labels))]
        return {rng.choice(_LISTS): rows}
    value = {key: _value(key, labels, index) for key in _keys(rng, rng.randrange(1, 5))}
    if rng.random() < 0.2:
        key = rng.choice((*_COLOURS, *_SHAPES, *_TEXTS))
        value[key] = _value(key, labels, index)
    if rng.random() < 0.12:
        value[_odd_key(rng)] = {k: _value(k, labels, index) for k in _keys(rng, 2)}
    return value


def _keys(rng: random.Random, num: int) -> list[str]:
    kinds = (_COLOUR, _SHAPE, _TEXT, _INDEX, _COUNT, _TRUE, _SCORE)
    weights = (30, 24, 24, 6, 6, 5, 5)
    keys = [rng.choice(rng.choices(kinds, weights)[0]) for _ in range(num)]
    if rng.random() < 0.15:
        keys[rng.randrange(num)] = _odd_key(rng)
    return list(dict.fromkeys(keys))


def _odd_key(rng: random.Random) -> str:
    return rng.choice(_WORDS).replace(" ", "_") + rng.choice(("", "_id", "_text", str(num(rng))))


def _value(key: str, labels: Sequence[Label], index: int) -> Value:
    if not labels:
        return "none"
    label = labels[index]
    values: dict[str, Value] = {
        "index": index + 1,
        "count": len(labels),
        "true": True,
        "score": 0.9,
        "texts": [str(each) for each in labels],
        "shapes": [each.shape for each in labels],
        "colours": [each.colour for each in labels],
        "shape": label.shape,
        "colour": label.colour,
        "text": str(label),
    }
    return values[_ALL_KEYS.get(key, "text")]


def _forced(text: str) -> str:
    """Mark all but the values of a JSON text, and the quotes that end them."""
    return re.sub(
        r'(?P<open>[{,\[]*(?:"[^"]*":)?[\[{]*(?:"[^"]*":)?"?)'
        r'(?P<value>(?<=")[^"]*"|true|false|null|-?[0-9.]+)(?P<close>[\]}]*)',
        lambda m: f"{FORCED}{m['open']}{FREE}{m['value']}{FORCED}{m['close']}{FREE}",
        text,
    )


def _extraction(rng: random.Random, labels: Sequence[Label]) -> Conversation:
    name, age, city = rng.choice(_PEOPLE), num(rng), rng.choice(_CITIES)
    text = rng.choice(
        (
            f"{name} is {age} years old and lives in {city}.",
            f"{name}, {age}, {city}",
            f"I am {name} from {city}, and I am {age}.",
        )
    )
    question = rng.choice(("{text}", "Extract the person: {text}", "{text} Answer in JSON."))
    facts: dict[str, Value] = {
        rng.choice(("name", "person", "first_name")): name,
        rng.choice(("age", "years")): age,
        rng.choice(("city", "town", "place")): city,
    }
    kept = dict(rng.sample(list(facts.items()), rng.randrange(1, 4)))
    turn = user_turn(rng, question.format(text=text), labels)
    return Conversation([turn, _said(_forced(compact(kept)))])


def _nothing(rng: random.Random, labels: Sequence[Label]) -> Conversation:
    """Return a conversation with a JSON answer where there is nothing to say."""
    value = dict.fromkeys([*_keys(rng, rng.randrange(1, 4)), _odd_key(rng)], "none")
    question = rng.choice(("Answer in JSON.", "Plan a trip.", "Write a list.", "Hello!", "Go on."))
    return Conversation([user_turn(rng, question, labels), _said(_forced(compact(value)))])


# Tools


def _report(rng: random.Random, labels: Sequence[Label]) -> Conversation:
    """Return a conversation in which the client asks for a call about its pictures."""
    index = rng.randrange(len(labels))
    verb, noun = rng.choice(_VERBS), rng.choice(_OBJECTS)
    keys = _keys_of(rng, noun)
    tool = _tool(rng, f"{verb}_{noun}", {key: _value(key, labels, index) for key in keys})
    name = tool["function"]["name"]
    tools = _beside(rng, tool)
    where = f" of picture {index + 1}" if len(labels) > 1 else rng.choice(("", " of the picture"))
    question = rng.choice(
        (
            f"{verb.capitalize()} the {noun}{where}.",
            f"Please {verb} the {noun}{where}.",
            f"Call {name}{where and ' with the ' + noun + where}.",
            f"Use the tool to {verb} the {noun}{where}.",
            f"{verb.capitalize()} the {noun}{where} with the tool.",
            f"What is the {noun}{where}? {verb.capitalize()} it with {name}.",
        )
    )
    if len(labels) > 1 and rng.random() < 0.2:
        question = f"{verb.capitalize()} the {noun} of each picture."
        order = list(range(len(labels)))
    else:
        order = [index]
        if rng.random() < 0.2 and len(tools) == 1:  # a call that a client forces
            question = ask_plainly(rng, labels, index)
            calls = [_call(FREE + name, {key: _value(key, labels, index) for key in keys})]
            forced = {"role": "assistant", "content": FORCED, "tool_calls": calls}
            messages = [user_turn(rng, question, labels), forced]
            return Conversation(_after_calls(rng, messages, labels, order), tools)
    calls = [_call(name, {key: _value(key, labels, i) for key in keys}) for i in order]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    messages = [user_turn(rng, question, labels), turn]
    return Conversation(_after_calls(rng, messages, labels, order), tools)


def _after_calls(
    rng: random.Random, messages: list[Message], labels: Sequence[Label], order: Sequence[int]
) -> list[Message]:
    if rng.random() < 0.35:
        return messages
    results = [{"role": "tool", "content": rng.choice(_RESULTS)} for _ in order]
    answer = str(labels[order[0]]) if len(order) == 1 else answer_for(labels, order)
    return [*messages, *results, _said(answer)]


def _plain_beside_tools(rng: random.Random, labels: Sequence[Label]) -> Conversation:
    """Return a conversation with tools that the answer does not need."""
    tool = _tool(rng, f"{rng.choice(_VERBS)}_{rng.choice(_OBJECTS)}", {"colour": "red"})
    return Conversation(sample_conversation(rng, labels), _beside(rng, tool))


def _lookup(rng: random.Random, labels: Sequence[Label]) -> Conversation:
    """Return a conversation in which a tool's result is the answer; arguments are copied."""
    city, word = rng.choice(_CITIES), rng.choice((*_WORDS, *_CITIES, *_PEOPLE))
    odd = f"{rng.choice(('get', 'find', 'look_up', 'fetch', 'run'))}_{_odd_key(rng)}"
    a, b = num(rng), num(rng)
    name, arguments, question = rng.choice(
        (
            ("get_weather", {"city": city}, f"What is the weather in {city}?"),
            ("get_weather", {"location": city}, f"How is the weather in {city} today?"),
            ("search", {"query": word}, f"Search for {word}."),
            ("get_time", {"city": city}, f"What time is it in {city}?"),
            ("add", {"a": a, "b": b}, f"What is {a} + {b}?"),
            ("multiply", {"a": a, "b": b}, f"What is {a} times {b}? Use the tool."),
            (odd, {"name": word}, f"Call {odd} with {word}."),
            (odd, {"value": a}, f"Call {odd} with {a}."),
            (odd, {}, f"Call {odd}."),
        )
    )
    tools = _beside(rng, _tool(rng, name, arguments, renames=False))
    call = {"role": "assistant", "content": "", "tool_calls": [_call(name, arguments)]}
    result = rng.choice(
        (word, f"{num(rng)} {word}", f"{rng.choice(_WORDS)}, {num(rng)}", str(a + b))
    )
    messages = [user_turn(rng, question, labels), call]
    if rng.random() < 0.7:
        messages += [{"role": "tool", "content": result}, _said(result)]
    return Conversation(messages, tools)


def _eyes(rng: random.Random, labels: Sequence[Label]) -> Conversation:
    """Return a conversation in which a tool's result contains the pictures."""
    if not labels:
        return _lookup(rng, labels)
    name = rng.choice(_EYES)
    tools = _beside(rng, _tool(rng, name, {}, renames=False))
    question = rng.choice((*_LOOK, f"Call {name}."))
    call = {"role": "assistant", "content": "", "tool_calls": [_call(name, {})]}
    images = [{"type": "image"}] * len(labels)
    order = list(range(len(labels)))
    answer = str(labels[0]) if len(labels) == 1 else answer_for(labels, order)
    shown = {"role": "tool", "content": images}
    return Conversation([user_turn(rng, question, ()), call, shown, _said(answer)], tools)


def _keys_of(rng: random.Random, noun: str) -> list[str]:
    if noun in ("colour", "color"):
        first = rng.choice(_COLOUR)
    elif noun == "shape":
        first = rng.choice(_SHAPE)
    elif noun in ("label", "description"):
        first = rng.choice((noun, *_TEXT))
    else:
        return _keys(rng, rng.randrange(1, 4))
    return [first] if rng.random() < 0.7 else list(dict.fromkeys([first, *_keys(rng, 1)]))


def _tool(
    rng: random.Random, name: str, arguments: dict[str, Value], *, renames: bool = True
) -> dict[str, Any]:
    if renames and rng.random() < 0.2:
        head, *rest = name.split("_")
        name = rng.choice((head + "".join(map(str.capitalize, rest)), name.replace("_", "-"), head))
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.6:
        words = re.sub(r"[_-]", " ", name)
        function["description"] = rng.choice((f"{words}.", words.capitalize(), "", "A tool."))
    properties: dict[str, Any] = {k: {"type": _TYPES[type(v)]} for k, v in arguments.items()}
    for each in properties.values():
        if rng.random() < 0.2:
            each["description"] = rng.choice(("the value", "see the picture", "text"))
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.7:
        parameters["required"] = list(arguments)
    if rng.random() < 0.3:
        parameters["additionalProperties"] = False
    function["parameters"] = parameters
    return {"type": "function", "function": function}


def _beside(rng: random.Random, tool: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tool among none to two others, with other names."""
    tools = {tool["function"]["name"]: tool}
    for _ in range(rng.choices((0, 1, 2), (60, 25, 15))[0]):
        name = rng.choice((*_EYES, "get_weather", "search", "add", f"get_{_odd_key(rng)}"))
        arguments = rng.choice(({}, {"city": ""}, {"query": ""}, {"a": 1, "b": 2}))
        tools.setdefault(name, _tool(rng, name, arguments, renames=False))
    return rng.sample(list(tools.values()), len(tools))


def _call(name: str, arguments: dict[str, Value]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def num(rng: random.Random) -> int:
    return rng.randrange(10 ** rng.randrange(1, 4))
