"""Find the tokens of a model whose family is not known, by running its processor.

    python -m afferent.preprocess.measure FOLDER      prints an `AdapterFamily` as JSON

A short-lived process, which `afferent.preprocess.discover` starts: it imports torch and
transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from transformers import AutoConfig

from afferent.errors import UnsupportedModel
from afferent.ingest.probe import ImageHeader
from afferent.preprocess.families.adapter import AdapterFamily
from afferent.preprocess.family import MediaTokens
from afferent.preprocess.reference import load_processor


def measure(folder: Path) -> AdapterFamily:
    """What the model's own processor says.

    Raises:
        UnsupportedModel: It can't be loaded or used here.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    embed = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    if embed is None:
        raise UnsupportedModel(f"the configuration ({config.model_type}) names no image token")
    processor = load_processor(str(folder))
    written = getattr(processor, "image_token", None)
    marker = processor.tokenizer.convert_tokens_to_ids(written) if written else embed
    family = AdapterFamily(folder=str(folder), image=MediaTokens(marker, embed))
    family.plan_exactly(ImageHeader(64, 48))
    return family


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(measure(Path(sys.argv[1]))))
