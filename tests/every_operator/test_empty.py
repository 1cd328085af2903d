"""Calls without images, rows, queries or keys: empty results, and gradients of zeros, as in JAX.

Kernels are never launched for them. Shapes are derived on a CPU, and for GPUs that have every kernel.
"""

import flax.nnx
import jax
import jax.numpy as jnp
import pytest
from jax.experimental.sparse import BCOO

import jaxfused
import jaxfused.linen
import jaxfused.nnx
from jaxfused import dispatch
from jaxfused.runtime import cuda_library
from tests.support.grids import parametrize

D = 16
IMAGES = jnp.zeros((0, 8, 8, D), jnp.bfloat16)
PARAMETERS = jnp.ones(D)


def ones(*shape):
    return jnp.ones(shape, jnp.bfloat16)


def int8(*shape):
    return jaxfused.quantize(jnp.ones(shape), "int8")


OF_IMAGES = {
    "group_norm": lambda x: jaxfused.group_norm(x, PARAMETERS, num_groups=4, activation="silu"),
    "group_norm of each image": lambda x: jaxfused.group_norm(
        x, num_groups=4, image_scale=jnp.ones((0, D)), image_shift=jnp.ones((0, D))
    ),
    "batch_norm": lambda x: jaxfused.batch_norm(x, PARAMETERS, residual=x),
    "batch_norm, inference": lambda x: jaxfused.batch_norm(x, mean=PARAMETERS, var=PARAMETERS),
    "conv": lambda x: jaxfused.conv(x, ones(3, 3, D, D), activation="silu"),
    "conv 1 x 1": lambda x: jaxfused.conv(x, ones(1, 1, D, D)),
    "conv, depthwise": lambda x: jaxfused.conv(x, ones(3, 3, 1, D), feature_group_count=D),
    "conv, long window": lambda x: jaxfused.conv(x, ones(31, 31, 1, D), feature_group_count=D),
    "conv_transpose": lambda x: jaxfused.conv_transpose(x, ones(2, 2, D, D), strides=2),
    "max_pool": lambda x: jaxfused.max_pool(x, 2),
    "avg_pool": lambda x: jaxfused.avg_pool(x, 2),
    "global_avg_pool": jaxfused.global_avg_pool,
    "spatial_pyramid_pool": lambda x: jaxfused.spatial_pyramid_pool(x, (1, 2), "max"),
    "upsample": jaxfused.upsample,
    "blur_pool": jaxfused.blur_pool,
    "carafe": lambda x: jaxfused.carafe(x, jnp.ones((*x.shape[:3], 9)), kernel_size=3),
    "deform_conv": lambda x: jaxfused.deform_conv(x, ones(1, 1, D, D), jnp.ones((*x.shape[:3], 2))),
    "pixel_shuffle": jaxfused.pixel_shuffle,
    "pixel_unshuffle": jaxfused.pixel_unshuffle,
    "resize": lambda x: jaxfused.resize(x, 7),
    "segmentation_loss": lambda x: jaxfused.segmentation_loss(
        x, jnp.zeros(x.shape[:-1], int), reduction="none"
    ),
}


def vectors(x):
    return jnp.ones((x.shape[0], D))


