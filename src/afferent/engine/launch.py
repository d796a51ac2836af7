"""What can be said of an engine before any of its processes is started; no torch is needed."""

from __future__ import annotations

from pathlib import Path

from afferent.errors import ConfigError
from afferent.preprocess.family import read_json

_SHARED = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key-value heads",
    "intermediate_size": "inner columns",
}
"""What each worker gets an equal part of."""


def check_workers(folder: Path, num_workers: int) -> None:
    """Refuse more workers than a model can be divided among, as far as its config says.

    Raises:
        ConfigError: Some would get more of it than others.
    """
    config = read_json(folder / "config.json")
    text = config.get("text_config", config)
    for name, words in _SHARED.items():
        number = text.get(name)
        if isinstance(number, int) and number % num_workers:
            raise ConfigError(
                f"the model's {number} {words} can't be divided among {num_workers} engine "
                "workers; choose another number of --engine-workers"
            )
