"""layer_norm and rms_norm with quantize_rows, compared bit by bit with both in sequence."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from pallas_kernels.rows import layer_norm_configs
from tests.support import lowering
from tests.support.arrays import put
from tests.support.grids import parametrize

NORMS = {"layer_norm": jaxfused.layer_norm, "rms_norm": jaxfused.rms_norm}
DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")


def operands(shape, dtype="bfloat16", *, residual=True):
    """Returns (x, scale, bias, residual), with rows of zeros, tiny numbers, a NaN and an infinity."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype(np.float32)
    r = rng.normal(size=shape).astype(np.float32) if residual else None
    flat = x.reshape(-1, shape[-1])
    flat[1], flat[2, 3], flat[3, 5], flat[4] = 0, np.nan, np.inf, 1e-30
    if r is not None:
        r.reshape(flat.shape)[1] = 0
    scale, bias = rng.normal(size=(2, shape[-1])).astype(np.float32)
    cast = lambda a: None if a is None else put(a, dtype)  # noqa: E731
    return cast(x), jnp.asarray(scale), jnp.asarray(bias), cast(r)


def assert_same(ours, expected):
    """Asserts equality of all bits, in float32, because NumPy compares NaN of float8 as unequal."""
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, expected)
    wide = lambda a: a.astype(jnp.float32)  # noqa: E731
    chex.assert_trees_all_equal(jax.tree.map(wide, ours), jax.tree.map(wide, expected))


def two_passes(norm, x, scale, bias, residual, dtype, **keywords):
    y = norm(x, scale, bias, residual=residual, **keywords)
    implementation = keywords.get("implementation")
    if residual is None:
        return jaxfused.quantize_rows(y, dtype, implementation=implementation)
    return jaxfused.quantize_rows(y[0], dtype, implementation=implementation), y[1]


@parametrize(
    ("norm", "shape", "dtype", "x_dtype", "residual"),
    [
        ("layer_norm", (9, 128), "int8", "bfloat16", True),
        ("rms_norm", (2, 9, 128), "float8_e4m3fn", "bfloat16", False),
        ("rms_norm", (5, 4096), "int8", "bfloat16", False),
        ("layer_norm", (5, 2560), "int8", "bfloat16", False),
        ("layer_norm", (37, 768), "float8_e5m2", "float16", True),
        ("rms_norm", (6, 8192), "int8", "bfloat16", True),
        ("layer_norm", (6, 4096), "float8_e4m3fn", "float32", False),
        ("rms_norm", (67, 192), "int8", "float32", True),
    ],
    quick=(0, 1),
)
def test_one_pass_has_the_bits_of_two(norm, shape, dtype, x_dtype, residual, interpreted_hopper):
    arrays = operands(shape, x_dtype, residual=residual)
    options = dict(activation="silu", implementation="pallas")
    x, scale, bias, r = arrays
    one = NORMS[norm](x, scale, bias, residual=r, quantize_rows=dtype, **options)
    assert_same(one, two_passes(NORMS[norm], *arrays, dtype, **options))


@pytest.mark.exhaustive
@pytest.mark.parametrize("norm", NORMS)
def test_two_warpgroups_that_share_a_row_do_not_race(norm, race_detector):
    """The warpgroups alternate between two buffers of exchanged sums, also from row to row."""
    x, scale, bias, r = operands((9, 8192))
    NORMS[norm](x, scale, bias, residual=r, quantize_rows="int8", implementation="pallas")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [24, 33])
def test_without_a_kernel_one_follows_the_other(norm, dtype, features):
    arrays = operands((2, 6, features))

    @jax.jit
    def both(x, scale, bias, r):
        ours = NORMS[norm](x, scale, bias, residual=r, quantize_rows=dtype)
        return ours, two_passes(NORMS[norm], x, scale, bias, r, dtype)

    assert_same(*both(*arrays))


def test_of_each_image():
    x, scale, bias, _ = operands((6, 5, 32), residual=False)
    shift = jnp.ones((6, 32), jnp.bfloat16)
    ours = jaxfused.layer_norm(x, scale, bias, image_shift=shift, quantize_rows="int8")
    y = jaxfused.layer_norm(x, scale, bias, image_shift=shift)
    chex.assert_trees_all_equal(ours, jaxfused.quantize_rows(y))


def test_what_follows_takes_it():
    x, scale, _, _ = operands((6, 64), residual=False)
    x, w = x[4:], jaxfused.quantize(jnp.eye(64))
    y = jaxfused.quantized_matmul(jaxfused.rms_norm(x, scale, quantize_rows="int8"), w)
    expected = jaxfused.quantized_matmul(jaxfused.quantize_rows(jaxfused.rms_norm(x, scale)), w)
    chex.assert_trees_all_equal(y, expected)


