import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxfused
from tests.against_float64 import assert_values_and_gradients
from tests.cases.qkv_projection import CASES
from tests.transforms import assert_transforms


def tables(case):
    if not case.rotary_dim:
        return None, None
    return jaxfused.rope_tables(jnp.arange(case.rows[-1]), case.rotary_dim)


def fused_qkv(case):
    cos, sin = tables(case)

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
        )

    return f


def plain_qkv(case):
    """Three projections, each by its own columns, as three Dense layers would take them."""
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
                a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
                y = jnp.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)
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
        ({"heads": 4, "key_heads": 0}, "key_heads 0"),
        ({"q_scale": jnp.ones(5)}, r"q_scale has shape \(5,\).*\(4,\)"),
        ({"cos": jnp.ones((3, 2))}, "one of cos and sin"),
        ({"cos": jnp.ones((4, 2)), "sin": jnp.ones((4, 2))}, r"cos has shape \(4, 2\)"),
        ({"epsilon": jnp.ones(())}, "epsilon is"),
        ({"implementation": "pallas"}, "there is no Pallas kernel of qkv_projection yet"),
    ],
)
def test_errors(change, message):
    args = {"x": jnp.ones((3, 6)), "w": jnp.ones((6, 32)), "heads": 4, "key_heads": 2} | change
    with pytest.raises(ValueError, match=f"qkv_projection: .*{message}"):
        jaxfused.qkv_projection(**args)
