"""Our layers under replaced products, Flax's interceptors and captured results.

A stand-in replaces `jax.lax.dot_general`, like libraries that quantise models while they run (qwix); the
real one is in tests/adoption.
"""

import contextlib
import types

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
import jaxfused.linen as ours
import jaxfused.nnx
from tests.flax.test_modules import normal
from tests.support.grids import parametrize

SEEN = []
"""Right operands of the products that were intercepted."""


def see(x, w, *args, **options):
    SEEN.append(w)
    return STOCK["dot_general"](x, w, *args, **options)


def see_conv(x, w, *args, **options):
    SEEN.append(w)
    return STOCK["conv_general_dilated"](x, w, *args, **options)


def _dot_general_code(*args, **options):
    from tests.flax.test_watched_layers import see

    return see(*args, **options)


def _conv_code(*args, **options):
    from tests.flax.test_watched_layers import see_conv

    return see_conv(*args, **options)


def _copy(function):
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    copy.__defaults__, copy.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return copy


STOCK = {name: _copy(getattr(jax.lax, name)) for name in ("dot_general", "conv_general_dilated")}


@contextlib.contextmanager
def intercepted():
    """Makes JAX's products run other code under every name that refers to them."""
    del SEEN[:]
    codes = {"dot_general": _dot_general_code, "conv_general_dilated": _conv_code}
    for name, other in codes.items():
        getattr(jax.lax, name).__code__ = other.__code__
    try:
        yield SEEN
    finally:
        for name in codes:
            getattr(jax.lax, name).__code__ = STOCK[name].__code__


X, IMAGES, CONDITION = (2, 5, 32), (2, 6, 6, 16), (2, 8)
LAYERS = {
    "Linear": (dict(in_features=32, out_features=32, activation="silu"), [X], "residual"),
    "LinearGeneral": (dict(in_features=32, out_features=(4, 8)), [X], None),
    "Einsum": (
        dict(einsum_str="btd,dnh->btnh", kernel_shape=(32, 4, 8), bias_shape=(4, 8)),
        [X],
        None,
    ),
    "MultiHeadAttention": (dict(num_heads=4, in_features=32, decode=False), [X], None),
    "MLP": (dict(in_features=32, hidden_features=64, save="inputs"), [X], "residual"),
    "GatedMLP": (dict(in_features=32, hidden_features=64), [X], "residual"),
    "TransformerBlock": (
        dict(features=32, num_heads=4, gated=True, norm="rms_norm", normalize_qk=True),
        [X],
        None,
    ),
    "DiTBlock": (dict(features=32, num_heads=4, condition_features=8), [X, CONDITION], None),
    "Conv": (
        dict(in_features=16, out_features=16, kernel_size=(3, 3), activation="relu"),
        [IMAGES],
        "residual",
    ),
    "ConvTranspose": (
        dict(in_features=16, out_features=8, kernel_size=(2, 2), strides=(2, 2)),
        [IMAGES],
        None,
    ),
    "ConvNormAct": (
        dict(in_features=16, out_features=16, kernel_size=(3, 3), use_running_average=True),
        [IMAGES],
        "residual",
    ),
    "ResNetBlock": (
        dict(in_features=16, features=8, strides=2, use_running_average=True),
        [IMAGES],
        None,
    ),
    "ConvNeXtBlock": (dict(features=16, layer_scale=0.5), [IMAGES], None),
    "SeparableConv": (
        dict(in_features=16, out_features=8, kernel_size=(3, 3)),
        [IMAGES],
        None,
    ),
}
LINEN = {
    "Linear": ours.Dense(32, activation="silu"),
    "LinearGeneral": ours.DenseGeneral((4, 8)),
    "Einsum": ours.Einsum((32, 4, 8), "btd,dnh->btnh"),
    "MultiHeadAttention": ours.MultiHeadDotProductAttention(4),
    "MLP": ours.MLP(64, save="inputs"),
    "GatedMLP": ours.GatedMLP(64),
    "TransformerBlock": ours.TransformerBlock(4, gated=True, norm="rms_norm", normalize_qk=True),
    "DiTBlock": ours.DiTBlock(4),
    "Conv": ours.Conv(16, (3, 3), activation="relu"),
    "ConvTranspose": ours.ConvTranspose(8, (2, 2), strides=(2, 2)),
    "ConvNormAct": ours.ConvNormAct(16, (3, 3), use_running_average=True),
    "ResNetBlock": ours.ResNetBlock(8, strides=2, use_running_average=True),
    "ConvNeXtBlock": ours.ConvNeXtBlock(layer_scale=0.5),
    "SeparableConv": ours.SeparableConv(8, (3, 3)),
}