def attention(x):
    heads = x.reshape(*x.shape[:2], 2, D // 2)
    ids, lengths = jnp.zeros(x.shape[:2], int), jnp.zeros(x.shape[0], int)
    return jaxfused.dot_product_attention(
        heads,
        heads,
        heads,
        query_segment_ids=ids,
        key_value_segment_ids=ids,
        key_value_seq_lengths=lengths,
        sinks=jnp.ones(2),
        return_lse=True,
    )


def linen(module, *arrays):
    def apply(x):
        variables = module.init(jax.random.key(0), jnp.ones((2, 6, D)), *(a(x)[:1] for a in arrays))
        return module.apply(variables, x, *(a(x) for a in arrays))

    return apply


def made(kind, *sizes, **options):
    return lambda x: getattr(jaxfused.nnx, kind)(*sizes, rngs=flax.nnx.Rngs(0), **options)(x)


OF_ROWS = {
    "layer_norm": lambda x: jaxfused.layer_norm(x, PARAMETERS, residual=x),
    "rms_norm": lambda x: jaxfused.rms_norm(x, PARAMETERS),
    "layer_norm of each image": lambda x: jaxfused.layer_norm(
        x, residual=x, image_scale=vectors(x), image_shift=vectors(x), gate=vectors(x)
    ),
    "linear": lambda x: jaxfused.linear(x, ones(D, D), ones(D), activation="silu"),
    "linear, fp8": lambda x: jaxfused.linear(x, ones(D, D), precision="fp8"),
    "mlp": lambda x: jaxfused.mlp(x, ones(D, 32), None, ones(32, D), None),
    "gated_mlp": lambda x: jaxfused.gated_mlp(x, ones(D, 32), ones(D, 32), ones(32, D)),
    "ragged_dot": lambda x: jaxfused.ragged_dot(
        x.reshape(x.shape[0] * x.shape[1], D), ones(3, D, 32), jnp.zeros(3, int)
    ),
    "ragged_mlp": lambda x: jaxfused.ragged_mlp(
        x.reshape(x.shape[0] * x.shape[1], D),
        *[ones(3, D, 32)] * 2,
        ones(3, 32, D),
        jnp.zeros(3, int),
    ),
    "batched_lora": lambda x: jaxfused.batched_lora(
        x, ones(3, D, 8), ones(3, 8, 32), jnp.zeros(x.shape[:1], int)
    ),
    "block_sparse_matmul": lambda x: jaxfused.block_sparse_matmul(
        ones(*x.shape[:2], 32), jaxfused.BlockSparse.from_dense(ones(32, 64), 32, count=2)
    ),
    "sparse24_matmul": lambda x: jaxfused.sparse24_matmul(x, ones(D, 32)),
    "sparse_matmul": lambda x: jaxfused.sparse_matmul(
        BCOO.fromdense(x.reshape(x.shape[0] * x.shape[1], D), nse=0), ones(D, 3)
    ),
    "sampled_matmul": lambda x: (
        jaxfused.sampled_matmul(
            x.reshape(x.shape[0] * x.shape[1], D),
            ones(D, 3),
            BCOO.fromdense(ones(x.shape[0] * x.shape[1], 3), nse=0),
        ).data
    ),
    "expert_mlp": lambda x: jaxfused.expert_mlp(
        x, *jaxfused.router(x, 2), ones(D, D, 32), ones(D, D, 32), ones(D, 32, D)
    ),
    "gated_mlp, fp8": lambda x: jaxfused.gated_mlp(
        x, ones(D, 32), ones(D, 32), ones(32, D), precision="fp8"
    ),
    "qkv_projection": lambda x: jaxfused.qkv_projection(x, ones(D, 3 * D), heads=2),
    "rope": lambda x: jaxfused.rope(x.reshape(*x.shape[:2], 2, 8)),
    "sample": lambda x: jaxfused.sample(x, 7, top_p=0.9, top_k=3),
    "attention": attention,
    "softmax_cross_entropy": lambda x: jaxfused.softmax_cross_entropy(
        x, jnp.zeros(x.shape[:2], int), reduction="none"
    ),
    "linear_softmax_cross_entropy": lambda x: jaxfused.linear_softmax_cross_entropy(
        x, ones(D, 32), jnp.zeros(x.shape[:2], int), reduction="none"
    ),
    "quantized_matmul": lambda x: jaxfused.quantized_matmul(x, int8(D, D)),
    "fake_quantize": lambda x: jaxfused.fake_quantize(x, "int8"),
    "nnx.TransformerBlock": made("TransformerBlock", D, 2),
    "nnx.DiTBlock": lambda x: jaxfused.nnx.DiTBlock(D, 2, rngs=flax.nnx.Rngs(0))(x, vectors(x)),
    "nnx.MLP": made("MLP", D, 32),
    "linen.TransformerBlock": linen(jaxfused.linen.TransformerBlock(2)),
}


@pytest.fixture(params=["cpu", "H200", pytest.param("T4", marks=pytest.mark.exhaustive)])
def device(request, monkeypatch):
    """Assumes a CPU, or a GPU for which all kernels are there."""
    monkeypatch.setattr(cuda_library, "why_unavailable", lambda: None)
    monkeypatch.setattr(cuda_library, "register", lambda: None)
    assumed = {
        "cpu": dispatch.Device("cpu", "cpu", None, 0),
        "H200": dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132),
        "T4": dispatch.Device("gpu", "Tesla T4", (7, 5), 40),
    }
    with dispatch.assume(assumed[request.param]):
        yield
    jax.clear_caches()


def assert_empty(f, x):
    def value_and_gradient(x):
        y, vjp = jax.vjp(f, x)
        return y, vjp(y)

    y, (dx,) = jax.eval_shape(value_and_gradient, x)
    assert (dx.shape, dx.dtype) == (x.shape, x.dtype)
    return y


def test_without_images(device):
    for name, f in OF_IMAGES.items():
        y = assert_empty(f, IMAGES)
        y = y[0] if name == "batch_norm" else y
        assert y.shape[0] == 0, name


@parametrize("shape", [(0, 6, D), (2, 0, D)], quick=(0,))
def test_without_rows(device, shape):
    for name, f in OF_ROWS.items():
        dtype = jnp.float32 if "Block" in name else jnp.bfloat16
        y = jax.tree.leaves(assert_empty(f, jnp.zeros(shape, dtype)))
        assert all(0 in leaf.shape for leaf in y), name


def test_values():
    """Without images or rows, the gradients of the parameters are zero."""
    gradient = jax.jit(jax.grad(lambda s: jaxfused.group_norm(IMAGES, s, num_groups=4).sum()))
    assert not gradient(PARAMETERS.astype(jnp.bfloat16)).any()
    w = jnp.ones((D, 8))
    assert not jax.jit(jax.grad(lambda w: jaxfused.linear(jnp.zeros((2, 0, D)), w).sum()))(w).any()
