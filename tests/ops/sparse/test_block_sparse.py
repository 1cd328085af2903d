"""block_sparse_matmul and BlockSparse: truth, gradients, places, transformations, devices, messages."""

import dataclasses
import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxfused
from jaxfused import BlockSparse
from tests.support import eight_devices
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels
from tests.support.tolerances import assert_accurate
from tests.support.transforms import assert_transforms

on_eight_devices = pytest.mark.skipif(
    jax.device_count() < eight_devices.DEVICES, reason="needs eight devices"
)
ROWS, D, F, B = 21, 96, 160, 32


def operands(dtype="float32", count=7):
    """Returns x, a weight whose second column of blocks is empty, and a cotangent."""
    rng = np.random.default_rng(0)
    mask = np.zeros((D // B, F // B), bool)
    mask[rng.permuted(np.repeat([[0], [1], [2]], 4, 1), axis=0)[0], [0, 2, 3, 4]] = True
    mask[:, 4] = True
    dense = put(rng.normal(size=(D, F)), dtype)
    x, dy = put(rng.normal(size=(ROWS, D)), dtype), put(rng.normal(size=(ROWS, F)), dtype)
    return x, BlockSparse.from_dense(dense, B, mask=mask), dy


def of_blocks(weight):
    """Returns the product as a function of x and the weight's blocks."""
    return lambda x, blocks: jaxfused.block_sparse_matmul(
        x, dataclasses.replace(weight, blocks=blocks)
    )


def dense_of_blocks(weight):
    return lambda x, blocks: x @ dataclasses.replace(weight, blocks=blocks).to_dense()


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(product, x, weight, dy):
    y, pull_back = jax.vjp(product(weight), x, weight.blocks)
    return y, *pull_back(dy)


@parametrize("dtype", ["float32", "bfloat16", "float16"], quick=(0,))
def test_truth(dtype):
    x, weight, dy = operands(dtype)
    ours = with_gradients(of_blocks, x, weight, dy)
    plain = with_gradients(dense_of_blocks, x, weight, dy)
    x64, w64, dy64 = (np.float64(a) for a in (x, weight.to_dense(), dy))
    dw = (x64.T @ dy64).reshape(D // B, B, F // B, B).swapaxes(1, 2)
    truths = x64 @ w64, dy64 @ w64.T, dw[weight.places]
    for name, actual, simple, exact in zip(("y", "dx", "dw"), ours, plain, truths, strict=True):
        assert_accurate(name, actual, simple, exact)


def test_blocks_of_a_dense_matrix():
    dense = np.zeros((128, 192), np.float32)
    dense[70, 3], dense[0, 191] = 2.0, -1.0
    weight = BlockSparse.from_dense(dense, 64)
    rows, columns = weight.places
    assert (rows.tolist(), columns.tolist()) == ([0, 1], [2, 0])
    assert weight.shape == (128, 192) and weight.density == 2 / 6
    np.testing.assert_array_equal(weight.to_dense(), dense)
    largest = jax.jit(lambda w: BlockSparse.from_dense(w, 64, count=1))(dense)
    np.testing.assert_array_equal(largest.to_dense()[64:, :64], dense[64:, :64])
    assert jnp.count_nonzero(largest.to_dense()) == 1


@pytest.mark.exhaustive
def test_blocks_in_any_order_and_beyond_the_matrix():
    blocks = put(np.random.default_rng(0).normal(size=(5, 32, 32)), "float32")
    rows, columns = np.array([1, 0, 9, 1, 0]), np.array([2, 0, 0, 1, 3])
    weight = BlockSparse.from_blocks(blocks, rows, columns, (64, 96))
    dense = np.zeros((64, 96), np.float32)
    dense[:32, :32], dense[32:, 64:], dense[32:, 32:64] = blocks[1], blocks[0], blocks[3]
    np.testing.assert_allclose(weight.to_dense(), dense, rtol=1e-6)
    x = jnp.ones((3, 64))
    dw = jax.grad(lambda b: jnp.sum(of_blocks(weight)(x, b)))(weight.blocks)
    assert (dw[jnp.array([0, 1, 3])] == 3).all() and not dw[jnp.array([2, 4])].any()


@pytest.mark.exhaustive
def test_nothing_is_kept():
    weight = BlockSparse.from_dense(np.zeros((32, 64), np.float32), 32)
    assert weight.blocks.shape == (0, 32, 32)
    y, pull_back = jax.vjp(of_blocks(weight), jnp.ones((2, 32)), weight.blocks)
    assert y.shape == (2, 64) and not y.any()
    assert pull_back(y)[1].shape == (0, 32, 32)


@pytest.mark.exhaustive
def test_result_has_the_preferred_dtype():
    x, weight, _ = operands("bfloat16")
    y = jaxfused.block_sparse_matmul(x, weight, preferred_element_type=jnp.float32)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(
        y, np.float64(x) @ np.float64(weight.to_dense()), rtol=1e-5, atol=1e-5
    )


@pytest.mark.exhaustive
def test_transformations():
    x, weight, _ = operands()
    assert_transforms(of_blocks(weight), x, weight.blocks)


@pytest.mark.exhaustive
def test_derivatives_in_both_modes():
    x, weight, _ = operands()
    check_grads(of_blocks(weight), (x, weight.blocks), 1, ("fwd", "rev"), atol=2e-2, rtol=2e-2)


@pytest.mark.exhaustive
def test_vmap_over_weights():
    x, weight, _ = operands()
    two = jax.tree.map(
        lambda a, b: jnp.stack([a, b]), weight, dataclasses.replace(weight, blocks=-weight.blocks)
    )
    y = jax.vmap(jaxfused.block_sparse_matmul, (None, 0))(x, two)
    np.testing.assert_allclose(y[0], -y[1], rtol=1e-6)


def test_saved_and_restored():
    _, weight, _ = operands()
    saved = flax.serialization.to_bytes(weight)
    target = jax.tree.map(jnp.zeros_like, weight)
    restored = flax.serialization.from_bytes(target, saved)
    np.testing.assert_array_equal(restored.to_dense(), weight.to_dense())


LARGE = BlockSparse.from_dense(np.ones((128, 256), np.float32), 64, count=3)


def in_bfloat16(weight):
    return dataclasses.replace(weight, blocks=weight.blocks.astype(jnp.bfloat16))


def test_kernels_that_are_launched(hopper):
    weight = in_bfloat16(LARGE)
    x, dy = jnp.ones((2, 40, 128), jnp.bfloat16), jnp.ones((2, 40, 256), jnp.bfloat16)

    def run(x, blocks, dy):
        f = functools.partial(jaxfused.block_sparse_matmul, implementation="pallas")
        y, pull_back = jax.vjp(lambda x, b: f(x, dataclasses.replace(weight, blocks=b)), x, blocks)
        return y, *pull_back(dy)

    names = ["forward", "dx", "dw"]
    launched = [f"block_sparse_matmul_{name}" for name in names]
    batched = jax.vmap(run, (0, None, 0))
    assert kernels(batched, x[None], weight.blocks, dy[None]) == launched


@pytest.mark.exhaustive
def test_kernels_in_the_interpreter(interpreted_hopper):
    weight = in_bfloat16(
        BlockSparse.from_blocks(
            np.random.default_rng(0).integers(-2, 3, size=(4, 64, 64)) * 1.0,
            np.array([1, 7, 0, 1]),
            np.array([3, 0, 0, 0]),
            (128, 256),
        )
    )
    rng = np.random.default_rng(1)
    x, dy = (put(rng.integers(-2, 3, size=(70, n)), "bfloat16") for n in (128, 256))

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, x, blocks):
        def f(x, b):
            w = dataclasses.replace(weight, blocks=b)
            return jaxfused.block_sparse_matmul(x, w, implementation=implementation)

        y, pull_back = jax.vjp(f, x, blocks)
        return y, *pull_back(dy)

    for ours, xla in zip(
        run("pallas", x, weight.blocks), run("xla", x, weight.blocks), strict=True
    ):
        np.testing.assert_array_equal(np.float32(ours), np.float32(xla))


@on_eight_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_rows_on_several_devices(axis_type):
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(axis_type,))
    x, weight, dy = operands()
    x, dy = jnp.tile(x, (8, 1)), jnp.tile(dy, (8, 1))
    alone = with_gradients(of_blocks, x, weight, dy)
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, P("rows", None))
        shared = with_gradients(
            of_blocks, jax.device_put(x, split), weight, jax.device_put(dy, split)
        )
    for ours, exact in zip(shared, alone, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() > 1, reason="runs the cases of eight devices")
