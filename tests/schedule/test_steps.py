"""The steps of the scheduler in single cases."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from afferent.admission.shares import Share
from afferent.errors import (
    ConfigError,
    EncoderCacheFull,
    InvalidPlaceholders,
    InvalidRequest,
    PromptTooLong,
)
from afferent.schedule import scheduler as scheduler_module
from afferent.schedule.kv_cache import KvCache
from afferent.schedule.scheduler import Scheduler
from afferent.schedule.sequence import Sequence
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
from afferent.types import Placeholder


def item(key: bytes, offset: int, length: int, nbytes: int = 0) -> EncoderInput:
    return EncoderInput(key, Placeholder(offset, length), nbytes)


def scheduler_with(**limits: Any) -> Scheduler:
    return Scheduler(Limits(**{"max_num_seqs": 4, "kv_block_tokens": 1, **limits}))


def add(scheduler: Scheduler, id: str, num_tokens: int, *items: EncoderInput, **more: Any) -> None:
    scheduler.add(Request(**{"id": id, "num_tokens": num_tokens, "items": items, "max_tokens": 2,
                             **more}))  # fmt: skip


def step(**parts: Any) -> Step:
    return Step(
        **{
            "drop": [],
            "evict": [],
            "placed": [],
            "encode": [],
            "prefill": [],
            "decode": [],
            **parts,
        }
    )


NOTHING = step()


def test_a_request_from_prompt_to_end() -> None:
    scheduler = scheduler_with()
    assert scheduler.next_step() == NOTHING
    assert NOTHING.is_empty
    add(scheduler, "a", 10, item(b"dog", 2, 4))
    assert scheduler.next_step() == step(
        encode=[Encode("a", 0, b"dog")], prefill=[Chunk("a", 0, 10, True)]
    )
    assert scheduler.next_step() == NOTHING, "its token is being chosen"
    assert scheduler.record("a", is_eos=False) is None
    assert scheduler.next_step() == step(decode=["a"])
    assert scheduler.record("a", is_eos=False) is FinishReason.LENGTH
    assert scheduler.next_step() == step(drop=["a"])
    assert scheduler.next_step() == NOTHING


def test_chunks_end_where_embeddings_are_missing() -> None:
    """Five tokens and eight rows of embeddings per step: the second item waits a step."""
    scheduler = scheduler_with(max_num_batched_tokens=5, max_num_batched_embeds=8)
    add(scheduler, "a", 20, item(b"dog", 1, 3), item(b"cat", 4, 6))
    assert scheduler.next_step() == step(
        encode=[Encode("a", 0, b"dog")], prefill=[Chunk("a", 0, 4, False)]
    )
    assert scheduler.next_step() == step(
        encode=[Encode("a", 1, b"cat")], prefill=[Chunk("a", 4, 5, False)]
    )
    assert scheduler.next_step() == step(prefill=[Chunk("a", 9, 5, False)])


def test_lookahead_encodes_before_the_chunk_that_needs_it() -> None:
    scheduler = scheduler_with(max_num_batched_tokens=4, lookahead_tokens=2)
    add(scheduler, "a", 9, item(b"dog", 5, 3))
    assert scheduler.next_step() == step(
        encode=[Encode("a", 0, b"dog")], prefill=[Chunk("a", 0, 4, False)]
    )


def test_a_chunk_ends_before_an_item_that_may_not_be_cut() -> None:
    scheduler = scheduler_with(max_num_batched_tokens=8, can_split_items=False)
    add(scheduler, "a", 20, item(b"dog", 3, 5), item(b"cat", 8, 4), item(b"hen", 14, 5))
    ends = []
    for _ in range(3):
        (chunk,) = scheduler.next_step().prefill
        ends.append(chunk.start + chunk.num_tokens)
    assert ends == [8, 14, 20]


def test_an_item_that_may_not_be_cut_waits_for_tokens_and_memory() -> None:
    scheduler = scheduler_with(
        max_num_seqs=2, max_num_batched_tokens=6, can_split_items=False, kv_num_blocks=12
    )
    add(scheduler, "a", 3)
    add(scheduler, "b", 7, item(b"dog", 0, 4))
    assert scheduler.next_step().prefill == [Chunk("a", 0, 3, True)], "3 of 6 are left, it wants 4"
    scheduler.record("a", is_eos=False)
    assert scheduler.next_step() == step(
        encode=[Encode("b", 0, b"dog")], prefill=[Chunk("b", 0, 5, False)], decode=["a"]
    )


def test_memory_for_a_whole_item_is_made() -> None:
    """Four blocks are free, but the item needs five at once."""
    scheduler = scheduler_with(
        max_num_seqs=3, max_num_batched_tokens=7, can_split_items=False, kv_num_blocks=11
    )
    add(scheduler, "a", 8, item(b"dog", 3, 5), max_tokens=1)
    assert scheduler.next_step().prefill == [Chunk("a", 0, 3, False)]
    add(scheduler, "b", 4, max_tokens=5)
    assert scheduler.next_step().prefill == [Chunk("b", 0, 4, True)]
    scheduler.record("b", is_eos=False)
    assert scheduler.next_step() == step(
        drop=["b"], encode=[Encode("a", 0, b"dog")], prefill=[Chunk("a", 3, 5, True)]
    )


def test_what_is_computed_at_once_must_fit_beside_what_decodes() -> None:
    scheduler = scheduler_with(max_num_seqs=3, max_num_batched_tokens=7, can_split_items=False)
    add(scheduler, "a", 9, item(b"dog", 0, 5))
    with pytest.raises(EncoderCacheFull, match=r"6 positions .* 5"):
        add(scheduler, "b", 9, item(b"cat", 0, 6))
    add(scheduler, "c", 1, item(b"cat", 0, 6), cross_attention=True)


def test_item_fits_beside_all_answers_where_more_requests_run_than_decode() -> None:
    """All tokens of answers in a step may be those of other requests."""
    scheduler = scheduler_with(
        max_num_seqs=8, max_step_decodes=2, max_num_batched_tokens=10, can_split_items=False
    )
    for name in "ab":
        add(scheduler, name, 1, max_tokens=100)
    scheduler.next_step()
    for name in "ab":
        scheduler.record(name, is_eos=False)
    with pytest.raises(EncoderCacheFull, match=r"9 positions .* 8"):
        add(scheduler, "c", 9, item(b"cat", 0, 9))
    add(scheduler, "c", 8, item(b"cat", 0, 8))
    assert scheduler.next_step() == step(
        encode=[Encode("c", 0, b"cat")], prefill=[Chunk("c", 0, 8, True)], decode=["a", "b"]
    )


def test_all_items_are_there() -> None:
    scheduler = scheduler_with(max_num_batched_tokens=4)
    add(scheduler, "a", 9, item(b"dog", 0, 3), item(b"cat", 5, 3))
    has = []
    for _ in range(3):
        has.append(scheduler.has_all_items("a"))
        scheduler.next_step()
    assert has == [False, False, True]


def test_the_last_token_of_a_step_is_for_who_comes() -> None:
    scheduler = scheduler_with(max_num_batched_tokens=10)
    add(scheduler, "a", 9)
    add(scheduler, "b", 10)
    found = scheduler.next_step().prefill
    assert found == [Chunk("a", 0, 9, True), Chunk("b", 0, 1, False)]


def ids(found: Step) -> list[str]:
    return [chunk.sequence_id for chunk in found.prefill]


def test_a_small_prompt_is_not_behind_large_ones() -> None:
    scheduler = scheduler_with(max_num_seqs=8, max_num_batched_tokens=100)
    for id in ("a", "b", "c"):
        add(scheduler, id, 1000)
    assert ids(scheduler.next_step()) == ["a"]
    add(scheduler, "small", 50, item(b"dog", 0, 40))
    found = scheduler.next_step()
    assert found.prefill == [Chunk("a", 100, 50, False), Chunk("small", 0, 50, True)]
    assert found.encode == [Encode("small", 0, b"dog")]


def test_a_large_prompt_is_served_though_small_ones_never_stop() -> None:
    """With equal rates it would have half at first, and less with each small one that waits."""
    scheduler = scheduler_with(max_num_seqs=8, max_num_batched_tokens=100)
    add(scheduler, "large", 1000)
    for number in range(1000):
        add(scheduler, str(number), 100, max_tokens=1)
        (chunk,) = scheduler.next_step().prefill
        if chunk.sequence_id == "large" and chunk.samples:
            break
        scheduler.record(chunk.sequence_id, is_eos=True)
    assert number <= 30


def test_tenants_have_steps_by_weight() -> None:
    scheduler = scheduler_with(max_num_seqs=100, max_num_batched_tokens=100)
    for number in range(40):
        add(scheduler, f"flood {number}", 300, share=Share("flood", 1.0))
    for number in range(10):
        add(scheduler, f"heavy {number}", 300, share=Share("heavy", 3.0))
    had: Counter[str] = Counter()
    for _ in range(20):
        for chunk in scheduler.next_step().prefill:
            had[chunk.sequence_id.split()[0]] += chunk.num_tokens
    assert had["heavy"] == pytest.approx(1500, abs=100)
    assert had["flood"] == 2000 - had["heavy"]


def answered(scheduler: Scheduler, num_steps: int) -> Counter[str]:
    """Return the number of tokens in some steps, by the first word of the sequence ids."""
    had: Counter[str] = Counter()
    for _ in range(num_steps):
        found = scheduler.next_step()
        chosen = [chunk.sequence_id for chunk in found.prefill if chunk.samples]
        for id in [*found.decode, *chosen]:
            had[id.split()[0]] += 1
            scheduler.record(id, is_eos=False)
    return had


def test_answers_of_one_request_share_the_tokens_of_one_request() -> None:
    scheduler = scheduler_with(max_num_seqs=100, max_step_decodes=4)
    for number in range(8):
        add(scheduler, f"eight {number}", 1, max_tokens=1000, answer_of="eight")
    for id in ("one", "two"):
        add(scheduler, id, 1, max_tokens=1000)
    answered(scheduler, 3)  # all sequences have begun
    had = answered(scheduler, 300)
    assert had["eight"] == pytest.approx(600, abs=8)
    assert had["one"] == had["two"] == 300, "each of them has a token in each step"


def test_small_request_goes_before_the_prompts_of_many_answers() -> None:
    """The fair order counts the work of the whole request, not that of each prompt."""
    scheduler = scheduler_with(max_num_seqs=100, max_num_batched_tokens=100)
    for number in range(10):
        for answer in range(8):
            sibling = {"answer_of": f"eight {number}", "num_answers": 8}
            add(scheduler, f"eight {number} {answer}", 20, max_tokens=1000, **sibling)
    add(scheduler, "one", 90, max_tokens=1)
    assert ids(scheduler.next_step())[0] == "one"


def test_new_request_has_a_token_while_many_answers_are_written() -> None:
    """It does not wait for the end of an answer, even if a step has no space for all sequences."""
    scheduler = scheduler_with(max_num_seqs=100, max_step_decodes=4)
    for number in range(30):
        add(scheduler, f"long {number}", 1, max_tokens=10_000)
    answered(scheduler, 100)
    add(scheduler, "new", 1, max_tokens=20)
    assert answered(scheduler, 100)["new"] >= 12, "as many as each of the others"


def test_answers_are_shared_between_tenants() -> None:
    scheduler = scheduler_with(max_num_seqs=100, max_step_decodes=4)
    for number in range(30):
        add(scheduler, f"flood {number}", 1, max_tokens=10_000, share=Share("flood"))
    for number in range(4):
        add(scheduler, f"heavy {number}", 1, max_tokens=10_000, share=Share("heavy", 3.0))
    answered(scheduler, 3)
    had = answered(scheduler, 100)
    assert had["heavy"] == pytest.approx(300, abs=8)


def test_sequences_beyond_a_step_begin_only_with_space_for_their_answers() -> None:
    """A sequence that only waits for its turn is never preempted and preempts no other one."""
    scheduler = scheduler_with(max_num_seqs=100, max_step_decodes=2, kv_num_blocks=40)
    for id in ("a", "b"):
        add(scheduler, id, 2, max_tokens=8)
    answered(scheduler, 1)
    add(scheduler, "large", 2, max_tokens=18)
    assert scheduler.next_step().prefill == [], "it would take all that is left"
    assert scheduler.num_running == 2
    scheduler.abort("large")
    add(scheduler, "small", 2, max_tokens=8)
    assert ids(scheduler.next_step()) == ["small"]


@pytest.mark.parametrize("shares", [("a", "b"), ("b", "a")])
def test_step_of_one_answer_goes_on_when_the_memory_is_full(shares: tuple[str, str]) -> None:
    """The next sequence is the last one and can't preempt, so the earliest one continues."""
    scheduler = scheduler_with(kv_num_blocks=8)
    for id, tenant in zip(("early", "late"), shares, strict=True):
        weight = 100.0 if tenant == "a" else 1.0
        add(scheduler, id, 2, max_tokens=5, share=Share(tenant, weight))
    ended: list[str] = []
    for _ in range(40):
        found = scheduler.next_step(num_decodes=1)
        chosen = [chunk.sequence_id for chunk in found.prefill if chunk.samples]
        names = [*chosen, *found.decode]
        ended += [name for name in names if scheduler.record(name, is_eos=False) is not None]
    assert sorted(ended) == ["early", "late"]