def filled(tree):
    """Returns the parameters with random numbers, so that results depend on each of them."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(
        structure,
        [normal(100 + i, *a.shape) / max(a.shape[0], 1) ** 0.5 for i, a in enumerate(leaves)],
    )


def call_of(library, name):
    """Returns (a call of a layer, its kernels)."""
    options, shapes, residual = LAYERS[name]
    args = [normal(i, *shape) for i, shape in enumerate(shapes)]
    more = {} if residual is None else {residual: normal(9, *shapes[0])}
    if library == "nnx":
        layer = getattr(jaxfused.nnx, name)(**options, rngs=flax.nnx.Rngs(0))
        params = flax.nnx.state(layer, flax.nnx.Param)
        params = filled(params)
        flax.nnx.update(layer, params)
        call = lambda: layer(*args, **more)  # noqa: E731
        params = flax.nnx.to_pure_dict(params)
    else:
        variables = LINEN[name].init(jax.random.key(0), *args, **more)
        params = filled(variables["params"])
        call = lambda: LINEN[name].apply({**variables, "params": params}, *args, **more)  # noqa: E731
    kernels = [
        np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if "kernel" in jax.tree_util.keystr(path)
    ]
    return call, kernels


CASES = [(library, name) for library in ("nnx", "linen") for name in LAYERS]


@parametrize(
    ("library", "name"),
    CASES,
    quick=[
        i
        for i, case in enumerate(CASES)
        if case[1] in ("Linear", "TransformerBlock", "ConvNormAct", "MultiHeadAttention", "MLP")
    ],
)
def test_every_kernel_reaches_a_product_put_in_jaxs_place(library, name):
    call, kernels = call_of(library, name)
    expected = call()
    # JAX's einsum is jitted, so that its operands would be tracers.
    eager = jax.disable_jit() if name == "Einsum" else contextlib.nullcontext()
    with intercepted() as seen, eager:
        actual = call()
    # Kernels arrive unchanged, because the replaced product may transform the parameters themselves.
    arrays = [np.asarray(w) for w in seen if not isinstance(w, jax.core.Tracer)]
    for kernel in kernels:
        assert any(
            w.size == kernel.size and np.array_equal(np.ravel(w), np.ravel(kernel)) for w in arrays
        ), (kernel.shape, [w.shape for w in arrays])
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)
    assert actual.dtype == expected.dtype


def test_dtypes_stay_where_products_are_intercepted():
    for make in (
        lambda: jaxfused.nnx.MLP(32, 64, dtype=jnp.bfloat16, rngs=flax.nnx.Rngs(0)),
        lambda: jaxfused.nnx.GatedMLP(32, 64, rngs=flax.nnx.Rngs(0)),
    ):
        layer, x = make(), normal(0, 3, 32).astype(jnp.bfloat16)
        expected = layer(x)
        with intercepted():
            actual = layer(x)
        assert actual.dtype == expected.dtype
        np.testing.assert_allclose(
            actual.astype(jnp.float32), expected.astype(jnp.float32), rtol=0.05, atol=0.05
        )


def test_a_named_kernel_is_refused_where_products_are_intercepted():
    layer = jaxfused.nnx.Linear(8, 4, implementation="pallas", rngs=flax.nnx.Rngs(0))
    with intercepted(), pytest.raises(ValueError, match=r"dot_general is intercepted; leave one"):
        layer(jnp.ones((2, 8)))


# --- Flax's own observers ------------------------------------------------------------------------


def doubled(f, args, kwargs, context):
    y = f(*args, **kwargs)
    return 2 * y if context.method_name == "__call__" and isinstance(y, jax.Array) else y


def promote(*arrays, dtype=None, inexact=True):
    return flax.linen.dtypes.promote_dtype(*arrays, dtype=dtype, inexact=inexact)


SERVED_BY_FLAX = {
    "Dense": (dict(features=8, promote_dtype=promote), X, {}),
    "DenseGeneral": (dict(features=8, axis=(0, 2)), X, {}),
    "Einsum": (dict(shape=(5, 32), einsum_str="btd,td->btd", use_bias=False), X, {}),
    "Conv": (dict(features=8, kernel_size=(3, 3), promote_dtype=promote), IMAGES, {}),
    "ConvLocal": (dict(features=4, kernel_size=(3, 3)), IMAGES, {}),
    "ConvTranspose": (dict(features=8, kernel_size=(2, 2), promote_dtype=promote), IMAGES, {}),
    "LayerNorm": ({}, X, dict(mask=True)),
    "RMSNorm": ({}, X, dict(mask=True)),
    "GroupNorm": (dict(num_groups=4), IMAGES, dict(mask=True)),
    "InstanceNorm": ({}, IMAGES, dict(mask=True)),
    "BatchNorm": (dict(use_running_average=True, force_float32_reductions=False), IMAGES, {}),
    "MultiHeadDotProductAttention": (dict(num_heads=4), X, dict(inputs_k=True)),
    "MultiHeadAttention": (dict(num_heads=4, normalize_qk=True), X, {}),
    "SelfAttention": (dict(num_heads=4), X, {}),
}


@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated")
@pytest.mark.parametrize("name", SERVED_BY_FLAX)
def test_calls_of_linen_are_intercepted_as_often_as_flaxs(name):
    options, shape, more = SERVED_BY_FLAX[name]
    x = normal(0, *shape)
    more = {key: jnp.ones(shape, bool) if key == "mask" else x[:, :3] for key in more}
    results, captured = [], []
    for library in (flax.linen, ours):
        layer = getattr(library, name)(**options)
        variables = layer.init(jax.random.key(0), x, **more)
        with flax.linen.intercept_methods(doubled):
            results.append(layer.apply(variables, x, **more))
        _, seen = layer.apply(variables, x, **more, capture_intermediates=True)
        captured.append(jax.tree.map(jnp.shape, seen["intermediates"]))
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)
    assert captured[0] == captured[1]


@pytest.mark.parametrize("name", ["MLP", "TransformerBlock", "DiTBlock", "ConvNeXtBlock"])
def test_captured_results_of_our_blocks_are_no_parameters(name):
    _, shapes, _ = LAYERS[name]
    args = [normal(i, *shape) for i, shape in enumerate(shapes)]
    variables = LINEN[name].init(jax.random.key(0), *args)
    expected = LINEN[name].apply(variables, *args)
    y, seen = LINEN[name].apply(variables, *args, capture_intermediates=True)
    np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-5)
    mlp = seen["intermediates"] if name == "MLP" else seen["intermediates"]["mlp"]
    hidden = {"MLP": 64}.get(name, 4 * shapes[0][-1])
    assert mlp["up"]["__call__"][0].shape == (*shapes[0][:-1], hidden)
    assert mlp["down"]["__call__"][0].shape == shapes[0]
    if name == "TransformerBlock":
        assert seen["intermediates"]["qkv"]["__call__"][0].shape == (2, 5, 96)
    # Calls that are not watched read only the parameters, through modules that `tabulate` lists.
    assert flax.linen.tabulate(LINEN[name], jax.random.key(0))(*args).count("up") >= 1


def test_a_state_of_float8_stays_with_its_layers():
    layer = ours.MLP(64, precision="fp8_delayed")
    x = normal(0, *X)
    variables = layer.init(jax.random.key(0), x)
    y, _ = layer.apply(variables, x, capture_intermediates=True, mutable=["intermediates"])
    np.testing.assert_array_equal(y, layer.apply(variables, x))
    layer = ours.MultiHeadDotProductAttention(4, precision="fp8")
    variables = layer.init(jax.random.key(0), x)
    _, seen = layer.apply(variables, x, capture_intermediates=True)
    assert "query" not in seen["intermediates"]
