"""The page of all settings, from their declarations: ``docs/settings.md``.

python tools/settings_page.py --write
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from afferent import cli, config
from afferent.config import Group, Setting, describe

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"

_ENGINES = ("reference", "vllm")

_ABOUT = """\
# Settings

Written by `python tools/settings_page.py --write` from the declarations in
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

- **Sizes** (`..._nbytes`) are numbers of bytes, or have a unit: `KiB`, `MiB` or `GiB`. Times
  (`..._s`) are seconds.
- **Lists** are separated by commas in a flag or a variable.
- **A switch** such as `--explain` has no value as a flag; elsewhere it is `true` or `false`.
- **An unknown name is an error**, and so is a value out of bounds. The message says which.

`afferent serve --help` has the common ones, `afferent serve --help all` the others too.
`afferent config show` says what each one is, and which of flag, environment, file and default set
it; `afferent config check` whether a server would start with them. Tenants have
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


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the page with the declarations.")
    parser.add_argument("--write", action="store_true", help="bring it up to date")
    if parser.parse_args().write:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        print(f"{PAGE} is not up to date: run this with --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
