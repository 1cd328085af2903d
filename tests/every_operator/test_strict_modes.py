"""Every public function and module under JAX's strict modes, in which JAX runs its own tests.

`jax_numpy_rank_promotion="raise"`, `jax_numpy_dtype_promotion="strict"`, `jax_debug_nans` and
`jax_debug_infs` are all on at once, with 32-bit numbers and with 64-bit ones.
"""

import contextlib
import functools
import inspect

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import jaxfused
import jaxfused.linen
import jaxfused.nnx
from jaxfused import masks
from tests.support import optimizer_kernels
from tests.support.grids import pairwise, parametrize
from tests.support.lowering import lowered

pytestmark = pytest.mark.exhaustive

B, T, D = 2, 6, 16


@contextlib.contextmanager
def strictly(x64=False):
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.debug_nans(True),
        jax.debug_infs(True),
        jax.enable_x64(x64),
    ):
        yield


def normal(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def gradients(f, *args):
    """Computes `f` and its gradient to every argument that is a float array."""

    def loss(*args):
        leaves = jax.tree.leaves(f(*args))
        # Squares give each element its own cotangent; EMPTY_LSE is bounded, as its square overflows.
        return sum(jnp.sum(jnp.square(jnp.maximum(y.astype(jnp.float32), -1e3))) for y in leaves)

    return jax.value_and_grad(loss, argnums=tuple(range(len(args))))(*args)


# --- functions ------------------------------------------------------------------------------------
#
# Each is called with its first arrays in the dtype of the computation, and with parameters in float32.

FUNCTIONS = {}


def case(of, name=None):
    """Registers a case of the public function `of`: x's dtype to (function, its float arguments)."""

    def add(make):
        FUNCTIONS[of if name is None else f"{of}-{name}"] = (of, make)
        return make

    return add


def attention(name, arrays=(), **options):
    """Registers a case of dot_product_attention with further float arguments and options."""

    @case("dot_product_attention", name)
    def make(dtype):
        qkv = [normal(i, B, T, 4, 8, dtype=dtype) for i in range(3)]
        names = [n for n, _ in arrays]
        more = [normal(9, *shape) for _, shape in arrays]

        def f(q, k, v, *more):
            given = {n: o() if callable(o) else o for n, o in options.items()}
            given.update(zip(names, more, strict=True))
            return jaxfused.dot_product_attention(q, k, v, **given)

        return f, (*qkv, *more)


attention("plain")
attention("lse", return_lse=True, is_causal=True)
attention("residual", return_residual=True, mask=lambda: jnp.tril(jnp.ones((T, T), bool), -1))
attention("bias", [("bias", (4, T, T)), ("sinks", (4,))], logits_soft_cap=2.0)
attention("mask", mask=lambda: jnp.arange(T) < T // 2, local_window_size=(2, 1))
attention(
    "lengths",
    [("sinks", (4,))],
    query_seq_lengths=lambda: jnp.array([T, 2]),
    key_value_seq_lengths=lambda: jnp.array([0, 3]),
    return_residual=True,
)
attention(
    "segments",
    query_segment_ids=lambda: jnp.array([[0, 0, 1, 1, 2, 2]] * B),
    key_value_segment_ids=lambda: jnp.array([[0, 0, 1, 1, 3, 3]] * B),
)
attention(
    "mask objects and functions",
    mask=lambda: masks.MultiHeadMask([masks.LocalMask((T, T), 1), masks.CausalMask((T, T))] * 2),
    mask_mod=lambda: lambda b, h, q, k: k < T - 1,
    score_mod=lambda: lambda score, b, h, q, k: jnp.tanh(score) - (q - k).astype(score.dtype),
)
attention("offsets", is_causal=True, query_offset=lambda: jnp.array([-2, 3]))
attention("dropout", dropout_rate=0.25, dropout_key=lambda: jax.random.key(0))


@case("context_parallel_attention")
def _(dtype):
    def f(q, k, v, sinks):
        attend = functools.partial(
            jaxfused.context_parallel_attention, axis_name="context", is_causal=True, sinks=sinks
        )
        return jax.vmap(attend, axis_name="context")(*(jnp.stack([a]) for a in (q, k, v)))[0]

    return f, (*(normal(i, B, T, 4, 8, dtype=dtype) for i in range(3)), normal(9, 4))


@case("fuse")
def _(dtype):
    def f(x, scale, wq, wk, wv, w1, w2):
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(wide - mean), axis=-1, keepdims=True)
        y = (wide - mean) * jax.lax.rsqrt(variance + 1e-6)
        y = (y * scale.astype(y.dtype)[None, None]).astype(dtype)
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, w.astype(y.dtype)) for w in (wq, wk, wv))
        logits = jnp.einsum("btnh,bsnh->bnts", q, k)
        mask = (x[..., 0] > 0)[:, None, None] & jnp.tril(jnp.ones((1, 1, T, T), bool))
        p = jax.nn.softmax(jnp.where(mask, logits, -1e9))
        x = x + jnp.einsum("bnts,bsnh->btnh", p, v).reshape(x.shape)
        return x + jax.nn.gelu(x @ w1.astype(dtype)) @ w2.astype(dtype)

    heads = [normal(i, 32, 4, 8, dtype="float32") / 8 for i in (2, 3, 4)]
    mlp = [normal(i, 32, 32, dtype="float32") / 8 for i in (5, 6)]
    x = normal(0, B, T, 32, dtype=dtype)
    return jaxfused.fuse(f), (x, normal(1, 32, dtype="float32"), *heads, *mlp)


