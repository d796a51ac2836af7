"""The documentation site: its links, its navigation, and a build."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import afferent
from tests.pages import DOCS, ROOT
from tests.test_public_face import FACES
from tools import site_pages


@pytest.mark.parametrize(
    ("page", "target", "expected"),
    [
        ("gate.md", "store.md#room", "store.md#room"),
        ("gate.md", "https://example.org/src", "https://example.org/src"),
        ("gate.md", "../src/afferent/errors.py", "source/src/afferent/errors.py.md"),
        ("adr/0001-dependencies.md", "../../pyproject.toml", "../source/pyproject.toml.md"),
        (
            "gate.md",
            "../CONTRIBUTING.md#the-built-in-model",
            "source/CONTRIBUTING.md#the-built-in-model",
        ),
        ("gate.md", "../README.md#try-it", "index.md"),
        ("gate.md", "adr/", "adr/README.md"),
        ("gate.md", "../CHANGELOG.md#unreleased", "changes.md#unreleased"),
        ("changes.md", "docs/gate.md#room", "gate.md#room"),
        ("changes.md", "CONTRIBUTING.md", "source/CONTRIBUTING.md"),
        ("source/CONTRIBUTING.md", "docs/gate.md", "../gate.md"),
        ("source/CONTRIBUTING.md", "docs/adr/", "../adr/README.md"),
        ("gate.md", "../src/nothing.py", "../src/nothing.py"),
    ],
)
def test_links_lead_where_the_site_has_their_targets(page: str, target: str, expected: str) -> None:
    assert site_pages.site_links(f"[x]({target})", page) == f"[x]({expected})"


def test_only_files_outside_of_the_documentation_get_pages() -> None:
    text = "[a](store.md) [b](../src/afferent/keys.py) [c](../nothing.py) [d](https://e.org/x.py)"
    assert site_pages.outside_targets(text, "docs/gate.md") == {"src/afferent/keys.py"}


def test_a_file_is_shown_as_it_is() -> None:
    """The page's fence is longer than any fence in the file."""
    page = site_pages.source_page("tests/test_docs_site.py")
    source = (ROOT / "tests/test_docs_site.py").read_text()
    assert source in page
    fence = "````"  # longer than this one: ```
    assert page.count(f"\n{fence}") == 2


def test_a_folder_in_the_navigation_is_its_pages() -> None:
    nav = [{"Home": "index.md"}, {"Notes": ["notes/README.md", "notes/*.md"]}]
    pages = ["index.md", "notes/b.md", "notes/a.md", "notes/README.md", "other.md"]
    expanded = site_pages.expand_nav(nav, pages)
    expected = ["notes/README.md", "notes/a.md", "notes/b.md"]
    assert expanded == [{"Home": "index.md"}, {"Notes": expected}]


def test_every_page_is_in_the_navigation_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = ["changes.md", *(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))]
    reached = list(site_pages.named_pages(site_pages.expand_nav(nav, pages)))
    assert sorted(reached) == sorted(pages)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ("# Log\n\n## Unreleased\n\n- A.\n\n## 0.2.1 (a day)\n", ("next", "after 0.2.1")),
        ("# Log\n\n## Unreleased\n\n## 0.2.1 (a day)\n\n- A.\n", ("0.2", "0.2.1")),
        ("# Log\n\n## 0.2.1 (a day)\n\n- A.\n\n## 0.1.0\n", ("0.2", "0.2.1")),
        ("# Log\n\n## 0.10.0\n", ("0.10", "0.10.0")),
    ],
)
def test_the_version_of_the_pages_is_that_of_the_change_log(
    changes: str, expected: tuple[str, str]
) -> None:
    assert site_pages.version(changes) == expected


def test_the_change_log_has_the_version_of_the_package() -> None:
    _, title = site_pages.version((ROOT / "CHANGELOG.md").read_text())
    assert title.removeprefix("after ") == afferent.__version__


