"""score_mod and mask_mod: values, gradients to arrays, what kernels take, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfused
from jaxfused import dispatch, masks
from jaxfused.ops.attention.index_function import FunctionMask, IndexFunction
from tests.cases.attention import Case
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels

H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)
B, T, S, N, K = 2, 20, 24, 4, 2


def arrays(dtype=jnp.float32, queries=T, keys=S):
    return Case("", queries, keys, batch=B, heads=N, key_heads=K, head_size=16).arrays(dtype)[:3]


def attend(*args, **options):
    return jaxfused.dot_product_attention(*args, **options)


RANDOM = np.random.default_rng(0)
SLOPES = put(RANDOM.random(N), jnp.float32)
TABLE = put(RANDOM.normal(size=(N, T + S)), jnp.float32)
DOCUMENTS = put(np.sort(RANDOM.integers(0, 3, (B, S)), axis=1), jnp.int32)
Q, KEY = np.arange(T)[:, None], np.arange(S)[None]


def alibi(slopes):
    return lambda score, b, h, q, k: score + slopes[h] * (k - q)


def test_slopes_and_tables_are_a_bias_with_gradients():
    query, key, value = arrays()

    def by_function(slopes, table):
        def score_mod(score, b, h, q, k):
            return alibi(slopes)(score, b, h, q, k) - table[h, q - k + S]

        return jnp.sum(attend(query, key, value, score_mod=score_mod) ** 2)

    def by_bias(slopes, table):
        bias = slopes[:, None, None] * (KEY - Q) - table[:, Q - KEY + S]
        return jnp.sum(attend(query, key, value, bias) ** 2)

    actual, expected = (
        jax.jit(jax.value_and_grad(f, (0, 1)))(SLOPES, TABLE) for f in (by_function, by_bias)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), actual, expected)


@pytest.mark.exhaustive
def test_any_function_of_the_score():
    """Soft caps by a learned number are no bias."""
    query, key, value = arrays()

    def loss(cap, **given):
        def score_mod(score, b, h, q, k):
            return jnp.where(b == 1, cap[h] * jnp.tanh(score / cap[h]), score)

        mod = {} if given else dict(score_mod=score_mod)
        return jnp.sum(attend(query, key, value, **mod, **given) ** 2)

    cap = jnp.full(N, 0.7)
    actual, gradient = jax.jit(jax.value_and_grad(loss))(cap)
    own = [attend(query[:1], key[:1], value[:1])]
    own.append(attend(query[1:], key[1:], value[1:], logits_soft_cap=0.7))
    np.testing.assert_allclose(actual, sum(jnp.sum(out**2) for out in own), rtol=1e-6)
    small = np.float32(1e-2)
    both = [jax.jit(loss)(cap.at[2].add(d)) for d in (small, -small)]
    np.testing.assert_allclose(gradient[2], (both[0] - both[1]) / (2 * small), rtol=2e-2)


@parametrize("is_traced", [False, True], quick=(0,))
def test_mask_functions(is_traced):
    query, key, value = arrays()
    documents = np.asarray(DOCUMENTS)
    allowed = documents[:, None, :T, None] == documents[:, None, None, :]
    allowed = allowed & (Q + np.arange(N)[:, None, None] >= KEY)

    def f(documents, query):
        def mask_mod(b, h, q, k):
            return (documents[b, q] == documents[b, k]) & (k <= q + h)

        return jnp.sum(attend(query, key, value, mask_mod=mask_mod) ** 2)

    def expected(query):
        return jnp.sum(attend(query, key, value, mask=put(allowed)) ** 2)

    if is_traced:
        actual = jax.jit(jax.value_and_grad(f, 1))(DOCUMENTS, query)
    else:
        actual = jax.jit(jax.value_and_grad(lambda query: f(DOCUMENTS, query)))(query)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6),
        actual,
        jax.jit(jax.value_and_grad(expected))(query),
    )


@parametrize(
    "inside",
    [jax.jit, jax.checkpoint, lambda f: f],
    quick=(0,),
    ids=["jit", "checkpoint", "as it is"],
)
def test_functions_of_other_arrays_are_other_masks(inside):
    """Also where a function that is called inside closes over the arrays."""

    def mask(array):
        f = inside(lambda q, k: array[q, k])
        function = IndexFunction.of("mask_mod", lambda b, h, q, k: f(q, k), None)
        return FunctionMask.of_heads_of(function, (T, S), N, 0)

    arrays = RANDOM.random((2, T, S)) > 0.5
    made = [mask(put(array)) for array in arrays]
    assert made[0] != made[1] and made[0] == mask(put(arrays[0]))
    for one, array in zip(made, arrays, strict=True):
        np.testing.assert_array_equal(one, array)


def test_masks_are_evaluated_on_a_devices_part():
    """Kernels do so under `jax.shard_map`, while the caller's mesh has Explicit axes."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        function = IndexFunction.of("mask_mod", lambda b, h, q, k: k <= q + 1, None)
        mask = FunctionMask.of_heads_of(function, (T, S), N, 0)
        f = jax.shard_map(
            lambda q: mask.allowed(q[:, None], jnp.arange(S)[None]), in_specs=P(), out_specs=P()
        )
        np.testing.assert_array_equal(jax.jit(f)(jnp.arange(T)), KEY <= Q + 1)