def test_step_encodes_within_the_rows_that_its_engine_asks_for() -> None:
    scheduler = scheduler_with(max_num_batched_embeds=100)
    add(scheduler, "a", 12, *(item(b"a%d" % n, 4 * n, 4) for n in range(3)))
    found = scheduler.next_step(num_embeds=1)
    assert found.encode == [Encode("a", 0, b"a0")], "one item, however large"
    assert found.prefill == [], "a chunk of four tokens waits for more items"
    found = scheduler.next_step(num_embeds=8)
    assert found.encode == [Encode("a", 1, b"a1"), Encode("a", 2, b"a2")]
    assert found.prefill == [Chunk("a", 0, 12, True)]


def test_chunk_is_computed_once_it_is_long_enough() -> None:
    scheduler = scheduler_with(max_num_batched_tokens=16)
    add(scheduler, "a", 16, *(item(b"a%d" % n, 2 * n, 2) for n in range(8)))
    found = [scheduler.next_step(num_embeds=2) for _ in range(8)]
    assert all(len(each.encode) == 1 for each in found)
    chunks = [(chunk.start, chunk.num_tokens) for each in found for chunk in each.prefill]
    assert chunks == [(0, 4), (4, 4), (8, 4), (12, 4)], "a quarter of a step at least"


def test_rows_of_a_step_go_to_the_request_that_is_next() -> None:
    scheduler = scheduler_with(max_num_batched_tokens=100)
    add(scheduler, "many", 40, *(item(b"m%d" % n, 4 * n, 4) for n in range(10)))
    assert len(scheduler.next_step(num_embeds=8).encode) == 2
    add(scheduler, "few", 5, item(b"dog", 0, 4))
    found = scheduler.next_step(num_embeds=4)
    assert found.encode == [Encode("few", 0, b"dog")]
    assert ids(found) == ["few"]