@pytest.mark.timeout(600)
def test_the_site_of_all_versions_keeps_the_older_ones(tmp_path: Path) -> None:
    """A clone of the working tree is released as 0.3.0; its branch has the pages of 0.2 already."""
    if importlib.util.find_spec("mike") is None:
        pytest.skip("mike is not installed; `make docs` installs it")
    names = _git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / name)
    log = tmp_path / "CHANGELOG.md"
    log.write_text(log.read_text().replace("## Unreleased", "## Unreleased\n\n## 0.3.0 (a day)"))
    _git(tmp_path, "init", "--quiet", "--initial-branch", "gh-pages")
    _git(tmp_path, "config", "user.name", "A founder")
    _git(tmp_path, "config", "user.email", "founder@example.org")
    older = [{"version": "0.2", "title": "0.2.9", "aliases": ["latest"]}]
    (tmp_path / "versions.json").write_text(json.dumps(older))
    (tmp_path / "0.2").mkdir()
    (tmp_path / "0.2/index.html").write_text("of 0.2")
    (tmp_path / "latest").symlink_to("0.2")
    _git(tmp_path, "add", "versions.json", "0.2", "latest")
    _git(tmp_path, "commit", "--quiet", "--message", "Pages of 0.2")
    _git(tmp_path, "checkout", "--quiet", "--orphan", "main")
    _git(tmp_path, "commit", "--quiet", "--message", "The tree")

    def page(name: str) -> str:
        return _git(tmp_path, "show", f"gh-pages:{name}")

    def write_version(heading: str) -> None:
        log.write_text(f"# Changelog\n\n## {heading}\n\n- A change.\n\n## 0.1.0\n")
        _add_version(tmp_path)

    _add_version(tmp_path)
    assert json.loads(page("versions.json")) == [
        {"version": "0.3", "title": "0.3.0", "aliases": ["latest"]},
        {"version": "0.2", "title": "0.2.9", "aliases": []},
    ]
    assert page("0.2/index.html") == "of 0.2"
    assert page("latest") == "0.3"
    assert "latest/" in page("index.html")
    assert '"provider": "mike"' in page("0.3/index.html")
    assert '<h2 id="030-a-day">' in page("0.3/changes.html")
    (tmp_path / "mkdocs.yml").write_text("site_name: Small\ndocs_dir: small\nplugins: [mike]\n")
    (tmp_path / "small").mkdir()
    (tmp_path / "small/index.md").write_text("A page.")
    write_version("Unreleased")
    assert [each["version"] for each in json.loads(page("versions.json"))] == ["next", "0.3", "0.2"]
    write_version("0.2.10 (a fix of an older version)")
    assert page("latest") == "0.3"
    write_version("0.4.0")
    assert [each["version"] for each in json.loads(page("versions.json"))] == ["0.4", "0.3", "0.2"]
    assert page("latest") == "0.4"


@pytest.mark.timeout(600)
def test_the_site_builds(tmp_path: Path) -> None:
    """The build is strict: a warning is an error.

    All public names are on their pages, and browsers load nothing from other hosts.
    """
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("MkDocs is not installed; `make docs` installs it")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "MIKE_DOCS_VERSION"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    _, title = site_pages.version((ROOT / "CHANGELOG.md").read_text())
    assert f"<title>Afferent {title}</title>" in (tmp_path / "index.html").read_text()
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(https?:[^\" >]*)", page.read_text()
        )
        assert loaded == [], page
    found = json.loads((tmp_path / "search/search_index.json").read_text())["docs"]
    assert {each["location"]: each["title"] for each in found}["install.html"] == "Install"
    low = {each["location"].partition("#")[0] for each in found if each.get("boost", 1) < 1}
    listed = {each["location"].partition("#")[0] for each in found}
    assert low == {page for page in listed if page.startswith(site_pages.NOTES)}
    public = (tmp_path / "reference/python.html").read_text()
    for face in FACES:
        module = importlib.import_module(face)
        for name in set(module.__all__) - {"__version__"}:
            dot = "." if inspect.ismodule(getattr(module, name)) else ""
            assert f'id="{face}.{name}{dot}' in public, f"{name} is not documented"


def _add_version(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.docs_version"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout
