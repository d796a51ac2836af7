"""Features of a corpus against recorded ones: changed pixels need new cache keys."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afferent.media import native
from afferent.media.decoded import Array, DecodedImage
from afferent.media.families import registry
from afferent.media.families.mistral import MistralAudio, MistralImages
from afferent.media.families.reencoded import ReencodedFamily
from afferent.media.families.registry import AnyFamily, describe, fingerprint
from tests.media import golden_features as golden
from tests.media.folders import make_qwen

MAX_NBYTES = 300_000
RECORD = golden.Record(
    preprocessing_version=3, libraries={"av": "1", "numpy": "2"}, digests={"a.png": "x", "b": "y"}
)
FLOATS: Mapping[str, Array] = {"c.wav": np.zeros(9, np.float32)}
SAME: golden.Features = {**RECORD.digests, **FLOATS}

needs_compiled = pytest.mark.skipif(native.compiled is None, reason="there is no compiled part")


@pytest.fixture(scope="module")
def record() -> tuple[golden.Record, dict[str, Array]]:
    found = golden.recorded()
    if found is None:
        machine = platform.machine()
        pytest.skip(f"no features are recorded for {machine}: {golden.WRITE} on such a machine")
    return found


def problem(made: golden.Features, record: golden.Record, floats: Mapping[str, Array]) -> str:
    text, _ = golden.verdict(
        golden.compare(made, record, floats),
        record,
        version=registry.PREPROCESSING_VERSION,
        here=golden.libraries(),
    )
    return text


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", [pytest.param("compiled", marks=needs_compiled), "libraries"])
def test_features_of_the_corpus_are_those_of_the_recorded_version(
    part: str,
    record: tuple[golden.Record, dict[str, Array]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The features with the compiled part and without it share keys, so they must be equal."""
    if part == "libraries":
        monkeypatch.setattr(native, "compiled", None)
    made = golden.decoded_features() | golden.family_features() | golden.processor_features()
    found = problem(made, *record)
    assert not found, found


