"""Hostile PDF files: forged, bombs, encrypted, cut off, and with flipped bytes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from tests import pdfs
from tests.images import photo

Attack = tuple[str, bytes]
"""The name and the file."""

_CATALOGUE = b"<</Type/Catalog/Pages 2 0 R>>"
_ONE_PAGE = b"<</Type/Pages/Kids[3 0 R]/Count 1>>"


def hostile_pdfs(seed: int, count: int) -> Iterator[Attack]:
    """Yield all `crafted` attacks, then damaged files, ``count`` in all."""
    return itertools.islice(itertools.chain(crafted(), damaged(seed)), count)


def crafted() -> Iterator[Attack]:
    """Yield one of each attack on the structure of a PDF."""
    yield "encrypted", pdfs.encrypted()
    for version, revision in ((0, 0), (4, 4), (5, 6), (99, 99), (-1, 2)):
        lock = b"/Encrypt<</Filter/Standard/V %d/R %d/Length 99999/O()/U()/P 0>>/ID[()()]"
        page = b"<</Type/Page/Parent 2 0 R>>"
        data = pdfs.written([_CATALOGUE, _ONE_PAGE, page], trailer=lock % (version, revision))
        yield f"encrypted: V {version}", data
    yield from _trees()
    yield from _boxes()
    yield from _bombs()
    yield from _tables()
    yield "empty", b""
    yield "mark alone", b"%PDF-1.7"
    yield "mark at the end", b" " * 2000 + b"%PDF-1.7"


def _trees() -> Iterator[Attack]:
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]>>"
    for count in (b"2147483647", b"-1", b"99999999999999999999", b"1e9", b"(many)"):
        pages = b"<</Type/Pages/Kids[3 0 R]/Count %b>>" % count
        yield f"count {count!r}", pdfs.written([_CATALOGUE, pages, page])
    loops = {
        "tree in itself": [_CATALOGUE, b"<</Type/Pages/Kids[2 0 R]/Count 1>>"],
        "tree of the catalogue": [_CATALOGUE, b"<</Type/Pages/Kids[1 0 R 2 0 R]/Count 9>>"],
        "trees in each other": [
            _CATALOGUE,
            b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
            b"<</Type/Pages/Kids[2 0 R]/Parent 3 0 R/Count 1>>",
        ],
        "no pages": [_CATALOGUE, b"<</Type/Pages/Kids[]/Count 0>>"],
        "reference to itself": [b"1 0 R"],
        "contents in themselves": [
            _CATALOGUE,
            _ONE_PAGE,
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Contents 4 0 R>>",
            b"[4 0 R 4 0 R]",
        ],
    }
    for name, objects in loops.items():
        yield name, pdfs.written(objects)
    deep = [_CATALOGUE]
    deep += [b"<</Type/Pages/Kids[%d 0 R]/Count 1>>" % number for number in range(3, 2000)]
    yield "deep tree", pdfs.written([*deep, page])
    for depth in (500, 100_000):
        nested = b"[" * depth + b"]" * depth
        yield (
            f"{depth} arrays",
            pdfs.written([_CATALOGUE, _ONE_PAGE, page[:-2] + b"/X%b>>" % nested]),
        )
    form = b"/Type/XObject/Subtype/Form/BBox[0 0 9 9]/Resources<</XObject<</X 4 0 R>>>>"
    shown = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Contents 4 0 R"
    shown += b"/Resources<</XObject<</X 4 0 R>>>>>>"
    objects = [_CATALOGUE, _ONE_PAGE, shown, pdfs.stream(b"/X Do " * 40, form)]
    yield "form in itself", pdfs.written(objects)
    doubling = [_CATALOGUE, _ONE_PAGE, shown]
    for number in range(5, 40):
        inner = form.replace(b"4 0 R", b"%d 0 R" % number)
        doubling.append(pdfs.stream(b"/X Do /X Do ", inner))
    yield "forms that double", pdfs.written([*doubling, pdfs.stream(b"0 0 9 9 re f", form)])


def _boxes() -> Iterator[Attack]:
    for box in (
        *(b"[0 0 1e9 1e9]", b"[0 0 2000000000 2000000000]", b"[0 0 0.0001 0.0001]"),
        *(b"[0 0 1 14400]", b"[9 9 0 0]", b"[0 0 -5 -5]", b"[0 0]", b"(box)", b"[/a /b /c /d]"),
        *(b"[-2147483648 -2147483648 2147483647 2147483647]", b"[0 0 9 9]/UserUnit 1000000"),
    ):
        yield f"box {box!r}", pdfs.of_contents([b"0 0 9 9 re f"], box=box)


def _bombs() -> Iterator[Attack]:
    yield "packed spaces", pdfs.of_contents([b" " * (64 << 20)], is_packed=True)
    yield "packed saves", pdfs.of_contents([b"q " * (4 << 20)], is_packed=True)
    curve = b"0 0 m 0 200 200 0 200 200 c 200 0 0 200 0 0 c b*\n"
    yield "many curves", pdfs.of_contents([curve * 200_000], is_packed=True)
    yield (
        "much text",
        pdfs.of_contents(
            [b"BT /F 1 Tf " + b"(%b) Tj " % (b"word " * 30) * 20_000 + b"ET"], is_packed=True
        ),
    )
    dashes = b"[0.0001 0.0001] 0 d 0 0 m 200 200 l S\n" * 50
    yield "tiny dashes", pdfs.of_contents([dashes])
    for name, entries in (
        ("wide image", b"/Width 65535/Height 65535/BitsPerComponent 8/ColorSpace/DeviceRGB"),
        ("long image", b"/Width 2147483647/Height 1/BitsPerComponent 16/ColorSpace/DeviceCMYK"),
        ("negative image", b"/Width -5/Height 99999999/BitsPerComponent 1/ImageMask true"),
        ("JPEG image", b"/Width 9000/Height 9000/Filter/DCTDecode/BitsPerComponent 8"),
        ("JPEG 2000 image", b"/Width 60000/Height 60000/Filter/JPXDecode"),
        ("JBIG2 image", b"/Width 60000/Height 60000/Filter/JBIG2Decode/BitsPerComponent 1"),
        ("fax image", b"/Width 60000/Height 60000/Filter/CCITTFaxDecode/BitsPerComponent 1"),
        ("image of many filters", b"/Filter[%b]" % (b"/FlateDecode" * 2000)),
    ):
        kind = b"/Type/XObject/Subtype/Image"
        page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]/Contents 5 0 R"
        page += b"/Resources<</XObject<</X 4 0 R>>>>>>"
        image = pdfs.stream(b"\0" * 4000, kind + entries, is_packed="Filter" not in str(entries))
        drawn = pdfs.stream(b"q 99 0 0 99 0 0 cm /X Do Q")
        yield name, pdfs.written([_CATALOGUE, _ONE_PAGE, page, image, drawn])
    tile = b"/Type/Pattern/PatternType 1/PaintType 1/TilingType 1/BBox[0 0 1 1]"
    tile += b"/XStep 0.001/YStep 0.001/Resources<<>>"
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 999 999]/Contents 5 0 R"
    page += b"/Resources<</Pattern<</P 4 0 R>>>>>>"
    filled = pdfs.stream(b"/Pattern cs /P scn 0 0 999 999 re f")
    tiles = pdfs.stream(b"0 0 1 1 re f", tile)
    yield "tiny tiles", pdfs.written([_CATALOGUE, _ONE_PAGE, page, tiles, filled])
    program = b"{" * 3000 + b"}" * 3000
    function = pdfs.stream(program, b"/FunctionType 4/Domain[0 1 0 1]/Range[0 1 0 1 0 1]")
    shade = b"<</ShadingType 1/ColorSpace/DeviceRGB/Function 4 0 R>>"
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 999 999]/Contents 5 0 R"
    page += b"/Resources<</Shading<</S %b>>>>>>" % shade
    yield (
        "deep function",
        pdfs.written([_CATALOGUE, _ONE_PAGE, page, function, pdfs.stream(b"/S sh")]),
    )
    slow = b"{" + b"dup mul sqrt sin cos " * 20_000 + b"}"
    function = pdfs.stream(slow, b"/FunctionType 4/Domain[0 1 0 1]/Range[0 1]")
    yield (
        "slow function",
        pdfs.written([_CATALOGUE, _ONE_PAGE, page, function, pdfs.stream(b"/S sh")]),
    )


def _tables() -> Iterator[Attack]:
    good = pdfs.of_texts(["a", "b"])
    at = good.rindex(b"startxref")
    for place in (b"0", b"-1", b"99999999999", b"%d" % good.index(b"trailer")):
        yield f"table at {place!r}", good[:at] + b"startxref\n%b\n%%%%EOF" % place
    table = int(good[at:].split()[1])
    looped = good.replace(b"/Root 1 0 R", b"/Root 1 0 R/Prev %d" % table)
    yield "table before itself", looped
    yield "huge table", good.replace(b"xref\n0 8", b"xref\n0 2147483647")
    yield "huge size", good.replace(b"/Size 8", b"/Size 2147483647")
    wide = b"/Type/XRef/Size 2147483647/W[8 8 8]/Index[0 2147483647]/Root 1 0 R"
    stream = (
        b"%PDF-1.7\n1 0 obj\n" + pdfs.stream(b"\1" * 240, wide) + b"\nendobj\nstartxref\n9\n%%EOF"
    )
    yield "table as a stream", stream
    objects = b"/Type/ObjStm/N 2147483647/First 2147483647"
    yield "objects in a stream", pdfs.written([_CATALOGUE, pdfs.stream(b"1 0 2 0", objects)])


def damaged(seed: int) -> Iterator[Attack]:
    """Yield valid files with changed bytes and numbers, and others cut anywhere."""
    rng = random.Random(seed)
    good = [
        pdfs.of_texts(["Tea costs 3 euros.", "Coffee", "Milk"]),
        pdfs.of_images([photo(90, 70, 1), photo(70, 90, 2)]),
        pdfs.of_contents([b"0 0 1 rg 20 20 90 90 re f BT /F 9 Tf (x) Tj ET"] * 2, is_packed=True),
    ]
    for number in itertools.count():
        data = bytearray(good[number % len(good)])
        if rng.random() < 0.25:
            at = rng.randrange(len(data))
            yield f"damaged {number}: cut at {at}", bytes(data[:at])
            continue
        for _ in range(rng.choice((1, 4, 32))):
            at = rng.randrange(9, len(data))
            if rng.random() < 0.5 and bytes(data[at : at + 1]).isdigit():
                data[at : at + 1] = rng.choice((b"9999999", b"-1", b"0", b"2147483648"))
            else:
                data[at] = rng.randrange(256)
        yield f"damaged {number}", bytes(data)
