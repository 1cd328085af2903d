"""MoE of nnx and linen: transformers' blocks, both alike, dropping, losses and gradients."""

import functools

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
import jaxfused.linen
import jaxfused.nnx
from tests.recorded import values
from tests.support.arrays import put

BLOCKS = values.load("experts.npz")
D, F, E = 32, 48, 8
QWEN2 = functools.partial(jaxfused.router, k=2)
DEEPSEEK = functools.partial(
    jaxfused.router,
    k=2,
    score="sigmoid",
    normalise="sum",
    epsilon=1e-20,
    groups=4,
    groups_kept=2,
    scale=2.5,
)
OPTIONS = {
    "Mixtral": dict(router=functools.partial(QWEN2, normalise="sum")),
    "Qwen2-MoE": dict(router=QWEN2, shared_features=F, use_shared_gate=True),
    "DeepSeek-V3": dict(router=DEEPSEEK, shared_features=F, use_correction_bias=True),
}


def parameters(name):
    """Returns a recorded block's parameters under this package's names, and its correction bias."""
    row = BLOCKS[name]
    gate, up = np.split(row.options["gain"] * row["experts.gate_up_proj"], 2, axis=1)
    down = row.options["gain"] * row["experts.down_proj"]
    found = dict(
        router_kernel=row["gate.weight"].T,
        w_gate=gate.swapaxes(1, 2),
        w_up=up.swapaxes(1, 2),
        w_down=down.swapaxes(1, 2),
    )
    for shared in ("shared_expert", "shared_experts"):
        if f"{shared}.up_proj.weight" in row:
            layers = ("gate", "up", "down")
            found["shared"] = {n: {"kernel": row.kernel(f"{shared}.{n}_proj")} for n in layers}
    if "shared_expert_gate.weight" in row:
        found["shared_gate"] = row.kernel("shared_expert_gate")
    bias = 0.2 * row.input("gate.e_score_correction_bias", (E,))
    return jax.tree.map(lambda a: put(a, "float32"), (found, bias))


@pytest.mark.parametrize("name", OPTIONS)
def test_blocks_of_transformers(name):
    row, options = BLOCKS[name], OPTIONS[name]
    params, bias = parameters(name)
    x = put(row.input("x", (1, 24, D)))
    variables = {"params": params}
    if "use_correction_bias" in options:
        variables["correction_bias"] = {"correction_bias": bias}
    linen = jaxfused.linen.MoE(F, E, **options)
    y = jax.jit(linen.apply)(variables, x)
    np.testing.assert_allclose(y[0], row.results["y"], rtol=2e-4, atol=2e-5)
    assert jax.tree.structure(jax.eval_shape(linen.init, jax.random.key(0), x)) == (
        jax.tree.structure(variables)
    )

    module = jaxfused.nnx.MoE(D, F, E, **options, rngs=flax.nnx.Rngs(0))
    flax.nnx.update(module, flax.nnx.State(jax.tree.map(lambda a: a, params)))
    if module.correction_bias is not None:
        module.correction_bias[...] = bias
    again, routing = module(x, return_routing=True)
    np.testing.assert_allclose(again, y, rtol=1e-5, atol=1e-6)
    dense = np.zeros((24, E), np.float32)
    np.put_along_axis(dense, np.asarray(routing.indices[0]), np.asarray(routing.weights[0]), -1)
    np.testing.assert_allclose(dense, row.results["weights"], rtol=1e-5, atol=1e-6)


def test_gradients_reach_what_is_trained():
    module = jaxfused.nnx.MoE(
        8, 16, 4, router=DEEPSEEK_SMALL, use_correction_bias=True, rngs=flax.nnx.Rngs(0)
    )
    x = jax.random.normal(jax.random.key(0), (2, 6, 8))

    def loss(module):
        y, routing = module(x, return_routing=True)
        return jnp.sum(y**2) + jaxfused.load_balancing_loss(routing.logits, routing.indices)

    gradients = flax.nnx.grad(loss)(module)
    assert {*gradients} == {"router_kernel", "w_gate", "w_up", "w_down"}
    assert all(bool(jnp.any(g)) for g in jax.tree.leaves(gradients))


DEEPSEEK_SMALL = functools.partial(jaxfused.router, k=2, score="sigmoid", normalise="sum")


def test_capacity_drops_tokens():
    options = dict(router=functools.partial(jaxfused.router, k=1))
    x = jnp.ones((8, 4))
    for factor, kept in ((1.0, 4), (0.25, 1), (2.0, 8)):
        moe = jaxfused.linen.MoE(8, 2, capacity_factor=factor, **options)
        y = moe.apply(moe.init(jax.random.key(0), x), x)
        assert int(jnp.any(y != 0, axis=1).sum()) == kept


def test_a_capacity_needs_a_known_number_of_tokens():
    moe = jaxfused.linen.MoE(8, 2, router=QWEN2, capacity_factor=1.0)
    variables = moe.init(jax.random.key(0), jnp.ones((2, D)))
    tokens = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("tokens"), D), jnp.float32)
    with pytest.raises(ValueError, match="symbolic number of tokens"):
        jax.export.export(jax.jit(moe.apply))(variables, tokens)


