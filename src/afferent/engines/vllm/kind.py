"""Description of vLLM: its settings and arguments, and the process that starts it, if needed."""

from __future__ import annotations

import contextlib
import itertools
import re
import subprocess
import sys
from collections.abc import Mapping, Set
from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec

from afferent.engines.contract import EngineSite
from afferent.engines.http_upstream.kind import HttpLink, HttpUpstreamKind
from afferent.engines.upstream import Upstream
from afferent.engines.vllm import arguments
from afferent.engines.vllm.media import ItemHashes, TakenMedia, type_of
from afferent.engines.vllm.settings import VllmSettings
from afferent.engines.vllm_hash import ALGORITHMS
from afferent.errors import ConfigError
from afferent.media.families import mistral
from afferent.media.families.registry import engine_facts

_OF_SUPERVISED = ("--disable-uvicorn-access-log",)
"""Each request is in our log. ``--no-...`` in the arguments restores vLLM's lines."""
_OURS = ("uds", "host", "port", "model", "api_key", "served_model_name")
_UNSAFE = (
    *("enable_mm_embeds", "enable_prompt_embeds", "enable_scale_out", "tokens_only"),
    *("trust_request_chat_template", "root_path"),
)
"""Arguments that let clients bypass this server's limits. With ``root_path``, each endpoint has a
second path, at which no media and no tenants are looked for.
"""
_OTHER_VIDEOS: Final = frozenset({"media_io_kwargs", "video_pruning_rate"})
"""Arguments that may make vLLM take other frames of a video, or fewer tokens, than Afferent."""
_OTHERWISE: Final = frozenset({"mm_processor_kwargs", "tokenizer_mode", "config_format"})
"""Arguments that may change vLLM's processor in any way, or select another one."""
_OF_CONFIG: Final = frozenset({"tokenizer", "hf_overrides", "hf_config_path"})
"""Arguments that change it, too, where its settings are in the model's configuration."""
_SET_IN_CONFIG: Final = frozenset({mistral.PIXTRAL, mistral.VOXTRAL, "internvl_chat"})
_NO_VLLM: Final = (
    "vLLM is not installed for {}; name its interpreter by --engine-python, or a vLLM that runs by "
    "--engine-url"
)
_LOOK = """
import sys
from importlib.metadata import entry_points, version
print(version("vllm"))
sys.exit(not list(entry_points(group="vllm.general_plugins", name="afferent")))
"""
_LOOK_TIMEOUT_S = 60.0


