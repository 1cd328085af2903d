"""Runs a test file's cases for several devices in a separate process with eight CPU devices."""

import os
import subprocess
import sys

DEVICES = 8


def assert_passes(file: str, selection: str, *, timeout: float = 1200) -> None:
    """Runs the cases of a file that are skipped with one device; `selection` is a mark's expression."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(DEVICES),
        # A cached program's key does not include its partitioning callbacks.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        # Cases that run with one device already run in the other process.
        [*command, "-m", f"skipif and {selection}", file],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