def test_one_pixel_of_one_decoder_is_noticed(
    record: tuple[golden.Record, dict[str, Array]], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, floats = record
    original = golden.decode_image

    def off_by_one(data: memoryview, *rest: Any) -> DecodedImage:
        image = original(data, *rest)
        image.pixels[0, 0, 0] ^= 1
        return image

    monkeypatch.setattr(golden, "decode_image", off_by_one)
    images = {name: each for name, each in golden.decoded_features().items() if is_image(name)}
    made = {**saved.digests, **floats, **images}
    assert golden.compare(made, saved, floats).changed == sorted(images)
    assert len(images) == 53


def is_image(name: str) -> bool:
    return name.endswith(golden.IMAGE_SUFFIXES) and "," not in name


@pytest.mark.parametrize(
    ("made", "version", "here", "said", "may_record"),
    [
        (SAME, 3, RECORD.libraries, "", False),
        (SAME, 4, RECORD.libraries, "the version changed but no pixel did", False),
        (SAME, 2, RECORD.libraries, "it only rises", False),
        ({**SAME, "a.png": "z"}, 3, RECORD.libraries, "pixels changed: raise", False),
        ({**SAME, "a.png": "z"}, 4, RECORD.libraries, "record the features of", True),
        ({**SAME, "a.png": "z"}, 3, {"av": "2", "numpy": "2"}, "av 1 .recorded. and 2", True),
        (SAME, 3, {"av": "2", "numpy": "2"}, "", False),
        ({**SAME, "d": "z"}, 3, RECORD.libraries, "d are new or gone", True),
        ({"a.png": "x", **FLOATS}, 3, RECORD.libraries, "b are new or gone", True),
        ({**SAME, "c.wav": np.full(9, 1e-6, np.float32)}, 3, RECORD.libraries, "", False),
        ({**SAME, "c.wav": np.full(9, 1e-4, np.float32)}, 3, RECORD.libraries, "pixels", False),
        ({**SAME, "c.wav": np.zeros(8, np.float32)}, 3, RECORD.libraries, "pixels", False),
    ],
)
def test_a_verdict_says_what_is_to_be_done(
    made: golden.Features, version: int, here: dict[str, str], said: str, may_record: bool
) -> None:
    found = golden.compare(made, RECORD, FLOATS)
    text, allowed = golden.verdict(found, RECORD, version=version, here=here)
    assert allowed == may_record
    if said:
        with pytest.raises(AssertionError, match=said):
            raise AssertionError(text)
    else:
        assert text == ""


def test_the_corpus_is_complete_and_small() -> None:
    assert {path.name for path in golden.MEDIA.iterdir()} == {
        name for name, _ in golden.media_files()
    }
    files = [path for path in golden.GOLDEN.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MAX_NBYTES


def test_each_kind_of_family_is_in_the_record(
    record: tuple[golden.Record, dict[str, Array]], tmp_path: Path
) -> None:
    """A new family needs a folder in `golden.FAMILIES`."""
    tags = set()
    for name, make in golden.FAMILIES.items():
        folder = tmp_path / name
        folder.mkdir()
        make(folder)
        tags.add(type(describe(folder)))
        assert any(case.startswith(f"{name}, ") for case in record[0].digests), name
    of_no_folder = {registry.OutsideFamily, ReencodedFamily}
    # OpenCV's floats differ between processors, and those of audio are the decoder's own.
    of_mistral = {MistralAudio, MistralImages}
    assert tags == set(registry.NativeFamily.__args__) - of_no_folder - of_mistral


@pytest.fixture
def family(tmp_path: Path) -> AnyFamily:
    make_qwen(tmp_path)
    found = describe(tmp_path)
    assert found is not None
    return found


def test_the_fingerprint_follows_the_version_and_the_machine(
    tmp_path: Path, family: AnyFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    prints = {fingerprint(tmp_path, family)}
    with monkeypatch.context() as patch:
        patch.setattr(registry, "PREPROCESSING_VERSION", registry.PREPROCESSING_VERSION + 1)
        prints.add(fingerprint(tmp_path, family))
    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "vax")
        prints.add(fingerprint(tmp_path, family))
    assert len(prints) == 3


@pytest.mark.parametrize("library", [*registry.DECODERS, *registry.PROCESSORS])
def test_the_fingerprint_follows_the_libraries_that_take_part(
    library: str, tmp_path: Path, family: AnyFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new version of torch changes no keys of a family that does not use it."""
    adapter = describe(tmp_path, reference=True)
    assert adapter is not None
    torchvisions = family.resizing("torchvision")
    cases = [
        (family, native.compiled, registry.DECODERS),
        (family, None, registry.DECODERS),
        (torchvisions, native.compiled, (*registry.DECODERS, *torch_for(native.compiled))),
        (torchvisions, None, (*registry.DECODERS, "torch")),
        (adapter, native.compiled, (*registry.DECODERS, *registry.PROCESSORS)),
    ]
    original = registry.version_of
    for one, compiled, taking_part in cases:
        monkeypatch.setattr(native, "compiled", compiled)
        before = fingerprint(tmp_path, one)
        with monkeypatch.context() as patch:
            patch.setattr(
                registry, "version_of", lambda name: "0" if name == library else original(name)
            )
            assert (fingerprint(tmp_path, one) != before) == (library in taking_part)


def torch_for(compiled: object) -> tuple[str, ...]:
    """Return torch where it resizes, because the compiled part is missing."""
    return ("torch",) if compiled is None else ()


@needs_compiled
def test_the_fingerprint_is_the_same_with_and_without_the_compiled_part(
    tmp_path: Path, family: AnyFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Pillow's resize rule, the features are the same."""
    before = fingerprint(tmp_path, family)
    monkeypatch.setattr(native, "compiled", None)
    assert fingerprint(tmp_path, family) == before
