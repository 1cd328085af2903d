import functools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxfused
from jaxfused import dispatch
from pallas_kernels.gemm import qkv_projection
from pallas_kernels.gemm.qkv_heads import Heads
from pallas_kernels.gemm.small_m import FewRowsConfig
from tests.cases.qkv_projection import CASES, KERNEL_CASES, Case
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.choices import why_not
from tests.support.grids import parametrize
from tests.support.lowering import kernels
from tests.support.transforms import assert_transforms


def tables(case):
    if not case.rotary_dim:
        return None, None
    return jax.jit(lambda: jaxfused.rope_tables(jnp.arange(case.rows[-1]), case.rotary_dim))()


def fused_qkv(case, implementation=None, angles=None):
    cos, sin = angles or tables(case)

    def f(x, w, bias, q_scale, k_scale):
        return jaxfused.qkv_projection(
            x,
            w,
            bias,
            heads=case.heads,
            key_heads=case.key_heads,
            q_scale=q_scale,
            k_scale=k_scale,
            cos=cos,
            sin=sin,
            interleaved=case.interleaved,
            implementation=implementation,
        )

    return f


def plain_qkv(case):
    """Computes three projections from their own columns, as three Dense layers would."""
    cos, sin = tables(case)
    size = case.head_size

    def f(x, w, bias, q_scale, k_scale):
        w = w.astype(x.dtype)

        def project(first, count):
            columns = slice(first * size, (first + count) * size)
            y = x @ w[:, columns]
            y = y if bias is None else y + bias[columns].astype(x.dtype)
            return y.reshape(*x.shape[:-1], count, size)

        def finish(y, scale):
            if scale is not None:
                mean_square = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
                y = y / jnp.sqrt(mean_square + 1e-6) * scale.astype(y.dtype)
            if cos is not None:
                half = case.rotary_dim // 2
                c, s = (a[:, None].astype(y.dtype) for a in (cos, sin))
                first, second = slice(half), slice(half, 2 * half)
                if case.interleaved:
                    first, second = (slice(i, 2 * half, 2) for i in (0, 1))
                a, b = y[..., first], y[..., second]
                y = y.at[..., first].set(a * c - b * s).at[..., second].set(b * c + a * s)
            return y

        k, v = project(case.heads, case.key_heads), case.heads + case.key_heads
        return (
            finish(project(0, case.heads), q_scale),
            finish(k, k_scale),
            project(v, case.key_heads),
        )

    return f


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, "float32") for case in CASES] + [(CASES[0], "bfloat16"), (CASES[1], "float16")],
    ids=str,
)
def test_is_as_accurate_as_jax_numpy(case, dtype):
    args = case.arguments(jnp.dtype(dtype))
    assert_values_and_gradients(fused_qkv(case), plain_qkv(case), *args)


def test_feeds_attention():
    case = CASES[0]
    q, k, v = fused_qkv(case)(*case.arguments(jnp.bfloat16))
    assert q.shape == (2, 5, 4, 8) and k.shape == v.shape == (2, 5, 2, 8)
    output = jaxfused.dot_product_attention(q, k, v, is_causal=True)
    assert output.shape == q.shape and output.dtype == jnp.bfloat16


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward_keeps_the_projection_only_for_the_norms(case):
    args = case.arguments(jnp.bfloat16)
    _, vjp = jax.vjp(fused_qkv(case), *args)
    columns = args[1].shape[1]
    projections = [a for a in jax.tree.leaves(vjp) if a.shape == (*case.rows, columns)]
    assert [a.dtype for a in projections] == ([jnp.bfloat16] if case.norm else [])
    inputs = sum(a.nbytes for a in jax.tree.leaves((args, tables(case))))
    assert sum(a.nbytes for a in jax.tree.leaves(vjp)) <= inputs + sum(
        a.nbytes for a in projections
    )