def test_who_lacks_memory_leaves_its_turn_to_those_who_have_it() -> None:
    """The small request is next in turn, but the large one came first and has its embeddings."""
    scheduler = scheduler_with(max_num_batched_tokens=4, cache_num_embeds=8)
    add(scheduler, "decodes", 1, max_tokens=100)
    scheduler.next_step()
    add(scheduler, "large", 24, item(b"dog", 0, 6))
    scheduler.next_step()
    add(scheduler, "small", 4, item(b"cat", 0, 4), max_tokens=1)
    for _ in range(20):
        scheduler.record("decodes", is_eos=False)
        if "small" in ids(scheduler.next_step()):
            break
    else:
        pytest.fail("nobody moves but who decodes")


def test_decoding_is_not_held_up_by_prompts() -> None:
    scheduler = scheduler_with(max_num_batched_tokens=4)
    add(scheduler, "a", 2)
    assert scheduler.next_step().prefill == [Chunk("a", 0, 2, True)]
    scheduler.record("a", is_eos=False)
    add(scheduler, "b", 100)
    assert scheduler.next_step() == step(prefill=[Chunk("b", 0, 3, False)], decode=["a"])


def test_embeddings_of_another_request_are_used_again() -> None:
    scheduler = scheduler_with()
    add(scheduler, "a", 4, item(b"dog", 0, 4))
    add(scheduler, "b", 5, item(b"dog", 1, 4))
    assert scheduler.next_step().encode == [Encode("a", 0, b"dog")]
    add(scheduler, "c", 5, item(b"dog", 0, 4))
    assert scheduler.next_step().encode == []


