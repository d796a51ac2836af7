"""Families that make features here. Each is a file with an `ENTRY`."""

from __future__ import annotations

from typing import Final

from afferent.media.families import (
    anyres,
    fixed,
    gemma3,
    gemma3n,
    glm,
    idefics3,
    internvl,
    internvl_chat,
    llama4,
    llava,
    minicpm,
    mistral,
    omni,
    outside,
    pixtral,
    qwen2_audio,
    qwen_vl,
    reencoded,
    whisper,
)
from afferent.media.families.entry import Entry

NativeFamily = (
    anyres.AnyResolutionFamily
    | fixed.FixedFamily
    | glm.GlmFamily
    | idefics3.Idefics3Family
    | internvl.TiledFamily
    | internvl_chat.InternVlChatFamily
    | llama4.Llama4Family
    | minicpm.MiniCpmFamily
    | mistral.MistralAudio
    | mistral.MistralImages
    | omni.OmniFamily
    | outside.OutsideFamily
    | pixtral.PixtralFamily
    | qwen2_audio.Qwen2AudioFamily
    | qwen_vl.QwenVlFamily
    | reencoded.ReencodedFamily
    | whisper.VoxtralFamily
    | whisper.WhisperFamily
)

ENTRIES: Final[tuple[Entry[NativeFamily], ...]] = (
    anyres.ENTRY,
    gemma3.ENTRY,
    gemma3n.ENTRY,
    glm.ENTRY,
    idefics3.ENTRY,
    internvl.ENTRY,
    internvl_chat.ENTRY,
    llama4.ENTRY,
    llava.ENTRY,
    minicpm.ENTRY,
    mistral.ENTRY,
    omni.ENTRY,
    pixtral.ENTRY,
    qwen2_audio.ENTRY,
    qwen_vl.ENTRY,
    whisper.ENTRY,
)