@case("batch_norm", "training")
def _(dtype):
    def f(x, scale, bias, residual):
        return jaxfused.batch_norm(x, scale, bias, residual=residual, activation="relu")

    x, residual = normal(0, B, T, D, dtype=dtype), normal(1, B, T, D, dtype=dtype)
    return f, (x, normal(2, D), normal(3, D), residual)


@case("batch_norm", "inference")
def _(dtype):
    def f(x, scale, bias, mean, var):
        return jaxfused.batch_norm(x, scale, bias, mean=mean, var=jnp.square(jnp.asarray(var)))

    return f, (normal(0, B, T, D, dtype=dtype), *(normal(i, D) for i in range(1, 5)))


@case("fold_batch_norm")
def _(dtype):
    def f(w, bias, mean, var, scale):
        return jaxfused.fold_batch_norm(
            w, bias, mean=mean, var=jnp.square(jnp.asarray(var)), norm_scale=scale, norm_bias=scale
        )

    return f, (normal(0, 3, 4, D, dtype=dtype), *(normal(i, D) for i in range(1, 5)))


@case("group_norm", "modulated")
def _(dtype):
    def f(x, scale, image_scale, image_shift):
        return jaxfused.group_norm(
            x, scale, group_size=2, image_scale=image_scale, image_shift=image_shift
        )

    return f, (normal(0, B, T, D, dtype=dtype), normal(1, D), normal(2, B, D), normal(3, B, D))


@case("max_pool")
def _(dtype):
    def f(x):
        return jaxfused.max_pool(x, 3, strides=2, padding="SAME")

    return f, (normal(0, B, T, 5, D, dtype=dtype),)


@case("avg_pool")
def _(dtype):
    def f(x):
        return jaxfused.avg_pool(x, 3, strides=2, padding="SAME", count_include_pad=False)

    return f, (normal(0, B, T, 5, D, dtype=dtype),)


@case("avg_pool", "weighted")
def _(dtype):
    def f(x, weights):
        return jaxfused.avg_pool(x, 2, padding=1, weights=weights, ceil_mode=True)

    return f, (normal(0, B, T, 5, D, dtype=dtype), normal(1, 2, 2) ** 2 + 0.5)


@case("global_avg_pool")
def _(dtype):
    return jaxfused.global_avg_pool, (normal(0, B, T, 5, D, dtype=dtype),)


def pyramid(method):
    @case("spatial_pyramid_pool", method)
    def make(dtype):
        def f(x):
            return jaxfused.spatial_pyramid_pool(x, (1, 2, 4), method)

        return f, (normal(0, B, T, 5, D, dtype=dtype),)


pyramid("max")
pyramid("avg")


@case("blur_pool")
def _(dtype):
    return jaxfused.blur_pool, (normal(0, B, T, 5, D, dtype=dtype),)


@case("carafe")
def _(dtype):
    def f(x, kernels):
        return jaxfused.carafe(x, kernels, kernel_size=3, groups=2)

    return f, (normal(0, B, T, 5, D, dtype=dtype), normal(1, B, 2 * T, 10, 18))


@case("deform_conv")
def _(dtype):
    x, w = normal(0, B, T, 5, D, dtype=dtype), normal(1, 3, 3, D, 4)
    return jaxfused.deform_conv, (
        x,
        w,
        normal(2, B, T, 5, 36),
        normal(3, B, T, 5, 18),
        normal(4, 4),
    )


@case("pixel_shuffle")
def _(dtype):
    return jaxfused.pixel_shuffle, (normal(0, B, T, 5, 4 * D, dtype=dtype),)


@case("pixel_unshuffle")
def _(dtype):
    return jaxfused.pixel_unshuffle, (normal(0, B, 4, 6, D, dtype=dtype),)


def resized(method):
    @case("resize", method)
    def make(dtype):
        def f(x):
            return jaxfused.resize(x, (7, 3), method=method)

        return f, (normal(0, B, T, 5, D, dtype=dtype),)


resized("bilinear")
resized("bicubic")


@case("upsample")
def _(dtype):
    return jaxfused.upsample, (normal(0, B, T, 5, D, dtype=dtype),)


@case("group_norm")
def _(dtype):
    def f(x, scale, bias, residual):
        return jaxfused.group_norm(
            x, scale, bias, num_groups=4, residual=residual, activation="silu"
        )

    x, residual = normal(0, B, T, D, dtype=dtype), normal(1, B, T, D, dtype=dtype)
    return f, (x, normal(2, D), normal(3, D), residual)


