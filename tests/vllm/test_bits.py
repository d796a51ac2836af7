"""Features have the same bits as the tensors of vLLM's own processor, so that names may be shared.

`EngineFacts.bits_of` lists these models; `--engine-hashes` needs it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from afferent.media.decoded import DecodedImage
from afferent.media.families.registry import describe, engine_facts
from tests.engine import families
from tests.images import encoded, photo
from tests.media.golden_features import decoded
from tests.models import make_features
from tests.vllm.servers import run_inside
from tests.vllm.test_families import MAKERS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

NUM_IMAGES = int(os.environ.get("TEST_BITS_IMAGES", "12"))
KINDS = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP"}
ALL = {**MAKERS, "qwen2_vl": lambda folder: families.make_qwen_vl(folder, "qwen2")}


def test_features_have_the_bits_of_vllms_own(tmp_path: Path) -> None:
    for name in ("models", "features", "images"):
        (tmp_path / name).mkdir()
    rng = np.random.default_rng(5)
    for number in range(NUM_IMAGES):
        suffix = list(KINDS)[number % len(KINDS)]
        width, height = (int(side) for side in rng.integers(24, 400, 2))
        data = encoded(photo(width, height, seed=number), KINDS[suffix])
        (tmp_path / "images" / f"{number}.{suffix}").write_bytes(data)
    types = set()
    for name, make in ALL.items():
        folder = tmp_path / "models" / name
        folder.mkdir()
        make(folder)
        types.add(json.loads((folder / "config.json").read_text())["model_type"])
        family = describe(folder, resize_rule="torchvision")
        assert family is not None
        for image in (tmp_path / "images").iterdir():
            media = decoded(image)
            assert isinstance(media, DecodedImage)
            features = make_features(family, media)
            np.savez(tmp_path / "features" / f"{name}-{image.stem}.npz", **features)
    output = run_inside("tests.vllm.bits", str(tmp_path))
    found = json.loads(output.splitlines()[-1])
    assert len(found) == NUM_IMAGES * len(ALL)
    assert {case: why for case, why in found.items() if why} == {}
    listed = {kind for kind in types if kind in engine_facts(kind).bits_of.get("vllm", ())}
    assert listed == types, "each of them may have vLLM's names"
