import functools
from dataclasses import dataclass

import chex
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import jaxfused
from jaxfused import dispatch
from jaxfused.ops.norm import group_norm_cuda, group_norm_slab_cuda, group_norm_xla
from jaxfused.runtime.activation import activate
from tests.cases.group_norm import CASES, KERNEL_CASES, Case
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.lowering import kernels
from tests.support.transforms import assert_transforms

pytestmark = pytest.mark.exhaustive


def plain_group_norm(
    x,
    scale,
    bias,
    residual,
    image_scale=None,
    image_shift=None,
    *,
    num_groups,
    activation=None,
    epsilon=1e-6,
):
    """Computes the norm in plain jax.numpy, with all arithmetic in x's dtype."""
    images = jnp.moveaxis(x.reshape(*x.shape[:-1], num_groups, x.shape[-1] // num_groups), -2, 1)
    axes = tuple(range(2, images.ndim))
    mean, var = images.mean(axes, keepdims=True), images.var(axes, keepdims=True)
    y = jnp.moveaxis((images - mean) / jnp.sqrt(var + epsilon), 1, -2).reshape(x.shape)
    y = y if scale is None else y * scale.astype(x.dtype)
    y = y if bias is None else y + bias.astype(x.dtype)
    along = (slice(None), *(None for _ in x.shape[1:-1]))
    y = y if image_scale is None else y * (1 + image_scale)[along]
    y = y if image_shift is None else y + image_shift[along]
    return activate(activation, y if residual is None else y + residual)


def ours_and_plain(case, implementation=None):
    options = dict(num_groups=case.num_groups, activation=case.activation)

    def ours(x, scale, bias, residual, image_scale, image_shift):
        return jaxfused.group_norm(
            x,
            scale,
            bias,
            residual=residual,
            image_scale=image_scale,
            image_shift=image_shift,
            implementation=implementation,
            **options,
        )

    return ours, lambda *args: plain_group_norm(*args, **options)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, "float32") for case in CASES] + [(CASES[1], "bfloat16"), (CASES[4], "float16")],
    ids=str,
)
def test_is_as_accurate_as_jax_numpy(case, dtype):
    ours, plain = ours_and_plain(case)
    args = case.arguments(jnp.dtype(dtype))
    assert_values_and_gradients(ours, plain, *args)
    assert jax.eval_shape(ours, *args).dtype == dtype