def test_on_eight_devices():
    eight_devices.assert_passes(__file__, "not gpu")


@pytest.mark.exhaustive
def test_export():
    x, weight, _ = operands()
    exported = jax.export.export(jax.jit(jaxfused.block_sparse_matmul))(x, weight)
    y = jaxfused.block_sparse_matmul(x, weight)
    np.testing.assert_allclose(exported.call(x, weight), y, rtol=1e-6, atol=1e-6)


X = jnp.ones((4, 64))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: jaxfused.block_sparse_matmul(X, X), "pass a jaxfused.BlockSparse"),
        (lambda: jaxfused.block_sparse_matmul(X, LARGE), r"pass x of shape \(..., 128\)"),
        (
            lambda: jaxfused.block_sparse_matmul(
                jnp.ones((4, 128)), dataclasses.replace(LARGE, blocks=LARGE.blocks[:1])
            ),
            "places for 3 blocks",
        ),
        (lambda: BlockSparse.from_dense(X.T, 32), "a matrix of two multiples of 32"),
        (lambda: BlockSparse.from_dense(X.T, 16), "pass 32, 64 or 128"),
        (lambda: BlockSparse.from_dense(jnp.ones((64, 64)), 64, count=2), "has 1 blocks"),
        (
            lambda: jax.jit(lambda w: BlockSparse.from_dense(w, 64))(jnp.ones((64, 64))),
            "pass count",
        ),
        (
            lambda: BlockSparse.from_dense(jnp.ones((64, 64)), 64, mask=np.ones((2, 2), bool)),
            r"bools of shape \(1, 1\)",
        ),
        (
            lambda: BlockSparse.from_blocks(
                jnp.ones((1, 64, 64)), jnp.array([-1]), jnp.array([0]), (64, 64)
            ),
            "counted from 0",
        ),
        (
            lambda: BlockSparse.from_blocks(
                jnp.ones((2, 32, 32)), jnp.zeros(2, int), jnp.zeros(2, int), (64, 64)
            ),
            "two blocks have one place",
        ),
        (
            lambda: jaxfused.block_sparse_matmul(jnp.ones((4, 128)), LARGE, implementation="cuda"),
            "no CUDA kernel",
        ),
    ],
)
def test_messages(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.exhaustive
def test_where_few_blocks_are_zero_the_dense_product_runs(hopper):
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    chosen = []
    for block, count in ((128, 64 * 64), (128, 400), (32, 6000)):
        weight = jax.eval_shape(
            lambda w, b=block, n=count: BlockSparse.from_dense(w, b, count=n), x
        )
        found = jaxfused.explain(jaxfused.block_sparse_matmul, x, weight)
        chosen.append(str(found))
    assert "'xla'" in chosen[0] and all("'pallas'" in one for one in chosen[1:])
