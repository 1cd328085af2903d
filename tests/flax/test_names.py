"""jaxfused.linen and jaxfused.nnx in place of flax.linen and flax.nnx, and which layers are ours."""

import functools
import importlib
import subprocess
import sys

import chex
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
import jaxfused.linen
import jaxfused.nnx
from jaxfused import dispatch
from jaxfused.modules.einsum import Split, as_matrices
from tests.flax.test_drop_in import KEY, assert_same, linen_call, nnx_call
from tests.flax.test_modules import normal
from tests.support.grids import parametrize
from tests.support.lowering import kernels

PACKAGES = [(jaxfused.linen, flax.linen), (jaxfused.nnx, flax.nnx)]
each_package = pytest.mark.parametrize(("ours", "flaxs"), PACKAGES, ids=["linen", "nnx"])


@each_package
def test_every_name_of_flax_is_there(ours, flaxs):
    names = [name for name in dir(flaxs) if not name.startswith("_")]
    assert set(names) <= set(dir(ours))
    assert ours.Module is flaxs.Module
    missing = [name for name in names if not hasattr(ours, name)]
    assert not missing
    with pytest.raises(AttributeError, match=r"no attribute 'Dence', and neither has flax"):
        _ = ours.Dence


@pytest.mark.parametrize(
    "line",
    [
        "from jaxfused.linen import *; compact, Dense, relu, max_pool",
        "from jaxfused.nnx import *; Module, Linear, Rngs, max_pool",
        "from jaxfused.linen.initializers import orthogonal",
        "import jaxfused.linen.initializers",
        "from jaxfused.linen import partitioning",
        "from jaxfused.linen.partitioning import ScanIn",
        "from jaxfused.linen.spmd import with_logical_constraint",
        "from jaxfused.linen.attention import make_causal_mask",
        "from jaxfused.nnx.nn.linear import Linear, Embed",
        "import jaxfused.nnx.bridge",
        "from jaxfused.nnx.bridge.variables import with_partitioning",
    ],
)
def test_imports_as_of_flax(line):
    exec(line.replace("jaxfused", "flax"), {})
    exec(line, {})


def test_submodules_hold_our_layers_and_leave_those_of_flax():
    linear = importlib.import_module("jaxfused.nnx.nn.linear")
    normalization = importlib.import_module("jaxfused.linen.normalization")
    assert linear.Linear is jaxfused.nnx.Linear is jaxfused.nnx.nn.linear.Linear
    assert linear.Embed is flax.nnx.Embed
    assert normalization.LayerNorm is jaxfused.linen.LayerNorm
    assert flax.nnx.nn.linear.Linear is flax.nnx.Linear is not jaxfused.nnx.Linear
    assert flax.linen.normalization.LayerNorm is flax.linen.LayerNorm
    everything = {}
    exec("from jaxfused.nnx import *", everything)
    assert everything["Linear"] is jaxfused.nnx.Linear
    assert everything["Embed"] is flax.nnx.Embed


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("Conv", lambda: flax.linen.Conv(2, (3,), mask=np.eye(3, 2)[:, None].repeat(4, 1))),
        ("Dense", lambda: flax.linen.Dense(2, dot_general=functools.partial(jax.lax.dot_general))),
        ("LayerNorm", lambda: flax.linen.LayerNorm(reduction_axes=(0, 1))),
    ],
)
def test_layers_in_the_place_of_flaxs_run_its_code(name, layer, monkeypatch):
    x = normal(2, 5, 4)
    expected, _ = layer().init_with_output(KEY, x)
    monkeypatch.setattr(flax.linen, name, getattr(jaxfused.linen, name))
    with dispatch.recorded_fallbacks() as fallbacks:
        y, _ = layer().init_with_output(KEY, x)
    assert len(fallbacks) == 1
    chex.assert_trees_all_equal(y, expected)


@pytest.mark.exhaustive
def test_packages_come_with_their_first_use():
    program = (
        "import sys, jaxfused; assert 'jax' not in sys.modules and 'flax' not in sys.modules;"
        " jaxfused.linen.Dense; jaxfused.nnx.Linear; assert {'linen', 'nnx'} <= set(dir(jaxfused))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'haiku'"):
        _ = jaxfused.haiku


