"""``afferent tier`` with a folder, which needs no server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from afferent import cli
from afferent.operations.commands import tier
from afferent.tier.folder_tier import FolderTier
from afferent.tier.registry import open_tier
from afferent.tier.sealed import Sealer
from afferent.tier.vault import Body, Vault
from afferent.types import ContentKey, ObjectKind

SECRET = "a-secret-of-this-fleet"
KEYS = [ContentKey(bytes([number]) * 32) for number in range(3)]
LONG_S = 1e9


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a tier with two features, one embedding, and a value with another secret."""
    url = f"file://{tmp_path}/tier"
    for secret, keys in ((SECRET, KEYS), ("another fleets secret", KEYS[:1])):
        vault = Vault(open_tier(url), Sealer(secret.encode()))
        kinds = [ObjectKind.FEATURES, ObjectKind.FEATURES, ObjectKind.EMBEDDINGS]
        bodies = [
            Body(key, kind, memoryview(bytes(1000))) for key, kind in zip(keys, kinds, strict=False)
        ]
        assert set(vault.put(bodies, ttl_s=60, deadline_s=LONG_S)) == {"written"}
        vault.close()
    monkeypatch.setenv("AFFERENT_TIER", url)
    monkeypatch.setenv("AFFERENT_FLEET_SECRET", SECRET)
    return url


def stat(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    capsys.readouterr()
    assert cli.main(["tier", "stat", "--json"]) == 0
    said: dict[str, object] = json.loads(capsys.readouterr().out)
    return said


def test_stat(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = stat(capsys)
    assert said["num_objects"] == {"features": 2, "embeddings": 1}
    assert said["nbytes"] == {"features": 2000, "embeddings": 1000}
    assert (said["num_strangers"], said["tier"]) == (1, url)
    assert cli.main(["tier", "stat"]) == 0
    shown = capsys.readouterr().out
    assert "features: 2 objects" in shown
    assert "not sealed with this fleet's secret: 1 object" in shown


def test_verify_finds_what_is_wrong_and_deletes_it(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tier", "verify"]) == 0
    assert "right: 3 objects" in capsys.readouterr().out
    name = Sealer(SECRET.encode()).name_of(KEYS[0]).hex()
    (file,) = Path(url.removeprefix("file://")).rglob(name)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert cli.main(["tier", "verify"]) == 1
    assert "wrong or not whole, deleted: 1" in capsys.readouterr().out
    assert cli.main(["tier", "verify"]) == 0
    assert not file.exists()


def test_verify_of_a_value_longer_than_any_is_not_read(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values are read whole, and without the secret anyone may have written a very long one."""
    monkeypatch.setenv("AFFERENT_TIER_MAX_NBYTES", "999")
    assert cli.main(["tier", "verify"]) == 1
    shown = capsys.readouterr().out
    assert "longer than --tier-max-nbytes, not read: 3" in shown
    assert "deleted: 0" in shown


@pytest.mark.parametrize(
    ("arguments", "left", "num_strangers"),
    [
        (["--kind", "features"], {"embeddings": 1}, 1),
        (["--key", KEYS[2].hex(), "--key", KEYS[0].hex()], {"features": 1}, 1),
        (["--key", "ab" * 32], {"features": 2, "embeddings": 1}, 1),
        (["--all"], {}, 0),
    ],
)
def test_evict(
    url: str,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    left: dict[str, int],
    num_strangers: int,
) -> None:
    assert cli.main(["tier", "evict", *arguments]) == 0
    said = stat(capsys)
    assert (said["num_objects"], said["num_strangers"]) == (left, num_strangers)


def test_evict_of_many_deletes_them_in_parts_each_with_its_own_timeout(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts: list[int] = []
    delete_many = FolderTier.delete_many

    def counted(self: FolderTier, names: Sequence[bytes], *, deadline_s: float) -> int:
        assert deadline_s == 1000.0 * (len(parts) + 1)
        parts.append(len(names))
        return delete_many(self, names, deadline_s=LONG_S)

    monkeypatch.setattr(tier, "_NUM_AT_ONCE", 3)
    monkeypatch.setattr(tier, "_soon", lambda: 1000.0 * (len(parts) + 1))
    monkeypatch.setattr(FolderTier, "delete_many", counted)
    assert cli.main(["tier", "evict", "--all"]) == 0
    assert "deleted 4 objects" in capsys.readouterr().out
    assert parts == [3, 1]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["stat", "--tier", "nonsense"], "must be a URL"),
        (["evict"], "required"),
        (["evict", "--key", "abc"], "64 hexadecimal digits"),
        (["stat", "--tier", "redis://127.0.0.1:1"], "refused"),
    ],
)
def test_what_can_not_be_done_is_said_in_a_line(
    url: str, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    assert cli.main(["tier", *arguments]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert len(said.splitlines()) == 1


def test_without_a_tier_it_says_how_to_name_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("AFFERENT_TIER", raising=False)
    assert cli.main(["tier", "stat"]) == 2
    assert "AFFERENT_TIER" in capsys.readouterr().err
