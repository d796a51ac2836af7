"""The suite for upstreams passes the example, from a folder of its own, and catches broken ones."""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from afferent.conformance import (
    CHECKS_OF_UPSTREAMS,
    NotConforming,
    UpstreamItem,
    UpstreamSubject,
    check_upstream,
)
from afferent.engines import HttpSettings, UpstreamRequest
from afferent.engines.http_upstream.client import HttpClient

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_upstream.py"


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Copy the example to a folder outside of the repository, from which it is imported."""
    copy = Path(shutil.copy(EXAMPLE, tmp_path / "outside_upstream.py"))
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield copy
    sys.modules.pop("outside_upstream", None)


def item(number: int) -> UpstreamItem:
    value = 40 + 11 * number
    return UpstreamItem(
        features={"pixel_values": np.full((4, 8), value, np.uint8), "prompt": [4]},
        marker=1,
        embed=2,
        num_rows=4,
        answer=str(value).encode(),
        small={},
    )


def request(urls: Sequence[str]) -> UpstreamRequest:
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {"model": "model", "messages": [{"role": "user", "content": content}]}
    return UpstreamRequest(
        method="POST",
        target="/v1/chat/completions",
        headers=[(b"content-type", b"application/json")],
        body=json.dumps(body).encode(),
    )


def check(name: str, module: ModuleType, folder: Path) -> None:
    kind: Any = module.TinyUpstream()
    subject = UpstreamSubject(
        kind=kind,
        settings=HttpSettings(),
        model_folder=folder,
        item=item,
        request=request,
        start_timeout_s=60.0,
        settle_s=10.0,
    )
    asyncio.run(check_upstream(name, subject))


def test_the_example_has_at_most_60_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", CHECKS_OF_UPSTREAMS)
def test_the_example_passes(name: str, outside: Path) -> None:
    check(name, importlib.import_module("outside_upstream"), outside.parent)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("answers_right", ".mean():.0f}", ".mean() + 1:.0f}"),
        ("releases_its_pins", "store.forget(request_id)", "pass"),
        ("refuses_forged_references", "engines.verify(url, place.secret())", "read(url)"),
        ("refuses_expired_references", "place.secret())", "place.secret(), now_s=0.0)"),
        ("does_not_answer_from_lost_features", "store.get(request, [reference.handle])", "request"),
    ],
)
def test_a_broken_upstream_does_not(name: str, old: str, new: str, outside: Path) -> None:
    program = outside.read_text()
    assert old in program
    outside.write_text(program.replace(old, new).replace("def serve(", READ + "def serve("))
    with pytest.raises(NotConforming):
        check(name, importlib.import_module("outside_upstream"), outside.parent)


def test_a_salt_key_that_signs_references_does_not_pass(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HttpClient, "salt_key", property(lambda client: client._secret))
    module = importlib.import_module("outside_upstream")
    with pytest.raises(NotConforming, match="salt key"):
        check("signs_alike_in_all_frontends", module, outside.parent)


READ = '''
def read(url: str):
    """Read a reference without a look at its signature."""
    import base64

    import msgspec

    from afferent.engines import Reference

    data = base64.urlsafe_b64decode(url.partition(":")[2] + "==")
    return msgspec.msgpack.decode(data[16:], type=Reference)


'''
