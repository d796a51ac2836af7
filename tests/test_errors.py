from __future__ import annotations

import re

from afferent import errors
from afferent.serve import errors as http


def test_codes_are_unique_and_lead_back() -> None:
    classes = [cls for cls in errors.walk() if cls.__module__ == errors.__name__]
    assert len({cls.code for cls in classes}) == len(classes)
    for cls in classes:
        found = errors.error_from(cls.code, "what happened")
        assert type(found) is cls
        assert found.message == "what happened"
    assert isinstance(errors.error_from("nonsense", "x"), errors.InternalError)


def test_the_tree_at_the_top_of_the_module_is_the_tree() -> None:
    drawn = re.findall(r"^ *[│├└─ ]*?([A-Z]\w+)", errors.__doc__ or "", re.MULTILINE)
    classes = [cls.__name__ for cls in errors.walk() if cls.__module__ == errors.__name__]
    assert [name for name in drawn if name in classes or "──" in name] == classes


def test_every_error_has_a_status_and_openais_form() -> None:
    for cls in errors.walk():
        error = cls("why")
        status = http.status_of(error)
        assert status in (400, 404, 408, 413, 500, 503)
        assert (status == 503) == cls.retryable
        assert (400 <= status < 500) == issubclass(cls, errors.InvalidRequest)
        body = http.openai_body(error)["error"]
        assert set(body) == {"message", "type", "param", "code"}
        assert ("why" in body["message"]) == (status != 500), "a defect shows no detail"
        assert ("retry-after" in http.headers_of(error)) == cls.retryable
