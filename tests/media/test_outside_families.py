"""A plugin family: installed as a package, found by its entry point, and served."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from afferent.errors import ConfigError
from afferent.media.decoded import DecodedImage
from afferent.media.families import llava, outside, registry
from afferent.media.families.adapter import AdapterFamily
from afferent.media.families.outside import OutsideFamily
from afferent.media.families.registry import AnyFamily, describe, engine_facts, fingerprint
from afferent.media.headers.probe import ImageHeader
from afferent.types import Modality
from tests.media.folders import write_config

MODULE = '''
from afferent.media.families.entry import EngineFacts, Entry
from afferent.media.families.images import ImageFamily, decoded_image, image_header
from afferent.media.families.family import MediaTokens
from afferent.media.families.plan import FeaturePlan
from afferent.types import TensorSpec
import msgspec


class Strips(ImageFamily, tag="strips", frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of bytes for each row of an image, up to so many."""

    most: int

    def plan(self, header):
        rows = min(self.most, image_header(header).height)
        return FeaturePlan({"pixel_values": TensorSpec("uint8", (rows, 3))}, ("<img>", rows))

    def bounded(self, max_pixels):
        return msgspec.structs.replace(self, most=max_pixels) if max_pixels < self.most else self

    def process(self, media, out):
        pixels = decoded_image(media).pixels
        out["pixel_values"][...] = pixels[: len(out["pixel_values"]), 0]

    def model_inputs(self, features):
        return {name: value / 2 for name, value in features.items()}


def describe(folder, config):
    if config.get("refuses"):
        return None
    return Strips(image=MediaTokens(7, 7), most=config["most"])


