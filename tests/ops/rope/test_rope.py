import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import jaxfused
from jaxfused.ops.rope import rope_cuda, rope_xla
from pallas_kernels.rows import rope as pallas_rope
from tests.cases.rope import CASES, Case
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.choices import skip_where_it_cannot_run
from tests.support.grids import pairwise, parametrize
from tests.support.lowering import kernels
from tests.support.transforms import assert_transforms

INTERPRETED = (
    Case((2, 5), 4, 2, 32),
    Case((2, 4), 2, 2, 96, rotary_dim=64, first=(7, 1000)),
    Case((6,), 8, 0, 64, rotary_dim=32),
)
"""Small cases that the Pallas kernel supports in float32."""

KERNEL_CASES = (
    *CASES,
    *INTERPRETED,
    Case((4, 197), 12, 12, 64),
    Case((2, 37), 32, 8, 128, interleaved=True),
    Case((2, 37), 32, 8, 128, rotary_dim=64, first=(3, 1000)),
    Case((3, 50), 7, 1, 80, rotary_dim=32),
    # Vectors of two and of four values, an odd number of features that are not rotated, single values.
    Case((2, 37), 6, 2, 72, rotary_dim=36),
    Case((2, 37), 6, 2, 80, rotary_dim=20, interleaved=True),
    Case((2, 37), 6, 2, 28, rotary_dim=16),
    Case((3, 50), 30, 3, 72, rotary_dim=34),
    Case((1, 9), 3, 3, 256, rotary_dim=64, interleaved=True),
    Case((1, 1), 28, 4, 128, first=(4000,)),
)
LIMITS = dict(
    compute_capability=(9, 0),
    length=197,
    heads=12,
    key_heads=12,
    head_size=64,
    rotary_dim=64,
    interleaved=False,
    dtype=jnp.dtype("bfloat16"),
    k_dtype=jnp.dtype("bfloat16"),
)
on_gpu = pytest.mark.gpu
each_implementation = pytest.mark.parametrize(
    "implementation",
    ["xla", pytest.param("pallas", marks=on_gpu), pytest.param("cuda", marks=on_gpu)],
)