def test_scale_offset():
    case = CASES[0]
    x, w, bias, q_scale, k_scale = case.arguments(jnp.float32)
    options = {"heads": case.heads, "key_heads": case.key_heads}
    expected = jaxfused.qkv_projection(x, w, bias, q_scale=q_scale, k_scale=k_scale, **options)
    offset = jaxfused.qkv_projection(
        x, w, bias, q_scale=q_scale - 1.0, k_scale=k_scale - 1.0, scale_offset=1.0, **options
    )
    for a, b in zip(offset, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_transforms():
    assert_transforms(fused_qkv(CASES[0]), *CASES[0].arguments(jnp.float32))


def test_derivatives_of_both_orders_and_modes():
    with jax.enable_x64(True):
        args = jax.tree.map(lambda a: np.asarray(a, np.float64), CASES[0].arguments(jnp.float32))
        f = jax.jit(fused_qkv(CASES[0]))
        check_grads(f, args, order=1, modes=["fwd"])
        check_grads(f, args, order=2, modes=["rev"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.ones(6)}, r"x has shape \(6,\)"),
        ({"w": jnp.ones((5, 32))}, "w has shape"),
        ({"w": jnp.ones((6, 33))}, "w has 33 columns"),
        ({"heads": 3}, "heads is 3 and key_heads 2"),
        ({"heads": 4, "key_heads": 0}, "key_heads is 0"),
        ({"q_scale": jnp.ones(5)}, r"q_scale has shape \(5,\).*\(4,\)"),
        ({"cos": jnp.ones((3, 2))}, "one of cos and sin"),
        ({"cos": jnp.ones((4, 2)), "sin": jnp.ones((4, 2))}, r"cos has shape \(4, 2\)"),
        ({"epsilon": jnp.ones(2)}, "epsilon is"),
        ({"implementation": "cuda"}, "implementation='cuda' cannot run here: "),
    ],
)
def test_errors(change, message):
    args = {"x": jnp.ones((3, 6)), "w": jnp.ones((6, 32)), "heads": 4, "key_heads": 2} | change
    with pytest.raises(ValueError, match=f"qkv_projection: .*{message}"):
        jaxfused.qkv_projection(**args)


# --- kernels --------------------------------------------------------------------------------------

ROTATING_CASES = (
    Case((3, 50), 32, 2, 1, 128, bias=True, rotary_dim=128),
    Case((2, 75), 32, 2, 2, 64, bias=True, norm=True, rotary_dim=64),
    Case((140,), 32, 1, 1, 256, rotary_dim=256),
    Case((2, 20), 32, 2, 1, 256, norm=True, rotary_dim=256),
)
"""Whole and split heads, angles for all heads or for each, tiles that span the last position."""

NEIGHBOUR_CASES = (
    Case((2, 21), 32, 2, 1, 80, bias=True, norm=True, rotary_dim=48, interleaved=True),
    Case((3, 8), 32, 2, 2, 96, rotary_dim=96, w_dtype="float32", interleaved=True),
    *(replace(case, interleaved=True) for case in (KERNEL_CASES[0], *ROTATING_CASES)),
)
"""Heads with features that are not rotated, which halves could not have, and the cases of halves."""

KERNEL_WAYS = (
    *((case, "bfloat16") for case in (*KERNEL_CASES, *ROTATING_CASES)),
    *((case, "float16") for case in (KERNEL_CASES[0], *ROTATING_CASES[:2])),
    *((case, "bfloat16") for case in NEIGHBOUR_CASES),
    *((case, "float16") for case in NEIGHBOUR_CASES[:4]),
)
each_kernel_case = pytest.mark.parametrize(("case", "dtype"), KERNEL_WAYS, ids=str)
# The interpreter treats both dtypes alike, so that one float16 case per order of pairs suffices.
INTERPRETED_WAYS = (
    *(way for way in KERNEL_WAYS if way[1] == "bfloat16"),
    (KERNEL_CASES[0], "float16"),
    (NEIGHBOUR_CASES[0], "float16"),
)


