"""Result files: results/<gpu>.json, with one section per benchmark and notes on its machine."""

import importlib.metadata
import json
import os
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxfused.ops.linear import cublaslt

DIRECTORY = Path(__file__).parents[1] / "results"

_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "flax",
    "numpy",
    "nvidia-cublas",
    "nvidia-cudnn-cu13",
    "torch",
    "triton",
    "liger-kernel",
    "tokamax",
    "jax-triton",
)
_GPU_FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.limit",
    "power.draw",
    "temperature.gpu",
)

Result = dict[str, Any]


def slug(gpu: str) -> str:
    """Returns a GPU's name as a file name: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Returns the versions of installed packages that affect the timings.

    The versions also say whether the kernels run without cuBLASLt, which is optional in the library.
    """
    installed = {}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if (reason := cublaslt.why_unavailable()) is not None:
        installed["cuBLASLt"] = f"none: {reason}"
    return installed


def gpu_state() -> dict[str, str]:
    """Reads the driver, clocks and power of the first GPU; sets nothing."""
    fields = ",".join(_GPU_FIELDS)
    query = ["nvidia-smi", "-i", "0", "--format=csv,noheader", f"--query-gpu={fields}"]
    try:
        line = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"error": f"nvidia-smi: {error}"}
    values = [value.strip() for value in line.splitlines()[0].split(",")]
    return dict(zip(_GPU_FIELDS, values, strict=True))


def topology() -> str:
    """Returns how the GPUs are linked, as nvidia-smi prints it."""
    try:
        command = ["nvidia-smi", "topo", "-m"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi: {error}"


def run_tags(arguments: Sequence[str]) -> Result:
    """Returns a run's date, arguments, commit and versions; of a local path only the file's name."""
    return {
        "date": now(),
        "arguments": [Path(a).name if Path(a).is_absolute() else a for a in arguments],
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": versions(),
    }


def commit() -> str:
    """Returns the commit that a section measures, and says if it has uncommitted changes."""
    dirty = _git("status", "--porcelain", "--untracked-files=no")
    return _git("rev-parse", "--short", "HEAD") + (" with changes" if dirty else "")


def _git(*arguments: str) -> str:
    """Returns git's output on this checkout; empty outside of one."""
    here = Path(__file__).parents[1]
    try:
        run = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True)
    except OSError:
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def load(path: Path) -> Result:
    """Returns the file's content, or an empty result if there is no file."""
    if not path.exists():
        return {"gpu": "", "benchmarks": {}}
    result: Result = json.loads(path.read_text())
    return result


def save_section(directory: Path, gpu: str, name: str, section: Result) -> Path:
    """Writes one benchmark's section into the GPU's file and keeps the others."""
    path = directory / f"{slug(gpu)}.json"
    result = load(path)
    result["gpu"] = gpu
    result["benchmarks"][name] = section
    directory.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(rounded(result), indent=1) + "\n")
    os.replace(partial, path)
    return path


def rounded(value: Any) -> Any:
    """Rounds all floats to five significant digits, more than any measurement here has."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    return value
