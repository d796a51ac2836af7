"""What a model of `transformers` imports and an engine worker never uses is left out of its start.

More than half of the time in which a model's module is imported and loaded goes into three things:

- `torch._dynamo`, the compiler, for a few decorators that say how functions are to be compiled;
- `sympy`, and `torch.fx.experimental.symbolic_shapes`, for sizes and conditions that nobody knows
  yet, where these are numbers and true or false. All of them are loaded by whoever takes something
  else out of them.
- `torch.distributed.tensor`, for tensors of which several machines have a part. A worker that has
  no partners says that there are none.

What a model computes is the same, with and without.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import operator
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce, wraps
from types import FunctionType, ModuleType
from typing import Any, Final

_MARKS: Final = ("allow_in_graph", "assume_constant_result")
"""Decorators that note something of a function, and give it back as it is."""
_ALONE: Final = ("torch._dynamo._trace_wrapped_higher_order_op",)
"""Modules that need nothing of the package that they lie in."""
_ANSWERS: Final[Mapping[str, Callable[..., Any]]] = {
    **dict.fromkeys(
        (
            "expect_true",
            "guard_bool",
            "guard_or_false",
            "guard_or_true",
            "guard_size_oblivious",
            "guarding_hint_or_throw",
            "statically_known_true",
        ),
        lambda known, *_: known,
    ),
    "has_guarding_hint": lambda _: True,
    "is_nested_int": lambda _: False,
    "sym_and": lambda *known: reduce(operator.and_, known),
    "sym_eq": lambda known, other: _is_equal(known, other),
    "sym_or": lambda *known: reduce(operator.or_, known),
}
"""What functions say of what is known, as `_is_known` has it. Who is asked with anything else loads
the module.
"""


def _is_known(value: Any) -> bool:
    """A number, true or false, or a sequence of them."""
    if isinstance(value, list | tuple):
        return all(map(_is_known, value))
    return type(value) in (bool, int)


def _is_equal(known: Any, other: Any) -> bool:
    if isinstance(known, list | tuple) and isinstance(other, list | tuple):
        return len(known) == len(other) and all(map(_is_equal, known, other))
    return bool(known == other)


def defer_compiler() -> None:
    """Have the compiler loaded when it is needed; to be called before `torch` is imported."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


def leave_out_distributed() -> None:
    """Imports `transformers`, and has its models do without `torch.distributed`, as they do where
    `torch` was built without it. For a process that holds all of its model.
    """
    import transformers.utils
    from transformers.utils import import_utils

    for module in (import_utils, transformers.utils):
        if hasattr(module, "is_torch_distributed_available"):
            module.is_torch_distributed_available = lambda: False


class _Deferred:
    """A module before it is loaded, and what it seems to have until then."""

    def __init__(self, module: ModuleType, load: Callable[[ModuleType], None]) -> None:
        self._module, self._load = module, load
        self._lock = threading.RLock()
        self._stand_ins = self.stand_ins()
        self.is_loaded = False

    def stand_ins(self) -> Mapping[str, Any]:
        """What can be had without it."""
        raise NotImplementedError

    def find(self, name: str) -> Any:
        """What the module has under this name; called by Python where it has nothing, as yet.

        Raises:
            AttributeError: Nor will it have.
        """
        if not self.is_loaded:
            if name in self._stand_ins:
                return self._stand_ins[name]
            if name.startswith("__"):
                raise AttributeError(name)
        return getattr(self.loaded(), name)

    def loaded(self) -> ModuleType:
        """The module itself."""
        with self._lock:
            if not self.is_loaded:
                self.is_loaded = True
                del vars(self._module)["__getattr__"]
                self._load(self._module)
                self.on_loaded()
        return self._module

    def on_loaded(self) -> None:
        """What is still to be done."""