# `make test` runs only the case with norm and rope.
@pytest.mark.usefixtures("interpreted_hopper")
@parametrize(("case", "dtype"), INTERPRETED_WAYS, quick=(0,))
def test_pallas_accurate_in_the_interpreter(case, dtype):
    args = case.arguments(jnp.dtype(dtype))
    assert_values_and_gradients(fused_qkv(case, "pallas"), plain_qkv(case), *args, cotangents=1)


@pytest.mark.usefixtures("interpreted_hopper")
@parametrize("case", (KERNEL_CASES[0], KERNEL_CASES[1]), quick=())
def test_pallas_takes_one_array_apart_in_the_interpreter(monkeypatch, case):
    """On one device, the stages read the single array itself."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    args = case.arguments(jnp.dtype("bfloat16"))
    assert_values_and_gradients(fused_qkv(case, "pallas"), plain_qkv(case), *args, cotangents=1)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_stages_in_xla_on_one_device_are_three_products(monkeypatch, case):
    """On one device the gradients of the weights are one product, as are dgrad and forward."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    args = case.arguments(jnp.dtype("bfloat16"))
    assert_values_and_gradients(fused_qkv(case), plain_qkv(case), *args)

    def loss(*args):
        return sum(jnp.sum(y.astype(jnp.float32)) for y in fused_qkv(case)(*args))

    text = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*args).as_text()
    assert text.count("stablehlo.dot_general") == 3


def near(actual, expected):
    chex.assert_trees_all_close(actual, expected, rtol=0.02, atol=0.1)


@pytest.mark.usefixtures("interpreted_hopper")
@parametrize("interleaved", [False, True], quick=(1,))
@parametrize("over", ["rows", "rows and angles", "angles", "all"], quick=())
def test_pallas_vmap_in_the_interpreter(over, interleaved):
    case = KERNEL_CASES[1]
    x, w, *_ = case.arguments(jnp.bfloat16)
    cos, sin = tables(case)

    def gradients(x, w, cos, sin, implementation):
        def loss(x, w, cos, sin):
            heads = jaxfused.qkv_projection(
                x,
                w,
                heads=2,
                cos=cos,
                sin=sin,
                interleaved=interleaved,
                implementation=implementation,
            )
            return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in heads)

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(x, w, cos, sin)

    axes = {
        "rows": (0, None, None, None),
        "rows and angles": (0, None, 0, 0),
        "angles": (None, None, 0, 0),
        "all": (0, 0, 0, 0),
    }[over]
    args = [
        a if axis is None else jnp.stack([a, -a])
        for a, axis in zip((x, w, cos, sin), axes, strict=True)
    ]
    mapped = (
        jax.jit(jax.vmap(functools.partial(gradients, implementation=name), in_axes=axes))(*args)
        for name in ("pallas", "xla")
    )
    near(*mapped)


@pytest.mark.usefixtures("interpreted_hopper")
@parametrize("case", [NEIGHBOUR_CASES[1], NEIGHBOUR_CASES[3], ROTATING_CASES[1]], quick=())
def test_pallas_turns_each_sequence_by_its_own_angles_in_the_interpreter(case):
    x, w, bias, q_scale, k_scale = case.arguments(jnp.bfloat16)
    positions = jnp.arange(x[..., 0].size).reshape(x.shape[:-1]) * 7 % 31
    angles = jaxfused.rope_tables(positions, case.rotary_dim)
    near(
        *(
            fused_qkv(case, implementation, angles)(x, w, bias, q_scale, k_scale)
            for implementation in ("pallas", "xla")
        )
    )


def test_until_they_are_measured_kernels_of_neighbours_have_to_be_named(hopper, monkeypatch):
    h200 = replace(hopper, multiprocessors=132)
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: h200)
    case = Case((256, 197), 768, 12, 12, 64, rotary_dim=64, interleaved=True)
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 197, 768), (768, 3 * 768))
    )

    def forward(case, implementation=None):
        f = fused_qkv(case, implementation)
        [(choice, _)] = jaxfused.explain(lambda x, w: f(x, w, None, None, None), x, w).calls
        assert choice.reasons["pallas"] is None
        return choice.implementation

    assert forward(case) == "pallas"
    assert forward(replace(case, interleaved=False)) == "pallas"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("interpreted_hopper")
