"""A corpus of small media files, and the features of these files.

The files lie in ``golden/media``. ``python -m tools.golden_features`` compares their features with
the recorded ones in ``golden``, and writes both.
"""

from __future__ import annotations

import platform
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from blake3 import blake3
from msgspec import Struct
from PIL import Image

from afferent.config import Limits
from afferent.media.decode.audio import decode_audio
from afferent.media.decode.image import decode_image, read_image_header
from afferent.media.decode.video import open_video
from afferent.media.decoded import Array, DecodedAudio, DecodedImage, Media, Pixels
from afferent.media.families.registry import (
    DECODERS,
    PREPROCESSING_VERSION,
    PROCESSORS,
    AnyFamily,
    describe,
    version_of,
)
from afferent.types import Modality
from tests.engine import families
from tests.images import chunk, encoded, heic, in_mode, oriented, photo
from tests.media.folders import make_internvl
from tests.media.test_families import FOLDERS
from tests.media.test_sized_families import MAKERS
from tests.media_files import make_audio, make_av_audio, make_video, tone, turned
from tests.models import make_voxtral
from tests.vllm import internvl_chat_model

GOLDEN: Final = Path(__file__).parent / "golden"
MEDIA: Final = GOLDEN / "media"
LIMITS: Final = Limits()
TOLERANCE: Final = 1e-5
"""For floats: processors round the sums of spectra and of filters differently."""
WRITE: Final = "python -m tools.golden_features --write"

Features = dict[str, str | Array]
"""Features by the name of the case: audio samples and spectra as arrays, which are compared with a
tolerance, and a digest of all others.
"""

