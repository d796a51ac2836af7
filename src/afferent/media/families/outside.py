"""Plugin families: found by entry point, and carried between processes by name.

A package declares each of its model types in the group `GROUP`, as ``MODEL_TYPE =
"package.module:ENTRY"``. Plugins are searched only if no built-in family supports the model, and
imported only if the model is served.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Final, Self, cast

import msgspec
from msgspec import Struct

from afferent.errors import AfferentError, ConfigError, in_a_line
from afferent.media.decoded import Array, Media
from afferent.media.families.entry import Entry
from afferent.media.families.family import Family, MediaTokens, ProcessorLayout
from afferent.media.families.plan import FeaturePlan
from afferent.media.headers.probe import MediaHeader
from afferent.media.transforms.resize import ResizeRule
from afferent.types import Modality

GROUP: Final = "afferent.families"


class OutsideFamily(Struct, tag="outside", frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Plugin family, which delegates to the family of its package; see `Family`.

    Attributes:
        cls: Its class, as ``module:Class``.
        fields: The family itself, as msgpack.
        version: Version of its package, which determines the features too.
    """

    cls: str
    fields: bytes
    version: str

    @classmethod
    def of(cls, family: Family, *, version: str) -> Self:
        kind = type(family)
        name = f"{kind.__module__}:{kind.__qualname__}"
        return cls(cls=name, fields=msgspec.msgpack.encode(family), version=version)

    @property
    def inner(self) -> Family:
        """The family itself.

        Raises:
            ConfigError: This process can't load it.
        """
        return _inner(self)

    @property
    def tokens(self) -> Mapping[Modality, MediaTokens]:
        return self.inner.tokens

    @property
    def sample_rate_hz(self) -> int:
        return self.inner.sample_rate_hz

    @property
    def processor_layout(self) -> ProcessorLayout | None:
        return self.inner.processor_layout

    def plan(self, header: MediaHeader) -> FeaturePlan | None:
        return self.inner.plan(header)

    def plan_exactly(self, header: MediaHeader) -> FeaturePlan:
        return self.inner.plan_exactly(header)

    def without_paths(self) -> Self:
        return self._with(self.inner.without_paths())

    def sampling(self, max_frames: int) -> Self:
        return self._with(self.inner.sampling(max_frames))

    def bounded(self, max_pixels: int) -> Self:
        return self._with(self.inner.bounded(max_pixels))

    def resizing(self, rule: ResizeRule) -> Self:
        return self._with(self.inner.resizing(rule))

    def load(self) -> None:
        self.inner.load()

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        self.inner.process(media, out)

    def model_inputs(self, features: Mapping[str, Any]) -> dict[str, Any]:
        return self.inner.model_inputs(features)

    def _with(self, family: Family) -> Self:
        if family is self.inner:
            return self
        return msgspec.structs.replace(self, fields=msgspec.msgpack.encode(family))


@functools.lru_cache(maxsize=64)
def _inner(family: OutsideFamily) -> Family:
    module, _, name = family.cls.partition(":")
    try:
        cls = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        return cast(Family, msgspec.msgpack.decode(family.fields, type=cls))
    except Exception as error:  # plugins may raise anything
        raise ConfigError(f"the family {family.cls} can't be used: {in_a_line(error)}") from error


def failed(what: str, version: str, error: Exception) -> ConfigError:
    """Return the error of a family that raises an unexpected exception."""
    return ConfigError(
        f"the family {what} ({version or 'of no package'}) has failed: {in_a_line(error)}; this is "
        "a fault of the family, which should raise UnsupportedModel for a model that it can't serve"
    )


def find(model_type: str) -> Entry[OutsideFamily] | None:
    """Return the plugin's spec for a model type; ``None`` if there is none.

    Raises:
        ConfigError: There are several, or the spec is invalid.
    """
    points = tuple(metadata.entry_points(group=GROUP, name=model_type))
    if not points:
        return None
    if len(points) > 1:
        packages = ", ".join(sorted(point.value for point in points))
        raise ConfigError(f"several packages have a family for {model_type}: {packages}")
    (point,) = points
    try:
        entry = point.load()
    except Exception as error:  # plugins may raise anything
        raise ConfigError(
            f"the family for {model_type} can't be loaded from {point.value}: {in_a_line(error)}"
        ) from error
    if not isinstance(entry, Entry):
        raise ConfigError(f"{point.value} is a {type(entry).__name__}, and no Entry ({model_type})")
    version = f"{point.dist.name} {point.dist.version}" if point.dist else ""

    @functools.wraps(entry.describe)
    def describe(folder: Any, config: Mapping[str, Any]) -> OutsideFamily | None:
        try:
            family = entry.describe(folder, config)
            return None if family is None else OutsideFamily.of(family, version=version)
        except AfferentError:
            raise
        except Exception as error:  # plugins may raise anything
            raise failed(point.value, version, error) from error

    return Entry(model_types=(model_type,), describe=describe, engine=entry.engine)
