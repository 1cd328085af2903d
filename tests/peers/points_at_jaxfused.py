"""A pytest plugin that puts this package's modules and operators under the names of Flax and JAX.

`python -m tests.peers` loads it before it collects their tests.
"""

import os

import flax.linen
import flax.nnx
import jax
import pytest

import jaxfused
import jaxfused.linen
import jaxfused.nnx

NNX = (
    "BatchNorm",
    "Conv",
    "Einsum",
    "GroupNorm",
    "LayerNorm",
    "Linear",
    "LinearGeneral",
    "MultiHeadAttention",
    "RMSNorm",
    "avg_pool",
    "max_pool",
)
LINEN = (
    "BatchNorm",
    "Conv",
    "ConvLocal",
    "Dense",
    "DenseGeneral",
    "Einsum",
    "GroupNorm",
    "LayerNorm",
    "MultiHeadAttention",
    "MultiHeadDotProductAttention",
    "RMSNorm",
    "SelfAttention",
    "avg_pool",
    "max_pool",
)
POINTS_JAX = "JAXFUSED_POINTS_JAX"
"""Environment variable that is set for JAX's own tests, which leave Flax unchanged."""

BITS = (
    "compares bits of float32: linen runs the operator, nnx is given a promote_dtype of its own, so that"
    " Flax's code runs, whose variances are less accurate"
)
CONSISTENCY = "tests/nnx/nn/normalization_test.py::TestLinenConsistency"
DESELECTED = {
    f"{CONSISTENCY}::test_nnx_linen_{norm}_equivalence{i}": BITS
    # Cases in float32 without a mask, with parameters in float32 and in float16: with use_fast_variance,
    # and of groups without it too.
    for norm, cases in (("batchnorm", (0, 4)), ("layernorm", (0, 4)), ("groupnorm", (0, 2, 4, 6)))
    for i in cases
}
"""Tests that are left out, with the reason."""
if jax.default_backend() == "gpu":
    DESELECTED |= {
        f"{CONSISTENCY}::test_nnx_linen_{norm}_equivalence{i}": (
            "compares bits of float32, which a kernel sums in another order than XLA's passes"
        )
        # the cases in float32
        for norm, count in (("batchnorm", 16), ("groupnorm", 8), ("layernorm", 8), ("rmsnorm", 8))
        for i in range(0, count, 2)
    }


def pytest_configure(config):
    """Replaces the names, after this package has imported Flax's own classes."""
    del config
    if POINTS_JAX in os.environ:
        jax.nn.dot_product_attention = jaxfused.dot_product_attention
        return
    for theirs, ours, names in (
        (flax.nnx, jaxfused.nnx, NNX),
        (flax.linen, jaxfused.linen, LINEN),
    ):
        for name in names:
            setattr(theirs, name, getattr(ours, name))
        theirs.dot_product_attention = ours.attention_fn


def pytest_collection_modifyitems(config, items):
    """Leaves out `DESELECTED`, and raises an error if one of them no longer exists."""
    out = [item for item in items if item.nodeid in DESELECTED]
    files = {item.nodeid.split("::")[0] for item in items}
    expected = {name for name in DESELECTED if name.split("::")[0] in files}
    names_files_only = not any("::" in argument for argument in config.args)
    if names_files_only and expected != {item.nodeid for item in out}:
        gone = sorted(expected - {item.nodeid for item in out})
        raise pytest.UsageError(f"tests that are to be left out are not there: {gone}")
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item.nodeid not in DESELECTED]
