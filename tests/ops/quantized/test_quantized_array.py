import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import jaxfused
from jaxfused.runtime.packing import pack_int4, unpack_int4
from jaxfused.runtime.quantized_array import FORMATS, LAYOUTS
from tests.cases.quantized_array import CASES
from tests.support.arrays import put
from tests.support.transforms import assert_transforms

pytestmark = pytest.mark.exhaustive


def naive_quantize(x, dtype, *, axis=-2, group_size=None, per_tensor=False, symmetric=True):
    """Returns (integers or float8, dequantised), group by group, in float64 with float32 scales."""
    x = np.asarray(x, np.float64)
    moved = x.reshape(-1, 1) if per_tensor else np.moveaxis(x, axis, 0)
    values, dequantized = np.zeros_like(moved), np.zeros_like(moved)
    size = group_size or len(moved)
    low, high, float8 = {
        "int8": (-128, 127, None),
        "int4": (-8, 7, None),
        "float8_e4m3fn": (-448, 448, ml_dtypes.float8_e4m3fn),
        "float8_e5m2": (-57344, 57344, ml_dtypes.float8_e5m2),
    }[dtype]
    for column in np.ndindex(moved.shape[1:]):
        for start in range(0, len(moved), size):
            where = (slice(start, start + size), *column)
            group, zero = moved[where], 0
            if symmetric:
                scale = np.float32(np.abs(group).max()) / np.float32(high)
            else:
                least, most = min(group.min(), 0), max(group.max(), 0)
                scale = (np.float32(most) - np.float32(least)) / np.float32(high - low)
                zero = np.round(low - np.float32(least) / scale)
            units = np.float32(group) / scale
            q = np.round(units) + zero if float8 is None else units.astype(float8)
            values[where] = q
            dequantized[where] = (values[where] - zero) * np.float64(scale)
    if per_tensor:
        return values.reshape(x.shape), dequantized.reshape(x.shape)
    return np.moveaxis(values, 0, axis), np.moveaxis(dequantized, 0, axis)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_are_those_of_a_loop_over_groups(case):
    x = case.x()

    @jax.jit
    def f(x):
        q = jaxfused.quantize(x, case.dtype, **case.options)
        return q, q.unpacked(), q.dequantize()

    q, *actual = f(x)
    values, dequantized = naive_quantize(x, case.dtype, **case.options)
    np.testing.assert_array_equal(np.asarray(actual[0], np.float64), values)
    np.testing.assert_allclose(actual[1], dequantized, rtol=1e-6)
    assert q.dtype == case.dtype
    assert q.shape == x.shape
    assert q.ndim == x.ndim


@pytest.mark.parametrize("symmetric", [True, False])
def test_blocks_of_a_matrix_share_a_scale(symmetric):
    x = jax.random.normal(jax.random.key(0), (3, 12, 20)) + 0.5
    options = dict(symmetric=symmetric)
    q = jax.jit(lambda x: jaxfused.quantize(x, group_size=(6, 4), **options))(x)
    assert q.scale.shape == (3, 2, 5)
    assert (q.groups, q.columns_alike) == (2, 4)
    for layer, i, j in np.ndindex(q.scale.shape):
        block = (layer, slice(6 * i, 6 * i + 6), slice(4 * j, 4 * j + 4))
        alone = jax.jit(lambda x: jaxfused.quantize(x, per_tensor=True, **options))(x[block])
        np.testing.assert_array_equal(q.unpacked()[block], alone.unpacked())
        np.testing.assert_array_equal(q.scale[layer, i, j], alone.scale[0, 0])
        np.testing.assert_array_equal(q.dequantize()[block], alone.dequantize())
    again = jaxfused.quantize(x, scale=q.scale, zero_point=q.zero_point)
    np.testing.assert_array_equal(again.values, q.values)