ENTRY = Entry(
    model_types=("strips",),
    describe=describe,
    engine=EngineFacts(position_features=frozenset({"heights"}), items_see_themselves=True),
)
NO_ENTRY = 5
'''


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder from which packages are imported."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    registry._entry.cache_clear()
    outside._inner.cache_clear()
    yield folder
    registry._entry.cache_clear()
    sys.modules.pop("strips_family", None)


def install(site: Path, *points: str, name: str = "strips-family", version: str = "1.2") -> None:
    (site / "strips_family.py").write_text(MODULE)
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("\n".join(["[afferent.families]", *points, ""]))


def make_folder(folder: Path, model_type: str = "strips", **config: object) -> Path:
    folder.mkdir()
    write_config(folder, model_type=model_type, **{"most": 4, **config})
    return folder


def test_it_is_found_and_travels(site: Path, tmp_path: Path) -> None:
    install(site, "strips = strips_family:ENTRY")
    folder = make_folder(tmp_path / "model")
    family = describe(folder)
    assert isinstance(family, OutsideFamily)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(family), type=AnyFamily)
    assert again == family
    assert again.tokens[Modality.IMAGE].embed == 7
    plan = again.plan(ImageHeader(5, 9))
    assert plan is not None
    assert plan.prompt == ("<img>", 4)
    assert again.bounded(3).plan_exactly(ImageHeader(5, 9)).num_embeds == 3
    assert again.bounded(99) is again.sampling(1) is again.without_paths() is again
    assert again.resizing("torchvision") == again
    again.load()
    out = {"pixel_values": np.zeros((4, 3), np.uint8)}
    pixels = np.arange(9 * 5 * 3, dtype=np.uint8).reshape(9, 5, 3)
    again.process(DecodedImage(pixels), out)
    np.testing.assert_array_equal(out["pixel_values"], pixels[:4, 0])
    assert again.model_inputs({"x": np.float32(4)}) == {"x": 2}
    assert again.processor_layout is None
    assert again.sample_rate_hz == 0
    facts = engine_facts("strips")
    assert facts.items_see_themselves
    assert facts.position_features == {"heights"}
    assert describe(folder, reference=True) == family


def test_its_version_is_a_part_of_the_keys(site: Path, tmp_path: Path) -> None:
    install(site, "strips = strips_family:ENTRY")
    folder = make_folder(tmp_path / "model")
    family = describe(folder)
    assert isinstance(family, OutsideFamily)
    newer = msgspec.structs.replace(family, version="strips-family 1.3")
    assert fingerprint(folder, family) != fingerprint(folder, newer)


def test_it_may_leave_a_folder_to_the_adapter(site: Path, tmp_path: Path) -> None:
    install(site, "strips = strips_family:ENTRY")
    assert describe(make_folder(tmp_path / "model", refuses=True)) is None


def test_ours_come_first(site: Path, tmp_path: Path) -> None:
    install(site, "llava = strips_family:ENTRY", "gemma3 = nowhere:ENTRY")
    assert engine_facts("llava") == llava.ENTRY.engine
    assert engine_facts("gemma3").items_see_themselves


@pytest.mark.parametrize(
    ("point", "why"),
    [
        ("strips_family:MISSING", "can't be loaded from strips_family:MISSING: AttributeError"),
        ("no_such_module:ENTRY", "can't be loaded from no_such_module:ENTRY: ModuleNotFoundError"),
        ("strips_family:NO_ENTRY", "is a int, and no Entry"),
    ],
)
def test_what_cannot_be_used_is_told(site: Path, tmp_path: Path, point: str, why: str) -> None:
    install(site, f"strips = {point}")
    with pytest.raises(ConfigError, match=why) as caught:
        describe(make_folder(tmp_path / "model"))
    assert "\n" not in caught.value.message


def test_two_packages_for_one_type(site: Path, tmp_path: Path) -> None:
    install(site, "strips = strips_family:ENTRY")
    install(site, "strips = strips_family:NO_ENTRY", name="other")
    with pytest.raises(ConfigError, match="several packages have a family for strips"):
        describe(make_folder(tmp_path / "model"))


def test_its_own_faults_are_told_in_a_line(site: Path, tmp_path: Path) -> None:
    install(site, "strips = strips_family:ENTRY")
    for config in ({"most": "many"}, {"most": None}):
        with pytest.raises(ConfigError, match="the family strips_family:Strips can't be used"):
            describe(make_folder(tmp_path / str(config["most"]), **config))


@pytest.mark.parametrize("fault", ["describe", "sampling"])
def test_family_that_raises_is_blamed_and_not_the_folder(
    site: Path, tmp_path: Path, fault: str
) -> None:
    install(site, "strips = strips_family:ENTRY")
    with (site / "strips_family.py").open("a") as module:
        if fault == "describe":
            module.write("\n\ndef strips(config):\n    return config.mots\n")
            module.write("\n\ndef describe(folder, config):\n    return strips(Strips)\n")
            module.write("\n\nENTRY = Entry(model_types=('strips',), describe=describe)\n")
        else:
            module.write("\n\nStrips.sampling = lambda self, most: self.mots\n")
    folder = make_folder(tmp_path / "model")
    with pytest.raises(
        ConfigError, match=r"the family strips_family:\w+ \(.*\) has failed"
    ) as caught:
        describe(folder)
    assert "AttributeError" in caught.value.message
    assert "a fault of the family" in caught.value.message
    assert str(folder) not in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("config", ['{"model_type": 5}', "{}", "[]", "{", ""])
def test_a_configuration_that_is_none(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        describe(tmp_path)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llava", "image_token_id": "five"},
        {"model_type": "llava", "vision_config": 5},
        {"model_type": "qwen2_vl", "image_token_id": [1]},
        {"model_type": "glm4v", "image_token_id": {}},
    ],
)
def test_settings_that_make_no_sense(config: dict[str, Any], tmp_path: Path) -> None:
    """Invalid settings are an error that names the folder, whichever library reads them."""
    write_config(tmp_path, **config)
    processor = {"llava": "CLIP", "qwen2_vl": "Qwen2VL", "glm4v": "Glm4v"}[config["model_type"]]
    settings = {"image_processor_type": f"{processor}ImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    (tmp_path / "processor_config.json").write_text('{"patch_size": 14}')
    with pytest.raises(ConfigError, match="make no sense") as caught:
        describe(tmp_path)
    assert "\n" not in caught.value.message


def test_the_adapter_takes_one_from_outside(site: Path, tmp_path: Path) -> None:
    """The adapter is sent to workers with the settings of the plugin family."""
    install(site, "strips = strips_family:ENTRY")
    family = describe(make_folder(tmp_path / "model"))
    assert isinstance(family, OutsideFamily)
    adapter = AdapterFamily(folder="x", image=family.tokens[Modality.IMAGE], native=family)
    encoded = msgspec.msgpack.encode(adapter)
    assert msgspec.msgpack.decode(encoded, type=AnyFamily) == adapter