def norm(op, **options):
    @case(op, "-".join(options) or "plain")
    def make(dtype):
        def f(x, scale, bias, residual, pre_bias):
            return getattr(jaxfused, op)(
                x, scale, bias, residual=residual, pre_bias=pre_bias, **options
            )

        x = normal(0, B, T, D, dtype=dtype)
        return f, (x, normal(1, D), normal(2, D), normal(3, B, T, D), normal(4, D))


norm("layer_norm")
norm("layer_norm", pre_activation="relu", activation="gelu_erf")
norm("rms_norm", scale_offset=1.0)


def conv(name, shape, kernel, **options):
    @case("conv", name)
    def make(dtype):
        def f(x, w, bias):
            return jaxfused.conv(x, w, bias, **options)

        return f, (normal(0, *shape, dtype=dtype), normal(1, *kernel), normal(2, kernel[-1]))


conv("same", (B, 5, 7, 4), (3, 3, 4, 8), activation="gelu_tanh", strides=2)
conv("circular", (B, 7, 4), (3, 2, 8), padding="CIRCULAR", feature_group_count=2)


@case("conv_transpose")
def _(dtype):
    def f(x, w, bias):
        return jaxfused.conv_transpose(x, w, bias, strides=2, activation="silu")

    return f, (normal(0, B, 3, 4, 5, dtype=dtype), normal(1, 2, 2, 5, 8), normal(2, 8))


@case("linear")
def _(dtype):
    def f(x, w, bias, residual):
        return jaxfused.linear(x, w, bias, activation="gelu_tanh", residual=residual)

    return f, (normal(0, B, T, D, dtype=dtype), normal(1, D, 8), normal(2, 8), normal(3, B, T, 8))


@case("expert_mlp")
def _(dtype):
    def f(x, *w):
        routes = jaxfused.router(jnp.asarray(x)[..., :3], 2, normalise="sum")
        return jaxfused.expert_mlp(x, *routes, *w)

    sizes = ((3, D, 8), (3, D, 8), (3, 8, D))
    x = normal(0, B, T, D, dtype=dtype)
    return f, (x, *(normal(i, *s, dtype=dtype) for i, s in enumerate(sizes)))


@case("expert_parallel_mlp")
def _(dtype):
    def of_device(x, *w):
        routes = jaxfused.router(x[..., :3], 2, normalise="sum")
        return jaxfused.expert_parallel_mlp(x, *routes, *w, axis_name="e", method="all_to_all")

    def f(*args):
        return jax.vmap(of_device, axis_name="e")(*(jnp.stack([a]) for a in args))[0]

    sizes = ((3, D, 8), (3, D, 8), (3, 8, D))
    x = normal(0, B, T, D, dtype=dtype)
    return f, (x, *(normal(i, *s, dtype=dtype) for i, s in enumerate(sizes)))


@case("batched_lora")
def _(dtype):
    def f(x, a, b, base):
        return jaxfused.batched_lora(x, a, b, np.asarray([2, 0]), base=base, scale=np.ones(3))

    x, base = (normal(i, B, T, n, dtype=dtype) for i, n in enumerate((D, 6)))
    return f, (x, normal(2, 3, D, 8), normal(3, 3, 8, 6), base)


@case("router")
def _(dtype):
    def f(logits, bias):
        return jaxfused.router(logits, 2, bias=bias, score="sigmoid", normalise="sum").weights

    return f, (normal(0, B, T, 8, dtype=dtype), normal(1, 8))


@case("load_balancing_loss")
def _(dtype):
    def f(logits):
        chosen = np.arange(T).reshape(T, 1) % 8
        return jaxfused.load_balancing_loss(logits, chosen, mask=np.arange(T) < 5)

    return f, (normal(0, T, 8, dtype=dtype),)


@case("ragged_dot")
def _(dtype):
    def f(x, w):
        return jaxfused.ragged_dot(x, w, np.asarray([3, 0, 4], np.int64))

    return f, (normal(0, T, D, dtype=dtype), normal(1, 3, D, 8, dtype=dtype))


@case("ragged_mlp")
def _(dtype):
    def f(x, *w):
        return jaxfused.ragged_mlp(x, *w, np.asarray([3, 0, 4], np.int64))

    sizes = ((3, D, 8), (3, D, 8), (3, 8, D))
    x = normal(0, T, D, dtype=dtype)
    return f, (x, *(normal(i, *s, dtype=dtype) for i, s in enumerate(sizes)))


@case("ragged_dot_general")
def _(dtype):
    numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])

    def f(x, dy):
        return jaxfused.ragged_dot_general(x, dy, np.asarray([3, 0, 4], np.int64), numbers)

    return f, (normal(0, T, D, dtype=dtype), normal(1, T, 8, dtype=dtype))


@case("block_sparse_matmul")
def _(dtype):
    def f(x, w):
        return jaxfused.block_sparse_matmul(x, jaxfused.BlockSparse.from_dense(w, 32, count=3))

    return f, (normal(0, B, T, 64, dtype=dtype), normal(1, 64, 96))


