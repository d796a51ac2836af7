"""What Schemathesis is to check beside its own: it runs in an environment of its own."""

from __future__ import annotations

from typing import Any

import schemathesis  # type: ignore[import-not-found]


@schemathesis.hook  # type: ignore[untyped-decorator]
def map_body(ctx: Any, body: Any) -> Any:
    """Any text may be a model's name, and only that of the one that is served leads any further."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        return {**body, "model": "shapes"}
    return body


@schemathesis.check  # type: ignore[untyped-decorator]
def only_unavailable(ctx: Any, response: Any, case: Any) -> None:
    """Of its own faults a server has one: it can't just now, and says when to come again."""
    if response.status_code >= 500:
        assert response.status_code == 503, f"status {response.status_code}"
        assert "retry-after" in response.headers, "a 503 that does not say when to come again"
