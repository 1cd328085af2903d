"""Options of the modules: dtypes, dropout, caches, and calls that fall back on Flax's code."""

import functools

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused.linen
import jaxfused.nnx
from tests.flax.test_modules import normal, params_of
from tests.support.arrays import put

B, T, D = 2, 5, 8
KEY = jax.random.key(7)


def near(actual, expected):
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


# --- dtypes ---------------------------------------------------------------------------------------

LAYERS = {
    "Linear": ("Dense", (D, 4), dict(features=4)),
    "Conv": ("Conv", (D, 4, 3), dict(features=4, kernel_size=3)),
    "GroupNorm": ("GroupNorm", (D, 2), dict(num_groups=2)),
    "BatchNorm": ("BatchNorm", (D,), dict(use_running_average=False)),
}
each_layer = pytest.mark.parametrize("name", LAYERS)


@pytest.mark.parametrize(
    ("x_dtype", "arguments"),
    [
        ("bfloat16", {}),
        ("float32", dict(dtype=jnp.bfloat16)),
        ("float16", dict(param_dtype=jnp.float16)),
        ("bfloat16", dict(dtype=jnp.float32, param_dtype=jnp.bfloat16)),
        ("int32", {}),
    ],
)
@each_layer
def test_result_dtypes_are_flax(name, x_dtype, arguments):
    linen_name, sizes, options = LAYERS[name]
    x = jax.ShapeDtypeStruct((B, T, D), x_dtype)

    def nnx(package):
        make = getattr(package, name)
        return jax.eval_shape(lambda x: make(*sizes, rngs=flax.nnx.Rngs(0), **arguments)(x), x)

    def linen(package):
        module = getattr(package, linen_name)(**options, **arguments)
        return jax.eval_shape(lambda x: module.init_with_output(KEY, x), x)

    assert nnx(jaxfused.nnx) == nnx(flax.nnx)
    assert linen(jaxfused.linen) == linen(flax.linen)


# --- attention ------------------------------------------------------------------------------------


def qkv(*batch, heads=4, kv_heads=4):
    return (
        normal(0, *batch, T, heads, D),
        normal(1, *batch, T + 2, kv_heads, D),
        normal(2, *batch, T + 2, kv_heads, D),
    )


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_attention_fn_takes_any_batch_axes(batch):
    mask = np.random.default_rng(3).normal(size=(*batch[1:], 1, T, T + 2)) > 0
    mask[..., 0] = True
    arrays = (*qkv(*batch), normal(4, *batch, 4, T, T + 2), mask.astype(np.float32))
    # jax.nn's attention, which Flax's layer calls, broadcasts over one batch axis only.
    expected, *ours = (
        jax.jit(f)(*arrays)
        for f in (
            flax.linen.dot_product_attention,
            jaxfused.nnx.attention_fn,
            jaxfused.linen.attention_fn,
        )
    )
    for output in ours:
        near(output, expected)


def test_attention_fn_with_grouped_heads_and_causal():
    arrays = qkv(2, kv_heads=2)
    expected = flax.nnx.dot_product_attention(*arrays, is_causal=True)
    near(jaxfused.nnx.attention_fn(*arrays, is_causal=True), expected)
    near(jaxfused.linen.attention_fn(*arrays, is_causal=True), expected)


@pytest.mark.parametrize("package", [jaxfused.nnx, jaxfused.linen], ids=["nnx", "linen"])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_attention_fn_at_offsets(package, batch):
    arrays = qkv(*batch)
    offsets = np.arange(np.prod(batch, dtype=int)).reshape(batch) - 1
    position = offsets[..., None, None, None] + np.arange(T)[:, None]
    expected = package.attention_fn(*arrays, mask=np.arange(T + 2) <= position)
    causal = dict(is_causal=True, query_offset=offsets)
    near(package.attention_fn(*arrays, **causal), expected)
    # Flax's code, which a precision other than the default runs, gets the mask too.
    near(package.attention_fn(*arrays, **causal, precision="highest"), expected)
    last = dict(is_causal=True, query_offset="bottom_right")
    near(
        package.attention_fn(*arrays, **last),
        package.attention_fn(*arrays, **last | {"query_offset": 2}),
    )


def test_attention_fn_gives_zero_where_all_is_masked():
    mask = jnp.ones((T, T + 2), bool).at[1].set(False)
    for package in (jaxfused.nnx, jaxfused.linen):
        output = package.attention_fn(*qkv(2), mask=mask)
        np.testing.assert_array_equal(output[:, 1], 0)
        assert (output[:, 0] != 0).all()


