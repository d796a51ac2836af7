"""Run a client's program section by section: ``python -m tests.clients.sections PROGRAM URL``.

The results are printed as JSON. This runs in the client's environment, and imports nothing else.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import sys
import traceback
from typing import Any

from tests.clients.table import CLIENTS, URL


def main(program: str, url: str) -> None:
    (client,) = (each for each in CLIENTS if each.program == program)
    beginning, sections = client.parts()
    names: dict[str, Any] = {"__name__": "__main__"}
    _run("beginning", beginning.replace(URL, url), names)
    ran = {}
    for feature, text in sections.items():
        printed, failure = io.StringIO(), ""
        try:
            with contextlib.redirect_stdout(printed):
                _run(feature, text.replace(URL, url), names)
        except Exception:
            failure = traceback.format_exc()
        ran[feature] = {"printed": printed.getvalue(), "failure": failure}
    print("\n" + json.dumps(ran))


def _run(name: str, text: str, names: dict[str, Any]) -> None:
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # for inspect
    exec(compile(text, name, "exec", dont_inherit=True), names)  # noqa: S102


main(*sys.argv[1:])