@case("sparse_matmul")
def _(dtype):
    def f(b, data):
        places = np.asarray([[0, 3], [2, 1], [2, 9]], np.int64)
        return jaxfused.sparse_matmul(BCOO((data, jnp.asarray(places)), shape=(4, T)), b)

    return f, (normal(0, T, D, dtype=dtype), normal(1, 3))


@case("prune24")
def _(dtype):
    return jaxfused.prune24, (normal(0, D, 8, dtype=dtype),)


@case("sparse24_matmul")
def _(dtype):
    return jaxfused.sparse24_matmul, (normal(0, B, T, D, dtype=dtype), normal(1, D, 8))


@case("sampled_matmul")
def _(dtype):
    pattern = BCOO.fromdense(np.eye(T, 8, dtype=np.float32))

    def f(x, y):
        return jaxfused.sampled_matmul(x, y, pattern).data

    return f, (normal(0, T, D, dtype=dtype), normal(1, D, 8, dtype=dtype))


def mlp(save, activation):
    @case("mlp", save)
    def make(dtype):
        def f(x, w1, b1, w2, b2):
            return jaxfused.mlp(x, w1, b1, w2, b2, activation=activation, save=save)

        sizes = ((D, 32), (32,), (32, D), (D,))
        x = normal(0, B, T, D, dtype=dtype)
        return f, (x, *(normal(i, *s) for i, s in enumerate(sizes)))

    @case("gated_mlp", save)
    def make_gated(dtype):
        def f(x, w_gate, w_up, w_down, b_gate, b_up, b_down):
            return jaxfused.gated_mlp(
                x, w_gate, w_up, w_down, b_gate=b_gate, b_up=b_up, b_down=b_down, save=save
            )

        sizes = ((D, 32), (D, 32), (32, D), (32,), (32,), (D,))
        x = normal(0, B, T, D, dtype=dtype)
        return f, (x, *(normal(i, *s) for i, s in enumerate(sizes)))


mlp("hidden", "relu2")
mlp("inputs", "silu")


@case("qkv_projection")
def _(dtype):
    def f(x, w, bias, q_scale, k_scale):
        cos, sin = jaxfused.rope_tables(jnp.arange(T), 8)
        return jaxfused.qkv_projection(
            x,
            w,
            bias,
            heads=4,
            key_heads=2,
            q_scale=q_scale,
            k_scale=k_scale,
            cos=cos,
            sin=sin,
        )

    x = normal(0, B, T, D, dtype=dtype)
    return f, (x, normal(1, D, 64), normal(2, 64), normal(3, 8), normal(4, 8))


@case("rope")
def _(dtype):
    def f(q, k):
        return jaxfused.rope(q, k, offset=jnp.array([3, 4]), rotary_dim=4, interleaved=True)

    return f, (normal(0, B, T, 4, 8, dtype=dtype), normal(1, B, T, 2, 8, dtype=dtype))


@case("rope", "scaled")
def _(dtype):
    scaling = jaxfused.YarnRope(4.0, 16)
    return (
        lambda q: jaxfused.rope(q, positions=jnp.arange(T), scaling=scaling),
        (normal(0, B, T, 4, 8, dtype=dtype),),
    )


@case("rope_tables")
def _(dtype):
    def f(p):
        cos, sin = jaxfused.rope_tables(p, 8, scaling=jaxfused.Llama3Rope())
        # With equal factors the sum of squares is 1, and its gradient is only rounding.
        return 2 * cos, sin

    return f, (normal(0, T, dtype=dtype),)


@case("axial_rope_tables")
def _(dtype):
    def f(q):
        cos, sin = jaxfused.axial_rope_tables(2, 3, 8)
        q = jaxfused.rope(q, cos=cos, sin=sin)
        places = jnp.arange(2 * T).reshape(T, 2)
        cos, sin = jaxfused.axial_rope_tables(positions=places, frequencies=jnp.ones((2, 4, 4)))
        return jaxfused.rope(q, cos=cos, sin=sin, interleaved=True)

    return f, (normal(0, B, T, 4, 8, dtype=dtype),)


@case("rope", "by the length")
def _(dtype):
    def f(q):
        q = jaxfused.rope(q, scaling=jaxfused.DynamicNTKRope(4.0, 3))
        return jaxfused.rope(q, scaling=jaxfused.LongRope([1.0] * 4, [2.0] * 4, 3, 4.0))

    return f, (normal(0, B, T, 4, 8, dtype=dtype),)


@case("softmax_cross_entropy")
def _(dtype):
    def f(logits, weights):
        return jaxfused.softmax_cross_entropy(
            logits,
            jnp.arange(T) - 1,
            label_smoothing=0.1,
            z_loss=0.01,
            ignore_index=-1,
            weights=weights,
        )

    return f, (normal(0, T, D, dtype=dtype), normal(1, T))