each_hook = pytest.mark.parametrize(
    ("ours", "flaxs"),
    [
        (jaxfused.nnx.attention_fn, flax.nnx.dot_product_attention),
        (jaxfused.linen.attention_fn, flax.linen.dot_product_attention),
    ],
    ids=["nnx", "linen"],
)


@each_hook
def test_what_only_flax_can_do_is_flax_bit_for_bit(ours, flaxs):
    dropout = dict(dropout_rate=0.4, dropout_rng=KEY)
    for options in (dropout, dict(precision="highest")):
        arrays = qkv(2)
        np.testing.assert_array_equal(ours(*arrays, **options), flaxs(*arrays, **options))
        with pytest.raises(ValueError, match="implementation='cuda' needs the operator"):
            ours(*arrays, implementation="cuda", **options)


@each_hook
def test_dropout_of_single_weights(ours, flaxs):
    query = jnp.zeros((4, 32, 2, D))
    value = jnp.ones((4, 64, 2, D))
    options = dict(broadcast_dropout=False, dropout_rate=0.25, dropout_rng=KEY)
    kept = ours(query, jnp.zeros_like(value), value, **options)[..., 0]
    assert np.unique(kept).size > 3
    assert not np.array_equal(kept[0], kept[1])
    # 16,384 weights are kept with probability 3/4; the tolerance is four deviations of their mean.
    np.testing.assert_allclose(kept.mean(), 1.0, atol=4 * np.sqrt(0.25 / 0.75 / 16_384))
    options["deterministic"] = True
    plain = ours(query, jnp.zeros_like(value), value, **options)
    near(plain, flaxs(query, jnp.zeros_like(value), value, **options))


def test_linen_attention_fn_options():
    arrays = [a.astype(jnp.bfloat16) for a in qkv(2)]
    output = jaxfused.linen.attention_fn(*arrays, force_fp32_for_softmax=True)
    stock = flax.linen.dot_product_attention(*arrays, force_fp32_for_softmax=True)
    assert output.dtype == stock.dtype == jnp.float32

    calls = []

    def einsum(*args):
        calls.append(args[0])
        return jnp.einsum(*args)

    own = dict(qk_attn_weights_einsum=einsum, attn_weights_value_einsum=einsum)
    causal = jaxfused.linen.attention_fn(*qkv(2), is_causal=True, **own)
    assert len(calls) == 2
    near(causal, jaxfused.linen.attention_fn(*qkv(2), is_causal=True))


def test_weights_are_sown():
    nnx = jaxfused.nnx.MultiHeadAttention(2, D, decode=False, rngs=flax.nnx.Rngs(0))
    linen = jaxfused.linen.MultiHeadAttention(2)
    x = normal(0, B, T, D)
    _, sown = flax.nnx.capture(nnx, flax.nnx.Intermediate)(x, sow_weights=True)
    (weights,) = flax.nnx.to_pure_dict(sown)["attention_weights"]
    params = {"params": params_of(nnx)}
    _, state = linen.apply(params, x, sow_weights=True, mutable=["intermediates"])
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    near(state["intermediates"]["attention_weights"][0], weights)


def test_decoding_is_flax_and_the_causal_pass():
    length = 4
    x = normal(0, B, length, D)
    layers = [
        package.MultiHeadAttention(2, D, decode=True, rngs=flax.nnx.Rngs(0))
        for package in (jaxfused.nnx, flax.nnx)
    ]
    step = flax.nnx.jit(lambda layer, x: layer(x))
    outputs = []
    for layer in layers:
        layer.init_cache(x.shape)
        outputs.append(jnp.concatenate([step(layer, x[:, i : i + 1]) for i in range(length)], 1))
    near(outputs[0], outputs[1])
    near(outputs[0], layers[0](x, decode=False, is_causal=True))
    np.testing.assert_array_equal(layers[0].cached_key[...], layers[1].cached_key[...])

    linen = jaxfused.linen.MultiHeadDotProductAttention(2, decode=True)
    cache = linen.init(KEY, x)["cache"]
    apply = jax.jit(functools.partial(linen.apply, mutable=["cache"]))
    for i in range(length):
        variables = {"params": params_of(layers[0]), "cache": cache}
        y, updates = apply(variables, x[:, i : i + 1])
        cache = updates["cache"]
        near(y, outputs[0][:, i : i + 1])


