"""What is said to who has given a setting a name that it does not have here."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from afferent.config.declaring import RESERVED, Setting

_HERE = "here it is"

ELSEWHERE: dict[str, tuple[str, tuple[str, ...]]] = {
    "allowed_local_media_path": (_HERE, ("file_roots",)),
    "api_server_count": (_HERE, ("frontends",)),
    "chunked_prefill_size": (_HERE, ("max_num_batched_tokens",)),
    "context_length": (_HERE, ("max_model_len",)),
    "data_parallel_size": ("there is only", ("tensor_parallel_size",)),
    "engine_workers": (_HERE, ("tensor_parallel_size",)),
    "gpu_memory_utilization": (
        "memory is given in numbers, by",
        ("kv_cache_tokens", "arena_nbytes"),
    ),
    "limit_mm_per_prompt": (_HERE, ("max_images", "max_videos", "max_audio_clips")),
    "max_running_requests": (_HERE, ("max_num_seqs",)),
    "max_step_embeds": (_HERE, ("max_num_batched_embeds",)),
    "max_step_tokens": (_HERE, ("max_num_batched_tokens",)),
    "mem_fraction_static": (
        "memory is given in numbers, by",
        ("kv_cache_tokens", "arena_nbytes"),
    ),
    "mm_processor_cache_gb": ("what was processed is kept in the arena, see", ("arena_nbytes",)),
    "model_id": (_HERE, ("model",)),
    "model_path": (_HERE, ("model",)),
    "pipeline_parallel_size": ("there is only", ("tensor_parallel_size",)),
    "tp": (_HERE, ("tensor_parallel_size",)),
    "tp_size": (_HERE, ("tensor_parallel_size",)),
    "uvicorn_log_level": (_HERE, ("log_level",)),
}
"""Common names for our settings elsewhere, too unlike ours to be found by their spelling."""


def unknown(key: str, known: Mapping[str, Setting], origin: str) -> str:
    """What is said of a key that a file or the environment has."""

    def spell(key: str) -> str:
        return known[key].variable if origin == "environment" else key

    return f"there is no setting {key!r} ({origin}){_instead(key, known, spell)}"


def unknown_flag(argument: str, known: Mapping[str, Setting]) -> str:
    """What is said of an argument such as ``--prot`` or ``--prot=1``."""
    flag = argument.partition("=")[0]
    key = flag.lstrip("-").replace("-", "_")
    if key in known and known[key].is_table:
        return f"there is no flag {flag}; {key} are tables of the file (--config)"
    flags = {one.key: one.flag for one in known.values() if not one.is_table}
    flags |= {name: f"--{name}" for name in RESERVED}
    if key in flags:  # with other dashes, or the one that has none
        return f"there is no flag {flag}; {_HERE} {flags[key]}"
    return f"there is no flag {flag}{_instead(key, flags, flags.__getitem__)}"


def _instead(key: str, known: Mapping[str, object], spell: Callable[[str], str]) -> str:
    """The end of a message, such as ``; did you mean --port?``."""
    words, keys = ELSEWHERE.get(key, ("", ()))
    if ours := [spell(one) for one in keys if one in known]:
        return f"; {words} {_join(ours, 'and')}"
    longer = [one for one in known if one.startswith(key)]
    likely = longer[:3] or difflib.get_close_matches(key, known, n=2, cutoff=0.75)
    if likely:
        return f"; did you mean {_join([spell(one) for one in likely], 'or')}?"
    return "; if it is an engine's own, name that engine: --engine"


def _join(names: list[str], word: str) -> str:
    *first, last = names
    return f"{', '.join(first)} {word} {last}" if first else last
