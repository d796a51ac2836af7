"""Hostile videos and audio clips, and a process that tries them.

    python -m tests.hostile_av [FIRST [FLIPPED]]

The process tries the cases from number FIRST on, with FLIPPED copies of each file with flipped
bits. It writes a line before and a line after each case, so that a reader knows which case it died
of.
"""

from __future__ import annotations

import io
import json
import random
import re
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import soundfile

from afferent.config import Limits
from afferent.errors import InvalidMedia
from afferent.media.decode.audio import decode_audio, probe_audio
from afferent.media.decode.video import open_video
from tests.media_files import make_audio, make_av_audio, make_video, ogg_page, tone

LIMITS = Limits()
_SEED = 20_261
_NUM_FLIPPED, _NUM_CUT = 14, 8
_ODD = (0, 1, 0x7FFF_FFFF, 0xFFFF_FFFF, 20_000_000)

Kind = Literal["video", "audio"]


@dataclass(frozen=True)
class Case:
    name: str
    kind: Kind
    file: bytes


def cases(num_flipped: int = _NUM_FLIPPED) -> Iterator[Case]:
    """Yield some 2,000 cases, always the same."""
    rng = np.random.default_rng(_SEED)
    for name, kind, file in _honest():
        yield Case(f"{name}: honest", kind, file)
        yield from _cut(name, kind, file, rng)
        yield from _flipped(name, kind, file, num_flipped, rng)
        if b"ftyp" in file[:12]:
            yield from _forged_boxes(name, kind, file)
        else:
            yield from _forged_bytes(name, kind, file, rng)
    for name, text in _FOREIGN.items():
        yield Case(name, "video", text)
        yield Case(name, "audio", text)
    for number, make in enumerate(_BOMBS):
        yield from (Case(f"bomb {number}: {c.name}", c.kind, c.file) for c in make())


