"""Generated malicious blocks, and the check that each one is refused or sound.

A case is identified by its name, such as ``"counts/17"``; the name is the seed of all its random
choices.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.msgpack import Ext, encode

from afferent.errors import FormatError
from afferent.store.block import codec, layout
from tests.store.trees import address, tensors

_HUGE = (2**15, 2**16, 2**31 - 1, 2**32 - 1, 2**62, 2**62 + 1, 2**63 - 1, 2**64 - 1)
_NAMES = (*layout.DTYPES, "object", "O", "<f4", ">f4", "complex64", "V8", "str", "float8", "", "f4")
_GUARD_NBYTES = 256


def good_tree(rng: random.Random) -> Any:
    """Return a small valid tree with a sample of every kind of node."""
    arrays = [
        np.zeros([rng.randrange(4) for _ in range(rng.randrange(3))], layout.DTYPES[name])
        for name in rng.sample(sorted(layout.DTYPES), 4)
    ]
    return {
        "a": arrays[0],
        "nested": [arrays[1], {"deep": arrays[2], "n": rng.getrandbits(40)}, "text", b"bytes"],
        "more": [None, True, 1.5, -3, arrays[3]],
    }


def good_block(rng: random.Random) -> bytearray:
    tree = good_tree(rng)
    block = bytearray(codec.plan(tree).nbytes)
    codec.write_into(tree, memoryview(block))
    return block


def forged(header: bytes, payload_nbytes: int = 256, *, total: int | None = None) -> bytearray:
    """Return a block with this header, valid or not."""
    start = layout.align(layout.PRELUDE.size + len(header))
    nbytes = start + payload_nbytes
    counted = nbytes if total is None else total
    prelude = layout.PRELUDE.pack(layout.MAGIC, layout.VERSION, 0, len(header), counted)
    return bytearray((prelude + header).ljust(nbytes, b"\0"))


def tensor(dtype: Any, shape: Any, *more: Any) -> Ext:
    return Ext(layout.TENSOR_CODE, encode([dtype, shape, *more]))


def header_of(block: bytes | bytearray) -> bytes:
    end = layout.PRELUDE.size + layout.PRELUDE.unpack_from(block)[3]
    return bytes(block[layout.PRELUDE.size : end])


def _bits(rng: random.Random) -> bytearray:
    block = good_block(rng)
    for _ in range(rng.randint(1, 4)):
        position = rng.randrange(layout.PRELUDE.size + len(header_of(block)))
        block[position] ^= 1 << rng.randrange(8)
    return block


def _edits(rng: random.Random) -> bytearray:
    """Delete, insert, double or swap bytes of the header, and correct the lengths."""
    block = good_block(rng)
    header = bytearray(header_of(block))
    payload_nbytes = len(block) - layout.align(layout.PRELUDE.size + len(header))
    for _ in range(rng.randint(1, 3)):
        first = rng.randrange(len(header))
        last = min(len(header), first + rng.randint(1, 6))
        piece = rng.choice([b"", rng.randbytes(rng.randint(1, 6)), header[first:last] * 2])
        header[first:last] = piece
        header = header or bytearray(b"\xc0")
    return forged(bytes(header), rng.choice([payload_nbytes, payload_nbytes, 0, 64, 256]))


def _truncated(rng: random.Random) -> bytearray:
    block = good_block(rng)
    return block[: rng.randrange(len(block) + 1)]


def _preludes(rng: random.Random) -> bytearray:
    block = good_block(rng)
    fields = list(layout.PRELUDE.unpack_from(block))
    which = rng.randrange(5)
    near = fields[which] + rng.choice([-64, -8, -1, 1, 8, 64]) if which else 0
    limits = (0, 2**16, 2**16, 2**32, 2**64)
    value = rng.choice([near, rng.choice(_HUGE), rng.randrange(1 << 16)]) % max(limits[which], 1)
    fields[which] = rng.randbytes(8) if which == 0 else value
    block[: layout.PRELUDE.size] = layout.PRELUDE.pack(*fields)
    return block


def _specs(rng: random.Random) -> bytearray:
    """Unknown dtypes, huge and negative dimensions, and offsets, which the format does not have."""

    def side() -> Any:
        return rng.choice([0, 1, 2, 4, 64, rng.choice(_HUGE), -1, 1.0, "1", None, [1], True])

    def spec() -> Ext:
        shape: Any = [side() for _ in range(rng.choice([0, 1, 1, 2, 3, 33, 70]))]
        more = [rng.choice([0, 64, 2**62]) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
        node = tensor(rng.choice(_NAMES), rng.choice([shape, [4], [rng.randrange(300)]]), *more)
        return node if rng.random() < 0.9 else Ext(rng.randint(-128, 127), bytes(node.data))

    header = encode([spec() for _ in range(rng.randint(1, 3))])
    return forged(header, rng.choice([0, 4, 64, 128, 256]))


def _shapes(rng: random.Random) -> bytearray:
    """Valid headers of all dtypes and many shapes; the payload's size is right or almost right."""
    layouts = []
    for _ in range(rng.randint(1, 8)):
        shape = [rng.choice([0, 1, 2, 3, 17]) for _ in range(rng.choice([0, 1, 2, 3, 32]))]
        shape = shape if len(shape) < 4 else [min(side, 1) for side in shape]
        layouts.append((rng.choice(sorted(layout.DTYPES)), shape))
    end = 0
    for name, shape in layouts:
        end = layout.align(end) + math.prod(shape) * layout.DTYPES[name].itemsize
    header = encode({str(n): tensor(*spec) for n, spec in enumerate(layouts)})
    block = forged(header, max(0, end + rng.choice([0, 0, 0, -64, -1, 1, 64])))
    if end and rng.random() < 0.5:
        block[-end:] = rng.randbytes(end)  # among others, bytes that are not valid booleans
    return block