@parametrize("kind", ["score", "addition", "mask", "constant", "call"], quick=(0,))
def test_arrays_with_explicit_axes(kind):
    table = put(RANDOM.random((T, S)) > 0.5)

    def f(query, key, value, slopes, documents):
        mods = dict(
            score=dict(score_mod=lambda s, b, h, q, k: s * slopes[h]),
            addition=dict(score_mod=lambda s, b, h, q, k: s + slopes[h] * k),
            mask=dict(mask_mod=lambda b, h, q, k: documents[b, q] == documents[b, k]),
            constant=dict(mask_mod=lambda b, h, q, k: table[q, k]),
            call=dict(score_mod=lambda s, b, h, q, k: s + slopes[jnp.clip(documents[b, k], 0, h)]),
        )
        return jnp.sum(attend(query, key, value, **mods[kind]) ** 2)

    args = (*arrays(), SLOPES, DOCUMENTS)
    expected = jax.jit(jax.value_and_grad(f, (0, 3)))(*args)
    mesh = jax.make_mesh((1, 1), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        specs = P("x", None, "y"), P("x", None, "y"), P("x", None, "y"), P("y"), P("x")
        table = jax.reshard(table, P("x"))
        split = [jax.reshard(a, spec) for a, spec in zip(args, specs, strict=True)]
        actual = jax.jit(jax.value_and_grad(f, (0, 3)))(*split)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), actual, expected)


OF_A_TABLE = {
    "softplus": lambda score, table, h: score + jax.nn.softplus(table[h]),
    "logsumexp": lambda score, table, h: (
        score * jax.nn.logsumexp(jnp.full_like(table, 2.0) * table)
    ),
    "relu": lambda score, table, h: jax.nn.relu(score + table[h]),
}


@parametrize("of", ("softplus", "logsumexp", "relu"), quick=(0,))
def test_functions_with_a_derivative_of_their_own_on_an_explicit_mesh(of):
    f = OF_A_TABLE[of]
    mesh = jax.make_mesh((1,), ("d",))
    operands = [*arrays(), SLOPES - 0.5]

    def loss(query, key, value, table):
        return jnp.sum(
            jnp.sin(attend(query, key, value, score_mod=lambda s, b, h, *_: f(s, table, h)))
        )

    gradients = jax.jit(jax.value_and_grad(loss, (0, 3)))
    expected = gradients(*operands)
    with jax.set_mesh(mesh):
        actual = gradients(*(jax.device_put(a, jax.NamedSharding(mesh, P("d"))) for a in operands))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), actual, expected)


