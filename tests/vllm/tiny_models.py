"""Tiny models with random weights, in the form that vLLM loads on a CPU."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3ASRConfig,
    Qwen3ASRFeatureExtractor,
    Qwen3ASRForConditionalGeneration,
)

from tests import models
from tests.engine import families
from tests.vllm import internvl_chat_model, mistral_models
from tests.vllm.servers import python, run_inside

LANGUAGES = re.findall(
    "..",
    "afarhyazbebsbgcazhhrcsdanlenetfifrgldeelhehihuisiditjaknkkkolvlt"
    "mkmsmrminenofaplptrorusrskslesswsvtltathtrukurvicy",
)
"""Languages whose tokens vLLM looks up in a Whisper's tokenizer."""
_HEAD_DIM = 32  # the smallest that vLLM's kernels for the CPU support


def widen_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the models heads that vLLM's kernels for the CPU support."""
    hidden_size = families.TEXT["num_attention_heads"] * _HEAD_DIM
    monkeypatch.setitem(families.TEXT, "head_dim", _HEAD_DIM)
    monkeypatch.setitem(families.TEXT, "hidden_size", hidden_size)
    monkeypatch.setitem(families.QWEN["qwen2"][2], "hidden_size", hidden_size)
    for generation in ("qwen2_5", "qwen3"):
        monkeypatch.setitem(families.QWEN[generation][2], "out_hidden_size", hidden_size)


def _rename_tower(folder: Path) -> None:
    """Rename the tower's weights to the names before transformers 5, which vLLM knows."""
    path = folder / "model.safetensors"
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model.")
        if "vision_tower." in name and "vision_model" not in name
        else name: tensor
        for name, tensor in load_file(path).items()
    }
    save_file(renamed, path, metadata={"format": "pt"})


def _qwen3_vl_moe(folder: Path) -> None:
    """Make a Qwen3-VL-MoE with its experts' weights as in the released files."""
    families.make_qwen_vl(folder, "qwen3_moe")
    path = folder / "model.safetensors"
    released = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(released, path, metadata={"format": "pt"})


def _llava(folder: Path) -> None:
    models.make_llava(folder, hidden_size=2 * _HEAD_DIM)
    _rename_tower(folder)


def _gemma3(folder: Path) -> None:
    families.make_gemma3(folder)
    _rename_tower(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "post_" in name:  # else each token would repeat itself in any context
            tensor.fill_(30.0)
    save_file(tensors, path, metadata={"format": "pt"})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(["\n" * number for number in range(1, 5)])  # like the tokenizer of Gemma
    tokenizer.save_pretrained(folder)


def _gemma3n(folder: Path) -> None:
    _need("timm")
    run_inside("tests.vllm.gemma3n_model", str(folder))


def _internvl(folder: Path) -> None:
    """Make an InternVL with the files that its whole processor needs."""
    families.make_internvl(folder)
    processor = {"processor_class": "InternVLProcessor", "image_seq_length": 4}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    video = {"video_processor_type": "InternVLVideoProcessor", "size": {"height": 28, "width": 28}}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))


def _need(*packages: str) -> None:
    command = [python(), "-c", f"import {', '.join(packages)}"]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip(f"vLLM's environment has not all of {packages}: make setup-vllm")


