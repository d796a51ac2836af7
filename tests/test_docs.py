"""The documentation matches the code: links, commands, flags, settings, codes and messages.

`test_docs_examples` runs the examples; `test_docs_site` tests the site.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import afferent
from afferent import config, errors
from afferent.operations.commands import machine
from benchmarks import run as benchmarks
from tests.pages import (
    DOCS,
    PAGES,
    ROOT,
    SHELLS,
    URL,
    WORD_FOR_WORD,
    blocks_of,
    commands_of,
    inline_code,
    name_of,
    prose_lines,
    without_blocks,
)
from tools import records_page, selected_results, settings_page
from tools.command_lines import commands, flags, parsers

LANGUAGES = {"", "bash", "console", "html", "js", "json", "python", "sh", "text", "toml", "yaml"}
OTHERS_FLAGS = {
    *("--format", "--shm-size", "--start", "--tmpfs"),
    # Of vLLM:
    *(
        "--allowed-media-domains",
        "--api-key",
        "--api-server-count",
        "--compilation-config",
        "--config-format",
        "--data-parallel-size",
        "--default-chat-template-kwargs",
        "--disable-uvicorn-access-log",
        "--distributed-executor-backend",
        "--ec-transfer-config",
        "--enable-auto-tool-choice",
        *("--tokenizer", "--hf-config-path", "--hf-overrides"),
        "--enable-chunked-prefill",
        "--enable-lora",
        "--enable-mm-embeds",
        "--enable-prompt-embeds",
        "--enable-scale-out",
        "--enable-sleep-mode",
        "--enable-tower-connector-lora",
        "--kv-transfer-config",
        "--limit-mm-per-prompt",
        "--max-num-batched-tokens",
        "--media-io-kwargs",
        "--mm-processor-cache-gb",
        "--mm-processor-kwargs",
        "--model",
        "--pipeline-parallel-size",
        "--root-path",
        "--runner",
        "--served-model-name",
        "--speculative-config",
        "--tensor-parallel-size",
        "--tokenizer-mode",
        "--tokens-only",
        "--video-pruning-rate",
        "--trust-remote-code",
        "--trust-request-chat-template",
        "--trust-request-mm-kwargs",
        "--uds",
    ),
}
"""Flags of container engines, of `training/train.py`, and of vLLM."""
MAX_WIDTH = 120
COMMANDS, WITH_OPENAI = commands(), commands("openai")
BENCHMARKS = dict(parsers(benchmarks._parser(), ()))

each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


# Links


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    text = without_blocks(page)
    for target, fragment in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
        if "://" in target:
            continue
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name} links to {target}"
        if fragment and path.suffix == ".md":
            assert fragment in anchors_of(path), f"{page.name} links to {target}#{fragment}"


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of the headings, as the site and repository viewers derive them."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"\s+", "-", text) for text in plain}


# Commands


@each_page
def test_commands_are_understood(page: Path) -> None:
    """The parsers of the commands accept them: verbs, flags and values."""
    for block in blocks_of(page, *SHELLS):
        is_followed = block.language == "sh" and name_of(page) in WORD_FOR_WORD
        if block.is_fragment or is_followed:
            continue
        for command in commands_of(block):
            check_command(command)


def check_command(command: str) -> None:
    words = shlex.split(command, comments=True)
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=.*", word)] or words
    match words:
        case ["afferent", *rest]:
            known = WITH_OPENAI if "openai" in rest else COMMANDS
            parse(known["afferent",], rest, command)
        case ["make", target]:
            check_make(target, command)
        case ["curl", *rest]:
            assert any(word.startswith(URL) for word in rest), f"{command}: tests run only ours"
        case _:
            pytest.fail(f"no test runs `{command}`: mark its block as a fragment, and say why")


def check_make(target: str, command: str) -> None:
    assert target in make_targets(), command
    if target == "bench" and (arguments := re.search(r'ARGS="?([^"]*)', command)):
        parse(BENCHMARKS[()], shlex.split(arguments[1]), command)
    elif target == "serve" and (arguments := re.search(r'ARGS="?([^"]*)', command)):
        parse(COMMANDS["afferent",], ["serve", *shlex.split(arguments[1])], command)


def parse(parser: argparse.ArgumentParser, arguments: list[str], command: str) -> None:
    try:
        parser.parse_args(arguments)
    except SystemExit as end:
        if end.code:
            pytest.fail(f"`{command}` is not understood")


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@each_page
def test_what_prose_says_of_commands(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # it names old commands
    everywhere = {flag for parser in COMMANDS.values() for flag in flags(parser)} | OTHERS_FLAGS
    for others in (WITH_OPENAI, BENCHMARKS):
        everywhere |= {flag for parser in others.values() for flag in flags(parser)}
    for code in inline_code(page):
        words = code.split()
        if words[0] == "make" and len(words) > 1:
            check_command(code.replace("\n", " "))
        elif words[0] == "afferent":
            verbs = tuple(word for word in words[:3] if re.fullmatch("[a-z]+", word))
            while verbs not in COMMANDS:
                assert len(verbs) > 2, f"`{code}` is no command"
                verbs = verbs[:-1]
            named = {word for word in words if re.fullmatch("--[a-z-]+", word)}
            assert named <= flags(COMMANDS[verbs]), f"`{code}` has a flag that is not there"
        elif flag := re.fullmatch(r"(--[a-z-]+)( .*)?", code):
            has_it = any(known.startswith(flag[1]) for known in everywhere)
            assert flag[1] in everywhere or (flag[2] == "..." and has_it), f"{code} is no flag"


def test_every_store_command_is_documented() -> None:
    text = (DOCS / "operating-the-store.md").read_text()
    for words, parser in COMMANDS.items():
        if words[:2] == ("afferent", "store") and len(words) == 3:
            assert f"$ {' '.join(words)}" in text
            for flag in flags(parser) - {"--help"}:
                assert flag in text, f"{flag} of {words[-1]}"


def test_every_make_target_is_listed() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    targets = "setup serve test lint type fmt bench docs check clean"
    for target in targets.split():
        assert f"make {target} " in listed.stdout


# The name of the package


INSTALLS_ANOTHER = re.compile(r"pip3? install[^\n`]*\bafferent(?![-\w./])")
"""The name `afferent` belongs to another project on the package index."""


def test_package_name_is_the_same_in_sources_and_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == machine.DISTRIBUTION != "afferent"
    assert project["version"] == afferent.__version__
    extras = project["optional-dependencies"].values()
    required = [*project["dependencies"], *(line for extra in extras for line in extra)]
    assert "afferent" not in {Requirement(line).name for line in required}


def test_install_commands_never_name_the_other_package() -> None:
    written = [*PAGES, ROOT / "Makefile", *(ROOT / "deploy").glob("*")]
    for folder in ("benchmarks", "examples", "src", "tests", "tools", "training"):
        written += (ROOT / folder).rglob("*.py")
    named = {
        str(path.relative_to(ROOT))
        for path in written
        if path.is_file() and INSTALLS_ANOTHER.search(path.read_text())
    }
    assert named == set()


@pytest.mark.parametrize(
    ("words", "is_other"),
    [
        ("afferent", True),
        ("--upgrade 'afferent[engine]'", True),
        ("numpy afferent==0.3", True),
        ("afferent-mm", False),
        ("'.[engine]'", False),
        ("/srv/afferent/clone", False),
    ],
)
def test_install_command_of_the_other_package_is_recognized(words: str, is_other: bool) -> None:
    assert bool(INSTALLS_ANOTHER.search(f"pip install {words}")) is is_other


# The packages


def test_architecture_names_every_package_in_one_line() -> None:
    """The page has about 600 words, not counting drawings and link targets."""
    page = DOCS / "architecture.md"
    (packages,) = [rows for head, _, *rows in tables_of(page) if head[0] == "package"]
    listed = [name for row in packages for name in re.findall(r"`([^`]+)`", row[0])]
    package = ROOT / "src" / "afferent"
    there = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    there |= {path.name for path in package.glob("[!_]*.py")}
    assert sorted(listed) == sorted(there)
    assert all(len(row) == len(packages[0]) for row in packages)
    for name, task, begin_with in packages:
        assert task.count(" ") > 0, f"{name} has no task"
        for path in re.findall(r"`([^`]+)`", begin_with):
            assert (package / name.strip("`") / path).exists(), f"{name} has no {path}"
    text = re.sub(r"\]\([^)]*\)", "]", without_blocks(page))
    assert 500 <= len(re.findall(r"[\w'-]+", text)) <= 700


# Blocks


@each_page
def test_every_block_is_of_a_kind_that_is_checked(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in LANGUAGES, f"{page.name}: say how {block.language} is checked"
        if block.is_fragment:
            continue
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            check_settings(block.text)
        elif block.language == "yaml":
            assert yaml.safe_load(block.text)


def check_settings(text: str) -> None:
    values = tomllib.loads(text)
    assert values.keys() <= config.declared(config.ServeConfig).keys()


def test_settings_of_the_pages_can_be_loaded(tmp_path: Path) -> None:
    for page in PAGES:
        for block in blocks_of(page, "toml"):
            file = tmp_path / "afferent.toml"
            file.write_text(block.text)
            config.load(environ={}, file=file)


@each_page
def test_python_blocks_compile_and_import_what_is_there(page: Path) -> None:
    """This includes fragments."""
    for block in blocks_of(page, "python"):
        flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        tree = compile(block.text, page.name, "exec", flags)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("afferent"):
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    if not hasattr(module, alias.name):  # it must be a module
                        importlib.import_module(f"{node.module}.{alias.name}")


# Errors


def tables_of(page: Path) -> list[list[list[str]]]:
    """Return the cells of each table, the header row first."""
    tables = re.findall(r"(?:^\|.*\|\n)+", without_blocks(page), re.MULTILINE)
    rows = [[line.strip("|").split(" | ") for line in table.splitlines()] for table in tables]
    return [[[cell.strip() for cell in row] for row in table] for table in rows]


def test_troubleshooting_has_every_error() -> None:
    codes = {cls.code for cls in errors.walk() if cls.__module__ == errors.__name__} - {"error"}
    found = {
        code
        for head, _, *rows in tables_of(DOCS / "troubleshooting.md")
        if "code" in head[0]
        for row in rows
        for code in re.findall(r"`([a-z_]+)`", row[0])
    }
    assert found == codes


def said_by_the_package() -> list[str]:
    """Return all texts of the sources, with ``\\0`` in place of inserted values."""
    said = []
    for path in (ROOT / "src/afferent").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
                ]
                said.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.append(node.value)
    return said


def test_messages_in_troubleshooting_are_said() -> None:
    """Each line quoted in the tables is in the sources; ``...`` stands for any text."""
    said = said_by_the_package()
    for head, _, *rows in tables_of(DOCS / "troubleshooting.md"):
        if head[0] not in ("the line says", "what you see"):
            continue
        for quoted in (text for row in rows for text in re.findall(r"`([^`]+)`", row[0])):
            is_ours = not quoted.startswith(("port = ", "--port ", "Address ", "Permission "))
            if " " not in quoted or not is_ours:
                continue  # a word, a value of the reader's, or a message of the operating system
            pattern = ".*".join(re.escape(part.strip()) for part in quoted.split("..."))
            assert any(re.search(pattern, text, re.DOTALL) for text in said), quoted


def test_the_page_of_records_has_their_figures() -> None:
    """``python -m tools.records_page --write`` updates it."""
    assert records_page.PAGE.read_text() == records_page.write_page()


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/benchmarks/README.md"])
def test_selected_results_are_those_of_the_records(page: Path) -> None:
    """``python -m tools.selected_results --write`` updates them."""
    assert page.read_text() == selected_results.written(page)


def test_the_page_of_settings_is_up_to_date() -> None:
    """``python -m tools.settings_page --write`` updates it."""
    assert settings_page.PAGE.read_text() == settings_page.page()


# Format


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != ROOT], ids=name_of)
def test_prose_is_not_too_wide(page: Path) -> None:
    check_width(page)


def test_the_readme_is_not_too_wide() -> None:
    check_width(ROOT / "README.md")


@pytest.mark.parametrize("page", sorted((DOCS / "adr").glob("0*.md")), ids=name_of)
def test_decisions_have_titles_of_one_form_and_are_listed(page: Path) -> None:
    assert re.match(rf"# {page.name[:4]}: [A-Z]", page.read_text())
    assert f"({page.name})" in (DOCS / "adr" / "README.md").read_text()


def check_width(page: Path) -> None:
    wide = [number for number, line in prose_lines(page) if len(line) > MAX_WIDTH]
    assert wide == [], f"lines of {page.name} have more than {MAX_WIDTH} characters"