# --- general layers -------------------------------------------------------------------------------

X = normal(0, 2, 5, 3, 8)
GENERAL = (
    dict(features=(4, 6)),
    dict(features=4, axis=(-2, -1)),
    dict(features=(2, 3), use_bias=False, precision="highest"),
    dict(features=(2, 3), dtype=jnp.bfloat16),
    dict(features=4, axis=(1, -1)),
)


def general_of_nnx(of, options):
    options = dict(options)
    axis = options.get("axis", -1)
    sizes = tuple(X.shape[a] for a in (axis if isinstance(axis, tuple) else (axis,)))
    features = options.pop("features")
    return nnx_call(of.nnx, "LinearGeneral", (sizes, features), X, **options)


@parametrize("options", GENERAL, quick=(0, 1, 4))
def test_general_layers_are_flax(options):
    bits = dict(bias_init=flax.linen.initializers.normal())
    expected = linen_call(flax.linen, "DenseGeneral", X, **options, **bits)
    with dispatch.recorded_fallbacks() as fallbacks:
        actual = linen_call(jaxfused.linen, "DenseGeneral", X, **options, **bits)
        of_nnx = general_of_nnx(jaxfused, options | bits)
    tolerant(actual, expected, options)
    tolerant(of_nnx, general_of_nnx(flax, options | bits), options)
    assert len(fallbacks) == (2 if options.get("axis") == (1, -1) else 0)


def test_a_general_layer_of_nnx_with_a_batch_axis_runs_flax_code():
    args, options = (8, (4, 6)), dict(batch_axis={0: 2})
    with dispatch.recorded_fallbacks() as fallbacks:
        actual = nnx_call(jaxfused.nnx, "LinearGeneral", args, X, **options)
    chex.assert_trees_all_equal(actual, nnx_call(flax.nnx, "LinearGeneral", args, X, **options))
    assert len(fallbacks) == 1


def tolerant(actual, expected, options):
    if options.get("dtype") == jnp.bfloat16:
        chex.assert_trees_all_close(actual, expected, rtol=0.02, atol=0.02)
    else:
        assert_same(actual, expected)


def test_general_layers_take_activation_and_residual():
    residual = normal(1, 2, 5, 3, 4, 6)
    for layer in (
        jaxfused.linen.DenseGeneral((4, 6), activation="silu"),
        jaxfused.linen.DenseGeneral((4, 6)),
    ):
        y, variables = layer.init_with_output(KEY, X, residual=residual)
        plain = flax.linen.DenseGeneral((4, 6)).apply(variables, X)
        plain = jax.nn.silu(plain) if layer.activation else plain
        np.testing.assert_allclose(y, plain + residual, rtol=2e-5, atol=1e-5)
    nnx = jaxfused.nnx.LinearGeneral(8, (4, 6), rngs=flax.nnx.Rngs(0))
    np.testing.assert_allclose(nnx(X, residual=residual), nnx(X) + residual, rtol=2e-5, atol=1e-5)


EQUATIONS = {
    "abcd,dnh->abcnh": (8, 4, 6),
    "...d,dn->...n": (8, 4),
    "abcd,cdn->abn": (3, 8, 4),
    "abcd,ndh->abcnh": (4, 8, 6),
    "abcd,cdn->abcn": (3, 8, 4),
}


@parametrize(("equation", "shape"), [*EQUATIONS.items()], quick=(0, 2, 3))
@parametrize("bias", [True, False], quick=(0,))
def test_einsum_is_flax(equation, shape, bias):
    matrices = equation not in ("abcd,ndh->abcnh", "abcd,cdn->abcn")
    assert isinstance(as_matrices(equation, X.ndim, len(shape)), Split) == matrices
    kernel_axes, result = equation.split(",")[1].split("->")
    features = tuple(size for axis, size in zip(kernel_axes, shape, strict=True) if axis in result)
    options = dict(bias_init=flax.linen.initializers.normal())

    def of_linen(of):
        return linen_call(
            of, "Einsum", X, shape=shape, einsum_str=equation, use_bias=bias, **options
        )

    def of_nnx(of):
        sizes = (equation, shape, features if bias else None)
        return nnx_call(of, "Einsum", sizes, X, **options)

    with dispatch.recorded_fallbacks() as fallbacks:
        actual = of_linen(jaxfused.linen), of_nnx(jaxfused.nnx)
    assert_same(actual, (of_linen(flax.linen), of_nnx(flax.nnx)))
    assert bool(fallbacks) != matrices


@pytest.mark.parametrize(
    "equation", ["ab,bc", "", "ab,bcd->acd", "abcd,d...->abc...", "aacd,dn->aacn", "abcd,d->abc"]
)
def test_other_equations_are_no_product_of_matrices(equation):
    assert isinstance(as_matrices(equation, 4, 2), str)


def test_what_changes_nothing_keeps_the_operator():
    """Options with Flax's default values: its own product, precision and dtype."""
    with dispatch.recorded_fallbacks() as fallbacks:
        linen_call(jaxfused.linen, "Dense", X, features=4, dot_general=jax.lax.dot_general)
        linen_call(jaxfused.linen, "DenseGeneral", X, features=4, dot_general=jax.lax.dot_general)
        linen_call(
            jaxfused.linen,
            "Einsum",
            X,
            shape=(8, 4),
            einsum_str="abcd,dn->abcn",
            preferred_element_type=jnp.float32,
            precision="default",
        )
        nnx_call(jaxfused.nnx, "Linear", (8, 4), X, preferred_element_type=jnp.float32)
        nnx_call(jaxfused.nnx, "LinearGeneral", (8, 4), X, dot_general=jax.lax.dot_general)
    assert not fallbacks


# --- attention ------------------------------------------------------------------------------------

ATTENTION = (
    dict(),
    dict(normalize_qk=True, use_bias=False),
    dict(qkv_features=16, out_features=6, dtype=jnp.bfloat16),
    dict(qkv_dot_general=functools.partial(jax.lax.dot_general)),
)


@parametrize("options", ATTENTION, quick=(1,), ids=lambda o: "_".join(o) or "plain")
@parametrize("kv", [False, True], quick=(0,))
def test_attention_is_flax(options, kv):
    x = normal(0, 2, 5, 8)
    inputs = (x, normal(1, 2, 7, 8)) if kv else (x,)
    bits = dict(bias_init=flax.linen.initializers.normal())
    actual = linen_call(
        jaxfused.linen, "MultiHeadAttention", *inputs, num_heads=2, **bits, **options
    )
    expected = linen_call(flax.linen, "MultiHeadAttention", *inputs, num_heads=2, **bits, **options)
    tolerant(actual, expected, options)
    options = dict(options) | bits | dict(decode=False)
    actual = nnx_call(jaxfused.nnx, "MultiHeadAttention", (2, 8), *inputs, **options)
    expected = nnx_call(flax.nnx, "MultiHeadAttention", (2, 8), *inputs, **options)
    tolerant(actual, expected, options)


@pytest.mark.exhaustive
def test_grouped_heads_of_nnx_attention():
    x = normal(0, 2, 5, 8)
    arguments = dict(num_kv_heads=2, decode=False)
    actual = nnx_call(jaxfused.nnx, "MultiHeadAttention", (4, 8), x, **arguments)
    assert_same(actual, nnx_call(flax.nnx, "MultiHeadAttention", (4, 8), x, **arguments))


@parametrize("library", ["linen", "nnx"], quick=(1,))
def test_attention_is_three_kernels(hopper, library):
    """The kernels are one product for q, k and v, the attention, and one product with its bias."""
    x = jax.ShapeDtypeStruct((2, 128, 256), jnp.bfloat16)

    def layer(x):
        if library == "nnx":
            options = dict(dtype=jnp.bfloat16, decode=False, rngs=flax.nnx.Rngs(0))
            return jaxfused.nnx.MultiHeadAttention(4, 256, **options)(x)
        module = jaxfused.linen.MultiHeadAttention(4, dtype=jnp.bfloat16)
        return module.init_with_output(KEY, x)[0]

    found = {stage for choice, _ in jaxfused.explain(layer, x).calls for stage in [choice.stage]}
    assert found == {
        "qkv_projection forward",
        "dot_product_attention forward",
        "linear forward",
    }
    assert len(kernels(layer, x)) <= 3


def test_self_attention_of_linen():
    x = normal(0, 2, 5, 8)
    mask = jnp.ones((2, 1, 5, 5)).at[0, 0, :, 3].set(0)
    actual = linen_call(jaxfused.linen, "SelfAttention", x, mask, num_heads=2)
    assert_same(actual, linen_call(flax.linen, "SelfAttention", x, mask, num_heads=2))


# --- perceptrons ----------------------------------------------------------------------------------


class Perceptron(flax.linen.Module):
    """Computes a Vision Transformer's MLP as its authors write it."""

    @flax.linen.compact
    def __call__(self, x):
        h = flax.linen.gelu(flax.linen.Dense(32)(x))
        return flax.linen.Dense(x.shape[-1])(h)


def test_mlp_loads_a_checkpoint_of_anonymous_layers():
    x = normal(0, 2, 5, 8)
    mlp = jaxfused.linen.MLP(32, layer_names=("Dense_0", "Dense_1"))
    assert_same(mlp.init_with_output(KEY, x), Perceptron().init_with_output(KEY, x))
    nnx = jaxfused.nnx.GatedMLP(8, 32, layer_names=("w1", "w3", "w2"), rngs=flax.nnx.Rngs(0))
    assert {"w1", "w2", "w3"} <= set(flax.nnx.to_pure_dict(flax.nnx.state(nnx)))
    same = jaxfused.nnx.GatedMLP(8, 32, rngs=flax.nnx.Rngs(0))
    np.testing.assert_array_equal(nnx(x), same(x))
    for names in (("a",), ("a", "a")):
        with pytest.raises(ValueError, match="layer_names is"):
            jaxfused.nnx.MLP(8, 32, layer_names=names, rngs=flax.nnx.Rngs(0))


def test_up_and_down_differ_in_init_and_metadata():
    x = normal(0, 2, 8)
    init = flax.linen.initializers.lecun_normal()
    split = flax.linen.with_partitioning
    mlp = jaxfused.linen.MLP(
        32,
        kernel_init=split(init, (None, "model")),
        down_kernel_init=split(init, ("model", None)),
        down_bias_init=flax.linen.initializers.ones,
    )
    params = mlp.init(KEY, x)["params"]
    assert params["up"]["kernel"].names == (None, "model")
    assert params["down"]["kernel"].names == ("model", None)
    np.testing.assert_array_equal(params["down"]["bias"], 1)
    nnx = jaxfused.nnx.MLP(
        8,
        32,
        kernel_metadata=dict(tag="up"),
        down_kernel_metadata=dict(tag="down"),
        down_kernel_init=flax.linen.initializers.zeros,
        rngs=flax.nnx.Rngs(0),
    )
    assert (nnx.up.kernel.tag, nnx.down.kernel.tag) == ("up", "down")
    np.testing.assert_array_equal(nnx.down.kernel[...], 0)


@parametrize("name", ["MLP", "GatedMLP"], quick=(1,))
def test_mlp_drops(name):
    x = jnp.ones((64, 8))
    linen = getattr(jaxfused.linen, name)(32, dropout_rate=0.5)
    variables = linen.init(KEY, x, deterministic=True)
    still = linen.apply(variables, x, deterministic=True)
    np.testing.assert_array_equal(still, getattr(jaxfused.linen, name)(32).apply(variables, x))
    dropped = linen.apply(variables, x, deterministic=False, rngs={"dropout": KEY})
    assert np.unique(dropped[:, 0]).size > 8  # All rows of x are equal.
    with pytest.raises(flax.errors.InvalidRngError):
        linen.apply(variables, x, deterministic=False)
    nnx = getattr(jaxfused.nnx, name)(8, 32, dropout_rate=0.5, rngs=flax.nnx.Rngs(0))
    a, b = (nnx(x, deterministic=False) for _ in range(2))
    assert np.any(a != b) and np.unique(nnx(x, deterministic=True)[:, 0]).size == 1
    with pytest.raises(ValueError, match="nothing says whether to drop"):
        nnx(x)