def test_who_came_last_is_preempted_and_begins_again_first() -> None:
    scheduler = scheduler_with(kv_num_blocks=10)
    for id in ("a", "b"):
        add(scheduler, id, 5, max_tokens=4)
    assert len(scheduler.next_step().prefill) == 2
    add(scheduler, "c", 1)
    scheduler.record("a", is_eos=False)
    scheduler.record("b", is_eos=False)
    assert scheduler.next_step() == step(drop=["b"], decode=["a"])
    scheduler.record("a", is_eos=True)
    resumed = scheduler.next_step()
    assert resumed.drop == ["a"]
    assert resumed.prefill[0] == Chunk("b", 0, 6, True), "its answer so far is prompt now"
    assert resumed.prefill[1].sequence_id == "c"


def add_cross(scheduler: Scheduler, id: str, *items: EncoderInput, num_tokens: int = 1) -> None:
    add(scheduler, id, num_tokens, *items, max_tokens=1, cross_attention=True)


def test_a_prompt_without_memory_has_who_came_last_make_way() -> None:
    """Each has a part of the memory, with which neither can continue."""
    scheduler = scheduler_with(kv_num_blocks=10, max_num_batched_tokens=4)
    add(scheduler, "large", 8)
    assert scheduler.next_step().prefill == [Chunk("large", 0, 4, False)]
    add(scheduler, "small", 3)
    ended: list[str] = []
    for _ in range(20):
        made = scheduler.next_step()
        chosen = [chunk.sequence_id for chunk in made.prefill if chunk.samples]
        names = [*chosen, *made.decode]
        ended += [name for name in names if scheduler.record(name, is_eos=False) is not None]
    assert sorted(ended) == ["large", "small"]


