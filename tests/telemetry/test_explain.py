"""Traces as tables, limited to a number that a person can read."""

from __future__ import annotations

import io

from rich.console import Console

from afferent.telemetry.explain import Explainer
from afferent.telemetry.trace import Trace


def test_a_flood_is_left_out_and_counted() -> None:
    printed, now_s = io.StringIO(), 0.0
    explainer = Explainer(Console(file=printed, width=110), clock=lambda: now_s)
    for number in range(100):
        explainer.show(Trace(f"request-{number}", "POST /v1/chat/completions"), "ok")
    assert printed.getvalue().count("POST") == 20
    assert "request-19 " in printed.getvalue()
    now_s = 0.25
    explainer.show(Trace("next", "POST /v1/chat/completions"), "ok")
    explainer.show(Trace("last", "POST /v1/chat/completions"), "ok")
    assert "(80 requests are not shown)" in printed.getvalue()
    assert printed.getvalue().count("POST") == 21
    now_s = 1000.0
    for _ in range(100):
        explainer.show(Trace("again", "POST /v1/chat/completions"), "ok")
    assert printed.getvalue().count("again") == 20
    assert "(1 requests" in printed.getvalue()


def test_texts_of_a_client_are_neither_markup_nor_control_characters() -> None:
    printed = io.StringIO()
    explainer = Explainer(Console(file=printed, width=110))
    explainer.show(Trace("[bold]a", "POST /v1/chat/[/x]\x1b[2J\n\u202e"), "ok [/]")
    assert "[bold]a  POST /v1/chat/[/x]\ufffd[2J\ufffd\ufffd  ok [/]" in printed.getvalue()
    assert "\x1b" not in printed.getvalue()
