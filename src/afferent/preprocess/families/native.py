"""Families that make features here. Each is a file with an `ENTRY`."""

from __future__ import annotations

from typing import Final

from afferent.preprocess.entry import Entry
from afferent.preprocess.families import (
    anyres,
    gemma3,
    glm,
    idefics3,
    internvl,
    llava,
    pixtral,
    qwen2_audio,
    qwen_vl,
    whisper,
)
from afferent.preprocess.families.anyres import AnyResolutionFamily
from afferent.preprocess.families.fixed import FixedFamily
from afferent.preprocess.families.glm import GlmFamily
from afferent.preprocess.families.idefics3 import Idefics3Family
from afferent.preprocess.families.internvl import TiledFamily
from afferent.preprocess.families.outside import OutsideFamily
from afferent.preprocess.families.pixtral import PixtralFamily
from afferent.preprocess.families.qwen2_audio import Qwen2AudioFamily
from afferent.preprocess.families.qwen_vl import QwenVlFamily
from afferent.preprocess.families.whisper import VoxtralFamily, WhisperFamily

NativeFamily = (
    AnyResolutionFamily
    | FixedFamily
    | GlmFamily
    | Idefics3Family
    | OutsideFamily
    | PixtralFamily
    | Qwen2AudioFamily
    | QwenVlFamily
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
    llava.ENTRY,
    pixtral.ENTRY,
    qwen2_audio.ENTRY,
    qwen_vl.ENTRY,
    whisper.ENTRY,
)