def test_gradients_of_16_bit_tables_are_summed_in_float32():
    query, key, value = arrays(queries=128, keys=128)

    def loss(table):
        def score_mod(score, b, h, q, k):
            return score + table[h, jnp.clip((q - k) // 32, 0, 3)]

        return jnp.sum(jnp.sin(attend(query, key, value, score_mod=score_mod)))

    gradient = jax.jit(jax.grad(loss))
    table = TABLE[:, :4].astype(jnp.bfloat16)
    actual, expected = gradient(table), gradient(table.astype(jnp.float32))
    np.testing.assert_array_equal(actual, expected.astype(jnp.bfloat16))


@pytest.mark.exhaustive
def test_random_masks_by_a_key():
    query, key, value = arrays()
    seed = jax.random.key(0)

    def mask_mod(b, h, q, k):
        return jax.random.bernoulli(jax.random.fold_in(jax.random.fold_in(seed, q), k))

    allowed = jax.vmap(jax.vmap(mask_mod, (None,) * 3 + (0,)), (None, None, 0, None))
    expected = attend(query, key, value, mask=allowed(0, 0, jnp.arange(T), jnp.arange(S)))
    actual = attend(query, key, value, mask_mod=mask_mod)
    np.testing.assert_allclose(actual, expected, 1e-5, 1e-6)


@pytest.mark.exhaustive
def test_exported_for_any_length():
    query, key, value = arrays()
    (length,) = jax.export.symbolic_shape("length")

    def f(*args):
        score_mod = lambda s, b, h, q, k: s + SLOPES[h] * (k - q)  # noqa: E731
        return attend(*args, mask_mod=lambda b, h, q, k: k <= q + h, score_mod=score_mod)

    shapes = [jax.ShapeDtypeStruct((B, length, *a.shape[2:]), a.dtype) for a in (query, key, value)]
    exported = jax.export.export(jax.jit(f))(*shapes)
    args = query, key[:, :T], value[:, :T]
    np.testing.assert_allclose(exported.call(*args), f(*args), 1e-5, 1e-6)


@pytest.mark.exhaustive
def test_queries_stand_at_their_offset():
    """The last tokens with an offset have the rows of the whole sequence."""
    query, key, value = arrays(queries=S)
    functions = dict(
        score_mod=alibi(SLOPES), mask_mod=lambda b, h, q, k: (k <= q) & (q - k < 5 + h)
    )
    whole = attend(query, key, value, **functions)
    for offset in (S - 4, "bottom_right", put(np.full(B, S - 4))):
        last = attend(query[:, -4:], key, value, query_offset=offset, **functions)
        np.testing.assert_allclose(last, whole[:, -4:], rtol=1e-5, atol=1e-6)
    lengths = np.array([S - 7, S])
    some = jnp.stack([query[0, S - 11 : S - 7], query[1, S - 4 :]])
    last = attend(
        some, key, value, query_offset="bottom_right", key_value_seq_lengths=lengths, **functions
    )
    expected = jnp.stack([whole[0, S - 11 : S - 7], whole[1, S - 4 :]])
    np.testing.assert_allclose(last, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_masks_and_functions_combine():
    query, key, value = arrays()
    causal = masks.CausalMask((T, S))
    function = dict(mask_mod=lambda b, h, q, k: q - k < 3)
    expected = attend(query, key, value, mask=causal & masks.LocalMask((T, S), (2, None)))
    for given in (dict(mask=causal), dict(mask=np.asarray(causal)), dict(is_causal=True)):
        np.testing.assert_allclose(
            attend(query, key, value, **given, **function), expected, rtol=1e-6, atol=1e-6
        )


ADDITIVE = [
    (lambda s, b, h, q, k: s, True),
    (lambda s, b, h, q, k: 1.0 + s - jnp.abs(q - k), True),
    (lambda s, b, h, q, k: jnp.where(k > q, -1.0, 0.0) + s, True),
    (lambda s, b, h, q, k: jnp.where(k > q, -1.0, s), False),
    (lambda s, b, h, q, k: s + s, False),
    (lambda s, b, h, q, k: (s + 1.0) + s, False),
    (lambda s, b, h, q, k: 1.0 - s, False),
    (lambda s, b, h, q, k: s.astype(jnp.bfloat16).astype(jnp.float32), False),
    (lambda s, b, h, q, k: jax.jit(lambda s: s + 1.0)(s), True),
    (lambda s, b, h, q, k: jax.jit(lambda s: s * 2.0)(s), False),
    (lambda s, b, h, q, k: 1.0 * k, False),
]


@pytest.mark.parametrize(("function", "is_additive"), ADDITIVE)
def test_additive_functions_are_recognised(function, is_additive):
    assert IndexFunction.of("score_mod", function, jnp.float32).is_additive == is_additive


def branches(score, b, h, q, k):
    return score if q > k else -score


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(score_mod=3), "pass a function"),
        (dict(score_mod="alibi"), r"called with \(score, b, h, q, k\); pass a function"),
        (dict(score_mod=lambda score: score), "does not trace"),
        (dict(score_mod=branches), "use jnp.where"),
        (dict(score_mod=lambda s, b, h, q, k: s + np.ones(4)[h]), "jax.numpy"),
        (dict(score_mod=lambda s, b, h, q, k: q), "scalar of float32"),
        (dict(score_mod=lambda s, b, h, q, k: s + SLOPES), "one number"),
        (dict(mask=lambda b, h, q, k: q > k), "a function as mask_mod"),
        (dict(mask_mod=lambda b, h, q, k: q - k), "scalar of bool"),
        (dict(mask_mod=lambda b, h, q, k: (q > k, k)), "scalar of bool"),
    ],
)
def test_functions_that_do_not_trace(options, message):
    with pytest.raises(ValueError, match=message):
        attend(*arrays(), **options)


