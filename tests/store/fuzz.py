"""Feeds the readers of foreign bytes with generated ones: ``make fuzz ARGS="--minutes 60"``.

Three targets take turns: blocks (`codec.view`), messages to the store daemon (`request_decoder`)
and frames (`FrameCutter`). A case is known by its name, such as ``"messages/1/5000"``, which is the
seed of all its choices: ``--case NAME`` runs it again. The first failure ends the run.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Union

import msgspec
from msgspec import inspect

from afferent.errors import FormatError
from afferent.runtime import wire
from afferent.store.protocol.replies import request_decoder
from afferent.store.protocol.requests import VERBS
from afferent.types import decode, encode
from tests.store import attacks

_BATCH = 500
_SLOW_S = 2.0
_MAX_FRAME_NBYTES = 1 << 12
_REQUEST = inspect.type_info(Union[VERBS])  # noqa: UP007


def fuzz_blocks(rng: random.Random) -> bool:
    kind = rng.choice(sorted(attacks.KINDS))
    library: Any = "torch" if "torch" in sys.modules and rng.random() < 0.2 else "numpy"
    return attacks.judge(attacks.KINDS[kind](rng), library=library)


def fuzz_messages(rng: random.Random) -> bool:
    """A damaged message is refused, or is a message that survives its own way back."""
    data = bytearray(encode(_value(_REQUEST, rng)))
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        _damage(data, rng)
    try:
        message = decode(request_decoder, bytes(data))
    except FormatError:
        return False
    assert decode(request_decoder, encode(message)) == message
    return True


def fuzz_frames(rng: random.Random) -> bool:
    """However the bytes arrive, the same frames come out, up to the first that is too long."""
    frames = [rng.randbytes(rng.choice([0, 1, 5, 300, 4096])) for _ in range(rng.randrange(6))]
    data = bytearray(b"".join(wire.pack_frame(frame) for frame in frames))
    is_damaged = rng.random() < 0.5
    if is_damaged:
        _damage(data, rng)
    whole, at_once = _cut([bytes(data)])
    edges = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(20)))
    chunks = [
        bytes(data[first:last])
        for first, last in zip([0, *edges], [*edges, len(data)], strict=True)
    ]
    assert (whole, at_once) == _cut(chunks)
    assert all(len(frame) <= _MAX_FRAME_NBYTES for frame in whole)
    if not is_damaged:
        assert (whole, at_once) == (frames, True)
    return at_once


TARGETS: dict[str, Callable[[random.Random], bool]] = {
    "blocks": fuzz_blocks,
    "messages": fuzz_messages,
    "frames": fuzz_frames,
}


def _cut(chunks: list[bytes]) -> tuple[list[bytes], bool]:
    """The frames, and whether all were short enough."""
    cutter, found = wire.FrameCutter(max_nbytes=_MAX_FRAME_NBYTES), []
    try:
        for chunk in chunks:
            found.extend(cutter.feed(chunk))
    except FormatError:
        return found, False
    return found, True


def _damage(data: bytearray, rng: random.Random) -> None:
    first = rng.randrange(len(data) + 1)
    match rng.randrange(5):
        case 0 if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 1:
            del data[first:]
        case 2:
            data[first : first + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
        case 3:  # counts that announce more than there is
            data[first:first] = rng.choice([b"\xdd", b"\xdf", b"\xc6", b"\xdb"]) + b"\xff" * 4
        case _:
            data[first:first] = b"\x91" * rng.choice([1, 100, 2000])


def _value(kind: Any, rng: random.Random) -> Any:
    """Something that follows the schema, or nearly: limits of lengths and sizes are overstepped."""
    match kind:
        case inspect.UnionType():
            return _value(rng.choice(kind.types), rng)
        case inspect.StructType():
            fields = {field.name: _value(field.type, rng) for field in kind.fields}
            return kind.cls(**fields)
        case inspect.ListType():
            return [_value(kind.item_type, rng) for _ in range(rng.choice([0, 1, 2, 5]))]
        case inspect.TupleType():
            return tuple(_value(item, rng) for item in kind.item_types)
        case inspect.DictType():
            return {_value(kind.key_type, rng): _value(kind.value_type, rng)}
        case inspect.EnumType():
            return rng.choice(list(kind.cls))
        case inspect.LiteralType():
            return rng.choice(kind.values)
        case inspect.IntType():
            return rng.choice([0, 1, rng.getrandbits(16), 2**48, 2**62, 2**62 + 1, -1])
        case inspect.BytesType():
            return rng.randbytes(rng.choice([0, 31, 32, 32, 32, 33, 4096, 4097]))
        case inspect.StrType():
            return "x" * rng.choice([0, 1, 64, 65])
        case inspect.FloatType():
            return rng.uniform(-1, 1)
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.RawType():
            return msgspec.Raw(b"\xc0")
        case _:
            return None


def run_case(name: str) -> bool:
    return TARGETS[name.partition("/")[0]](random.Random(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1, help="other seeds, other cases")
    parser.add_argument("--case", help="run one case again")
    args = parser.parse_args()
    if args.case:
        print("accepted" if run_case(args.case) else "refused")
        return 0
    try:
        import torch  # noqa: F401  (so that blocks are read as its tensors too)
    except ImportError:
        print("torch is not installed: its tensors are left out")
    return _run(args.minutes * 60, args.seed)


def _run(seconds: float, seed: int) -> int:
    start = shown = time.monotonic()
    accepted = dict.fromkeys(TARGETS, 0)
    number, slowest_s, slowest = 0, 0.0, ""
    print(f"seed {seed}: cases {'|'.join(TARGETS)}/{seed}/0 and on")
    while time.monotonic() - start < seconds:
        for target in TARGETS:
            for name in (f"{target}/{seed}/{n}" for n in range(number, number + _BATCH)):
                began = time.process_time()  # a busy machine is not a slow case
                try:
                    accepted[target] += run_case(name)
                except Exception:
                    traceback.print_exc()
                    print(f'\nFAILED: case {name}; again with ARGS="--case {name}"')
                    return 1
                took_s = time.process_time() - began
                if took_s > slowest_s:
                    slowest_s, slowest = took_s, name
        number += _BATCH
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{shown - start:6.0f} s  {number * len(TARGETS):,} cases", flush=True)
    total = number * len(TARGETS)
    print(f"{total:,} cases in {time.monotonic() - start:.0f} s, none failed")
    for target, count in accepted.items():
        print(f"  {target:<10}{number:>12,} cases, {count:,} accepted and sound")
    print(f"  slowest: {slowest}, {slowest_s * 1e3:.0f} ms")
    return 0 if slowest_s < _SLOW_S else 1


if __name__ == "__main__":
    raise SystemExit(main())