def pairs(case):
    """Returns the features (a, b) of each pair."""
    rotary_dim = case.rotary_dim or case.head_size
    i = np.arange(rotary_dim // 2)
    return (2 * i, 2 * i + 1) if case.interleaved else (i, i + rotary_dim // 2)


def rotations(case, theta=10_000.0):
    """Returns the matrices [..., T, H, H] in float64 that rope multiplies every head by."""
    a, b = pairs(case)
    angles = np.asarray(case.positions(), np.float64)[..., None] * theta ** (
        -np.arange(len(a)) / len(a)
    )
    matrix = np.broadcast_to(np.eye(case.head_size), (*angles.shape[:-1],) + (case.head_size,) * 2)
    matrix = matrix.copy()
    matrix[..., a, a] = matrix[..., b, b] = np.cos(angles)
    matrix[..., a, b], matrix[..., b, a] = -np.sin(angles), np.sin(angles)
    return matrix


def fused_rope(case, implementation="xla"):
    def f(q, k):
        return jaxfused.rope(
            q,
            k if case.key_heads else None,
            positions=case.positions(),
            rotary_dim=case.rotary_dim,
            interleaved=case.interleaved,
            implementation=implementation,
        )

    return f


def skip_unless_supported(case, dtype, implementation):
    skip_where_it_cannot_run(fused_rope(case, implementation), *case.arguments(dtype))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_a_rotation_and_its_gradient_the_inverse(case):
    matrix = rotations(case)
    q, k = case.arguments(jnp.float32)

    @jax.jit
    def there_and_back(q, k):
        rotated, vjp = jax.vjp(fused_rope(case), q, k)
        return rotated, vjp(rotated)

    rotated, back = there_and_back(q, k)
    for x, y in zip((q, k), rotated, strict=True):
        expected = np.einsum("...ij,...nj->...ni", matrix, np.asarray(x, np.float64))
        # Angles are float32: at position 1000 an angle is off by up to 3e-5.
        np.testing.assert_allclose(y, expected, atol=1e-4 if case.first else 1e-6)
    for x, y in zip((q, k), back, strict=True):
        np.testing.assert_allclose(y, x, atol=1e-6)


def check(case, dtype, implementation):
    """Compares values and gradients of q and k with a rotation written pair by pair."""
    rotary_dim = case.rotary_dim or case.head_size
    cos, sin = jaxfused.rope_tables(case.positions(), rotary_dim)
    a, b = pairs(case)

    def plain(q, k):
        wide = jnp.promote_types(q.dtype, jnp.float32)
        c, s = (angles[..., None, :].astype(wide) for angles in (cos, sin))

        def rotate(x):
            x = x.astype(wide)
            x = (
                x.at[..., a]
                .set(x[..., a] * c - x[..., b] * s)
                .at[..., b]
                .set(x[..., b] * c + x[..., a] * s)
            )
            return x.astype(q.dtype)

        return (rotate(q), rotate(k)) if case.key_heads else rotate(q)

    def ours(q, k):
        return jaxfused.rope(
            q,
            k if case.key_heads else None,
            cos=cos,
            sin=sin,
            interleaved=case.interleaved,
            implementation=implementation,
        )

    assert_values_and_gradients(ours, plain, *case.arguments(jnp.dtype(dtype)), cotangents=1)


@parametrize("dtype", ["float32", "bfloat16", "float16"], quick=(1,))
@pytest.mark.parametrize(
    ("case", "implementation"),
    [
        *((case, "xla") for case in CASES),
        *(
            pytest.param(case, name, marks=on_gpu)
            for case in KERNEL_CASES
            for name in ("pallas", "cuda")
        ),
    ],
    ids=str,
)
def test_is_as_accurate_as_jax_numpy(case, dtype, implementation):
    skip_unless_supported(case, dtype, implementation)
    check(case, dtype, implementation)


@pytest.mark.usefixtures("interpreted_hopper")
@parametrize("case", INTERPRETED, quick=(1,))
def test_pallas_in_the_interpreter(case):
    check(case, "float32", "pallas")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("interpreted_hopper")
def test_pallas_bfloat16_in_the_interpreter():
    check(Case((2, 5), 4, 4, 64), "bfloat16", "pallas")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("race_detector")
def test_pallas_does_not_race():
    # Only whole tiles: the last tile of another length rewrites positions of its neighbour with the same
    # values, which the detector reports as a race.
    case = Case((1, 8), 4, 2, 32)
    jax.block_until_ready(fused_rope(case, "pallas")(*case.arguments(jnp.float32)))


@pytest.mark.usefixtures("hopper")
@parametrize(
    ("case", "dtype"),
    pairwise(
        [case for case in KERNEL_CASES if not case.interleaved], ["bfloat16", "float32", "float16"]
    ),
    quick=(9, 15),
)
def test_pallas_lowers_for_cuda(case, dtype):
    skip_unless_supported(case, dtype, "pallas")
    f = fused_rope(case, "pallas")
    both = kernels(lambda *args: (f(*args), jax.vjp(f, *args)[1](f(*args))), *case.arguments(dtype))
    assert set(both) == {"rope_kernel"}


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_distance_alone(interleaved):
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 16))

    def score(position, other):
        q_rotated = jaxfused.rope(q, positions=jnp.array([position]), interleaved=interleaved)
        k_rotated = jaxfused.rope(k, positions=jnp.array([other]), interleaved=interleaved)
        return jnp.sum(q_rotated * k_rotated)

    np.testing.assert_allclose(score(3, 1), score(13, 11), rtol=1e-5)
    assert abs(score(3, 1) - score(3, 2)) > 1e-2


def test_offset_is_a_first_position():
    q = jax.random.normal(jax.random.key(0), (2, 3, 1, 8))
    expected = jaxfused.rope(q, positions=put([[4, 5, 6], [9, 10, 11]]))
    np.testing.assert_array_equal(jaxfused.rope(q, offset=jnp.array([4, 9])), expected)
    np.testing.assert_array_equal(jaxfused.rope(q, offset=4)[0], expected[0])
    step = jax.jit(lambda q, offset: jaxfused.rope(q, offset=offset))
    np.testing.assert_allclose(step(q, jnp.int32(4))[0], expected[0], rtol=1e-6)


@parametrize(
    ("shape", "own", "interleaved"),
    pairwise([(2, 3, 5, 2, 8), (2, 5, 1, 8), (0, 5, 2, 8)], [False, True], [False, True]),
    quick=(1, 2, 4),
)
def test_merged_axes_have_the_same_bits(shape, own, interleaved):
    x = put(np.random.default_rng(0).normal(size=shape), jnp.float32)
    positions = np.arange(math.prod(shape[:-2])).reshape(shape[:-2]) if own else np.arange(5)
    cos, sin = jaxfused.rope_tables(jnp.asarray(positions), 6)

    def rotated(in_one_piece):
        def f(x):
            return rope_xla.rotate(x, cos, sin, interleaved=interleaved, in_one_piece=in_one_piece)

        y, vjp = jax.vjp(f, x)
        return y, *vjp(y)

    chex.assert_trees_all_equal(rotated(True), rotated(False))


