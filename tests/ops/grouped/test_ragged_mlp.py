"""ragged_mlp: truth, gradients, weights' layouts, rows of no group, kernels, devices, messages."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxfused
from tests.support import eight_devices
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels
from tests.support.tolerances import assert_accurate
from tests.support.transforms import assert_transforms

SIZES = (0, 40, 1, 25, 0, 9)
ROWS, D, F, N = 80, 64, 72, 40


def operands(dtype="float32", groups=6):
    """Returns x, w_gate, w_up, w_down and a cotangent."""
    rng = np.random.default_rng(0)
    shapes = ((ROWS, D), (groups, D, F), (groups, D, F), (groups, F, N), (ROWS, N))
    scales = (1.0, D**-0.5, D**-0.5, F**-0.5, 1.0)
    return [put(s * rng.normal(size=shape), dtype) for s, shape in zip(scales, shapes, strict=True)]


def truth(x, gate, up, down, dy, sizes=SIZES, offset=0):
    """Returns y and the gradients of all operands in float64, for silu or, without a gate, relu2."""
    arrays = [None if a is None else np.asarray(a, np.float64) for a in (x, gate, up, down, dy)]
    x, gate, up, down, dy = arrays
    y, *grads = (None if a is None else np.zeros(a.shape) for a in (dy, x, gate, up, down))
    ends = np.minimum(np.cumsum([0, *sizes]), len(x))
    for e in range(len(down)):
        rows = slice(ends[offset + e], ends[offset + e + 1])
        u, dh = x[rows] @ up[e], dy[rows] @ down[e].T
        if gate is None:
            h, du = np.maximum(u, 0) ** 2, dh * 2 * np.maximum(u, 0)
        else:
            z = x[rows] @ gate[e]
            s = 1 / (1 + np.exp(-z))
            h, du, dz = z * s * u, dh * z * s, dh * u * s * (1 + z * (1 - s))
            grads[0][rows] += dz @ gate[e].T
            grads[1][e] = x[rows].T @ dz
        y[rows] = h @ down[e]
        grads[0][rows] += du @ up[e].T
        grads[2][e], grads[3][e] = x[rows].T @ du, h.T @ dy[rows]
    return [y, *(g for g in grads if g is not None)]


def composed(x, gate, up, down, sizes):
    """Returns the perceptrons by products of the operands' dtype."""
    product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
    h = product(x, up)
    h = jnp.square(jax.nn.relu(h)) if gate is None else jax.nn.silu(product(x, gate)) * h
    return product(h, down)


def with_gradients(f, x, gate, up, down, dy, sizes, **options):
    """Returns y and the gradients of the operands that are no None."""
    arrays = [x, gate, up, down]
    places = [i for i, a in enumerate(arrays) if a is not None]

    def of(*given):
        args: list = [None] * 4
        for i, a in zip(places, given, strict=True):
            args[i] = a
        return f(*args, sizes, **options)

    y, pull_back = jax.vjp(of, *(arrays[i] for i in places))
    return [y, *pull_back(dy.astype(y.dtype))]


OURS = {
    True: jaxfused.ragged_mlp,
    False: functools.partial(jaxfused.ragged_mlp, activation="relu2"),
}


def check(dtype, gated, **options):
    args = operands(dtype)
    if not gated:
        args[1] = None
    sizes = put(SIZES, "int32")
    ours = jax.jit(functools.partial(with_gradients, OURS[gated], **options))(*args, sizes)
    plain = jax.jit(functools.partial(with_gradients, composed))(*args, sizes)
    names = ("y", "dx", *(("dgate",) if gated else ()), "dup", "ddown")
    for name, actual, simple, exact in zip(names, ours, plain, truth(*args), strict=True):
        assert_accurate(name, actual, simple, exact)


@parametrize("dtype", ["float32", "bfloat16", "float16"], quick=(1,))
@pytest.mark.parametrize("gated", [True, False])
def test_truth(dtype, gated):
    check(dtype, gated)


@pytest.mark.exhaustive
@pytest.mark.parametrize("gated", [True, False])
def test_gradients_by_kernels(gated, interpreted_hopper):
    check("bfloat16", gated)


def layouts(gate, up, down):
    """Yields the weights, and the options that say how they lie in memory."""
    turned = [w.swapaxes(1, 2) for w in (gate, up, down)]
    yield (gate, up, down), {}
    yield turned, dict(transpose_weights=True)
    yield (jnp.concatenate([gate, up], 2), None, down), {}
    yield (jnp.concatenate(turned[:2], 1), None, turned[2]), dict(transpose_weights=True)


def check_layouts(dtype, tolerance):
    x, *weights, dy = operands(dtype, groups=3)
    sizes, options = put(SIZES, "int32"), dict(group_offset=2)
    results = []
    for arrays, layout in layouts(*weights):
        f = functools.partial(with_gradients, jaxfused.ragged_mlp, **options, **layout)
        y, dx, *grads = jax.jit(f)(x, *arrays, dy, sizes)
        if layout:
            grads = [g.swapaxes(1, 2) for g in grads]
        results.append([y, dx, jnp.concatenate(grads[:-1], 2), grads[-1]])
    y, dx, dgate, dup, ddown = truth(x, *weights, dy, offset=2)
    exact = [y, dx, np.concatenate([dgate, dup], 2), ddown]
    for found in results:
        for actual, expected in zip(found, exact, strict=True):
            np.testing.assert_allclose(
                np.float32(actual),
                expected,
                rtol=tolerance,
                atol=tolerance * np.abs(expected).max(),
            )


