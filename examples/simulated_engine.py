"""Drive the scheduler with a simulated engine, and print a timeline of all sequences.

    python examples/simulated_engine.py

Three requests share an encoder cache that is too small for all their items, and a KV cache that is
too small for all of them at once. Beside them, a session listens and answers. Nothing is computed:
a chosen token is the number of the step. An engine has three duties, which are all here: apply a
step in order, gather the embeddings in a chunk's window, and record each token.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table

from afferent import Placeholder
from afferent.schedule import Chunk, EncoderInput, Limits, Request, Scheduler, Step, WindowIndex

LIMITS = Limits(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_num_batched_embeds=16,
    cache_num_embeds=24,
    kv_num_blocks=24,
    kv_block_tokens=4,
)


def item(key: str, offset: int, length: int) -> EncoderInput:
    """Return an item; a real key is a digest of 32 bytes."""
    return EncoderInput(key.encode(), Placeholder(offset, length), nbytes=length * 2048)


REQUESTS = {
    0: Request(id="call", num_tokens=4, max_tokens=2, session_tokens=32),
    1: Request(id="cats", num_tokens=30, max_tokens=10, items=[item("cat", 2, 8),
                                                               item("cat", 14, 8)]),
    2: Request(id="film", num_tokens=26, max_tokens=8, items=[item("film 1", 0, 8),
                                                              item("film 2", 8, 8),
                                                              item("cat", 16, 8)]),
    5: Request(id="text", num_tokens=9, max_tokens=5),
}  # fmt: skip
# The session's inputs by step: four positions of audio, and the number of tokens of the answer.
SPOKEN = {4: ("hm", 0), 7: ("hello", 2), 12: ("bye", 1)}
HANGS_UP = 15


@dataclass
class SimulatedWorker:
    """A worker's state: the sequences, the embeddings by key, and the window of each sequence."""

    embeddings: set[bytes] = field(default_factory=set)
    computed: dict[str, int] = field(default_factory=dict)
    windows: dict[str, WindowIndex[EncoderInput]] = field(default_factory=dict)

    def do(self, step: Step) -> list[str]:
        """Apply a step in its order; return the sequences that have a new token."""
        for sequence_id in step.drop:
            del self.computed[sequence_id]
        self.embeddings -= set(step.evict)
        self.embeddings |= {encode.key for encode in step.encode}
        for chunk in step.prefill:
            self._gather(chunk)
            self.computed[chunk.sequence_id] = chunk.start + chunk.num_tokens
        for sequence_id in step.decode:
            self.computed[sequence_id] += 1
        return [chunk.sequence_id for chunk in step.prefill if chunk.samples] + step.decode

    def _gather(self, chunk: Chunk) -> None:
        """Gather the rows of embeddings for this chunk, item by item."""
        window, end = self.windows[chunk.sequence_id], chunk.start + chunk.num_tokens
        for ordinal in window.in_window(chunk.start, end):
            offset, stop = window.span(ordinal)
            rows = range(max(chunk.start, offset) - offset, min(end, stop) - offset)
            if not rows or window[ordinal].key not in self.embeddings:
                raise AssertionError("the scheduler promised these embeddings")


@dataclass
class Engine:
    """An engine that passes events to the scheduler, and its steps to the worker."""

    scheduler: Scheduler = field(default_factory=lambda: Scheduler(LIMITS))
    worker: SimulatedWorker = field(default_factory=SimulatedWorker)
    spoken: list[EncoderInput] = field(default_factory=list)

    def events(self, now: int) -> str:
        """Let requests arrive, and the session speak and hang up; return a description."""
        told = []
        if request := REQUESTS.get(now):
            self.scheduler.add(request)
            placed = [(i.placeholder, i) for i in request.items]
            self.worker.windows[request.id] = WindowIndex(placed)
            told.append(f"{request.id} arrives")
        if spoken := SPOKEN.get(now):
            key, max_tokens = spoken
            heard = item(key, 0, 4)
            self.scheduler.append("call", num_tokens=4, max_tokens=max_tokens, items=[heard])
            self.spoken.append(heard)
            told.append(f"call: {key!r}")
        if now == HANGS_UP:
            self.scheduler.abort("call")
            told.append("call hangs up")
        return ", ".join(told)

    def step(self) -> tuple[Step, list[str]]:
        """Compute one step; return it, and the sequences that ended with it."""
        step = self.scheduler.next_step()
        for placed in step.placed:
            heard = self.spoken.pop(0)
            window = self.worker.windows[placed.sequence_id]
            window.extend([(heard.placeholder, heard)], base=placed.start)
        ended = [
            sequence_id
            for sequence_id in self.worker.do(step)
            if self.scheduler.record(sequence_id, is_eos=False) and sequence_id != "call"
        ]
        return step, ended


def describe(step: Step, sequence_id: str, ended: list[str], running: bool) -> str:
    """Describe a step for one sequence, as a cell of the table."""
    chunk = next((c for c in step.prefill if c.sequence_id == sequence_id), None)
    cell = ""
    if chunk is not None:
        end = chunk.start + chunk.num_tokens
        cell = f"[cyan]{chunk.start:>3}..{end:<3}[/]" + ("[green]●[/]" if chunk.samples else " ")
    elif sequence_id in step.decode:
        cell = "       [green]●[/]"
    elif sequence_id in step.drop and running:
        cell = "[red]preempted[/]"
    return cell + (" [bold]end[/]" if sequence_id in ended else "")


def main() -> None:
    parser = argparse.ArgumentParser(description="The scheduler's timeline with a pretended engine")
    parser.add_argument("--steps", type=int, default=40, help="stop after so many (default: 40)")
    num_steps = parser.parse_args().steps
    engine, alive = Engine(), set()
    names = [request.id for request in REQUESTS.values()]
    table = Table(
        box=box.SIMPLE_HEAD, title="start..end: a chunk is computed   ●: a token is chosen"
    )
    for column in ("step", *names, "encode", "evict", "cache", "events"):
        table.add_column(column, no_wrap=True, justify="right" if column == "step" else "left")
    for now in range(num_steps):
        told = engine.events(now)
        alive |= {told.split()[0]} if "arrives" in told else set()
        alive -= {"call"} if now >= HANGS_UP else set()
        step, ended = engine.step()
        if step.is_empty and now > HANGS_UP:
            break
        cells = [describe(step, name, ended, name in alive) for name in names]
        alive -= set(ended)
        encode = ", ".join(e.key.decode() for e in step.encode)
        evict = ", ".join(key.decode() for key in step.evict)
        used = engine.scheduler.cache.used_embeds
        table.add_row(str(now), *cells, encode, evict, f"{used:>2}/{LIMITS.cache_num_embeds}", told)
    Console(highlight=False, width=max(120, Console().width)).print(table)


if __name__ == "__main__":
    main()
