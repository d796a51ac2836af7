"""Command line: ``afferent serve``, ``render``, ``features``, ``top``, ``doctor`` and more."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from afferent import __version__, config
from afferent.config import Setting, Settings, describe, hints
from afferent.errors import AfferentError, ConfigError
from afferent.operations.commands.arguments import (
    add_features,
    add_restart,
    add_store,
    add_tier,
    add_top,
)
from afferent.runtime import shortage

_MAX_WIDTH = 100
_RENDERER = "render"
"""Engine of ``afferent render``."""
_MODULES = {
    command: f"afferent.operations.commands.{module}"
    for command, module in {
        "features": "features_command",
        "restart": "restart",
        "store": "commands",
        "top": "top",
    }.items()
}
"""Modules of commands without settings."""
_WRONG_CHOICE = re.compile(r"argument \S+: invalid choice: '(.*)' \(choose from (.*)\)")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise the error as one line, like all other errors."""
        if choice := _WRONG_CHOICE.fullmatch(message):
            known = [word.strip(" '") for word in choice[2].split(",")]
            message = f"{self.prog}: there is no {choice[1]!r}; {_nearest(choice[1], known)}"
        raise ConfigError(message)


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _run(given)
        sys.stdout.flush()
    except BrokenPipeError:  # `... | head`: the output is complete for its reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (OSError, MemoryError, RuntimeError) as error:
        why = shortage.explain(error)
        if not why:
            raise
        print(f"error: {why}", file=sys.stderr)
        return 1
    return status


def _run(arguments: Sequence[str]) -> int:
    try:
        args = _parse(arguments)
        if args.command in ("serve", "render"):
            return _serve(args)
        if args.command == "doctor":
            return _doctor(args)
        if args.command == "config":
            return _config(args)
        if args.command == "tier":
            return _tier(args)
        return int(_of_extra(_MODULES[args.command]).run(args))
    except AfferentError as error:
        _report(arguments, error)
        return 2
    except KeyboardInterrupt:
        return 130


