"""Description of vLLM: its settings and arguments, and the process that starts it, if needed."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from afferent.engines.contract import Caller, EnginePlan, EngineProcess, EngineSite, UpstreamKind
from afferent.engines.upstream import Upstream
from afferent.engines.vllm import arguments, place
from afferent.engines.vllm.launch import SERVER, VllmProcess
from afferent.engines.vllm.media import TakenMedia
from afferent.engines.vllm.settings import VllmSettings
from afferent.errors import ConfigError
from afferent.media.families.family import read_json
from afferent.runtime.sockets import digits_of, new_address
from afferent.telemetry.trace import declare_stages

declare_stages("first_byte")

_PROCESS: Final = "afferent.engines.vllm.process"
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
FEATURES_FOR: Final = frozenset(
    {
        *("gemma3", "idefics3", "internvl", "llava", "llava_next", "llava_onevision"),
        *("mistral3", "qwen2_audio", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm"),
    }
)
"""Types of models whose answers from our features are compared with a stock vLLM's."""
_FRAMES: Final = "media_io_kwargs"
"""Argument that may make vLLM take other frames of a video than Afferent."""
_OPTIONS: Final = "mm_processor_kwargs"
"""Argument that may change vLLM's processor in any way."""
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
_TO_END_S = 60.0


class VllmLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Link from frontends to vLLM."""

    urls: tuple[str, ...]
    api_key: str
    secret: bytes
    taken: TakenMedia


class VllmUpstream(UpstreamKind[VllmSettings, VllmLink]):
    """Unmodified vLLM, whose workers read the arena by a plugin."""

    name = "vllm"
    summary = "vLLM's own API, with media by reference"
    settings_type = VllmSettings
    link_type = VllmLink
    resize_rule = "torchvision"

    def takes_features(self, model_folder: Path, settings: VllmSettings) -> bool:
        """See `UpstreamKind.takes_features`."""
        if _OPTIONS in _told(settings):
            return False
        return read_json(model_folder / "config.json").get("model_type") in FEATURES_FOR

    def needs_weights(self, settings: VllmSettings) -> bool:
        """See `Backend.needs_weights`. An external vLLM has its own weights."""
        return not settings.engine_url

    def check(self, model_folder: Path, settings: VllmSettings) -> None:
        """See `Backend.check`."""
        if settings.engine_url:
            return
        _refuse(_named(settings))
        _look(_python(settings))
        _refuse(arguments.changed(_python(settings), settings.engine_args))

    def reserved_nbytes(self, model_folder: Path, settings: VllmSettings) -> int:
        """See `Backend.reserved_nbytes`."""
        return 0 if settings.engine_url else settings.engine_memory_nbytes

    def plan(self, site: EngineSite, settings: VllmSettings) -> EnginePlan[VllmLink]:
        """See `Backend.plan`."""
        secret, taken = secrets.token_bytes(32), TakenMedia.of(site.family, site.model_folder)
        taken = msgspec.structs.replace(taken, any_file=settings.media_formats == "all")
        if settings.engine_video_bytes or _FRAMES in _told(settings):
            taken = msgspec.structs.replace(taken, videos=False)
        if settings.engine_url:
            secret_path = _share_secret(site.store_address, secret)
            link = VllmLink(
                urls=settings.engine_url,
                api_key=settings.engine_api_key,
                secret=secret,
                taken=taken,
            )
            where = ", ".join(settings.engine_url)
            return EnginePlan(
                processes=(), link=link, notes=(f"vLLM at {where}",), files=(secret_path,)
            )
        socket_path = new_address("vllm")
        process = EngineProcess(
            name="vllm",
            module=_PROCESS,
            settings=VllmProcess(
                command=(
                    *(_python(settings), "-m", "vllm.entrypoints.cli.main", "serve"),
                    *(str(site.model_folder), "--served-model-name", site.model_name),
                    *site.aliases,
                    *(
                        *_OF_SUPERVISED,
                        *arguments.split(settings.engine_args),
                        "--uds",
                        socket_path,
                    ),
                ),
                socket_path=socket_path,
                start_timeout_s=settings.engine_start_timeout_s,
            ),
            env={
                place.STORE: site.store_address,
                place.SECRET: secret.hex(),
                place.SUPERVISED: "1",
            },
            watches=(SERVER,),
        )
        link = VllmLink(urls=(f"unix:{socket_path}",), api_key="", secret=secret, taken=taken)
        return EnginePlan(
            processes=(process,),
            link=link,
            # vLLM's parent process ends by itself at its timeout; a little later, it hangs.
            start_timeout_s=settings.engine_start_timeout_s + _TO_END_S,
        )

    @asynccontextmanager
    async def connect(self, link: VllmLink, caller: Caller) -> AsyncIterator[Upstream]:
        """See `UpstreamKind.connect`."""
        from afferent.engines.vllm.client import VllmClient  # the supervisor needs none

        async with VllmClient.over(
            link.urls, api_key=link.api_key, secret=link.secret, taken=link.taken
        ) as client:
            watching = asyncio.create_task(client.watch())
            try:
                yield client
            finally:
                watching.cancel()
                await asyncio.wait([watching])


def _named(settings: VllmSettings) -> set[str]:
    """Return the arguments that are written in full, without a run of vLLM's parser."""
    words = arguments.split(settings.engine_args)
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


def _share_secret(address: str, secret: bytes) -> Path:
    """Write the secret beside the store's path, for a vLLM of the same user."""
    if digits_of(address, "store"):  # a generated path is unknown to an external vLLM
        raise ConfigError("--engine-url needs --store-path: vLLM's workers have to find the store")
    path = Path(address + place.SECRET_SUFFIX)
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(secret.hex(), encoding="ascii")
    return path
