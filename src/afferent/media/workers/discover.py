"""Family of a model: read from its folder, or measured in another process if necessary."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from afferent.errors import ConfigError, UnsupportedModel
from afferent.media.families.adapter import AdapterFamily
from afferent.media.families.family import MAX_SAMPLED_FRAMES, read_json
from afferent.media.families.registry import AnyFamily, describe
from afferent.media.transforms.resize import ResizeRule

_MEASURE: Final = "afferent.media.families.measure"
_TIMEOUT_S = 300.0
_KNOWN_IN: Final = ("auto_mappings.py", "configuration_auto.py")
"""Files in which `transformers` lists its model types."""


def refuse_unknown(folder: Path) -> None:
    """Refuse an unknown model type without the import of `transformers`.

    Raises:
        UnsupportedModel: `transformers` does not know models of this type.
        ConfigError: The folder does not name the type.
    """
    model_type = read_json(folder / "config.json").get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(f"{folder / 'config.json'} names no model_type")
    library = find_spec("transformers")
    if library is None or library.origin is None:
        return
    auto = Path(library.origin).parent / "models" / "auto"
    files = [path for name in _KNOWN_IN if (path := auto / name).is_file()]
    if files and not any(f'("{model_type}", ' in path.read_text() for path in files):
        version = metadata.version("transformers")
        raise UnsupportedModel(
            f"{folder}: transformers {version} knows no models of the type {model_type!r}, and no "
            "code of a model's folder is run"
        )


def family_of(
    folder: Path,
    *,
    reference: bool = False,
    max_sampled_frames: int = MAX_SAMPLED_FRAMES,
    resize_rule: ResizeRule = "pillow",
) -> AnyFamily:
    """Return the family of the model in ``folder``, measured in another process if necessary.

    Args:
        folder: As `transformers` saves models.
        reference: Let the model's own processor make the features, even if the family is known.
        max_sampled_frames: Most frames that are taken of a video.
        resize_rule: As for `describe`.

    Raises:
        ConfigError: The folder contains no model.
        UnsupportedModel: Its processor can't be loaded or used here.
    """
    known = describe(
        folder,
        reference=reference,
        max_sampled_frames=max_sampled_frames,
        resize_rule=resize_rule,
    )
    if known is not None:
        return known
    try:
        done = subprocess.run(
            [sys.executable, "-m", _MEASURE, str(folder)],
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnsupportedModel(
            f"the model in {folder} can't be served: its processor was not loaded in "
            f"{_TIMEOUT_S:.0f} s"
        ) from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip() or f"status {done.returncode}"
        reason = said.rsplit("\n", 1)[-1]
        raise UnsupportedModel(f"the model in {folder} can't be served: {reason}")
    return msgspec.json.decode(done.stdout, type=AdapterFamily)
