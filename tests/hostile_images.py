"""Hostile image files: forged, bombs, cut off, and with flipped bits."""

from __future__ import annotations

import itertools
import random
import re
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image

from tests.images import (
    chunk,
    encoded,
    heic,
    in_mode,
    oriented,
    photo,
    png,
    riff_chunk,
    segment,
    webp,
)

Attack = tuple[str, bytes]
"""The name, which starts with the format's, and the file."""

_SIZES = (0, 1, 36, 38, 255, 2000, 16_383, 65_535)
_BOMB_NBYTES = 64 << 20


def hostile_images(seed: int, count: int) -> Iterator[Attack]:
    """Yield all `crafted` attacks, then damaged files, ``count`` in all."""
    return itertools.islice(itertools.chain(crafted(), damaged(seed)), count)


def crafted() -> Iterator[Attack]:
    """Yield one of each attack on the structure of a format."""
    for make in (_jpeg, _png_sizes, _png_chunks, _webp, _gif, _magic, _patched, _bombs_of_others):
        yield from make()


def bombs() -> Iterator[Attack]:
    """Return the crafted attacks that exhaust memory or time."""
    return ((name, data) for name, data in crafted() if "bomb" in name)


def damaged(seed: int) -> Iterator[Attack]:
    """Yield valid files with flipped bits, and others cut inside or at the edges of their parts."""
    rng = random.Random(seed)
    good = list(_good_files())
    cuts = []
    for name, data in good:
        near = {edge + offset for edge in _edges(name, data) for offset in (-1, 0, 1)}
        near |= {rng.randrange(len(data)) for _ in range(8)}
        cuts += [(f"{name}: cut at {at}", data[:at]) for at in near & set(range(len(data)))]
    rng.shuffle(cuts)
    for number in itertools.count():
        name, data = good[number % len(good)]
        broken = bytearray(data)
        # Half of the flips hit the header, which controls the decoder.
        end = len(data) if rng.random() < 0.5 else min(len(data), 200)
        for _ in range(rng.choice((1, 1, 2, 5, 20))):
            broken[rng.randrange(end)] ^= 1 << rng.randrange(8)
        yield f"{name}: flipped {number}", bytes(broken)
        yield from cuts[number : number + 1]


def _good_files() -> Iterator[Attack]:
    source = photo(37, 29)
    exif = oriented(6)
    for mode in ("RGB", "L", "CMYK"):
        image = in_mode(source, mode)
        yield f"jpeg {mode}", encoded(image, "JPEG", exif=exif, comment=b"hello")
        yield f"jpeg {mode} progressive", encoded(image, "JPEG", progressive=True)
    for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"):
        yield (
            f"png {mode}",
            encoded(in_mode(source, mode), "PNG", exif=exif, icc_profile=b"x" * 99),
        )
    yield "png interlaced", png(np.asarray(source), colours=2, interlaced=True)
    for mode, lossless in itertools.product(("RGB", "RGBA"), (True, False)):
        image = in_mode(source, mode)
        yield f"webp {mode} {lossless}", encoded(image, "WEBP", lossless=lossless)
        yield f"webp {mode} {lossless} exif", encoded(image, "WEBP", lossless=lossless, exif=exif)
    frames = {"save_all": True, "append_images": [photo(37, 29, seed=1)]}
    yield "webp animated", encoded(source, "WEBP", **frames)
    yield from _other_files()
    yield "gif P", encoded(in_mode(source, "P"), "GIF", comment=b"hello", transparency=3)
    yield "gif animated", encoded(in_mode(source, "P"), "GIF", **frames)