def test_dropout_in_the_modules():
    x = normal(0, B, T, D)
    for broadcast in (True, False):
        options = dict(dropout_rate=0.5, broadcast_dropout=broadcast)
        nnx = jaxfused.nnx.MultiHeadAttention(
            2, D, decode=False, deterministic=False, rngs=flax.nnx.Rngs(0), **options
        )
        linen = jaxfused.linen.MultiHeadDotProductAttention(2, **options)
        params = {"params": params_of(nnx)}
        dropped = linen.apply(params, x, deterministic=False, rngs={"dropout": KEY})
        plain = linen.apply(params, x, deterministic=True)
        assert not np.allclose(dropped, plain) and not np.allclose(nnx(x), plain)
        near(nnx(x, deterministic=True), plain)


# --- other layers' own arguments ------------------------------------------------------------------

MASK = jnp.arange(D) % 3 != 0
FLAX_ONLY = [
    ("Linear", dict(dtype=jnp.complex64), {}, "complex64 is not real"),
    (
        "Linear",
        dict(dot_general=lambda *a, **k: 2 * jax.lax.dot_general(*a, **k)),
        {},
        "dot_general",
    ),
    ("Conv", dict(mask=jnp.tril(jnp.ones((3, D, 4)))), {}, "mask"),
    ("GroupNorm", dict(reduction_axes=(-2, -1)), {}, "reduction_axes"),
    ("GroupNorm", {}, dict(mask=MASK), "mask"),
]


@pytest.mark.parametrize(("name", "arguments", "call", "reason"), FLAX_ONLY)
def test_calls_that_only_flax_can_serve(name, arguments, call, reason):
    linen_name, sizes, options = LAYERS[name]
    x, residual = normal(0, B, T, D), normal(1, B, T, D if "Norm" in name else 4)

    def nnx(package, **more):
        return getattr(package, name)(*sizes, rngs=flax.nnx.Rngs(0), **arguments, **more)

    def linen(package, **more):
        module = getattr(package, linen_name)(**options, **arguments, **more)
        return lambda *x, **call: module.init_with_output(KEY, *x, **call)[0]

    for make, packages in ((nnx, (jaxfused.nnx, flax.nnx)), (linen, (jaxfused.linen, flax.linen))):
        ours, flaxs = packages
        expected = make(flaxs)(x, **call)
        np.testing.assert_array_equal(make(ours)(x, **call), expected)
        if jnp.isrealobj(expected):
            activated = make(ours, activation="silu")(x, **call)
            np.testing.assert_array_equal(activated, jax.nn.silu(expected))
        with pytest.raises(ValueError, match=f"residual needs the operator.*{reason}"):
            make(ours)(x, residual=residual, **call)
        with pytest.raises(ValueError, match=f"implementation='cuda' needs.*{reason}"):
            make(ours, implementation="cuda")(x, **call)


def test_batch_norm_along_another_axis_and_across_devices():
    x = normal(0, 3, D, T)
    packages = (jaxfused.nnx, flax.nnx)
    ours, flaxs = (p.BatchNorm(D, axis=1, rngs=flax.nnx.Rngs(0)) for p in packages)
    np.testing.assert_array_equal(ours(x), flaxs(x))
    np.testing.assert_array_equal(ours.var[...], flaxs.var[...])
    several, of_flax = (
        p.BatchNorm(use_running_average=False, axis=(1, -1)).init_with_output(KEY, x)
        for p in (jaxfused.linen, flax.linen)
    )
    jax.tree.map(np.testing.assert_array_equal, several, of_flax)

    x = x.swapaxes(1, 2)
    linen = jaxfused.linen.BatchNorm(use_running_average=False, axis_name="devices")
    variables = linen.init(KEY, x[0])
    run = functools.partial(linen.apply, mutable=["batch_stats"])
    y, updates = jax.vmap(run, in_axes=(None, 0), axis_name="devices")(variables, x)
    expected, stats = linen.clone(axis_name=None).apply(variables, x, mutable=["batch_stats"])
    near(y, expected)
    jax.tree.map(lambda a, b: near(a[0], b), updates, stats)


