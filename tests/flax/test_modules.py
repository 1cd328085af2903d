"""Each module equals Flax's in nnx and linen: parameters, outputs and gradients, in float64."""

import chex
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused.linen
import jaxfused.nnx
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.grids import parametrize

B, T, D = 2, 6, 16


def normal(seed, *shape, dtype=jnp.float32, scale=1.0):
    return put(np.random.default_rng(seed).normal(scale=scale, size=shape), dtype)


def random_like(tree, seed=0):
    """Returns the tree with random leaves, so that biases are not 0 and scales not 1."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([normal(seed + i, *a.shape, scale=0.5) for i, a in enumerate(leaves)])


def nnx_apply(module):
    """Returns `f(params, *inputs)` of an nnx module, with Linen's tree of parameters."""
    graphdef, params, rest = flax.nnx.split(module, flax.nnx.Param, ...)

    def f(values, *inputs, **options):
        state = jax.tree.map(lambda a: a, params)
        flax.nnx.replace_by_pure_dict(state, values)
        return flax.nnx.merge(graphdef, state, rest)(*inputs, **options)

    return f


def linen_apply(module):
    return lambda params, *inputs, **options: module.apply({"params": params}, *inputs, **options)


def params_of(module):
    return flax.nnx.to_pure_dict(flax.nnx.state(module, flax.nnx.Param))


def assert_same_trees(actual, expected):
    chex.assert_trees_all_equal(actual, expected, strict=True)


def shared_params(nnx, linen, *inputs):
    """Returns random parameters in the tree that both modules share."""
    params = params_of(nnx)
    shapes = jax.eval_shape(linen.init, jax.random.key(0), *inputs)["params"]
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)
    return random_like(params)


def assert_same(nnx, linen, stock, params, *inputs, **options):
    """Asserts that both modules are as near to `stock(params, *inputs)` in float64 as the rule requires.

    Gradients sum over both modules, so the stock module is called twice as well.
    """
    ours = (nnx_apply(nnx), linen_apply(linen))
    assert_values_and_gradients(
        lambda *args: [f(*args, **options) for f in ours],
        lambda *args: [stock(*args, **options) for _ in ours],
        params,
        *inputs,
    )


def modules(name, stock_name, *nnx_sizes, linen, **arguments):
    """Returns (nnx module, linen module, stock linen module); the nnx one starts as Flax's does."""
    ours = getattr(jaxfused.nnx, name)(*nnx_sizes, rngs=flax.nnx.Rngs(3), **arguments)
    stock = getattr(flax.nnx, name)(*nnx_sizes, rngs=flax.nnx.Rngs(3), **arguments)
    assert_same_trees(params_of(ours), params_of(stock))
    return (
        ours,
        getattr(jaxfused.linen, stock_name)(**linen, **arguments),
        getattr(flax.linen, stock_name)(**linen, **arguments),
    )


def test_linear():
    x = normal(0, B, T, D)
    nnx, linen, stock = modules("Linear", "Dense", D, 5, linen=dict(features=5))
    params = stock.init(jax.random.key(1), x)["params"]
    assert_same_trees(linen.init(jax.random.key(1), x)["params"], params)
    assert_same(nnx, linen, linen_apply(stock), random_like(params), x)


def test_linear_with_activation_and_residual():
    x, residual = normal(0, B, T, D), normal(1, B, T, 5)
    options = dict(use_bias=False, activation="gelu_tanh")
    nnx = jaxfused.nnx.Linear(D, 5, rngs=flax.nnx.Rngs(0), **options)
    linen = jaxfused.linen.Dense(5, **options)
    stock = linen_apply(flax.linen.Dense(5, use_bias=False))

    def expected(params, x, residual):
        return jax.nn.gelu(stock(params, x)) + residual

    ours = (nnx_apply(nnx), linen_apply(linen))
    assert_values_and_gradients(
        lambda params, x, residual: [f(params, x, residual=residual) for f in ours],
        lambda *args: [expected(*args) for _ in ours],
        params_of(nnx),
        x,
        residual,
    )


