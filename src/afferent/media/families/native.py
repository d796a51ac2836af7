"""Families that make features here. Each is a file with an `ENTRY`."""

from __future__ import annotations

from typing import Final

from afferent.media.families import (
    anyres,
    gemma3,
    glm,
    idefics3,
    internvl,
    llama4,
    llava,
    omni,
    pixtral,
    qwen2_audio,
    qwen_vl,
    whisper,
)
from afferent.media.families.anyres import AnyResolutionFamily
from afferent.media.families.entry import Entry
from afferent.media.families.fixed import FixedFamily
from afferent.media.families.glm import GlmFamily
from afferent.media.families.idefics3 import Idefics3Family
from afferent.media.families.internvl import TiledFamily
from afferent.media.families.llama4 import Llama4Family
from afferent.media.families.omni import OmniFamily
from afferent.media.families.outside import OutsideFamily
from afferent.media.families.pixtral import PixtralFamily
from afferent.media.families.qwen2_audio import Qwen2AudioFamily
from afferent.media.families.qwen_vl import QwenVlFamily
from afferent.media.families.reencoded import ReencodedFamily
from afferent.media.families.whisper import VoxtralFamily, WhisperFamily

NativeFamily = (
    AnyResolutionFamily
    | FixedFamily
    | GlmFamily
    | Idefics3Family
    | Llama4Family
    | OmniFamily
    | OutsideFamily
    | PixtralFamily
    | Qwen2AudioFamily
    | QwenVlFamily
    | ReencodedFamily
    | TiledFamily
    | VoxtralFamily
    | WhisperFamily
)

ENTRIES: Final[tuple[Entry[NativeFamily], ...]] = (
    anyres.ENTRY,
    gemma3.ENTRY,
    glm.ENTRY,
    idefics3.ENTRY,
    internvl.ENTRY,
    llama4.ENTRY,
    llava.ENTRY,
    omni.ENTRY,
    pixtral.ENTRY,
    qwen2_audio.ENTRY,
    qwen_vl.ENTRY,
    whisper.ENTRY,
)