@settings(max_examples=3)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    dtype=st.sampled_from(sorted(FORMATS)),
    symmetric=st.booleans(),
    data=st.data(),
)
def test_error_is_at_most_half_a_step(shape, dtype, symmetric, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    if dtype == "int4":
        shape[axis] *= 2
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    integers = dtype.startswith("int")
    q = jaxfused.quantize(x, dtype, axis=axis, symmetric=symmetric or not integers)
    # float8 keeps 3 or 2 bits of the mantissa; below the normal numbers, steps are the smallest
    # subnormal.
    step = np.broadcast_to(q.scale, shape)
    if not integers:
        info = jnp.finfo(dtype)
        step = np.maximum(abs(x) * float(info.eps), step * float(info.smallest_subnormal))
    assert (abs(np.asarray(q.dequantize()) - x) <= 0.5001 * step).all()


def test_layout_of_int4():
    values = put([[1, -1], [-8, 7], [0, 3], [5, -2]], jnp.int8)
    packed = pack_int4(values, axis=0)
    assert packed.dtype == jnp.uint8
    np.testing.assert_array_equal(packed, [[0x81, 0x7F], [0x50, 0xE3]])
    np.testing.assert_array_equal(unpack_int4(packed, 0), values)
    packed = pack_int4(values, axis=-1)
    np.testing.assert_array_equal(packed, [[0xF1], [0x78], [0x30], [0xE5]])
    np.testing.assert_array_equal(unpack_int4(packed, -1), values)
    # The order is XLA's own packing, so that a bitcast can read it.
    bitcast = jax.lax.bitcast_convert_type(packed, jnp.int4).reshape(values.shape)
    np.testing.assert_array_equal(bitcast.astype(jnp.int8), values)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("int8", [127, -127, 127, -127]),
        ("int4", [7, -7, 7, -7]),
        ("float8_e4m3fn", [448, -448, 448, -448]),
        ("float8_e5m2", [57344, -57344, 57344, -57344]),
    ],
)
def test_a_given_scale_saturates(dtype, expected):
    x = put([1e6, -1e6, jnp.inf, -jnp.inf])
    q = jaxfused.quantize(x, dtype, axis=0, scale=1.0)
    np.testing.assert_array_equal(q.unpacked().astype(jnp.float32), expected)


def test_a_given_zero_point_saturates_and_shifts():
    x = put([-300.0, -2.5, 0.0, 300.0])
    q = jaxfused.quantize(x, axis=0, scale=1.0, zero_point=100)
    np.testing.assert_array_equal(q.values, [-128, 98, 100, 127])
    np.testing.assert_array_equal(q.dequantize(), [-228, -2, 0, 27])
    q = jaxfused.quantize(x[:2], "int4", axis=0, scale=put([1.0, 2.0]), zero_point=-8)
    np.testing.assert_array_equal(q.unpacked(), [-8, -8])


@pytest.mark.parametrize("dtype", sorted(FORMATS))
def test_zeros_and_the_smallest_numbers(dtype):
    x = jnp.zeros((4, 2)).at[0, 1].set(1e-38)
    for symmetric in (True, not dtype.startswith("int")):
        q = jaxfused.quantize(x, dtype, symmetric=symmetric)
        np.testing.assert_array_equal(q.dequantize()[:, 0], jnp.zeros(4))
        chex.assert_tree_all_finite(q.scale)
        assert (q.scale > 0).all()
        np.testing.assert_allclose(q.dequantize(), x, atol=2e-38)


@pytest.mark.parametrize("dtype", sorted(FORMATS))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_make_their_group_nan(dtype, bad):
    x = jnp.ones((4, 3)).at[1, 1].set(bad)
    for symmetric in (True, not dtype.startswith("int")):
        y = jaxfused.quantize(x, dtype, symmetric=symmetric).dequantize()
        np.testing.assert_array_equal(np.isnan(y), [[False, True, False]] * 4)