@settings(max_examples=3)
@given(
    batch=st.integers(1, 3),
    spatial=st.lists(st.integers(1, 7), max_size=3),
    groups=st.integers(1, 5),
    group_size=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_odd_shapes_against_flax(batch, spatial, groups, group_size, seed):
    rng = np.random.default_rng(seed)
    channels = groups * group_size
    x = rng.normal(scale=3.0, size=(batch, *spatial, channels)).astype(np.float32)
    scale, bias = rng.normal(size=(2, channels)).astype(np.float32)
    module = flax.linen.GroupNorm(num_groups=groups, epsilon=1e-2, use_fast_variance=False)

    @jax.jit
    def ours_and_stock(x, scale, bias):
        ours = jaxfused.group_norm(x, scale, bias, group_size=group_size, epsilon=1e-2)
        return ours, module.apply({"params": {"scale": scale, "bias": bias}}, x)

    np.testing.assert_allclose(*ours_and_stock(x, scale, bias), atol=2e-5, rtol=2e-5)


def test_variance_is_not_a_difference_of_means():
    x = 1e4 + put([1.0, -1.0] * 8).reshape(1, 16, 1)
    np.testing.assert_allclose(jaxfused.group_norm(x, num_groups=1), x - 1e4, rtol=1e-3)


def test_nan_stays_in_its_group():
    x = jnp.ones((2, 3, 4)).at[0, 1, 0].set(jnp.nan)
    y = jaxfused.group_norm(x, num_groups=2)
    np.testing.assert_array_equal(np.isnan(y[0]), [[True, True, False, False]] * 3)
    assert not np.isnan(y[1]).any()


def test_backward_keeps_x_in_its_dtype():
    x = jnp.ones((2, 8, 8), jnp.bfloat16)
    _, vjp = jax.vjp(lambda x: jaxfused.group_norm(x, num_groups=2, activation="silu"), x)
    large = [a.dtype for a in jax.tree.leaves(vjp) if a.size >= x.size]
    assert large == [jnp.bfloat16]


def test_transforms():
    x, scale, bias, residual, *_ = CASES[1].arguments(jnp.float32)
    assert_transforms(
        lambda x, scale, bias, residual: jaxfused.group_norm(
            x, scale, bias, num_groups=2, residual=residual, activation="gelu_tanh"
        ),
        x,
        scale,
        bias,
        residual,
    )


def test_derivatives_of_both_orders_and_modes():
    with jax.enable_x64(True):
        args = CASES[1].arguments(jnp.float64)[:4]
        check_grads(
            jax.jit(
                lambda x, scale, bias, residual: jaxfused.group_norm(
                    x, scale, bias, num_groups=2, residual=residual, activation="silu"
                )
            ),
            args,
            order=2,
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.ones(4)}, r"x has shape \(4,\), but it needs a batch axis"),
        ({"x": jnp.ones((2, 3, 0))}, r"x has shape \(2, 3, 0\)"),
        ({"x": jnp.ones((2, 4), jnp.int32)}, "x has dtype int32"),
        ({"scale": jnp.ones(3)}, r"scale has shape \(3,\), but x has 4 channels .*\(4,\)"),
        ({"bias": jnp.ones(3)}, r"bias has shape \(3,\)"),
        ({"residual": jnp.ones((2, 4))}, r"residual has shape \(2, 4\).*\(2, 3, 4\)"),
        ({"num_groups": 3}, "num_groups is 3, but it must divide the 4 channels"),
        ({"num_groups": 2.0}, "num_groups is 2.0, .* pass an int"),
        ({"num_groups": None, "group_size": 0}, "group_size is 0"),
        ({"group_size": 2}, "num_groups=2 and group_size=2 were passed"),
        ({"num_groups": None}, "exactly one of them"),
        ({"epsilon": jnp.ones(2)}, "epsilon is .*pass a Python float"),
        ({"activation": "swish"}, "activation='swish' is not known"),
        ({"image_scale": jnp.ones((2, 3))}, r"image_scale has shape \(2, 3\).*\(2, 4\)"),
        ({"image_shift": jnp.ones(4)}, r"image_shift has shape \(4,\)"),
        ({"implementation": "cuda"}, "it needs an NVIDIA GPU"),
        ({"implementation": "pallas"}, "there is no Pallas kernel of group_norm"),
        ({"implementation": "triton"}, "'triton' was passed"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=f"group_norm: .*{message}"):
        jaxfused.group_norm(**({"x": jnp.ones((2, 3, 4)), "num_groups": 2} | change))


# --- kernels --------------------------------------------------------------------------------------

FORWARD, BACKWARD = "jaxfused_group_norm_forward", "jaxfused_group_norm_backward"
SLAB = "jaxfused_group_norm_slab"


@dataclass(frozen=True)
class Once:
    """A case in a single pass: (slices per image, images at a time) for forward and backward."""

    case: Case
    forward: tuple[int, int]
    backward: tuple[int, int]
    dtype: str = "bfloat16"

    def config(self, sizes):
        return group_norm_cuda.Config(*sizes, once=True)


_SILU = dict(activation="silu", parameter_dtype="float32")
ONCE = (
    Once(Case((1, 30, 64), 32, **_SILU), (2, 1), (3, 1)),
    Once(Case((3, 7, 43, 64), 32, **_SILU), (4, 1), (3, 1)),
    Once(Case((5, 137, 320), 32, residual=True, **_SILU), (2, 2), (2, 2)),
    Once(Case((5, 137, 320), 32, modulated=True, **_SILU), (2, 2), (2, 2)),
    Once(Case((2, 65, 512), 512, activation="relu2"), (2, 7), (4, 1)),
    Once(Case((7, 95, 128), 32, activation="gelu_tanh"), (1, 4), (1, 3), "float32"),
    Once(Case((3, 331, 64), 1, scale=False, bias=False), (2, 2), (4, 1), "float16"),
    Once(Case((3, 5, 8), 4, activation="quick_gelu"), (4, 1), (1, 3)),
)
"""Slices of different lengths, rows that leave threads idle, and more or fewer images than teams."""