def _other_files() -> Iterator[Attack]:
    """Yield one valid file at least of each format that only Pillow decodes."""
    source, exif = photo(37, 29), oriented(6)[6:]
    yield "avif RGBA", encoded(in_mode(source, "RGBA"), "AVIF", exif=exif)
    yield "avif L", encoded(in_mode(source, "L"), "AVIF")
    yield "tiff RGB", encoded(source, "TIFF", exif=b"Exif\0\0" + exif)
    for compression in ("tiff_lzw", "jpeg", "packbits", "tiff_adobe_deflate"):
        yield f"tiff {compression}", encoded(source, "TIFF", compression=compression)
    yield "tiff fax", encoded(in_mode(source, "1"), "TIFF", compression="group4")
    yield "tiff big", encoded(in_mode(source, "I;16"), "TIFF", big_tiff=True)
    for mode in ("RGB", "P", "1"):
        yield f"bmp {mode}", encoded(in_mode(source, mode), "BMP")
    for form in ("bmp", "png"):
        icon = {"sizes": [(16, 16), (32, 25)], "bitmap_format": form}
        yield f"ico {form}", encoded(in_mode(source, "RGBA"), "ICO", **icon)
    yield "jpeg2000 RGB", encoded(source, "JPEG2000")
    yield "jpeg2000 stream", encoded(in_mode(source, "L"), "JPEG2000", no_jp2=True)
    for mode in ("RGB", "L", "1", "I;16"):
        yield f"pnm {mode}", encoded(in_mode(source, mode), "PPM")
    yield "pnm plain", b"P3 # a comment\n3 2\n255\n" + b"1 20 255 " * 6
    for mode, compression in (("RGB", None), ("RGBA", "tga_rle"), ("P", None), ("L", "tga_rle")):
        yield f"tga {mode}", encoded(in_mode(source, mode), "TGA", compression=compression)
    yield "heic photo", heic(source)
    yield "heic turned", heic(source, exif=b"Exif\0\0" + exif)
    yield "heic alpha", heic(in_mode(source, "RGBA"))
    yield "heic grid", heic(photo(74, 60), tile_size=32, quality=20)


def _edges(name: str, data: bytes) -> set[int]:
    """Return the beginnings of a file's parts: markers, and all parts with four-letter names."""
    if name.startswith("jpeg "):
        return {at for at in range(len(data) - 1) if data[at] == 0xFF and data[at + 1] >= 0xC0}
    if name.startswith("gif"):
        return {6, 13, *(at for at, byte in enumerate(data) if byte in (0x21, 0x2C, 0x3B))}
    letters = bytes(byte if chr(byte).isalnum() or byte == 0x20 else 0 for byte in data)
    return {at for at in range(len(data) - 4) if 0 not in letters[at : at + 4]}


