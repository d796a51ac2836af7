"""Hints in the error messages for unknown setting names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from afferent.config.declaring import RESERVED, Setting

_HERE = "here it is"
_MEMORY = "memory is given in numbers, by"
_TLS = "TLS is a proxy's: docs/deploying.md has one"
_VLLM_ARGS = "engine_args"

ELSEWHERE: dict[str, tuple[str, tuple[str, ...]]] = {
    "allowed_local_media_path": (_HERE, ("file_roots",)),
    "allowed_origins": (_HERE, ("cors_origin",)),
    "api_server_count": (_HERE, ("frontends",)),
    "chunked_prefill_size": (_HERE, ("max_num_batched_tokens",)),
    "context_length": (_HERE, ("max_model_len",)),
    "data_parallel_size": ("there is only", ("tensor_parallel_size",)),
    "disable_log_requests": ("requests are logged from info on, by", ("log_level",)),
    "dtype": ("a model is computed in the type that its weights have", ()),
    "enable_log_requests": ("requests are logged from info on, by", ("log_level",)),
    "enable_metrics": ("metrics are always there, at /metrics", ()),
    "enable_multimodal": ("media are taken whenever the model takes them", ()),
    "engine_workers": (_HERE, ("tensor_parallel_size",)),
    "gpu_memory_utilization": (_MEMORY, ("kv_cache_tokens", "arena_nbytes")),
    "limit_mm_per_prompt": (_HERE, ("max_images", "max_videos", "max_audio_clips")),
    "log_requests": ("requests are logged from info on, by", ("log_level",)),
    "max_prefill_tokens": (_HERE, ("max_num_batched_tokens",)),
    "max_running_requests": (_HERE, ("max_num_seqs",)),
    "max_step_embeds": (_HERE, ("max_num_batched_embeds",)),
    "max_step_tokens": (_HERE, ("max_num_batched_tokens",)),
    "max_total_tokens": (_HERE, ("kv_cache_tokens",)),
    "mem_fraction_static": (_MEMORY, ("kv_cache_tokens", "arena_nbytes")),
    "mm_processor_cache_gb": ("what was processed is kept in the arena, see", ("arena_nbytes",)),
    "model_id": (_HERE, ("model",)),
    "model_path": (_HERE, ("model",)),
    "otlp_traces_endpoint": ("it is a variable: OTEL_EXPORTER_OTLP_ENDPOINT", ()),
    "pipeline_parallel_size": ("there is only", ("tensor_parallel_size",)),
    "ssl_certfile": (_TLS, ()),
    "ssl_keyfile": (_TLS, ()),
    "tp": (_HERE, ("tensor_parallel_size",)),
    "tp_size": (_HERE, ("tensor_parallel_size",)),
    "trust_remote_code": ("no code of a model's folder is run", ()),
    "uvicorn_log_level": (_HERE, ("log_level",)),
    "watchdog_timeout": (_HERE, ("engine_step_timeout_s",)),
}
"""Names of settings in other servers: too unlike ours to be found by their spelling, or without
a counterpart here.
"""

OF_VLLM = frozenset(
    {
        *("attention_backend", "block_size", "chat_template", "chat_template_content_format"),
        *("compilation_config", "config_format", "cpu_offload_gb", "data_parallel_size"),
        *("disable_log_requests", "distributed_executor_backend", "download_dir", "dtype"),
        *("enable_auto_tool_choice", "enable_chunked_prefill", "enable_expert_parallel"),
        *("enable_log_requests", "enable_lora", "enable_prefix_caching", "enforce_eager"),
        *("generation_config", "gpu_memory_utilization", "hf_config_path", "hf_overrides"),
        *("hf_token", "kv_cache_dtype", "kv_cache_memory_bytes", "kv_transfer_config"),
        *("limit_mm_per_prompt", "load_format", "logits_processors", "lora_modules"),
        *("max_logprobs", "max_lora_rank", "max_loras", "max_model_len"),
        *("max_num_batched_tokens", "max_num_seqs", "media_io_kwargs", "mm_processor_cache_gb"),
        *("mm_processor_kwargs", "model_impl", "num_gpu_blocks_override"),
        *("override_generation_config", "pipeline_parallel_size", "quantization"),
        *("reasoning_parser", "revision", "runner", "scheduling_policy", "seed"),
        *("speculative_config", "swap_space", "task", "tensor_parallel_size", "tokenizer"),
        *("tokenizer_mode", "tokenizer_revision", "tool_call_parser", "trust_remote_code"),
    }
)
"""Flags of ``vllm serve``, which a vLLM that Afferent starts accepts."""


def unknown(key: str, known: Mapping[str, Setting], origin: str) -> str:
    """Return the message for an unknown key of a file or of the environment."""

    def spell(key: str) -> str:
        return known[key].variable if origin == "environment" else key

    return f"there is no setting {key!r} ({origin}){_instead(key, known, spell)}"


def unknown_flag(argument: str, known: Mapping[str, Setting]) -> str:
    """Return the message for an unknown argument such as ``--prot`` or ``--prot=1``."""
    flag = argument.partition("=")[0]
    key = flag.lstrip("-").replace("-", "_")
    if key in known and known[key].is_table:
        return f"there is no flag {flag}; {key} are tables of the file (--config)"
    flags = {one.key: one.flag for one in known.values() if not one.is_table}
    flags |= {name: f"--{name}" for name in RESERVED}
    if key in flags:  # with other dashes
        return f"there is no flag {flag}; {_HERE} {flags[key]}"
    return f"there is no flag {flag}{_instead(key, flags, flags.__getitem__)}"


def _instead(key: str, known: Mapping[str, object], spell: Callable[[str], str]) -> str:
    """Return the end of a message, such as ``; did you mean --port?``."""
    if key in OF_VLLM and _VLLM_ARGS in known:
        return f"; it is vLLM's own: {spell(_VLLM_ARGS)} has those, as --{key.replace('_', '-')}"
    words, keys = ELSEWHERE.get(key, ("", ()))
    ours = [spell(one) for one in keys if one in known]
    if words and (ours or not keys):
        return f"; {words} {_join(ours, 'and')}".rstrip()
    longer = [one for one in known if one.startswith(key)]
    likely = longer[:3] or difflib.get_close_matches(key, known, n=2, cutoff=0.75)
    if likely:
        return f"; did you mean {_join([spell(one) for one in likely], 'or')}?"
    if key in OF_VLLM:
        return "; it is vLLM's own, for --engine vllm with --engine-args"
    return "; if it is an engine's own, name that engine: --engine"


def _join(names: list[str], word: str) -> str:
    *first, last = names or [""]
    return f"{', '.join(first)} {word} {last}" if first else last
