"""The tutorial, followed word for word: a clone, an empty environment, one shell."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from afferent.operations.commands import daemons

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/tutorial.md"
PORTS = ("8000", "9000")
"""The ports in the page: the server's, and its live page's."""
Result = tuple[int, str]

_PIP = re.compile("(?i)^(pip_|ssl_|.*_proxy$)")
"""The network settings of package installers depend on the machine."""
_END = "--- end of block {} ---"


def steps() -> list[tuple[str, str | None]]:
    """Return each block of commands, with the expected output below it."""
    found = re.findall(
        r"^```sh\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?",
        PAGE.read_text(),
        re.MULTILINE | re.DOTALL,
    )
    return [(commands, printed or None) for commands, printed in found]


def copy_of_the_repository(folder: Path) -> Path:
    """Copy the files that a clone would have, and uncommitted ones."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    clone = folder / "afferent"
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name)
    return clone


def matches(expected: str, printed: str) -> bool:
    """Compare lines without trailing blanks; ``…`` stands for any text, including whole lines."""
    printed = "\n".join(line.rstrip() for line in printed.splitlines())
    pattern = ".*?".join(re.escape(part) for part in expected.strip().split("…"))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def follow(script: str, folder: Path, environment: dict[str, str], *, timeout_s: float) -> Result:
    """Return status and output of one shell; all processes that it has started have ended."""
    with tempfile.TemporaryFile("w+") as printed:
        shell = subprocess.Popen(
            ["bash", "-e", "-c", script],
            cwd=folder,
            env=environment,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            shell.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
        printed.seek(0)
        return shell.returncode, printed.read()


def free_ports() -> dict[str, str]:
    """Return a free port for each port of the page, outside of the range of ephemeral ports."""
    found: dict[str, str] = {}
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found[PORTS[len(found)]] = str(port)
            if len(found) == len(PORTS):
                return found
    raise AssertionError("too few ports are free")


def with_ports(text: str, ports: dict[str, str]) -> str:
    return re.sub("|".join(PORTS), lambda match: ports[match[0]], text)


@pytest.mark.first
@pytest.mark.timeout(1800)
def test_the_tutorial_word_for_word(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The commands are unchanged except for the ports, which are replaced by free ones.

    Without ``--storm``, nothing is installed: the environment is the one that runs this test.
    """
    if running := daemons.find():
        pytest.skip(f"the tutorial's commands would find a server of yours: {running[0]}")
    from_nothing = request.config.getoption("--storm")
    clone = copy_of_the_repository(tmp_path)
    before = {path.name for path in clone.iterdir()} | {".venv"}
    if not from_nothing:
        if not Path(sys.prefix, ".ready").exists():
            pytest.skip("this environment was not made by `make setup`")
        (clone / ".venv").symlink_to(sys.prefix)
        # otherwise make would set the environment up again
        os.utime(clone / "pyproject.toml", (0, 0))
    (tmp_path / "home").mkdir()
    ports = free_ports()
    script = "".join(
        f"{with_ports(commands, ports)}\necho\necho '{_END.format(number)}'\n"
        for number, (commands, _) in enumerate(steps())
    )
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(tmp_path / "home"),
        "AFFERENT_PORT": ports["8000"],
    }
    environment |= {name: os.environ[name] for name in os.environ if _PIP.match(name)}
    status, rest = follow(script, clone, environment, timeout_s=1700 if from_nothing else 600)
    assert status == 0, rest
    assert {path.name for path in clone.iterdir()} == before, "what it writes is removed"
    for number, (commands, expected) in enumerate(steps()):
        printed, _, rest = rest.partition(_END.format(number) + "\n")
        if expected is not None:
            wanted = with_ports(expected, ports)
            assert matches(wanted, printed), f"{commands}\nprinted\n{printed}"


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a…c", "a b\nc", True),
        ("a\nb", "a\nc", False),
        ("…x", "nothing of the kind", False),
        ("", "anything", False),
    ],
)
def test_outputs_are_really_compared(expected: str, printed: str, same: bool) -> None:
    assert matches(expected, printed) is same
