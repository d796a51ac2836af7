"""What runs next: pure logic, events in, actions out.

For authors of engines: `Scheduler` decides a step, `WindowIndex` says which items a window of
positions touches, `EncoderCache` which embeddings the workers hold. Each can be used alone.
"""

from afferent.quota.shares import Share
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