@pytest.mark.exhaustive
def test_kernels_take_what_is_added_and_masks():
    args = arrays(jnp.bfloat16, 320, 320)

    def f(*args):
        def loss(slopes, *args):
            out = attend(
                *args,
                score_mod=alibi(slopes),
                mask_mod=lambda b, h, q, k: k <= q,
                implementation="pallas",
            )
            return jnp.sum(out.astype(jnp.float32))

        return loss(SLOPES, *args)

    with dispatch.assume(H200):
        assert "attention_forward" in kernels(f, *args)
        with pytest.raises(ValueError, match="sin, which depends on the score"):
            attend(*args, score_mod=lambda s, b, h, q, k: jnp.sin(s), implementation="pallas")


@pytest.mark.parametrize("kind", ["array", "number"])
def test_in_a_shard_map_that_tracks_what_varies(kind):
    q = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 2, 16)), jnp.float32)
    w = jnp.array([0.5, 1.0])
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def score_mod(score, b, h, i, j):
        return jnp.where(i >= j, score, -1.0) * w[h] if kind == "array" else 2.0 * score

    def f(q):
        return jaxfused.dot_product_attention(q, q, q, score_mod=score_mod)

    def gradient(f):
        return jax.jit(jax.value_and_grad(lambda q: jnp.sum(f(q) ** 2)))(q)

    spec = jax.sharding.PartitionSpec("d")
    sharded = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)
    for a, b in zip(gradient(sharded), gradient(f), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


SPLIT = dict(
    addition=lambda w, ids: dict(score_mod=lambda s, b, h, q, k: s + w[h] * (k - q)),
    factor=lambda w, ids: dict(score_mod=lambda s, b, h, q, k: s * w[h]),
    call=lambda w, ids: dict(score_mod=lambda s, b, h, q, k: s + jnp.clip(k - ids[b, q], 0, 3)),
    mask=lambda w, ids: dict(mask_mod=lambda b, h, q, k: ids[b, q] == ids[b, k]),
)


@pytest.mark.parametrize("on", ["cpu", "gpu"])
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", SPLIT)
def test_arrays_that_a_shard_map_splits(kind, on):
    case = np.random.default_rng(0)
    q = put(case.normal(size=(2, 70, 2, 16)), jnp.bfloat16 if on == "gpu" else jnp.float32)
    w, ids = put([0.5, 1.0]), put(case.integers(3, size=(2, 70)), jnp.int32)
    mesh = jax.make_mesh((1, 1), ("d", "h"), axis_types=(AxisType.Auto,) * 2)

    def f(q, w, ids):
        return jaxfused.dot_product_attention(q, q, q, **SPLIT[kind](w, ids))

    specs = P("d", None, "h"), P("h"), P("d")
    sharded = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs[0])
    if on == "gpu":
        with dispatch.assume(H200):
            launched = kernels(sharded, q, w, ids)
        assert bool(launched) == (kind != "factor")
        return

    def gradient(f):
        return jax.jit(jax.value_and_grad(lambda q, w: jnp.sum(f(q, w, ids) ** 2), (0, 1)))(q, w)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        *map(gradient, (sharded, f)),
    )


def test_functions_without_a_derivative_at_zero_have_gradients_beside_masked_keys():
    """Keys beyond the length are zeros, and the derivative of sqrt(score) there is no number."""
    q, k, v = jax.random.uniform(jax.random.key(0), (3, 1, 5, 2, 8), minval=0.1)

    def f(*arrays, **options):
        y = jaxfused.dot_product_attention(*arrays, score_mod=lambda s, *_: jnp.sqrt(s), **options)
        return jnp.sum(jnp.square(y))

    lengths = jnp.array([3])
    ours = jax.grad(f, (0, 1, 2))(q, k, v, key_value_seq_lengths=lengths)
    expected = jax.grad(lambda q, k, v: f(q, k[:, :3], v[:, :3]), (0, 1, 2))(q, k, v)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("offset", [2**31, -(2**40), [2**33]])
def test_places_have_32_bits(offset):
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(
        ValueError, match=r"query_offset is .*, but score_mod and mask_mod get places"
    ):
        jaxfused.dot_product_attention(
            q, q, q, query_offset=offset, mask_mod=lambda b, h, q, k: q >= k
        )
