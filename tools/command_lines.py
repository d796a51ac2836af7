"""All command lines, from their parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from afferent import cli

Words = tuple[str, ...]
_RENDER = ("afferent", "render")


def parsers(
    root: argparse.ArgumentParser, words: Words
) -> Iterator[tuple[Words, argparse.ArgumentParser]]:
    """Yield a parser and all parsers below it, each with the words of its command."""
    yield words, root
    for action in root._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, parser in action.choices.items():
                yield from parsers(parser, (*words, name))


def commands(upstream: str = "vllm") -> dict[Words, argparse.ArgumentParser]:
    """Return all commands of ``afferent``, with the settings of the built-in engine and of an
    included upstream: two upstreams have settings of one name.
    """
    engines = (*cli.engine_settings("reference"), *cli.engine_settings(upstream))
    found = dict(parsers(cli._parser(engines), ("afferent",)))
    renderer = dict(parsers(cli._parser(cli.engine_settings("render")), ("afferent",)))
    return {**found, _RENDER: renderer[_RENDER]}


def flags(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for flag in parser._option_string_actions if flag.startswith("--")}
