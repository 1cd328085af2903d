"""ragged_dot: truth, gradients, rows of no group, offsets, transformations, devices, messages."""

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
ROWS, K, N = 80, 24, 40


def operands(dtype="float32", groups=6):
    rng = np.random.default_rng(0)
    shapes = ((ROWS, K), (groups, K, N), (ROWS, N))
    return [put(rng.normal(size=shape), dtype) for shape in shapes]


def bounds(sizes, rows):
    return np.minimum(np.cumsum([0, *np.maximum(sizes, 0)]), rows)


def truth(x, w, dy, sizes=SIZES, offset=0):
    """Returns y and the gradients of x and w in float64."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    ends = bounds(sizes, len(x))
    for e, matrix in enumerate(w):
        rows = slice(ends[offset + e], ends[offset + e + 1])
        y[rows], dx[rows], dw[e] = x[rows] @ matrix, dy[rows] @ matrix.T, x[rows].T @ dy[rows]
    return y, dx, dw


@functools.partial(jax.jit, static_argnums=0, static_argnames=("transpose_rhs", "group_offset"))
def with_gradients(f, x, w, dy, sizes, **options):
    y, pull_back = jax.vjp(lambda x, w: f(x, w, sizes, **options), x, w)
    return y, *pull_back(dy.astype(y.dtype))


@parametrize("dtype", ["float32", "bfloat16", "float16"], quick=(0, 1))
@pytest.mark.parametrize("sizes", [SIZES, (80, 0, 0, 0, 0, 0), (30, -5, 10, 90, 7, 0)], ids=str)
def test_truth(dtype, sizes):
    args = operands(dtype)
    ours = with_gradients(jaxfused.ragged_dot, *args, put(sizes, "int32"))
    kept = put(np.maximum(sizes, 0), "int32")
    plain = with_gradients(jax.lax.ragged_dot, *args, kept)
    for name, actual, simple, exact in zip(
        ("y", "dlhs", "drhs"), ours, plain, truth(*args, sizes), strict=True
    ):
        assert_accurate(name, actual, simple, exact)


def test_rhs_transposed_and_offset():
    x, w, dy = operands(groups=3)
    turned = w.swapaxes(1, 2)
    options = dict(transpose_rhs=True, group_offset=2)
    y, dx, dw = with_gradients(jaxfused.ragged_dot, x, turned, dy, put(SIZES, "int32"), **options)
    for actual, exact in zip((y, dx, dw.swapaxes(1, 2)), truth(x, w, dy, offset=2), strict=True):
        np.testing.assert_allclose(actual, exact, rtol=1e-5, atol=1e-5)
    of_array = jax.jit(jaxfused.ragged_dot)(x, w, put(SIZES, "int32"), group_offset=jnp.array([2]))
    np.testing.assert_allclose(of_array, y, rtol=1e-6, atol=1e-6)


def test_nothing_reaches_another_group():
    """NaN in one group's rows and matrix, and in the rows of no group, stays there."""
    x, w, dy = (np.array(a) for a in operands())
    ends = bounds(SIZES, ROWS)
    x[ends[3] : ends[4]] = x[ends[-1] :] = np.nan
    dy[ends[-1] :] = np.nan
    w[4] = np.inf
    y, dx, dw = with_gradients(jaxfused.ragged_dot, x, w, dy, put(SIZES, "int32"))
    others = np.r_[: ends[3], ends[4] : ROWS]
    chex.assert_tree_all_finite((y[others], dx, dw[:3], dw[4:]))
    assert jnp.isnan(y[ends[3] : ends[4]]).all() and not y[ends[-1] :].any()


@pytest.mark.parametrize("activation", ["relu2", "silu"])
@parametrize("dtype", ["float16", "bfloat16"], quick=(1,))
def test_activation(dtype, activation):
    check_activation(dtype, activation)


@pytest.mark.parametrize("rhs_dtype", ["float32", "bfloat16", "int8"])
def test_rows_of_no_group_are_zeros_after_an_activation(rhs_dtype):
    """softplus(0) is not 0; the first and the last rows have no matrix."""
    x, w, _ = operands("float32", 2)
    w = jaxfused.quantize(w) if rhs_dtype == "int8" else w.astype(rhs_dtype)
    sizes, ends = put((7, 20, 9, 30), "int32"), np.cumsum([7, 20, 9])
    y = jaxfused.ragged_dot(x, w, sizes, group_offset=1, activation="softplus")
    exact, *_ = truth(x, w.dequantize() if rhs_dtype == "int8" else w, y, sizes, 1)
    exact = np.logaddexp(0, exact)
    exact[: ends[0]] = exact[ends[2] :] = 0
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
def test_rows_of_no_group_are_zeros_by_kernels_and_by_stages_in_xla(interpreted_hopper):
    x, w, _ = operands("bfloat16", 2)
    sizes = put((20, 9), "int32")
    for features in (N, 3):  # the kernels take multiples of 8
        y = jaxfused.ragged_dot(x, w[..., :features], sizes, activation="sigmoid")
        assert not y[29:].any() and y[:29].all()