@pytest.mark.parametrize("case", [ROTATING_CASES[0], NEIGHBOUR_CASES[0]], ids=str)
def test_pallas_gradients_of_the_angles_in_the_interpreter(case):
    x, w, bias, *_ = case.arguments(jnp.bfloat16)

    def loss(cos, sin, implementation):
        heads = jaxfused.qkv_projection(
            *(x, w, bias),
            heads=case.heads,
            key_heads=case.key_heads,
            cos=cos,
            sin=sin,
            interleaved=case.interleaved,
            implementation=implementation,
        )
        return sum(jnp.sum(y * jnp.sin(jnp.arange(y.size)).reshape(y.shape)) for y in heads)

    near(*(jax.grad(loss, argnums=(0, 1))(*tables(case), name) for name in ("pallas", "xla")))


@pytest.mark.usefixtures("interpreted_hopper")
@pytest.mark.parametrize("case", [*KERNEL_CASES[:4], *NEIGHBOUR_CASES[:2]], ids=str)
def test_pallas_keeps_queries_and_keys_only_for_the_norms(case):
    args = case.arguments(jnp.bfloat16)
    vjp = jax.eval_shape(lambda *args: jax.vjp(fused_qkv(case, "pallas"), *args)[1], *args)
    kept = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(vjp))
    projected = 2 * np.prod(case.rows) * (case.heads + case.key_heads) * case.head_size
    inputs = sum(a.nbytes for a in jax.tree.leaves((args, tables(case))))
    assert kept == inputs + projected * case.norm


FEW_ROWS = (
    (Case((2, 5), 200, 4, 2, 64, bias=True, norm=True, rotary_dim=64), FewRowsConfig(64, 2, 2)),
    (Case((12,), 72, 2, 1, 128, rotary_dim=128), FewRowsConfig(128, 1, 2)),
    (Case((3, 8), 136, 4, 2, 64, bias=True, rotary_dim=64), FewRowsConfig(128, 2, 2)),
    (Case((3, 1), 72, 4, 4, 64, norm=True), FewRowsConfig(64, 1, 2)),
    (Case((9,), 72, 4, 2, 32, bias=True), FewRowsConfig(64, 1, 2)),
    *(
        (Case(*sizes, rotary_dim=sizes[-1], interleaved=True, **parts), config)
        for sizes, parts, config in (
            (((2, 5), 200, 4, 2, 64), dict(bias=True, norm=True), FewRowsConfig(64, 2, 2)),
            (((12,), 72, 2, 1, 128), {}, FewRowsConfig(128, 1, 2)),
            (((3, 8), 136, 4, 2, 64), dict(bias=True), FewRowsConfig(128, 2, 2)),
        )
    ),
)
"""Rows beyond a table and beyond x, one head or two in a block of columns, and plain heads."""


@pytest.mark.usefixtures("interpreted_hopper")
@parametrize(("case", "config"), FEW_ROWS, quick=())
def test_few_rows_accurate_in_the_interpreter(case, config, monkeypatch):
    of_both = qkv_projection.fitting

    def fitting(*shapes):
        assert replace(config, stages=3) in of_both(*shapes)
        return [config]

    monkeypatch.setattr(qkv_projection, "fitting", fitting)
    args = case.arguments(jnp.bfloat16)
    assert_values_and_gradients(fused_qkv(case, "pallas"), plain_qkv(case), *args, cotangents=1)