@parametrize("normalize_qk", [False, True], quick=(0,))
def test_multi_head_attention(normalize_qk):
    query, key = normal(0, B, T, D), normal(1, B, T + 3, D)
    mask = (normal(2, B, 4, T, T + 3) > -0.5).at[..., 0].set(True)
    nnx, linen, stock = modules(
        "MultiHeadAttention",
        "MultiHeadDotProductAttention",
        4,
        D,
        linen=dict(num_heads=4),
        qkv_features=32,
        out_features=5,
        decode=False,
        normalize_qk=normalize_qk,
    )
    params, own = (jax.jit(m.init)(jax.random.key(1), query, key)["params"] for m in (stock, linen))
    assert_same_trees(own, params)
    # Flax's masks are float32 by default.
    assert_same(
        nnx, linen, linen_apply(stock), random_like(params), query, key, mask=mask.astype(float)
    )


def plain_mlp(params, x, residual):
    up, down = flax.linen.Dense(32), flax.linen.Dense(D)
    h = jax.nn.gelu(linen_apply(up)(params["up"], x))
    return linen_apply(down)(params["down"], h) + residual


def plain_gated_mlp(params, x, residual):
    wide, down = flax.linen.Dense(32, use_bias=False), flax.linen.Dense(D, use_bias=False)
    gate, up = (linen_apply(wide)(params[name], x) for name in ("gate", "up"))
    return linen_apply(down)(params["down"], jax.nn.silu(gate) * up) + residual


@pytest.mark.parametrize(("name", "plain"), [("MLP", plain_mlp), ("GatedMLP", plain_gated_mlp)])
def test_mlp(name, plain):
    nnx = getattr(jaxfused.nnx, name)(D, 32, rngs=flax.nnx.Rngs(0))
    linen = getattr(jaxfused.linen, name)(32)
    x, residual = normal(0, B, T, D), normal(1, B, T, D)
    params = shared_params(nnx, linen, x)
    assert_same(nnx, linen, plain, params, x, residual=residual)


def test_rotary_embedding():
    q, k = normal(0, B, T, 4, D), normal(1, B, T, 2, D)
    rope = flax.nnx.RoPE(theta=100.0)
    over_heads = jax.vmap(rope, in_axes=-2, out_axes=-2)
    expected = over_heads(q), over_heads(k)
    for module in (
        jaxfused.nnx.RotaryEmbedding(theta=100.0),
        jaxfused.linen.RotaryEmbedding(theta=100.0).bind({}),
    ):
        chex.assert_trees_all_close(module(q, k), expected, rtol=0, atol=1e-6)


def plain_block(params, x, residual):
    """A causal block with LayerNorm in stock Flax."""

    def norm(name, x):
        return linen_apply(flax.linen.LayerNorm(use_fast_variance=False))(params[name], x)

    def dense(name, x):
        return x @ params[name]["kernel"] + params[name]["bias"]

    x = x + residual
    q, k, v = jnp.split(dense("qkv", norm("norm1", x)).reshape(B, T, 12, 4), 3, axis=-2)
    mask = flax.linen.make_causal_mask(jnp.ones((B, T)))
    attended = flax.linen.dot_product_attention(q, k, v, mask=mask).reshape(B, T, D)
    x = x + dense("project", attended)
    return plain_mlp(params["mlp"], norm("norm2", x), x)


def test_transformer_block():
    nnx = jaxfused.nnx.TransformerBlock(
        D, 4, hidden_features=32, is_causal=True, rngs=flax.nnx.Rngs(0)
    )
    linen = jaxfused.linen.TransformerBlock(4, hidden_features=32, is_causal=True)
    x, residual = normal(0, B, T, D), normal(1, B, T, D)
    params = shared_params(nnx, linen, x)
    ours = (nnx_apply(nnx), linen_apply(linen))

    def all_forms(params, x, residual):
        return [(f(params, x + residual), sum(f(params, x, residual=residual))) for f in ours]

    assert_values_and_gradients(
        all_forms,
        lambda *args: [(plain_block(*args), plain_block(*args)) for _ in ours],
        params,
        x,
        residual,
    )