@pytest.mark.exhaustive
def test_activation_by_kernels(interpreted_hopper):
    check_activation("bfloat16", "silu")


def check_activation(dtype, activation):
    args = operands(dtype)
    f = {"relu2": lambda z: jnp.square(jax.nn.relu(z)), "silu": jax.nn.silu}[activation]
    sizes = put(SIZES, "int32")

    def plain(x, w, sizes):
        return f(jax.lax.ragged_dot(x, w, sizes))

    def ours(x, w, sizes):
        return jaxfused.ragged_dot(x, w, sizes, activation=activation)

    wide = [a.astype(jnp.float32) for a in args]
    results = [jax.jit(functools.partial(with_gradients.__wrapped__, g)) for g in (ours, plain)]
    exact = results[1](*wide, sizes)
    found = zip(("y", "dlhs", "drhs"), *(r(*args, sizes) for r in results), exact, strict=True)
    for name, actual, simple, expected in found:
        assert_accurate(name, actual, simple, np.asarray(expected, np.float64))


def test_result_has_the_preferred_dtype():
    x, w, _ = operands("bfloat16")
    sizes = put(SIZES, "int32")
    y = jaxfused.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, truth(x, w, jnp.zeros_like(y))[0], rtol=1e-5, atol=1e-5)
    assert jaxfused.ragged_dot(x, w.astype(jnp.float32), sizes).dtype == jnp.float32


def test_transformations():
    x, w, _ = operands()
    assert_transforms(lambda x, w: jaxfused.ragged_dot(x, w, jnp.array(SIZES)), x, w)


def test_derivatives_in_both_modes():
    x, w, _ = operands()
    f = lambda x, w: jaxfused.ragged_dot(x, w, jnp.array(SIZES))  # noqa: E731
    check_grads(f, (x, w), order=1, modes=("fwd", "rev"), atol=2e-2, rtol=2e-2)
    tangent = jax.jvp(f, (x, w), (x, jnp.zeros_like(w)))[1]
    np.testing.assert_allclose(tangent, f(x, w), rtol=1e-5, atol=1e-5)


def test_vmap_over_any_operand():
    x, w, _ = operands()
    sizes = jnp.array(SIZES)
    both = jnp.stack([sizes, sizes[::-1]])
    apart = jnp.stack([jaxfused.ragged_dot(x, w, s) for s in both])
    np.testing.assert_allclose(
        jax.vmap(jaxfused.ragged_dot, (None, None, 0))(x, w, both), apart, rtol=1e-6, atol=1e-6
    )


def test_lowered_for_cuda_with_three_kernels(hopper):
    x, w, dy = operands("bfloat16")
    run = functools.partial(with_gradients.__wrapped__, jaxfused.ragged_dot)
    found = kernels(run, x, w, dy, put(SIZES, "int32"))
    assert found == ["ragged_dot", "ragged_dot", "ragged_dot_drhs"]