class _Compiler(_Deferred):
    """Until it is loaded nothing is compiled, so who must not be compiled is called as he is."""

    def stand_ins(self) -> Mapping[str, Any]:
        """See `_Deferred.stand_ins`."""
        self._marked: list[tuple[str, Any]] = []
        return {"disable": self._disable} | {name: partial(self._mark, name) for name in _MARKS}

    def on_loaded(self) -> None:
        """See `_Deferred.on_loaded`."""
        for name, function in self._marked:
            getattr(self._module, name)(function)

    def _mark(self, name: str, function: Any) -> Any:
        self._marked.append((name, function))
        return function

    def _disable(self, fn: Any = None, recursive: bool = True, **how: Any) -> Any:
        if fn is None:
            return partial(self._disable, recursive=recursive, **how)
        if not isinstance(fn, FunctionType):
            return self.loaded().disable(fn, recursive, **how)
        disabled: Callable[..., Any] | None = None

        @wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal disabled
            if not self.is_loaded:
                return fn(*args, **kwargs)
            if disabled is None:
                disabled = self.loaded().disable(fn, recursive, **how)
            return disabled(*args, **kwargs)

        return call


class _Shapes(_Deferred):
    """Whoever has sizes that nobody knows has loaded the compiler."""

    def stand_ins(self) -> Mapping[str, Any]:
        """See `_Deferred.stand_ins`."""
        return {name: partial(self._answer, name) for name in _ANSWERS}

    def _answer(self, name: str, *asked: Any, **how: Any) -> Any:
        if all(map(_is_known, asked)) and how.keys() <= {"skip"}:
            return _ANSWERS[name](*asked)
        return getattr(self.loaded(), name)(*asked, **how)


class _Sympy(_Deferred):
    """Nothing is one of its expressions before it is loaded."""

    def stand_ins(self) -> Mapping[str, Any]:
        """See `_Deferred.stand_ins`."""
        return {"Basic": _DeferredClass(self, "Basic")}


class _DeferredClass:
    """A class to ask of what it is the class."""

    def __init__(self, module: _Deferred, name: str) -> None:
        self._module, self._name = module, name

    def __instancecheck__(self, asked: Any) -> bool:
        return self._module.is_loaded and isinstance(asked, self._loaded())

    def __mro_entries__(self, _bases: Any) -> tuple[type, ...]:
        return (self._loaded(),)

    def _loaded(self) -> Any:
        return getattr(self._module.loaded(), self._name)


_DEFERRED: Final[Mapping[str, type[_Deferred]]] = {
    "sympy": _Sympy,
    "torch._dynamo": _Compiler,
    "torch.fx.experimental.symbolic_shapes": _Shapes,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds each of them, once; and loads it before what lies below it, which counts on that."""

    def __init__(self) -> None:
        self._left = dict(_DEFERRED)
        self._found: dict[str, _Loader] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = ".".join(name.split(".")[:2]) if name.startswith("torch.") else name.split(".")[0]
        above = self._found.get(package)
        if name != package and above is not None and name not in _ALONE:
            return above.find_below(name)
        kind = self._left.pop(name, None)
        if kind is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = self._found[name] = _Loader(spec.loader.name, spec.loader.path, kind)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Gives a module with nothing in it."""

    def __init__(self, name: str, path: str, kind: type[_Deferred]) -> None:
        super().__init__(name, path)
        self._kind = kind
        self._deferred: _Deferred | None = None

    def exec_module(self, module: ModuleType) -> None:
        self._deferred = self._kind(module, super().exec_module)
        vars(module)["__getattr__"] = self._deferred.find

    def find_below(self, name: str) -> importlib.machinery.ModuleSpec | None:
        """A module of this package: who loads the package may have loaded it, too."""
        if self._deferred is None or self._deferred.is_loaded:
            return None
        self._deferred.loaded()
        found = sys.modules.get(name)
        return None if found is None else importlib.machinery.ModuleSpec(name, _Same(found))


class _Same(importlib.abc.Loader):
    """Loads what is loaded."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
