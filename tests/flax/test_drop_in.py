"""These modules accept all that Flax's accept, even where the operators are narrower."""

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
import jaxfused.linen
import jaxfused.nnx
from jaxfused import dispatch
from tests.flax.test_modules import normal

B, T, D = 2, 5, 8
KEY = jax.random.key(7)


def nnx_call(package, name, sizes, *inputs, call=None, **arguments):
    """Returns (the result, the variables after the call) of an nnx module."""
    module = getattr(package, name)(*sizes, rngs=flax.nnx.Rngs(0), **arguments)
    y = module(*inputs, **(call or {}))
    return y, flax.nnx.to_pure_dict(flax.nnx.state(module))


def linen_call(package, name, *inputs, call=None, **arguments):
    module = getattr(package, name)(**arguments)
    return module.init_with_output(KEY, *inputs, **(call or {}))


def assert_same(actual, expected):
    def same(a, b):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)

    jax.tree.map(same, actual, expected)


def assert_same_modules(name, sizes, linen_name, linen, *inputs, **arguments):
    """Asserts that both modules give Flax's results, dtypes and variables."""
    both = (
        lambda of: nnx_call(of.nnx, name, sizes, *inputs, **arguments),
        lambda of: linen_call(of.linen, linen_name, *inputs, **linen, **arguments),
    )
    for run in both:
        assert_same(run(jaxfused), run(flax))


# --- integers -------------------------------------------------------------------------------------


def integers(key, shape, dtype):
    del key, dtype
    return jnp.arange(np.prod(shape, dtype=int)).reshape(shape) % 7


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize(
    ("name", "sizes", "linen_name", "linen", "initialisers"),
    [
        ("Linear", (D, 4), "Dense", dict(features=4), ("kernel_init", "bias_init")),
        ("Conv", (D, 4, 3), "Conv", dict(features=4, kernel_size=3), ("kernel_init", "bias_init")),
        ("LayerNorm", (D,), "LayerNorm", {}, ("scale_init", "bias_init")),
        ("RMSNorm", (D,), "RMSNorm", {}, ("scale_init",)),
        ("GroupNorm", (D, 2), "GroupNorm", dict(num_groups=2), ("scale_init", "bias_init")),
        (
            "BatchNorm",
            (D,),
            "BatchNorm",
            dict(use_running_average=False),
            ("scale_init", "bias_init"),
        ),
    ],
)
def test_parameters_of_integers_promote_as_in_flax(
    name, sizes, linen_name, linen, initialisers, dtype
):
    x = jnp.round(normal(0, B, T, D) * 4) if "Norm" not in name else normal(0, B, T, D)
    arguments = dict.fromkeys(initialisers, integers)
    for run in (
        lambda of: nnx_call(of.nnx, name, sizes, x, dtype=dtype, **arguments)[0],
        lambda of: linen_call(of.linen, linen_name, x, dtype=dtype, **linen, **arguments)[0],
    ):
        ours, theirs = run(jaxfused), run(flax)
        assert ours.dtype == theirs.dtype
        unit = float(jnp.finfo(ours.dtype).eps) * float(jnp.abs(theirs).max())
        np.testing.assert_allclose(
            ours.astype(jnp.float32), theirs.astype(jnp.float32), rtol=0, atol=4 * unit
        )


def test_modules_of_flax_have_all_their_names():
    """Models write `nn.attention.make_causal_mask`, and our `nn.attention` is a module too."""
    ours, theirs = jaxfused.linen, flax.linen
    assert ours.attention.make_causal_mask is theirs.attention.make_causal_mask
    assert ours.linear.default_embed_init is theirs.linear.default_embed_init
    assert ours.linear.Dense is ours.Dense
    with pytest.raises(AttributeError, match="no attribute 'wings'"):
        _ = ours.linear.wings


def test_queries_of_integers():
    q, k, v = jax.random.randint(KEY, (3, B, T, 4, D), -3, 3)
    for ours, theirs in (
        (jaxfused.nnx.attention_fn, flax.nnx.dot_product_attention),
        (jaxfused.linen.attention_fn, flax.linen.dot_product_attention),
    ):
        assert_same(ours(q, k, v), theirs(q, k, v))


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "padding", ["same", "valid", "SAME_LOWER", "same_lower", "SAME", "VALID", "CIRCULAR", 1]
)
@pytest.mark.parametrize("strides", [1, 2])
def test_paddings_of_conv(padding, strides):
    # The padding of an even kernel differs between both sides.
    x = normal(0, B, 7, D)
    assert_same_modules(
        "Conv",
        (D, 4, 4),
        "Conv",
        dict(features=4, kernel_size=4),
        x,
        padding=padding,
        strides=strides,
    )


