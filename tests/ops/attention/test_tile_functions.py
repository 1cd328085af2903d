"""Functions of scores and places in the kernels: their values, gradients, and what is refused."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused import dispatch, masks
from jaxfused.ops.attention.attention_arguments import mask_of, places
from jaxfused.ops.attention.index_function import IndexFunction
from jaxfused.ops.attention.kernel_function import kernel_function, over_arrays
from jaxfused.ops.attention.mask_conditions import conditions
from jaxfused.ops.attention.masks.pattern import Pattern
from pallas_kernels.attention import backward, backward_dq
from pallas_kernels.attention.logits import Logits, Operands
from pallas_kernels.attention.mask import BlockMask
from tests.cases import attention_tiles as tiles
from tests.support import mosaic_interpreter
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels
from tests.support.tolerances import assert_accurate

H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)
T, S, N, H = 150, 200, 2, 32
RANDOM = np.random.default_rng(0)
ARRAYS = dict(
    slopes=RANDOM.random(N),
    caps=1 + RANDOM.random(N),
    table=RANDOM.normal(size=(N, T + S)),
    by_query=RANDOM.normal(size=(N, T)),
    by_key=RANDOM.normal(size=S),
)
DOCUMENTS = put(np.sort(RANDOM.integers(0, 3, S)), jnp.int32)


def traced(name, function):
    return IndexFunction.of(name, function, jnp.float32 if name == "score_mod" else None)


# Each function takes its arrays first, by name.
SCORES = {
    "alibi": lambda a: lambda s, b, h, q, k: s + a["slopes"][h] * (k - q),
    "cap": lambda a: lambda s, b, h, q, k: a["caps"][h] * jnp.tanh(s / a["caps"][h]),
    "root": lambda a: lambda s, b, h, q, k: jnp.sign(s) * jnp.sqrt(jnp.abs(s)),
    "times rows": lambda a: lambda s, b, h, q, k: s * a["by_query"][h, q] - jnp.abs(q - k) / 9,
    "times keys": lambda a: lambda s, b, h, q, k: jnp.where(k % 3 == 1, s, s * a["by_key"][k]),
    "table": lambda a: lambda s, b, h, q, k: s * jnp.exp(a["table"][h, q - k + S] / 4),
    "log of the rest": lambda a: lambda s, b, h, q, k: s * jnp.log((T - q) * (S - k) + 0.5),
}
MASKS = {
    "strides": lambda b, h, q, k: ((q - k) % 3 == h) | (k < 5),
    "documents or near": lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) | (q - k < 4 - h),
}
CASES = {
    "alibi": ("alibi", None, {}, *tiles.DEFAULT),
    "alibi, causal": ("alibi", None, dict(is_causal=True), *tiles.TURNS),
    "cap, strides": ("cap", "strides", {}, *tiles.SPLIT_ROLES),
    "root, lengths": (
        "root",
        None,
        dict(query_lengths=np.array([70]), key_lengths=np.array([101])),
        *tiles.ONE_CONSUMER,
    ),
    "times rows": ("times rows", None, {}, *tiles.DEFAULT),
    "times keys": ("times keys", "documents or near", {}, *tiles.WIDE),
    "table": ("table", None, {}, *tiles.DEFAULT),
    "log, block lists": (
        "log of the rest",
        masks.LocalMask((T, S), (30, 40)) | masks.GlobalMask((T, S), 3),
        {},
        *tiles.DEFAULT,
    ),
}


@parametrize("name", CASES, quick=())
def test_accurate_without_races_in_the_interpreter(race_detector, monkeypatch, name):
    """One CTA has several tiles, so that memory and barriers are reused."""
    mosaic_interpreter.complete(monkeypatch)
    score, mask, options, *configs = CASES[name]
    query, key, value, dout = tiles.draws(np.random.default_rng(1), T, S, N, H)
    is_pattern = isinstance(mask, masks.AttentionMask)
    xla = dict(is_causal=options.get("is_causal", False), implementation="xla")
    xla |= dict(mask=mask) if is_pattern else dict(mask_mod=MASKS.get(mask))
    for theirs, ours in (
        ("query_seq_lengths", "query_lengths"),
        ("key_value_seq_lengths", "key_lengths"),
    ):
        xla[theirs] = options.get(ours)

    def plain(query, key, value, arrays):
        return jaxfused.dot_product_attention(
            query, key, value, score_mod=SCORES[score](arrays), **xla
        )

    low, truth = (
        reference(plain, dtype, query, key, value, dout) for dtype in (np.float16, np.float64)
    )
    at = (jnp.arange(1), jnp.arange(N), jnp.arange(T)[None], jnp.arange(S))
    at = tuple(a.astype(jnp.int32) for a in at)
    arrays = {name: put(a, jnp.float16) for name, a in ARRAYS.items()}

    on_tiles = []

    def divided(arrays):
        on_tiles.append(kernel_function(traced("score_mod", SCORES[score](arrays)), "score_mod"))
        return on_tiles[0].values(at)

    reads, of_reads = jax.vjp(jax.jit(divided), arrays)
    function = on_tiles[0].function
    allows, others = None, ()
    if isinstance(mask, str):
        own = kernel_function(traced("mask_mod", MASKS[mask]), "mask_mod")
        allows, others = own.function, own.values(at)
    pattern = Pattern.of(mask)[0] if is_pattern else None
    lengths = {name: jnp.asarray(a, jnp.int32) for name, a in options.items() if "length" in name}
    logits = Logits(
        scale=H**-0.5,
        mask=BlockMask(
            *(T, S),
            is_causal=options.get("is_causal", False),
            has_query_lengths="query_lengths" in lengths,
            has_key_lengths="key_lengths" in lengths,
            has_function=allows is not None,
            pattern=pattern,
        ),
        score=function,
        allows=allows,
    )
    operands = Operands(reads=(*reads, *others), **lengths)
    out, dquery, dkey, dvalue, _, _, *dreads = tiles.in_kernels(
        configs, query, key, value, dout, operands, logits
    )
    cotangents = [
        np.zeros(read.shape, jax.dtypes.float0)
        if not jnp.issubdtype(read.dtype, jnp.floating)
        else jnp.zeros_like(read)
        if dread is None
        else dread.astype(read.dtype)
        for read, dread in zip(reads, dreads, strict=False)
    ]
    (darrays,) = of_reads(tuple(cotangents))
    actual = dict(out=out, dquery=dquery, dkey=dkey, dvalue=dvalue, **darrays)
    for what, own in actual.items():
        assert_accurate(what, own.astype(low[what].dtype), low[what], truth[what])


def reference(plain, dtype, query, key, value, dout):
    """Returns output and gradients by name."""
    with jax.enable_x64(dtype == np.float64):
        given = [np.asarray(a, dtype) for a in (query, key, value)]
        arrays = {name: np.asarray(a.astype(np.float16), dtype) for name, a in ARRAYS.items()}
        out, vjp = jax.vjp(plain, *given, jax.tree.map(jnp.asarray, arrays))
        dquery, dkey, dvalue, darrays = vjp(jnp.asarray(dout, out.dtype))
        found = dict(out=out, dquery=dquery, dkey=dkey, dvalue=dvalue, **darrays)
        return jax.tree.map(np.asarray, found)


DOCUMENTS_OF_BATCH = put(np.sort(RANDOM.integers(0, 3, (2, S)), axis=1), jnp.int32)
LENGTHS = put([S - 9, S + 3], jnp.int32)
CONDITIONS = {
    # Whether kernels know a part: causal, window, segments, lengths, and whether a rest remains.
    "causal": (lambda b, h, q, k: k <= q, "causal"),
    "causal, reversed": (lambda b, h, q, k: ~(k > q) & (q + 1 > k), "causal rest"),
    "window": (lambda b, h, q, k: (q - k < 9) & (k - q <= 4), "window"),
    "window by shifted places": (lambda b, h, q, k: (k + 3 >= q - 2) & (-q <= -k), "causal window"),
    "the same place": (lambda b, h, q, k: q == k, "causal window"),
    "before the diagonal": (lambda b, h, q, k: k < q, "rest"),
    "of size of a caller's array": (lambda b, h, q, k: q - k < LENGTHS[b], "rest"),
    "segments": (
        lambda b, h, q, k: (k <= q) & (DOCUMENTS_OF_BATCH[b, k] == DOCUMENTS_OF_BATCH[b, q]),
        "causal segments",
    ),
    "chunks and documents": (
        lambda b, h, q, k: (q // 16 == k // 16) & (DOCUMENTS[q] == DOCUMENTS[k]),
        "segments rest",
    ),
    "documents of a head": (lambda b, h, q, k: DOCUMENTS[q] + h == DOCUMENTS[k], "rest"),
    "lengths": (lambda b, h, q, k: (k < LENGTHS[b]) & (LENGTHS[b] - 30 >= k), "lengths"),
    "a length and either": (
        lambda b, h, q, k: (k < LENGTHS[b]) & ((k <= q) | (k < 4 + h)),
        "lengths rest",
    ),
    "of floats": (lambda b, h, q, k: k.astype(jnp.float32) <= q, "rest"),
    "of bits that wrap": (lambda b, h, q, k: k.astype(jnp.int8) <= q.astype(jnp.int8), "rest"),
    "with a flag": (lambda b, h, q, k: (k <= q) & jnp.bool_(True), "causal rest"),
}


@parametrize("offset", [None, 7, (3, -20), [3, -20]], quick=(3,))
def test_conditions_are_the_function(offset):
    """Positions, segments, lengths and the rest allow together what a function allows."""
    offset = jnp.asarray(offset, jnp.int32) if isinstance(offset, tuple) else offset
    query, key = np.zeros((2, T, N, H), np.float16), np.zeros((2, S, N, H), np.float16)
    at = places(offset, 2, N, T, S)
    for name, (function, expected) in CONDITIONS.items():
        # An array of a caller's program is no constant, of which a mask object would be made.
        own = traced("mask_mod", function)
        given = (query, key, None, False, None, offset, None, None, None, None)
        found = conditions(own)
        is_known = dict(
            causal=found.right == 0,
            window=found.window is not None,
            segments=found.segments is not None,
            lengths=bool(found.lengths),
            rest=found.rest is not None,
        )
        assert " ".join(what for what, is_so in is_known.items() if is_so) == expected, name
        vars(own)["is_constant"] = False
        mask, rest = mask_of(*given, own, divides=True)
        allowed = mask.allowed(T, S)
        if rest is not None:
            allowed = allowed & rest.over(at)
            on_tiles = kernel_function(rest.shifted(offset), "mask_mod")
            if on_tiles.function is not None:
                reads = on_tiles.values(places(None, 2, N, T, S))
                by_kernels = over_arrays(on_tiles.function, reads, T, S)
                assert (by_kernels == rest.over(at)).all(), name
        expected_mask = np.broadcast_to(own.over(at), (2, N, T, S))
        np.testing.assert_array_equal(np.broadcast_to(allowed, (2, N, T, S)), expected_mask, name)


def test_a_quotient_that_is_compared_is_not_a_product_with_the_inverse():
    """The mask is that of the function: 41 / 41 >= 1, but in float32 41 * (1 / 41) < 1."""
    size = 128
    tile = types.SimpleNamespace(
        shape=(size, size), query_axis=0, numbers=lambda axis: jnp.arange(size, dtype=jnp.int32)
    )

    def mask(b, h, q, k):
        return ((q - k) / jnp.float32(41) >= 1) | ((q - k) / (k + 1.0) >= 1)

    on_tiles = kernel_function(traced("mask_mod", mask), "mask_mod").function
    allowed = on_tiles(tile, (), (size, size))
    q, k = np.arange(size)[:, None], np.arange(size)
    np.testing.assert_array_equal(allowed, (q - k >= 41) | (q - k >= k + 1))


def test_values_that_are_used_twice_are_visited_once():
    """Visiting a value for each of its uses would take 2^60 steps for these 30 rounds."""
    size = 8
    tile = types.SimpleNamespace(
        shape=(size, size), query_axis=0, numbers=lambda axis: jnp.arange(size, dtype=jnp.int32)
    )

    def mask(b, h, q, k):
        x, y = q.astype(jnp.uint32), k.astype(jnp.uint32)
        for _ in range(30):
            x = x + y
            y = ((y << 13) | (y >> 19)) ^ x
        return (y & 3) == 0

    function = traced("mask_mod", mask)
    conditions(function)
    allowed = kernel_function(function, "mask_mod").function(tile, (), (size, size))
    zero, index = jnp.int32(0), np.arange(size, dtype=np.int32)
    np.testing.assert_array_equal(allowed, mask(zero, zero, index[:, None], index[None]))


def test_arrays_within_a_custom_derivative_are_left_to_xla():
    half = put(0.5, jnp.float32)

    @jax.custom_jvp
    def halved(x):
        return x * half

    halved.defjvps(lambda tangent, result, x: tangent * half)
    own = kernel_function(traced("score_mod", lambda s, b, h, q, k: halved(s)), "score_mod")
    assert own.function is None and "closes over" in own.reason


def fitting(**options):
    """Returns attention of half floats over rows for which kernels evaluate functions."""
    query, key = (jax.ShapeDtypeStruct((2, 320, n, 64), jnp.bfloat16) for n in (4, 2))

    def f(query, key, value, slopes):
        given = {name: f(slopes) for name, f in options.items()}
        return jaxfused.dot_product_attention(query, key, value, implementation="pallas", **given)

    return f, (query, key, key, jax.ShapeDtypeStruct((4,), jnp.float32))


REFUSED = {
    "a table of scores": (lambda a: lambda s, b, h, q, k: a[s.astype(int)] + s, "gather|slice"),
    "sin": (lambda a: lambda s, b, h, q, k: jnp.sin(s), "sin, which depends on the score"),
    "a derivative": (lambda a: lambda s, b, h, q, k: jnp.floor(s), "floor, which depends"),
    "a loop": (
        lambda a: lambda s, b, h, q, k: jax.lax.fori_loop(0, 3, lambda i, x: x * a[h], s),
        "scan of arrays, which depends",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_kernels_do_not_evaluate_is_named(name):
    function, reason = REFUSED[name]
    f, args = fitting(score_mod=function)
    with dispatch.assume(H200):
        with pytest.raises(ValueError, match=reason):
            jax.eval_shape(f, *args)
        # Without a named implementation XLA runs it, and the report says why.
        plain = functools.partial(jaxfused.dot_product_attention, score_mod=function(SLOPES))
        ((choice, _),) = jaxfused.explain(plain, *args[:3]).calls
    assert choice.implementation == "xla" and re.search(reason, choice.reasons["pallas"])


@parametrize("of", ["score", "mask", "both"], quick=())
def test_kernels_run_functions(of):
    """Also with arrays that get gradients, and without a matrix of the size of the logits."""
    score = dict(score_mod=lambda a: lambda s, b, h, q, k: s + a[h] * (k - q))
    mask = dict(mask_mod=lambda a: lambda b, h, q, k: (k <= q) & ((q - k) * a[h] < 9.0))
    f, args = fitting(**(score if of != "mask" else {}), **(mask if of != "score" else {}))

    def loss(*args):
        return jnp.sum(f(*args).astype(jnp.float32))

    with dispatch.assume(H200):
        for function in (f, jax.grad(loss, range(4))):
            assert "attention_forward" in kernels(function, *args)
            text = str(jax.make_jaxpr(function)(*args))
            assert "320,320]" not in text


SLOPES = put(ARRAYS["slopes"][[0, 1, 0, 1]], jnp.float32)


@pytest.mark.parametrize("of_slopes", [False, True])
def test_kernels_sum_only_gradients_that_are_needed(monkeypatch, of_slopes):
    """Slopes that a jitted function computes are no constants, but are seldom differentiated."""
    summed = []

    def query_gradient(*args, reads, **options):
        summed.append(reads)
        return backward_dq.query_gradient(*args, reads=reads, **options)

    monkeypatch.setattr(backward, "query_gradient", query_gradient)

    def loss(x, slopes):
        def alibi(s, b, h, q, k):
            return s + slopes[h] * (k - q)

        out = jaxfused.dot_product_attention(x, x, x, score_mod=alibi, implementation="pallas")
        return jnp.sum(out.astype(jnp.float32))

    shapes = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16), SLOPES[:2]
    with dispatch.assume(H200):
        gradients = jax.jit(jax.grad(loss, argnums=(0, 1) if of_slopes else 0))
        jax.eval_shape(gradients, *shapes)
    assert summed == [(1,) if of_slopes else None]