FAMILIES: Final[Mapping[str, Callable[[Path], None]]] = {
    **FOLDERS,
    **MAKERS,
    "internvl": lambda folder: make_internvl(folder, size={"height": 28, "width": 28}),
    "internvl_chat": internvl_chat_model.make,
    "lighton_ocr": families.make_lighton_ocr,
    "glm4v": families.make_glm4v,
    "glm_ocr": families.make_glm_ocr,
    "llama4": families.make_llama4,
    "minicpmv4_6": families.make_minicpm,
    "qwen2_5_omni": families.make_qwen2_5_omni,
    "qwen3_omni": families.make_qwen3_omni,
    "whisper": families.make_whisper,
    "qwen2_audio": families.make_qwen2_audio,
    "voxtral": make_voxtral,
}
IMAGES: Final = ("page.jpg", "rgba.png", "lossy.webp")
"""The images for each family: two are small, and one has to be shrunk."""
IMAGE_SUFFIXES: Final = (
    *(".jpg", ".png", ".webp", ".gif", ".heic", ".avif", ".jp2", ".j2k", ".tif"),
    *(".bmp", ".ico", ".ppm", ".pgm", ".pbm", ".tga"),
)
CLIP, VIDEO, RULES = "stereo.flac", "h264.mp4", ("pillow", "torchvision")


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Features that were recorded on one kind of machine.

    Attributes:
        preprocessing_version: `PREPROCESSING_VERSION` at the time of the record.
        libraries: The versions of the libraries at that time.
        digests: By the name of the case. Floats are in a file of their own.
    """

    preprocessing_version: int
    libraries: dict[str, str]
    digests: dict[str, str]


def media_files() -> Iterator[tuple[str, bytes]]:
    """Encode the files of the corpus.

    This is needed for new files only: another version of an encoder may write other bytes, so the
    files are stored.
    """
    small, page = photo(48, 40, 1), photo(260, 190, 2)
    yield "420.jpg", encoded(small, "JPEG", quality=85)
    yield "444.jpg", encoded(small, "JPEG", quality=95, subsampling=0)
    yield "422.jpg", encoded(small, "JPEG", quality=75, subsampling=1)
    yield "page.jpg", encoded(page, "JPEG", quality=80)
    yield "progressive.jpg", encoded(small, "JPEG", quality=60, progressive=True)
    yield "grey.jpg", encoded(small.convert("L"), "JPEG")
    yield "cmyk.jpg", encoded(small.convert("CMYK"), "JPEG")
    yield "turned.jpg", encoded(small, "JPEG", exif=oriented(6))
    for name, mode in (("rgb", "RGB"), ("rgba", "RGBA"), ("grey", "L"), ("grey-alpha", "LA")):
        yield f"{name}.png", encoded(in_mode(small, mode), "PNG")
    yield "palette.png", encoded(in_mode(small, "P"), "PNG")
    yield "palette-alpha.png", encoded(in_mode(small, "P"), "PNG", transparency=3)
    yield "bits.png", encoded(small.convert("1"), "PNG")
    yield "grey16.png", encoded(in_mode(small, "I;16"), "PNG")
    yield "rgb16.png", _png_of_16_bits(np.asarray(small))
    yield "turned.png", encoded(small, "PNG", exif=oriented(3))
    yield "lossy.webp", encoded(small, "WEBP", quality=80)
    yield "lossless.webp", encoded(small, "WEBP", lossless=True)
    yield "alpha.webp", encoded(in_mode(small, "RGBA"), "WEBP", quality=80)
    moving = {"save_all": True, "append_images": [photo(48, 40, 3)], "duration": 100}
    yield "moving.webp", encoded(small, "WEBP", quality=80, **moving)
    yield "still.gif", encoded(in_mode(small, "P"), "GIF")
    yield "clear.gif", encoded(in_mode(small, "P"), "GIF", transparency=3)
    yield "moving.gif", encoded(in_mode(small, "P"), "GIF", **moving)
    yield from _other_images()
    mono, stereo = tone(0.1, 44_100), tone(0.1, 44_100, channels=2)
    yield "16-bit.wav", make_audio(mono, 44_100, subtype="PCM_16")
    yield "24-bit.wav", make_audio(tone(0.1), 16_000, subtype="PCM_24")
    yield "float.wav", make_audio(tone(0.1, 8_000), 8_000, subtype="FLOAT")
    yield "mu-law.wav", make_audio(tone(0.1, 8_000), 8_000, subtype="ULAW")
    yield "stereo.flac", make_audio(stereo, 44_100, "FLAC")
    yield "vorbis.ogg", make_audio(mono, 44_100, "OGG", "VORBIS")
    yield "opus.ogg", make_audio(tone(0.1, 48_000), 48_000, "OGG", "OPUS")
    yield "stereo.mp3", make_audio(stereo, 44_100, "MP3")
    yield "aac.m4a", make_av_audio(mono, 44_100, "aac", "ipod")
    yield "opus.webm", make_av_audio(tone(0.1, 48_000), 48_000, "libopus", "webm")
    short: dict[str, Any] = {"num_frames": 8, "width": 64, "height": 48, "rate": 4, "gop": 4}
    yield "h264.mp4", make_video("h264", **short)
    yield "turned.mp4", turned(make_video("h264", **short), (0, 1, -1, 0))
    yield "10-bit.mp4", make_video("hevc", **short, pixel_format="yuv420p10le")
    yield "444.mp4", make_video("h264", **short, pixel_format="yuv444p")
    yield "hevc.mp4", make_video("hevc", **short)
    yield "vp8.webm", make_video("vp8", **short)
    yield "vp9.webm", make_video("vp9", **short)
    yield "av1.mp4", make_video("av1", **short)


def _other_images() -> Iterator[tuple[str, bytes]]:
    """Encode images that only Pillow decodes."""
    small, tiny, exif = photo(48, 40, 1), photo(24, 20, 1), oriented(6)
    moving = {"save_all": True, "append_images": [photo(24, 20, 3)]}
    yield "photo.heic", heic(small)
    yield "turned.heic", heic(small, exif=exif)
    yield "alpha.heic", heic(in_mode(small, "RGBA"))
    yield "grid.heic", heic(photo(150, 100, 1), tile_size=64, quality=20)
    yield "photo.avif", encoded(small, "AVIF")
    yield "turned.avif", encoded(small, "AVIF", exif=exif)
    yield "alpha.avif", encoded(in_mode(small, "RGBA"), "AVIF")
    yield "moving.avif", encoded(tiny, "AVIF", **moving)
    yield "lossless.jp2", encoded(tiny, "JPEG2000")
    yield "lossy.j2k", encoded(small, "JPEG2000", no_jp2=True, irreversible=True)
    yield "grey16.jp2", encoded(in_mode(tiny, "I;16"), "JPEG2000")
    yield "pages.tif", encoded(tiny, "TIFF", **moving)
    yield "turned.tif", encoded(tiny, "TIFF", compression="tiff_lzw", exif=exif)
    yield "jpeg.tif", encoded(tiny, "TIFF", compression="jpeg")
    yield "fax.tif", encoded(tiny.convert("1"), "TIFF", compression="group4")
    yield "grey16.tif", encoded(in_mode(tiny, "I;16"), "TIFF")
    yield "photo.bmp", encoded(tiny, "BMP")
    yield "palette.bmp", encoded(in_mode(tiny, "P"), "BMP")
    yield "png.ico", encoded(in_mode(small, "RGBA"), "ICO", sizes=[(16, 16), (32, 32)])
    yield (
        "bitmap.ico",
        encoded(in_mode(small, "RGBA"), "ICO", sizes=[(16, 16)], bitmap_format="bmp"),
    )
    yield "photo.ppm", encoded(tiny, "PPM")
    yield "grey16.pgm", encoded(in_mode(tiny, "I;16"), "PPM")
    yield "bits.pbm", encoded(tiny.convert("1"), "PPM")
    yield "photo.tga", encoded(tiny, "TGA")
    yield "runs.tga", encoded(in_mode(tiny, "RGBA"), "TGA", compression="tga_rle")
    turned = b'<x:xmpmeta tiff:Orientation="6"/>'
    yield "xmp.jpg", encoded(small, "JPEG", xmp=turned)
    yield "xmp.webp", encoded(small, "WEBP", lossless=True, xmp=turned)
    yield "late.png", _png_turned_at_its_end(small)


def _png_turned_at_its_end(image: Image.Image) -> bytes:
    data = encoded(image, "PNG")
    return data[:-12] + chunk(b"eXIf", oriented(6)[6:]) + data[-12:]


def _png_of_16_bits(pixels: Pixels) -> bytes:
    """Write a PNG, as Pillow can't write 16 bits in three colours; the lower bytes differ."""
    values = pixels.astype(">u2") * 257 ^ 0x55
    rows = b"".join(b"\0" + row.tobytes() for row in values.astype(">u2"))
    size = struct.pack(">2I5B", pixels.shape[1], pixels.shape[0], 16, 2, 0, 0, 0)
    head, body, end = chunk(b"IHDR", size), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + body + end