def plain_modern_block(params, x):
    """Llama's block with grouped heads, and with normalised queries and keys."""

    def norm(scale, x):
        return linen_apply(flax.linen.RMSNorm())({"scale": scale}, x)

    def heads(x, scale=None):
        rope = jax.vmap(flax.nnx.RoPE(), in_axes=-2, out_axes=-2)
        return x if scale is None else rope(norm(scale, x))

    qkv = norm(params["norm1"]["scale"], x) @ params["qkv"]["kernel"]
    q, k, v = jnp.split(qkv.reshape(B, T, 8, 8), (4, 6), axis=-2)
    q, k, v = heads(q, params["query_scale"]), heads(k, params["key_scale"]), heads(v)
    attended = flax.nnx.dot_product_attention(q, k, v, is_causal=True)
    x = x + attended.reshape(B, T, 32) @ params["project"]["kernel"]
    return plain_gated_mlp(params["mlp"], norm(params["norm2"]["scale"], x), x)


@pytest.mark.exhaustive
def test_modern_transformer_block():
    options = dict(
        num_kv_heads=2,
        head_dim=8,
        hidden_features=32,
        norm="rms_norm",
        normalize_qk=True,
        is_causal=True,
        gated=True,
        use_bias=False,
    )
    nnx = jaxfused.nnx.TransformerBlock(
        D, 4, rope=jaxfused.nnx.RotaryEmbedding(), rngs=flax.nnx.Rngs(0), **options
    )
    linen = jaxfused.linen.TransformerBlock(4, rope=jaxfused.linen.RotaryEmbedding(), **options)
    x = normal(0, B, T, D)
    params = shared_params(nnx, linen, x)
    assert_same(nnx, linen, plain_modern_block, params, x)


def plain_vision_block(params, x, residual, cos, sin):
    """DINOv2's block, with a LayerNorm of queries and keys as timm's, and DINOv3's rotation."""

    def norm(name, x, scale="scale", bias="bias"):
        parameters = {"scale": params[name][scale], "bias": params[name][bias]}
        return linen_apply(flax.linen.LayerNorm())(parameters, x)

    def dense(name, x):
        return x @ params[name]["kernel"] + params[name]["bias"]

    def head(name, x):
        parameters = {"scale": params[f"{name}_scale"], "bias": params[f"{name}_bias"]}
        first, second = jnp.split(linen_apply(flax.linen.LayerNorm())(parameters, x), 2, axis=-1)
        c, s = (table[:, None].astype(x.dtype) for table in (cos, sin))
        return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1)

    x = x + residual
    q, k, v = jnp.split(dense("qkv", norm("norm1", x)).reshape(B, T, 12, 4), 3, axis=-2)
    attended = flax.nnx.dot_product_attention(head("query", q), head("key", k), v)
    x = x + params["layer_scale1"] * dense("project", attended.reshape(B, T, D))
    mlp = params["mlp"]
    hidden = norm("norm2", x) @ mlp["up"]["kernel"] + mlp["up"]["bias"]
    hidden = jax.nn.gelu(hidden, approximate=False)
    return x + params["layer_scale2"] * (hidden @ mlp["down"]["kernel"] + mlp["down"]["bias"])


def test_vision_transformer_block():
    options = dict(
        hidden_features=32, normalize_qk="layer_norm", layer_scale=0.1, activation="gelu_erf"
    )
    nnx = jaxfused.nnx.TransformerBlock(D, 4, rngs=flax.nnx.Rngs(0), **options)
    linen = jaxfused.linen.TransformerBlock(4, **options)
    x, residual = normal(0, B, T, D), normal(1, B, T, D)
    cos, sin = jaxfused.axial_rope_tables(1, T - 1, 4, prefix=1)
    params = shared_params(nnx, linen, x)
    scales = nnx.layer_scale1[...], nnx.layer_scale2[...]
    np.testing.assert_array_equal(scales, np.full((2, D), 0.1, np.float32))
    ours = (nnx_apply(nnx), linen_apply(linen))

    def all_forms(params, x, residual):
        return [
            (
                f(params, x + residual, cos=cos, sin=sin),
                sum(f(params, x, residual=residual, cos=cos, sin=sin)),
            )
            for f in ours
        ]

    assert_values_and_gradients(
        all_forms,
        lambda *args: [(plain_vision_block(*args, cos, sin),) * 2 for _ in ours],
        params,
        x,
        residual,
    )
    with pytest.raises(ValueError, match="pass both and no positions"):
        nnx(x, cos=cos)
    with pytest.raises(ValueError, match="pass both and no positions"):
        nnx(x, cos=cos, sin=sin, positions=jnp.arange(T))
    with pytest.raises(ValueError, match="normalize_qk='group_norm' is not known"):
        jaxfused.nnx.TransformerBlock(D, 2, normalize_qk="group_norm", rngs=flax.nnx.Rngs(0))