def stand_in_forward(x, residual, scale, bias, *, groups, save_statistics, **options):
    del save_statistics
    keywords = {name: options[name] for name in ("epsilon", "activation")}
    scale, bias = (a[0] if a is not None and a.shape[0] == 1 else a for a in (scale, bias))
    return group_norm_xla.norm_and_statistics(
        x, residual, scale, bias, num_groups=groups, **keywords
    )


def stand_in_backward(
    dy, x, residual, mean, rstd, scale, bias, *statistics, groups, activation, **options
):
    del options
    scale, bias = (a[0] if a is not None and a.shape[0] == 1 else a for a in (scale, bias))
    operands = (dy, x, residual, mean, rstd, scale, bias, *statistics)
    return group_norm_xla.gradient(*operands, num_groups=groups, activation=activation)


@pytest.fixture
def stand_ins(with_library, monkeypatch):
    """Replaces the kernels by the reference, to test the operator around them."""
    for module in (group_norm_cuda, group_norm_slab_cuda):
        monkeypatch.setattr(module, "forward", stand_in_forward)
    monkeypatch.setattr(group_norm_cuda, "backward", stand_in_backward)


@pytest.mark.parametrize("case", [c for c in CASES if 0 not in c.shape], ids=str)
def test_the_way_to_the_kernels(case, stand_ins):
    ours, plain = ours_and_plain(case, "cuda")
    assert_values_and_gradients(ours, plain, *case.arguments(jnp.float32))


def test_transforms_of_the_way_to_the_kernels(stand_ins):
    x, scale, bias, residual, image_scale, image_shift = Case(
        (3, 7, 6), 2, residual=True, modulated=True
    ).arguments(jnp.float32)

    def f(x, scale, bias, residual, image_scale, image_shift):
        return jaxfused.group_norm(
            x,
            scale,
            bias,
            num_groups=2,
            residual=residual,
            image_scale=image_scale,
            image_shift=image_shift,
            activation="silu",
            implementation="cuda",
        )

    assert_transforms(f, x, scale, bias, residual, image_scale, image_shift)


@pytest.mark.parametrize("in_axes", [(0, None, None), (0, 0, None), (None, 0, 0)], ids=str)
def test_vmap_with_shared_operands(in_axes, stand_ins):
    rng = np.random.default_rng(0)
    shapes = [(3, 5, 8), (8,), (8,)]
    args = [
        put(rng.normal(size=shape if axis is None else (2, *shape)), jnp.float32)
        for shape, axis in zip(shapes, in_axes, strict=True)
    ]

    def results(implementation):
        def loss(x, scale, bias):
            y = jaxfused.group_norm(
                x, scale, bias, num_groups=2, activation="silu", implementation=implementation
            )
            return jnp.sum(jnp.sin(y)), y

        gradient = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
        return jax.jit(jax.vmap(gradient, in_axes))(*args)

    chex.assert_trees_all_close(results("cuda"), results("xla"), rtol=2e-5, atol=2e-5)