def decoded(path: Path, rate_hz: int = 16_000) -> Media | list[Pixels]:
    """Decode an image, an audio clip at this rate, or the frames of a video."""
    data = path.read_bytes()
    if path.suffix in IMAGE_SUFFIXES:
        return decode_image(memoryview(data), read_image_header(data, LIMITS), LIMITS)
    if path.suffix == ".mp4" or path.name.startswith("vp"):
        with open_video(data, LIMITS) as video:
            return list(video.frames(range(video.header.num_frames)))
    return decode_audio(data, rate_hz, LIMITS)


def decoded_features() -> Features:
    """Decode each file; return digests of pixels, and audio samples."""
    made: Features = {}
    for path in sorted(MEDIA.iterdir()):
        match decoded(path):
            case DecodedImage(pixels):
                made[path.name] = digest({"pixels": pixels})
            case DecodedAudio(samples):
                made[path.name] = samples
            case list(frames):
                made[path.name] = digest({"frames": np.stack(frames)})
            case other:
                raise TypeError(f"{path} became a {type(other).__name__}")
    return made


def family_features() -> Features:
    """Return the features of each family for images, a clip and a video, by both resize rules."""
    made: Features = {}
    for title, family in described_families():
        made |= features_of(title, family)
    return made


def described_families() -> list[tuple[str, AnyFamily]]:
    """Describe the families of `FAMILIES`, by each resize rule that makes a difference."""
    torch.set_num_threads(1)  # with small tensors, more threads only wait for each other
    found: list[tuple[str, AnyFamily]] = []
    for name, make in FAMILIES.items():
        with tempfile.TemporaryDirectory() as place:
            make(folder := Path(place))
            described = {rule: describe(folder, resize_rule=rule) for rule in RULES}
            for rule, family in described.items():
                if family is not None and (rule == "pillow" or family != described["pillow"]):
                    found.append((f"{name}, {rule}", family))
    return found


def processor_features() -> Features:
    """Return the features from a model's own processor for an image."""
    with tempfile.TemporaryDirectory() as place:
        FOLDERS["qwen2_vl"](folder := Path(place))
        family = describe(folder, reference=True)
        assert family is not None
        return features_of("qwen2_vl, its own processor", family)


def features_of(title: str, family: AnyFamily) -> Features:
    """Return a family's features for the modalities that it supports."""
    made: Features = {}
    if Modality.IMAGE in family.tokens:
        for name in IMAGES:
            image = decoded(MEDIA / name)
            assert isinstance(image, DecodedImage)
            made[f"{title}, {name}"] = digest(_processed(family, image))
        bounded = family.bounded(2_000)
        if bounded is not family:
            made[f"{title}, at most 2,000 pixels"] = digest(_processed(bounded, image))
    if Modality.VIDEO in family.tokens:
        with open_video((MEDIA / VIDEO).read_bytes(), LIMITS) as video:
            made[f"{title}, {VIDEO}"] = digest(_processed(family, video))
    if Modality.AUDIO in family.tokens:
        clip = decoded(MEDIA / CLIP, family.sample_rate_hz)
        assert isinstance(clip, DecodedAudio)
        features = _processed(family, clip)
        made[f"{title}, {CLIP}"] = features.pop("input_features")
        made[f"{title}, {CLIP}, the rest"] = digest(features)
    return made