@parametrize(
    ("m", "heads", "key_heads", "head_size", "norm", "rotary_dim", "period", "interleaved"),
    [
        (8, 32, 8, 128, False, 128, 1, False),
        (64, 32, 8, 128, True, 128, 64, False),
        (24, 12, 12, 64, True, 64, 24, False),
        (1, 12, 12, 64, False, 0, 0, False),
        (8, 32, 8, 128, False, 128, 1, True),
        (64, 32, 8, 128, True, 128, 64, True),
        (24, 12, 12, 64, True, 64, 24, True),
    ],
    quick=(),
)
def test_few_rows_lower_for_cuda(
    m, heads, key_heads, head_size, norm, rotary_dim, period, interleaved
):
    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    d, widths = 4096, [n * head_size for n in (heads, key_heads, key_heads)]
    finished = Heads(tuple(widths), head_size, (norm, norm), rotary_dim, interleaved)
    configs = qkv_projection.fitting(m, d, finished, 132)
    configs = [config for config in configs if isinstance(config, FewRowsConfig)]
    assert configs
    table = array(period, rotary_dim // 2, dtype=jnp.float32) if rotary_dim else None
    for config in (configs[0], configs[-1]):
        forward = functools.partial(
            qkv_projection.forward,
            interleaved=interleaved,
            head_size=head_size,
            epsilon=1e-6,
            scale_offset=0.0,
            save_projections=norm,
            multiprocessors=132,
            config=config,
        )
        operands = (array(m, d), [array(d, n) for n in widths], [array(n) for n in widths])
        scales = [array(head_size) if norm else None] * 2
        assert kernels(forward, *operands, scales, table, table) == ["qkv_projection_few_rows"]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("race_detector")
@pytest.mark.parametrize(
    "case", (*KERNEL_CASES, *ROTATING_CASES[:2], *NEIGHBOUR_CASES[:2]), ids=str
)
def test_no_races_in_the_interpreter(case):
    jax.block_until_ready(fused_qkv(case, "pallas")(*case.arguments(jnp.bfloat16)))


@parametrize(
    ("m", "d", "heads", "key_heads", "head_size", "norm", "rotary_dim", "period", "interleaved"),
    [
        (50432, 768, 12, 12, 64, False, 0, 0, False),
        (50432, 768, 12, 12, 64, True, 64, 197, False),
        (25216, 1024, 16, 16, 64, False, 0, 0, False),
        (25216, 1024, 16, 16, 64, False, 64, 25216, True),
        (50432, 768, 12, 12, 64, False, 64, 197, False),
        (8192, 1280, 16, 16, 80, True, 0, 0, False),
        (32768, 4096, 32, 8, 128, False, 128, 4096, True),
        (32768, 4096, 32, 8, 128, True, 64, 4096, False),
        (32768, 4096, 32, 8, 128, True, 128, 4096, True),
        (8192, 2048, 8, 2, 96, False, 96, 4096, True),
        (8192, 2048, 8, 1, 256, False, 256, 4096, False),
        (8192, 2048, 8, 1, 256, True, 256, 4096, True),
        (37, 48, 4, 2, 32, True, 32, 37, False),
        (37, 48, 4, 2, 32, True, 32, 37, True),
    ],
    quick=(3,),
)
def test_default_configs_lower_for_cuda(
    m, d, heads, key_heads, head_size, norm, rotary_dim, period, interleaved
):
    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    widths = [n * head_size for n in (heads, key_heads, key_heads)]
    weights = [array(d, n) for n in widths]
    table = array(period, rotary_dim // 2, dtype=jnp.float32) if rotary_dim else None
    forward = kernels(
        functools.partial(
            qkv_projection.forward,
            interleaved=interleaved,
            head_size=head_size,
            epsilon=1e-6,
            scale_offset=0.0,
            save_projections=norm,
            multiprocessors=132,
        ),
        array(m, d),
        weights,
        [array(n, dtype=jnp.float32) for n in widths],
        [array(head_size) if norm else None] * 2,
        table,
        table,
    )
    assert forward[-1] == "qkv_projection"
    backward = kernels(
        functools.partial(qkv_projection.input_gradient, multiprocessors=132),
        [array(m, n) for n in widths],
        weights,
    )
    assert backward == ["qkv_input_gradient"]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": jnp.ones((3, 12), jnp.bfloat16), "w": jnp.ones((12, 128))}, "x has 12"),
        ({"x": jnp.ones((3, 16))}, "x has dtype float32"),
        ({"heads": 8, "key_heads": 4}, "multiples of 16 features, and half of the rotating are 4"),
        ({"cos": jnp.ones((3, 8)), "sin": jnp.ones((3, 8))}, "half of the rotating are 8"),
        (
            {"cos": jnp.ones((3, 4)), "sin": jnp.ones((3, 4)), "interleaved": True},
            "the rotating are 8",
        ),
        (
            {"key_heads": 2, "w": jnp.ones((16, 6 * 40)), "interleaved": True},
            "the other are 8",
        ),
    ],
)
def test_limits_of_the_kernel(change, reason):
    args = {
        "x": jnp.ones((3, 16), jnp.bfloat16),
        "w": jnp.ones((16, 128)),
        "heads": 2,
        "key_heads": 1,
        "cos": jnp.ones((3, 16)),
        "sin": jnp.ones((3, 16)),
    }
    if "heads" in change:
        change = change | {"cos": jnp.ones((3, 4)), "sin": jnp.ones((3, 4))}
    with pytest.raises(ValueError, match=f"qkv_projection: .*{reason}"):
        jaxfused.qkv_projection(**(args | change), implementation="pallas")