def test_embeddings_make_way_after_a_step_of_grace() -> None:
    """The cache has 12 rows: the older one holds 8 and needs 4 more; the younger one holds 4."""
    scheduler = scheduler_with(cache_num_embeds=12, max_num_batched_embeds=4)
    add(scheduler, "w", 4, item(b"dog", 0, 4), max_tokens=1)
    scheduler.next_step()
    scheduler.record("w", is_eos=True)
    add_cross(scheduler, "a", *(item(b"a%d" % n, 0, 4) for n in range(3)))
    add_cross(scheduler, "b", item(b"dog", 0, 4), item(b"b1", 0, 4), num_tokens=10)
    assert scheduler.next_step().encode == [Encode("a", 0, b"a0")]
    assert scheduler.next_step() == step(encode=[Encode("a", 1, b"a1")]), "the step of grace"
    assert scheduler.cache.owners(b"dog") == {"b"}
    assert scheduler.next_step() == step(
        evict=[b"dog"], encode=[Encode("a", 2, b"a2")], prefill=[Chunk("a", 0, 1, True)]
    )
    scheduler.record("a", is_eos=True)
    assert scheduler.next_step().encode == [Encode("b", 0, b"dog")], "preempted, it begins again"


def test_embeddings_make_way_at_once_when_nothing_else_runs() -> None:
    """A session needs all 12 rows; a younger sequence holds 4, and waits for more."""
    scheduler = scheduler_with(cache_num_embeds=12, max_num_batched_embeds=12)
    add(scheduler, "w", 4, item(b"dog", 0, 4), max_tokens=1)
    scheduler.next_step()
    scheduler.record("w", is_eos=True)
    add(scheduler, "s", 1, max_tokens=0, session_tokens=50)
    scheduler.append("s", num_tokens=12, max_tokens=0, items=[item(b"big", 0, 12)])
    add(scheduler, "c", 8, item(b"cat", 0, 8), max_tokens=1)
    add_cross(scheduler, "b", item(b"dog", 0, 4), item(b"b1", 0, 8), num_tokens=10)
    assert scheduler.next_step().encode == [Encode("c", 0, b"cat")]
    assert scheduler.cache.owners(b"dog") == {"b"}
    scheduler.record("c", is_eos=True)
    forced = scheduler.next_step()
    assert forced.encode == [Encode("s", 0, b"big")]
    assert forced.prefill == [Chunk("s", 1, 12, False)]
    assert forced.drop == ["c"], "nothing of b was computed yet"