def test_nan_under_a_given_scale():
    x = put([jnp.nan, 1.0])
    np.testing.assert_array_equal(jaxfused.quantize(x, "int8", axis=0, scale=1.0).values, [0, 1])
    q = jaxfused.quantize(x, "float8_e5m2", axis=0, scale=1.0)
    np.testing.assert_array_equal(q.dequantize(), x)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_quantize_rows_is_quantize_of_the_last_axis(dtype):
    x = CASES[3].x("bfloat16")
    rows, expected = jaxfused.quantize_rows(x, dtype), jaxfused.quantize(x, dtype, axis=-1)
    chex.assert_trees_all_equal(rows, expected, strict=True)
    assert rows.axis == -1
    assert rows.scale.shape == (*x.shape[:-1], 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_rounded_within_a_program_on_gpu(dtype):
    @jax.jit
    def both(x):
        q = jaxfused.quantize_rows(x, dtype)
        return q, q.dequantize()

    q, dequantized = both(jax.random.normal(jax.random.key(0), (5, 33)))
    expected = np.asarray(q.values, np.float32) * np.asarray(q.scale)
    np.testing.assert_allclose(dequantized, expected, rtol=1e-6)


def test_dtypes_of_jax_are_names_too():
    x = CASES[0].x()
    for dtype in (jnp.int8, jnp.int4, jnp.float8_e4m3fn, jnp.float8_e5m2):
        q = jaxfused.quantize(x, dtype)
        assert q.dtype == jnp.dtype(dtype).name
        assert q.dequantize(jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("case", [CASES[1], CASES[4]], ids=str)
def test_is_a_pytree_to_every_transformation(case):
    quantize = jax.jit(lambda x: jaxfused.quantize(x, case.dtype, **case.options))
    stack = np.stack([case.x(), case.x(seed=1)])
    each = [quantize(x) for x in stack]
    stacked = quantize(stack)

    def assert_same(actual, expected):
        assert actual.axis == expected.axis
        chex.assert_trees_all_equal(actual, expected, strict=True)

    assert_same(jax.tree.map(lambda *a: np.stack(a), *each), stacked)
    assert_same(jax.vmap(quantize)(stack), stacked)
    expected = np.stack([q.dequantize() for q in each])
    np.testing.assert_array_equal(jax.vmap(lambda q: q.dequantize())(stacked), expected)

    def step(layer, q):
        assert q.shape == case.shape
        return layer + 1, q.dequantize()

    _, layers = jax.lax.scan(step, 0, stacked)
    np.testing.assert_array_equal(layers, expected)
    assert_same(jax.jit(lambda q: q, donate_argnums=0)(jax.tree.map(jnp.array, stacked)), stacked)


def test_sharding():
    mesh = jax.make_mesh((len(jax.devices()),), ("features",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "features"))
    q = jaxfused.quantize(jnp.ones((64, 8 * mesh.size)), "int4", group_size=32, symmetric=False)
    placed = jax.device_put(q, sharding)
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(placed))
    np.testing.assert_array_equal(jax.jit(lambda q: q.dequantize())(placed), jnp.ones(q.shape))


def test_checkpoint(tmp_path):
    tree = {"w": jaxfused.quantize(CASES[4].x(), "int4", group_size=64, symmetric=False)}
    tree["v"] = jaxfused.quantize(CASES[0].x(), "float8_e4m3fn")
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", tree)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "checkpoint", jax.eval_shape(lambda: tree))
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(tree), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


COLUMNS = (
    ((96, 3), "int8", {"group_size": 32, "symmetric": False}),
    ((2, 128, 5), "int4", {"group_size": 64, "symmetric": False}),
    ((256, 3), "int4", {"per_tensor": True}),
    ((7, 9), "float8_e4m3fn", {}),
    ((2, 64, 12), "float8_e4m3fn", {"group_size": (32, 4)}),
)


@pytest.mark.parametrize(("shape", "dtype", "options"), COLUMNS, ids=str)
def test_columns_stand_for_what_rows_do(shape, dtype, options):
    x = jax.random.normal(jax.random.key(0), shape)
    rows = jaxfused.quantize(x, dtype, layout="rows", **options)
    columns = jax.jit(lambda x: jaxfused.quantize(x, dtype, layout="columns", **options))(x)
    assert columns.dtype == dtype
    assert columns.shape == shape
    assert columns.groups == rows.groups
    np.testing.assert_array_equal(columns.unpacked(), rows.unpacked())
    np.testing.assert_array_equal(columns.dequantize(), rows.dequantize())
    if len(shape) > 2:
        layer = jax.tree.map(lambda a: a[1], columns)
        np.testing.assert_array_equal(layer.dequantize(), rows.dequantize()[1])


@pytest.mark.parametrize(
    ("shape", "axis", "dtype", "layout"),
    [
        ((3, 128, 2), -2, "int4", "columns"),
        ((64, 2), 0, "int4", "rows"),
        ((64, 2), 0, "nf4", "columns"),
        ((7, 2), 0, "int8", "columns"),
        ((7, 2), 1, "int8", "rows"),
        ((8,), 0, "int8", "rows"),
        ((8, 128, 2), 0, "int4", "rows"),
    ],
)
def test_layout_by_default(shape, axis, dtype, layout):
    """Weights of a product are in columns; what cannot be, and what is none, in rows."""
    x = jax.random.normal(jax.random.key(0), shape)
    q = jaxfused.quantize(x, dtype, axis=axis)
    assert (q.layout, q.shape) == (layout, shape)
    said = jaxfused.quantize(x, dtype, axis=axis, layout="rows")
    assert said.layout == "rows"
    np.testing.assert_array_equal(q.dequantize(), said.dequantize())


def test_checkpoint_of_columns(tmp_path):
    """In a square matrix, shapes do not distinguish the layouts."""
    rows, columns = (jaxfused.quantize(jnp.eye(8), layout=layout) for layout in LAYOUTS)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", {"w": columns})
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            tmp_path / "checkpoint", jax.eval_shape(lambda: {"w": columns})
        )
        np.testing.assert_array_equal(restored["w"].dequantize(), columns.dequantize())
        with pytest.raises(ValueError, match="columns"):
            checkpointer.restore(tmp_path / "checkpoint", jax.eval_shape(lambda: {"w": rows}))


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((64, 3), {"dtype": "int4"}, "64 values along axis -2, but .* blocks of 128"),
        ((64, 3), {"axis": -1}, "axis -2, but x has shape .* and axis -1; pass layout 'rows'"),
        ((64,), {"axis": 0}, "layout 'columns' is for weights"),
        ((64, 3), {"layout": "tiles"}, "layout is 'tiles'; pass one of 'rows', 'columns'"),
    ],
)
def test_errors_of_columns(shape, options, message):
    with pytest.raises(ValueError, match=message):
        jaxfused.quantize(jnp.ones(shape), **({"layout": "columns"} | options))


