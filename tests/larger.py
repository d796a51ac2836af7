"""The built-in model with a larger limit of pixels, so that an encoder takes longer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from afferent.operations.supervisor.checks import BUILT_IN_MODELS


def larger_model(folder: Path, times: int = 16) -> Path:
    """Copy the built-in model into ``folder``, with ``times`` its limit, and return the copy.

    The limit of the built-in model is 36 rows for a picture. The copy has the same name.
    """
    path = folder / "shapes"
    shutil.copytree(BUILT_IN_MODELS / "shapes", path)
    settings = path / "preprocessor_config.json"
    said = json.loads(settings.read_text())
    said["size"]["longest_edge"] *= times
    settings.write_text(json.dumps(said))
    return path
