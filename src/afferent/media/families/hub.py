"""Folders of models: built-in ones, those on this machine, and those on a hub.

Models on a hub are downloaded once, into the cache that all programs of a user share.

`huggingface_hub` downloads them, and its own environment variables apply: the addresses of the hub
and the cache, the token, and offline mode.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from afferent.errors import ConfigError, in_a_line

BUILT_IN_MODELS: Final = Path(__file__).parents[2] / "builtin" / "models"

_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MISTRALS: Final = "params.json"
_CONFIGS: Final = ("config.json", _MISTRALS)
"""Configurations of `transformers` and of Mistral's own format, which vLLM reads, too."""
_WEIGHTS: Final = "*.safetensors"
_BESIDE: Final = ("*.json", "*.jinja", "*.txt", "*.model", "tokenizer*")
# The same weights for other programs, and weights of other parts.
_LEFT_OUT: Final = ("*/*", "*.bin")
_OF_MISTRAL: Final = "consolidated*"
"""Weights in Mistral's own format."""


def is_name(model: str) -> bool:
    """Return whether it can be a model's name on a hub: ``ORGANIZATION/NAME``, and no path here."""
    return _NAME.fullmatch(model) is not None and not Path(model).exists()


def find_model(
    name: str,
    *,
    revision: str = "",
    needs_weights: bool,
    takes_mistrals: bool = False,
    from_cache_only: bool = False,
) -> Path:
    """Return the folder of a built-in model, a model on this machine, or one on a hub.

    Args:
        name: Name of a built-in model, path of a folder, or a name as accepted by `is_name`.
        revision: As for `download`.
        needs_weights: As for `download`.
        takes_mistrals: As for `download`.
        from_cache_only: As for `download`.

    Raises:
        ConfigError: There is no such model.
    """
    if is_name(name):
        return download(
            name,
            revision=revision,
            needs_weights=needs_weights,
            takes_mistrals=takes_mistrals,
            from_cache_only=from_cache_only,
        )
    if revision:
        raise ConfigError(f"--revision {revision}: {name} is no model on a hub")
    built_in = [BUILT_IN_MODELS / name] if "/" not in name else []
    given = Path(name).expanduser()
    for folder in (*built_in, given):
        if any((folder / config).is_file() for config in _CONFIGS):
            return folder.resolve()
    if given.is_dir():
        raise ConfigError(f"MODEL {name}: the folder has no config.json")
    models = ", ".join(path.name for path in sorted(BUILT_IN_MODELS.iterdir()))
    raise ConfigError(
        f"MODEL {name}: must be a folder with a config.json on this machine, a model's name on a "
        f"hub (ORGANIZATION/NAME), or one of the built-in models: {models}"
    )


def endpoint() -> str:
    """Return the URL of the hub."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def download(
    name: str,
    *,
    revision: str,
    needs_weights: bool,
    takes_mistrals: bool = False,
    from_cache_only: bool = False,
) -> Path:
    """Return a model's folder in the cache; download missing files, with progress on the terminal.

    Args:
        name: Name of the model, as accepted by `is_name`.
        revision: Branch, tag or commit; empty for the hub's default.
        needs_weights: Download safetensors, in addition to all small files.
        takes_mistrals: Of a model without other weights, download those in Mistral's own format.
        from_cache_only: Download nothing.

    Raises:
        ConfigError: It is not available; the message gives the reason in one line.
    """
    # Imported here: a server of a local folder does not need them.
    from huggingface_hub import constants, errors, snapshot_download

    def fetch(*left_out: str) -> Path:
        return Path(
            snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=[*_BESIDE, *([_WEIGHTS] if needs_weights else [])],
                ignore_patterns=[*_LEFT_OUT, *left_out],
                local_files_only=from_cache_only,
            )
        )

    here, cache = endpoint(), constants.HF_HUB_CACHE
    try:
        folder = fetch(_OF_MISTRAL)
        if takes_mistrals and needs_weights and not any(folder.glob(_WEIGHTS)):
            folder = fetch()
    except errors.HFValidationError as error:
        raise ConfigError(
            f"{name!r} is neither a folder here nor a model's name on a hub"
        ) from error
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{name!r} is gated: ask for access at {here}/{name}, and set HF_TOKEN to a token of "
            "the account that has it"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{name!r} is neither a folder here nor a model on {here}; if it is a private one, set "
            "HF_TOKEN to a token that may read it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{name!r} has no revision {revision or 'main'!r} on {here}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        why = "HF_HUB_OFFLINE forbids to download it"
        if from_cache_only:
            why = "afferent serve would download it"
        elif not constants.is_offline_mode():
            why = f"{here} can't be reached: {in_a_line(error.__cause__ or error)}"
        raise ConfigError(
            f"{name!r} is no folder here, is not complete in {cache}, and {why}"
        ) from error
    except Exception as error:  # of HTTP, the disk, or the libraries for them
        raise ConfigError(
            f"{name!r} can't be downloaded from {here}: {in_a_line(error)}"
        ) from error
    _check(folder, name, needs_weights=needs_weights, takes_mistrals=takes_mistrals)
    return folder


def _check(folder: Path, name: str, *, needs_weights: bool, takes_mistrals: bool) -> None:
    is_mistrals = (folder / _MISTRALS).is_file() and any(folder.glob(_OF_MISTRAL))
    if not (folder / "config.json").is_file() and not (takes_mistrals and is_mistrals):
        raise ConfigError(f"{name!r} on {endpoint()} has no config.json: the engine can't load it")
    if needs_weights and not any(folder.glob(_WEIGHTS)):
        raise ConfigError(
            f"{name!r} on {endpoint()} has no safetensors in the form of transformers, and weights "
            "of other forms are not read: most are pickles, which may run code"
        )