def _overlaps(rng: random.Random) -> bytearray:
    """More bytes of tensors than the block has: the tensors would overlap or end outside of it."""
    sides = [rng.randrange(1, 400) for _ in range(rng.randint(2, 5))]
    fits = sum(layout.align(side) for side in sides[:-1]) + sides[-1]
    nbytes = max(0, fits - rng.choice([1, 64, sides[0], fits]))
    return forged(encode([tensor("uint8", [side]) for side in sides]), nbytes)


def _totals(rng: random.Random) -> bytearray:
    return forged(
        encode(tensor("uint8", [rng.randrange(300)])),
        rng.randrange(300),
        total=rng.choice([rng.randrange(700), rng.choice(_HUGE)]),
    )


def _counts(rng: random.Random) -> bytearray:
    """Lengths that exceed the data: of lists, maps, strings, bytes and extensions."""
    count = rng.choice([2**16, 2**20, 2**28, 2**31, 2**32 - 1])
    code = rng.choice([0xDD, 0xDF, 0xDB, 0xC6, 0xC9])
    one = bytes([code]) + count.to_bytes(4, "big") + (b"\x01" if code == 0xC9 else b"")
    filling = rng.choice([b"", b"\xc0" * rng.randrange(100), b"\xa1a\xc0" * rng.randrange(100)])
    return forged(one * rng.choice([1, 1, 2, 100, 900]) + filling)


def _nesting(rng: random.Random) -> bytearray:
    depth = rng.choice([rng.randint(60, 70), 100, 900, 1100, 100_000])
    opening = rng.choice([b"\x91", b"\x81\xa1k", b"\x81\x91"])
    return forged(opening * depth + encode(rng.choice([None, tensor("uint8", [4])])), 4)


def _keys(rng: random.Random) -> bytearray:
    """Duplicate keys, keys that are not strings, long encodings, values of unsupported types."""
    key = rng.choice([b"\xa1a", b"\xd9\x01a", b"\x01", b"\xc0", b"\x91\x01", b"\xc4\x01a", b"\x80"])
    value = rng.choice(
        [b"\x01", b"\xcc\x01", b"\xd3" + bytes(8), b"\xca" + bytes(4), b"\xd6\xff" + bytes(4)]
    )
    pairs = rng.randint(1, 3)
    return forged(bytes([0x80 + pairs]) + (key + value) * pairs, 0)


def _random(rng: random.Random) -> bytearray:
    return forged(rng.randbytes(rng.randint(1, 40)), rng.choice([0, 64]))


KINDS: dict[str, Callable[[random.Random], bytearray]] = {
    "bits": _bits,
    "edits": _edits,
    "truncated": _truncated,
    "preludes": _preludes,
    "specs": _specs,
    "shapes": _shapes,
    "overlaps": _overlaps,
    "totals": _totals,
    "counts": _counts,
    "nesting": _nesting,
    "keys": _keys,
    "random": _random,
}


def judge(block: bytes | bytearray, *, library: codec.Library = "numpy") -> bool:
    """Return whether ``block`` was accepted; fail if it was accepted and a part of it is invalid.

    The block lies between guard bytes, so a view that crosses its bounds fails the comparison.
    """
    memory = memoryview(bytearray(_GUARD_NBYTES) + block + bytearray(_GUARD_NBYTES))
    inside = memory[_GUARD_NBYTES : len(memory) - _GUARD_NBYTES]
    try:
        tree = codec.view(inside, tensors=library)
    except FormatError:
        return False
    header = header_of(block)
    end = address(inside) + layout.PRELUDE.size + len(header)
    limit = address(inside) + len(inside)
    for found in tensors(tree):
        where = found.ctypes.data if library == "numpy" else found.data_ptr()
        if found.nbytes:
            assert where >= end, "a tensor overlaps what stands before it"
            assert (where - address(inside)) % layout.ALIGNMENT == 0
            end = where + found.nbytes
            assert end <= limit, "a tensor ends outside of the block"
    # Each tree has one encoding, so an accepted header equals the header that we would write.
    planned = codec.plan(tree)
    assert planned.head[: layout.PRELUDE.size + len(header)] == bytes(
        block[: layout.PRELUDE.size + len(header)]
    )
    return True
