"""The families that make features here. Each is a file, and says the rest in its `ENTRY`."""

from __future__ import annotations

from typing import Final

from afferent.preprocess.entry import Entry
from afferent.preprocess.families import gemma3, internvl, llava, qwen_vl, whisper
from afferent.preprocess.families.fixed import FixedFamily
from afferent.preprocess.families.internvl import TiledFamily
from afferent.preprocess.families.qwen_vl import QwenVlFamily
from afferent.preprocess.families.whisper import VoxtralFamily, WhisperFamily

NativeFamily = FixedFamily | TiledFamily | QwenVlFamily | VoxtralFamily | WhisperFamily

ENTRIES: Final[tuple[Entry[NativeFamily], ...]] = (
    gemma3.ENTRY,
    internvl.ENTRY,
    llava.ENTRY,
    qwen_vl.ENTRY,
    whisper.ENTRY,
)