def test_vmap(interpreted_hopper):
    x, scale, bias, _ = operands((3, 5, 128), residual=False)
    f = lambda x: jaxfused.rms_norm(  # noqa: E731
        x, scale, bias, quantize_rows=jnp.int8, implementation="pallas"
    )
    chex.assert_trees_all_equal(jax.vmap(f)(x), f(x))


def test_the_next_residual_has_a_gradient(interpreted_hopper):
    x, scale, bias, r = (a if a is None else a[5:] for a in operands((13, 128)))
    scale, bias = jnp.ones(128), jnp.zeros(128)

    def loss(x, scale, r, pre_bias, implementation):
        q, h = jaxfused.rms_norm(
            x,
            scale,
            bias,
            residual=r,
            pre_bias=pre_bias,
            quantize_rows="float8_e4m3fn",
            implementation=implementation,
        )
        return jnp.sum(jnp.sin(h.astype(jnp.float32))) + jnp.sum(q.dequantize())

    everything = (x, scale, r, jnp.full(128, 0.5))
    ours, plain = (
        jax.grad(loss, (0, 1, 2, 3))(*everything, implementation)
        for implementation in ("pallas", "xla")
    )
    chex.assert_trees_all_close(ours, plain, rtol=1e-2)
    assert not bool(ours[1].any())


def test_who_runs(hopper):
    x, scale, *_ = operands((64, 256), residual=False)

    def launched(implementation):
        f = lambda x: jaxfused.rms_norm(  # noqa: E731
            x, scale, quantize_rows="int8", implementation=implementation
        )
        return lowering.kernels(f, x)

    assert launched("pallas") == launched(None) == ["layer_norm_quantized_forward"]


@parametrize("shape", [(4096, 1024), (16384, 768), (4096, 4096), (1024, 16384)], quick=(0,))
def test_lowered_for_cuda(shape, hopper):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    vector = jax.ShapeDtypeStruct(shape[1:], jnp.float32)
    for matrices, residual in ((1, ()), (2, (x,))):
        candidates = layer_norm_configs.forward_candidates(*shape, 2, matrices, 2)
        assert candidates

        def f(x, scale, bias, *residual):
            return jaxfused.layer_norm(
                x,
                scale,
                bias,
                residual=residual[0] if residual else None,
                quantize_rows="float8_e4m3fn",
                implementation="pallas",
            )

        launched = lowering.kernels(f, x, vector, vector, *residual)
        assert launched == ["layer_norm_quantized_forward"]


@pytest.mark.parametrize("dtype", ["int4", "int16", jnp.float32])
def test_dtypes_that_are_refused(dtype):
    with pytest.raises(ValueError, match=r"rms_norm: quantize_rows is .*pass 'int8', 'float8"):
        jaxfused.rms_norm(jnp.ones((2, 4)), quantize_rows=dtype)


@pytest.mark.parametrize("implementation", ["pallas", "cuda"])
def test_a_named_implementation_that_cannot_run(implementation):
    x = jnp.ones((2, 4))
    with pytest.raises(ValueError, match=r"rms_norm: implementation=.* cannot run here"):
        jaxfused.rms_norm(x, quantize_rows="int8", implementation=implementation)


@pytest.mark.gpu
@parametrize("norm", NORMS, quick=())
@parametrize("dtype", DTYPES, quick=())
@parametrize("shape", [(129, 768), (1000, 1024), (300, 4096), (64, 16384)], quick=())
@parametrize("residual", [False, True], quick=())
def test_one_pass_on_a_gpu(norm, dtype, shape, residual):
    arrays = operands(shape, residual=residual)
    x, scale, bias, r = arrays
    f = jax.jit(
        lambda x, r: NORMS[norm](
            x, scale, bias, residual=r, quantize_rows=dtype, implementation="pallas"
        )
    )
    one, again = f(x, r), f(x, r)
    assert_same(one, again)
    two = jax.jit(
        lambda x, r: two_passes(NORMS[norm], x, scale, bias, r, dtype, implementation="pallas")
    )(x, r)
    # The two kernels are compiled apart: the last bit of a sum may differ, and change a value that is
    # halfway between two codes.
    (q, *h), (p, *g) = (a if isinstance(a, tuple) else (a,) for a in (one, two))
    assert_same(h, g)
    chex.assert_trees_all_close(q.scale, p.scale, rtol=2**-7)
    a, b = (np.asarray(array.values, np.float32) for array in (q, p))
    assert (np.isnan(a) == np.isnan(b)).all() and (
        np.nan_to_num(a) != np.nan_to_num(b)
    ).mean() < 1e-3
