"""`python -m tests.peers`: Flax's own tests of attention, convolution, linear layers and norms.

The released source archive of the Flax that is installed holds them, and pip fetches it into build/;
a plugin points the names of Flax at this package. JAX's archive holds no tests: with a checkout of
JAX, `--jax-tests jax/tests` runs its tests of attention too. Other arguments go to pytest.
"""

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "peers"

sys.path.insert(0, str(HERE))
import points_at_jaxfused  # noqa: E402

SUITES = (
    "tests/nnx/nn/attention_test.py",
    "tests/nnx/nn/conv_test.py",
    "tests/nnx/nn/linear_test.py",
    "tests/nnx/nn/normalization_test.py",
    "tests/linen/linen_attention_test.py",
    "tests/linen/linen_linear_test.py",
    "tests/linen/linen_test.py",
)


def flax_sources() -> Path:
    """Returns the folder with the released sources of the installed Flax."""
    version = importlib.metadata.version("flax")
    folder = BUILD / f"flax-{version}"
    if not folder.exists():
        archive = BUILD / f"flax-{version}.tar.gz"
        if not archive.exists():
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            pip += ["--no-binary", "flax", "--dest", str(BUILD), f"flax=={version}"]
            subprocess.run(pip, check=True)
        with tarfile.open(archive) as files:
            files.extractall(BUILD, filter="data")
    return folder


def run(folder: Path, tests: tuple[str, ...], options: list[str], **environment: str) -> int:
    """Returns pytest's exit status for tests in `folder`, under that folder's own settings."""
    path = os.pathsep.join([str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", points_at_jaxfused.__name__]
    # Compiled programs and pytest's cache are kept out of that checkout.
    command += ["-p", "no:cacheprovider", "-p", "no:benchmark", *tests, *options]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path, **environment}
    ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jax-tests", type=Path, help="the folder tests/ of a checkout of JAX")
    arguments, options = parser.parse_known_args()
    for name, reason in points_at_jaxfused.DESELECTED.items():
        print(f"left out: {name.split('::')[-1]}: {reason}")
    # The tests compare float32 with NumPy, for which JAX's default precision on a GPU is too low.
    precision = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    status = run(flax_sources(), SUITES, options, **precision)
    if arguments.jax_tests is not None:
        jax_options = ["-k", "Attention", *options]
        environment = {points_at_jaxfused.POINTS_JAX: "1"}
        folder = arguments.jax_tests.resolve()
        status = status or run(folder, ("nn_test.py",), jax_options, **environment)
    return status


if __name__ == "__main__":
    sys.exit(main())
