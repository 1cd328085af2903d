"""Norms of jaxfused.nnx and jaxfused.linen equal Flax's: parameters, outputs, gradients, errors."""

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused.linen
import jaxfused.nnx
from tests.support.arrays import put
from tests.support.tolerances import ulp

D = 96
NORMS = ("LayerNorm", "RMSNorm")
each_norm = pytest.mark.parametrize("norm", NORMS)
INITIALISERS = {
    "LayerNorm": dict(
        scale_init=flax.nnx.initializers.normal(1.0), bias_init=flax.nnx.initializers.normal(1.0)
    ),
    "RMSNorm": dict(scale_init=flax.nnx.initializers.normal(1.0)),
}


def normal(seed, *shape, dtype=jnp.float32):
    return put(np.random.default_rng(seed).normal(size=shape) + 0.3, dtype)


def assert_near(actual, expected, ulps=4):
    """Asserts equality up to rounding: Flax's variance is a difference of two means, ours is not."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    largest = float(np.abs(np.asarray(expected, np.float64)).max(initial=0))
    np.testing.assert_allclose(
        np.asarray(actual, np.float64),
        np.asarray(expected, np.float64),
        rtol=0,
        atol=ulps * ulp(largest, expected.dtype),
    )


def nnx_pair(norm, **arguments):
    arguments = INITIALISERS[norm] | arguments
    return (
        getattr(jaxfused.nnx, norm)(D, rngs=flax.nnx.Rngs(0), **arguments),
        getattr(flax.nnx, norm)(D, rngs=flax.nnx.Rngs(0), **arguments),
    )


def linen_pair(norm, **arguments):
    arguments = INITIALISERS[norm] | arguments
    return getattr(jaxfused.linen, norm)(**arguments), getattr(flax.linen, norm)(**arguments)


# Dtypes of x and of the parameters, and the result's dtype in Flax.
each_dtype = pytest.mark.parametrize(
    ("x_dtype", "arguments"),
    [
        ("float32", {}),
        ("bfloat16", {}),
        ("float32", dict(dtype=jnp.bfloat16)),
        ("bfloat16", dict(dtype=jnp.bfloat16)),
        ("float16", dict(dtype=jnp.float16, param_dtype=jnp.float16)),
        ("bfloat16", dict(param_dtype=jnp.bfloat16)),
        ("bfloat16", dict(dtype=jnp.float32)),
        ("int32", {}),
    ],
)


@each_dtype
@each_norm
def test_nnx_is_flax(norm, x_dtype, arguments):
    ours, flaxs = nnx_pair(norm, **arguments)
    assert jax.tree.all(
        jax.tree.map(
            lambda a, b: a.dtype == b.dtype and bool((a == b).all()),
            flax.nnx.to_pure_dict(flax.nnx.state(ours)),
            flax.nnx.to_pure_dict(flax.nnx.state(flaxs)),
        )
    )
    x = normal(1, 2, 5, D).astype(x_dtype)
    # With parameters of 16 bits, Flax rounds more often than our norms.
    assert_near(ours(x), flaxs(x))


@each_dtype
@each_norm
def test_linen_is_flax(norm, x_dtype, arguments):
    ours, flaxs = linen_pair(norm, **arguments)
    x = normal(1, 2, 5, D).astype(x_dtype)
    variables = flaxs.init(jax.random.key(3), x)
    same = jax.tree.map(lambda a, b: (a == b).all(), ours.init(jax.random.key(3), x), variables)
    assert jax.tree.all(same)
    assert_near(ours.apply(variables, x), flaxs.apply(variables, x))


@each_norm
def test_gradients_are_flax(norm):
    x, weight = normal(1, 7, D), normal(2, 7, D)

    def gradients(module):
        graph, state = flax.nnx.split(module)
        loss = lambda state, x: jnp.sum(flax.nnx.merge(graph, state)(x) * weight)  # noqa: E731
        parameters, x_gradient = jax.grad(loss, (0, 1))(state, x)
        return flax.nnx.to_pure_dict(parameters) | {"x": x_gradient}

    ours, flaxs = (gradients(module) for module in nnx_pair(norm))
    modules = linen_pair(norm)
    variables = modules[1].init(jax.random.key(0), x)
    linens = [
        jax.grad(lambda v, m=m: jnp.sum(m.apply(v, x) * weight))(variables)["params"]
        for m in modules
    ]
    for actual, expected in ((ours, flaxs), linens):
        assert actual.keys() == expected.keys()
        for name in expected:
            assert_near(actual[name], expected[name], ulps=16)


@each_norm
def test_nnx_and_linen_agree(norm):
    x = normal(1, 3, D, dtype=jnp.bfloat16)
    module = nnx_pair(norm)[0]
    parameters = flax.nnx.to_pure_dict(flax.nnx.state(module, flax.nnx.Param))
    y = linen_pair(norm)[0].apply({"params": parameters}, x)
    np.testing.assert_array_equal(y, module(x))


@each_norm
def test_a_flax_state_loads(norm):
    ours, flaxs = nnx_pair(norm)
    flaxs.scale[...] = normal(5, D)
    flax.nnx.update(ours, flax.nnx.state(flaxs))
    x = normal(1, 3, D)
    assert_near(ours(x), flaxs(x))


@each_norm
def test_metadata_and_missing_parameters(norm):
    module = getattr(jaxfused.nnx, norm)(
        D, rngs=flax.nnx.Rngs(0), scale_metadata={"group": "norms"}
    )
    assert module.scale.get_metadata()["group"] == "norms"
    without = {"LayerNorm": dict(use_scale=False, use_bias=False), "RMSNorm": dict(use_scale=False)}
    x = normal(1, 3, D)
    for ours, flaxs in (
        [m(x) for m in nnx_pair(norm, **without[norm])],
        [m.apply({}, x) for m in linen_pair(norm, **without[norm])],
    ):
        assert_near(ours, flaxs)


@pytest.mark.parametrize("pre_bias", [None, normal(3, D)], ids=["", "pre_bias"])
@each_norm
def test_sums_before_and_activation(norm, pre_bias):
    x, residual = normal(1, 3, D), normal(2, 3, D)
    biased = x if pre_bias is None else x + pre_bias
    fused, plain = nnx_pair(norm)
    fused.activation = "silu"
    y, h = fused(x, residual=residual, pre_bias=pre_bias)
    np.testing.assert_array_equal(h, biased + residual)
    assert_near(y, jax.nn.silu(plain(biased + residual)))
    assert_near(fused(x, pre_bias=pre_bias), jax.nn.silu(plain(biased)))

    fused, plain = linen_pair(norm)
    fused = fused.clone(activation="silu")
    variables = plain.init(jax.random.key(0), x)
    y, h = fused.apply(variables, x, residual=residual, pre_bias=pre_bias)
    np.testing.assert_array_equal(h, biased + residual)
    assert_near(y, jax.nn.silu(plain.apply(variables, biased + residual)))
    y = fused.apply(variables, x, pre_bias=pre_bias)
    assert_near(y, jax.nn.silu(plain.apply(variables, biased)))


def test_scale_offset():
    x = normal(1, 3, D)
    scale = normal(2, D)
    module = jaxfused.nnx.RMSNorm(D, rngs=flax.nnx.Rngs(0), scale_offset=1.0)
    module.scale[...] = scale
    plain = flax.nnx.RMSNorm(D, rngs=flax.nnx.Rngs(0))
    plain.scale[...] = scale + 1.0
    assert_near(module(x), plain(x))
    linen = jaxfused.linen.RMSNorm(scale_offset=1.0)
    assert_near(linen.apply({"params": {"scale": scale}}, x), plain(x))


@each_norm
def test_transformations(norm):
    module, plain = nnx_pair(norm)
    x = normal(1, 4, 3, D)
    assert_near(flax.nnx.jit(lambda m, x: m(x))(module, x), plain(x))
    assert_near(flax.nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(module, x), plain(x))

    def per_layer(rngs):
        return getattr(jaxfused.nnx, norm)(D, rngs=rngs, **INITIALISERS[norm])

    layers = flax.nnx.vmap(per_layer)(flax.nnx.Rngs(0).split(3))
    scanned = flax.nnx.scan(
        lambda x, layer: layer(x), in_axes=(flax.nnx.Carry, 0), out_axes=flax.nnx.Carry
    )(x, layers)
    graph, states = flax.nnx.split(layers)
    expected = x
    for i in range(3):
        expected = flax.nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], states))(expected)
    assert_near(scanned, expected)


# --- what only Flax's own code can do -------------------------------------------------------------

MASK = jnp.arange(D) % 3 != 0
FLAX_ONLY = {
    "mask": ({}, dict(mask=MASK)),
    "reduction_axes": (dict(reduction_axes=(-2, -1)), {}),
    "feature_axes": (dict(feature_axes=(0, -1)), {}),
    "complex": (dict(dtype=jnp.complex64), {}),
}
each_flax_only = pytest.mark.parametrize(
    ("arguments", "call"), FLAX_ONLY.values(), ids=FLAX_ONLY.keys()
)


@each_flax_only
@each_norm
def test_flax_only_calls_are_flax_bit_for_bit(norm, arguments, call):
    x = normal(1, 5, D)
    ours, flaxs = linen_pair(norm, **arguments)
    variables = flaxs.init(jax.random.key(0), x)
    assert jax.tree.structure(ours.init(jax.random.key(0), x)) == jax.tree.structure(variables)
    np.testing.assert_array_equal(
        ours.apply(variables, x, **call), flaxs.apply(variables, x, **call)
    )
    if "feature_axes" not in arguments:  # NNX makes parameters of one axis only
        ours, flaxs = nnx_pair(norm, **arguments)
        np.testing.assert_array_equal(ours(x, **call), flaxs(x, **call))
        np.testing.assert_array_equal(
            getattr(jaxfused.nnx, norm)(
                D, rngs=flax.nnx.Rngs(0), activation="relu", **INITIALISERS[norm], **arguments
            )(x, **call),
            jax.nn.relu(flaxs(x, **call)),
        )


@each_norm
def test_axis_name(norm):
    x = normal(1, 3, 2, D)
    ours, flaxs = nnx_pair(norm, axis_name="batch")
    actual, expected = (jax.vmap(module, axis_name="batch")(x) for module in (ours, flaxs))
    np.testing.assert_array_equal(actual, expected)


@each_norm
def test_own_promote_dtype_is_called(norm):
    called = []

    def promote(arrays, *, dtype):
        called.append(len(arrays))
        return arrays

    ours, flaxs = nnx_pair(norm, promote_dtype=promote)
    x = normal(1, 5, D)
    np.testing.assert_array_equal(ours(x), flaxs(x))
    assert called == 2 * [3 if norm == "LayerNorm" else 2]


@pytest.mark.parametrize(
    ("arguments", "call", "message"),
    [
        ({}, dict(residual=jnp.ones((5, D))), "residual needs the operator"),
        ({}, dict(pre_bias=jnp.ones(D)), "pre_bias needs the operator"),
        (dict(implementation="cuda"), {}, "implementation='cuda' needs the operator"),
    ],
)
@each_norm
def test_flax_only_calls_refuse_what_only_the_operator_does(norm, arguments, call, message):
    x = normal(1, 5, D)
    module = getattr(jaxfused.nnx, norm)(D, rngs=flax.nnx.Rngs(0), **arguments)
    with pytest.raises(ValueError, match=f"jaxfused.nnx.{norm}: {message}.*a mask is given"):
        module(x, mask=MASK, **call)
    module = getattr(jaxfused.linen, norm)(**arguments)
    with pytest.raises(ValueError, match=f"jaxfused.linen.{norm}: {message}.*a mask is given"):
        module.init(jax.random.key(0), x, mask=MASK, **call)


def test_flax_only_calls_refuse_a_scale_offset():
    module = jaxfused.nnx.RMSNorm(D, rngs=flax.nnx.Rngs(0), scale_offset=1.0)
    with pytest.raises(ValueError, match="scale_offset needs the operator"):
        module(normal(1, 5, D), mask=MASK)


@each_norm
def test_a_named_kernel_that_cannot_run_raises(norm):
    module = getattr(jaxfused.nnx, norm)(D, rngs=flax.nnx.Rngs(0), implementation="triton")
    with pytest.raises(ValueError, match="'triton'"):
        module(normal(1, 5, D))
