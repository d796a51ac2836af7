"""Loading of settings from flags, the environment and a TOML file: only this module reads them.

The order is flag, environment (``AFFERENT_PORT=9000``), file, default; `Loaded.sources` records the
origin of each value. An unknown key is an error, and so is a value of the wrong type.

An engine has settings of its own, in the same namespace as the server's. The engine is a setting
too, so it is read first::

    engine = peek("engine", flags, file=file)
    loaded = load(flags, file=file, extra=[EchoSettings])
    loaded.config.port, loaded.of(EchoSettings).echo_delay_s
"""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import Struct

from afferent.config import hints
from afferent.config.declaring import ENV_PREFIX, Setting, Settings, declared
from afferent.config.settings import IN_WORDS, ServeConfig
from afferent.config.sizes import parse_nbytes
from afferent.errors import ConfigError

S = TypeVar("S", bound=Settings)


class Loaded(Struct, frozen=True):
    """Configuration, with the origin of each key: flag, environment, file or default."""

    config: ServeConfig
    extra: tuple[Settings, ...]
    """Instances of the ``extra`` structs of `load`, in their order."""
    sources: dict[str, str]

    def of(self, struct: type[S]) -> S:
        """Return the instance of one ``extra`` struct."""
        (found,) = [one for one in self.extra if type(one) is struct]
        return found

    def values(self) -> Iterator[tuple[str, object]]:
        """Yield key and value of all structs."""
        for struct in (self.config, *self.extra):
            for key in struct.__struct_fields__:
                yield key, getattr(struct, key)


def load(
    flags: Mapping[str, str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    extra: Sequence[type[Settings]] = (),
) -> Loaded:
    """Read the settings: the server's, and those of ``extra``.

    Raises:
        ConfigError: Unknown keys and bad values; the message has a line for each, with its origin.
    """
    known = declared(ServeConfig, *extra)
    values: dict[str, Any] = {}
    sources = dict.fromkeys(known, "default")
    wrong: list[str] = []
    for origin, layer in _layers(flags, environ, file):
        for key, value in layer.items():
            if key not in known:
                wrong.append(hints.unknown(key, known, origin))
                continue
            try:
                values[key] = _convert(known[key], value, origin)
            except ConfigError as error:
                wrong.append(error.message)
            sources[key] = origin
    if wrong:
        raise ConfigError("\n".join(wrong))
    others = tuple(_build(struct, values) for struct in extra)
    return Loaded(_build(ServeConfig, values), others, sources)


def peek(
    key: str,
    flags: Mapping[str, str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Any:
    """Read one of the server's settings alone, before the ``extra`` structs are known.

    Raises:
        ConfigError: Its value is bad, or the file can't be read.
    """
    one = declared(ServeConfig)[key]
    value = one.default
    for origin, layer in _layers(flags, environ, file):
        if key in layer:
            value = _convert(one, layer[key], origin)
    return value


def _build(struct: type[S], values: Mapping[str, Any]) -> S:
    chosen = {key: values[key] for key in struct.__struct_fields__ if key in values}
    settings = struct(**chosen)
    settings.check()
    return settings


def _layers(
    flags: Mapping[str, str] | None, environ: Mapping[str, str] | None, file: Path | None
) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the values by origin; the last one wins."""
    return [
        (str(file), _read_file(file) if file is not None else {}),
        ("environment", _read_environment(os.environ if environ is None else environ)),
        ("flag", flags or {}),
    ]


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"--config {file}: can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--config {file}: this is no TOML: {error}") from error


def _read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return our part of the environment, without the variables of a Kubernetes service."""
    ours = {k.removeprefix(ENV_PREFIX): v for k, v in environ.items() if k.startswith(ENV_PREFIX)}
    if _is_of_service(ours.get("PORT", "")) or "SERVICE_HOST" in ours:
        ours = {
            key: value
            for key, value in ours.items()
            if not key.startswith(("SERVICE_", "PORT_")) and not _is_of_service(value)
        }
    return {key.lower(): value for key, value in ours.items()}


def _is_of_service(value: str) -> bool:
    return value.startswith(("tcp://", "udp://", "sctp://"))


def service_variable(environ: Mapping[str, str]) -> str:
    """Return a variable of a Kubernetes service called ``afferent`` that collides with a setting.

    It is ignored, because Kubernetes did not set it for us. Empty if there is none.
    """
    name = f"{ENV_PREFIX}PORT"
    value = environ.get(name, "")
    return f"{name}={value}" if _is_of_service(value) else ""


def _convert(one: Setting, value: Any, origin: str) -> Any:
    """Convert a value of any origin to the type of its field."""
    if one.is_table and isinstance(value, str):
        raise ConfigError(f"{one.key} are tables of the file ({origin})")
    if one.is_table and one.is_list and isinstance(value, list):
        return _tables(one, value, origin)
    read = value
    try:
        if isinstance(value, str):
            if one.is_size:
                read = parse_nbytes(value)
            elif one.is_list:
                read = [part for part in value.split(",") if part]
        return msgspec.convert(read, one.type, strict=not isinstance(read, str))
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{_as_given(one, value, origin)}: {_wanted(one, error)}") from error


def _as_given(one: Setting, value: object, origin: str) -> str:
    """Return a setting in the syntax of its origin."""
    match origin:
        case "flag":
            return one.flag if one.is_secret else f"{one.flag} {shlex.quote(str(value))}"
        case "environment":
            return one.variable if one.is_secret else f"{one.variable}={value}"
        case _:
            shown = "" if one.is_secret else f" = {value!r}"
            return f"{one.key}{shown} ({origin})"


def _wanted(one: Setting, error: Exception) -> str:
    """Return the requirement that a bad value violates."""
    if isinstance(error, ConfigError):  # from `parse_nbytes`
        return error.message
    words = _in_words(error)
    return words if words in IN_WORDS.values() else f"must be {one.demand}"


def _tables(one: Setting, tables: list[Any], origin: str) -> tuple[Any, ...]:
    """Convert each table by itself, so that the message names all bad ones."""
    kind, _ = get_args(get_args(one.type)[0])
    found, wrong = [], []
    for number, table in enumerate(tables, start=1):
        try:
            found.append(msgspec.convert(table, kind))
        except msgspec.ValidationError as error:
            name = table.get("name") if isinstance(table, dict) else None
            which = repr(name) if isinstance(name, str) else f"number {number}"
            what, _, where = str(error).partition(" - at `$.")
            part = f"{where.rstrip('`')}: " if where else ""
            wrong.append(f"{one.key.removesuffix('s')} {which} ({origin}): {part}{_in_words(what)}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return tuple(found)


def _in_words(error: object) -> str:
    """Return a validation error in words, if it would show a pattern."""
    said = str(error)
    return next((words for pattern, words in IN_WORDS.items() if repr(pattern) in said), said)
