"""Declaration of settings: each is a field of a `Settings` struct, made by `setting`.

    class EchoSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
        echo_delay_s: float = setting(0.5, "before each token", Group.ENGINE, gt=0)

From that line follow the flag ``--echo-delay-s``, the variable ``AFFERENT_ECHO_DELAY_S``, the key
``echo_delay_s`` of the file, and a line each of ``afferent config show``, the help and the page.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from afferent.config.sizes import format_nbytes
from afferent.errors import ConfigError

ENV_PREFIX = "AFFERENT_"

RESERVED = frozenset({"config", "help"})
"""Flags of the commands themselves."""

T = TypeVar("T")


class Group(StrEnum):
    """Groups of settings in help and documentation, in their order: tuning and limits last."""

    COMMON = "common"
    ENGINE = "engine"
    MEMORY = "memory"
    PREPROCESSING = "preprocessing"
    FETCHING = "fetching"
    TIER = "tier"
    LOGGING = "logging"
    TIMEOUTS = "timeouts"
    LIMITS = "limits"

    @property
    def about(self) -> str:
        return _ABOUT[self]


_ABOUT = {
    Group.COMMON: "what most servers set",
    Group.ENGINE: "what the engine is told",
    Group.MEMORY: "how the arena and other memory is divided",
    Group.PREPROCESSING: "how media become features",
    Group.FETCHING: "media by URL, and files",
    Group.TIER: "what nodes share, beyond one machine",
    Group.LOGGING: "what is logged and shown, and how",
    Group.TIMEOUTS: "how long anything may take",
    Group.LIMITS: "what a request and its media may be",
}


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all settings structs. Every field is made by `setting`."""

    def check(self) -> None:
        """Check that the values are consistent.

        Raises:
            ConfigError: They are not; the message names them.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class _Declaration(Generic[T]):
    """Arguments of `setting`. As the field's default factory, it stays with the field."""

    default: T
    text: str
    group: Group
    meta: Meta
    unit: str
    is_secret: bool
    is_table: bool

    def __call__(self) -> T:
        return self.default


def setting(
    default: T,
    text: str,
    group: Group,
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    pattern: str | None = None,
    unit: str = "",
    is_secret: bool = False,
    is_table: bool = False,
) -> T:
    """Declare a field of a `Settings` struct.

    Args:
        default: Of the field's type, and immutable.
        text: Its meaning, in a few words without a full stop.
        unit: Placeholder of the value in the help; by default it follows from the type and the
            name's suffix (``_nbytes``, ``_s``, ...).
        is_secret: Its value is never shown.
        is_table: Too large for a flag or a variable: it is read only from the file.
    """
    bounds: dict[str, Any] = {"gt": gt, "ge": ge, "lt": lt, "le": le, "pattern": pattern}
    declaration = _Declaration(
        default=default,
        text=text,
        group=group,
        meta=Meta(**{name: bound for name, bound in bounds.items() if bound is not None}),
        unit=unit,
        is_secret=is_secret,
        is_table=is_table,
    )
    return msgspec.field(default_factory=declaration)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One declared setting, with all of its names."""

    key: str
    type: Any
    """Type with its bounds, for `msgspec.convert`."""
    default: Any
    text: str
    group: Group
    unit: str
    bounds: str
    demand: str
    """Valid values, in words that complete "must be"."""
    is_secret: bool
    is_table: bool

    @property
    def flag(self) -> str:
        """Flag of the setting; ``MODEL`` is positional."""
        return "MODEL" if self.key == "model" else "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.key.upper()

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)

    @property
    def is_size(self) -> bool:
        return self.key.endswith("_nbytes")

    @property
    def is_list(self) -> bool:
        return get_origin(get_args(self.type)[0]) is tuple

    def show(self, value: object) -> str:
        """Return a value in the syntax of users; a secret is not shown."""
        if self.is_secret and value:
            return "(hidden)"
        if self.is_size and isinstance(value, int):
            return format_nbytes(value)
        if self.is_list and isinstance(value, tuple):
            return ",".join(map(str, value))
        if isinstance(value, float):
            return f"{value:g}"
        return str(value).lower() if self.is_switch else str(value)


def declared(*structs: type[Settings]) -> dict[str, Setting]:
    """Return the settings of some structs, in one flat namespace.

    Raises:
        ConfigError: Two of them have one name, or one has a reserved name; or one is not made by
            `setting`.
    """
    found: dict[str, Setting] = {}
    for struct in structs:
        for key, one in _settings_of(struct).items():
            if key in found or key in RESERVED:
                raise ConfigError(f"{struct.__name__} declares {key!r}, which is there already")
            found[key] = one
    return found


@functools.cache  # msgspec evaluates every annotation on each call
def _settings_of(struct: type[Settings]) -> dict[str, Setting]:
    return {field.name: _resolve(field, struct) for field in msgspec.structs.fields(struct)}


def _resolve(field: msgspec.structs.FieldInfo, struct: type[Settings]) -> Setting:
    declaration = field.default_factory
    if not isinstance(declaration, _Declaration):
        raise ConfigError(f"{struct.__name__}.{field.name} is not declared by setting()")
    return Setting(
        key=field.name,
        type=Annotated[field.type, declaration.meta],
        default=declaration.default,
        text=declaration.text,
        group=declaration.group,
        unit=declaration.unit or _unit(field.name, field.type),
        bounds=_bounds(field.name, declaration.meta),
        demand=_demand(field.name, field.type, declaration.meta),
        is_secret=declaration.is_secret,
        is_table=declaration.is_table,
    )


_UNITS = {"_nbytes": "SIZE", "_s": "SECONDS", "_hz": "HZ", "_share": "PART"}


def _unit(key: str, kind: Any) -> str:
    for suffix, unit in _UNITS.items():
        if key.endswith(suffix):
            return unit
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) is tuple:
        return "A,B,..."
    return {int: "N", float: "NUMBER"}.get(kind, "TEXT")


def _demand(key: str, kind: Any, meta: Meta) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is tuple:
        return "a list, separated by commas"
    if kind not in (int, float):
        return "true or false" if kind is bool else "text"
    noun = "a whole number" if kind is int else "a number"
    if key.endswith("_nbytes"):
        noun = "a size in bytes, KiB, MiB or GiB, such as 512MiB"
    bounds = _bounds(key, meta, leaves_out_zero=False)
    return f"{noun}, {bounds}" if bounds else noun


def _bounds(key: str, meta: Meta, *, leaves_out_zero: bool = True) -> str:
    """Return the bounds in words; in a table, "at least 0" is omitted as obvious."""

    def show(value: float) -> str:
        return format_nbytes(int(value)) if key.endswith("_nbytes") else f"{value:.12g}"

    words = [
        (meta.ge, "at least"),
        (meta.gt, "above"),
        (meta.le if meta.le is None or meta.le < 2**31 else None, "at most"),
        (meta.lt, "below"),
    ]
    said = [
        f"{word} {show(bound)}"
        for bound, word in words
        if bound is not None and not (leaves_out_zero and bound == 0)
    ]
    return ", ".join(said)
