"""The imports between the modules and packages of the project, counted.

    python tools/arrows.py [--json] [ROOT]

In the output, a "room" is a folder and an "arrow" is an import of one module by another, counted
once. For each package it prints the number of arrows between its files, of those within a room and
between two rooms, and of the connected pairs of rooms. Then it lists cyclic imports, and short
files with only one importer.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SHORT_LINES = 15

Graph = Mapping[str, set[str]]


def modules_of(root: Path) -> dict[str, Path]:
    """Return all modules below ``root`` by their dotted names; a package has its ``__init__``."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


def graph_of(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return the imported modules of each module, without those under ``if TYPE_CHECKING``."""
    return {name: set(_imports(path, modules)) - {name} for name, path in modules.items()}


def _imports(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in _walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names):
                yield from (each.name for each in names if each.name in modules)
            case ast.ImportFrom(module=str(module), names=names, level=0) if module in modules:
                for each in names:
                    full = f"{module}.{each.name}"
                    yield full if full in modules else module


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk(child)


def rooms_of(package: str, name: str, modules: Mapping[str, Path]) -> str:
    """Return the room of a module: the first folder below the package, or "." for none."""
    rest = name.removeprefix(package).lstrip(".").split(".")
    is_folder = modules[name].name == "__init__.py"
    return rest[0] if len(rest) > 1 or (is_folder and rest[0]) else "."


def count(package: str, graph: Graph, modules: Mapping[str, Path]) -> dict[str, int]:
    """Count the imports between the files of one package."""
    mine = {name for name in graph if name == package or name.startswith(f"{package}.")}
    arrows = [(a, b) for a in sorted(mine) for b in sorted(graph[a] & mine)]
    places = [(rooms_of(package, a, modules), rooms_of(package, b, modules)) for a, b in arrows]
    return {
        "files": len([name for name in mine if modules[name].name != "__init__.py"]),
        "rooms": len({rooms_of(package, name, modules) for name in mine} - {"."}),
        "arrows": len(arrows),
        "within": sum(a == b for a, b in places),
        "between": sum(a != b for a, b in places),
        "pairs": len({(a, b) for a, b in places if a != b}),
        "circles": len(circles(_room_graph(package, arrows, modules))),
    }


def _room_graph(
    package: str, arrows: list[tuple[str, str]], modules: Mapping[str, Path]
) -> dict[str, set[str]]:
    """Return the imported rooms of each room; a file outside of any room counts as one."""
    graph: dict[str, set[str]] = defaultdict(set)
    for names in arrows:
        rooms = [rooms_of(package, name, modules) for name in names]
        a, b = (n if room == "." else room for n, room in zip(names, rooms, strict=True))
        if a != b:
            graph[a].add(b)
    return dict(graph)


def circles(graph: Graph) -> list[list[str]]:
    """Return the cycles: sets of nodes that reach each other (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return found


def short_files(graph: Graph, modules: Mapping[str, Path]) -> list[tuple[str, int, str]]:
    """Return the files of less than `SHORT_LINES` lines with one importer."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name, others in graph.items():
        for other in others:
            importers[other].add(name)
    found = []
    for name, path in modules.items():
        num_lines = len(path.read_text().splitlines())
        is_short = path.name != "__init__.py" and num_lines < SHORT_LINES
        if is_short and len(importers[name]) == 1:
            (importer,) = importers[name]
            found.append((name, num_lines, importer))
    return found


def survey(root: Path) -> dict[str, Any]:
    modules = modules_of(root)
    graph = graph_of(modules)
    packages = [root.name]
    packages += sorted(name for name, path in modules.items() if _is_package(name, path, root))
    return {
        "packages": {name: count(name, graph, modules) for name in packages},
        "circles": circles(graph),
        "short": short_files(graph, modules),
    }


def _is_package(name: str, path: Path, root: Path) -> bool:
    return path.name == "__init__.py" and path.parent != root


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path("src/afferent"))
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    args = parser.parse_args()
    found = survey(args.root.resolve())
    if args.json:
        print(json.dumps(found, indent=1))
        return
    columns = ("files", "rooms", "arrows", "within", "between", "pairs", "circles")
    print(f"{'package':<36}" + "".join(f"{column:>9}" for column in columns))
    for name, counted in found["packages"].items():
        print(f"{name:<36}" + "".join(f"{counted[column]:>9}" for column in columns))
    print(f"\ncircles of imports: {found['circles'] or 'none'}")
    print(f"files under {SHORT_LINES} lines with one importer: {found['short'] or 'none'}")


if __name__ == "__main__":
    main()