@case("softmax_cross_entropy", "soft")
def _(dtype):
    def f(logits, labels):
        labels = jax.nn.softmax(jnp.asarray(labels))
        return jaxfused.softmax_cross_entropy(logits, labels, reduction="none")

    return f, (normal(0, T, D, dtype=dtype), normal(1, T, D))


for smoothing in (0.0, 0.1):

    @case("softmax_cross_entropy", f"class-weights-{smoothing}")
    def _(dtype, smoothing=smoothing):
        def f(logits, class_weights):
            return jaxfused.softmax_cross_entropy(
                logits, jnp.arange(T), class_weights=class_weights, label_smoothing=smoothing
            )

        return f, (normal(0, T, D, dtype=dtype), normal(1, D))


@case("linear_softmax_cross_entropy", "class-weights")
def _(dtype):
    def f(x, w, class_weights):
        return jaxfused.linear_softmax_cross_entropy(
            x, w, jnp.arange(T), class_weights=class_weights, label_smoothing=0.1
        )

    return f, (normal(0, T, D, dtype=dtype), normal(1, D, 10), normal(2, 10))


@case("linear_softmax_cross_entropy")
def _(dtype):
    def f(x, w, bias):
        return jaxfused.linear_softmax_cross_entropy(
            x, w, jnp.arange(T), bias, chunk_size=4, z_loss=0.01
        )

    return f, (normal(0, T, D, dtype=dtype), normal(1, D, 10), normal(2, 10))


@case("sigmoid_cross_entropy")
def _(dtype):
    def f(logits, weights):
        labels = jnp.arange(B * T, dtype=jnp.uint8).reshape(B, T) % 3
        return jaxfused.sigmoid_cross_entropy(
            logits, labels, weights=weights, ignore_index=2, focal_gamma=2.0, focal_alpha=0.3
        )

    return f, (normal(0, B, T, dtype=dtype), normal(1, B, T))


TABLE = (lambda: jnp.array([5, 3]), lambda: jnp.array([[2, 0], [1, 9]]))


@case("paged_attention")
def _(dtype):
    def f(q, k, v, sinks):
        lengths, table = (make() for make in TABLE)
        options = dict(sinks=sinks, sliding_window=3, layout="PSKH")
        return jaxfused.paged_attention(q, k, v, lengths, table, **options)

    pages = (normal(i, 3, 4, 2, 8, dtype=dtype) for i in (1, 2))
    return f, (normal(0, B, 4, 8, dtype=dtype), *pages, normal(3, 4))


@case("ragged_paged_attention")
def _(dtype):
    def f(q, pages):
        lengths, table = (make() for make in TABLE)
        starts = jnp.array([0, 4, 5])
        return jaxfused.ragged_paged_attention(q, pages, lengths, table, starts, soft_cap=2.0)

    return f, (normal(0, 7, 4, 8, dtype=dtype), normal(1, 3, 4, 4, 8, dtype=dtype))


@case("append_to_pages")
def _(dtype):
    def f(pages, key, value):
        lengths, table = (make() for make in TABLE)
        return jaxfused.append_to_pages(pages, key, value, lengths, table, jnp.array([0, 4, 5]))

    new = (normal(i, 7, 2, 8, dtype=dtype) for i in (1, 2))
    return f, (normal(0, 3, 4, 4, 8, dtype=dtype), *new)


@case("sample")
def _(dtype):
    def f(logits, top_p):
        tokens = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
        penalties = dict(tokens=tokens, presence_penalty=0.5, repetition_penalty=1.1)
        return jaxfused.sample(logits, 7, top_k=5, top_p=top_p, min_p=0.1, logprobs=2, **penalties)

    return f, (normal(0, B, D, dtype=dtype), jnp.full(B, 0.9))


@case("segmentation_loss", "classes")
def _(dtype):
    def f(logits, weights):
        labels = jnp.arange(B * 12).reshape(B, 3, 4) % 3
        return jaxfused.segmentation_loss(logits, labels, weights=weights, ignore_index=2)

    return f, (normal(0, B, 3, 4, 5, dtype=dtype), normal(1, B, 3, 4))


@case("segmentation_loss", "binary")
def _(dtype):
    def f(logits):
        return jaxfused.segmentation_loss(logits, jnp.ones((B, 3, 4), bool))

    return f, (normal(0, B, 3, 4, dtype=dtype),)


@case("segmentation_loss", "bytes")
def _(dtype):
    def f(logits):
        return jaxfused.segmentation_loss(logits, jnp.ones((B, 3, 4), jnp.uint8), focal_gamma=2.0)

    return f, (normal(0, B, 3, 4, dtype=dtype),)


