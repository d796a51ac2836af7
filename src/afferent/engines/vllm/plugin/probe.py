"""Parts of vLLM that Afferent uses, and the check that this version has them."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Hook:
    """Name in a module of vLLM, and arguments that it must take."""

    module: str
    name: str
    arguments: Sequence[str] = ()


_PROCESSOR = "vllm.multimodal.processing.processor"
HOOKS: Sequence[_Hook] = (
    _Hook("vllm.multimodal.media", "MEDIA_CONNECTOR_REGISTRY"),
    _Hook("vllm.multimodal.media", "MediaConnector", ("media_io_kwargs",)),
    _Hook("vllm.multimodal.media", "MediaWithBytes"),
    _Hook("vllm.multimodal.media", "MediaConnector.load_from_url", ("url", "media_io")),
    _Hook("vllm.multimodal.media", "MediaConnector.load_from_url_async", ("url", "media_io")),
    _Hook("vllm.multimodal.parse", "ModalityDataItems.get_passthrough_data"),
    _Hook("vllm.multimodal.parse", "MultiModalDataParser._get_subparsers"),
    _Hook(
        _PROCESSOR,
        "BaseMultiModalProcessor._cached_apply_hf_processor",
        ("inputs", "timing_ctx"),
    ),
    _Hook(
        _PROCESSOR,
        "BaseMultiModalProcessor._bind_and_group_updates",
        ("prompt_updates", "mm_item_counts"),
    ),
    _Hook(_PROCESSOR, "BaseMultiModalProcessor._postprocess_prompt", ("prompt",)),
    _Hook(_PROCESSOR, "BaseMultiModalProcessor._get_mm_fields_config"),
    _Hook(_PROCESSOR, "MultiModalProcessingResult", ("prompt_ids", "kwargs", "hashes")),
    _Hook(_PROCESSOR, "PromptReplacement", ("modality", "target", "replacement")),
    _Hook(_PROCESSOR, "PromptUpdateDetails.from_seq", ("seq",)),
    _Hook(_PROCESSOR, "PromptUpdateDetails.select_token_id", ("seq", "embed_token_id")),
    _Hook("vllm.multimodal.inputs", "MultiModalBatchedField", ("keep_on_cpu",)),
    _Hook("vllm.multimodal.inputs", "MultiModalFieldElem", ("data", "field")),
    _Hook("vllm.multimodal.inputs", "MultiModalFlatField"),
    _Hook("vllm.multimodal.inputs", "MultiModalKwargsItems.from_hf_inputs"),
    _Hook("vllm.multimodal.utils", "group_and_batch_mm_items", ("device",)),
    _Hook("vllm.multimodal", "MULTIMODAL_REGISTRY.create_processor", ("model_config",)),
    _Hook("vllm.model_executor.models.registry", "ModelRegistry.models"),
    _Hook("vllm.model_executor.models.registry", "_MULTIMODAL_MODELS"),
    _Hook("vllm.model_executor.models.registry", "_LazyRegisteredModel.load_model_cls"),
)
_EC = "vllm.distributed.ec_transfer.ec_connector.base"
HOOKS_OF_NAMES: Sequence[_Hook] = (
    _Hook("vllm.config", "VllmConfig._resolve_mm_embedding_inputs"),
    _Hook(
        "vllm.config",
        "ECTransferConfig",
        ("ec_connector", "ec_connector_module_path", "ec_role"),
    ),
    _Hook(_EC, "ECConnectorMetadata"),
    _Hook(_EC, "ECConnectorBase", ("vllm_config", "role")),
    _Hook(_EC, "ECConnectorBase.ensure_cache_available", ("request", "num_computed_tokens")),
    _Hook(_EC, "ECConnectorBase.take_unavailable_requests"),
    _Hook(_EC, "ECConnectorBase.has_cache_item", ("identifier",)),
    _Hook(_EC, "ECConnectorBase.update_state_after_alloc", ("request", "index")),
    _Hook(_EC, "ECConnectorBase.build_connector_meta", ("scheduler_output",)),
    _Hook(_EC, "ECConnectorBase.request_finished", ("request",)),
    _Hook(_EC, "ECConnectorBase.bind_connector_metadata", ("connector_metadata",)),
    _Hook(_EC, "ECConnectorBase.clear_connector_metadata"),
)
"""Parts that names by content alone need; without them, names contain the block."""


def missing(hooks: Sequence[_Hook] = HOOKS) -> list[str]:
    """Return the parts that this version of vLLM lacks, in words."""
    return [said for hook in hooks if (said := _missing(hook))]


def has_stable_names() -> bool:
    """Whether this vLLM has the parts that names by content alone need."""
    return not missing(HOOKS_OF_NAMES)


def check() -> None:
    """Check that Afferent works with this vLLM.

    Raises:
        RuntimeError: This vLLM lacks a part, or is set to use its Rust frontend.
    """
    if lacks := missing():
        raise RuntimeError(f"Afferent can't work with this vLLM, which lacks {'; '.join(lacks)}")
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise RuntimeError("Afferent needs vLLM's own frontend: unset VLLM_USE_RUST_FRONTEND")


def _missing(hook: _Hook) -> str:
    where = f"{hook.module}.{hook.name}"
    try:
        found = importlib.import_module(hook.module)
        for part in hook.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return where
    if hook.arguments:
        parameters = inspect.signature(found).parameters  # type: ignore[arg-type]
        if lacks := [name for name in hook.arguments if name not in parameters]:
            return f"{where}({', '.join(lacks)})"
    return ""


if __name__ == "__main__":
    print("\n".join(missing()) or "this vLLM has all that Afferent needs")
