"""The table of media locations has every field of vLLM's request models that takes media."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from afferent.proxy.media_locations import TABLE, paths_at
from afferent.proxy.tenancy import SALTED
from tests.vllm.servers import ENV, python

pytestmark = pytest.mark.vllm

# Walks the routes of vLLM's API server, and the types of their bodies where these are declared.
_WALK = """
import importlib, json, pkgutil, typing
from collections import abc
import typing_extensions
import vllm.entrypoints
from fastapi import APIRouter
from pydantic import BaseModel

KEYS = {"image_url", "video_url", "audio_url", "input_audio"}
KEYS |= {"images", "videos", "audio", "source", "cache_salt"}
LISTS = (list, tuple, set, abc.Sequence, abc.Iterable)


def members(kind):
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    if typing_extensions.is_typeddict(kind):
        return typing_extensions.get_type_hints(kind)
    return {}


def walk(kind, path, seen, found):
    if typing.get_origin(kind) is typing.Annotated or hasattr(kind, "__value__"):
        return walk(getattr(kind, "__value__", None) or typing.get_args(kind)[0], path, seen, found)
    if kind in seen:
        return
    inner = members(kind)
    if inner:
        for name, each in inner.items():
            if name in KEYS:
                found.add((*path, name))
            elif len(path) < 12:
                walk(each, (*path, name), seen | {kind}, found)
        return
    inside = ("*",) if typing.get_origin(kind) in LISTS else ()
    for each in typing.get_args(kind):
        walk(each, (*path, *inside), seen, found)


found = {}
for module in pkgutil.walk_packages(vllm.entrypoints.__path__, "vllm.entrypoints."):
    if not module.name.endswith("api_router"):
        continue
    try:
        loaded = importlib.import_module(module.name)
    except ImportError:
        continue
    for router in vars(loaded).values():
        if not isinstance(router, APIRouter):
            continue
        for route in router.routes:
            body = getattr(route, "body_field", None)
            if body is None:
                continue
            fields = set()
            kind = getattr(body, "type_", None) or body.field_info.annotation
            try:
                walk(kind, (), frozenset(), fields)
            except TypeError:
                pass
            found.setdefault(route.path, set()).update(fields)
print("FOUND" + json.dumps({path: sorted(map(list, each)) for path, each in found.items()}))
"""

DATA = {
    # Fields with these names that are no media of a request.
    ("audio",),  # parameters of an audio answer
    ("messages", "*", "audio"),  # the id of an earlier audio answer
    ("messages", "*", "*", "audio"),
    ("input", "*", "audio"),
    ("input", "*", "*", "audio"),
    ("system", "*", "source"),  # only the text of a system prompt is read
    ("prompt", "variables", "image_url"),  # stored prompts are not supported
}
TOOLS = {("tools",), ("input", "*", "tools")}
"""The paths of tools, whose fields can have such names."""
WITHOUT_LINE = {
    "/inference/v1/generate",  # takes features, not media
    "/v1/chat/completions/derender",  # parses an answer; its copy of the request is not rendered
}


@pytest.fixture(scope="module")
def fields() -> dict[str, list[list[str]]]:
    done = subprocess.run(
        [python(), "-c", _WALK],
        env={**os.environ, **ENV},
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(each for each in done.stdout.splitlines() if each.startswith("FOUND"))
    found: dict[str, list[list[str]]] = json.loads(line.removeprefix("FOUND"))
    return found


def media_fields(found: Iterable[Sequence[str]]) -> set[tuple[str, ...]]:
    """Return paths of fields that take media."""
    paths = {tuple(field) for field in found if field[-1] != "cache_salt"} - DATA
    return {path for path in paths if not any(path[: len(tools)] == tools for tools in TOOLS)}


def in_table(path: str) -> set[tuple[str, ...]]:
    """Return the fields that the table has at an endpoint, as far as models have types."""
    strings = paths_at(path)
    return strings | {found[:-1] for found in strings if found[-1] in ("url", "data", "*")}


def test_every_endpoint_with_a_media_field_has_a_line(fields: dict[str, Any]) -> None:
    with_media = {path for path, found in fields.items() if media_fields(found)}
    assert {"/v1/chat/completions", "/tokenize", "/v2/embed"} <= with_media  # a check of this test
    assert with_media - set(TABLE) - WITHOUT_LINE == set()


def test_every_media_field_is_in_the_line_of_its_endpoint(fields: dict[str, Any]) -> None:
    """The table has all paths of keys and lists."""
    missing = {
        path: sorted(lacks)
        for path, found in fields.items()
        if path not in WITHOUT_LINE and (lacks := media_fields(found) - in_table(path))
    }
    assert missing == {}
    assert ("messages", "*", "content", "*", "source") in media_fields(fields["/v1/messages"])
    assert ("input", "*", "*", "content", "*", "image_url") in media_fields(
        fields["/v1/embeddings"]
    )


def test_a_media_field_that_the_table_lacks_is_found() -> None:
    new = ["messages", "*", "content", "*", "picture", "image_url"]
    known = ["messages", "*", "content", "*", "image_url"]
    assert media_fields([new, known]) - in_table("/v1/chat/completions") == {tuple(new)}


def test_every_path_of_the_table_is_one_of_vllm(fields: dict[str, Any]) -> None:
    untyped = {"/invocations", "/cohere/v2/chat", "/cohere/v2/chat/render"}
    assert set(TABLE) - set(fields) - untyped == set()


def test_every_endpoint_with_a_salt_is_known(fields: dict[str, Any]) -> None:
    salted = {path for path, found in fields.items() if ["cache_salt"] in found}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"} <= salted
    assert salted - SALTED == set()
    untyped = {"/invocations", "/generative_scoring"}
    assert SALTED - salted - untyped == set()
