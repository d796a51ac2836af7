"""Write the page of all settings, ``docs/settings.md``, from their declarations.

python -m tools.settings_page --write
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from afferent import cli, config
from afferent.config import Group, Setting, describe
from tools.written_page import DOCS, main

PAGE = DOCS / "settings.md"

_ENGINES = {
    "reference": "`--engine reference`",
    "vllm": "`--engine vllm`",
    "openai": "`--engine openai`",
    "render": "`afferent render`",
}
"""Kinds of engines, and what chooses them."""

_ABOUT = """\
# Settings

Written by `python -m tools.settings_page --write` from the declarations in
[`config/settings.py`](../src/afferent/config/settings.py), and from those of each engine.

Each setting has one name in three spellings: a flag, a variable of the environment, and a key of a
TOML file that `--config` names. A flag overrides the environment, the environment overrides the
file, and the file overrides the default.

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
- **An unknown name is an error**, and so is a value out of bounds. The message names it.

`afferent serve --help` lists the common settings, `afferent serve --help all` the others too.
`afferent config show` prints the value of each setting, and its source: flag, environment, file or
default (`--json`: for programs, with the values that a server derives). `afferent config check`
makes all checks that precede the start of a process, with the same messages, and leaves nothing
behind. `--model` also names the model. For flags of vLLM and SGLang, the error names Afferent's
flag. Tenants have [a page of their own](tenants.md).
"""

_HEAD = (
    "| flag | variable | key | default | meaning |",
    "|---|---|---|---|---|",
)


def page() -> str:
    """Return the whole page."""
    known = config.declared(config.ServeConfig)
    parts = [_ABOUT, *_tables(known, "##")]
    for name, choice in _ENGINES.items():
        if own := config.declared(*cli.engine_settings(name)):
            parts.append(f"## With {choice}\n")
            parts += _tables(own, "###")
    return "\n".join(parts)


def _tables(known: Mapping[str, Setting], heading: str) -> Iterable[str]:
    """Yield a table for each group."""
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