@pytest.mark.parametrize(
    ("shape", "sizes", "options"),
    [
        ((2, 3, 9, 4), (3,), dict(padding="CAUSAL", kernel_dilation=2)),
        ((2, 7, 6, 4), (3, 2), dict(strides=(2, 1), padding="CIRCULAR", use_bias=False)),
        ((7, 6, 4), (3, 3), dict(strides=None, feature_group_count=4, padding=[(1, 2), 0])),
    ],
    ids=["1d", "2d", "depthwise"],
)
def test_conv(shape, sizes, options):
    nnx, linen, stock = modules(
        "Conv", "Conv", 4, 8, sizes, linen=dict(features=8, kernel_size=sizes), **options
    )
    x = normal(0, *shape)
    params = stock.init(jax.random.key(1), x)["params"]
    assert_same_trees(linen.init(jax.random.key(1), x)["params"], params)
    assert_same(nnx, linen, linen_apply(stock), random_like(params), x)


@pytest.mark.parametrize("groups", [dict(num_groups=4), dict(num_groups=None, group_size=2)])
def test_group_norm(groups):
    nnx, linen, stock = modules("GroupNorm", "GroupNorm", 8, linen={}, **groups)
    x = normal(0, B, 5, 3, 8)
    params = stock.init(jax.random.key(1), x)["params"]
    assert_same(nnx, linen, linen_apply(stock), random_like(params), x)


@pytest.mark.parametrize("options", [dict(), dict(feature_axes=(1, -1), use_bias=False)])
def test_instance_norm(options):
    x = normal(0, B, 5, 3, 8)
    options = dict(use_fast_variance=False, **options)
    ours = jaxfused.linen.InstanceNorm(**options)
    stock = flax.linen.InstanceNorm(**options)
    params = stock.init(jax.random.key(1), x)["params"]
    assert_same_trees(ours.init(jax.random.key(1), x)["params"], params)
    if options.keys() & {"feature_axes"}:
        assert_same_trees(linen_apply(ours)(params, x), linen_apply(stock)(params, x))
        return
    nnx = jaxfused.nnx.InstanceNorm(8, rngs=flax.nnx.Rngs(0), **options)
    assert_same(nnx, ours, linen_apply(stock), random_like(params), x)


def batch_norm_calls(nnx, linen, stock):
    """Yields functions `f(params, statistics, x, training, ...)`, which return (y, next statistics)."""
    graphdef, params_state, stats_state = flax.nnx.split(nnx, flax.nnx.Param, flax.nnx.BatchStat)

    def of_nnx(params, statistics, x, training, **options):
        states = [jax.tree.map(lambda a: a, s) for s in (params_state, stats_state)]
        for state, values in zip(states, (params, statistics), strict=True):
            flax.nnx.replace_by_pure_dict(state, values)
        module = flax.nnx.merge(graphdef, *states)
        y = module(x, use_running_average=not training, **options)
        return y, flax.nnx.to_pure_dict(flax.nnx.state(module, flax.nnx.BatchStat))

    def of_linen(module):
        def f(params, statistics, x, training, **options):
            variables = {"params": params, "batch_stats": statistics}
            options["use_running_average"] = not training
            y, updates = module.apply(variables, x, mutable=["batch_stats"], **options)
            return y, updates["batch_stats"]

        return f

    return of_nnx, of_linen(linen), of_linen(stock)


