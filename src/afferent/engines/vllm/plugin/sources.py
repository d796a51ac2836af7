"""Source code of a vLLM that is not imported: a wheel, or a folder of packages.

A part is found as Python would find it, through imports, base classes and instances that a module
creates, so a wheel for any device can be read on any machine.
"""

from __future__ import annotations

import ast
import functools
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from afferent.engines.vllm.plugin.hooks import Hook
from afferent.errors import ConfigError

_Def = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_MAX_STEPS: Final = 32
"""Imports and base classes that lead to one part."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part of vLLM, as its source code defines it."""

    module: str
    """Module that defines it."""
    arguments: tuple[str, ...]
    """Names of a function's arguments, or of the arguments of a class's constructor, without
    ``self``; empty for a value."""
    code: str
    """Code of a function without comments and docstrings; empty for a class or a value."""
    takes_any: bool
    """Whether it takes arguments of any name."""


class Sources:
    """Modules of one vLLM."""

    def __init__(self, place: Path) -> None:
        """Open a wheel, or a folder that contains the folder ``vllm``.

        Raises:
            ConfigError: It contains no vLLM.
        """
        self._place = place
        try:
            self._wheel = zipfile.ZipFile(place) if place.is_file() else None
        except zipfile.BadZipFile as error:
            raise ConfigError(f"{place} is no wheel: {error}") from error
        self._names = frozenset(() if self._wheel is None else self._wheel.namelist())
        if not self._has("vllm/__init__.py"):
            raise ConfigError(
                f"{place} has no package vllm: give a wheel, or a site-packages folder"
            )
        self._module = functools.cache(self._read_module)

    def find(self, hook: Hook) -> Part | None:
        """Return a part; ``None``: this vLLM lacks it."""
        first, *rest = hook.name.split(".")
        found = self._named(hook.module, first)
        for name in rest:
            if found is None:
                return None
            found = self._attribute(*found, name)
        return None if found is None else self._part(*found)

    def _has(self, path: str) -> bool:
        if self._wheel is None:
            return (self._place / path).is_file()
        return path in self._names

    def _read_module(self, name: str) -> tuple[ast.Module, bool] | None:
        """Return a module, and whether it is a package."""
        base = name.replace(".", "/")
        for path in (f"{base}/__init__.py", f"{base}.py"):
            if self._has(path):
                text = (
                    (self._place / path).read_bytes()
                    if self._wheel is None
                    else self._wheel.read(path)
                )
                return ast.parse(text), path.endswith("__init__.py")
        return None

    def _named(self, module: str, name: str, steps: int = _MAX_STEPS) -> tuple[str, ast.AST] | None:
        """Return the definition of a name of a module, and the module that defines it."""
        read = self._module(module)
        if read is None or not steps:
            return None
        tree, is_package = read
        for node in _statements(tree.body):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if (
                    node.name == name
                ):
                    return module, node
                case ast.ImportFrom():
                    source = _absolute(module, is_package, node)
                    for alias in node.names:
                        wanted = name if alias.name == "*" else alias.name
                        if (alias.asname or wanted) != name:
                            continue
                        if found := self._named(source, wanted, steps - 1):
                            return found
                case ast.Assign() | ast.AnnAssign():
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                        return self._value(module, node, steps)
        return None

    def _value(
        self, module: str, node: ast.Assign | ast.AnnAssign, steps: int
    ) -> tuple[str, ast.AST]:
        """Return the class of an instance that an assignment creates, or the assignment itself."""
        if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
            made_by = self._named(module, node.value.func.id, steps - 1)
            if made_by is not None and isinstance(made_by[1], ast.ClassDef):
                return made_by
        return module, node

    def _attribute(self, module: str, owner: ast.AST, name: str) -> tuple[str, ast.AST] | None:
        for where, each in self._classes(module, owner):
            for node in _statements(each.body):
                if isinstance(node, _Def) and node.name == name:
                    return where, node
                if name in _assigned(node):
                    return where, node
            for inner in ast.walk(each):
                if isinstance(inner, ast.Attribute) and inner.attr == name and _is_own(inner):
                    return where, inner
        return None

    def _classes(
        self, module: str, owner: ast.AST, steps: int = _MAX_STEPS
    ) -> Iterator[tuple[str, ast.ClassDef]]:
        """Yield a class, and then its base classes."""
        if not isinstance(owner, ast.ClassDef) or not steps:
            return
        yield module, owner
        for base in owner.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name) and (found := self._named(module, name.id)):
                yield from self._classes(*found, steps - 1)

    def _part(self, module: str, node: ast.AST) -> Part:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return _function(module, node)
        classes = list(self._classes(module, node))
        for where, each in classes:
            for member in each.body:
                if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                    made = _function(where, member)
                    return Part(module, made.arguments, "", made.takes_any)
        fields = {
            name: None
            for _, each in reversed(classes)
            for member in each.body
            if isinstance(member, ast.AnnAssign)
            for name in _assigned(member)
        }
        return Part(module, tuple(fields), "", False)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, also those within ``if``, ``try`` and ``with``."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            handlers = node.handlers if isinstance(node, ast.Try) else []
            for part in (node, *handlers):
                for name in ("body", "orelse", "finalbody"):
                    yield from _statements(getattr(part, name, []))


def _absolute(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _assigned(node: ast.AST) -> list[str]:
    match node:
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign():
            return [each.id for each in node.targets if isinstance(each, ast.Name)]
    return []


def _is_own(node: ast.Attribute) -> bool:
    """Whether it is an attribute that a method sets on its object."""
    is_of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
    return is_of_self and isinstance(node.ctx, ast.Store)


def _function(module: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Part:
    given = node.args
    named = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    arguments = tuple(name for name in named if name not in ("self", "cls"))
    body = node.body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    code = "\n".join(ast.unparse(each) for each in body)
    return Part(module, arguments, code, given.kwarg is not None)