@pytest.mark.parametrize("padding", ["same", "valid", "SAME_LOWER", "SAME", "VALID", "CIRCULAR"])
def test_paddings_of_conv_transpose(padding):
    sizes, options = (D, 4, 4), dict(features=4, kernel_size=4)
    x = normal(0, B, 7, D)
    assert_same_modules("ConvTranspose", sizes, "ConvTranspose", options, x, padding=padding)


@pytest.mark.parametrize(
    ("name", "sizes", "linen_name", "linen", "shape"),
    [
        ("Conv", (D, 4, 3), "Conv", dict(features=4, kernel_size=3), (B, 0, D)),
        ("Conv", (D, 4, 3), "Conv", dict(features=4, kernel_size=3), (0, T, D)),
        ("GroupNorm", (D, 2), "GroupNorm", dict(num_groups=2), (B, 0, D)),
        ("GroupNorm", (D, 2), "GroupNorm", dict(num_groups=2), (0, T, D)),
        ("BatchNorm", (D,), "BatchNorm", dict(use_running_average=False), (0, D)),
        ("LayerNorm", (D,), "LayerNorm", {}, (0, D)),
        ("Linear", (D, 4), "Dense", dict(features=4), (0, D)),
    ],
)
def test_empty_inputs_and_vectors(name, sizes, linen_name, linen, shape):
    assert_same_modules(name, sizes, linen_name, linen, normal(0, *shape))


def test_group_norm_of_a_vector():
    x, residual = normal(0, D), normal(1, D)
    ours, theirs = (
        linen_call(of.linen, "GroupNorm", x, num_groups=2)[0] for of in (jaxfused, flax)
    )
    assert_same(ours, theirs)
    norm = jaxfused.nnx.GroupNorm(D, 2, rngs=flax.nnx.Rngs(0))
    assert_same(norm(x), theirs)  # Flax's NNX module does not support this.
    assert_same(norm(x, residual=residual), theirs + residual)


# --- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [-0.5, 1.0, 1.5, float("nan"), float("inf")])
def test_rates_that_are_no_fractions_are_refused(rate):
    q = normal(0, B, T, 4, D)
    x = normal(1, B, T, D)
    block = dict(deterministic=True, dropout_rate=rate)
    calls = [
        lambda: jaxfused.nnx.attention_fn(q, q, q, dropout_rate=rate, deterministic=True),
        lambda: jaxfused.linen.attention_fn(q, q, q, dropout_rate=rate),
        lambda: jaxfused.dot_product_attention(q, q, q, dropout_rate=rate, dropout_key=KEY),
        lambda: nnx_call(jaxfused.nnx, "MultiHeadAttention", (2, D), x, decode=False, **block),
        lambda: linen_call(jaxfused.linen, "MultiHeadAttention", x, num_heads=2, **block),
    ]
    if rate != 1.0:  # A block may drop a whole branch, like Flax's Dropout.
        calls += [
            lambda: nnx_call(jaxfused.nnx, "TransformerBlock", (D, 2), x, dropout_rate=rate),
            lambda: linen_call(jaxfused.linen, "TransformerBlock", x, num_heads=2, **block),
        ]
    for call in calls:
        with pytest.raises(ValueError, match=r"dropout_rate must be in the range \[0, 1[)\]]"):
            call()


@pytest.mark.parametrize("is_causal", [False, True])
def test_sowing_the_weights_changes_nothing(is_causal):
    """The output stays the same, also where it is 0 because a query has no keys."""
    x = normal(0, B, T, D)
    mask = jnp.ones((B, 1, T, T)).at[0, :, 2].set(0).at[1, :, 1, :2].set(0)
    masked = np.zeros((B, 1, T), bool)
    masked[0, :, 2] = True
    masked[1, :, 1] = is_causal
    nnx = jaxfused.nnx.MultiHeadAttention(2, D, decode=False, use_bias=False, rngs=flax.nnx.Rngs(0))
    stock = flax.nnx.MultiHeadAttention(2, D, decode=False, use_bias=False, rngs=flax.nnx.Rngs(0))
    options = dict(mask=mask, is_causal=is_causal)

    @flax.nnx.jit
    def sown(module):
        y, state = flax.nnx.capture(module, flax.nnx.Intermediate)(x, sow_weights=True, **options)
        return y, flax.nnx.to_pure_dict(state)["attention_weights"][0]

    with dispatch.recorded_fallbacks() as fallbacks:
        y, weights = sown(nnx)
    assert not fallbacks
    np.testing.assert_array_equal(y, flax.nnx.jit(lambda nnx: nnx(x, **options))(nnx))
    rows = np.broadcast_to(masked, (B, 2, T))
    np.testing.assert_array_equal(weights[rows], 0)
    np.testing.assert_array_equal(y[masked[:, 0]], 0)
    expected, expected_weights = sown(stock)
    assert_same(weights[~rows], expected_weights[~rows])
    assert_same(y[~masked[:, 0]], expected[~masked[:, 0]])


