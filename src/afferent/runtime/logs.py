"""Structured logs: one line an event, with the process and the request that it belongs to."""

from __future__ import annotations

import contextvars
import logging
import sys
import time
from collections.abc import Callable
from typing import Literal

import msgspec

LogFormat = Literal["text", "json"]

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
"""The request that the running task works for; `""` outside of requests."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(process: str, *, level: str, format: LogFormat) -> None:
    """Send this process's logs to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if format == "json" else _TextFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


class Seldom:
    """Warnings that others can cause as often as they like: each is logged once a while."""

    def __init__(
        self,
        log: logging.Logger,
        *,
        period_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._period_s, self._clock = log, period_s, clock
        self._said: dict[str, tuple[float, int]] = {}

    def warning(self, message: str, **fields: object) -> None:
        """Log it, with how many like it were left out since the last; or leave it out."""
        now_s = self._clock()
        next_s, num_left_out = self._said.get(message, (now_s, 0))
        if now_s < next_s:
            self._said[message] = (next_s, num_left_out + 1)
            return
        self._said[message] = (now_s + self._period_s, 0)
        if num_left_out:
            fields["left_out"] = num_left_out
        self._log.warning(message, extra=fields)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """What the caller passed as ``extra``, and the request's id."""
    fields = {k: v for k, v in vars(record).items() if k not in _STANDARD}
    if "request_id" not in fields and (current := request_id.get()):
        fields["request_id"] = current
    return fields


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f"  {key}={value}" for key, value in _fields(record).items())
        line = (
            f"{clock}.{int(record.msecs):03d} {record.levelname:<7} "
            f"{self._process:<12} {record.getMessage()}{fields}"
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(event, enc_hook=str).decode()