def test_one_kernel_each_way(with_library):
    x = jax.ShapeDtypeStruct((2, 9, 9, 64), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((64,), jnp.float32)

    def f(x, scale, bias):
        return jaxfused.group_norm(
            x, scale, bias, num_groups=32, activation="silu", implementation="cuda"
        )

    assert kernels(f, x, scale, scale) == [SLAB]
    gradient = jax.grad(lambda *args: f(*args).astype(jnp.float32).sum(), (0, 1, 2))
    assert kernels(gradient, x, scale, scale) == [SLAB, BACKWARD]
    large = jax.ShapeDtypeStruct((1, 999, 99, 64), jnp.bfloat16)
    assert kernels(f, large, scale, scale) == [FORWARD]


def test_shapes_that_no_kernel_takes_go_to_xla_stage_by_stage(with_library):
    case = Case((2, 5, 3, 9), 3, residual=True, activation="silu")
    ours, plain = ours_and_plain(case)
    assert kernels(ours, *case.arguments(jnp.bfloat16)) == []
    assert_values_and_gradients(ours, plain, *case.arguments(jnp.bfloat16))
    with pytest.raises(ValueError, match="an even number of channels in 16 bits, and x has 9"):
        ours_and_plain(case, "cuda")[0](*case.arguments(jnp.bfloat16))


GOOD = dict(
    compute_capability=(9, 0), images=2, pixels=64, channels=128, groups=32, dtype=jnp.bfloat16
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(compute_capability=None), "it needs an NVIDIA GPU"),
        (dict(compute_capability=(7, 0)), "this GPU has 7.0"),
        (dict(dtype=jnp.dtype("int8")), "x has dtype int8"),
        (dict(residual_dtype=jnp.float32), "x has bfloat16, residual float32"),
        (dict(residual_dtype=jnp.bfloat16, pixels=1, groups=64), "4 values, and these have 2"),
        (dict(groups=3), "3 do not divide 128"),
        (dict(channels=4104, groups=1), "at most 4096 such channels, and x has 4104"),
        (dict(channels=2050, groups=1), "at most 2048 such channels, and x has 2050"),
        (dict(channels=1025, groups=1, dtype=jnp.float32), "at most 1024 such channels"),
        (dict(pixels=2**30 + 1), "at most 1073741824 pixels"),
        (dict(images=2**24), "and x has 2147483648"),
    ],
)
def test_limits(with_library, change, reason):
    assert reason in group_norm_cuda.why_unsupported(**GOOD | change)


@pytest.mark.parametrize(
    "change",
    [
        dict(),
        dict(channels=4096),
        dict(dtype=jnp.float32, channels=511, groups=7),
        dict(compute_capability=(7, 5), channels=4096, groups=4096),
        dict(residual_dtype=jnp.dtype("bfloat16"), pixels=4, groups=128),
    ],
)
def test_within_the_limits(with_library, change):
    assert group_norm_cuda.why_unsupported(**GOOD | change) is None


@settings(max_examples=40)
@given(
    images=st.integers(1, 300),
    pixels=st.integers(1, 10**6),
    vectors=st.integers(1, 512),
    groups_of_all=st.booleans(),
    arrays=st.integers(1, 3),
    multiprocessors=st.integers(1, 160),
)
def test_candidates_are_legal(images, pixels, vectors, groups_of_all, arrays, multiprocessors):
    configs = group_norm_cuda.candidates(
        images,
        pixels,
        8 * vectors,
        2,
        arrays,
        groups=8 * vectors if groups_of_all else 8,
        multiprocessors=multiprocessors,
        kept=min(arrays, 2),
    )
    assert configs and len(set(configs)) == len(configs)
    for config in configs:
        assert config.slices <= pixels
        assert config.chunk <= images
        if config.once:
            assert config.slices * config.chunk <= multiprocessors