@pytest.mark.usefixtures("interpreted_hopper")
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_backward_keeps_the_angles_alone(implementation):
    case = INTERPRETED[0]
    q, k = case.arguments(jnp.float32)
    _, vjp = jax.vjp(fused_rope(case, implementation), q, k)
    # XLA may save the angles of both halves of a head.
    assert all(a.size <= case.rows[-1] * case.head_size for a in jax.tree.leaves(vjp))


@each_implementation
def test_transforms(implementation):
    case = INTERPRETED[1]
    assert_transforms(fused_rope(case, implementation), *case.arguments(jnp.float32))


@pytest.mark.usefixtures("interpreted_hopper")
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("batched", ["q", "cos", "q and cos"])
def test_vmap_over_what_is_shared(batched, per_row):
    q = jax.random.normal(jax.random.key(0), (2, 3, 4, 2, 32))
    cos = jax.random.normal(jax.random.key(1), (2, 3, 4, 16) if per_row else (2, 4, 16))
    in_axes = [0 if name in batched else None for name in ("q", "cos")]

    def f(implementation):
        def rotated(q, cos):
            return jaxfused.rope(q, cos=cos, sin=0.5 * cos, implementation=implementation)

        args = [a if axis == 0 else a[0] for a, axis in zip((q, cos), in_axes, strict=True)]
        return jax.vmap(rotated, in_axes)(*args)

    np.testing.assert_allclose(f("pallas"), f("xla"), atol=1e-6)


@pytest.mark.usefixtures("interpreted_hopper")
def test_gradients_of_angles_and_of_gradients():
    q, k = INTERPRETED[0].arguments(jnp.float32)
    angles = np.random.default_rng(1).normal(size=(5, 16)).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(implementation):
        def loss(q, k, angles):
            q, k = jaxfused.rope(
                q, k, cos=jnp.cos(angles), sin=jnp.sin(angles), implementation=implementation
            )
            return jnp.sum(jnp.sin(q)) + jnp.sum(k**3)

        def squared_gradient(q):
            return jnp.sum(jax.grad(loss)(q, k, angles) ** 2)

        return jax.grad(loss, (0, 1, 2))(q, k, angles), jax.grad(squared_gradient)(q)

    chex.assert_trees_all_close(gradients("pallas"), gradients("xla"), rtol=1e-5, atol=1e-5)


@on_gpu
@pytest.mark.parametrize("implementation", ["pallas", "cuda"])
def test_same_bits_every_time(implementation):
    case = Case((4, 197), 12, 12, 64)
    q, k = case.arguments(jnp.bfloat16)
    f = jax.jit(fused_rope(case, implementation))
    chex.assert_trees_all_equal(f(q, k), f(q, k))


@pytest.mark.parametrize(
    ("head_size", "rotary_dim", "interleaved", "expected"),
    [
        (64, 64, False, 16),
        (72, 72, False, 8),
        (72, 36, False, 4),
        (72, 36, True, 8),
        (9, 2, True, 2),
    ],
)
def test_what_the_cuda_kernel_moves_at_a_time(head_size, rotary_dim, interleaved, expected):
    found = rope_cuda.access_bytes(head_size, rotary_dim, 2, interleaved=interleaved)
    assert found == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(compute_capability=None), "an NVIDIA GPU"),
        (dict(compute_capability=(7, 0)), "7.5 or later, and this GPU has 7.0"),
        (dict(dtype=jnp.dtype("float64")), "q has dtype float64"),
        (dict(k_dtype=jnp.dtype("float32")), "q has bfloat16, k float32"),
    ],
)
def test_limits_of_cuda(change, reason):
    assert reason in rope_cuda.why_unsupported(**LIMITS | change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(compute_capability=(10, 0)), "needs a Hopper GPU"),
        (dict(dtype=jnp.dtype("float64")), "got float64 and bfloat16"),
        (dict(interleaved=True), "got interleaved pairs"),
        (dict(length=3), "at least 4, got 3"),
        (dict(head_size=80, rotary_dim=80, heads=3), "40 features of 3 heads"),
        (dict(head_size=65), "1 features of 12 heads"),
        (dict(heads=1, key_heads=1, rotary_dim=32), "16 features of 1 heads"),
    ],
)
def test_limits_of_pallas(change, reason):
    assert pallas_rope.why_unsupported(**LIMITS) is None
    assert reason in pallas_rope.why_unsupported(**LIMITS | change)


