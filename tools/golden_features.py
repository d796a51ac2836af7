"""Compare the recorded features of a corpus of small media files, or record them.

python -m tools.golden_features            compares
python -m tools.golden_features --write    encodes missing files, and records features

A record is refused unless `PREPROCESSING_VERSION` rose with a change of pixels, or libraries of
other versions made it. `docs/adr/0040` explains the next step for each message.
"""

from __future__ import annotations

import argparse
import sys

from afferent.media.families.registry import PREPROCESSING_VERSION
from tests.media import golden_features as golden


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--write", action="store_true", help="record what is made here")
    is_writing = parser.parse_args().write
    if is_writing:
        _encode_missing()
    made = golden.decoded_features() | golden.family_features() | golden.processor_features()
    before = golden.recorded()
    if before is not None:
        problem, may_record = golden.verdict(
            golden.compare(made, *before),
            before[0],
            version=PREPROCESSING_VERSION,
            here=golden.libraries(),
        )
        if not problem:
            print("all features are as recorded")
            return 0
        if not (is_writing and may_record):
            print(problem, file=sys.stderr)
            return 1
    if is_writing:
        golden.save(made)
        print(f"{len(made)} cases recorded")
        return 0
    print("there is no record for this kind of machine: run this with --write", file=sys.stderr)
    return 1


def _encode_missing() -> None:
    golden.MEDIA.mkdir(parents=True, exist_ok=True)
    for name, data in golden.media_files():
        path = golden.MEDIA / name
        if not path.exists():
            path.write_bytes(data)


if __name__ == "__main__":
    sys.exit(main())