def _patched() -> Iterator[Attack]:
    """Yield files of the other formats with another number at some place of their header."""
    rng = random.Random(9)
    for name, data in _other_files():
        places = range(2, min(len(data) - 8, 400))
        for _ in range(24):
            at, layout = rng.choice(places), rng.choice(("<H", ">H", "<I", ">I"))
            largest = (1 << 8 * struct.calcsize(layout)) - 1
            value = rng.choice((0, 1, 2, 255, 2000, largest // 2, largest - 8, largest))
            patched = bytearray(data)
            struct.pack_into(layout, patched, at, value)
            yield f"{name}: {layout} {value} at {at}", bytes(patched)


def _bombs_of_others() -> Iterator[Attack]:
    """Yield small files with large claims, within the limits of pixels and beyond."""
    files = {name: bytearray(data) for name, data in _other_files()}
    for side in (2000, 16_000, 60_000):
        for name, at, layout in (
            *(("bmp RGB", 18, "<II"), ("bmp P", 18, "<II"), ("tga RGB", 12, "<HH")),
            *(("tga P", 12, "<HH"), ("tga RGBA", 12, "<HH"), ("jpeg2000 stream", 8, ">II")),
        ):
            data = bytearray(files[name])
            struct.pack_into(layout, data, at, side, side)
            yield f"{name} of {side}, a bomb", bytes(data)
        for name in ("avif RGBA", "heic photo", "heic grid"):
            data = bytearray(files[name])
            for found in re.finditer(b"ispe", data):
                struct.pack_into(">II", data, found.end() + 4, side, side)
            yield f"{name} of {side}, a bomb", bytes(data)
        for name in ("tiff RGB", "tiff tiff_lzw", "tiff fax"):
            yield f"{name} of {side}, a bomb", _tiff_of(bytes(files[name]), side)
        yield f"pnm of {side}, a bomb", b"P6 %d %d 255\n" % (side, side)
        yield f"pnm plain of {side}, a bomb", b"P1 %d %d\n" % (side, side) + b"1" * 100_000
        inner = encoded(Image.new("1", (side, 40)), "PNG")
        icon = struct.pack("<HHH4BHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(inner), 22)
        yield f"ico png of {side}, a bomb", icon + inner
    pixels = Image.new("L", (2000, 2000))
    for format, options in (("AVIF", {}), ("TIFF", {"compression": "tiff_adobe_deflate"})):
        yield f"{format.lower()} of one colour, a bomb", encoded(pixels, format, **options)
    yield "jpeg2000 of one colour, a bomb", encoded(pixels, "JPEG2000")
    yield "tga runs, a bomb", struct.pack("<3B5s4HBB", 0, 0, 10, bytes(5), 0, 0, 2000, 2000, 24, 0)
    tiles = bytearray(files["jpeg2000 stream"])
    struct.pack_into(">IIIIIIII", tiles, 8, 2000, 2000, 0, 0, 1, 1, 0, 0)
    yield "jpeg2000 tiles, a bomb", bytes(tiles)


def _tiff_of(data: bytes, side: int) -> bytes:
    """Return a TIFF file with other sides; its strips stay short."""
    changed = bytearray(data)
    (at,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, at)
    for entry in range(at + 2, at + 2 + 12 * count, 12):
        (tag,) = struct.unpack_from("<H", data, entry)
        if tag in (256, 257, 278):
            struct.pack_into("<HHII", changed, entry, tag, 4, 1, side)
    return bytes(changed)


def _exif_bomb(num_entries: int, entry_nbytes: int, total_nbytes: int) -> bytes:
    """Return entries that all point at the same data, so that copies of it multiply its size."""
    entries = b"".join(
        struct.pack("<HHII", 1000 + index, 7, entry_nbytes, 8) for index in range(num_entries)
    )
    body = b"II*\0" + struct.pack("<IH", 8, num_entries) + entries
    return body.ljust(total_nbytes, b"\0")


def _jpeg() -> Iterator[Attack]:
    good = encoded(photo(37, 29), "JPEG", subsampling=0)
    progressive = encoded(photo(37, 29), "JPEG", subsampling=0, progressive=True)
    frame, scan = good.index(b"\xff\xc0"), good.index(b"\xff\xda")
    for width, height in itertools.product(_SIZES, _SIZES):
        size = struct.pack(">HH", height, width)
        yield f"jpeg size {width} x {height}", good[: frame + 5] + size + good[frame + 9 :]
    for at, values in ((2, (0, 2, 0x7F, 0xFF)), (4, (0, 2, 12, 16)), (9, (0, 1, 2, 4, 5, 255))):
        for value in values:
            data = bytearray(good)
            data[frame + at] = value
            yield f"jpeg frame byte {at} is {value}", bytes(data)
    for sampling in (0x00, 0x0F, 0x12, 0x21, 0x41, 0x44, 0x55, 0xFF):
        for component in range(3):
            data = bytearray(good)
            data[frame + 11 + 3 * component] = sampling
            yield f"jpeg sampling {sampling:x} of {component}", bytes(data)
    for marker in range(0xC0, 0xD0):
        data = bytearray(good)
        data[frame + 1] = marker
        yield f"jpeg frame of kind {marker:x}", bytes(data)
    huge = good[frame : frame + 5] + b"\x20\x00\x20\x00" + good[frame + 9 : scan]
    yield "jpeg second frame, a bomb", good[:scan] + huge + good[scan:]
    yield "jpeg first frame, a bomb", good[:frame] + huge + good[frame:]
    for length in (0, 1, 2, 3, 0x7FFF, 0xFFFF):
        for marker in (0xC4, 0xDB, 0xDD, 0xE0, 0xE1, 0xEE, 0xFE):
            bad = segment(marker, b"Exif\0\0", length)
            yield f"jpeg segment {marker:x} of {length}", good[:2] + bad + good[2:]
    yield "jpeg segments without end, a bomb", good[:2] + b"\xff\xe7\0\2" * 200_000 + good[2:]
    yield "jpeg fill bytes, a bomb", good[:2] + b"\xff" * 900_000 + good[2:]
    large = progressive.index(b"\xff\xc2") + 5
    forged = progressive[:large] + struct.pack(">HH", 2000, 2000) + progressive[large + 4 : -2]
    empty = segment(0xDA, bytes((1, 1, 0, 1, 63, 0)))
    yield "jpeg scans, a bomb", forged + empty * 100_000 + b"\xff\xd9"
    hidden = segment(0xFE, b"\xff\xd9") + empty
    yield "jpeg scans behind comments, a bomb", forged + hidden * 20_000 + b"\xff\xd9"
    yield "jpeg tables, a bomb", forged + segment(0xDD, b"\0\0") * 500_000 + b"\xff\xd9"
    bomb = segment(0xE1, b"Exif\0\0" + _exif_bomb(5000, 60_000, 65_000))
    yield "jpeg exif bomb", good[:2] + bomb + good[2:]
    yield "jpeg exif bombs, in pieces", good[:2] + bomb * 200 + good[2:]
    pieces = b"".join(segment(0xE2, b"ICC_PROFILE\0\1\xff" + b"x" * 60_000) for _ in range(255))
    yield "jpeg profile bomb", good[:2] + pieces + good[2:]
    eight = b"Photoshop 3.0\0" + b"8BIM\3\xed\0\0\xff\xff\xff\xff"
    yield "jpeg photoshop", good[:2] + segment(0xED, eight) + good[2:]
    yield "jpeg of many", good[:2] + segment(0xE2, b"MPF\0II*\0\x08\0\0\0\xff\xff") + good[2:]
    for start in (frame, scan, good.index(b"\xff\xc4"), good.index(b"\xff\xdb")):
        (length,) = struct.unpack_from(">H", good, start + 2)
        yield f"jpeg without {good[start + 1]:x}", good[:start] + good[start + 2 + length :]
    yield "jpeg scans nothing", good[: scan + 14] + b"\xff\xd9"
    yield "jpeg restarts, a bomb", good[: scan + 14] + b"\xff\xd0" * 2_000_000 + b"\xff\xd9"


def _png_sizes() -> Iterator[Attack]:
    good = png(np.asarray(photo(37, 29)), colours=2)
    rest = good[33:]
    for width, height in itertools.product((*_SIZES, 2**31 - 1, 2**32 - 1), repeat=2):
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        yield f"png size {width} x {height}", good[:8] + chunk(b"IHDR", header) + rest
    for bits, colours in itertools.product((0, 1, 2, 3, 4, 8, 16, 32, 255), range(8)):
        header = struct.pack(">IIBBBBB", 37, 29, bits, colours, 0, 0, 0)
        yield f"png {bits} bits, colours {colours}", good[:8] + chunk(b"IHDR", header) + rest
    for last in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2), (255, 255, 255)):
        header = struct.pack(">IIBBBBB", 37, 29, 8, 2, *last)
        yield f"png methods {last}", good[:8] + chunk(b"IHDR", header) + rest
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 2000, 2000, 8, 6, 0, 0, 1))
    yield "png size, a bomb", good[:8] + header + rest
    yield "png two headers, a bomb", good[:33] + header + rest
    deflated = chunk(b"IDAT", zlib.compress(bytes(_BOMB_NBYTES)))
    yield "png pixels, a bomb", good[:33] + deflated + chunk(b"IEND", b"")
    yield "png filters", good[:33] + chunk(b"IDAT", zlib.compress(b"\x09" * 9999)) + rest


