from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from afferent import errors
from afferent.builtin.apis.api import Api
from afferent.builtin.apis.registry import APIS
from afferent.proxy.statuses import headers_of, status_of


def test_codes_are_unique_and_lead_back() -> None:
    classes = list(errors.walk())
    assert {cls.__module__ for cls in classes} == {errors.__name__}, "the tree is in one file"
    assert len({cls.code for cls in classes}) == len(classes)
    for cls in classes:
        found = errors.error_from(cls.code, "what happened")
        assert type(found) is cls
        assert found.message == "what happened"
    assert isinstance(errors.error_from("nonsense", "x"), errors.InternalError)


def test_the_tree_at_the_top_of_the_module_is_the_tree() -> None:
    drawn = re.findall(r"^ *[│├└─ ]*?([A-Z]\w+)", errors.__doc__ or "", re.MULTILINE)
    classes = [cls.__name__ for cls in errors.walk()]
    assert [name for name in drawn if name in classes or "──" in name] == classes


def test_every_error_has_a_status() -> None:
    for cls in errors.walk():
        error = cls("why")
        status = status_of(error)
        assert status in (400, 401, 403, 404, 408, 409, 413, 422, 429, 500, 501, 503)
        assert (status in (429, 503)) == cls.retryable
        assert (400 <= status < 500) == issubclass(
            cls, errors.InvalidRequest | errors.QuotaExceeded
        )
        assert ("retry-after" in headers_of(error)) == cls.retryable


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_every_error_has_the_form_of_each_api(api: Api) -> None:
    for cls in errors.walk():
        error = cls("why")
        body = msgspec.json.encode(api.error_body(error, "request-1"))
        assert "error" in msgspec.json.decode(body)
        shows_detail = status_of(error) != 500
        assert (b"why" in body) == shows_detail, "a defect shows no detail"


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_each_api_has_a_name_for_the_messages(api: Api) -> None:
    others = {"openai_responses": "input", "openai_completions": "prompt"}
    field = others.get(api.name, "messages")
    assert field in api.request_type.__struct_fields__
    body = api.error_body(errors.InvalidRequest("why", param=errors.Param.MESSAGES), "request-1")
    assert field in str(body)


def test_the_table_of_the_api_has_every_code() -> None:
    """The table leaves out internal errors, and errors that are never sent to a client."""
    page = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
    rows = re.findall(r"^\| (\d{3}) \| (.*?) \|", page, re.MULTILINE)
    documented = {
        (int(status), code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)
    }
    unheard = {errors.ClientGone, errors.ConnectionClosed, errors.TierUnavailable}
    classes = set(errors.walk()) - unheard
    ours = {(status_of(cls("why")), cls.code) for cls in classes}
    assert documented <= ours
    assert {(status, code) for status, code in ours - documented if status != 500} == set()