def test_batch_norm():
    nnx, linen, stock = modules("BatchNorm", "BatchNorm", D, linen={}, momentum=0.75)
    x = normal(0, B, 5, 3, D)
    variables = stock.init(jax.random.key(1), x, use_running_average=False)
    assert_same_trees(linen.init(jax.random.key(1), x, use_running_average=False), variables)
    *ours, stock = batch_norm_calls(nnx, linen, stock)
    params = random_like(variables["params"])
    statistics = {"mean": normal(1, D), "var": jnp.abs(normal(2, D)) + 0.5}

    def both_modes(f):
        def g(params, statistics, x):
            # Here no gradient flows into the running averages, while Flax allows one.
            y, moved = f(params, statistics, x, True)
            return y, jax.lax.stop_gradient(moved), f(params, statistics, x, False)

        return g

    assert_values_and_gradients(
        lambda *args: [both_modes(f)(*args) for f in ours],
        lambda *args: [both_modes(stock)(*args) for _ in ours],
        params,
        statistics,
        x,
    )


def test_folded_batch_norms_answer_as_before():
    class Model(flax.nnx.Module):
        def __init__(self, rngs):
            norms = [dict(norm="batch_norm"), dict(norm="group_norm", num_groups=2)]
            self.blocks = flax.nnx.List(
                jaxfused.nnx.ResNetBlock(8, 2, rngs=rngs, **options) for options in norms
            )

        def __call__(self, x, use_running_average=None):
            for block in self.blocks:
                x = block(x, use_running_average=use_running_average)
            return x

    model, x = Model(flax.nnx.Rngs(0)), normal(0, B, 5, 5, 8)
    model(x + 1, use_running_average=False)  # updates the averages
    before = model(x, use_running_average=True)
    jaxfused.nnx.fold_batch_norms(model)
    assert not jax.tree.leaves(flax.nnx.state(model, flax.nnx.BatchStat))
    np.testing.assert_allclose(model(x), before, atol=1e-5)
    assert model.blocks[1].layer1.norm is not None


@pytest.mark.parametrize("training", [True, False])
def test_conv_norm_act_with_batch_norm(training):
    nnx = jaxfused.nnx.ConvNormAct(4, D, (3, 3), strides=2, rngs=flax.nnx.Rngs(0))
    linen = jaxfused.linen.ConvNormAct(D, (3, 3), strides=2)
    x, residual = normal(0, B, 6, 6, 4), normal(1, B, 3, 3, D)

    class Stock(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x, *, use_running_average, residual):
            y = flax.linen.Conv(D, (3, 3), strides=2, use_bias=False, name="conv")(x)
            y = flax.linen.BatchNorm(use_running_average, use_fast_variance=False, name="norm")(y)
            return jax.nn.relu(y + residual)

    variables = Stock().init(jax.random.key(0), x, use_running_average=True, residual=residual)
    assert_same_trees(linen.init(jax.random.key(0), x, use_running_average=True), variables)
    params = random_like(variables["params"])
    statistics = {"norm": {"mean": normal(1, D), "var": jnp.abs(normal(2, D)) + 0.5}}

    def call(f):
        return lambda params, statistics, x, residual: f(
            params, statistics, x, training, residual=residual
        )[0]

    calls = [call(f) for f in batch_norm_calls(nnx, linen, Stock())]
    assert_values_and_gradients(
        lambda *args: [f(*args) for f in calls[:2]],
        lambda *args: [calls[2](*args) for _ in calls[:2]],
        params,
        statistics,
        x,
        residual,
    )


@parametrize("scale", [None, 0.5], quick=(1,))
def test_convnext_block(scale):
    nnx = jaxfused.nnx.ConvNeXtBlock(
        D, kernel_size=(3, 3), layer_scale=scale, rngs=flax.nnx.Rngs(0)
    )
    linen = jaxfused.linen.ConvNeXtBlock(kernel_size=(3, 3), layer_scale=scale)
    x = normal(0, B, 5, 4, D)

    def plain(params, x):
        conv = flax.linen.Conv(D, (3, 3), feature_group_count=D)
        y = linen_apply(flax.linen.LayerNorm())(
            params["norm"], linen_apply(conv)(params["conv"], x)
        )
        h = linen_apply(flax.linen.Dense(4 * D))(params["mlp"]["up"], y)
        h = jax.nn.gelu(h, approximate=False)
        y = linen_apply(flax.linen.Dense(D))(params["mlp"]["down"], h)
        return x + (y if scale is None else params["layer_scale"] * y)

    assert_same(nnx, linen, plain, shared_params(nnx, linen, x), x)