def test_abort_at_any_time() -> None:
    scheduler = scheduler_with(max_num_seqs=1, max_num_batched_tokens=3)
    for id in ("a", "b"):
        add(scheduler, id, 5, item(b"dog", 0, 5))
    scheduler.abort("b")
    assert scheduler.num_waiting == 1, "a waits as well"
    scheduler.next_step()
    scheduler.abort("a")
    assert scheduler.cache.num_evictable == 1
    assert scheduler.next_step() == step(drop=["a"])
    scheduler.abort("a")
    assert scheduler.next_step() == NOTHING
    assert scheduler.record("a", is_eos=False) is None


def test_a_bad_item_fails_all_who_hold_it() -> None:
    scheduler = scheduler_with(max_num_batched_tokens=9)
    for id in ("a", "b"):
        add(scheduler, id, 6, item(b"bad", 0, 6))
    add(scheduler, "c", 6, item(b"good", 0, 6))
    assert scheduler.next_step().encode == [Encode("a", 0, b"bad")]
    # b is in the middle of the item; a and later requests do not have it any more.
    assert scheduler.fail_item(b"bad") == ["b"]
    assert b"bad" not in scheduler.cache
    assert scheduler.next_step() == step(
        drop=["b"], encode=[Encode("c", 0, b"good")], prefill=[Chunk("c", 0, 6, True)]
    )
    assert scheduler.fail_item(b"bad") == []


def test_the_workers_are_gone() -> None:
    scheduler = scheduler_with(max_num_seqs=1)
    for id in ("a", "b"):
        add(scheduler, id, 4, item(b"dog", 0, 4))
    scheduler.next_step()
    assert scheduler.clear() == ["a", "b"]
    assert scheduler.next_step() == NOTHING
    assert len(scheduler.cache) == scheduler.num_running == scheduler.num_waiting == 0
    add(scheduler, "a", 4, item(b"dog", 0, 4))
    assert scheduler.next_step().encode, "new workers have no embeddings"


