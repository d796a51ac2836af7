"""The command line: ``afferent serve``, ``store``, ``bench`` and ``config``."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from afferent import __version__, budget, config
from afferent.errors import AfferentError, ConfigError
from afferent.operate.arguments import add_store
from afferent.types import MiB


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    if rest and args.command != "bench":  # which has a parser of its own
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if args.command == "serve":
            return _serve(args)
        if args.command == "config":
            return _show_config(args) if args.action == "show" else _check_config(args)
        if args.command == "store":
            return _store(args)
        return _bench(rest)
    except AfferentError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="afferent", description="The multimodal data plane for LLM serving."
    )
    parser.add_argument("--version", action="version", version=f"afferent {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP. Without MODEL: the built-in one, which names the "
        "colour and shape in pictures.",
    )
    serve.add_argument("model", nargs="?", metavar="MODEL", help=config.describe("model")[0])
    _add_settings(serve)
    add_store(commands)
    settings = commands.add_parser(
        "config",
        help="show the settings and where each came from, or check them",
        description="show: every setting, and which of flag, environment, file and default set "
        "it. check: whether a server would start with them; the exit status is 2 if not.",
    )
    settings.add_argument("action", choices=["show", "check"])
    settings.add_argument("model", nargs="?", metavar="MODEL", help=config.describe("model")[0])
    _add_settings(settings)
    commands.add_parser(
        "bench", help="measure a part, with a control in the same run", add_help=False
    )
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """A flag for each setting; values stay text until `config.load` has all layers."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with settings and tenants"
    )
    for key in config.field_names():
        if key == "model" or config.is_table(key):
            continue
        text, default = config.describe(key)
        shown = (
            f" (default: {_show(key, default)})"
            if default is not False and default not in ("", ())
            else ""
        )
        flag = "--" + key.replace("_", "-")
        if config.is_switch(key):
            parser.add_argument(
                flag, action="store_const", const="true", dest=key, help=text + shown
            )
        else:
            unit = "BYTES" if key.endswith("_nbytes") else key.rsplit("_", 1)[-1].upper()
            parser.add_argument(flag, metavar=unit, dest=key, help=text + shown)


def _show(key: str, value: object) -> str:
    if key.endswith("_nbytes") and isinstance(value, int):
        for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if value % unit == 0:
                return f"{value // unit}{name}"
    return str(value)


def _load(args: argparse.Namespace) -> config.Loaded:
    given = vars(args)
    flags = {key: given[key] for key in config.field_names() if given.get(key) is not None}
    return config.load(flags, file=args.config)


def _serve(args: argparse.Namespace) -> int:
    status: int = asyncio.run(_supervise().Supervisor(_load(args).config).run())
    return status


def _show_config(args: argparse.Namespace) -> int:
    loaded = _load(args)
    for key, source in loaded.sources.items():
        value = getattr(loaded.config, key)
        shown = "(hidden)" if config.is_secret(key) and value else _show(key, value)
        print(f"{key:<26} {shown:<16} {source}")
    return 0


def _check_config(args: argparse.Namespace) -> int:
    """All that can be refused before a process is started, but for the port."""
    settings, supervise = _load(args).config, _supervise()
    folder = supervise.model_folder(settings.model)
    arena_nbytes = budget.arena_nbytes(settings)
    where = f"{settings.host}:{settings.port}, with an arena of {arena_nbytes // MiB:,} MiB"
    print(f"these settings can be served: {folder.name} on {where}")
    if warning := supervise.exposure(settings):
        print(f"warning: {warning}")
    return 0


def _supervise() -> ModuleType:
    """What needs the extra that serves."""
    try:
        return importlib.import_module("afferent.supervise")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the server needs {error.name}: install the extra with pip install 'afferent[engine]'"
        ) from error


def _store(args: argparse.Namespace) -> int:
    from afferent.operate import commands

    return commands.run(args)


def _bench(rest: Sequence[str]) -> int:
    from afferent.bench import run

    return run.main(rest)


if __name__ == "__main__":
    sys.exit(main())