def quantisation(dtype_name, **options):
    @case("fake_quantize", dtype_name)
    def make(dtype):
        return (
            lambda x: jaxfused.fake_quantize(x, dtype_name, **options),
            (normal(0, D, 8, dtype=dtype),),
        )

    @case("quantize", dtype_name)
    def make_quantized(dtype):
        def f(x):
            q = jaxfused.quantize(x, dtype_name, **options)
            return q.dequantize() + jaxfused.quantize(x, dtype_name, per_tensor=True).dequantize()

        return f, (normal(0, D, 8, dtype=dtype),)

    @case("quantized_matmul", dtype_name)
    def make_product(dtype):
        def f(x, bias, residual, w):
            w = jaxfused.quantize(w, dtype_name, **options)
            return jaxfused.quantized_matmul(x, w, bias, activation="relu", residual=residual)

        x = normal(0, B, T, D, dtype=dtype)
        return f, (x, normal(1, 8), normal(2, B, T, 8), normal(3, D, 8))


quantisation("int8", symmetric=False)
quantisation("int4", group_size=4)
quantisation("float8_e4m3fn")


def quantised_rows(symmetric):
    @case("quantize_rows", f"symmetric-{symmetric}")
    def make(dtype):
        def f(x, w, bias):
            w = jaxfused.quantize(w, symmetric=symmetric)
            return jaxfused.quantized_matmul(jaxfused.quantize_rows(x), w, bias)

        return f, (normal(0, B, T, D, dtype=dtype), normal(1, D, 8), normal(2, 8))


quantised_rows(True)
quantised_rows(False)


@case("quantized_conv")
def quantised_weights(dtype):
    def f(x, bias, residual, w):
        w = jaxfused.quantize(w)
        return jaxfused.quantized_conv(
            x, w, bias, kernel_size=3, activation="relu", residual=residual
        )

    x = normal(0, B, T, D, dtype=dtype)
    return f, (x, normal(1, 8), normal(2, B, T, 8), normal(3, 3 * D, 8))


@case("quantized_conv", "quantised-input")
def quantised_input(dtype):
    def f(x, bias, w):
        x, w = jaxfused.quantize(x, axis=-1, per_tensor=True), jaxfused.quantize(w)
        return jaxfused.quantized_conv(x, w, bias, kernel_size=3)

    return f, (normal(0, B, T, D, dtype=dtype), normal(1, 8), normal(2, 3 * D, 8))


# (x64, dtype of x): bfloat16 or float64, with float32 parameters.
MODES = ((False, "bfloat16"), (True, "float64"))
NAMES_AND_MODES = [(name, *mode) for name in FUNCTIONS for mode in MODES]


@pytest.mark.parametrize(("name", "x64", "dtype"), NAMES_AND_MODES)
def test_function(name, x64, dtype):
    _, make = FUNCTIONS[name]
    with jax.enable_x64(x64):
        f, args = make(dtype)
        expected = jax.jit(functools.partial(gradients, f))(*args)
    with strictly(x64):
        # Not jitted: in a jitted program, JAX would check only results, where infinities may not occur.
        actual = gradients(f, *args)

    # A jitted program may round less often.
    def assert_near(actual, expected):
        actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
        largest = np.abs(expected).max(initial=0.0)
        allowed = 4 * float(jnp.finfo(dtype).eps if dtype == "bfloat16" else 1e-6) * largest
        np.testing.assert_allclose(actual, expected, rtol=0, atol=allowed)

    jax.tree.map(assert_near, actual, expected)


def test_every_function_has_a_case():
    # These functions take functions, a model or counts, and have tests of their own: test_tuning.py,
    # test_quantize_params_trees.py, test_calibration.py and test_context_parallel.py.
    without_arrays = {"calibrate", "explain", "quantize_params", "rope_from_config", "tune"}
    without_arrays |= {"zigzag_order"}
    functions = {
        n
        for n, f in inspect.getmembers(jaxfused)
        if inspect.isfunction(f) and not n.startswith("_")
    }
    assert functions - without_arrays == {of for of, _ in FUNCTIONS.values()}


# --- modules --------------------------------------------------------------------------------------

RNGS = {"params": 0, "dropout": 1}
ROUTER = functools.partial(jaxfused.router, k=2, normalise="sum")
BLOCK = dict(num_kv_heads=2, normalize_qk=True, gated=True, drop_path_rate=0.5)