@pytest.mark.exhaustive
def test_gradients_by_kernels(interpreted_hopper):
    x, w, dy = operands("bfloat16")
    sizes = put(SIZES, "int32")
    ours = jax.jit(functools.partial(with_gradients.__wrapped__, jaxfused.ragged_dot))(
        x, w, dy, sizes
    )
    plain = with_gradients(jax.lax.ragged_dot, x, w, dy, sizes)
    names = ("y", "dlhs", "drhs")
    for name, actual, simple, exact in zip(names, ours, plain, truth(x, w, dy), strict=True):
        assert_accurate(name, actual, simple, exact)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_memory_is_not_of_all_groups_times_all_rows(implementation):
    groups, rows, k, n = 64, 1024, 64, 64
    shapes = [(rows, k), (groups, k, n)]
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    f = functools.partial(jaxfused.ragged_dot, implementation=implementation)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    compiled = jax.jit(f).lower(*args, sizes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * groups * rows * k / 8


X, W, S = jnp.ones((6, 4)), jnp.ones((2, 4, 8)), jnp.array([2, 3])


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((X[None], W, S), {}, r"lhs has shape \(1, 6, 4\); pass one matrix"),
        (
            (X, W[0], S),
            {},
            r"rhs has shape \(4, 8\), but lhs has 4 features .* \(groups, 4, features",
        ),
        ((X, W, S), dict(transpose_rhs=True), r"pass rhs of shape \(groups, features, 4\)"),
        ((X, W, S * 1.0), {}, "group_sizes has dtype float32, but it counts rows; pass integers"),
        ((X, W, S[None]), {}, r"group_sizes has shape \(1, 2\); pass one size for each group"),
        ((X, W, S[:1]), {}, "group_sizes has 1 sizes, but rhs has 2 matrices; pass one size"),
        ((X, W, S), dict(group_offset=1), "group_offset is 1, but .* from 0 to 0"),
        ((X, W, S), dict(group_offset=0.5), "group_offset has .* pass an integer"),
        ((X, W, S), dict(preferred_element_type=jnp.int32), "preferred_element_type is int32"),
        ((X, W, S), dict(implementation="cuda"), "no CUDA kernel of ragged_dot"),
        ((X.astype(int), W, S), {}, "lhs has dtype int32"),
    ],
)
def test_messages(args, options, message):
    with pytest.raises(ValueError, match=f"ragged_dot: .*{message}"):
        jaxfused.ragged_dot(*args, **options)


@pytest.mark.parametrize("features", [20, 12])
def test_reasons_of_the_kernels(hopper, features):
    x, w = jnp.ones((8, features), jnp.bfloat16), jnp.ones((2, features, 16), jnp.bfloat16)
    with pytest.raises(ValueError, match=f"multiples of 8 features, and lhs has {features}"):
        jaxfused.ragged_dot(x, w, S, implementation="pallas")


on_eight_devices = pytest.mark.skipif(jax.device_count() < eight_devices.DEVICES, reason="devices")
SPECS = {
    "result features": (P(), P(None, None, "d"), P(None, "d")),
    "summed features": (P(None, "d"), P(None, "d"), P()),
    "rows and groups": (P("d"), P("d"), P("d")),
}


@on_eight_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("split", SPECS)
def test_sharded(axis_type, split):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(axis_type,))
    args = operands(groups=8)
    sizes = put((0, 40, 1, 25, 0, 9, 2, 1), "int32")
    expected = with_gradients(jaxfused.ragged_dot, *args, sizes)
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(args, SPECS[split], strict=True)
    ]
    with jax.set_mesh(mesh):
        whole = jax.device_put(sizes, NamedSharding(mesh, P()))
        actual = jax.jit(lambda x, w, dy, s: _sharded(x, w, dy, s))(*placed, whole)
    chex.assert_trees_all_close(*map(jax.device_get, (actual, expected)), rtol=1e-5, atol=1e-5)


def _sharded(x, w, dy, sizes):
    y, pull_back = jax.vjp(lambda x, w: jaxfused.ragged_dot(x, w, sizes), x, w)
    if jax.typeof(y).sharding.mesh.explicit_axes:
        dy = jax.sharding.reshard(dy, jax.typeof(y).sharding)
    return y, *pull_back(dy)


@on_eight_devices
def test_experts_of_each_device_by_the_offset():
    """Each device has one group's matrix, and the sum over devices is the whole product."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    x, w, _ = operands(groups=8)
    sizes = put((0, 40, 1, 25, 0, 9, 2, 1), "int32")

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("d"), P()), out_specs=P(), check_vma=False
    )
    def run(x, w, sizes):
        own = jaxfused.ragged_dot(x, w, sizes, group_offset=jax.lax.axis_index("d"))
        return jax.lax.psum(own, "d")

    np.testing.assert_allclose(
        run(x, w, sizes), jaxfused.ragged_dot(x, w, sizes), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_sizes_of_one_byte_count_more_rows_than_it_holds(dtype):
    w = jnp.array([1.0, 2.0, 3.0])[:, None, None]
    y = jaxfused.ragged_dot(jnp.ones((360, 1)), w, np.full(3, 120, dtype))
    np.testing.assert_array_equal(y[:, 0], np.repeat([1.0, 2.0, 3.0], 120))


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() > 1, reason="runs the cases of eight devices")
def test_on_eight_devices():
    eight_devices.assert_passes(__file__, "not gpu")
