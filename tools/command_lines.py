"""The command lines that there are, as their parsers know them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from afferent import cli

Words = tuple[str, ...]


def parsers(
    root: argparse.ArgumentParser, words: Words
) -> Iterator[tuple[Words, argparse.ArgumentParser]]:
    """A parser and all below it, each with the words that lead to it."""
    yield words, root
    for action in root._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, parser in action.choices.items():
                yield from parsers(parser, (*words, name))


def commands() -> dict[Words, argparse.ArgumentParser]:
    """Of ``afferent``, with the settings of the engines that come with it."""
    extra = (*cli.engine_settings("reference"), *cli.engine_settings("vllm"))
    return dict(parsers(cli._parser(extra), ("afferent",)))


def flags(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for flag in parser._option_string_actions if flag.startswith("--")}
