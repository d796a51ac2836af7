"""Structured logs: one line for each event, with its process and request."""

from __future__ import annotations

import contextvars
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Literal, TextIO

import msgspec

log = logging.getLogger(__name__)

PACKAGE = "afferent"
"""Logger above all loggers of this package."""

LogFormat = Literal["text", "json"]

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
"""Request of the running task; `""` outside of requests."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(process: str, *, level: str, format: LogFormat) -> None:
    """Send this process's logs to stderr.

    With ``json`` every line is an object, including the output of libraries and uncaught
    exceptions.
    """
    stderr = sys.stderr.inner if isinstance(sys.stderr, JsonLines) else sys.stderr
    handler = logging.StreamHandler(stderr)
    handler.setFormatter(_JsonFormatter(process) if format == "json" else _TextFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    if format == "json":
        sys.stderr = JsonLines(stderr, process)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda hook: _log_uncaught(
            hook.exc_type, hook.exc_value or hook.exc_type(), hook.exc_traceback
        )
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # they redraw one line


def json_line(process: str, level: str, event: str, **fields: object) -> str:
    """Return an event as a line of JSON, without the end of the line."""
    found = {"time": round(time.time(), 3), "level": level, "process": process, "event": event}
    return msgspec.json.encode({**found, **fields}, enc_hook=str).decode()


def forward(lines: Iterable[str], *, process: str) -> None:
    """Print another program's output as events of ``process``."""
    out = JsonLines(sys.stderr.inner if isinstance(sys.stderr, JsonLines) else sys.stderr, process)
    for line in lines:
        out.write(line)


class JsonLines(io.TextIOBase):
    """Stderr with only JSON lines: any other line becomes an event.

    Attributes:
        inner: The stream that it writes to.
    """

    def __init__(self, inner: TextIO, process: str) -> None:
        self.inner, self._process = inner, process
        self._pending = ""

    def write(self, text: str) -> int:
        *lines, self._pending = (self._pending + text).replace("\r", "\n").split("\n")
        for line in lines:
            if line.strip():
                self.inner.write(self._as_json(line) + "\n")
        return len(text)

    def _as_json(self, line: str) -> str:
        if line.startswith("{"):
            try:
                msgspec.json.decode(line, type=dict)
            except msgspec.MsgspecError:
                pass
            else:
                return line
        return json_line(self._process, "info", line, logger="stderr")

    def flush(self) -> None:
        self.inner.flush()

    def fileno(self) -> int:
        return self.inner.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt | SystemExit):
        return
    log.critical("an exception ended this process or thread", exc_info=(kind, error, trace))


class _LastResort(logging.StreamHandler[TextIO]):
    """Handler like Python's last resort, which also prints the level and the logger."""

    def __init__(self) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and logging.getLogger(PACKAGE).handlers == [self]:
            self.stream = sys.stderr  # the current stderr, like Python's own handler
            super().emit(record)


_last_resort = _LastResort()


def show_unconfigured() -> None:
    """Show warnings with level and logger in a program that has not configured `logging`."""
    logging.getLogger(PACKAGE).addHandler(_last_resort)  # added once, even if called again


class Seldom:
    """Rate-limited logger, for warnings that clients can cause at will."""

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
        """Log a message with the number of omitted ones like it, or omit it."""
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
    """Return the caller's ``extra`` fields, and the request's id."""
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
