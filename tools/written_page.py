"""A page of the documentation that is generated from the code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def main(page: Path, write: Callable[[], str]) -> int:
    """Compare the page with the generated text, or replace it with ``--write``; return the exit
    status.

    Args:
        write: The whole page.
    """
    parser = argparse.ArgumentParser(description="Compare the page with what it is written from.")
    parser.add_argument("--write", action="store_true", help="bring it up to date")
    if parser.parse_args().write:
        page.write_text(write())
    elif page.read_text() != write():
        print(f"{page} is not up to date: run this with --write", file=sys.stderr)
        return 1
    return 0
