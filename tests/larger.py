"""The built-in model, which looks at larger pictures: so that an encoder has something to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from afferent.operations.supervisor.checks import BUILT_IN_MODELS


def larger_model(folder: Path, times: int = 16) -> Path:
    """Its folder, in ``folder``: up to 36 rows for a picture, so many times. It is called as the
    built-in one.
    """
    path = folder / "shapes"
    shutil.copytree(BUILT_IN_MODELS / "shapes", path)
    settings = path / "preprocessor_config.json"
    said = json.loads(settings.read_text())
    said["size"]["longest_edge"] *= times
    settings.write_text(json.dumps(said))
    return path
