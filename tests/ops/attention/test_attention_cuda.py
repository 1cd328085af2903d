"""dot_product_attention by the CUDA kernels: limits, lowering, values and rejected calls on a GPU."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused import dispatch
from jaxfused.ops.attention import attention_xla
from jaxfused.ops.attention.attention_cuda import why_unsupported
from jaxfused.runtime import cuda_library
from tests.cases.attention import Case
from tests.ops.attention.test_attention_kernels import (
    CASES,
    RANDOM_SEEDS,
    dropout,
    gradients,
    operator,
)
from tests.ops.attention.test_attention_kernels import random_case as any_case
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.grids import parametrize
from tests.support.lowering import kernels, lowered
from tests.support.tensor_cores import rounded_einsum

AMPERE = dispatch.Device("gpu", "NVIDIA A100", (8, 0), 108)
CPU = dispatch.Device("cpu", "cpu", None, 0)
TARGETS = ["jaxfused_attention_forward", "jaxfused_attention_backward"]

MORE_CASES = (
    Case("head size 256, grouped", 150, 170, heads=4, head_size=256, is_causal=True),
    Case("head sizes 200 and 8", 70, 90, head_size=200, value_head_size=8, soft_cap=1.0),
    Case("eight query heads share one", 190, 150, 8, 1, 64, window=(50, 20)),
    Case("bias of a query", 130, 90, 4, 2, 64, bias=(1, 4, 130, 1)),
    Case("bias of a head", 70, 90, 4, 4, 128, bias=(1, 4, 1, 1), mask=(1, 1, 70, 90)),
    Case("bias of every pair", 130, 200, 2, 1, 256, bias=(2, 2, 130, 200), is_causal=True),
    Case("at the end of the keys", 40, 200, 4, 2, 64, is_causal=True, offset="bottom_right"),
    Case("window at offsets", 70, 90, 2, 1, 64, window=(20, 3), offset=(60, -50), bias=(2, 70, 90)),
    Case("negative scale", 70, 130, head_size=40, scale=-0.3, key_lengths=(130, 3)),
)


def random_case(seed):
    """Draws `any_case`, with any of the head sizes that the kernels support."""
    case, has_dropout = any_case(seed)
    rng = np.random.default_rng(1000 + seed)
    if rng.random() < 0.3:
        case = Case(**{**vars(case), "head_size": 8 * int(rng.integers(17, 33))})
    return case, has_dropout


def fits_float32(case):
    return max(case.head_size, case.value_head_size or 0) <= 128


@pytest.fixture
def built(monkeypatch):
    """The kernels are treated as built, because lowering needs only their names."""
    monkeypatch.setattr(cuda_library, "why_unavailable", lambda: None)
    monkeypatch.setattr(cuda_library, "register", lambda: None)


FITS = dict(
    compute_capability=(8, 0),
    dtype=jnp.dtype("bfloat16"),
    query_count=5,
    key_count=7,
    head_size=64,
    value_size=64,
)
FITS_FLOAT32 = dict(dtype=jnp.dtype("float32"), allows_tf32=True)
FITS_TURING = dict(compute_capability=(7, 5), dtype=jnp.dtype("float16"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        (dict(head_size=256, value_size=8), None),
        (FITS_TURING, None),
        (dict(used=("bias", "mask", "logits_soft_cap", "segment ids", "sinks", "dropout")), None),
        (dict(compute_capability=None), "needs an NVIDIA GPU"),
        (dict(compute_capability=(7, 0)), "7.5 or later"),
        (dict(compute_capability=(7, 5)), "bfloat16 needs compute capability 8.0"),
        (dict(dtype=jnp.dtype("float64")), "query has dtype float64"),
        (FITS_FLOAT32, None),
        (FITS_FLOAT32 | dict(allows_tf32=False), "less than query's float32 is to be multiplied"),
        (FITS_FLOAT32 | dict(head_size=136), "up to 128 in float32, not 136"),
        (FITS_FLOAT32 | dict(compute_capability=(7, 5)), "float32 needs compute capability 8.0"),
        (dict(head_size=60), "multiples of 8 up to 256 on this GPU, not 60"),
        (dict(value_size=264), "not 264"),
        (FITS_TURING | dict(head_size=136), "up to 128 on this GPU, not 136"),
        (dict(key_count=0), "queries and keys"),
        (dict(used=("scale as an array",)), "a Python float"),
    ],
)
def test_limits(built, change, reason):
    given = why_unsupported(**(FITS | change))
    assert given is None if reason is None else reason in given


@parametrize("case", CASES + MORE_CASES, quick=slice(None, None, 3))
def test_the_gradient_lowers(built, monkeypatch, case):
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: AMPERE)
    f = operator(case, "cuda", **dropout(case.sinks))
    launched = kernels(lambda *args: gradients(f, args), *case.arrays(jnp.bfloat16))
    assert launched == TARGETS


def test_the_limits_of_a_window_are_attributes(built, monkeypatch):
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: AMPERE)
    for change, expected in [
        (dict(), "left = -1 : i64, right = -1"),
        (dict(is_causal=True), "left = -1 : i64, right = 0"),
        (dict(window=(5, 3)), "left = 5 : i64, right = 3"),
        (dict(window=(5, 3), is_causal=True), "left = 5 : i64, right = 0"),
    ]:
        case = Case("window", 9, 9, **change)
        text = lowered(operator(case, "cuda"), *case.arrays(jnp.float16))
        attributes = next(line for line in text.splitlines() if f"@{TARGETS[0]}(" in line)
        left, right = expected.split(" : i64, ")
        assert f"{left} :" in attributes and f"{right} :" in attributes


def test_float32_is_multiplied_as_tf32_only_at_the_default_precision(built):
    q = jnp.ones((1, 3, 2, 8))

    def gradient(implementation):
        def f(q):
            return jaxfused.dot_product_attention(q, q, q, implementation=implementation).sum()

        return kernels(jax.grad(f), q)

    with dispatch.assume(AMPERE):
        for precision in (None, "tensorfloat32"):
            with jax.default_matmul_precision(precision):
                assert gradient("cuda") == TARGETS
        for precision in ("highest", "float32", "F32_F32_F32"):
            with jax.default_matmul_precision(precision):
                assert gradient(None) == []
                with pytest.raises(ValueError, match="it multiplies float32 as tf32"):
                    gradient("cuda")


@pytest.mark.parametrize(
    ("queries", "keys", "key_heads", "runs"),
    [((8, 1024, 16, 64), 1024, 16, True), ((16, 1, 32, 128), 4096, 8, False)],
    ids=["training", "decoding"],
)
def test_float32_takes_what_is_expected_to_be_faster(built, queries, keys, key_heads, runs):
    batch, _, _, head_size = queries
    q = jax.ShapeDtypeStruct(queries, jnp.float32)
    k = jax.ShapeDtypeStruct((batch, keys, key_heads, head_size), jnp.float32)
    with dispatch.assume(dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)):
        gradient = jax.grad(lambda *args: jaxfused.dot_product_attention(*args).sum())
        assert kernels(gradient, q, k, k) == (TARGETS if runs else [])


def test_modules_in_float32_take_the_kernel_at_the_default_precision(built):
    module = jaxfused.linen.MultiHeadAttention(num_heads=2)
    x = jnp.ones((1, 5, 32))
    params = jax.eval_shape(module.init, jax.random.key(0), x)

    def launched(device):
        with dispatch.assume(device):
            return kernels(jax.grad(lambda p, x: module.apply(p, x).sum()), params, x)

    assert launched(AMPERE) == TARGETS
    with jax.default_matmul_precision("highest"):
        assert launched(AMPERE) == []
    assert launched(CPU) == []


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def products_as_tf32(monkeypatch):
    """Makes the reference round float32 as the kernels do; XLA does not round in some products."""
    plain = attention_xla.product

    def product(subscripts, a, b, **options):
        if a.dtype == b.dtype == jnp.float32:
            return rounded_einsum(subscripts, a, b)
        return plain(subscripts, a, b, **options)

    monkeypatch.setattr(attention_xla, "product", product)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES + MORE_CASES if fits_float32(c)], ids=str)
def test_float32_is_as_accurate_as_rounded_products(products_as_tf32, case):
    has_dropout = dropout(case.sinks)
    assert_values_and_gradients(
        operator(case, "cuda", **has_dropout),
        operator(case, "xla", **has_dropout),
        *case.arrays(jnp.float32),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("seed", RANDOM_SEEDS[::2])
def test_random_cases_in_float32_are_as_accurate_as_rounded_products(products_as_tf32, seed):
    case, has_dropout = any_case(seed)
    assert_values_and_gradients(
        operator(case, "cuda", **dropout(has_dropout)),
        operator(case, "xla", **dropout(has_dropout)),
        *case.arrays(jnp.float32),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_a_number_comes_out_of_float32_where_the_reference_has_it(value):
    case = Case("numbers", 100, 90, head_size=64, is_causal=True)
    q, k, v, _, _ = case.arrays(jnp.float32)
    q, v = q.at[0, 70, 0, 3].set(value), v.at[1, 60, 1, 5].set(value)
    results = []
    for implementation in ("cuda", "xla"):
        f = operator(case, implementation)
        run = jax.jit(lambda *args, f=f: (f(*args), gradients(f, args)))
        results.append(run(q, k, v, None, None))
    ours, plain = jax.tree.map(jnp.isfinite, results)
    chex.assert_trees_all_equal(ours, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES + MORE_CASES, ids=str)
def test_is_as_accurate_as_the_reference(case, dtype):
    has_dropout = dropout(case.sinks)
    assert_values_and_gradients(
        operator(case, "cuda", **has_dropout),
        operator(case, "xla", **has_dropout),
        *case.arrays(jnp.dtype(dtype)),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("seed", RANDOM_SEEDS)
def test_random_cases_are_as_accurate_as_the_reference(seed):
    case, has_dropout = random_case(seed)
    dtype = jnp.dtype(("bfloat16", "float16")[seed % 2])
    assert_values_and_gradients(
        operator(case, "cuda", **dropout(has_dropout)),
        operator(case, "xla", **dropout(has_dropout)),
        *case.arrays(dtype),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[-1], MORE_CASES[2]], ids=str)
def test_same_bits_twice(case, dtype):
    f = operator(case, "cuda", **dropout(case.sinks))
    run = jax.jit(lambda args: (f(*args), gradients(f, args)))
    args = case.arrays(jnp.dtype(dtype))
    chex.assert_trees_all_equal(run(args), run(args))


@pytest.mark.gpu
def test_vmap_is_a_larger_batch():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 4, 2, 37, 2, 64), jnp.bfloat16)

    def f(q, k, v):
        return jaxfused.dot_product_attention(q, k, v, is_causal=True, implementation="cuda")

    together = f(*(a.reshape(8, 37, 2, 64) for a in (q, k, v))).reshape(q.shape)
    np.testing.assert_array_equal(jax.vmap(f)(q, k, v), together)


ABSENT = ((0,), "float32")
BF16 = "bfloat16"
GOOD = dict(
    q=((2, 5, 4, 64), BF16),
    k=((2, 7, 2, 64), BF16),
    v=((2, 7, 2, 32), BF16),
    bias=ABSENT,
    explicit=ABSENT,
    query_lengths=ABSENT,
    key_lengths=ABSENT,
    query_offset=ABSENT,
    query_segments=ABSENT,
    key_segments=ABSENT,
    key_bounds=ABSENT,
    dropout_seeds=ABSENT,
)
FORWARD = GOOD | dict(sinks=ABSENT)
BACKWARD = GOOD | dict(
    query_bounds=ABSENT,
    dout=((2, 5, 4, 32), BF16),
    statistics=((2, 4, 128, 2), "float32"),
    missing=((2, 4, 128), "float32"),
)
RESULTS = {
    "forward": dict(out=((2, 5, 4, 32), BF16), lse=((2, 4, 5), "float32")),
    "backward": dict(
        dq=((2, 5, 4, 64), BF16),
        dk=((2, 7, 2, 64), BF16),
        dv=((2, 7, 2, 32), BF16),
        dbias=ABSENT,
        corrected=((2, 4, 128, 2), "float32"),
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("direction", "change", "message"),
    [
        ("forward", dict(q=((2, 5, 4, 64), "int8")), "q must be float32, bfloat16 or float16"),
        ("forward", dict(q=((2, 5, 4, 136), "float32")), "a multiple of 8 up to 128"),
        ("forward", dict(q=((5, 4, 64), BF16)), r"q has shape \[5, 4, 64\], but it needs axes"),
        ("forward", dict(q=((2, 5, 4, 60), BF16)), "a multiple of 8 up to 256"),
        ("forward", dict(q=((2, 5, 3, 64), BF16)), "q has 3 heads, which is no multiple of k's 2"),
        ("forward", dict(k=((2, 7, 2, 32), BF16)), r"k has shape \[2, 7, 2, 32\], but"),
        ("forward", dict(v=((2, 8, 2, 32), BF16)), r"v has shape \[2, 8, 2, 32\], but"),
        ("forward", dict(v=((2, 7, 2, 32), "float16")), "v has another dtype"),
        ("forward", dict(bias=((2, 4, 5, 6), "float32")), "does not broadcast to the logits"),
        ("forward", dict(bias=((1, 4, 5, 7), "float16")), "bias has another dtype"),
        ("forward", dict(explicit=((1, 1, 5, 7), "float32")), "explicit_mask has another dtype"),
        ("forward", dict(key_lengths=((3,), "int32")), r"key_lengths has shape \[3\]"),
        ("forward", dict(query_offset=((2,), "float32")), "query_offset has another dtype"),
        ("forward", dict(query_segments=((2, 5), "int32")), r"key_segments has shape \[0\]"),
        ("forward", dict(dropout_seeds=((2, 2, 4), "int32")), "dropout_seeds has another dtype"),
        ("forward", dict(sinks=((3,), "float32")), r"sinks has shape \[3\]"),
        ("forward", dict(out=((2, 5, 4, 64), BF16)), r"out has shape \[2, 5, 4, 64\]"),
        ("forward", dict(lse=((2, 4, 7), "float32")), r"lse has shape \[2, 4, 7\]"),
        ("backward", dict(dout=((2, 5, 4, 64), BF16)), r"dout has shape \[2, 5, 4, 64\]"),
        ("backward", dict(statistics=((2, 4, 5, 2), "float32")), r"statistics has shape"),
        ("backward", dict(missing=((2, 4, 5), "float32")), r"missing has shape \[2, 4, 5\]"),
        ("backward", dict(corrected=((2, 4, 128), "float32")), "corrected has shape"),
        ("backward", dict(dk=((2, 7, 4, 64), BF16)), r"dk has shape \[2, 7, 4, 64\]"),
        (
            "backward",
            dict(bias=((1, 4, 1, 7), "float32"), missing=((4, 4, 128), "float32")),
            r"dbias has shape \[0\]",
        ),
    ],
)
def test_handlers_refuse_what_does_not_fit(direction, change, message):
    cuda_library.register()
    described = (FORWARD if direction == "forward" else BACKWARD) | RESULTS[direction] | change
    results = [jax.ShapeDtypeStruct(*described.pop(name)) for name in RESULTS[direction]]
    call = jax.ffi.ffi_call(f"jaxfused_attention_{direction}", results)
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(
            call(
                *(jnp.ones(shape, dtype) for shape, dtype in described.values()),
                scale=np.float32(1.0),
                soft_cap=np.float32(0.0),
                left=np.int64(-1),
                right=np.int64(-1),
                dropout_threshold=np.int64(0),
            )
        )