def _png_chunks() -> Iterator[Attack]:
    good = png(np.asarray(photo(37, 29)), colours=2)
    palette = encoded(in_mode(photo(37, 29), "P"), "PNG")
    inflating = zlib.compress(bytes(_BOMB_NBYTES), 9)
    control = struct.pack(">IIIIIHHBB", 0, 2000, 2000, 0, 0, 1, 1, 0, 0)
    for name, bad in (
        ("profile bomb", chunk(b"iCCP", b"x\0\0" + inflating)),
        ("text bomb", chunk(b"zTXt", b"Comment\0\0" + inflating)),
        ("text bombs", chunk(b"zTXt", b"Comment\0\0" + inflating) * 20),
        ("international text bomb", chunk(b"iTXt", b"Comment\0\1\0\0\0" + inflating)),
        ("exif bomb", chunk(b"eXIf", _exif_bomb(60_000, 900_000, 1_000_000))),
        ("chunks, a bomb", chunk(b"teSt", b"") * 70_000),
        ("frames, a bomb", chunk(b"acTL", b"\xff" * 8) + chunk(b"fcTL", control)),
        ("palettes, a bomb", chunk(b"sPLT", b"x\0\x08" + bytes(999_999)) * 5),
    ):
        yield f"png {name}", good[:33] + bad + good[33:]
        yield f"png {name}, behind the pixels", good[:-12] + bad + good[-12:]
        yield f"png with palette, {name}, behind the pixels", palette[:-12] + bad + palette[-12:]
    kinds = (
        b"IDAT",
        b"PLTE",
        b"tRNS",
        b"gAMA",
        b"sBIT",
        b"pHYs",
        b"bKGD",
        b"IEND",
        b"FOUL",
        b"\0abc",
    )
    for kind, length in itertools.product(kinds, (0, 1, 2, 7, 769, 2**31 - 1, 2**32 - 1)):
        body = bytes(length) if length < 1000 else b""
        bad = chunk(kind, body, length)
        yield f"png chunk {kind!r} of {length}", good[:33] + bad + good[33:]
        yield f"png with palette, chunk {kind!r} of {length}", palette[:33] + bad + palette[33:]
    at = palette.index(b"PLTE") - 4
    (length,) = struct.unpack_from(">I", palette, at)
    for kept in (0, 1, 2, 3, 6, length - 1):
        short = chunk(b"PLTE", palette[at + 8 : at + 8 + kept])
        yield f"png palette of {kept}", palette[:at] + short + palette[at + 12 + length :]
    yield "png no palette", palette[:at] + palette[at + 12 + length :]
    yield "png no pixels", good[:33] + good[-12:]
    empty = chunk(b"IDAT", b"")
    yield "png empty pixels, a bomb", good[:33] + empty * 80_000 + good[33:]
    yield "png wrong sum", good[:29] + b"\0\0\0\0" + good[33:]