class VllmLink(HttpLink, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Link from frontends to vLLM."""

    taken: TakenMedia
    hashes: ItemHashes | None = None


class VllmUpstream(HttpUpstreamKind[VllmSettings, VllmLink]):
    """Unmodified vLLM, whose workers read the arena by a plugin."""

    name = "vllm"
    title = "vLLM"
    summary = "vLLM's own API, with media by reference"
    settings_type = VllmSettings
    link_type = VllmLink
    resize_rule = "torchvision"
    takes_mistrals = True
    folder_variables = ("VLLM_RPC_BASE_PATH",)

    def takes_features(self, model_folder: Path, settings: VllmSettings) -> bool:
        """See `UpstreamKind.takes_features`."""
        told, changing = _told(settings), _OTHERWISE
        if type_of(model_folder) in _SET_IN_CONFIG:
            changing |= _OF_CONFIG
        if mistral.has_format(model_folder):
            told -= _named(settings, value="mistral")
        elif settings.engine_url and mistral.has_settings(model_folder):
            return False  # that vLLM may have the weights, too, and so read the other format
        return not told & changing and takes_features_of(model_folder)

    def config_of(self, model_folder: Path, settings: VllmSettings) -> Mapping[str, Any] | None:
        """See `Backend.config_of`."""
        return mistral.config_of(model_folder)

    def check(self, model_folder: Path, settings: VllmSettings) -> None:
        """See `Backend.check`."""
        self._check_hashes(model_folder, settings)
        if settings.engine_url:
            return
        _refuse(_named(settings))
        _look(_python(settings))
        _refuse(arguments.changed(_python(settings), settings.engine_args))

    def _check_hashes(self, model_folder: Path, settings: VllmSettings) -> None:
        """Check that features here have the same bits as those behind the names of a stock vLLM.

        Raises:
            ConfigError: They may have others.
        """
        model_type = type_of(model_folder)
        same = engine_facts(model_type).compared_with.get(self.name, ())
        # Mistral's own images depend on the OpenCV of each environment.
        is_same = model_type in same and not mistral.has_format(model_folder)
        if settings.engine_hashes != "afferent" and not is_same:
            raise ConfigError(
                f"--engine-hashes {settings.engine_hashes}: features of a {model_type} here are "
                "not proved to have the same bits as vLLM's: leave it out"
            )

    def command(
        self, site: EngineSite, settings: VllmSettings, socket_path: str
    ) -> tuple[str, ...]:
        """See `HttpUpstreamKind.command`."""
        return (
            *(_python(settings), "-m", "vllm.entrypoints.cli.main", "serve"),
            *(str(site.model_folder), "--served-model-name", site.model_name),
            *site.aliases,
            *_OF_SUPERVISED,
            *arguments.split(settings.engine_args),
            *("--uds", socket_path),
        )

    def link(self, site: EngineSite, settings: VllmSettings, shared: HttpLink) -> VllmLink:
        """See `HttpUpstreamKind.link`."""
        taken = TakenMedia.of(site.family, site.model_folder)
        taken = msgspec.structs.replace(taken, any_file=settings.media_formats == "all")
        if settings.engine_video_bytes or _told(settings) & _OTHER_VIDEOS:
            taken = msgspec.structs.replace(taken, videos=False, video_files=True)
        hashes = None
        if settings.engine_hashes != "afferent":
            hashes = ItemHashes(
                model=settings.engine_hashes_model or str(site.model_folder),
                algorithm=ALGORITHMS[settings.engine_hashes],
            )
        return VllmLink(
            urls=shared.urls,
            api_key=shared.api_key,
            secret=shared.secret,
            taken=taken,
            hashes=hashes,
        )

    def client(self, link: VllmLink) -> AbstractAsyncContextManager[Upstream]:
        """See `HttpUpstreamKind.client`."""
        from afferent.engines.http_upstream.client import HttpClient  # the supervisor needs none
        from afferent.engines.vllm.traits import VllmTraits

        return HttpClient.over(
            link.sources(),
            title=self.title,
            secret=link.secret,
            traits=VllmTraits(link.taken, link.hashes),
        )


def takes_features_of(folder: Path) -> bool:
    """Return whether vLLM takes features of a model, if its arguments do not change them."""
    model_type = type_of(folder)
    return model_type in engine_facts(model_type).compared_with.get(VllmUpstream.name, ())


def _named(settings: VllmSettings, *, value: str = "") -> set[str]:
    """Return the arguments that are written in full, without a run of vLLM's parser.

    Args:
        value: Return only those with this value; empty: all.
    """
    words = arguments.split(settings.engine_args)
    if value:
        pairs = itertools.pairwise([*words, ""])
        words = [word for word, after in pairs if value in (after, word.partition("=")[2])]
    flags = (re.split(r"[=.]", word, maxsplit=1)[0] for word in words)
    return {flag.removeprefix("--").replace("-", "_") for flag in flags}


def _told(settings: VllmSettings) -> Set[str]:
    """Return the arguments that are set, also by an abbreviation, or in a file.

    Where vLLM's parser can't be run, `VllmUpstream.check` reports the reason.
    """
    with contextlib.suppress(ConfigError):
        return arguments.changed(_python(settings), settings.engine_args) | _named(settings)
    return _named(settings)


def _refuse(names: Set[str]) -> None:
    """Check that the operator gives no reserved argument.

    Raises:
        ConfigError: The server sets one of these arguments itself, or it bypasses the limits.
    """
    for name in (*_OURS, *_UNSAFE):
        if name in names:
            flag = "--" + name.replace("_", "-")
            why = (
                "is set by this server"
                if name in _OURS
                else "would lead around this server's limits"
            )
            raise ConfigError(f"--engine-args: {flag} {why}")


def _python(settings: VllmSettings) -> str:
    return settings.engine_python or sys.executable


def _look(python: str) -> None:
    """Check that an interpreter has vLLM and Afferent.

    Raises:
        ConfigError: vLLM is not installed there, or Afferent is not.
    """
    if python == sys.executable and find_spec("vllm") is None:  # without a start of python
        raise ConfigError(_NO_VLLM.format(python))
    try:
        done = subprocess.run(
            [python, "-c", _LOOK], capture_output=True, timeout=_LOOK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--engine-python {python}: can't be run: {error}") from error
    if not done.stdout.strip():
        raise ConfigError(_NO_VLLM.format(python))
    if done.returncode:
        raise ConfigError(
            f"Afferent is not installed for {python}, beside vLLM, whose workers need it to read "
            "the arena"
        )
