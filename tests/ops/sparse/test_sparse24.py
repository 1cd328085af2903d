"""Sparse24, prune24 and sparse24_matmul: places, packed orders, truth, gradients, kernels, messages."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxfused
from jaxfused import Sparse24
from tests.support import eight_devices
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels
from tests.support.tolerances import assert_accurate
from tests.support.transforms import assert_transforms

on_eight_devices = pytest.mark.skipif(
    jax.device_count() < eight_devices.DEVICES, reason="needs eight devices"
)
ROWS, D, F = 21, 80, 136


def operands(dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = (ROWS, D), (D, F), (ROWS, F)
    return [put(rng.normal(size=shape), dtype) for shape in shapes]


def pruned(weight):
    """Returns the pruned matrix in float64, by a sort."""
    groups = np.asarray(weight, np.float64).reshape(-1, 4, weight.shape[1])
    order = np.argsort(-np.abs(groups), axis=1, kind="stable")
    kept = np.argsort(order, axis=1) < 2
    return np.where(kept, groups, 0).reshape(weight.shape)


def test_two_of_four_are_kept():
    column = np.array([1, -4, 3, -200, 0, 0, 5, 0, 2, -2, 2, 2, 0, 0, 0, 0.0])[:, None]
    kept = [0, -4, 0, -200, 0, 0, 5, 0, 2, -2, 0, 0, 0, 0, 0, 0]
    np.testing.assert_array_equal(jaxfused.prune24(column).ravel(), kept)
    _, weight, _ = operands()
    packed = Sparse24.from_dense(weight)
    np.testing.assert_array_equal(packed.to_dense(), pruned(weight))
    assert packed.shape == weight.shape and packed.values.shape == (F, D // 2)


def test_torch_order():
    recorded = np.load(Path(__file__).parents[2] / "recorded/sparse24.npz")
    values = put(recorded["values"], "float32")
    weight = Sparse24.from_torch(values, recorded["metadata"])
    np.testing.assert_array_equal(weight.to_dense(), recorded["dense"].T)
    again = Sparse24.from_dense(weight.to_dense())
    np.testing.assert_array_equal(again.metadata, weight.metadata)


@pytest.mark.exhaustive
def test_words_of_rows():
    # Of each row's first four groups 0 and 1, 0 and 3, 2 and 3, 1 and 2 are kept.
    word = 0b0100 | 0b1100 << 4 | 0b1110 << 8 | 0b1001 << 12
    values = jnp.arange(1.0, 9.0)[None].repeat(8, 0)
    weight = Sparse24.from_torch(values, np.full((8, 1), word, np.uint16), order="rows")
    assert weight.to_dense()[:, 0].tolist() == [1, 2, 0, 0, 3, 0, 0, 4, 0, 0, 5, 6, 0, 7, 8, 0]


@functools.partial(jax.jit, static_argnums=0, static_argnames="straight_through")
def with_gradients(product, x, weight, dy, straight_through=False):
    y, pull_back = jax.vjp(lambda x, w: product(x, w, straight_through=straight_through), x, weight)
    return y, *pull_back(dy)


def plain(x, weight, straight_through):
    return x @ jaxfused.prune24(weight, straight_through=straight_through)


@parametrize("dtype", ["float32", "bfloat16", "float16"], quick=(1,))
@pytest.mark.parametrize("straight_through", [False, True])
def test_truth(dtype, straight_through):
    x, weight, dy = operands(dtype)
    options = dict(straight_through=straight_through)
    ours = with_gradients(jaxfused.sparse24_matmul, x, weight, dy, **options)
    simple = with_gradients(plain, x, weight, dy, **options)
    w64, x64, dy64 = pruned(weight), np.float64(x), np.float64(dy)
    dw = x64.T @ dy64
    truths = x64 @ w64, dy64 @ w64.T, dw if straight_through else np.where(w64, dw, 0)
    for name, actual, one, exact in zip(("y", "dx", "dw"), ours, simple, truths, strict=True):
        assert_accurate(name, actual, one, exact)


@pytest.mark.exhaustive
def test_packed_weight_has_gradients_at_its_places():
    x, weight, dy = operands()
    packed = Sparse24.from_dense(weight)

    def f(values):
        return jnp.vdot(jaxfused.sparse24_matmul(x, Sparse24(values, packed.metadata)), dy)

    dvalues = Sparse24(jax.grad(f)(packed.values), packed.metadata)
    expected = np.where(pruned(weight), x.T @ dy, 0)
    np.testing.assert_allclose(dvalues.to_dense(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
def test_transformations():
    x, weight, _ = operands()
    assert_transforms(jaxfused.sparse24_matmul, x, weight)
    packed = Sparse24.from_dense(weight)
    two = jax.tree.map(lambda a: jnp.stack([a, a]), packed)
    y = jax.vmap(jaxfused.sparse24_matmul, (None, 0))(x, two)
    np.testing.assert_allclose(y[1], x @ pruned(weight), rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
def test_derivatives_in_both_modes():
    x, weight, _ = operands()
    weight = weight * jnp.arange(1, 5)[jnp.arange(D) % 4, None]  # No two are nearly alike.
    packed = Sparse24.from_dense(weight)

    def f(x, values):
        return jaxfused.sparse24_matmul(x, Sparse24(values, packed.metadata))

    check_grads(f, (x, packed.values), 1, ("fwd", "rev"), atol=2e-2, rtol=2e-2)


def test_kernels_that_are_launched(with_library):
    x, weight, dy = operands("bfloat16")
    run = functools.partial(jaxfused.sparse24_matmul, implementation="cuda")
    f = functools.partial(with_gradients.__wrapped__, run)
    assert kernels(f, x, weight, dy) == ["jaxfused_sparse24_matmul"]
    packed = Sparse24.from_dense(weight)
    assert kernels(jax.vmap(run, (0, None)), x[None], packed) == ["jaxfused_sparse24_matmul"]


@on_eight_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_rows_on_several_devices(axis_type):
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(axis_type,))
    x, weight, dy = operands()
    x, dy = jnp.tile(x, (8, 1)), jnp.tile(dy, (8, 1))
    alone = with_gradients(jaxfused.sparse24_matmul, x, weight, dy)
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, P("rows", None))
        x, dy = jax.device_put(x, split), jax.device_put(dy, split)
        shared = with_gradients(jaxfused.sparse24_matmul, x, weight, dy)
    for ours, exact in zip(shared, alone, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() > 1, reason="runs the cases of eight devices")
def test_on_eight_devices():
    eight_devices.assert_passes(__file__, "not gpu")


@pytest.mark.exhaustive
def test_export():
    x, weight, _ = operands()
    packed = Sparse24.from_dense(weight)
    exported = jax.export.export(jax.jit(jaxfused.sparse24_matmul))(x, packed)
    y = jaxfused.sparse24_matmul(x, packed)
    np.testing.assert_allclose(exported.call(x, packed), y, rtol=1e-6)


GPU_CASES = [(1, 16, 8), (300, 128, 256), (513, 208, 520), (1000, 1024, 768), (256, 64, 128)]


@pytest.mark.gpu
@pytest.mark.usefixtures("built_library")
@pytest.mark.parametrize("rows, depth, features", GPU_CASES)
def test_on_a_gpu(rows, depth, features):
    """Compares small integers, whose sums are exact."""
    rng = np.random.default_rng(0)
    x = put(rng.integers(-2, 3, size=(rows, depth)), "bfloat16")
    weight = put(rng.integers(-2, 3, size=(depth, features)), "bfloat16")
    run = jax.jit(functools.partial(jaxfused.sparse24_matmul, implementation="cuda"))
    exact = put(np.float64(x) @ pruned(weight), "float32").astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.float32(run(x, weight)), np.float32(exact))
    np.testing.assert_array_equal(np.float32(run(x, weight)), np.float32(run(x, weight)))


PACKED = Sparse24.from_dense(jnp.ones((16, 8)))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: jaxfused.prune24(jnp.ones((6, 2))), "a multiple of 4 rows"),
        (lambda: Sparse24.from_dense(jnp.ones((4, 2), int)), "floating-point weight"),
        (lambda: jaxfused.sparse24_matmul(jnp.ones((2, 8)), PACKED), r"x of shape \(..., D\)"),
        (
            lambda: jaxfused.sparse24_matmul(jnp.ones((2, 16)), PACKED, straight_through=True),
            "pass the dense weight",
        ),
        (
            lambda: jaxfused.sparse24_matmul(jnp.ones((2, 16)), PACKED, implementation="pallas"),
            "no sparse products for Hopper",
        ),
        (
            lambda: Sparse24.from_torch(jnp.ones((8, 8)), np.ones((8, 2), np.int16)),
            r"metadata \[F, D / 16\]",
        ),
        (
            lambda: Sparse24.from_torch(jnp.ones((8, 8)), np.ones((8, 1), np.int16)),
            "multiples of 32",
        ),
        (
            lambda: Sparse24.from_torch(jnp.ones((8, 8)), np.ones((8, 1), np.int32)),
            "words of 16 bits",
        ),
    ],
)
def test_messages(call, words):
    with pytest.raises(ValueError, match=words):
        call()