# By module: nnx's arguments and options, Linen's class and options, shape of x.
MODULES = {
    "BatchNorm": ((D,), {}, ("BatchNorm", dict(use_running_average=False)), (B, T, D)),
    "Conv": ((D, 8, 3), {}, ("Conv", dict(features=8, kernel_size=3)), (B, T, D)),
    "ConvTranspose": (
        (D, 8, 2, 2),
        {},
        ("ConvTranspose", dict(features=8, kernel_size=2, strides=2)),
        (B, T, D),
    ),
    "ConvNormAct": (
        (D, 8, 3),
        dict(norm="group_norm", num_groups=2),
        ("ConvNormAct", dict(features=8, kernel_size=3, norm="group_norm", num_groups=2)),
        (B, T, D),
    ),
    "ConvNeXtBlock": (
        (D,),
        dict(kernel_size=(3, 3), drop_path_rate=0.5),
        ("ConvNeXtBlock", dict(kernel_size=(3, 3), drop_path_rate=0.5, deterministic=False)),
        (B, 4, 5, D),
    ),
    "GroupNorm": ((D, 4), {}, ("GroupNorm", dict(num_groups=4)), (B, T, D)),
    "InstanceNorm": ((D,), {}, ("InstanceNorm", {}), (B, T, D)),
    "LayerNorm": ((D,), {}, ("LayerNorm", {}), (B, T, D)),
    "RMSNorm": ((D,), dict(scale_offset=1.0), ("RMSNorm", dict(scale_offset=1.0)), (B, T, D)),
    "Linear": ((D, 8), {}, ("Dense", dict(features=8)), (B, T, D)),
    "MLP": ((D, 32), {}, ("MLP", dict(hidden_features=32)), (B, T, D)),
    "GatedMLP": ((D, 32), {}, ("GatedMLP", dict(hidden_features=32)), (B, T, D)),
    "SparseLinear": (
        (64, 96),
        dict(block_size=32, density=0.5),
        ("SparseLinear", dict(features=96, block_size=32, density=0.5)),
        (B, T, 64),
    ),
    "MoE": (
        (D, 16, 4),
        dict(router=ROUTER, shared_features=8),
        (
            "MoE",
            dict(hidden_features=16, num_experts=4, router=ROUTER, shared_features=8),
        ),
        (B, T, D),
    ),
    "MultiHeadAttention": (
        (4, D),
        dict(decode=False),  # Not normalize_qk: Flax's norm refuses to promote dtypes.
        ("MultiHeadAttention", dict(num_heads=4)),
        (B, T, D),
    ),
    "QuantizedLinear": (
        (D, 8),
        dict(input_dtype="int8"),
        ("QuantizedDense", dict(features=8, input_dtype="int8")),
        (B, T, D),
    ),
    "ResNetBlock": (
        (D, 8),
        dict(norm="group_norm", num_groups=4),
        ("ResNetBlock", dict(features=8, norm="group_norm", num_groups=4)),
        (B, 4, 5, D),
    ),
    "RotaryEmbedding": ((), {}, ("RotaryEmbedding", {}), (B, T, 4, 8)),
    "SeparableConv": (
        (D, 8, 3),
        dict(depthwise_activation="silu"),
        ("SeparableConv", dict(features=8, kernel_size=3, depthwise_activation="silu")),
        (B, T, D),
    ),
    "TransformerBlock": (
        (D, 4),
        dict(**BLOCK, is_causal=True),
        ("TransformerBlock", dict(num_heads=4, is_causal=True, **BLOCK)),
        (B, T, D),
    ),
    "BlurPool": ((), {}, ("BlurPool", {}), (B, 4, 5, D)),
    "CARAFE": (
        (D,),
        dict(kernel_size=3, compressed_features=8),
        ("CARAFE", dict(kernel_size=3, compressed_features=8)),
        (B, 4, 5, D),
    ),
    "DeformConv": (
        (D, 8, 3),
        dict(offset_groups=2),
        ("DeformConv", dict(features=8, kernel_size=3, offset_groups=2)),
        (B, 4, 5, D),
    ),
    "PixelShuffle": ((), {}, ("PixelShuffle", {}), (B, 4, 5, D)),
    "PixelUnshuffle": ((), {}, ("PixelUnshuffle", {}), (B, 4, 6, D)),
    "Resize": ((7,), {}, ("Resize", dict(size=7)), (B, 4, 5, D)),
    "Upsample": (
        ("learned",),
        dict(in_features=D),
        ("Upsample", dict(method="learned")),
        (B, 4, 5, D),
    ),
}
ROTATION = {"TransformerBlock"}


def modules_of(package, base):
    return {n for n, c in vars(package).items() if inspect.isclass(c) and issubclass(c, base)}


def test_every_module_has_a_case():
    # Einsum and LinearGeneral behave like Linear; a DiT block needs a condition too.
    others = {"DiTBlock", "Einsum", "LinearGeneral"}
    assert modules_of(jaxfused.nnx, flax.nnx.Module) - others == set(MODULES)
    names = {linen for _, _, (linen, _), _ in MODULES.values()}
    own = modules_of(jaxfused.linen, flax.linen.Module)
    # Attention under another name, attention with queries as keys, and Flax's own code.
    others |= {"ConvLocal", "DenseGeneral", "MultiHeadDotProductAttention", "SelfAttention"}
    assert own - others == names


def nnx_gradients(name, dtype, x):
    sizes, arguments, _, _ = MODULES[name]
    if name != "RotaryEmbedding":
        taken = inspect.signature(getattr(jaxfused.nnx, name).__init__).parameters
        given = dict(rngs=flax.nnx.Rngs(params=0, dropout=1), dtype=dtype)
        arguments = arguments | {key: given[key] for key in given if key in taken}
    if name in ROTATION:
        arguments["rope"] = jaxfused.nnx.RotaryEmbedding()
    module = getattr(jaxfused.nnx, name)(*sizes, **arguments)
    graphdef, params, rest = flax.nnx.split(module, flax.nnx.Param, ...)

    def f(params, x):
        return flax.nnx.merge(graphdef, params, rest, copy=True)(x)

    return gradients(f, params, x)


