"""What an engine worker leaves out of its start: it is not loaded, and what does without is right.

Each test is a process of its own: what this one has imported can't be taken back.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from afferent.engine.reference.worker import imports

pytestmark = pytest.mark.timeout(180)

_ANSWERS = """
import sys
from pathlib import Path
import afferent.models
from afferent.engine.reference.worker.main import import_model
from afferent.types import Sampling

folder = Path(afferent.models.__path__[0]) / "shapes"
import_model(folder, has_partners=False)

import numpy as np
from afferent.engine.reference.model.runner import Runner
from afferent.preprocess.discover import family_of
from afferent.schedule.step import Chunk
from afferent.types import Modality

family = family_of(folder)
runner = Runner(folder, family)
features = {
    "pixel_values": np.zeros((16, 1176), np.float32), "image_grid_thw": np.array([[1, 4, 4]])
}
embeddings = runner.encode(Modality.IMAGE, features)
assert len(embeddings.rows) == 4
runner.begin("one", [3, 4, 7, 8], [], Sampling(max_tokens=2))
first = runner.run([Chunk("one", 0, 4, samples=True)], [], {})
runner.run([], ["one"], {})
loaded = [name for name in LEFT_OUT if name in sys.modules]
assert not loaded, loaded
"""
_LEFT_OUT = ("torch._dynamo.eval_frame", "sympy.core", "torch.distributed.tensor")

_WITH_PARTNERS = """
from pathlib import Path
import afferent.models
from afferent.engine.reference.worker.main import import_model

import_model(Path(afferent.models.__path__[0]) / "shapes", has_partners=True)

import sys
from transformers.utils import is_torch_distributed_available
assert is_torch_distributed_available()
assert "torch.distributed.tensor" in sys.modules
"""

_COMPILED = """
import sys
from afferent.engine.reference.worker.imports import defer_compiler
defer_compiler()
import torch

@torch.compiler.disable
def left_alone(x):
    return x + 1

@torch.compiler.disable(recursive=False)
def left_alone_too(x):
    return x + 1

@torch.compiler.allow_in_graph
def taken_whole(x):
    return x + 1

one = torch.ones(1)
assert left_alone.__name__ == "left_alone"
assert (left_alone(one), left_alone_too(one), taken_whole(one)) == (2, 2, 2)
assert "torch._dynamo.eval_frame" not in sys.modules

graphs = []

def keep(graph, inputs):
    graphs.append(graph)
    return graph

assert torch.compile(lambda x: taken_whole(x * 2), backend=keep, fullgraph=True)(one) == 3
assert "torch._dynamo.eval_frame" in sys.modules
assert any(node.target is taken_whole for node in graphs[0].graph.nodes)

for disabled in (left_alone, left_alone_too):
    del graphs[:]
    torch._dynamo.reset()
    assert torch.compile(lambda x: disabled(x * 2) * 3, backend=keep)(one) == 9
    done = [node.target.__name__ for graph in graphs for node in graph.graph.nodes
            if node.op == "call_function"]
    assert sorted(done) == ["mul", "mul"], done  # the addition is in none of them
"""

_SAME_ANSWERS = """
import itertools
from afferent.engine.reference.worker import imports
imports.defer_compiler()
import torch
from torch.fx.experimental import symbolic_shapes as shapes

def outcome(function, asked):
    try:
        return function(*asked)
    except Exception as error:
        return type(error)

plain = [True, False, 0, 1, 3, (), (1, 2), (1, 3), [1, 2], torch.Size([1, 2]), ((1, 2), 3)]
stand_ins = {name: getattr(shapes, name) for name in imports._ANSWERS}
asked = [(value,) for value in plain] + list(itertools.product(plain, plain))
before = {
    name: [outcome(function, each) for each in asked] for name, function in stand_ins.items()
}
assert shapes.ShapeEnv is not None  # which loads it
num_compared = 0
for name in stand_ins:
    real = getattr(shapes, name)
    assert real is not stand_ins[name]
    for each, found in zip(asked, before[name]):
        expected = outcome(real, each)
        if not isinstance(expected, type):  # what the function is not for, it refuses
            assert (found, type(found)) == (expected, type(expected)), (name, each)
            num_compared += 1
assert num_compared > 50
symbol = shapes.ShapeEnv().create_unbacked_symint()
assert stand_ins["statically_known_true"](symbol == symbol) is True
"""

_SYMPY = """
import sys
from afferent.engine.reference.worker.imports import defer_compiler
defer_compiler()
import sympy

basic = sympy.Basic
assert not isinstance(3, (str, basic))
assert "sympy.core" not in sys.modules
class Mine(basic):
    pass
assert Mine.__mro__[1] is sympy.Basic is not basic
assert isinstance(sympy.Symbol("x"), (str, basic))
assert not isinstance(3, basic)
try:
    sympy.nothing_of_that_name
except AttributeError:
    pass
else:
    raise AssertionError
"""


@pytest.mark.parametrize(
    "program",
    [_ANSWERS, _WITH_PARTNERS, _COMPILED, _SAME_ANSWERS, _SYMPY],
    ids=["answers", "with-partners", "compiled", "same-answers", "sympy"],
)
def test_it_is_loaded_by_who_needs_it(program: str) -> None:
    program = program.replace("LEFT_OUT", repr(_LEFT_OUT))
    subprocess.run([sys.executable, "-c", program], check=True, timeout=170)


def test_who_has_torch_already_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    before = list(sys.meta_path)
    imports.defer_compiler()
    assert sys.meta_path == before