@settings(max_examples=40)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 9),
    heads=st.tuples(st.integers(1, 12), st.integers(0, 12)),
    head_size=st.integers(1, 128).map(lambda n: 2 * n),
    part=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_pallas_traces_whatever_it_supports(batch, length, heads, head_size, part, dtype):
    rotary_dim = max(2, head_size // part // 2 * 2)
    change = dict(
        length=length,
        heads=heads[0],
        key_heads=heads[1],
        head_size=head_size,
        rotary_dim=rotary_dim,
        dtype=jnp.dtype(dtype),
        k_dtype=jnp.dtype(dtype),
    )
    if pallas_rope.why_unsupported(**LIMITS | change) is not None:
        return
    q, k = (jax.ShapeDtypeStruct((batch, length, n, head_size), dtype) for n in heads)
    angles = jax.ShapeDtypeStruct((1, length, rotary_dim // 2), jnp.float32)
    rotate = functools.partial(pallas_rope.rotate, inverse=False)
    jax.eval_shape(rotate, q, k if heads[1] else None, angles, angles)


@pytest.mark.parametrize("rotate", [pallas_rope.rotate, rope_cuda.rotate])
def test_kernels_take_no_elements(rotate):
    angles = jnp.zeros((1, 4, 8))
    interleaved = dict(interleaved=False) if rotate is rope_cuda.rotate else {}
    for shape in ((0, 4, 2, 16), (2, 4, 0, 16)):
        x = jnp.zeros(shape)
        for k in (None, x):
            q_rotated, k_rotated = rotate(x, k, angles, angles, inverse=False, **interleaved)
            assert q_rotated.shape == shape and (k_rotated is None) == (k is None)


def test_derivatives_of_both_modes():
    with jax.enable_x64(True):
        args = jax.tree.map(lambda a: np.asarray(a, np.float64), CASES[2].arguments(jnp.float32))
        check_grads(jax.jit(fused_rope(CASES[2])), args, order=1)


def test_axial_tables():
    cos, sin = jaxfused.axial_rope_tables(3, 5, 16, theta=100.0)
    assert cos.shape == sin.shape == (15, 8) and cos.dtype == jnp.float32
    for row, column in ((0, 0), (2, 1), (1, 4)):
        angles = [p * 100.0 ** (-i / 4) for p in (row, column) for i in range(4)]
        np.testing.assert_allclose(cos[row * 5 + column], np.cos(angles), atol=1e-6)
        np.testing.assert_allclose(sin[row * 5 + column], np.sin(angles), atol=1e-6)


# --- scalings, against the loops of transformers' modeling_rope_utils.py, pair by pair -------------


def test_linear_and_ntk():
    base = jaxfused.RopeScaling().frequencies(8, 10_000.0)
    np.testing.assert_allclose(base, [1.0, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(jaxfused.LinearRope(4.0).frequencies(8, 10_000.0), base / 4.0)
    ntk = jaxfused.NTKRope(4.0).frequencies(8, 10_000.0)
    np.testing.assert_allclose(ntk, (10_000.0 * 4.0 ** (8 / 6)) ** (-np.arange(0, 8, 2) / 8))
    np.testing.assert_allclose([ntk[0], ntk[-1]], [base[0], base[-1] / 4.0])


@pytest.mark.parametrize(
    ("dim", "theta", "factor", "length"), [(64, 1e4, 8.0, 4096), (128, 1e6, 2.0, 32768)]
)
def test_yarn(dim, theta, factor, length):
    def correction_dim(rotations):
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(correction_dim(32)), 0), min(math.ceil(correction_dim(1)), dim - 1)
    expected = []
    for i in range(dim // 2):
        extrapolated = 1.0 / theta ** (2 * i / dim)
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        expected.append(extrapolated / factor * ramp + extrapolated * (1.0 - ramp))
    scaling = jaxfused.YarnRope(factor, length)
    np.testing.assert_allclose(scaling.frequencies(dim, theta), expected, rtol=1e-12)
    cos, _ = jaxfused.rope_tables(jnp.arange(3), dim, theta=theta, scaling=scaling)
    np.testing.assert_allclose(cos[0], 0.1 * math.log(factor) + 1.0, rtol=1e-6)
    assert jaxfused.YarnRope(factor, length, attention=1.5).attention_factor() == 1.5
    assert jaxfused.YarnRope(1.0, length).attention_factor() == 1.0


def test_llama3():
    factor, low, high, length, theta, dim = 8.0, 1.0, 4.0, 8192, 500_000.0, 128
    expected = []
    for i in range(dim // 2):
        frequency = theta ** (-2 * i / dim)
        wavelength = 2 * math.pi / frequency
        if wavelength < length / high:
            expected.append(frequency)
        elif wavelength > length / low:
            expected.append(frequency / factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    frequencies = jaxfused.Llama3Rope().frequencies(dim, theta)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.ones((3, 8))}, r"q has shape \(3, 8\)"),
        ({"q": jnp.ones((3, 2, 8), int)}, "q has dtype int32"),
        ({"k": jnp.ones((4, 2, 8))}, r"k has shape \(4, 2, 8\).*\(3, 2, 8\)"),
        ({"rotary_dim": 5}, "rotary_dim is 5"),
        ({"rotary_dim": 10}, r"cos has shape \(3, 5\)"),
        ({"positions": jnp.arange(4)}, r"cos has shape \(4, 4\).*\(3, 4\)"),
        ({"positions": jnp.arange(3), "offset": 2}, "positions and offset were passed"),
        ({"cos": jnp.ones((3, 4))}, "one of cos and sin"),
        ({"cos": jnp.ones((3, 4)), "sin": jnp.ones((3, 3))}, "sin has shape"),
        ({"cos": jnp.ones((3, 8)), "sin": jnp.ones((3, 8))}, r"cos has shape \(3, 8\)"),
        ({"cos": jnp.ones((3, 4)), "sin": jnp.ones((3, 4)), "rotary_dim": 8}, "made from"),
        ({"cos": jnp.ones((3, 4)), "sin": jnp.ones((3, 4)), "offset": 2}, "made from"),
        ({"cos": jnp.ones((3, 4)), "sin": jnp.ones((3, 4)), "offset": jnp.int32(0)}, "made from"),
        ({"cos": jnp.ones((3, 4)), "sin": jnp.ones((3, 4)), "theta": 5e5}, "made from"),
        ({"implementation": "cuda"}, "it needs an NVIDIA GPU"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=f"rope.*: .*{message}"):
        jaxfused.rope(**({"q": jnp.ones((3, 2, 8))} | change))
    with pytest.raises(ValueError, match="axial_rope_tables: rotary_dim is 6"):
        jaxfused.axial_rope_tables(2, 2, 6)
    with pytest.raises(ValueError, match="axial_rope_tables: height is -1"):
        jaxfused.axial_rope_tables(-1, 2, 8)
    with pytest.raises(ValueError, match=r"axial_rope_tables: frequencies has shape \(2, 3\)"):
        jaxfused.axial_rope_tables(2, 2, 8, frequencies=jnp.ones((2, 3)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jaxfused.LinearRope(0.0), "LinearRope: factor is 0.0"),
        (lambda: jaxfused.LinearRope("4"), "LinearRope: factor is '4'"),
        (lambda: jaxfused.DynamicNTKRope(2.0, 0), "DynamicNTKRope: trained_length is 0"),
        (lambda: jaxfused.YarnRope(math.nan, 32), "YarnRope: factor is nan"),
        (lambda: jaxfused.YarnRope(2.0, 32, 1.0, 32.0), "YarnRope: beta_slow is 32.0"),
        (lambda: jaxfused.Llama3Rope(high_freq_factor=0.5), "Llama3Rope: low_freq_factor is 1.0"),
        (lambda: jaxfused.LongRope((0.0,), (1.0,), 32), "LongRope: short_factor"),
        (lambda: jaxfused.ProportionalRope(-0.5), "ProportionalRope: fraction is -0.5"),
        (lambda: jaxfused.NTKRope(2.0).frequencies(2, 1e4), "NTKRope: rotary_dim is 2"),
    ],
)
def test_scalings_without_frequencies(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_step_in_place_of_llama3s_ramp():
    """Llama 4 Scout's config has 1.0 for both factors, so that the ramp has no width."""
    scaling = jaxfused.Llama3Rope(16.0, 8192, 1.0, 1.0)
    plain = 5e5 ** (-np.arange(0, 128, 2) / 128)
    expected = np.where(8192 * plain / (2 * np.pi) > 1.0, plain, plain / 16.0)
    with np.errstate(all="raise"):
        np.testing.assert_allclose(scaling.frequencies(128, 5e5), expected, rtol=1e-12)