def linen_gradients(name, dtype, x):
    _, _, (linen_name, arguments), _ = MODULES[name]
    make = getattr(jaxfused.linen, linen_name)
    if "dtype" in make.__dataclass_fields__:
        arguments = dict(arguments, dtype=dtype)
    if name in ROTATION:
        arguments["rope"] = jaxfused.linen.RotaryEmbedding()
        arguments["deterministic"] = False
    module = make(**arguments)
    rngs = {k: jax.random.key(v) for k, v in RNGS.items()}
    variables = module.init(rngs, x)
    params = variables.pop("params", {})
    if name == "QuantizedLinear":
        variables, params = {"params": params}, {}

    def f(params, x):
        given = {"params": params, **variables} if params else variables
        y, _ = module.apply(given, x, rngs=rngs, mutable=["batch_stats"])
        return y

    return gradients(f, params, x)


@parametrize(
    ("name", "run", "mode"),
    pairwise([*MODULES], [nnx_gradients, linen_gradients], MODES),
    quick=(),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_module(name, run, mode):
    x64, dtype = mode
    with strictly(x64):
        x = normal(0, *MODULES[name][-1])
        leaves = jax.tree.leaves(run(name, jnp.dtype(dtype), x))
    assert all(np.isfinite(np.asarray(a, np.float64)).all() for a in leaves)


@pytest.mark.parametrize(("x64", "dtype"), MODES)
def test_quantize_params(x64, dtype):
    with strictly(x64):
        module = jaxfused.nnx.MLP(D, 32, dtype=jnp.dtype(dtype), rngs=flax.nnx.Rngs(0))
        module = jaxfused.quantize_params(module, "int8")
        assert jnp.isfinite(module(normal(0, B, T, D))).all()


@parametrize(
    ("name", "implementation", "mode"),
    pairwise(["adam", "adamw", "adamw8bit", "lamb", "lion", "sgd"], ["xla", "cuda"], MODES),
    quick=(),
)
def test_optimizer(monkeypatch, implementation, name, mode):
    x64, dtype = mode
    dtype = "float32" if implementation == "cuda" else dtype  # Kernels do not support float64.
    with strictly(x64), optimizer_kernels.stood_in_for(monkeypatch):
        params = {"w": normal(0, 16, 256).astype(dtype), "b": normal(1, 3).astype(dtype)}
        grads = {"w": normal(2, 16, 256).astype(dtype), "b": normal(3, 3).astype(dtype)}
        opt = getattr(jaxfused.optim, name)(0.1)
        options = dict(ema_decay=0.9, compute_dtype=jnp.bfloat16, loss_scale=8.0, rounding_seed=1)
        state = opt.init_step(params, **options)
        expected = jax.tree.map(jnp.shape, params)
        params, state = opt.step(grads, state, params, max_norm=1.0, implementation=implementation)
        assert jax.tree.map(jnp.shape, params) == expected
        params, _ = opt.step(grads, opt.init(params), params, implementation=implementation)


# --- kernels --------------------------------------------------------------------------------------

KERNELS = {
    "layer_norm": (
        lambda x, scale: jaxfused.layer_norm(x, scale, residual=x, implementation="pallas"),
        ((2, 64, 128), (128,)),
    ),
    "mlp": (
        lambda x, w1, b1, w2: jaxfused.mlp(x, w1, b1, w2, implementation="pallas"),
        ((2, 128, 256), (256, 512), (512,), (512, 256)),
    ),
    "rope": (
        lambda q, k: jaxfused.rope(q, k, implementation="pallas"),
        ((2, 64, 4, 64), (2, 64, 2, 64)),
    ),
    "qkv_projection": (
        lambda x, w, scale: jaxfused.qkv_projection(
            x, w, heads=2, q_scale=scale, k_scale=scale, implementation="pallas"
        ),
        ((2, 128, 256), (256, 384), (64,)),
    ),
    "attention": (
        lambda q, k, v, bias, sinks: jaxfused.dot_product_attention(
            q,
            k,
            v,
            bias,
            sinks=sinks,
            key_value_seq_lengths=jnp.array([5, 7]),
            logits_soft_cap=5.0,
            dropout_rate=0.25,
            dropout_key=jax.random.key(0),
            implementation="pallas",
        ),
        (*[(2, 192, 4, 64)] * 3, (1, 4, 192, 192), (4,)),
    ),
}


@parametrize("name", [*KERNELS], quick=())
def test_kernels_lower(hopper, name):
    f, shapes = KERNELS[name]
    with strictly(x64=True):
        # Vectors are parameters, which stay in float32.
        args = [
            jax.ShapeDtypeStruct(shape, jnp.float32 if len(shape) == 1 else jnp.bfloat16)
            for shape in shapes
        ]
        text = lowered(functools.partial(gradients, f), *args)
    assert "mosaic_gpu" in text