@pytest.mark.parametrize("package", [jaxfused.nnx, jaxfused.linen], ids=["nnx", "linen"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_masked_rows_are_zero_where_flax_serves_too(package, is_causal):
    q, k, v = (normal(i, B, T, 4, D) for i in range(3))
    mask = jnp.ones((B, 1, T, T)).at[0, :, 2].set(0).at[1, :, 1, :2].set(0)
    options = dict(dropout_rate=0.5, dropout_rng=KEY, is_causal=is_causal)
    y = package.attention_fn(q, k, v, mask=mask, **options)
    np.testing.assert_array_equal(y[0, 2], 0)
    assert np.any(y[0, 3] != 0)

    class Sink:
        def sow(self, collection, name, weights):
            self.weights = weights

    sink = Sink()
    np.testing.assert_array_equal(
        package.attention_fn(q, k, v, mask=mask, module=sink, **options), y
    )
    np.testing.assert_array_equal(sink.weights[0, :, 2], 0)
    np.testing.assert_allclose(sink.weights[0, :, 3].sum(-1), 1, rtol=1e-5)
    assert np.all(y[1, 1] == 0) == is_causal


# --- what Flax's own code serves ------------------------------------------------------------------


@pytest.mark.parametrize("precision", [None, "default", jax.lax.Precision.DEFAULT])
def test_the_default_precision_takes_the_operators(precision):
    x = normal(0, B, T, D)
    with dispatch.recorded_fallbacks() as fallbacks:
        for name, sizes, linen_name, linen, options in (
            ("Conv", (D, 4, 3), "Conv", dict(features=4, kernel_size=3), {}),
            ("Linear", (D, 4), "Dense", dict(features=4), {}),
            (
                "MultiHeadAttention",
                (2, D),
                "MultiHeadAttention",
                dict(num_heads=2),
                dict(decode=False),
            ),
        ):
            assert_same_modules(name, sizes, linen_name, linen, x, precision=precision, **options)
    assert not fallbacks


def test_conv_has_a_precision():
    x = jax.ShapeDtypeStruct((B, T, D), jnp.float32)
    w = jax.ShapeDtypeStruct((3, D, 4), jnp.float32)
    text = jax.jit(lambda x, w: jaxfused.conv(x, w, precision="highest")).lower(x, w).as_text()
    assert "HIGHEST" in text


def test_explain_lists_what_flax_serves():
    x = normal(0, B, T, D)

    def program(x):
        conv = jaxfused.nnx.Conv(D, D, 3, mask=jnp.ones((3, D, D)), rngs=flax.nnx.Rngs(0))
        norm = jaxfused.nnx.LayerNorm(D, reduction_axes=(-2, -1), rngs=flax.nnx.Rngs(0))
        attention = jaxfused.nnx.MultiHeadAttention(
            2, D, decode=False, precision="highest", rngs=flax.nnx.Rngs(0)
        )
        return attention(norm(conv(conv(x))))

    explanation = jaxfused.explain(program, x)
    assert explanation.fallbacks == (
        (dispatch.Fallback("jaxfused.nnx.Conv", "mask is given"), 2),
        (
            dispatch.Fallback(
                "jaxfused.nnx.LayerNorm", "reduction_axes=(-2, -1) is not the last axis"
            ),
            1,
        ),
        (dispatch.Fallback("jaxfused.nnx.attention_fn", "precision is given"), 1),
    )
    assert "2 x jaxfused.nnx.Conv runs Flax's own code because mask is given" in str(explanation)
    assert jaxfused.explain(jaxfused.nnx.LayerNorm(D, rngs=flax.nnx.Rngs(0)), x).fallbacks == ()
