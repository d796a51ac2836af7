"""Find the tokens of a model of an unknown family by running its processor.

    python -m afferent.media.families.measure FOLDER      prints an `AdapterFamily` as JSON

A short-lived process, started by `afferent.media.workers.discover`: it imports torch and
transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from afferent.errors import AfferentError, UnsupportedModel, in_a_line
from afferent.media.families.adapter import AdapterFamily
from afferent.media.families.family import MediaTokens, read_json
from afferent.media.families.reference import load_processor
from afferent.media.families.tokens import image_token_id
from afferent.media.headers.probe import ImageHeader

_NONE: Final = -1


def measure(folder: Path) -> AdapterFamily:
    """Return the family of a model by its own processor.

    Raises:
        UnsupportedModel: It can't be loaded or used here.
    """
    model_type = read_json(folder / "config.json").get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"transformers {transformers.__version__} knows no models of type {model_type!r}; "
            "a newer one may"
        )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    try:
        return _measured(folder, config.to_dict())
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{model_type}: {error.message}") from error
    except Exception as error:  # processors may raise anything
        raise UnsupportedModel(
            f"{model_type}: its own processor can't be used: {in_a_line(error)}"
        ) from error


def _measured(folder: Path, config: Mapping[str, Any]) -> AdapterFamily:
    processor = load_processor(str(folder))
    embed = image_token_id(config, getattr(processor, "image_token_id", None) or _NONE)
    if embed == _NONE:
        raise UnsupportedModel(
            "neither its configuration nor its processor names a token for images, so that nobody "
            "knows where in a prompt they stand"
        )
    written = getattr(processor, "image_token", None)
    marker = processor.tokenizer.convert_tokens_to_ids(written) if written else embed
    if marker is None:
        raise UnsupportedModel(f"its tokenizer has no token {written!r}")
    family = AdapterFamily(folder=str(folder), image=MediaTokens(marker, embed))
    family.plan_exactly(ImageHeader(64, 48))
    return family


def main() -> None:
    try:
        family = measure(Path(sys.argv[1]))
    except AfferentError as error:
        sys.exit(error.message)
    except Exception as error:  # processors may raise anything
        sys.exit(in_a_line(error))
    sys.stdout.buffer.write(msgspec.json.encode(family))


if __name__ == "__main__":
    main()