@pytest.mark.parametrize("case", CASES[1:7:3], ids=str)
def test_fake_quantize_is_quantize_and_dequantize(case):
    for dtype in ("float32", "bfloat16"):
        x = case.x(dtype)
        y = jaxfused.fake_quantize(x, case.dtype, **case.options)
        q = jaxfused.quantize(x, case.dtype, **case.options)
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, q.dequantize(dtype))


@pytest.mark.parametrize("dtype", sorted(FORMATS))
def test_gradient_of_fake_quantize_is_zero_where_it_clips(dtype):
    largest, clipped_from = FORMATS[dtype].largest, FORMATS[dtype].clipped_from
    inside, outside = 0.5 * (largest + clipped_from), 1.01 * clipped_from
    x = 0.25 * put([0.0, inside, -inside, outside, -outside, jnp.inf])
    dy = np.arange(1, 7, dtype=np.float32)

    @jax.jit
    def f(x):
        y, vjp = jax.vjp(lambda x: jaxfused.fake_quantize(x, dtype, axis=0, scale=0.25), x)
        return y, vjp(dy)[0]

    y, dx = f(x)
    np.testing.assert_array_equal(y, 0.25 * largest * np.array([0, 1, -1, 1, -1, 1]))
    np.testing.assert_array_equal(dx, dy * np.array([1, 1, 1, 0, 0, 0]))
    # Scales that `quantize` chooses clip nothing.
    x = np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32)
    dx = jax.jit(jax.grad(lambda x: jaxfused.fake_quantize(x, dtype).sum()))(x)
    np.testing.assert_array_equal(dx, jnp.ones_like(x))


