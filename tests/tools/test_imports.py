"""The layers of the design, checked by import statements: a layer imports only lower layers."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Prefixes of what files of a folder may import from this repository, besides their own layer. The order
# is that of the design: examples -> modules and optimisers -> operators -> kernels.
_OPERATORS = ("jaxfused.ops", "jaxfused.dispatch", "jaxfused.runtime")
_KERNELS = ("jaxfused.dispatch", "jaxfused.runtime", "pallas_kernels")
LAYERS = {
    "examples": ("jaxfused",),
    "benchmarks": ("examples", "jaxfused", "pallas_kernels", "tests.cases"),
    "jaxfused/nnx": ("jaxfused.modules", *_OPERATORS),
    "jaxfused/linen": ("jaxfused.modules", *_OPERATORS),
    "jaxfused/modules": _OPERATORS,
    "jaxfused/augment": _OPERATORS,
    "jaxfused/fusion": _OPERATORS,
    "jaxfused/optim": _OPERATORS,
    "jaxfused/parallel": ("jaxfused.optim", *_OPERATORS),
    # Rules for a model refer to its layers.
    "jaxfused/quantization": ("jaxfused.modules", "jaxfused.nnx", *_OPERATORS),
    # Operators call the table, and the tuner calls the operators.
    "jaxfused/tuning": (
        "jaxfused.__version__",
        "jaxfused.dispatch",
        "jaxfused.explanation",
        "jaxfused.runtime",
    ),
    "jaxfused/ops": _KERNELS,
    "jaxfused/ops/attention": ("jaxfused.ops.linear", *_KERNELS),
    "jaxfused/ops/augment": _KERNELS,
    "jaxfused/ops/conv": (
        "jaxfused.ops.linear",
        "jaxfused.ops.norm",
        "jaxfused.ops.quantized",
        *_KERNELS,
    ),
    "jaxfused/ops/fp8": _KERNELS,
    "jaxfused/ops/grouped": ("jaxfused.ops.quantized", *_KERNELS),
    "jaxfused/ops/linear": (
        "jaxfused.ops.fp8",
        "jaxfused.ops.norm",
        "jaxfused.ops.rope",
        *_KERNELS,
    ),
    "jaxfused/ops/loss": ("jaxfused.ops.linear", *_KERNELS),
    "jaxfused/ops/norm": ("jaxfused.ops.quantize", *_KERNELS),
    "jaxfused/ops/optimizer": _KERNELS,
    "jaxfused/ops/pool": _KERNELS,
    "jaxfused/ops/quantize": _KERNELS,
    "jaxfused/ops/quantized": ("jaxfused.ops.linear", *_KERNELS),
    "jaxfused/ops/rope": _KERNELS,
    "jaxfused/ops/sampling": _KERNELS,
    "jaxfused/ops/serving": (
        "jaxfused.ops.attention",
        "jaxfused.ops.quantize",
        "jaxfused.ops.rope",
        *_KERNELS,
    ),
    "jaxfused/ops/sparse": _KERNELS,
    "jaxfused/runtime": ("jaxfused.__version__", *_KERNELS),
    "pallas_kernels": (),
}
OURS = ("jaxfused", "pallas_kernels", "examples", "benchmarks", "tests")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imported(path: Path) -> set[str]:
    """Returns the dotted names that a file imports, with `from a import b` as a.b."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def is_within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", LAYERS)
def test_a_layer_imports_only_what_is_below_it(folder):
    allowed = (*LAYERS[folder], folder.replace("/", "."))
    for path in files(folder):
        ours = {name for name in imported(path) if name.split(".")[0] in OURS}
        strange = {name for name in ours if not any(is_within(name, a) for a in allowed)}
        assert not strange, f"{path.relative_to(ROOT)} imports {sorted(strange)}"


@pytest.mark.parametrize("folder", ["jaxfused", "pallas_kernels"])
def test_the_packages_use_public_jax_and_no_triton(folder):
    for path in files(folder):
        for name in imported(path):
            assert not is_within(name, "jax._src"), f"{path}: {name}"
            assert not is_within(name, "jax.experimental.pallas.triton"), f"{path}: {name}"


def test_no_import_is_tried():
    """A missing dependency raises an error where it is needed; code must not silently switch paths."""
    for folder in ("jaxfused", "pallas_kernels"):
        for path in files(folder):
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.ExceptHandler) and node.type is not None:
                    assert "ImportError" not in ast.unparse(node.type), path


def test_every_layer_is_listed():
    packages = (
        *(ROOT / "jaxfused").glob("*/__init__.py"),
        *(ROOT / "jaxfused/ops").glob("*/__init__.py"),
    )
    folders = {str(path.parent.relative_to(ROOT)) for path in packages}
    assert folders == {folder for folder in LAYERS if folder.startswith("jaxfused/")}
