"""Parts of vLLM that the plugin uses: the one table of them, for each supported version.

The versions that the plugin supports have the same parts, so there is one table. `OF_NAMES`,
`OF_ARRIVALS`, `OF_SPEECH` and `OF_MISTRAL` are optional. This module imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SUPPORTED: Final = ("0.31", "0.32", "0.33")
"""Supported minor versions (`docs/vllm.md` names the tests that have run with each)."""


@dataclass(frozen=True, slots=True)
class Hook:
    """Name in a module of vLLM, and arguments that it must take."""

    module: str
    name: str
    arguments: Sequence[str] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def is_private(self) -> bool:
        """Whether vLLM's maintainers may change it without a word."""
        return any(part.startswith("_") for part in self.name.split("."))


_INPUTS = "vllm.multimodal.inputs"
_MEDIA = "vllm.multimodal.media"
_PARSE = "vllm.multimodal.parse"
_PROCESSOR = "vllm.multimodal.processing.processor"
_REGISTRY = "vllm.model_executor.models.registry"
_EC = "vllm.distributed.ec_transfer.ec_connector.base"

HOOKS: Final[Sequence[Hook]] = (
    Hook(_MEDIA, "MEDIA_CONNECTOR_REGISTRY.register", ("name",)),
    Hook(_MEDIA, "MediaConnector", ("media_io_kwargs",)),
    Hook(_MEDIA, "MediaConnector.load_from_url", ("url", "media_io")),
    Hook(_MEDIA, "MediaConnector.load_from_url_async", ("url", "media_io")),
    Hook(_MEDIA, "MediaWithBytes", ("media", "original_bytes")),
    Hook(_PARSE, "ModalityDataItems.get_passthrough_data"),
    Hook(_PARSE, "MultiModalDataItems"),
    Hook(_PARSE, "MultiModalDataParser._get_subparsers"),
    Hook(
        _PROCESSOR, "BaseMultiModalProcessor._cached_apply_hf_processor", ("inputs", "timing_ctx")
    ),
    Hook(
        _PROCESSOR,
        "BaseMultiModalProcessor._bind_and_group_updates",
        ("prompt_updates", "mm_item_counts"),
    ),
    Hook(_PROCESSOR, "BaseMultiModalProcessor._postprocess_prompt", ("prompt",)),
    Hook(_PROCESSOR, "BaseMultiModalProcessor._get_mm_fields_config"),
    Hook(_PROCESSOR, "MultiModalProcessingResult", ("prompt_ids", "kwargs", "hashes")),
    Hook(_PROCESSOR, "PromptReplacement", ("modality", "target", "replacement")),
    Hook(_PROCESSOR, "PromptUpdateDetails.from_seq", ("seq",)),
    Hook(_PROCESSOR, "PromptUpdateDetails.select_token_id", ("seq", "embed_token_id")),
    Hook(_INPUTS, "MultiModalBatchedField", ("keep_on_cpu",)),
    Hook(_INPUTS, "MultiModalFieldElem", ("data", "field")),
    Hook(_INPUTS, "MultiModalFlatField"),
    Hook(_INPUTS, "MultiModalKwargsItem"),
    Hook(_INPUTS, "MultiModalKwargsItems.from_hf_inputs"),
    Hook("vllm.multimodal.utils", "group_and_batch_mm_items", ("device",)),
    Hook("vllm.multimodal", "MULTIMODAL_REGISTRY.create_processor", ("model_config",)),
    Hook(_REGISTRY, "ModelRegistry.models"),
    Hook(_REGISTRY, "_MULTIMODAL_MODELS"),
    Hook(_REGISTRY, "_LazyRegisteredModel", ("module_name", "class_name")),
    Hook(_REGISTRY, "_LazyRegisteredModel.load_model_cls"),
    Hook("vllm.distributed", "get_tensor_model_parallel_rank"),
    Hook("vllm.distributed", "get_tp_group"),
)
OF_NAMES: Final[Sequence[Hook]] = (
    Hook("vllm.config", "VllmConfig._resolve_mm_embedding_inputs"),
    Hook(
        "vllm.config",
        "ECTransferConfig",
        ("ec_connector", "ec_connector_module_path", "ec_role"),
    ),
    Hook(_EC, "ECConnectorMetadata"),
    Hook(_EC, "ECConnectorRole"),
    Hook(_EC, "ECConnectorBase", ("vllm_config", "role")),
    Hook(_EC, "ECConnectorBase.ensure_cache_available", ("request", "num_computed_tokens")),
    Hook(_EC, "ECConnectorBase.take_unavailable_requests"),
    Hook(_EC, "ECConnectorBase.has_cache_item", ("identifier",)),
    Hook(_EC, "ECConnectorBase.update_state_after_alloc", ("request", "index")),
    Hook(_EC, "ECConnectorBase.build_connector_meta", ("scheduler_output",)),
    Hook(_EC, "ECConnectorBase.request_finished", ("request",)),
    Hook(_EC, "ECConnectorBase.bind_connector_metadata", ("connector_metadata",)),
    Hook(_EC, "ECConnectorBase.clear_connector_metadata"),
)
"""Parts that names by content alone need; without them, names contain the block."""
OF_ARRIVALS: Final[Sequence[Hook]] = (
    Hook("vllm.v1.engine.core", "EngineCore.preprocess_add_request", ("request",)),
    Hook("vllm.v1.core.sched.interface", "SchedulerInterface.get_ec_connector"),
)
"""Without them, requests with new items often begin a step later."""
OF_SPEECH: Final[Sequence[Hook]] = (
    Hook(
        "vllm.entrypoints.speech_to_text.base.serving",
        "SpeechToTextBaseServing._preprocess_speech_to_text",
        ("request", "audio_data", "request_id"),
    ),
)
"""Without them, a vLLM whose model transcribes does not start."""
OF_MISTRAL: Final[Sequence[Hook]] = (
    Hook("vllm.tokenizers.mistral", "MistralTokenizer.apply_chat_template", ("messages",)),
)
"""Without them, requests with media to models in Mistral's own format fail."""
ALL: Final = (*HOOKS, *OF_NAMES, *OF_ARRIVALS, *OF_SPEECH, *OF_MISTRAL)
