"""Features of a model's media, for programs: from files to the model's inputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from afferent.batch import progress_bar
from afferent.batch.item_features import FailedItem, Form, ItemFeatures, Producer, Progress
from afferent.batch.item_routes import Copied, Here, ResultOptions, Shared, pipeline
from afferent.batch.workplace import HERE, Where, Workplace, check_form, of_extra
from afferent.errors import InvalidMedia, StaleHandle, StoreRestarted, StoreUnavailable
from afferent.store.block import codec, torch_tensors
from afferent.types import MiB, Modality

if TYPE_CHECKING:
    from afferent.batch.media_model import Backend
    from afferent.batch.media_sources import Source
    from afferent.batch.shared_item import SharedItem
    from afferent.media.families.family import MediaTokens
    from afferent.media.families.plan import FeaturePlan


class Features:
    """Features of one model's images, videos and audio clips.

    Examples:
        >>> from afferent import Features
        >>> from PIL import Image
        >>> with Features("shapes") as features:  # a model's folder, or its name on a hub
        ...     made = features.make(Image.new("RGB", (96, 64), "red"))
        >>> {name: (array.dtype.name, array.shape) for name, array in made.items()}
        {'pixel_values': ('uint8', (80, 588)), 'image_grid_thw': ('int64', (1, 3))}
        >>> made.num_embeds, made.made_by
        (20, 'afferent')
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        where: Where = HERE,
        num_workers: int | None = None,
        backend: Backend | None = None,
        revision: str = "",
        arena_nbytes: int = 512 * MiB,
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        """Load a model's settings, and start or find the processes that make features.

        Args:
            model: Folder as `transformers` saves models, a built-in model, or a name on a hub,
                whose small files are downloaded.
            where: Processes that decode and process:

                - ``"here"``: this thread of this process. For files that you trust.
                - ``"pool"``: confined worker processes of this object, with a store of their own.
                - the address of a store (a path): the workers of the server that it belongs to.
                - a function that returns such an address: it is called again when the store is
                  gone, and pickled in the place of the address, such as `afferent.ray.NodeStores`.
            num_workers: Workers of the pool; ``None``: one for each core.
            backend: Backend of the model's own processor, whose resizing and arithmetic are
                reproduced, as in ``AutoImageProcessor.from_pretrained(model, backend=...)``.
                ``None``: the one that `transformers` chooses here, ``"torchvision"`` if that is
                installed; with a server, the server's.
            revision: Branch, tag or commit of a model on a hub.
            arena_nbytes: Shared memory of the pool; allocated as it is filled.
            limits: Limits of an item, by the names of the settings, such as ``max_image_pixels``.

        Raises:
            ConfigError: An argument is wrong, a library is missing, or there is no such model.
            UnsupportedModel: The model's own processor is needed, and can't be used here.
            StoreUnavailable: There is no store at the address.
        """
        self._workplace = Workplace(
            model,
            where=where,
            num_workers=num_workers,
            backend=backend,
            revision=revision,
            arena_nbytes=arena_nbytes,
            limits=limits,
        )

    @property
    def folder(self) -> Path:
        """Folder of the model."""
        return self._workplace.folder

    @property
    def made_by(self) -> Producer:
        """Producer of compact features: ``"transformers"`` for a model without a family here."""
        return self._workplace.model.producer("compact")

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Modalities that the model takes."""
        return tuple(self._workplace.model.family.tokens)

    @property
    def media_tokens(self) -> Mapping[Modality, MediaTokens]:
        """Ids of the tokens of an item, ``marker`` and ``embed``, for each modality."""
        return self._workplace.model.family.tokens

    @property
    def address(self) -> str | None:
        """Address of the store of the pool or the server; ``None`` in this process.

        Raises:
            Unavailable: The pool has ended.
        """
        return self._workplace.address

    def plan(
        self,
        source: Source | tuple[int, int],
        *,
        form: Form = "compact",
        modality: Modality | None = None,
    ) -> FeaturePlan:
        """Return the shapes and dtypes of an item's features, and its prompt; nothing is decoded.

        It is exact for images and videos. For an audio clip whose file does not give its length it
        is an upper bound.

        Args:
            source: As for `make`; of an image file, its first bytes are enough. Or the width and
                height of an upright image.
            form: As for `make`.
            modality: As for `make`.

        Raises:
            InvalidMedia: The item can't be used.
            UnsupportedModel: The form is not available for this model.
        """
        check_form(form, "numpy")
        here = of_extra("afferent.batch.in_process")
        if isinstance(source, tuple):
            header = here.image_header(self._workplace.model, *source)
        else:
            header = here.header_of(self._workplace.model, source, form=form, modality=modality)
        return self._workplace.model.plan(header, form)

    # Items

    def make(
        self,
        source: Source,
        *,
        form: Form = "compact",
        tensors: codec.Library = "numpy",
        modality: Modality | None = None,
    ) -> ItemFeatures:
        """Return the features of one item, in memory of its own.

        Args:
            source: Path of a file, a file's bytes, a PIL image (taken as it is, its EXIF data
                ignored), pixels ``(height, width, 3)`` in uint8, or mono samples
                ``(num_samples,)`` in float at the model's rate.
            form: ``"compact"``: as engines take them, with pixels as bytes that `model_inputs`
                normalizes. ``"hf"``: float32 in the layout of the model's own processor, equal to
                its output to the last bit.
            tensors: ``"torch"`` for torch tensors.
            modality: Modality of a file; ``None``: its first bytes decide.

        Raises:
            InvalidMedia: The item can't be used.
            UnsupportedModel: The form is not available for this model.
            Unavailable: It could not be made now; try again.
        """
        (made,) = self._run([source], ResultOptions(form, tensors, modality), in_flight=1)
        if isinstance(made, FailedItem):
            raise made.error
        return made

    def make_many(
        self,
        sources: Iterable[Source],
        *,
        form: Form = "compact",
        tensors: codec.Library = "numpy",
        modality: Modality | None = None,
        in_flight: int | None = None,
        progress: bool | Callable[[Progress], None] = False,
    ) -> Iterator[ItemFeatures | FailedItem]:
        """Yield the features of many items, in order; an item that fails does not end the batch.

        Args:
            sources: Items as for `make`; consumed as results are taken.
            form: As for `make`.
            tensors: As for `make`.
            modality: As for `make`.
            in_flight: Most items that are taken from ``sources`` before their results are.
                ``None``: 4 for each worker of a pool, 16 with a server; here it is always 1.
            progress: ``True``: a bar, if ``tqdm`` is installed. Or a function that is called after
                each item.

        Raises:
            ConfigError: An argument is wrong.
            UnsupportedModel: The form is not available for this model.
        """
        options = ResultOptions(form, tensors, modality)
        self._workplace.model.family_for(form)
        results = self._run(sources, options, in_flight=self._workplace.num_in_flight(in_flight))
        return progress_bar.shown(results, sources, progress)

    def share(self, source: Source, *, modality: Modality | None = None) -> SharedItem:
        """Have the features of one item made in the store, and return a reference to them.

        Raises:
            ConfigError: There is no store: features are made in this process.
            InvalidMedia: The item can't be used.
            Unavailable: It could not be made now; try again.
        """
        (made,) = self._run_shared([source], modality, in_flight=1)
        if isinstance(made, FailedItem):
            raise made.error
        return made

    def share_many(
        self,
        sources: Iterable[Source],
        *,
        modality: Modality | None = None,
        in_flight: int | None = None,
        progress: bool | Callable[[Progress], None] = False,
    ) -> Iterator[SharedItem | FailedItem]:
        """Yield references to the features of many items, in order; see `share` and `make_many`.

        Each reference pins its features. If the store is full of pinned features, items fail with
        `StoreFull`.
        """
        results = self._run_shared(
            sources, modality, in_flight=self._workplace.num_in_flight(in_flight)
        )
        return progress_bar.shown(results, sources, progress)

    def open(
        self,
        item: SharedItem,
        source: Source | None = None,
        *,
        tensors: codec.Library = "numpy",
        modality: Modality | None = None,
    ) -> ItemFeatures:
        """Return the features that any process shared, from the store of this object.

        On another node, after an eviction, or after the end of their store, they are made again of
        their source, once for all processes that use this store. They are the same, because the
        key of an item is the digest of its source, its settings and its version.

        Args:
            item: Reference from a process whose `Features` have the same model and settings.
            source: The item that it was made of; ``None``: only features of the store are returned.
            tensors: As for `SharedItem.features`, whose views are returned. In this process
                (``where="here"``), features that are made again are in memory of their own.
            modality: As it was for `share`.

        Raises:
            StaleHandle: They are not in the store, and there is no source.
            InvalidMedia: Another item, model or setting gives the source another key.
            Unavailable: They could not be made now; try again.
        """
        try:
            return item.in_store(self.address).features(tensors=tensors)
        except (StaleHandle, StoreRestarted, StoreUnavailable):
            if source is None:
                raise
        data, kind, key = self._workplace.file_of(source, "compact", modality)
        if key != item.key:
            raise InvalidMedia(
                "the source is not the one that the reference was made of, or it was made with "
                "another model, other settings or another version"
            )
        if self._workplace.where == HERE:
            return self.make(data, tensors=tensors, modality=kind)
        return self.share(data, modality=kind).features(tensors=tensors)

    def model_inputs(self, features: ItemFeatures, *, device: Any = None) -> dict[str, Any]:
        """Return the arguments of the model's encoder as torch tensors.

        Compact pixels are normalized on the device, with the arithmetic of torchvision's
        processors.

        Args:
            features: Arrays or tensors in any form.
            device: Device of torch; ``None``: the CPU.
        """
        tensors = {name: torch_tensors.in_torch(each) for name, each in features.items()}
        if device is not None:
            tensors = {name: each.to(device) for name, each in tensors.items()}
        return (
            tensors if features.form == "hf" else self._workplace.model.family.model_inputs(tensors)
        )

    def close(self) -> None:
        """End the pool and its store, or the connection to the server.

        Views that are still alive stay valid.
        """
        self._workplace.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, self._workplace.arguments

    def _run(
        self, sources: Iterable[Source], options: ResultOptions, *, in_flight: int
    ) -> Iterator[ItemFeatures | FailedItem]:
        check_form(options.form, options.tensors)
        if self._workplace.where == HERE:
            return pipeline(sources, Here(self._workplace, options), in_flight=in_flight)
        return pipeline(sources, Copied(self._workplace, options), in_flight=in_flight)

    def _run_shared(
        self, sources: Iterable[Source], modality: Modality | None, *, in_flight: int
    ) -> Iterator[SharedItem | FailedItem]:
        options = ResultOptions("compact", "numpy", modality)
        return pipeline(sources, Shared(self._workplace, options), in_flight=in_flight)


def _again(folder: str, where: Where, backend: Backend | None, limits: dict[str, Any]) -> Features:
    return Features(folder, where=where, backend=backend, limits=limits)