def _smolvlm(folder: Path) -> None:
    _need("num2words")
    families.make_smolvlm(folder)
    video = {"video_processor_type": "SmolVLMVideoProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))


def _renamed(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def renamed(folder: Path) -> None:
        make(folder)
        _rename_tower(folder)

    return renamed


IMAGES: dict[str, Callable[[Path], None]] = {
    "qwen2_5_vl": lambda folder: families.make_qwen_vl(folder, "qwen2_5"),
    "qwen3_vl": lambda folder: families.make_qwen_vl(folder, "qwen3"),
    "qwen3_vl_moe": _qwen3_vl_moe,
    "glm4v": families.make_glm4v,
    "glm4v_moe": families.make_glm4v_moe,
    "glm_ocr": families.make_glm_ocr,
    "llama4": families.make_llama4,
    "llava": _llava,
    "llava_next": _renamed(families.make_llava_next),
    "llava_onevision": _renamed(families.make_llava_onevision),
    "gemma3": _gemma3,
    "gemma3n": _gemma3n,
    "internvl": _internvl,
    "internvl_chat": internvl_chat_model.make,
    "idefics3": families.make_idefics3,
    "minicpmv4_6": families.make_minicpm,
    "smolvlm": _smolvlm,
    "pixtral": families.make_pixtral,
    "mistral3": families.make_mistral3,
}

ARGUMENTS: dict[Callable[[Path], None], tuple[str, ...]] = {
    # vLLM's linear attention for the CPU computes in nothing else.
    families.make_minicpm: ("--dtype", "bfloat16"),
    # Its template writes a message's text as it is.
    internvl_chat_model.make: (
        *("--trust-remote-code", "--chat-template-content-format", "string"),
    ),
}
"""Arguments of vLLM that a model needs."""


def _with_audio(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def made(folder: Path) -> None:
        _need("soundfile", "av")
        make(folder)

    return made


def _qwen3_vl_video(folder: Path) -> None:
    families.make_qwen_vl(folder, "qwen3")
    _set_frame_size(folder)


def _qwen3_vl_moe_video(folder: Path) -> None:
    _qwen3_vl_moe(folder)
    _set_frame_size(folder)


def make_qwen3_asr(folder: Path) -> None:
    """Make a Qwen3-ASR, which transcribes audio of 16 kHz as it arrives."""
    tokenizer = families.make_tokenizer(
        audio_token="<|audio_pad|>",
        audio_bos_token="<|audio_start|>",
        audio_eos_token="<|audio_end|>",
    )
    text = {**families.TEXT, "model_type": "qwen3", "tie_word_embeddings": False}
    text["head_dim"] = _HEAD_DIM
    audio = {
        **families.AUDIO,
        "output_dim": text["hidden_size"],
        "downsample_hidden_size": 16,
    }
    config = Qwen3ASRConfig(
        audio_config=audio,
        text_config=text,
        audio_token_id=tokenizer.convert_tokens_to_ids("<|audio_pad|>"),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen3ASRForConditionalGeneration(config)
    families.save(folder, model, tokenizer, "<|audio_start|><|audio_pad|><|audio_end|>")
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"architectures": ["Qwen3ASRRealtimeGeneration"]})
    )
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["thinker.lm_head.weight"] = tensors.pop("lm_head.weight")  # vLLM's name
    save_file(tensors, path, metadata={"format": "pt"})
    Qwen3ASRFeatureExtractor(feature_size=16).save_pretrained(folder)
    families.write(folder, processor_class="Qwen3ASRProcessor")


def make_whisper(folder: Path) -> None:
    """Make a Whisper for clips of 2 s, with the tokens that vLLM writes in its prompts."""
    languages = [f"<|{each}|>" for each in LANGUAGES]
    tasks = ["<|startoftranscript|>", "<|transcribe|>", "<|translate|>", "<|prev|>"]
    times = ["<|notimestamps|>", *(f"<|{at / 50:.2f}|>" for at in range(101))]
    special = [*languages, *tasks, *times]
    tokenizer = families.make_tokenizer(**{f"token_{at}": each for at, each in enumerate(special)})
    families.make_whisper(
        folder,
        tokenizer,
        vocab_size=len(tokenizer),
        d_model=2 * _HEAD_DIM,
        decoder_start_token_id=tokenizer.convert_tokens_to_ids("<|startoftranscript|>"),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        encoder_layers=2,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    families.write(folder, processor_class="WhisperProcessor")


def _set_frame_size(folder: Path) -> None:
    """Set the size of frames, which else depends on the version of vLLM."""
    own = {"size": {"shortest_edge": 4096, "longest_edge": 200_000}, "patch_size": 16}
    half = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    settings = {"video_processor_type": "Qwen3VLVideoProcessor", **own, **half}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))


UPRIGHT: dict[str, Callable[[Path], None]] = {
    "mistrals_pixtral": mistral_models.make_pixtral,
    "mistrals_mistral3": mistral_models.make_mistral3,
}
SPOKEN: dict[str, Callable[[Path], None]] = {"mistrals_voxtral": mistral_models.make_voxtral}
FILMS: dict[str, Callable[[Path], None]] = {
    "qwen2_vl_video": lambda folder: families.make_qwen_vl(folder, "qwen2"),
    "qwen2_5_vl_video": lambda folder: families.make_qwen_vl(folder, "qwen2_5"),
    "qwen3_vl_video": _qwen3_vl_video,
    "qwen3_vl_moe_video": _qwen3_vl_moe_video,
}
BOTH: dict[str, Callable[[Path], None]] = {
    "qwen2_5_omni": _with_audio(families.make_qwen2_5_omni),
    "qwen3_omni": _with_audio(families.make_qwen3_omni),
}
CLIPS: dict[str, Callable[[Path], None]] = {"qwen2_audio": _with_audio(families.make_qwen2_audio)}