@pytest.mark.exhaustive
def test_convnext_block_drops_whole_paths():
    options = dict(kernel_size=(3, 3), layer_scale=1.0, drop_path_rate=0.5)
    nnx = jaxfused.nnx.ConvNeXtBlock(D, rngs=flax.nnx.Rngs(0), **options)
    linen = jaxfused.linen.ConvNeXtBlock(**options)
    x = normal(0, 16, 3, 3, D)
    variables = linen.init(jax.random.key(0), x, deterministic=True)
    whole = linen.apply(variables, x, deterministic=True) - x
    dropped = (
        linen.apply(variables, x, deterministic=False, rngs={"dropout": jax.random.key(1)}) - x
    )
    kept = jnp.any(dropped != 0, axis=(1, 2, 3))
    assert 0 < kept.sum() < 16
    np.testing.assert_allclose(dropped[kept], 2 * whole[kept], atol=1e-5)
    changed = jnp.any(nnx(x, deterministic=False, rngs=jax.random.key(2)) != x, axis=(1, 2, 3))
    assert 0 < changed.sum() < 16


@parametrize(
    ("bottleneck", "strides", "padding"),
    [(True, 1, "SAME"), (True, 2, 1), (False, 1, 1), (False, 2, "SAME"), (False, 2, 1)],
    quick=(1,),
)
def test_resnet_block(bottleneck, strides, padding):
    before, after = 4 * D, 4 * D if bottleneck else D
    options = dict(strides=strides, bottleneck=bottleneck, norm="group_norm", num_groups=2)
    options |= dict(padding=padding)
    nnx = jaxfused.nnx.ResNetBlock(before, D, rngs=flax.nnx.Rngs(0), **options)
    linen = jaxfused.linen.ResNetBlock(D, **options)
    x = normal(0, B, 6, 5, before)

    def plain(params, x):
        def layer(name, x, features, size, step):
            around = padding if size == (3, 3) else "SAME"
            conv = flax.linen.Conv(features, size, step, padding=around, use_bias=False)
            norm = flax.linen.GroupNorm(2, epsilon=1e-5)
            y = linen_apply(conv)(params[name]["conv"], x)
            return linen_apply(norm)(params[name]["norm"], y)

        residual = x
        if after != before or strides > 1:
            residual = layer("shortcut", x, after, (1, 1), strides)
        if bottleneck:
            y = jax.nn.relu(layer("layer1", x, D, (1, 1), 1))
            y = jax.nn.relu(layer("layer2", y, D, (3, 3), strides))
            y = layer("layer3", y, 4 * D, (1, 1), 1)
        else:
            y = jax.nn.relu(layer("layer1", x, D, (3, 3), strides))
            y = layer("layer2", y, D, (3, 3), 1)
        return jax.nn.relu(y + residual)

    assert_same(nnx, linen, plain, shared_params(nnx, linen, x), x)


def test_conv_norm_act_with_group_norm():
    options = dict(norm="group_norm", num_groups=2, activation="silu", feature_group_count=2)
    nnx = jaxfused.nnx.ConvNormAct(4, 6, 3, rngs=flax.nnx.Rngs(0), **options)
    linen = jaxfused.linen.ConvNormAct(6, 3, **options)
    x = normal(0, B, T, 4)

    def plain(params, x):
        y = flax.linen.Conv(6, 3, use_bias=False, feature_group_count=2)
        y = linen_apply(y)(params["conv"], x)
        norm = flax.linen.GroupNorm(2, epsilon=1e-5)
        return jax.nn.silu(linen_apply(norm)(params["norm"], y))

    assert_same(nnx, linen, plain, shared_params(nnx, linen, x), x)
