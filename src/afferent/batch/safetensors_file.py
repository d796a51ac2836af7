"""Writer of one safetensors file for a batch, tensor by tensor, without torch.

The format begins with a table of all tensors, which is known only at the end. So tensors are
written to temporary files beside the target, and copied behind the table then: those of the widest
type first, so that each is aligned as torch requires, without holes, which the format forbids.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import numpy as np

from afferent.errors import ConfigError

_DTYPES: Final = {"bool": "BOOL"} | {
    f"{name}{bits}": f"{letter}{bits}"
    for name, letter in (("uint", "U"), ("int", "I"), ("float", "F"))
    for bits in (8, 16, 32, 64)
}
_WIDTHS: Final = (8, 4, 2, 1)
_ALIGNMENT: Final = 8
_PIECE_NBYTES: Final = 1 << 24
_MAX_TABLE_NBYTES: Final = 100_000_000
"""Limit of the readers of safetensors."""
_LONG_OFFSETS: Final = (10**15, 10**15)
"""Offsets for the estimate of the table's length: they are known only at the end."""


def check_name(name: str) -> None:
    """Check that a name can be in a safetensors file, whose names are UTF-8.

    Raises:
        ConfigError: It can't.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{name!r} can't be a name in a safetensors file, because it is not UTF-8: rename it"
        ) from error


class SafetensorsFile:
    """New safetensors file; it appears under its name when it is complete.

    Invariants: memory holds the table only, never the tensors of a batch.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Begin a file.

        Args:
            path: Its path; an existing file is replaced at the end.
            metadata: Texts for its ``__metadata__``.

        Raises:
            ConfigError: Its folder can't be written to, or a text is not UTF-8.
        """
        for text in metadata.values():
            check_name(text)
        self._path, self._metadata = path, dict(metadata)
        self._entries: dict[str, _Entry] = {}
        self._table_nbytes = len(msgspec.json.encode({"__metadata__": self._metadata}))
        self._nbytes = dict.fromkeys(_WIDTHS, 0)
        with contextlib.ExitStack() as opened:
            try:
                self._data = {
                    width: opened.enter_context(tempfile.TemporaryFile(dir=path.parent))
                    for width in _WIDTHS
                }
            except OSError as error:
                raise ConfigError(f"--out {path}: {error.strerror}") from error
            self._opened = opened.pop_all()

    def add(self, name: str, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Write tensors as ``name/tensor``.

        Raises:
            ConfigError: The name is not UTF-8, the file has such a tensor already, or its table
                would be too long for readers.
            OSError: The disk is full.
        """
        check_name(name)
        for key in tensors:
            if f"{name}/{key}" in self._entries:
                raise ConfigError(f"{name}/{key} is in the file already: name each item once")
        entries = {
            f"{name}/{key}": _row(tensor.dtype.name, tensor.shape, _LONG_OFFSETS)
            for key, tensor in tensors.items()
        }
        self._table_nbytes += len(msgspec.json.encode(entries))
        if self._table_nbytes > _MAX_TABLE_NBYTES:
            raise ConfigError(
                f"{len(self._entries):,} tensors fill the table of a safetensors file, which has "
                f"at most {_MAX_TABLE_NBYTES:,} bytes: write the items to several files"
            )
        for key, tensor in tensors.items():
            data, width = np.ascontiguousarray(tensor), tensor.dtype.itemsize
            self._data[width].write(data.tobytes())
            start = self._nbytes[width]
            self._nbytes[width] = start + data.nbytes
            self._entries[f"{name}/{key}"] = _Entry(data.dtype.name, data.shape, start)

    def finish(self) -> None:
        """Write the table and the tensors under the file's name.

        Raises:
            OSError: The disk is full.
        """
        table = msgspec.json.encode(self._table())
        table += b" " * (-len(table) % _ALIGNMENT)
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with partial.open("wb") as file:
                file.write(len(table).to_bytes(8, "little") + table)
                for width in _WIDTHS:
                    self._data[width].seek(0)
                    shutil.copyfileobj(self._data[width], file, _PIECE_NBYTES)
            partial.replace(self._path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                partial.unlink()

    def _table(self) -> dict[str, Any]:
        starts, start = {}, 0
        for width in _WIDTHS:
            starts[width] = start
            start += self._nbytes[width]
        table: dict[str, Any] = {"__metadata__": self._metadata}
        for name, entry in self._entries.items():
            width = np.dtype(entry.dtype).itemsize
            begin = starts[width] + entry.start
            end = begin + width * math.prod(entry.shape)
            table[name] = _row(entry.dtype, entry.shape, (begin, end))
        return table

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self._opened.close()


def _row(dtype: str, shape: tuple[int, ...], offsets: tuple[int, int]) -> dict[str, Any]:
    return {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": offsets}


@dataclass(frozen=True, slots=True)
class _Entry:
    """Tensor that begins at ``start`` among those of its width."""

    dtype: str
    shape: tuple[int, ...]
    start: int