def _webp() -> Iterator[Attack]:
    lossy = encoded(photo(37, 29), "WEBP")[12:]
    lossless = encoded(in_mode(photo(37, 29), "RGBA"), "WEBP", lossless=True)[12:]
    for size in (0, 1, 36, 38, 2000, 0x3FFF):
        forged = lossy[:14] + struct.pack("<H", size) + lossy[16:]
        yield f"webp lossy width {size}", webp([forged])
        bits = struct.pack("<I", max(size - 1, 0) | 28 << 14 | 1 << 28)
        yield f"webp lossless width {size}", webp([lossless[:9] + bits + lossless[13:]])
    sizes = (37, 29), (36, 28), (38, 30), (2000, 2000), (2**24, 2**24), (2, 2)
    for (width, height), flags in itertools.product(sizes, (0, 2, 8, 16, 18, 32, 62, 255)):
        canvas = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
        extended = riff_chunk(b"VP8X", bytes((flags, 0, 0, 0)) + canvas)
        for name, inner in (("lossy", lossy), ("lossless", lossless)):
            yield f"webp {name} on {width} x {height}, {flags}", webp([extended, inner])
            moved = struct.pack("<I", 2000)[:3] * 2 + struct.pack("<I", 36)[:3]
            box = moved + struct.pack("<I", 28)[:3] + bytes(4)
            frames = [riff_chunk(b"ANIM", bytes(6)), riff_chunk(b"ANMF", box + inner) * 3]
            yield f"webp {name} frame, {width} x {height}, {flags}", webp([extended, *frames])
            exif = riff_chunk(b"EXIF", _exif_bomb(60_000, 900_000, 1_000_000))
            if flags == 8:
                yield f"webp {name} exif bomb {width}", webp([extended, inner, exif])
                many = riff_chunk(b"teSt", b"") * 100_000
                yield f"webp {name} chunks, a bomb {width}", webp([extended, many, inner])
    for length in (0, 1, 9, 2**31, 2**32 - 1):
        size = struct.pack("<I", length)
        for inner in (lossy, lossless):
            yield f"webp {inner[:4]!r} of {length}", webp([inner[:4] + size + inner[8:]])
            yield f"webp of {length}", b"RIFF" + size + b"WEBP" + inner