def _report(arguments: Sequence[str], error: AfferentError) -> None:
    """Print the error, as JSON if the server's settings are known to request it."""
    if arguments[:1] in (["serve"], ["render"]):
        with contextlib.suppress(ConfigError):
            if _chosen(arguments, "log_format") == "json":
                from afferent.runtime import logs

                line = logs.json_line("supervisor", "error", error.message, code=error.code)
                print(line, file=sys.stderr)
                return
    for line in error.message.splitlines():  # an indented line continues
        print(line if line.startswith(" ") else f"error: {line}", file=sys.stderr)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse in two steps if there are settings: the engine determines which flags exist.

    Raises:
        ConfigError: There is no such flag.
    """
    if arguments[:1] not in (["serve"], ["render"], ["config"], ["doctor"]):
        return _parser(()).parse_args(arguments)
    is_render = arguments[:1] == ["render"]
    extra = engine_settings(_RENDERER if is_render else _chosen(arguments, "engine"))
    args, unknown = _parser(extra).parse_known_args(arguments)
    if wrong := [
        hints.unknown_flag(argument, args.known) for argument in unknown if argument.startswith("-")
    ]:
        raise ConfigError("\n".join(wrong))
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is one argument too many")
    return args


def engine_settings(name: str) -> tuple[type[Settings], ...]:
    """Return the settings of an engine, in addition to the server's own.

    Raises:
        ConfigError: There is no such engine.
    """
    return (_of_extra("afferent.engines.registry").find(name).settings_type,)


def _chosen(arguments: Sequence[str], key: str) -> str:
    """Return one setting by flag, environment or file, and ignore all others."""
    command = arguments[0]
    parser = _Parser(
        prog=f"afferent {command}", usage=_usage(command), add_help=False, allow_abbrev=False
    )
    parser.add_argument("--config", type=Path)
    parser.add_argument(f"--{key.replace('_', '-')}", dest=key)
    args, _ = parser.parse_known_args(arguments[1:])
    given = getattr(args, key)
    value: str = config.peek(key, {key: given} if given is not None else {}, file=args.config)
    return value


def _parser(extra: tuple[type[Settings], ...]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
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
    render = _add_command(
        commands,
        name="render",
        help="render prompts for routers, without a model",
        description="Serve the prompts of a model's requests: tokens, and the hashes and positions "
        "of items (/v1/chat/completions/render). It needs no weights, and runs no model.",
    )
    _add_settings(render, extra)
    add_features(commands)
    add_store(commands)
    add_top(commands)
    add_tier(commands)
    add_restart(commands)
    _add_config(commands, extra)
    doctor = _add_command(
        commands,
        name="doctor",
        help="look for what is wrong here, and say what mends it",
        description="What is wrong here for a server with these settings, from the kernel to the "
        "model, and the command that mends it; then the exit status is 1.",
    )
    _add_settings(doctor, extra)
    _add_json(doctor)
    return parser


def _add_config(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    extra: tuple[type[Settings], ...],
) -> None:
    parser = _add_command(
        commands,
        name="config",
        help="show the settings and where each came from, or check them",
        description="show: every setting, and which of flag, environment, file and default set "
        "it. check: whether a server would start with them; the exit status is 2 if not.",
    )
    parser.set_defaults(known=config.declared(config.ServeConfig, *extra))
    actions = parser.add_subparsers(dest="action", required=True, metavar="{show,check}")
    for name in ("show", "check"):
        action = _add_command(
            actions, name=name, help="", description=parser.description or "", prefix="config "
        )
        _add_settings(action, extra)
        _add_json(action)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", dest="as_json")


def _usage(command: str) -> str:
    action = " {show,check}" if command == "config" else ""
    return f"afferent {command}{action} [MODEL] [--FLAG VALUE ...]"


class _Help(argparse.Action):
    """``--help``: the help that fits on a screen; ``--help GROUP``: the settings of a group."""

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
    prefix: str = "",
) -> argparse.ArgumentParser:
    """Add a command with settings, without abbreviations: each new setting would change these."""
    parser = commands.add_parser(
        name,
        prog=f"afferent {prefix}{name}",
        help=help,
        description=description,
        usage=_usage(prefix + name),
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action=_Help, nargs="?", metavar="GROUP")
    return parser


def _add_settings(parser: argparse.ArgumentParser, extra: tuple[type[Settings], ...]) -> None:
    """Add a flag for each setting; values stay text until `config.load` has all layers."""
    known = config.declared(config.ServeConfig, *extra)
    parser.set_defaults(known=known, extra=extra)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--model", dest="named_model")  # the spelling of other servers
    parser.add_argument("--config", type=Path, metavar="FILE")
    for one in known.values():
        if one.is_switch:
            parser.add_argument(one.flag, action="store_const", const="true", dest=one.key)
        elif one.flag.startswith("--") and not one.is_table:
            parser.add_argument(one.flag, metavar=one.unit, dest=one.key)


def _load(args: argparse.Namespace) -> config.Loaded:
    given = vars(args)
    if args.model is None:
        given["model"] = args.named_model
    elif args.named_model is not None:
        raise ConfigError(f"MODEL {args.model}: --model {args.named_model} names another one")
    flags = {key: given[key] for key in args.known if given.get(key) is not None}
    if args.command == "render":
        if "engine" in flags:
            raise ConfigError(f"afferent render: --engine {flags['engine']} is for afferent serve")
        flags["engine"] = _RENDERER
    return config.load(flags, file=args.config, extra=args.extra)


def _serve(args: argparse.Namespace) -> int:
    status: int = (
        _of_extra("afferent.operations.supervisor.supervisor").Supervisor(_load(args)).run()
    )
    return status


def _config(args: argparse.Namespace) -> int:
    loaded, commands = _load(args), _of_extra("afferent.operations.commands.settings")
    action = commands.show if args.action == "show" else commands.check
    action(loaded, args.known, as_json=args.as_json)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    status: int = _of_extra("afferent.operations.commands.doctor").run(args, partial(_load, args))
    return status


def _of_extra(name: str) -> ModuleType:
    """Import a module that needs the extra ``engine``."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("afferent"):
            raise
        raise ConfigError(
            f"the server needs {error.name}: install the extra with pip install '.[engine]' in the "
            "clone of Afferent"
        ) from error


def _tier(args: argparse.Namespace) -> int:
    flags = {"tier": args.tier} if args.tier is not None else {}
    loaded = config.load(flags, file=args.config)
    status: int = _of_extra("afferent.operations.commands.tier").run(args, loaded.config)
    return status


if __name__ == "__main__":
    sys.exit(main())