@pytest.mark.parametrize("axis", [None, "devices"])
def test_a_mask_of_batch_norm_counts_the_values_of_the_whole_batch(axis):
    """Whichever devices keep how many; Flax's own code on one device is the same function."""
    x, weight = normal(0, 4, 16, D), normal(1, 4, 16, D)
    mask = (normal(2, 4, 16, D) > -0.7).at[1, 3:].set(False).at[3].set(False)

    def nnx(package, axis, **options):
        def f(x):
            options_of_nnx = dict(axis_name=axis, momentum=0.5, rngs=flax.nnx.Rngs(0)) | options
            module = package.nnx.BatchNorm(D, **options_of_nnx)
            return (
                module(x, mask=mask if axis is None else x != 0),
                module.mean[...],
                module.var[...],
            )

        return f

    def linen(package, axis, **options):
        def f(x):
            module = package.linen.BatchNorm(False, axis_name=axis, momentum=0.5, **options)
            mask_here = mask if axis is None else x != 0
            variables = {
                "params": dict(scale=jnp.ones(D), bias=jnp.zeros(D)),
                "batch_stats": dict(mean=jnp.zeros(D), var=jnp.ones(D)),
            }
            y, updates = module.apply(variables, x, mask=mask_here, mutable=["batch_stats"])
            return y, updates["batch_stats"]["mean"], updates["batch_stats"]["var"]

        return f

    def with_gradient(f):
        def loss(x):
            y, mean, var = f(jnp.where(mask, x, 0))
            return jnp.sum(weight * y), (y, *(jnp.broadcast_to(a, (4, D)) for a in (mean, var)))

        return jax.jit(jax.grad(loss, has_aux=True))(x)

    kept = np.where(mask, np.float64(x), np.nan).reshape(-1, D)
    for make in (nnx, linen):
        f = make(jaxfused, axis)
        gradient, (y, mean, var) = with_gradient(f if axis is None else jax.vmap(f, axis_name=axis))
        expected, (expected_y, *_) = with_gradient(make(flax, None))
        near(gradient, expected)
        near(y, expected_y)
        np.testing.assert_allclose(mean[0], np.nanmean(kept, 0) / 2, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(var[0], (1 + np.nanvar(kept, 0)) / 2, rtol=1e-5)
        with pytest.raises(ValueError, match="all values, and a mask is given"):
            make(jaxfused, None, implementation="cuda")(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda **k: jaxfused.nnx.TransformerBlock(D, 2, norm="batch_norm", **k), "norm='batch"),
        (lambda **k: jaxfused.nnx.TransformerBlock(D, 3, **k), "8 features .* by 3 heads"),
        (lambda **k: jaxfused.nnx.ConvNormAct(D, D, 3, norm="layer_norm", **k), "norm='layer"),
        (lambda **k: jaxfused.nnx.MLP(D, 4, activation="eluu", **k)(jnp.ones(D)), "'eluu' is not"),
        (
            lambda **k: jaxfused.nnx.LinearGeneral(D, D, precision="fp8_delayed", **k)(jnp.ones(D)),
            'only Linear .* remember scales; pass "fp8"',
        ),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make(rngs=flax.nnx.Rngs(0))


# --- the Transformer block ------------------------------------------------------------------------


def test_segments_positions_and_batch_axes():
    block = jax.jit(
        jaxfused.nnx.TransformerBlock(
            D, 2, rope=jaxfused.nnx.RotaryEmbedding(), rngs=flax.nnx.Rngs(0)
        ).__call__
    )
    x = normal(0, 3, B, 4, D)
    segments = jnp.array([0, 0, 0, 1]) + jnp.zeros((3, B, 1), int)
    positions = put([0, 1, 2, 0])
    y = block(x, segment_ids=segments, positions=positions)
    near(y[..., :3, :], block(x[..., :3, :]))
    near(y[..., 3:, :], block(x[..., 3:, :]))
    mask = segments[..., None, :, None] == segments[..., None, None, :]
    near(block(x, mask=mask, positions=positions), y)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_dropping_branches(kind):
    x = normal(0, 16, T, D)

    def run(deterministic, **rates):
        nnx = jaxfused.nnx.TransformerBlock(
            D, 2, bias_init=flax.nnx.initializers.normal(1.0), rngs=flax.nnx.Rngs(0), **rates
        )
        graphdef, state = flax.nnx.split(nnx)

        def of_nnx(residual=None):
            model = flax.nnx.merge(graphdef, state, copy=True)
            return model(x, residual=residual, deterministic=deterministic, rngs=flax.nnx.Rngs(1))

        of_linen = functools.partial(
            jaxfused.linen.TransformerBlock(2, **rates).apply,
            {"params": params_of(nnx)},
            x,
            deterministic=deterministic,
            rngs={"dropout": KEY},
        )
        call = of_nnx if kind == "nnx" else of_linen
        return jax.jit(lambda: (call(), *call(residual=x)))()

    plain, _, plain_stream = run(None)
    near(run(True, dropout_rate=0.5, drop_path_rate=0.5)[0], plain)
    dropped, branch, stream = run(False, dropout_rate=0.5)
    assert not np.allclose(dropped, plain)
    assert 0.3 < np.mean(branch == 0) < 0.7
    assert 0.3 < np.mean(stream == 2 * x) < 0.7

    _, branch, stream = run(False, drop_path_rate=0.5)
    for part, kept_as in ((branch, 0), (stream, 2 * x)):
        gone = np.all(part == kept_as, axis=(1, 2))
        np.testing.assert_array_equal(gone, np.any(part == kept_as, axis=(1, 2)))
        assert 0 < gone.sum() < 16
    # The projection's bias is kept or dropped with the rest of the branch.
    near(stream, 2 * x + jnp.where(gone[:, None, None], 0, 2 * (plain_stream - 2 * x)))


def test_blocks_pass_the_stream_on():
    """A stack of blocks that return (branch, stream) equals a stack of whole blocks, in jit and scan."""

    @flax.nnx.vmap
    def stack(rngs):
        return jaxfused.nnx.TransformerBlock(D, 2, dtype=jnp.float32, rngs=rngs)

    blocks = stack(flax.nnx.Rngs(0).split(3))
    x = normal(0, B, T, D)

    @flax.nnx.jit
    def run(blocks, x):
        carry = flax.nnx.scan(
            lambda carry, block: block(carry[0], residual=carry[1]),
            in_axes=(flax.nnx.Carry, 0),
            out_axes=flax.nnx.Carry,
        )((jnp.zeros_like(x), x), blocks)
        whole = flax.nnx.scan(
            lambda x, block: block(x), in_axes=(flax.nnx.Carry, 0), out_axes=flax.nnx.Carry
        )(x, blocks)
        return sum(carry), whole

    near(*run(blocks, x))


def test_mixed_precision_keeps_the_stream():
    block = jaxfused.nnx.TransformerBlock(D, 2, dtype=jnp.bfloat16, rngs=flax.nnx.Rngs(0))
    x = normal(0, B, T, D)
    y, (branch, stream) = block(x), block(x, residual=x)
    assert (y.dtype, branch.dtype, stream.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)


def test_gradients_reach_every_parameter():
    block = jaxfused.nnx.TransformerBlock(
        D, 2, normalize_qk=True, gated=True, drop_path_rate=0.1, rngs=flax.nnx.Rngs(0)
    )
    x = normal(0, B, T, D)
    gradient = flax.nnx.grad(lambda b: jnp.sum(jnp.sin(b(x, deterministic=True))))
    gradients = flax.nnx.jit(gradient)(block)
    for path, g in jax.tree.leaves_with_path(flax.nnx.to_pure_dict(gradients)):
        assert np.any(g != 0), jax.tree_util.keystr(path)


def test_rotary_embedding_at_an_offset():
    q = normal(0, B, T, 2, D)
    rope = jaxfused.nnx.RotaryEmbedding(4, theta=100.0, scaling=jaxfused.LinearRope(2.0))
    near(rope(q, offset=2), rope(q, positions=2 + jnp.arange(T)))
    np.testing.assert_array_equal(rope(q)[..., 4:], q[..., 4:])
    cos, sin = rope.tables(jnp.arange(T), D)
    near(jaxfused.rope(q, cos=cos, sin=sin), rope(q))


@pytest.mark.parametrize("name", ["qkv", "project"])
def test_a_layer_that_would_not_be_called_is_refused(name):
    rngs = flax.nnx.Rngs(0)
    block = jaxfused.nnx.TransformerBlock(8, num_heads=2, rngs=rngs)
    features = getattr(block, name).kernel.shape[1]
    setattr(block, name, flax.nnx.LinearGeneral(8, features, rngs=rngs))
    with pytest.raises(TypeError, match="LinearGeneral cannot stand for one"):
        block(normal(1, 4, 8))
