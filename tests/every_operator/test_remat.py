"""Values that jax.checkpoint's policies save: counts of kernels in differentiated programs."""

import collections

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxfused
from jaxfused import remat_policies
from tests.support.grids import parametrize

POLICIES = {
    "none": None,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots of JAX": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "dots": remat_policies.dots_with_no_batch_dims_saveable,
    "dots and attention": remat_policies.dots_saveable,
    "attention": remat_policies.save_only_these_names("dot_product_attention"),
    "context": remat_policies.save_only_these_names("context"),
    "outputs": remat_policies.save_only_these_names("output"),
}
FORWARDS = (
    "layer_norm forward",
    "qkv_projection forward",
    "dot_product_attention forward",
    "linear forward",
    "mlp first layer",
    "mlp last layer",
)
# Runs of forward kernels in a block's gradient if all is saved: a block has two norms.
ONCE = dict(zip(FORWARDS, (2, 1, 1, 1, 1, 1), strict=True))
# The backward needs no recomputation of a block's last product.
AGAIN = {name: count * (1 + (name != "mlp last layer")) for name, count in ONCE.items()}
RUNS = {
    "none": AGAIN,
    "everything": ONCE,
    "dots of JAX": AGAIN,
    "dots": ONCE | {"layer_norm forward": 4, "dot_product_attention forward": 2},
    "dots and attention": ONCE | {"layer_norm forward": 4},
    "attention": AGAIN | {"dot_product_attention forward": 1},
    "context": AGAIN,
    # A norm's input sum and an activation's preactivation are not outputs, and are recomputed.
    "outputs": ONCE | {"mlp first layer": 2, "layer_norm forward": 3},
}


def block(x, params):
    """Computes a Transformer block with this package's operators."""
    qkv, out, bias, w1, w2 = params
    y = jaxfused.layer_norm(x)
    q, k, v = jaxfused.qkv_projection(y, qkv, heads=2)
    attended = jaxfused.dot_product_attention(q, k, v).reshape(x.shape)
    attended = jax.ad_checkpoint.checkpoint_name(attended, "context")
    branch = jaxfused.linear(attended, out, bias)
    y, stream = jaxfused.layer_norm(branch, residual=x)
    return jaxfused.mlp(y, w1, None, w2, residual=stream)


SHAPES = ((256, 768), (256, 256), (256,), (256, 512), (512, 256))
PARAMS = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES)
X = jax.ShapeDtypeStruct((2, 128, 256), jnp.bfloat16)


def counted(f, *args) -> collections.Counter:
    """Returns how often each kernel is called in the program of `f`, without unused operations."""
    jaxpr = jax.make_jaxpr(f)(*args)
    found: collections.Counter = collections.Counter()

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            name = eqn.params.get("name", "")
            if isinstance(name, str) and name.startswith("jaxfused_"):
                found[name.removeprefix("jaxfused_").replace("_", " ")] += 1
                continue
            for value in eqn.params.values():
                for inner in value if isinstance(value, (list, tuple)) else [value]:
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        visit(inner)

    visit(jaxpr.jaxpr)
    return found


@parametrize("policy", [*POLICIES], quick=(2, 3, 5))
def test_forward_kernels_run_as_often_as_the_policy_says(hopper, policy):
    def loss(x, params):
        apply = jax.checkpoint(block, policy=POLICIES[policy])
        return jnp.sum(apply(x, params).astype(jnp.float32) ** 2)

    found = counted(jax.grad(loss, (0, 1)), X, PARAMS)
    forwards = {name: found[name.replace("_", " ")] for name in FORWARDS}
    assert forwards == RUNS[policy]


def stock_block(x, params):
    """Computes the same block in plain JAX."""
    qkv, out, bias, w1, w2 = params

    def norm(x):
        wide = x.astype(jnp.float32)
        wide = wide - wide.mean(-1, keepdims=True)
        return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)

    q, k, v = (h.reshape(*x.shape[:2], 2, -1) for h in jnp.split(norm(x) @ qkv, 3, axis=-1))
    x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ out + bias
    return x + jax.nn.gelu(norm(x) @ w1) @ w2


def saved_bytes(f, policy) -> int:
    """Returns the bytes that `f` saves for its backward, except vectors and matrices."""

    def residuals(x, params):
        return jax.vjp(jax.checkpoint(f, policy=policy), x, params)[1]

    leaves = jax.tree.leaves(jax.eval_shape(residuals, X, PARAMS))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf.ndim > 2)


def test_the_policy_saves_no_more_than_of_a_stock_block(hopper):
    policy = remat_policies.dots_with_no_batch_dims_saveable
    stock = saved_bytes(stock_block, jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    assert saved_bytes(stock_block, policy) == stock
    small = 2 * 2 * 128 * 4 * 4  # Means, 1 / standard deviations and log-sum-exps.
    assert X.size * 2 < saved_bytes(block, policy) <= stock + small
    assert saved_bytes(block, jax.checkpoint_policies.dots_with_no_batch_dims_saveable) < stock / 2


def test_a_name_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"'jaxfused.mlp.weights' is the name of nothing"):
        remat_policies.save_only_these_names("jaxfused.mlp.weights")


@parametrize("policy", [name for name in POLICIES if "dots" in name], quick=(1,))
def test_gradients_are_the_same(policy):
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    params = [0.1 * jax.random.normal(k, shape) for k, shape in zip(keys, SHAPES, strict=True)]
    x = jax.random.normal(jax.random.key(1), (1, 8, 256))

    def loss(f):
        return jax.jit(jax.grad(lambda x, params: jnp.sum(jnp.sin(f(x, params))), (0, 1)))

    actual = loss(jax.checkpoint(block, policy=POLICIES[policy]))(x, params)
    chex.assert_trees_all_close(actual, loss(block)(x, params), rtol=2e-5, atol=2e-5)
