"""Write a tiny LLaVA as llama.cpp reads it, with random weights.

    python -m tests.gguf_llava FOLDER        (with the package gguf)

The folder then has ``text.gguf`` and ``vision.gguf``, 0.7 MB together. The model sees 16 patches of
an image of 56 x 56, and answers with letters.
"""

from __future__ import annotations

import string
import sys
from pathlib import Path

import gguf
import numpy as np

_WIDTH, _NUM_LAYERS, _NUM_HEADS, _INNER = 64, 2, 4, 128
_SEEN_WIDTH, _SIDE, _PATCH = 32, 56, 14
_SPECIAL = ("<unk>", "<s>", "</s>")
_CONTEXT = 2048


def _tokens() -> tuple[list[str], list[float], list[int]]:
    """Return all tokens, with their scores and types: special ones, bytes, letters."""
    kinds = gguf.TokenType
    letters = ["\u2581", *string.ascii_letters, *string.punctuation]
    tokens = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
    types += [kinds.BYTE] * 256 + [kinds.NORMAL] * len(letters)
    return tokens, [-float(index) for index in range(len(tokens))], [int(kind) for kind in types]


class _Weights:
    def __init__(self, writer: gguf.GGUFWriter, seed: int) -> None:
        self._writer, self._rng = writer, np.random.default_rng(seed)

    def add(self, name: str, *shape: int, scale: float | None = None) -> None:
        """Add a random matrix, or a vector of ones."""
        if len(shape) == 1:
            drawn = np.ones(shape, np.float32)
        else:
            deviation = scale or 1 / np.sqrt(np.prod(shape[1:]))
            drawn = self._rng.normal(0, deviation, shape).astype(np.float32)
        self._writer.add_tensor(name, drawn)

    def add_zeros(self, name: str, *shape: int) -> None:
        self._writer.add_tensor(name, np.zeros(shape, np.float32))


def write_text(path: Path) -> None:
    tokens, scores, types = _tokens()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_NUM_LAYERS)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_NUM_HEADS)
    writer.add_head_count_kv(_NUM_HEADS)
    writer.add_rope_dimension_count(_WIDTH // _NUM_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    weights = _Weights(writer, 0)
    weights.add("token_embd.weight", len(tokens), _WIDTH, scale=1.0)
    weights.add("output_norm.weight", _WIDTH)
    answers = np.random.default_rng(1).normal(0, 1, (len(tokens), _WIDTH)).astype(np.float32)
    answers[: len(_SPECIAL) + 256] = 0  # it answers with letters
    writer.add_tensor("output.weight", answers)
    for layer in range(_NUM_LAYERS):
        prefix = f"blk.{layer}."
        weights.add(prefix + "attn_norm.weight", _WIDTH)
        weights.add(prefix + "ffn_norm.weight", _WIDTH)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            weights.add(f"{prefix}{name}.weight", _WIDTH, _WIDTH)
        weights.add(prefix + "ffn_gate.weight", _INNER, _WIDTH)
        weights.add(prefix + "ffn_up.weight", _INNER, _WIDTH)
        weights.add(prefix + "ffn_down.weight", _WIDTH, _INNER)
    _write(writer)


def write_vision(path: Path) -> None:
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_bool("clip.has_vision_encoder", val=True)
    writer.add_bool("clip.use_gelu", val=False)
    writer.add_string("clip.projector_type", "mlp")
    for name, value in (
        ("image_size", _SIDE),
        ("patch_size", _PATCH),
        ("embedding_length", _SEEN_WIDTH),
        ("feed_forward_length", 2 * _SEEN_WIDTH),
        ("projection_dim", _WIDTH),
        ("block_count", _NUM_LAYERS),
        ("attention.head_count", 2),
    ):
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    weights = _Weights(writer, 2)
    weights.add_zeros("v.class_embd", _SEEN_WIDTH)
    weights.add("v.patch_embd.weight", _SEEN_WIDTH, 3, _PATCH, _PATCH)
    weights.add("v.position_embd.weight", (_SIDE // _PATCH) ** 2 + 1, _SEEN_WIDTH)
    for name in ("v.pre_ln", *(f"v.blk.{n}.ln{k}" for n in range(_NUM_LAYERS) for k in (1, 2))):
        weights.add(f"{name}.weight", _SEEN_WIDTH)
        weights.add_zeros(f"{name}.bias", _SEEN_WIDTH)
    for layer in range(_NUM_LAYERS):
        prefix = f"v.blk.{layer}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            weights.add(f"{prefix}{name}.weight", _SEEN_WIDTH, _SEEN_WIDTH)
            weights.add_zeros(f"{prefix}{name}.bias", _SEEN_WIDTH)
        weights.add(prefix + "ffn_up.weight", 2 * _SEEN_WIDTH, _SEEN_WIDTH)
        weights.add_zeros(prefix + "ffn_up.bias", 2 * _SEEN_WIDTH)
        weights.add(prefix + "ffn_down.weight", _SEEN_WIDTH, 2 * _SEEN_WIDTH)
        weights.add_zeros(prefix + "ffn_down.bias", _SEEN_WIDTH)
    for number, width in ((0, _SEEN_WIDTH), (2, _WIDTH)):
        weights.add(f"mm.{number}.weight", _WIDTH, width, scale=0.5)
        weights.add_zeros(f"mm.{number}.bias", _WIDTH)
    _write(writer)


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_text(folder / "text.gguf")
    write_vision(folder / "vision.gguf")