@settings(max_examples=40)
@given(
    images=st.integers(1, 300),
    pixels=st.integers(1, 10**5),
    vectors=st.integers(1, 256),
    groups=st.sampled_from((1, 8, 32, None)),
    itemsize=st.sampled_from((2, 4)),
    multiprocessors=st.integers(1, 160),
)
def test_slabs_are_legal(images, pixels, vectors, groups, itemsize, multiprocessors):
    channels = 64 * vectors
    shape, groups = (images, pixels, channels, itemsize), groups or channels
    for config in group_norm_slab_cuda.candidates(
        *shape, groups=groups, multiprocessors=multiprocessors
    ):
        columns = config.vectors * 16 // itemsize
        assert channels % columns == 0 and columns % (channels // groups) == 0
        blocks = images * (channels // columns) * config.parts
        assert config.parts == 1 or (blocks <= multiprocessors and pixels >= 32 * config.parts)
        time = group_norm_slab_cuda.microseconds(config, *shape, multiprocessors, groups=groups)
        assert 0 < time < 1e7


@pytest.mark.parametrize(
    ("shape", "groups", "slabs"),
    [
        ((64, 14 * 14, 384, 2), 32, (24, 1)),
        ((8, 28 * 28, 512, 2), 32, (4, 1)),
        # The batch of a batch norm, which all blocks share.
        ((1, 184 * 331, 128, 2), 128, (4, 33)),
        ((1, 64 * 49, 2048, 2), 2048, (4, 2)),
        # Slabs that exceed shared memory, and channels that do not divide into vectors.
        ((8, 128 * 128, 128, 2), 32, None),
        ((8, 14 * 14, 30, 2), 10, None),
    ],
)
def test_what_stays_on_chip(with_library, shape, groups, slabs):
    def found(capability):
        return group_norm_slab_cuda.config_for(
            *shape, groups=groups, compute_capability=capability, multiprocessors=132
        )

    assert found((9, 0)) == (slabs and group_norm_slab_cuda.Config(*slabs))
    assert found((8, 0)) is None


@pytest.mark.parametrize(("channels", "itemsize"), [(1024, 2), (512, 4)])
def test_only_pixels_that_a_crew_can_take_are_read_once(channels, itemsize):
    """The forward sums pixels by crews of 128 threads, each of which takes 16 bytes."""

    def reads_once(channels):
        size = (4, 1024, channels, itemsize, 1)
        configs = group_norm_cuda.candidates(*size, groups=8, multiprocessors=132, kept=1)
        return any(config.once for config in configs)

    assert reads_once(channels) and not reads_once(channels + 8)


@pytest.mark.parametrize("wrong", [dict(slices=0), dict(slices=65537), dict(chunk=0)])
def test_a_config_says_what_is_wrong(wrong):
    with pytest.raises(ValueError, match=f"group_norm.Config: {next(iter(wrong))} must be"):
        group_norm_cuda.Config(**(dict(slices=1, chunk=1) | wrong))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", [*CASES, *KERNEL_CASES], ids=str)
def test_kernels_are_as_accurate_as_jax_numpy(case, dtype):
    if 0 in case.shape or (case.shape[-1] % 2 and dtype != "float32"):
        pytest.skip("there is no kernel for this shape")
    ours, plain = ours_and_plain(case, "cuda")
    args = case.arguments(jnp.dtype(dtype))
    assert_values_and_gradients(ours, plain, *args, cotangents=2)
    results = jax.jit(lambda *args: jax.vjp(ours, *args)[1](ours(*args)))
    chex.assert_trees_all_equal(results(*args), results(*args))


@pytest.mark.gpu
@pytest.mark.parametrize("slices", [1, 2, 7, 200])
@pytest.mark.parametrize("chunk", [1, 2, 5, 10**6])
def test_every_config_computes_the_same(slices, chunk):
    case = Case((5, 37, 29, 96), 32, activation="silu")
    x, scale, bias, *_ = case.arguments(jnp.float32)
    x, scale, bias = x.reshape(5, -1, 96), scale[None], bias[None]
    options = dict(groups=32, activation="silu")
    config = group_norm_cuda.Config(slices, chunk)

    @jax.jit
    def results(x, scale, bias):
        y, mean, rstd, _ = group_norm_cuda.forward(
            x,
            None,
            scale,
            bias,
            epsilon=1e-6,
            save_statistics=True,
            multiprocessors=132,
            config=config,
            **options,
        )
        gradients = group_norm_cuda.backward(
            y,
            x,
            None,
            mean,
            rstd,
            scale,
            bias,
            per_image=True,
            multiprocessors=132,
            config=config,
            **options,
        )
        return y, mean, rstd, gradients

    @jax.jit
    def expected(x, scale, bias):
        y, mean, rstd, _ = stand_in_forward(
            x, None, scale, bias, epsilon=1e-6, save_statistics=True, **options
        )
        return y, mean, rstd, stand_in_backward(y, x, None, mean, rstd, scale, bias, **options)

    chex.assert_trees_all_close(
        results(x, scale, bias), expected(x, scale, bias), rtol=2e-4, atol=2e-4
    )


@pytest.fixture
def read_once(request, monkeypatch):
    """Makes the operator use the configs of a case of ONCE."""
    if not group_norm_cuda.reads_once(dispatch.current_device().compute_capability):
        pytest.skip("this GPU does not read images once")
    once = request.param
    monkeypatch.setattr(group_norm_slab_cuda, "config_for", lambda *shape, **options: None)
    forward, backward = group_norm_cuda.forward, group_norm_cuda.backward
    monkeypatch.setattr(
        group_norm_cuda, "forward", functools.partial(forward, config=once.config(once.forward))
    )
    if not once.case.residual:
        monkeypatch.setattr(
            group_norm_cuda,
            "backward",
            functools.partial(backward, config=once.config(once.backward)),
        )
    return once


SLAB_CASES = (
    (Case((2, 7, 43, 64), 32, **_SILU), "bfloat16", 2),
    (Case((1, 331, 40), 40, residual=True, activation="relu"), "float16", 3),
    (Case((3, 75, 96), 8, modulated=True, activation="gelu_tanh"), "float32", 2),
    (Case((2, 97, 320), 32, scale=False, bias=False), "bfloat16", 2),
    (Case((1, 130, 128), 1, **_SILU), "bfloat16", 4),
)
"""Slabs of all sizes: a power of two of vectors or not; groups of one channel, several, or all."""


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype", "parts"), SLAB_CASES, ids=str)
def test_every_slab_computes_the_same(case, dtype, parts):
    if not group_norm_cuda.reads_once(dispatch.current_device().compute_capability):
        pytest.skip("this GPU does not read images once")
    x, scale, bias, residual, *modulation = case.arguments(jnp.dtype(dtype))
    if case.modulated:
        scale, bias = modulation
    images, channels, groups = len(x), x.shape[-1], case.num_groups
    x, residual = (None if a is None else a.reshape(images, -1, channels) for a in (x, residual))
    scale, bias = (None if a is None else a.reshape(-1, channels) for a in (scale, bias))
    operands = (x, residual, scale, bias)
    options = dict(groups=groups, epsilon=1e-6, activation=case.activation, save_statistics=True)
    expected = jax.jit(functools.partial(stand_in_forward, **options))(*operands)
    shape = (images, x.shape[1], channels, x.dtype.itemsize)
    vectors = {
        config.vectors
        for config in group_norm_slab_cuda.candidates(*shape, groups=groups, multiprocessors=132)
    }
    assert vectors
    at_once = dispatch.current_device().multiprocessors
    for config in (group_norm_slab_cuda.Config(v, p) for v in sorted(vectors) for p in (1, parts)):
        slabs = channels * x.dtype.itemsize // (16 * config.vectors)
        if config.parts > 1 and images * slabs * config.parts > at_once:
            continue
        forward = functools.partial(
            group_norm_slab_cuda.forward, **options, save_variance=True, config=config
        )
        results = jax.jit(forward)(*operands)
        tolerance = 1e-5 if dtype == "float32" else 2e-2
        chex.assert_trees_all_close(results, expected, rtol=tolerance, atol=tolerance)
        chex.assert_trees_all_equal(jax.jit(forward)(*operands), results)


@pytest.mark.gpu
@pytest.mark.parametrize("read_once", ONCE, indirect=True, ids=str)
def test_images_that_are_read_once(read_once):
    ours, plain = ours_and_plain(read_once.case, "cuda")
    args = read_once.case.arguments(jnp.dtype(read_once.dtype))
    assert_values_and_gradients(ours, plain, *args, cotangents=2)
    results = jax.jit(lambda *args: jax.vjp(ours, *args)[1](ours(*args)))
    chex.assert_trees_all_equal(results(*args), results(*args))


@pytest.mark.gpu
@pytest.mark.parametrize("read_once", ONCE[1:2], indirect=True, ids=str)
def test_vmap_of_images_that_are_read_once(read_once):
    x, scale, bias, *_ = read_once.case.arguments(jnp.float32)
    xs = jnp.stack([x, 2 * x - 1])
    options = dict(num_groups=read_once.case.num_groups, activation="silu")

    def gradients(implementation):
        def loss(x, scale):
            y = jaxfused.group_norm(x, scale, bias, implementation=implementation, **options)
            return jnp.sum(jnp.sin(y))

        return jax.jit(jax.vmap(jax.grad(loss, (0, 1)), in_axes=(0, None)))(xs, scale)

    chex.assert_trees_all_close(gradients("cuda"), gradients("xla"), rtol=2e-4, atol=2e-4)
