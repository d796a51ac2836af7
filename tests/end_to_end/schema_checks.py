"""Additional checks for Schemathesis, which imports them in an environment of its own."""

from __future__ import annotations

from typing import Any

import schemathesis  # type: ignore[import-not-found]


@schemathesis.hook  # type: ignore[untyped-decorator]
def map_body(ctx: Any, body: Any) -> Any:
    """Name the model that is served: requests with another name would end at once."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        return {**body, "model": "shapes"}
    return body


@schemathesis.check  # type: ignore[untyped-decorator]
def only_unavailable(ctx: Any, response: Any, case: Any) -> None:
    """Check that the only server error is a 503, with the time of the next attempt."""
    if response.status_code >= 500:
        assert response.status_code == 503, f"status {response.status_code}"
        assert "retry-after" in response.headers, "a 503 that does not say when to come again"
