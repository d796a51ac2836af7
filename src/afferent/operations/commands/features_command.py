"""``afferent features``: features of files, into a safetensors file or a running server's store."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from afferent.batch.feature_maker import Features
from afferent.batch.item_features import FailedItem, ItemFeatures, Progress
from afferent.batch.safetensors_file import SafetensorsFile, check_name
from afferent.batch.shared_item import SharedItem
from afferent.batch.workplace import HERE, POOL
from afferent.errors import ConfigError
from afferent.operations.commands import daemons
from afferent.types import Modality

STORE: Final = "store"
_SUFFIX: Final = ".safetensors"
_REPORT_S: Final = 1.0

_Made = ItemFeatures | SharedItem


def run(args: argparse.Namespace) -> int:
    """Make the features of all files; return 1 if one of them failed.

    Raises:
        ConfigError: An argument is wrong.
        UnsupportedModel: The model's own processor is needed, and can't be used here.
    """
    files = [str(path) for path in _files(args.files)]
    repeated = [file for file, number in Counter(files).items() if number > 1]
    if repeated:
        raise ConfigError(f"{repeated[0]} is given twice: name each file once")
    modality = Modality(args.modality) if args.modality else None
    watch = _Watch(len(files))
    if args.out == STORE:
        if args.form == "hf":
            raise ConfigError("--form hf: a store has compact features")
        address = daemons.choose(daemons.find(), args.address).address
        with _open(args, address) as features:
            for shared in features.share_many(files, modality=modality, progress=watch.show):
                watch.note(shared)
        return watch.summary(f"the store {address}")
    if not args.out.endswith(_SUFFIX):
        raise ConfigError(f"--out {args.out}: must end in {_SUFFIX}, or be {STORE!r}")
    for file in files:
        check_name(file)
    target = Path(args.out)
    with _open(args, HERE if args.here else POOL) as features:
        metadata = {"form": args.form, "made_by": features.made_by, "model": str(features.folder)}
        with SafetensorsFile(target, metadata) as out:
            made_all = features.make_many(
                files, form=args.form, modality=modality, progress=watch.show
            )
            for file, made in zip(files, made_all, strict=True):
                watch.note(made)
                if isinstance(made, ItemFeatures):
                    out.add(file, made)
    return watch.summary(str(target))


def _open(args: argparse.Namespace, where: str) -> Features:
    return Features(
        args.model,
        where=where,
        backend=args.backend,
        revision=args.revision,
        num_workers=args.workers if where == POOL else None,
    )


def _files(given: list[str]) -> Iterator[Path]:
    """Yield the given files, and the files in given folders, in order.

    Raises:
        ConfigError: There is none.
    """
    num_found = 0
    for each in given:
        path = Path(each)
        for found in sorted(path.iterdir()) if path.is_dir() else [path]:
            if path != found and not found.is_file():
                continue
            num_found += 1
            yield found
    if not num_found:
        raise ConfigError(f"{given[0]} has no files")


class _Watch:
    """Progress on standard error, and the files that failed."""

    def __init__(self, num_files: int) -> None:
        self._num_files, self._start_s = num_files, time.monotonic()
        self._shown_s = self._start_s
        self._failed: list[FailedItem] = []
        self._nbytes = self._num_made = 0
        self._is_terminal = sys.stderr.isatty()

    def note(self, made: _Made | FailedItem) -> None:
        """Count a result."""
        if isinstance(made, FailedItem):
            self._failed.append(made)
        else:
            self._num_made += 1
            self._nbytes += made.nbytes

    def show(self, progress: Progress) -> None:
        """Show the progress, once a second."""
        now_s = time.monotonic()
        is_last = progress.num_done == self._num_files
        if now_s - self._shown_s < _REPORT_S and not (is_last and self._is_terminal):
            return
        self._shown_s = now_s
        rate = progress.num_done / max(now_s - self._start_s, 1e-6)
        line = f"{progress.num_done} of {self._num_files} files, {rate:.0f}/s"
        if progress.num_failed:
            line += f", {progress.num_failed} failed"
        if self._is_terminal:
            end = "\n" if is_last else ""
            print(f"\r\x1b[K{line}", end=end, file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def summary(self, target: str) -> int:
        """Print the files that failed and a summary; return the exit status."""
        for failed in self._failed:
            print(f"failed: {failed.source}: {failed.error.message}", file=sys.stderr)
        seconds = time.monotonic() - self._start_s
        print(
            f"{self._num_made} of {self._num_files} files in {seconds:.1f} s: "
            f"{self._nbytes:,} bytes of features in {target}"
        )
        return 1 if self._failed else 0