def test_layouts_of_weights_and_an_offset():
    check_layouts("float32", 1e-5)


@pytest.mark.exhaustive
def test_layouts_by_kernels(interpreted_hopper):
    check_layouts("bfloat16", 2e-2)


def test_nothing_reaches_another_group():
    x, gate, up, down, dy = (np.array(a) for a in operands())
    ends = np.cumsum([0, *SIZES])
    x[ends[3] : ends[4]] = x[ends[-1] :] = dy[ends[-1] :] = np.nan
    up[4] = np.inf
    f = functools.partial(with_gradients, jaxfused.ragged_mlp)
    y, dx, dgate, dup, ddown = jax.jit(f)(x, gate, up, down, dy, put(SIZES, "int32"))
    others = np.r_[: ends[3], ends[4] : ROWS]
    chex.assert_tree_all_finite((y[others], dx[others], dgate[:3], dup[:3], ddown[:3]))
    assert jnp.isnan(y[ends[3] : ends[4]]).all() and not y[ends[-1] :].any()
    assert not dx[ends[-1] :].any()


def test_gradients_of_float32_weights_are_not_rounded():
    args = operands("bfloat16")
    wide = [args[0], *(a.astype(jnp.float32) for a in args[1:4]), args[4]]
    grads = with_gradients(jaxfused.ragged_mlp, *wide, put(SIZES, "int32"))
    assert [g.dtype for g in grads] == [jnp.bfloat16] * 2 + [jnp.float32] * 3


def test_transformations():
    x, *weights, _ = operands()
    assert_transforms(lambda x, *w: jaxfused.ragged_mlp(x, *w, jnp.array(SIZES)), x, *weights)


@pytest.mark.exhaustive
def test_derivatives_in_both_modes():
    x, *weights, _ = operands()
    f = lambda x, *w: jaxfused.ragged_mlp(x, *w, jnp.array(SIZES))  # noqa: E731
    check_grads(f, (x, *weights), order=1, modes=("fwd", "rev"), atol=2e-2, rtol=2e-2)


@pytest.mark.exhaustive
def test_kernels_of_a_training_step(hopper):
    """Those of one shape, as the weights' gradients of gate and up, are lowered once."""
    args = operands("bfloat16")
    found = kernels(
        functools.partial(with_gradients, jaxfused.ragged_mlp), *args, put(SIZES, "int32")
    )
    assert sorted(found) == [
        "grouped_hidden_layer",
        "grouped_input_gradient",
        *["ragged_dot"] * 2,
        *["ragged_mlp_drhs"] * 2,
    ]


X, W, BACK, S = jnp.ones((6, 4)), jnp.ones((2, 4, 8)), jnp.ones((2, 8, 4)), jnp.array([2, 3])


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((X[None], W, W, BACK, S), {}, r"x has shape \(1, 6, 4\); pass one matrix"),
        ((X, None, None, BACK, S), {}, "w_gate and w_up are None; pass w_up"),
        ((X, W, W[:, :3], BACK, S), {}, r"w_up has shape .* pass w_up of shape \(E, 4, hidden"),
        ((X, W, W[..., :4], BACK, S), {}, "w_gate has shape .* but w_up has shape"),
        ((X, W[..., :7], None, BACK, S), {}, "holds two matrices of one width"),
        ((X, W, W, W, S), {}, r"w_down has shape .* pass w_down of shape \(2, 8, features\)"),
        ((X, W, W, BACK, S[:1]), {}, "group_sizes has 1 sizes, but w_down has 2 matrices"),
        ((X, W, W, BACK, S), dict(activation="swish"), "activation='swish' is not known"),
        ((X, W, W, BACK, S), dict(group_offset=1), "group_offset is 1, but .* from 0 to 0"),
        ((X, W, W, BACK, S), dict(implementation="cuda"), "no CUDA kernel of ragged_mlp"),
    ],
)
def test_messages(args, options, message):
    with pytest.raises(ValueError, match=f"ragged_mlp: .*{message}"):
        jaxfused.ragged_mlp(*args, **options)


on_eight_devices = pytest.mark.skipif(jax.device_count() < eight_devices.DEVICES, reason="devices")
WEIGHTS = P(None, None, "d"), P(None, None, "d"), P(None, "d")
SPECS = {"hidden": (P(), *WEIGHTS, P()), "rows and groups": (P("d"), *[P("d")] * 3, P("d"))}


@on_eight_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("split", SPECS)
def test_sharded(axis_type, split):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(axis_type,))
    args = operands(groups=8)
    sizes = put((0, 40, 1, 25, 0, 9, 2, 1), "int32")
    expected = with_gradients(jaxfused.ragged_mlp, *args, sizes)
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(args, SPECS[split], strict=True)
    ]

    def run(x, *rest):
        *weights, dy, sizes = rest
        y, pull_back = jax.vjp(lambda *a: jaxfused.ragged_mlp(*a, sizes), x, *weights)
        if jax.typeof(y).sharding.mesh.explicit_axes:
            dy = jax.sharding.reshard(dy, jax.typeof(y).sharding)
        return [y, *pull_back(dy)]

    with jax.set_mesh(mesh):
        whole = jax.device_put(sizes, NamedSharding(mesh, P()))
        actual = jax.jit(run)(*placed, whole)
    chex.assert_trees_all_close(*map(jax.device_get, (actual, expected)), rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() > 1, reason="runs the cases of eight devices")
def test_on_eight_devices():
    eight_devices.assert_passes(__file__, "not gpu")
