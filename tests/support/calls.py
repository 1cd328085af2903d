"""A small call of every operator, for tests that all operators must pass."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.sparse import BCOO

import jaxfused
from jaxfused.runtime import cuda_library


class Operand(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any = jnp.bfloat16
    has_batch: bool = False
    """True if the first axis is rows or images, which may be split over devices."""


class Call(NamedTuple):
    f: Callable[..., Any]
    operands: tuple[Operand, ...]
    others: tuple[Operand, ...] = ()
    """Operands without a gradient."""
    is_mean: bool = False
    """True if the result is one number for all rows."""

    @property
    def gradients(self) -> Callable[..., Any]:
        """Returns a function of all operands to the result and its gradients."""

        def results(*arrays):
            def loss(*operands):
                y = self.f(*operands, *arrays[len(self.operands) :])
                return sum(jnp.sum(jnp.sin(a.astype(jnp.float32))) for a in jax.tree.leaves(y)), y

            argnums = tuple(range(len(self.operands)))
            (_, y), gradients = jax.value_and_grad(loss, argnums, has_aux=True)(
                *arrays[: len(argnums)]
            )
            return y, gradients

        return results


def _rows(*shape: int, dtype: Any = jnp.bfloat16) -> Operand:
    return Operand(shape, dtype, has_batch=True)


def _shared(*shape: int, dtype: Any = jnp.bfloat16) -> Operand:
    return Operand(shape, dtype)


def two_experts(x):
    """Returns indices [..., 2] of four experts, without an operation that a split axis must not have."""
    return jnp.stack([x.argmax(-1) % 4, x.argmin(-1) % 4], axis=-1)


def _block_sparse(x, w):
    return jaxfused.block_sparse_matmul(x, jaxfused.BlockSparse.from_dense(w, 64, count=5))


def _places(rows, columns):
    places = jnp.arange(7)
    return jnp.stack([places * 5 % rows, places * 3 % columns], axis=1)


def _sparse(data, b):
    return jaxfused.sparse_matmul(BCOO((data, _places(96, b.shape[0])), shape=(96, b.shape[0])), b)


def _sampled(x, y):
    shape = (x.shape[0], y.shape[1])
    pattern = BCOO((jnp.ones(7, x.dtype), _places(*shape)), shape=shape)
    return jaxfused.sampled_matmul(x, y, pattern).data


def _quantized(x, w):
    return jaxfused.quantized_matmul(x, jaxfused.quantize(w))


def _quantized_conv(x, w):
    images = jaxfused.quantize(x, axis=-1, per_tensor=True)
    weights = jaxfused.quantize(w.reshape(-1, w.shape[-1]), layout="rows")
    return jaxfused.quantized_conv(images, weights, kernel_size=w.shape[:-2], out_dtype=x.dtype)


def calls(rows: int = 32, images: int = 8) -> dict[str, Call]:
    """Returns a call of each operator, over `rows` rows or `images` images."""
    d, f = 128, 256
    x, labels = _rows(rows, d), (_rows(rows, dtype=jnp.int32),)
    up, down = _shared(d, f), _shared(f, d)
    heads = _rows(images, 4, 4, 64)
    maps = _rows(images, 8, 8, 64)
    vector = _shared(64)
    norm = functools.partial(jaxfused.group_norm, num_groups=32)
    fp8 = dict(precision="fp8")
    return {
        "layer_norm": Call(jaxfused.layer_norm, (x, _shared(d), _shared(d))),
        "rms_norm": Call(
            lambda x, scale, h: jaxfused.rms_norm(x, scale, residual=h), (x, _shared(d), x)
        ),
        "linear": Call(lambda *a: jaxfused.linear(*a, activation="gelu_tanh"), (x, up, _shared(f))),
        "linear of residual": Call(
            lambda x, w, h: jaxfused.linear(x, w, residual=h), (x, up, _rows(rows, f))
        ),
        "linear in fp8": Call(functools.partial(jaxfused.linear, **fp8), (x, up, _shared(f))),
        "mlp": Call(jaxfused.mlp, (x, up, _shared(f), down, _shared(d))),
        "mlp in fp8": Call(functools.partial(jaxfused.mlp, **fp8), (x, up, _shared(f), down)),
        "gated_mlp": Call(jaxfused.gated_mlp, (x, up, up, down)),
        "qkv_projection": Call(
            lambda x, w, q, k: jaxfused.qkv_projection(x, w, heads=4, q_scale=q, k_scale=k),
            (_rows(images, 4, d), _shared(d, 12 * 64), vector, vector),
        ),
        "dot_product_attention": Call(
            functools.partial(jaxfused.dot_product_attention, is_causal=True), (heads,) * 3
        ),
        "dot_product_attention at offsets": Call(
            lambda *a: jaxfused.dot_product_attention(*a[:3], is_causal=True, query_offset=a[3]),
            (heads,) * 3,
            (_rows(images, dtype=jnp.int32),),
        ),
        "ragged_mlp": Call(
            lambda *a: jaxfused.ragged_mlp(*a, jnp.full(4, rows // 4)),
            (x, *[_shared(4, d, f)] * 2, _shared(4, f, d)),
        ),
        "expert_mlp": Call(
            lambda x, p, *w: jaxfused.expert_mlp(x, p, two_experts(x), *w),
            (x, _rows(rows, 2), *[_shared(4, d, f)] * 2, _shared(4, f, d)),
        ),
        "batched_lora": Call(
            lambda *a: jaxfused.batched_lora(*a[:3], a[3] % 3),
            (x, _shared(2, d, 16), _shared(2, 16, f)),
            labels,
        ),
        "ragged_dot": Call(
            lambda x, w: jaxfused.ragged_dot(x, w, jnp.full(4, rows // 4)), (x, _shared(4, d, f))
        ),
        "block_sparse_matmul": Call(_block_sparse, (x, up)),
        "sparse24_matmul": Call(jaxfused.sparse24_matmul, (x, up)),
        "sparse_matmul": Call(_sparse, (_shared(7), up)),
        "sampled_matmul": Call(_sampled, (_shared(d, 64), _shared(64, f))),
        "rope": Call(lambda q, k: jaxfused.rope(q, k, rotary_dim=32), (heads, heads)),
        "quantize_rows": Call(lambda x: jaxfused.quantize_rows(x).dequantize(), (x,)),
        "quantized_matmul": Call(_quantized, (x, up)),
        "quantized_conv": Call(_quantized_conv, (maps, _shared(3, 3, 64, 64))),
        "conv": Call(
            lambda *a: jaxfused.conv(*a, activation="relu"), (maps, _shared(3, 3, 64, 64), vector)
        ),
        "conv of channels": Call(
            lambda *a: jaxfused.conv(*a, feature_group_count=64),
            (maps, _shared(3, 3, 1, 64), vector),
        ),
        "conv_transpose": Call(
            functools.partial(jaxfused.conv_transpose, strides=2),
            (maps, _shared(2, 2, 64, 64), vector),
        ),
        "group_norm": Call(norm, (maps, vector, vector)),
        "batch_norm": Call(lambda x, *p: jaxfused.batch_norm(x, *p)[0], (maps, vector, vector)),
        "max_pool": Call(lambda x: jaxfused.max_pool(x, 2, strides=2), (maps,)),
        "avg_pool": Call(lambda x: jaxfused.avg_pool(x, 2, strides=2), (maps,)),
        "global_avg_pool": Call(jaxfused.global_avg_pool, (maps,)),
        "spatial_pyramid_pool": Call(jaxfused.spatial_pyramid_pool, (maps,)),
        "upsample": Call(jaxfused.upsample, (maps,)),
        "blur_pool": Call(jaxfused.blur_pool, (maps,)),
        "pixel_shuffle": Call(jaxfused.pixel_shuffle, (maps,)),
        "pixel_unshuffle": Call(jaxfused.pixel_unshuffle, (maps,)),
        "carafe": Call(jaxfused.carafe, (maps, _rows(images, 16, 16, 25))),
        "resize": Call(lambda x: jaxfused.resize(x, (9, 20)), (maps,)),
        "softmax_cross_entropy": Call(
            jaxfused.softmax_cross_entropy, (_rows(rows, 512),), labels, is_mean=True
        ),
        "linear_softmax_cross_entropy": Call(
            jaxfused.linear_softmax_cross_entropy, (x, _shared(d, 512)), labels, is_mean=True
        ),
        "linear_softmax_cross_entropy, any cotangent": Call(
            functools.partial(jaxfused.linear_softmax_cross_entropy, cotangent="any"),
            (x, _shared(d, 512)),
            labels,
            is_mean=True,
        ),
        "sample": Call(
            functools.partial(jaxfused.sample, top_p=0.9), (x,), (_rows(rows, dtype=jnp.int32),)
        ),
        "segmentation_loss": Call(
            jaxfused.segmentation_loss,
            (_rows(images, 8, 8),),
            (_rows(images, 8, 8, dtype=jnp.int32),),
            is_mean=True,
        ),
        "sigmoid_cross_entropy": Call(
            jaxfused.sigmoid_cross_entropy,
            (_rows(rows, 128),),
            (_rows(rows, 128, dtype=jnp.int32),),
            is_mean=True,
        ),
    }


def have_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowers programs with calls of the CUDA library, which need not be built."""
    monkeypatch.setattr(cuda_library, "why_unavailable", lambda: None)
    monkeypatch.setattr(cuda_library, "architectures", lambda: ("90",))
    monkeypatch.setattr(cuda_library, "cublaslt_name", lambda: "")
    monkeypatch.setattr(cuda_library, "register", lambda: None)