def test_a_session_takes_items_while_it_is_served() -> None:
    scheduler = scheduler_with(max_num_batched_tokens=8)
    add(scheduler, "s", 3, max_tokens=1, session_tokens=100)
    assert scheduler.next_step() == step(prefill=[Chunk("s", 0, 3, True)])
    # Appended while a token is computed: the input comes after that token.
    scheduler.append("s", num_tokens=4, max_tokens=0, items=[item(b"hm", 1, 3)])
    assert scheduler.next_step() == NOTHING
    assert scheduler.record("s", is_eos=False) is FinishReason.LENGTH
    assert scheduler.next_step() == step(
        placed=[Placed("s", 4)], encode=[Encode("s", 0, b"hm")], prefill=[Chunk("s", 3, 5, False)]
    )
    assert scheduler.num_items_kept("s") == 0, "what is computed is forgotten"
    assert scheduler.next_step() == NOTHING
    scheduler.append("s", num_tokens=2, max_tokens=1, items=[item(b"oh", 0, 2)])
    assert scheduler.next_step() == step(
        placed=[Placed("s", 8)], encode=[Encode("s", 1, b"oh")], prefill=[Chunk("s", 8, 2, True)]
    )
    scheduler.abort("s")
    assert scheduler.next_step() == step(drop=["s"])


def test_a_session_that_never_stops_does_not_starve_others() -> None:
    scheduler = scheduler_with(max_num_batched_tokens=4)
    add(scheduler, "s", 1, max_tokens=0, session_tokens=10_000)
    for _ in range(50):
        scheduler.append("s", num_tokens=8, max_tokens=0)
    scheduler.next_step()
    add(scheduler, "a", 8)
    for _ in range(50):
        scheduler.append("s", num_tokens=8, max_tokens=0)
    for _ in range(110):
        if any(chunk.sequence_id == "a" for chunk in scheduler.next_step().prefill):
            break
    else:
        pytest.fail("a starves")


def test_a_step_says_only_what_is_new() -> None:
    """The size of a decode step's message depends neither on the prompt nor on the answer."""
    scheduler = scheduler_with()
    items = [item(bytes([n]), 4 * n, 4) for n in range(200)]
    add(scheduler, "a", 800, *items, max_tokens=300)
    scheduler.next_step()
    sizes = set()
    for _ in range(200):
        scheduler.record("a", is_eos=False)
        sizes.add(len(msgspec.msgpack.encode(scheduler.next_step())))
    assert len(sizes) == 1
    assert sizes.pop() < 16


@pytest.mark.parametrize(
    ("request_parts", "error", "message"),
    [
        ({"num_tokens": 0}, InvalidRequest, "one token"),
        ({"max_tokens": 0}, InvalidRequest, "one token"),
        ({"items": [item(b"a", 0, 9)]}, EncoderCacheFull, "9 embeddings .* 8 rows a step"),
        ({"items": [item(b"a", 0, 8)]}, EncoderCacheFull, "8 embeddings .* 7 rows"),
        ({"items": [item(b"a", 0, 1, 51)]}, EncoderCacheFull, "51 bytes"),
        ({"items": [item(b"a", 0, 8), item(b"a", 8, 1)]}, EncoderCacheFull, "8 embeddings .* 7"),
        ({"items": [item(b"a", 5, 6)]}, InvalidPlaceholders, "item 0 ends at 11"),
        ({"items": [item(b"a", 5, 2), item(b"b", 6, 2)]}, InvalidPlaceholders, "item 1 .* item 0"),
        ({"max_tokens": 11}, PromptTooLong, "21 tokens exceed .* 20"),
        ({"session_tokens": 11}, PromptTooLong, "its limit is 11"),
        ({"session_tokens": 99}, PromptTooLong, "99 tokens exceed .* 20"),
        ({"session_tokens": 20, "cross_attention": True}, InvalidRequest, "no sessions"),
        (
            {"items": [item(b"a", 0, 4), item(b"b", 0, 4)], "cross_attention": True},
            EncoderCacheFull,
            "8 embeddings .* 7 rows",
        ),
    ],
)
def test_what_could_never_be_served_is_refused(
    request_parts: dict[str, Any], error: type[Exception], message: str
) -> None:
    scheduler = scheduler_with(
        max_num_batched_embeds=8, cache_num_embeds=7, cache_nbytes=50, kv_num_blocks=20
    )
    with pytest.raises(error, match=message):
        add(scheduler, "a", **{"num_tokens": 10, **request_parts})
    assert scheduler.num_waiting == 0
    add(scheduler, "a", 10)