def test_experts_without_a_gate_in_bfloat16():
    moe = jaxfused.nnx.MoE(
        8,
        16,
        4,
        router=functools.partial(jaxfused.router, k=2),
        use_gate=False,
        activation="relu2",
        dtype=jnp.bfloat16,
        rngs=flax.nnx.Rngs(0),
    )
    assert moe(jnp.ones((3, 8))).dtype == jnp.bfloat16 and moe.w_gate is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(capacity_factor=0.0), "capacity_factor is 0.0"),
        (dict(shared_features=-1), "shared_features is -1"),
        (dict(use_shared_gate=True), "there is no shared expert"),
    ],
)
def test_messages(options, message):
    with pytest.raises(ValueError, match=f"jaxfused.nnx.MoE: .*{message}"):
        jaxfused.nnx.MoE(8, 8, 2, router=QWEN2, rngs=flax.nnx.Rngs(0), **options)
    moe = jaxfused.linen.MoE(8, 2, router=QWEN2, **options)
    with pytest.raises(ValueError, match=f"jaxfused.linen.MoE: .*{message}"):
        jax.eval_shape(moe.init, jax.random.key(0), jnp.ones((2, 8)))


def test_a_router_is_a_function_of_the_modules_features():
    module = jaxfused.nnx.MoE(D, F, E, router="softmax", rngs=flax.nnx.Rngs(0))
    with pytest.raises(ValueError, match="router is 'softmax', but it is called with logits"):
        module(jnp.ones((2, D)))
    for router, bias, message in (
        (jaxfused.router, False, r"with logits \(missing a required argument: 'k'\)"),
        (lambda logits: jaxfused.router(logits, 2), True, "with logits and bias="),
        (jax.nn.softmax, False, r"returned arrays of shapes \[\(2, 8\)\].*return jaxfused.Routes"),
    ):
        options = dict(router=router, use_correction_bias=bias, rngs=flax.nnx.Rngs(0))
        with pytest.raises(ValueError, match=message):
            jaxfused.nnx.MoE(D, F, 8, **options)(jnp.ones((2, D)))
    module = jaxfused.nnx.MoE(D, F, E, router=QWEN2, rngs=flax.nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"MoE: x has shape \(2, 1\), but the router takes"):
        module(jnp.ones((2, 1)))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (functools.partial(jaxfused.linen.MoE, F, E, router=QWEN2), (2, D)),
        (functools.partial(jaxfused.linen.SparseLinear, 96, block_size=32), (2, D)),
        (functools.partial(jaxfused.linen.SparseLinear, F, pattern="2:4"), (2, D)),
        (functools.partial(jaxfused.linen.DeformConv, F, (3, 3)), (1, 5, 5, D)),
        (functools.partial(jaxfused.nnx.MoE, D, F, E, router=QWEN2), None),
        (functools.partial(jaxfused.nnx.SparseLinear, D, 96, block_size=32), None),
        (functools.partial(jaxfused.nnx.SparseLinear, D, F, pattern="2:4"), None),
        (functools.partial(jaxfused.nnx.DeformConv, D, F, (3, 3)), None),
    ],
)
def test_parameters_of_16_bits_are_drawn_in_float32(layer, shape):
    def drawn(dtype):
        if shape is None:
            return flax.nnx.state(layer(param_dtype=dtype, rngs=flax.nnx.Rngs(0)), flax.nnx.Param)
        return layer(param_dtype=dtype).init(jax.random.key(0), jnp.ones(shape, dtype))["params"]

    narrow, wide = drawn(jnp.bfloat16), drawn(jnp.float32)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), narrow, wide
    )


def test_initialisers_with_a_partitioning():
    """A layer keeps the partitioning, or says that it cannot."""
    init = flax.nnx.with_partitioning(flax.nnx.initializers.lecun_normal(), (None, None, "x"))
    layer = functools.partial(jaxfused.nnx.MoE, D, F, E, router=QWEN2, rngs=flax.nnx.Rngs(0))
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))):
        kernel = layer(kernel_init=init, param_dtype=jnp.bfloat16).w_up
    assert kernel.dtype == jnp.bfloat16 and kernel.get_metadata()["out_sharding"][2] == "x"
    message = "an initialiser that returns an array"
    with pytest.raises(ValueError, match=message):
        jaxfused.nnx.SparseLinear(D, 96, kernel_init=init, rngs=flax.nnx.Rngs(0), block_size=32)
    for layer in (
        jaxfused.linen.QuantizedDense(F, kernel_init=LINEN_INIT),
        jaxfused.linen.SparseLinear(96, block_size=32, kernel_init=LINEN_INIT),
    ):
        with pytest.raises(ValueError, match=message):
            layer.init(jax.random.key(0), jnp.ones((2, D)))


LINEN_INIT = flax.linen.with_partitioning(flax.linen.initializers.lecun_normal(), (None, "x"))