@pytest.mark.usefixtures("hopper")
def test_there_is_no_cuda_kernel():
    f = functools.partial(jaxfused.qkv_projection, heads=2, key_heads=1, implementation="cuda")
    x, w = jnp.ones((3, 16), jnp.bfloat16), jnp.ones((16, 128))
    # Without the CUDA library, its absence is the first reason given.
    assert why_not(f, x, w) is not None


@pytest.mark.gpu
@each_kernel_case
def test_accurate_on_gpu(case, dtype):
    args = case.arguments(jnp.dtype(dtype))
    assert_values_and_gradients(fused_qkv(case, "pallas"), plain_qkv(case), *args, cotangents=1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case((3, 197), 768, 12, 12, 64, bias=True),
        Case((3, 197), 1024, 16, 16, 64, bias=True),
        Case((3, 197), 768, 12, 12, 64, bias=True, norm=True, rotary_dim=64),
        Case((3, 197), 768, 12, 12, 64, rotary_dim=64),
        Case((2, 300), 1024, 32, 8, 128, norm=True, rotary_dim=128),
        Case((2, 300), 1024, 32, 8, 128, bias=True, rotary_dim=128),
        Case((2, 300), 512, 4, 1, 256, rotary_dim=256),
        Case((2, 300), 512, 4, 1, 256, norm=True, rotary_dim=128),
        Case((2, 77), 640, 8, 8, 80, bias=True, norm=True),
        Case((2, 77), 480, 5, 5, 96, bias=True, rotary_dim=96),
        Case((3, 197), 768, 12, 12, 64, bias=True, norm=True, rotary_dim=64, interleaved=True),
        Case((3, 197), 768, 12, 12, 64, rotary_dim=32, interleaved=True),
        Case((2, 300), 1024, 32, 8, 128, norm=True, rotary_dim=128, interleaved=True),
        Case((2, 300), 1024, 32, 8, 128, bias=True, rotary_dim=128, interleaved=True),
        Case((2, 300), 512, 4, 1, 256, norm=True, rotary_dim=256, interleaved=True),
        Case((2, 77), 640, 8, 8, 80, bias=True, norm=True, rotary_dim=80, interleaved=True),
        Case((4, 2), 4096, 32, 8, 128, bias=True, rotary_dim=128, interleaved=True),
        Case((3, 8), 768, 12, 12, 64, norm=True, rotary_dim=64, interleaved=True),
    ],
    ids=str,
)
def test_every_tile_on_gpu(case):
    """A warpgroup has several tiles and rows beyond the last; two runs give the same bits."""
    args = case.arguments(jnp.bfloat16)
    ours = jax.jit(fused_qkv(case, "pallas"))
    assert_values_and_gradients(fused_qkv(case, "pallas"), plain_qkv(case), *args, cotangents=1)
    chex.assert_trees_all_equal(ours(*args), ours(*args))