def test_gradient_of_fake_quantize_with_a_zero_point():
    x = put([-236.0, -227.0, 0.0, 27.0, 29.0])
    dx = jax.grad(lambda x: jaxfused.fake_quantize(x, axis=0, scale=1.0, zero_point=100).sum())(x)
    np.testing.assert_array_equal(dx, [0, 1, 1, 1, 0])


def test_quantize_has_no_gradient():
    dx = jax.grad(lambda x: jaxfused.quantize(x).dequantize().sum())(jnp.ones((4, 4)))
    np.testing.assert_array_equal(dx, jnp.zeros((4, 4)))


def test_fake_quantize_transforms():
    assert_transforms(lambda x: jaxfused.fake_quantize(x, "int4", symmetric=False), CASES[0].x())
    # check_grads would differentiate a staircase; forward mode is the identity as well.
    x = CASES[0].x()
    _, dy = jax.jvp(jaxfused.fake_quantize, (x,), (2.0 * x,))
    np.testing.assert_array_equal(dy, 2.0 * x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int2"}, "dtype 'int2' is not known; pass one of 'int8'"),
        ({"x": jnp.ones((4, 4), int)}, "x has dtype int32"),
        ({"axis": 2}, "axis is 2, but x has shape .* from -2 to 1"),
        ({"x": jnp.ones(4)}, r"axis is -2, but x has shape \(4,\)"),
        ({"x": jnp.ones((5, 4)), "dtype": "int4"}, "two int4 are packed .*even size"),
        ({"group_size": 3}, "group_size is 3, but it must divide the 4 values"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": (2, 3)}, r"group_size is \(2, 3\), .* 4 values along axis -1"),
        ({"group_size": (2, 2, 2)}, "a pair is for blocks of weights"),
        ({"group_size": (2, 2), "axis": 1}, "a pair is for blocks .* axis is 1"),
        ({"group_size": 2, "per_tensor": True}, "group_size=2 was passed with per_tensor"),
        ({"dtype": "float8_e5m2", "symmetric": False}, "dtype 'float8_e5m2' is symmetric"),
        ({"dtype": "float8_e5m2", "scale": 1.0, "zero_point": 1}, "'float8_e5m2' is symmetric"),
        ({"zero_point": 1}, "zero_point was passed without a scale"),
        ({"scale": 1.0, "per_tensor": True}, "scale was passed with"),
        ({"scale": jnp.ones((3, 1))}, r"scale has shape \(3, 1\)"),
        ({"scale": jnp.ones(4)}, r"scale has shape \(4,\)"),
        ({"scale": 1.0, "zero_point": 0.5}, "zero_point has dtype float32"),
        (
            {"scale": jnp.ones((1, 4)), "zero_point": jnp.ones(4, int)},
            r"zero_point has shape \(4,\)",
        ),
    ],
)
def test_errors(change, message):
    arguments = {"x": jnp.ones((4, 4))} | change
    for name in ("quantize", "fake_quantize"):
        with pytest.raises(ValueError, match=f"^{name}: .*{message}"):
            getattr(jaxfused, name)(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int4"}, "dtype is 'int4', but activations are quantised to a byte"),
        ({"x": jnp.ones(())}, r"axis is -1, but x has shape \(\)"),
        ({"implementation": "cuda"}, "cannot run here: it needs an NVIDIA GPU"),
        ({"implementation": "pallas"}, "cannot run here: it needs a Hopper GPU"),
    ],
)
def test_quantize_rows_errors(change, message):
    with pytest.raises(ValueError, match=f"quantize_rows: .*{message}"):
        jaxfused.quantize_rows(**({"x": jnp.ones((4, 4))} | change))
