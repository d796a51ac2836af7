"""The wheel and the sdist can be built, installed into an empty environment, and type-checked.

``make package`` runs this: it needs the package index, and takes a minute or two.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.package, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "users_program.py"
MAX_LIBRARY_NBYTES = 120_000_000
"""The limit for the library with its dependencies, without extras."""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist and, from it, the wheel; return their folder."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    tracked = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--outdir", out, source)
    return out


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the interpreter of an environment with the wheel alone."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    run(python, "-m", "pip", "install", "--quiet", wheel)
    yield python
    shutil.rmtree(folder)


def test_the_wheel_has_the_package_and_nothing_else(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert {file.name.split("-")[0] for file in (wheel, sdist)} == {"afferent_mm"}
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"afferent"}
    assert "afferent/py.typed" in names
    assert ("afferent/media/native/_native.abi3.so" in names) == (shutil.which("cc") is not None)
    assert "afferent/builtin/models/shapes/model.safetensors" in names
    assert "afferent/operations/live_page/page/index.html" in names
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "src/afferent/cli.py"} <= inside


def test_the_library_is_small(installed: Path) -> None:
    """The limit does not count the environment's own packages; torch is not installed."""
    listed = json.loads(run(installed, "-m", "pip", "list", "--format=json"))
    assert not {each["name"] for each in listed} & {"torch", "transformers", "starlette"}
    run(installed, "-m", "pip", "check")
    site = next(installed.parents[1].glob("lib/python*/site-packages"))
    nbytes = sum(
        file.stat().st_size
        for entry in site.iterdir()
        if entry.name.split("-")[0] not in {"pip", "setuptools", "pkg_resources", "_distutils_hack"}
        for file in (entry.rglob("*") if entry.is_dir() else [entry])
        if file.is_file() and not file.is_symlink() and file.suffix != ".pyc"
    )
    print(f"{nbytes / 1e6:.0f} MB")
    assert nbytes < MAX_LIBRARY_NBYTES


def test_a_users_program_runs(installed: Path, tmp_path: Path) -> None:
    assert run(installed, "-W", "error", PROGRAM, cwd=tmp_path).split() == [
        "1",
        "True",
        "True",
        "1",
    ]
    assert run(installed.parent / "afferent", "--version").startswith("afferent ")


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_users_program_passes_strict_checks(
    checker: str, installed: Path, tmp_path: Path
) -> None:
    shutil.copy(PROGRAM, tmp_path / "program.py")
    settings = {"typeCheckingMode": "strict", "include": ["program.py"]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    bin_folder = Path(sys.executable).parent
    if checker == "mypy":
        command = [bin_folder / "mypy", "--strict", "--python-executable", installed, "program.py"]
    else:
        command = [bin_folder / "pyright", "--pythonpath", installed]
    run(*command, cwd=tmp_path)


VIEWED = """\
from afferent import Handle, Store

def total(store: Store, handle: Handle) -> float:
    with store.view(handle) as tree:
        return float(tree["pixels"].smu())
"""


@pytest.mark.parametrize(
    ("wrong", "named"),
    [("from afferent import Itemcache\n", "Itemcache"), (VIEWED, "smu")],
)
def test_a_mistake_in_a_users_program_is_seen(
    wrong: str, named: str, installed: Path, tmp_path: Path
) -> None:
    """The types are precise: a misspelt name is an error, even for an attribute of a view."""
    (tmp_path / "program.py").write_text(wrong)
    mypy = Path(sys.executable).parent / "mypy"
    done = subprocess.run(
        [mypy, "--strict", "--python-executable", installed, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert named in done.stdout