def _processed(family: AnyFamily, media: Media) -> dict[str, Array]:
    """Return the features, the pieces of the prompt, and the inputs of the encoder."""
    plan = family.plan_exactly(media.header)
    out = {name: np.full(s.shape, 77, np.dtype(s.dtype)) for name, s in plan.specs.items()}
    family.process(media, out)
    tensors = {name: torch.from_numpy(array) for name, array in out.items()}
    for name, tensor in family.model_inputs(tensors).items():
        if tensor is not tensors.get(name):
            out[f"{name} of the encoder"] = tensor.numpy()
    return {**out, "prompt": np.frombuffer(msgspec.json.encode(plan.prompt), np.uint8)}


def digest(arrays: Mapping[str, Array]) -> str:
    """Return the digest of the names, types, shapes and bytes of arrays."""
    hasher = blake3()
    for name, array in sorted(arrays.items()):
        hasher.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        hasher.update(np.ascontiguousarray(array).tobytes())
    return hasher.hexdigest(16)


def libraries() -> dict[str, str]:
    """Return the installed versions."""
    return {name: version_of(name) for name in (*DECODERS, *PROCESSORS)}


def recorded() -> tuple[Record, dict[str, Array]] | None:
    """Return the record for this kind of machine, and its floats; ``None`` if there is none."""
    path = GOLDEN / f"{platform.machine()}.json"
    if not path.exists():
        return None
    record = msgspec.json.decode(path.read_bytes(), type=Record)
    with np.load(path.with_suffix(".npz")) as floats:
        return record, dict(floats)


def save(made: Features) -> None:
    """Record these features as those of `PREPROCESSING_VERSION`."""
    record = Record(
        preprocessing_version=PREPROCESSING_VERSION,
        libraries=libraries(),
        digests={name: each for name, each in made.items() if isinstance(each, str)},
    )
    path = GOLDEN / f"{platform.machine()}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    floats = {name: each for name, each in made.items() if not isinstance(each, str)}
    np.savez_compressed(path.with_suffix(".npz"), allow_pickle=False, **floats)


class Difference(Struct, frozen=True, kw_only=True):
    """Names of changed cases, and of cases that are only in the record or only computed."""

    changed: list[str]
    unrecorded: list[str]


def compare(made: Features, record: Record, floats: Mapping[str, Array]) -> Difference:
    """Compare computed features with the recorded ones."""
    before: Features = {**record.digests, **floats}
    both = made.keys() & before
    return Difference(
        changed=sorted(name for name in both if not _is_same(made[name], before[name])),
        unrecorded=sorted(made.keys() ^ before),
    )


def _is_same(one: str | Array, other: str | Array) -> bool:
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        return type(one) is type(other) and bool(one == other)
    return one.shape == other.shape and np.allclose(one, other, rtol=0, atol=TOLERANCE)


def verdict(
    found: Difference, record: Record, *, version: int, here: Mapping[str, str]
) -> tuple[str, bool]:
    """Return the next step for the developer, and whether the features may be recorded.

    The text is empty if the features are those of the record.

    Args:
        found: The difference from the record.
        record: The recorded features.
        version: `PREPROCESSING_VERSION` of the code.
        here: The installed versions of the libraries.
    """
    before = record.preprocessing_version
    if version < before:
        return f"PREPROCESSING_VERSION fell from {before} to {version}: it only rises", False
    if version > before and found.changed:
        return f"record the features of PREPROCESSING_VERSION {version}: {WRITE}", True
    if version > before:
        return (
            "the version changed but no pixel did: set PREPROCESSING_VERSION back to "
            f"{before}, or every node makes all its features again"
        ), False
    others = [
        f"{name} {record.libraries.get(name, '-')} (recorded) and {installed or '-'} (here)"
        for name, installed in here.items()
        if record.libraries.get(name) != installed
    ]
    if found.changed and others:
        return (
            f"{_listed(found.changed)} differ, and so do libraries: {'; '.join(others)}. Their "
            "versions are in the fingerprint already. Run this with the recorded versions: if it "
            f"passes there, then libraries alone changed pixels. Run {WRITE} here"
        ), True
    if found.changed:
        return (
            "pixels changed: raise PREPROCESSING_VERSION in afferent/media/families/registry.py, "
            f"and run {WRITE}. {_listed(found.changed)} differ"
        ), False
    if found.unrecorded:
        return f"{_listed(found.unrecorded)} are new or gone: {WRITE}", True
    return "", False


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} others" if len(names) > 5 else ""
    return "; ".join(names[:5]) + more