def _honest() -> Iterator[tuple[str, Kind, bytes]]:
    for codec in ("h264", "hevc", "vp8", "vp9", "av1"):
        yield codec, "video", make_video(codec, num_frames=10, gop=5)
    yield "h264 in mkv", "video", make_video(num_frames=10, gop=5, container="matroska")
    split = {"movflags": "frag_keyframe+empty_moov"}
    yield "fragments", "video", make_video(num_frames=10, gop=5, muxing=split)
    for form, subtype in (("WAV", None), ("WAV", "FLOAT"), ("FLAC", None)):
        yield f"{form} {subtype}", "audio", make_audio(tone(0.3), 16_000, form, subtype)
    for form, subtype in (("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None)):
        yield f"{form} {subtype}", "audio", make_audio(tone(0.5), 16_000, form, subtype)
    yield "m4a", "audio", make_av_audio(tone(0.5), 16_000, "aac", "ipod")
    yield "webm", "audio", make_av_audio(tone(0.5), 48_000, "libopus", "webm")


_MARKS = re.compile(
    rb"ftyp|moov|mvhd|trak|tkhd|edts|elst|mdia|mdhd|hdlr|minf|stbl|stsd|avcC|hvcC|av1C|esds|stts"
    rb"|ctts|stss|stsc|stsz|stco|moof|mfhd|traf|tfhd|tfdt|trun|mdat|mfra|OggS|fmt |data|fLaC"
    rb"|\x1a\x45\xdf\xa3|\x18\x53\x80\x67|\x15\x49\xa9\x66|\x16\x54\xae\x6b|\x1f\x43\xb6\x75"
    rb"|\x1c\x53\xbb\x6b|\xa3[\x80-\xff\x40-\x7f]|\xff\xfb|\xff\xf3"
)
"""The beginning of a box, an element, a page or a frame."""


def _cut(name: str, kind: Kind, file: bytes, rng: np.random.Generator) -> Iterator[Case]:
    places = {match.start() for match in _MARKS.finditer(file)}
    chosen = sorted(places)[:: max(1, len(places) // 16)]
    chosen += rng.integers(1, len(file), _NUM_CUT).tolist()
    for place in dict.fromkeys(chosen):
        yield Case(f"{name}: cut at {place}", kind, file[:place])


def _flipped(
    name: str, kind: Kind, file: bytes, count: int, rng: np.random.Generator
) -> Iterator[Case]:
    header = file.find(b"moov") if b"ftyp" in file[:12] else 0
    for number in range(count):
        broken = bytearray(file)
        first = header if number % 2 else 0
        last = min(len(file), header + 700) if number % 2 else len(file)
        for place in rng.integers(first, last, int(rng.integers(1, 24))):
            broken[place] ^= 1 << int(rng.integers(8))
        yield Case(f"{name}: flipped {number}", kind, bytes(broken))


_FIELDS = {
    b"mvhd": (12, 16),
    b"tkhd": (20, 76, 80),
    b"mdhd": (12, 16),
    b"trun": (4, 8),
    b"stts": (4, 8, 12),
    b"ctts": (4, 8, 12),
    b"stsc": (4, 12),
    b"stsz": (4, 8),
    b"stco": (4, 8),
    b"elst": (4, 8, 12),
    b"stsd": (4, 8, 44),
    b"avcC": (0, 4),
    b"esds": (8, 16),
}
"""The offsets of 32-bit numbers in boxes."""


def _forged_boxes(name: str, kind: Kind, file: bytes) -> Iterator[Case]:
    for box, offsets in _FIELDS.items():
        if (start := file.find(box)) < 0:
            continue
        for offset in (-8, *offsets):
            for value in _ODD if offset >= 0 else _ODD[:4]:
                forged = bytearray(file)
                forged[start + 4 + offset : start + 8 + offset] = struct.pack(">I", value)
                yield Case(f"{name}: {box!r} at {offset} is {value}", kind, bytes(forged))


def _forged_bytes(name: str, kind: Kind, file: bytes, rng: np.random.Generator) -> Iterator[Case]:
    """Yield files with numbers written over a header: rates, channels and sizes among others."""
    for place in sorted({*range(4, 48, 4), *rng.integers(0, min(500, len(file) - 8), 10).tolist()}):
        for value in (0, 0xFFFF_FFFF, 0x7FFF_0000):
            forged = file[:place] + struct.pack("<I", value) + file[place + 4 :]
            yield Case(f"{name}: {value:#x} at {place}", kind, forged)


_FOREIGN = {
    "empty": b"",
    "one byte": b"\0",
    "a playlist": b"#EXTM3U\n#EXT-X-VERSION:3\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    "a playlist in a tag": b"ID3\x04\0\0\0\0\0\0#EXTM3U\n#EXTINF:9,\nhttp://127.0.0.1/\n",
    "concat": b"ffconcat version 1.0\nfile '/etc/passwd'\n",
    "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n",
    "dash": b'<?xml version="1.0"?><MPD><Period><BaseURL>file:///etc/passwd</BaseURL></Period></MPD>',
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "text": b"Hello, I am a video.\n" * 50,
    "zip": b"PK\x03\x04" + bytes(100),
    "gif": b"GIF89a\x10\0\x10\0\0\0\0" + bytes(100),
    "avi": b"RIFF\xff\xff\xff\xffAVI LIST" + bytes(100),
    "heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(200),
    "ogg video": b"OggS\0\x02" + bytes(20) + b"\x01\x2a\x80theora" + bytes(100),
    "noise": np.random.default_rng(1).bytes(4000),
    "noise as mp4": b"\0\0\0\x10ftypisom" + np.random.default_rng(2).bytes(4000),
    "noise as mkv": b"\x1aE\xdf\xa3" + np.random.default_rng(3).bytes(4000),
    "noise as flac": b"fLaC" + np.random.default_rng(4).bytes(4000),
    "noise as ogg": b"OggS" + np.random.default_rng(5).bytes(4000),
    "noise as wav": b"RIFF\x00\x10\x00\x00WAVEfmt " + np.random.default_rng(6).bytes(4000),
    "noise as mp3": b"\xff\xfb\x90\x00" + np.random.default_rng(7).bytes(4000),
}


def _long_silence() -> Iterator[Case]:
    """Yield three hours of FLAC in about 200 kB, and eleven minutes of Opus in less."""
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", 8000, 1, format="FLAC") as out:
        for _ in range(180):
            out.write(np.zeros(480_000, np.int16))
    honest = file.getvalue()
    unsaid = bytearray(honest)
    unsaid[21] &= 0xF0
    unsaid[22:26] = bytes(4)
    yield Case("three hours of FLAC", "audio", honest)
    yield Case("three hours of FLAC that says nothing", "audio", bytes(unsaid))
    opus = make_audio(np.zeros((660 * 8000, 1), np.float32), 8000, "OGG", "OPUS")
    yield Case("eleven minutes of Opus", "audio", opus)
    last = opus.rindex(b"OggS")
    yield Case("Opus that denies its length", "audio", opus[:last] + ogg_page(opus[last:], 48_000))


def _many_frames() -> Iterator[Case]:
    """Yield a million frames of one byte in Matroska, and a table of twenty million in MP4."""
    webm = make_video("vp8", num_frames=3)
    segment = webm.index(b"\x18\x53\x80\x67") + 4
    end = webm.rindex(b"\x1c\x53\xbb\x6b")  # the part after the frames
    header = webm[:segment] + b"\x01" + b"\xff" * 7 + webm[segment + 8 : end]
    blocks = np.empty((30_000, 8), np.uint8)
    blocks[:] = np.frombuffer(b"\xa3\x86\x81\0\0\x80\x11\x01", np.uint8)
    blocks[:, 3:5] = np.arange(30_000).astype(">i2").view(np.uint8).reshape(-1, 2)
    clusters = []
    for number in range(34):
        body = b"\xe7\x84" + struct.pack(">I", 1000 + number * 30_000) + blocks.tobytes()
        clusters.append(b"\x1f\x43\xb6\x75\x08" + struct.pack(">I", len(body)) + body)
    yield Case("a million frames", "video", header + b"".join(clusters))
    plain = bytearray(make_video(num_frames=16, options={"bf": "0"}))
    for number in (1_000_000, 20_000_000, 2**31 - 1, 2**32 - 1):
        for box, at, values in (
            (b"stsz", 4, (1, number)),
            (b"stsc", 4, (1, 1, number, 1)),
            (b"stts", 4, (1, number, 512)),
        ):
            start = plain.index(box) + 4 + at
            plain[start : start + 4 * len(values)] = struct.pack(f">{len(values)}I", *values)
        yield Case(f"a table of {number}", "video", bytes(plain))
        pcm = bytearray(plain)
        at = pcm.index(b"hdlr") + 12
        pcm[at : at + 4] = b"soun"
        at = pcm.index(b"stts") + 16
        pcm[at : at + 4] = struct.pack(">I", 1)
        yield Case(f"a table of {number} audio clips", "video", bytes(pcm))
        yield Case(f"a table of {number} audio clips", "audio", bytes(pcm))
    split = bytearray(make_video(num_frames=6, muxing={"movflags": "frag_keyframe+empty_moov"}))
    start = split.index(b"trun") + 4
    split[start : start + 8] = struct.pack(">II", 0, 20_000_000)
    yield Case("a run of twenty million", "video", bytes(split))


def _large_frames() -> Iterator[Case]:
    """Yield frames beyond the limit, and frames whose container states a smaller size."""
    file = make_video(num_frames=2, width=4096, height=4096, options={"preset": "ultrafast"})
    yield Case("a frame of 16 megapixels", "video", file)
    size = struct.pack(">HH", 4096, 4096)
    yield Case("16 megapixels denied", "video", file.replace(size, struct.pack(">HH", 160, 96)))
    small = make_video(num_frames=3)
    claimed = small.replace(struct.pack(">HH", 160, 96), struct.pack(">HH", 65_535, 65_535))
    yield Case("65,535 pixels claimed", "video", claimed)


def _odd_boxes() -> Iterator[Case]:
    file = make_video(num_frames=4)
    yield Case("many boxes", "video", file[:32] + b"\0\0\0\x08free" * 600_000 + file[32:])
    deep = b""
    for _ in range(2000):
        deep = struct.pack(">I4s", len(deep) + 8, b"udta") + deep
    yield Case("nested boxes", "video", file + deep)
    yield Case("compressed header", "video", file.replace(b"mvhd", b"cmov"))
    # A file that refers FFmpeg to another file for its samples.
    other = bytearray(file)
    at = other.index(b"url ")
    other[at + 4 : at + 8] = bytes(4)
    yield Case("external data", "video", bytes(other))
    path = b"alis\0\0\0\0" + b"/etc/passwd".ljust(64, b"\0")
    parents = (b"moov", b"trak", b"mdia", b"minf", b"dinf", b"dref")
    yield Case("external data by name", "video", _exchanged(file, b"url ", path, parents))
    edits = b"elst" + struct.pack(">II", 0, 5000) + struct.pack(">IiI", 9000, 0, 65_536) * 5000
    edited = _exchanged(file, b"elst", edits, (b"moov", b"trak", b"edts"))
    yield Case("five thousand edits", "video", edited)
    mkv = make_video(num_frames=4, container="matroska")
    yield Case("unknown sizes", "video", mkv.replace(b"\x1f\x43\xb6\x75", b"\x1f\x43\xb6\x75\xff"))


def _exchanged(file: bytes, name: bytes, contents: bytes, parents: tuple[bytes, ...]) -> bytes:
    """Return the MP4 file with its first box of this name replaced."""
    start = file.index(name) - 4
    (nbytes,) = struct.unpack_from(">I", file, start)
    box = struct.pack(">I", len(contents) + 4) + contents
    changed = bytearray(file[:start] + box + file[start + nbytes :])
    for parent in parents:
        at = file.index(parent) - 4
        (old,) = struct.unpack_from(">I", file, at)
        changed[at : at + 4] = struct.pack(">I", old + len(box) - nbytes)
    return bytes(changed)


def _odd_samples() -> Iterator[Case]:
    samples = tone(0.5)
    for bad in (np.nan, np.inf, -np.inf, 1e38):
        samples[100:200] = bad
        yield Case(f"samples of {bad}", "audio", make_audio(samples, 16_000, "WAV", "FLOAT"))
    wav = make_audio(tone(0.2), 16_000)
    for channels in (0, 9, 255, 65_535):
        forged = wav[:22] + struct.pack("<H", channels) + wav[24:]
        yield Case(f"{channels} channels", "audio", forged)
    for rate_hz in (0, 1, 999, 192_001, 2**31, 2**32 - 1):
        forged = wav[:24] + struct.pack("<I", rate_hz) + wav[28:]
        yield Case(f"{rate_hz} Hz", "audio", forged)


_BOMBS: tuple[Callable[[], Iterator[Case]], ...] = (
    *(_long_silence, _many_frames, _large_frames, _odd_boxes, _odd_samples),
)


def hostile_files(seed: int, count: int) -> Iterator[tuple[str, Kind, bytes]]:
    """Yield all cases that exhaust memory or time, and random others, ``count`` in all."""
    everything = list(cases())
    bombs = [case for case in everything if case.name.startswith("bomb")]
    rest = [case for case in everything if not case.name.startswith("bomb")]
    chosen = random.Random(seed).sample(rest, count - len(bombs))
    yield from ((case.name, case.kind, case.file) for case in [*bombs, *chosen])


def attempt(case: Case) -> str:
    """Decode a case, and return the code of the typed error, or ``ok``."""
    data = memoryview(case.file).toreadonly()
    try:
        if case.kind == "audio":
            probe_audio(data, LIMITS)
            audio = decode_audio(data, 16_000, LIMITS)
            assert 0 < len(audio.samples) <= LIMITS.max_audio_s * 16_000 + 1
            assert np.abs(audio.samples).max() < 100
            return "ok"
        with open_video(data, LIMITS) as video:
            header = video.header
            assert 0 < header.num_frames <= LIMITS.max_video_frames
            assert header.width * header.height <= LIMITS.max_frame_pixels
            assert 0 < header.frames_per_s < float("inf")
            wanted = np.linspace(0, header.num_frames - 1, 12).astype(int).tolist()
            for frame in video.frames(wanted):
                assert frame.shape == (header.height, header.width, 3)
    except InvalidMedia as error:
        return error.code
    return "ok"


def _memory_kb(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{name}:\s+(\d+) kB", text)[0])


def main(first: int = 0, num_flipped: int = _NUM_FLIPPED) -> None:
    for number, case in enumerate(cases(num_flipped)):
        if number < first:
            continue
        print(json.dumps([number, case.name, case.kind]), flush=True)
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before_kb, start = _memory_kb("VmRSS"), time.process_time()
        try:
            outcome = attempt(case)
        except BaseException as error:
            outcome = f"raised {error!r}"
        took_s, more_kb = time.process_time() - start, _memory_kb("VmHWM") - before_kb
        print(json.dumps([outcome, round(took_s, 3), more_kb]), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
