"""The runner chooses the same greedy tokens as plain ``generate``, for many families of models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from afferent.builtin.engine.model.attention import GROWTH
from afferent.builtin.engine.model.embeddings import Embeddings
from afferent.errors import FormatError, InternalError, InvalidPlaceholders, UnusableEmbeddings
from afferent.schedule.step import Chunk
from afferent.store.block import codec
from afferent.types import Placeholder
from tests.engine.random_steps import RandomSteps
from tests.engine.runner_model import GREEDY, MODELS, NUM_TOKENS, Model, Prepared, prepare_all


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)  # with small tensors, more threads only wait for each other
    return MODELS[request.param].make_and_load(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prepared(model: Model) -> list[Prepared]:
    return prepare_all(model)


def test_same_tokens_as_generate(model: Model, prepared: list[Prepared]) -> None:
    for each in prepared:
        model.begin("one", each)
        tokens = [model.whole("one", each)]
        tokens += [model.decode("one") for _ in range(NUM_TOKENS - 1)]
        model.runner.drop("one")
        assert tokens == each.expected


def test_the_media_matter(prepared: list[Prepared]) -> None:
    """Else the other tests would prove little."""
    assert len({tuple(each.expected) for each in prepared}) > 2


def test_extended_sequence_chooses_the_tokens_of_the_whole_prompt(
    model: Model, prepared: list[Prepared]
) -> None:
    """Each prompt comes in two inputs, which are cut at each place outside of an item."""
    if not model.runner.info.has_sessions:
        return
    for each in prepared:
        ids, items = each.prompt.token_ids, each.items
        spans = [(span.offset, span.offset + span.length) for span in each.prompt.spans]
        cuts = [cut for cut in range(1, len(ids)) if not any(a <= cut <= b for a, b in spans)]
        for cut in cuts[:: max(1, len(cuts) // 3)]:
            before = [item for item in items if item.placeholder.offset < cut]
            behind = [
                replace(
                    item,
                    placeholder=Placeholder(item.placeholder.offset - cut, item.placeholder.length),
                )
                for item in items[len(before) :]
            ]
            model.runner.begin("one", ids[:cut], before, GREEDY, has_answer=False)
            first = Chunk("one", 0, cut, samples=False)
            assert model.runner.run([first], [], each.embeddings) == []
            model.runner.extend("one", ids[cut:], behind, GREEDY)
            second = Chunk("one", cut, len(ids) - cut, samples=True)
            (chosen,) = model.runner.run([second], [], each.embeddings)
            tokens = [chosen.token_id, *(model.decode("one") for _ in range(NUM_TOKENS - 1))]
            model.runner.drop("one")
            assert tokens == each.expected, cut


def test_answer_is_a_part_of_what_an_input_extends(model: Model, prepared: list[Prepared]) -> None:
    """The answer to a second input is that to the whole conversation as one prompt."""
    if not model.runner.info.has_sessions:
        return
    one, two = prepared[1], prepared[2]
    answer = one.expected[:3]
    model.begin("one", one)
    assert [model.whole("one", one), model.decode("one"), model.decode("one")] == answer
    both = one.embeddings | two.embeddings
    model.runner.extend("one", two.prompt.token_ids, two.items, GREEDY)
    start, more = len(one.prompt.token_ids) + 2, 1 + len(two.prompt.token_ids)
    (first,) = model.runner.run([Chunk("one", start, more, samples=True)], [], both)
    tokens = [first.token_id, model.decode("one"), model.decode("one")]
    model.runner.drop("one")

    ids = [*one.prompt.token_ids, *answer, *two.prompt.token_ids]
    base = len(ids) - len(two.prompt.token_ids)
    moved = [
        replace(
            item,
            placeholder=Placeholder(item.placeholder.offset + base, item.placeholder.length),
        )
        for item in two.items
    ]
    model.runner.begin("whole", ids, [*one.items, *moved], GREEDY)
    (expected,) = model.runner.run([Chunk("whole", 0, len(ids), samples=True)], [], both)
    assert tokens == [expected.token_id, model.decode("whole"), model.decode("whole")]
    model.runner.drop("whole")


@pytest.mark.parametrize("seed", [1, 2])
def test_packed_in_random_steps(model: Model, prepared: list[Prepared], seed: int) -> None:
    steps = RandomSteps(model, prepared, np.random.default_rng(seed))
    steps.run()
    assert list(steps.tokens.values()) == [each.expected for each in prepared]
    assert steps.num_preempted
    assert steps.num_mixed
    assert steps.num_reused or model.runner.info.cross_attention


def test_embeddings_must_fill_the_placeholder(model: Model, prepared: list[Prepared]) -> None:
    """The failed step changes nothing: the next step runs without that sequence."""
    each = prepared[0]
    model.begin("bad", each)
    chunk = Chunk("bad", 0, len(each.prompt.token_ids), samples=True)
    cut = {key: Embeddings(made.rows[:-1], made.layers) for key, made in each.embeddings.items()}
    for wrong in ({}, cut):
        with pytest.raises(UnusableEmbeddings) as caught:
            model.runner.run([chunk], [], wrong)
        assert caught.value.sequence_id == "bad"
    assert model.whole("bad", each) == each.expected[0]
    model.runner.drop("bad")


def test_items_must_fit_the_prompt(model: Model, prepared: list[Prepared]) -> None:
    each = prepared[0]
    ids = each.prompt.token_ids
    if model.runner.info.cross_attention:
        with pytest.raises(InternalError, match="one item"):
            model.runner.begin("one", ids, [], GREEDY)
        return
    with pytest.raises(InvalidPlaceholders):
        model.runner.begin("one", ids, each.items[::-1], GREEDY)
    end = each.items[-1].placeholder.offset + each.items[-1].placeholder.length
    with pytest.raises(InternalError, match="outside"):
        model.runner.begin("one", ids[: end - 1], each.items, GREEDY)
    with pytest.raises(InternalError, match="no place"):
        model.runner.begin("one", [0] * len(ids), each.items, GREEDY)


def test_steps_go_on_where_the_sequence_is(model: Model, prepared: list[Prepared]) -> None:
    each = prepared[0]
    length = len(each.prompt.token_ids)
    wrong = [
        Chunk("one", 1, length - 1, samples=True),
        Chunk("one", 0, length, samples=False),
        Chunk("one", 0, length - 1, samples=True),
        Chunk("one", 0, length + 1, samples=True),
        Chunk("other", 0, length, samples=True),
    ]
    model.begin("one", each)
    for chunk in wrong:
        with pytest.raises(InternalError):
            model.runner.run([chunk], [], each.embeddings)
    with pytest.raises(InternalError):
        model.runner.run([], ["one"], {})
    with pytest.raises(InternalError):
        model.runner.run([], ["other"], {})
    model.runner.drop("one")
    model.runner.drop("one")


def test_embeddings_in_the_store(model: Model, prepared: list[Prepared]) -> None:
    made = next(iter(prepared[0].embeddings.values()))
    info = model.runner.info
    assert made.nbytes == len(made.rows) * info.embed_nbytes
    block = bytearray(codec.plan(made.tree()).nbytes)
    codec.write_into(made.tree(), memoryview(block))
    again = Embeddings.from_tree(codec.view(memoryview(block)))
    assert torch.equal(again.rows, made.rows)
    assert len(again.layers) == len(made.layers)
    assert all(map(torch.equal, again.layers, made.layers))
    for wrong in ({"rows": again.rows}, [again.rows], {"rows": 1, "layers": []}):
        with pytest.raises(FormatError):
            Embeddings.from_tree(wrong)  # type: ignore[arg-type]


def test_features_are_read_in_place(model: Model) -> None:
    """The encoder's input has the address of the features, which may be read-only."""
    features = model.features(model.draw(np.random.default_rng(0)))
    for array in features.values():
        array.flags.writeable = False
    seen: dict[str, int] = {}

    class Spy:
        def model_inputs(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
            seen.update({name: tensor.data_ptr() for name, tensor in tensors.items()})
            return model.family.model_inputs(tensors)

    model.runner._family = Spy()  # type: ignore[assignment]
    try:
        model.runner.encode(model.kind, features)
    finally:
        model.runner._family = model.family
    assert seen == {name: array.ctypes.data for name, array in features.items()}


def test_a_token_takes_the_memory_that_is_said(model: Model, prepared: list[Prepared]) -> None:
    if model.runner.info.cross_attention:  # most of the memory is for items
        assert model.runner.info.kv_token_nbytes == 0
        return
    each = prepared[0]
    model.begin("one", each)
    model.whole("one", each)
    tensors = list(model.runner._sequences["one"].state.kv_cache._layers.values())
    model.runner.drop("one")
    (capacity,) = {tensor.shape[1] for tensor in tensors}
    held_nbytes = sum(tensor.nbytes for tensor in tensors) // capacity
    assert model.runner.info.kv_token_nbytes == GROWTH * held_nbytes
