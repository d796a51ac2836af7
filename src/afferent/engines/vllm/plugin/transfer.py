"""Copies between the arena and the model's device that the engine does not wait for.

A plain copy waits until the device has done all that it was told before. A step would have such
copies for each item, and the device would be idle while the engine prepares what comes next.
"""

from __future__ import annotations

import time
from typing import Any

import torch


def upload(view: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a private copy on the device.

    The memory of ``view`` may be reused as soon as this returns: on the way to a GPU the bytes are
    in page-locked memory, which torch keeps until the GPU has read it.
    """
    if device.type != "cuda":
        return view.clone().to(device)
    return view.pin_memory().to(device, non_blocking=True)


class Download:
    """Copies of rows in this machine's memory, which `wait` completes.

    Attributes:
        rows: The copies, to be read after `wait`.
    """

    def __init__(self, rows: list[torch.Tensor], started: Stopwatch) -> None:
        """Begin the copies.

        Args:
            started: From before the rows' computation began; it is stopped here.
        """
        started.stop()
        self.rows = [_begun(each.detach()) for each in rows]
        self._computed, self._copied = started, Stopwatch(rows[0].device)
        self._copied.stop()

    def wait(self) -> float:
        """Wait for the copies; return the seconds that the rows' computation took."""
        self._copied.wait()
        return self._computed.wait()


def _begun(rows: torch.Tensor) -> torch.Tensor:
    if rows.device.type != "cuda":
        return rows.cpu().clone()
    copy = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    return copy.copy_(rows, non_blocking=True)


class Stopwatch:
    """Time from the creation to `stop`: on a GPU, in the order of its own work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._end = self._mark()

    def stop(self) -> None:
        self._end = self._mark()

    def wait(self) -> float:
        """Wait until the work that was begun before `stop` has ended; return the seconds."""
        if self._device.type != "cuda":
            return float(self._end - self._start)
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.monotonic()
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record()
        return mark