def _gif() -> Iterator[Attack]:
    good = encoded(in_mode(photo(37, 29), "P"), "GIF")
    image = 13 + (3 << (good[10] & 7) + 1)
    while good[image] != 0x2C:
        image += 1
    head, frame = good[:image], good[image:]
    for width, height in itertools.product(_SIZES, _SIZES):
        size = struct.pack("<HH", width, height)
        yield f"gif screen {width} x {height}", good[:6] + size + good[10:]
        control = b"!\xf9\4\x0b\0\0\3\0"  # dispose to background, transparent
        for left in (0, 1, 65_535):
            box = struct.pack("<4H", left, left, width, height)
            name = f"gif frame {width} x {height} at {left}"
            yield name + (", a bomb" * (left == 0)), head + control + frame[:1] + box + frame[9:]
    for bits in range(256):
        yield f"gif codes of {bits} bits", head + frame[:10] + bytes((bits,)) + frame[11:]
    for flags in (0x00, 0x07, 0x70, 0x7F):
        yield f"gif table {flags:x}", good[:10] + bytes((flags,)) + good[11:]
    for name, block in (
        ("comment, a bomb", b"!\xfe" + b"\1a" * 60_000 + b"\0"),
        ("comments, a bomb", b"!\xfe\1a\0" * 500_000),
        ("comment without end, a bomb", b"!\xfe" + b"\2ab" * 500_000),
        ("extensions, a bomb", b"!\xff\0" * 500_000),
        ("controls, a bomb", b"!\xf9\4\1\0\0\xff\0" * 100_000),
        ("padding, a bomb", bytes(2_000_000)),
        ("empty control", b"!\xf9\0"),
        ("short control", b"!\xf9\1\1\0"),
        ("unknown block", b"\x99"),
    ):
        yield f"gif {name}", head + block + frame
    yield "gif of extensions only", head + b"!\xfe\1a\0;"
    yield "gif without frames", head + b";"
    yield "gif pixels without end, a bomb", good[:-2] + b"\xff".ljust(256, b"\0") * 20_000


def _magic() -> Iterator[Attack]:
    heads = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\x40\0\0\0WEBP", b"GIF89a", b"GIF87a"
    bodies = {name.split(":")[0]: data for name, data in _good_files()}
    for head, (name, data) in itertools.product(heads, bodies.items()):
        yield f"magic {head[:4]!r} on {name}", head + data[len(head) :]
    for head in (
        *(
            b"",
            b"\xff",
            b"\xff\xd8",
            *heads,
            b"BM",
            b"II*\0",
            b"MM\0*",
            b"8BPS",
            b"%PDF-1.7",
            b"<svg",
        ),
        *(b"\0\0\1\0", b"\0\0\0\x1cftypavif", b"\0\0\0\x1cftypheic", b"\xff\x0a", b"P6 9 9 255 "),
    ):
        yield f"magic {head!r}", head
        yield f"magic {head!r} and zeros", head + bytes(200)
        yield f"magic {head!r} and more", head + b"\xff\xee" * 100
