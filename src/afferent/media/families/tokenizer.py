"""Tokenizer in a model's folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from afferent.errors import ConfigError
from afferent.media.families.tokens import has_older_form

_MISSING: Final = "{} has no tokenizer.json; save the model's fast tokenizer"
_TIMEOUT_S: Final = 300
_CONVERT: Final = """
import json, pathlib, sys, transformers
settings = json.loads(pathlib.Path(sys.argv[1], "tokenizer_config.json").read_bytes())
kind = getattr(transformers, settings["tokenizer_class"])
assert issubclass(kind, transformers.PreTrainedTokenizerBase), kind
found = kind.from_pretrained(sys.argv[1], local_files_only=True, trust_remote_code=False)
sys.stdout.write(found.backend_tokenizer.to_str())
"""


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer, or convert an older form of it.

    Raises:
        ConfigError: The folder has no ``tokenizer.json``, or an invalid one, and no form that
            `transformers` converts.
    """
    if has_older_form(folder):
        return _converted(folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ConfigError(_MISSING.format(folder))
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{path} can't be read: {error}".splitlines()[0]) from error


def _converted(folder: Path) -> Tokenizer:
    """Convert files of `transformers` in a process of its own: this one does without its memory."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _CONVERT, folder],
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
        )
        return Tokenizer.from_str(done.stdout.decode())
    except Exception as error:  # files of any content
        raise ConfigError(_MISSING.format(folder)) from error
