"""``afferent features``, as an operator runs it."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from afferent import Features
from afferent.batch import safetensors_file
from afferent.batch.safetensors_file import SafetensorsFile
from afferent.errors import ConfigError
from tests.images import encoded, photo
from tests.server import Server

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with three images, and one file that is none."""
    (made := tmp_path / "photos").mkdir()
    for number in range(3):
        data = encoded(photo(90 + 40 * number, 70, number), "JPEG")
        (made / f"{number}.jpg").write_bytes(data)
    (made / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    return made


def without_progress(errors: str) -> str:
    """Return what a command said beside its progress, which it tells where it takes seconds."""
    return re.sub(r"^\d+ of \d+ files.*\n", "", errors, flags=re.MULTILINE)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "afferent.cli", "features", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("options", [("--workers", "1"), ("--here", "--form", "hf")])
def test_features_of_a_folder_are_written_to_one_file(
    folder: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    out = tmp_path / "features.safetensors"
    done = run("shapes", folder, "--out", out, *options)
    assert done.returncode == 1
    assert f"failed: {folder}/broken.jpg: " in done.stderr
    assert done.stdout.startswith("3 of 4 files in ")
    form = "hf" if "hf" in options else "compact"
    tensors = load_file(out)
    with Features("shapes") as features:
        for number in range(3):
            file = folder / f"{number}.jpg"
            for name, expected in features.make(file, form=form).items():
                found = tensors.pop(f"{file}/{name}")
                assert found.dtype == expected.dtype
                np.testing.assert_array_equal(found, expected)
    assert not tensors
    with safe_open(out, "pt") as file:  # torch refuses tensors that are not aligned
        assert file.metadata()["form"] == form
        for name in load_file(out):
            assert file.get_tensor(name).numel()
    assert [path.name for path in tmp_path.iterdir() if path.name != "photos"] == [out.name]


def test_features_of_good_files_end_with_status_0(folder: Path, tmp_path: Path) -> None:
    done = run("shapes", folder / "0.jpg", "--here", "--out", tmp_path / "one.safetensors")
    assert done.returncode == 0
    assert done.stdout.startswith("1 of 1 files in ")


def test_features_in_a_store_are_found_by_key(folder: Path) -> None:
    with Features("shapes", where="pool", num_workers=1) as pool:
        assert pool.address is not None
        files = sorted(folder.glob("?.jpg"))
        done = run("shapes", *files, "--out", "store", "--address", pool.address)
        assert (done.returncode, without_progress(done.stderr)) == (0, "")
        assert pool.address in done.stdout
        from afferent import DaemonStore, Find, Hit

        with DaemonStore(pool.address, name="look") as store:
            keys = [pool.make(file).key for file in files]
            outcomes = store.acquire("look", [Find(key) for key in keys if key is not None])
            assert [type(each) for each in outcomes] == [Hit] * 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--out", "features.npz"), "safetensors"),
        (("--out", "missing/features.safetensors", "--here"), "missing"),
        (("--out", "x.safetensors", "--workers", "0"), "number from 1"),
        (("--out", "store", "--form", "hf"), "compact"),
        ((), "--out"),
    ],
)
def test_wrong_arguments_end_with_status_2(
    folder: Path, arguments: tuple[str, ...], words: str
) -> None:
    done = run("shapes", folder / "0.jpg", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.startswith("error: ")


def test_a_file_that_is_named_twice_is_refused(folder: Path) -> None:
    done = run("shapes", folder / "0.jpg", folder, "--out", "x.safetensors")
    assert done.returncode == 2
    assert "twice" in done.stderr


def test_a_file_whose_name_is_not_utf8_is_refused_before_the_work(
    folder: Path, tmp_path: Path
) -> None:
    (folder / os.fsdecode(b"a\xff.jpg")).write_bytes((folder / "0.jpg").read_bytes())
    done = run("shapes", folder, "--here", "--out", tmp_path / "x.safetensors")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "\\udcff.jpg" in done.stderr
    assert "UTF-8" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_names_that_a_file_can_not_have_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    values = np.arange(3)
    with SafetensorsFile(path, {}) as file:
        file.add("a", {"values": values})
        for name, words in (("a", "already"), (os.fsdecode(b"a\xff"), "UTF-8")):
            with pytest.raises(ConfigError, match=words):
                file.add(name, {"values": values + 1})
        file.add("b", {"values": values + 2})
    found = load_file(path)
    assert {name: list(each) for name, each in found.items()} == {
        "a/values": [0, 1, 2],
        "b/values": [2, 3, 4],
    }
    with pytest.raises(ConfigError, match="UTF-8"):
        SafetensorsFile(path, {"model": os.fsdecode(b"\xff")})


def begin_and_fail(path: Path) -> None:
    with SafetensorsFile(path, {}) as file:
        file.add("a", {"values": np.ones(3)})
        raise RuntimeError("disk")


def test_a_batch_that_fails_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(RuntimeError, match="disk"):
        begin_and_fail(path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="--out"):
        SafetensorsFile(tmp_path / "no" / "x.safetensors", {})


def test_tensors_of_all_widths_are_aligned(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    expected = {}
    with SafetensorsFile(path, {"a": "b"}) as file:
        for number, dtype in enumerate(("uint8", "float64", "int16", "float32", "bool", "int64")):
            values = np.arange(3 + number).astype(dtype)
            file.add(f"item {number}", {"values": values})
            expected[f"item {number}/values"] = values
    with safe_open(path, "pt") as opened:
        assert set(opened.keys()) == set(expected)
        for name, values in expected.items():
            np.testing.assert_array_equal(opened.get_tensor(name).numpy(), values)


def test_features_in_the_store_of_a_server_spare_its_requests_the_work(
    server: Server, folder: Path
) -> None:
    """The features are those that the server would make, under the same keys."""
    file = folder / "0.jpg"
    with server.store() as store:
        address = store.address
    done = run("shapes", file, "--out", "store", "--address", address)
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    before = server.metrics()
    url = f"data:image/jpeg;base64,{base64.b64encode(file.read_bytes()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    body = {"model": "shapes", "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    assert server.post(body).status_code == 200
    after = server.metrics()
    changed = {name for name in after if after[name] != before.get(name, 0.0)}
    assert any("items_total" in name and 'outcome="hit"' in name for name in changed), changed
    assert not any("items_total" in name and 'outcome="made"' in name for name in changed)
    with Features("shapes", where=address) as features, Features("shapes", backend="pil") as here:
        made, expected = features.make(file), here.make(file)
        assert made.key == expected.key
        assert (made["pixel_values"] == expected["pixel_values"]).all()


def test_a_safetensors_file_whose_table_no_reader_takes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "_MAX_TABLE_NBYTES", 1000)
    path = tmp_path / "x.safetensors"
    tensors = {"pixel_values": np.zeros((3, 4), np.uint8)}
    with SafetensorsFile(path, {}) as file:
        for number in range(9):
            file.add(f"item-{number}", tensors)
        with pytest.raises(ConfigError, match=r"^9 tensors fill .* 1,000 bytes.*several files"):
            file.add("one-more", tensors)
    assert int.from_bytes(path.read_bytes()[:8], "little") <= 1000