def test_wrong_input_leaves_a_session_as_it_was() -> None:
    scheduler = scheduler_with(cache_num_embeds=7)
    add(scheduler, "s", 3, max_tokens=1, session_tokens=20)
    add(scheduler, "a", 3)
    for id, num_tokens, items, error in (
        ("s", 17, (), PromptTooLong),
        ("s", 0, (), InvalidRequest),
        ("s", 4, (item(b"x", 2, 3),), InvalidPlaceholders),
        ("s", 9, (item(b"x", 0, 8),), EncoderCacheFull),
        ("a", 1, (), InvalidRequest),
        ("z", 1, (), InvalidRequest),
    ):
        with pytest.raises(error):
            scheduler.append(id, num_tokens=num_tokens, max_tokens=0, items=items)
    scheduler.append("s", num_tokens=16, max_tokens=0)


def test_what_has_ended_is_destroyed_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "_SHED_PER_STEP", 2)
    scheduler = scheduler_with()
    for id in "abcde":
        add(scheduler, id, 10)
        scheduler.abort(id)
    left = []
    for _ in range(4):
        scheduler.next_step()
        left.append(len(scheduler._ended))
    assert left == [3, 1, 0, 0]


def test_messages_are_frozen_strict_and_small() -> None:
    """They are sent to the workers at every step."""
    for message in (Chunk, Encode, EncoderInput, Placed, Step):
        declared = message.__struct_config__
        assert declared.frozen
        assert declared.forbid_unknown_fields
        assert declared.array_like


def test_an_id_is_used_once_at_a_time() -> None:
    scheduler = scheduler_with()
    add(scheduler, "a", 3)
    with pytest.raises(InvalidRequest, match="exists"):
        add(scheduler, "a", 3)


@pytest.mark.parametrize("limits", [{"max_num_seqs": 0}, {"max_num_batched_tokens": 3},
                                    {"lookahead_tokens": -1}])  # fmt: skip
def test_limits_that_can_not_work(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        scheduler_with(**limits)


@pytest.mark.parametrize(
    "limits", [{"max_step_prefills": 1}, {"max_num_batched_tokens": 5, "max_num_seqs": 2}]
)
def test_who_has_nothing_left_of_a_step_waits(limits: dict[str, int]) -> None:
    """The limit is the number of tokens, or of sequences; the request begins in a later step."""
    scheduler = scheduler_with(**limits)
    add(scheduler, "a", 5)
    add(scheduler, "b", 5)
    assert [chunk.sequence_id for chunk in scheduler.next_step().prefill] == ["a"]
    assert scheduler.is_running("a")
    assert not scheduler.is_running("b")
    assert scheduler.num_waiting == 1


@pytest.mark.parametrize(("largest", "may_begin"), [(2, True), (3, True), (4, False)])
def test_a_session_begins_beside_sessions_and_the_largest_of_the_others(
    largest: int, may_begin: bool
) -> None:
    def sequence(num_tokens: int, session_tokens: int = 0) -> Sequence:
        request = Request(
            id="r", num_tokens=num_tokens, items=[], max_tokens=1, session_tokens=session_tokens
        )
        return Sequence.of(request, arrival=0)

    cache = KvCache(num_blocks=8, block_tokens=1)
    cache.reserve(sequence(1, session_tokens=2))
    running = [sequence(1), sequence(largest - 1), sequence(1, session_tokens=8)]
    assert cache.can_admit(sequence(1, session_tokens=3), running) is may_begin
