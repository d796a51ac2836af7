"""Scheduling of steps. Pure logic: events in, actions out.

For authors of engines. Each class can be used alone:

- `Scheduler` decides a step.
- `WindowIndex` finds the items that a window of positions touches.
- `EncoderCache` tracks the embeddings that the workers store.
"""

from afferent.admission.shares import Share
from afferent.schedule.encoder_cache import EncoderCache, Plan
from afferent.schedule.scheduler import Scheduler
from afferent.schedule.step import (
    Chunk,
    Encode,
    EncoderInput,
    FinishReason,
    Limits,
    Placed,
    Request,
    Step,
)
from afferent.schedule.window import CrossAttentionIndex, WindowIndex

__all__ = [
    "Chunk",
    "CrossAttentionIndex",
    "Encode",
    "EncoderCache",
    "EncoderInput",
    "FinishReason",
    "Limits",
    "Placed",
    "Plan",
    "Request",
    "Scheduler",
    "Share",
    "Step",
    "WindowIndex",
]
