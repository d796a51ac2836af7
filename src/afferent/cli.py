"""The command line: ``afferent serve``, ``store`` and ``config``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from afferent import __version__, config
from afferent.config import Setting, Settings, describe, hints
from afferent.errors import AfferentError, ConfigError
from afferent.operate.arguments import add_store
from afferent.types import MiB

_MAX_WIDTH = 100


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        args = _parse(given)
        if args.command == "serve":
            return _serve(args)
        if args.command == "config":
            return _show_config(args) if args.action == "show" else _check_config(args)
        return _store(args)
    except AfferentError as error:
        for line in error.message.splitlines():  # one that is indented goes on
            print(line if line.startswith(" ") else f"error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """In two steps, where there are settings: which flags there are, depends on the engine.

    Raises:
        ConfigError: There is no such flag.
    """
    if arguments[:1] not in (["serve"], ["config"]):
        return _parser(()).parse_args(arguments)
    extra = engine_settings(_chosen_engine(arguments))
    args, unknown = _parser(extra).parse_known_args(arguments)
    if wrong := [
        hints.unknown_flag(argument, args.known) for argument in unknown if argument.startswith("-")
    ]:
        raise ConfigError("\n".join(wrong))
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is one argument too many")
    return args


def engine_settings(name: str) -> tuple[type[Settings], ...]:
    """What can be set besides the server's own settings where this engine runs the model.

    Raises:
        ConfigError: There is no such engine.
    """
    return (_of_extra("afferent.engine.registry").find(name).settings_type,)


def _chosen_engine(arguments: Sequence[str]) -> str:
    """The first step: by flag, environment or file, whatever else is said."""
    command = arguments[0]
    parser = argparse.ArgumentParser(
        prog=f"afferent {command}", usage=_usage(command), add_help=False, allow_abbrev=False
    )
    parser.add_argument("--config", type=Path)
    parser.add_argument("--engine")
    args, _ = parser.parse_known_args(arguments[1:])
    flags = {"engine": args.engine} if args.engine is not None else {}
    name: str = config.peek("engine", flags, file=args.config)
    return name


def _parser(extra: tuple[type[Settings], ...]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="afferent", description="The multimodal data plane for LLM serving."
    )
    parser.add_argument("--version", action="version", version=f"afferent {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = _add_command(
        commands,
        name="serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP. Without MODEL: the built-in one, which names the "
        "colour and shape in images.",
    )
    _add_settings(serve, extra)
    add_store(commands)
    settings = _add_command(
        commands,
        name="config",
        help="show the settings and where each came from, or check them",
        description="show: every setting, and which of flag, environment, file and default set "
        "it. check: whether a server would start with them; the exit status is 2 if not.",
    )
    settings.add_argument("action", choices=["show", "check"])
    _add_settings(settings, extra)
    return parser


def _usage(command: str) -> str:
    action = " {show,check}" if command == "config" else ""
    return f"afferent {command}{action} [MODEL] [--FLAG VALUE ...]"


class _Help(argparse.Action):
    """``--help``: what fits on a screen; ``--help GROUP``: the settings of a group."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> None:
        known: Mapping[str, Setting] = namespace.known
        width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
        if values is None:
            about = textwrap.fill(parser.description or "", width)
            common = describe.common(known, command=parser.prog, width=width)
            page = f"usage: {parser.usage}\n\n{about}\n\n{common}"
        else:
            page = describe.group_page(known, values, width=width)
        with contextlib.suppress(BrokenPipeError):  # `... --help all | head`
            print(page, flush=True)
        parser.exit()


def _add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    *,
    name: str,
    help: str,
    description: str,
) -> argparse.ArgumentParser:
    """A command that takes settings. Abbreviations would change with each setting that is new."""
    parser = commands.add_parser(
        name,
        help=help,
        description=description,
        usage=_usage(name),
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action=_Help, nargs="?", metavar="GROUP")
    return parser


def _add_settings(parser: argparse.ArgumentParser, extra: tuple[type[Settings], ...]) -> None:
    """A flag for each setting; values stay text until `config.load` has all layers."""
    known = config.declared(config.ServeConfig, *extra)
    parser.set_defaults(known=known, extra=extra)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--config", type=Path, metavar="FILE")
    for one in known.values():
        if one.is_switch:
            parser.add_argument(one.flag, action="store_const", const="true", dest=one.key)
        elif one.flag.startswith("--") and not one.is_table:
            parser.add_argument(one.flag, metavar=one.unit, dest=one.key)


def _load(args: argparse.Namespace) -> config.Loaded:
    given = vars(args)
    flags = {key: given[key] for key in args.known if given.get(key) is not None}
    return config.load(flags, file=args.config, extra=args.extra)


def _serve(args: argparse.Namespace) -> int:
    status: int = asyncio.run(_of_extra("afferent.server.supervisor").Supervisor(_load(args)).run())
    return status


def _show_config(args: argparse.Namespace) -> int:
    loaded = _load(args)
    values = dict(loaded.values())
    width = max(map(len, args.known))
    for one in describe.by_group(args.known):
        print(f"{one.key:<{width}} {one.show(values[one.key]):<16} {loaded.sources[one.key]}")
    return 0


def _check_config(args: argparse.Namespace) -> int:
    """All that can be refused before a process is started."""
    loaded, checks = _load(args), _of_extra("afferent.server.checks")
    settings, checked = loaded.config, checks.rehearse(loaded)
    where = f"{settings.host}:{settings.port}, with an arena of {checked.arena_nbytes // MiB:,} MiB"
    print(f"these settings can be served: {checked.folder.name} on {where}")
    if warning := checks.exposure(settings):
        print(f"warning: {warning}")
    return 0


def _of_extra(name: str) -> ModuleType:
    """What needs the extra that serves."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the server needs {error.name}: install the extra with pip install '.[engine]' in the "
            "clone of Afferent"
        ) from error


def _store(args: argparse.Namespace) -> int:
    from afferent.operate import commands

    return commands.run(args)


if __name__ == "__main__":
    sys.exit(main())
