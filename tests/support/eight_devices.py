"""A test file's cases of several devices, in a process of its own that has eight of them."""

import os
import subprocess
import sys

DEVICES = 8


def assert_passes(file: str, selection: str) -> None:
    """Runs the cases of a file that are skipped with one device; `selection` is a mark's expression."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(DEVICES),
        # The name of a cached program does not say what its partitioning callbacks do.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        # Those that are not skipped here have no need of several devices, and run in the other process.
        [*command, "-m", f"skipif and {selection}", file],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
