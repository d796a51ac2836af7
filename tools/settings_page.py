"""The page of all settings, from their declarations: ``docs/settings.md``.

python -m tools.settings_page --write
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from afferent import cli, config
from afferent.config import Group, Setting, describe
from tools.written_page import DOCS, main

PAGE = DOCS / "settings.md"

_ENGINES = ("reference", "vllm")

_ABOUT = """\
# Settings

Written by `python -m tools.settings_page --write` from the declarations in
[`config/settings.py`](../src/afferent/config/settings.py), and of each engine beside it.

Each setting has one name in three spellings: a flag, a variable of the environment, and a key of a
TOML file that `--config` names. A flag counts more than the environment, the environment more than
the file, the file more than the default.

```toml
# afferent.toml, for afferent serve --config afferent.toml
port = 9000
arena_nbytes = "2GiB"
file_roots = ["/srv/media"]
```

- **Sizes** (`..._nbytes`) are numbers of bytes, or have a unit: `KiB`, `MiB`, `GiB` or `TiB`. Times
  (`..._s`) are seconds.
- **Lists** are separated by commas in a flag or a variable.
- **A switch** such as `--explain` has no value as a flag; elsewhere it is `true` or `false`.
- **An unknown name is an error**, and so is a value out of bounds. The message says which.

`afferent serve --help` has the common ones, `afferent serve --help all` the others too.
`afferent config show` says what each one is, and which of flag, environment, file and default set
it (`--json`: for programs, with what a server makes of it); `afferent config check` does all that a
start does before it starts a process, in the same words, and leaves nothing. `--model` names the
model, too. The flags of vLLM and SGLang are answered with ours. Tenants have
[a page of their own](tenants.md).
"""

_HEAD = (
    "| flag | variable | key | default | what it says |",
    "|---|---|---|---|---|",
)


def page() -> str:
    """The whole page."""
    known = config.declared(config.ServeConfig)
    parts = [_ABOUT, *_tables(known, "##")]
    for name in _ENGINES:
        if own := config.declared(*cli.engine_settings(name)):
            parts.append(f"## With `--engine {name}`\n")
            parts += _tables(own, "###")
    return "\n".join(parts)


def _tables(known: Mapping[str, Setting], heading: str) -> Iterable[str]:
    """One for each group."""
    for group in Group:
        if chosen := describe.in_group(known, group):
            title = f"{heading} {group.capitalize()}: {group.about}"
            yield "\n".join([title, "", *_HEAD, *map(_row, chosen), ""])


def _row(one: Setting) -> str:
    is_elsewhere = not one.is_table
    flag = f"`{one.flag}`" if is_elsewhere else "-"
    if is_elsewhere and not one.is_switch and one.flag.startswith("--"):
        flag = f"`{one.flag} {one.unit}`".replace("|", "\\|")
    variable = f"`{one.variable}`" if is_elsewhere else "-"
    default = f"`{one.show(one.default)}`" if one.default not in ("", ()) else "-"
    text = f"{one.text} ({one.bounds})" if one.bounds else one.text
    return f"| {flag} | {variable} | `{one.key}` | {default} | {text} |"


if __name__ == "__main__":
    sys.exit(main(PAGE, page))
