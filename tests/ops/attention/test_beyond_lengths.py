"""What lies beyond a sequence's lengths never counts, not even NaN, forward and backward."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from pallas_kernels.attention import forward, split_keys
from pallas_kernels.attention.forward import ForwardConfig
from pallas_kernels.attention.split_keys import SplitForwardConfig
from tests.cases.attention import Case
from tests.ops.attention.test_attention_kernels import kernel
from tests.support import mosaic_interpreter
from tests.support.grids import parametrize

SMALL = dict(batch=2, key_heads=1, head_size=32)
SPLIT = Case("split", 3, 203, heads=4, key_lengths=(130, 0), **SMALL)
LONG = Case("long", 140, 203, heads=1, key_lengths=(99, 203), **SMALL)
NEW = Case("a chunk", 140, 330, 1, is_causal=True, offset=(50, -9), key_lengths=(190, 131), **SMALL)
ODD = Case("odd heads", 70, 203, heads=1, batch=1, head_size=72, key_lengths=(98,))


def arrays_beyond(case, dtype, number):
    """Returns the arrays of a case, with a number in queries, keys and values beyond the lengths."""
    query, key, value, *rest = case.arrays(jnp.dtype(dtype))
    query = beyond_queries(case, query, number)
    is_key = np.arange(case.keys) < np.array(case.key_lengths)[:, None]
    key, value = (jnp.where(is_key[..., None, None], x, number) for x in (key, value))
    return query, key, value, *rest


def beyond_queries(case, x, number):
    if case.query_lengths is None:
        return x
    is_query = np.arange(case.queries) < np.array(case.query_lengths)[:, None]
    return jnp.where(is_query[..., None, None], x, number)


def lengths(case):
    queries = None if case.query_lengths is None else np.array(case.query_lengths)
    return dict(query_seq_lengths=queries, key_value_seq_lengths=np.array(case.key_lengths))


def gradients(case, dtype, number, implementation):
    """Returns gradients and output for a loss whose cotangents beyond the lengths are that number."""

    def loss(*arrays):
        y = jaxfused.dot_product_attention(
            *arrays, **lengths(case), is_causal=case.is_causal, implementation=implementation
        )
        y = y.astype(jnp.float32)
        return jnp.sum(y * beyond_queries(case, jax.lax.stop_gradient(y), number)), y

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays_beyond(case, dtype, number)[:3])


@parametrize("dtype", ["float32", "bfloat16"], quick=(0,))
def test_in_xla_with_gradients(dtype):
    for case in (SPLIT, dataclasses.replace(SPLIT, query_lengths=(1, 3))):
        actual, wanted = (gradients(case, dtype, number, "xla") for number in (np.nan, 0))
        jax.tree.map(np.testing.assert_array_equal, actual, wanted)


@parametrize(
    ("case", "config"),
    [
        (SPLIT, SplitForwardConfig(1, stages=1)),
        (SPLIT, SplitForwardConfig(3)),
        (LONG, ForwardConfig(takes_turns=True)),
        (LONG, ForwardConfig(consumers=3, key_block=64, takes_turns=True)),
        (NEW, ForwardConfig(consumers=2, key_block=64, stages=3)),
        (NEW, ForwardConfig(consumers=3, takes_turns=True)),
        (ODD, ForwardConfig(consumers=1, key_block=112)),
    ],
    quick=(0,),
)
def test_in_the_interpreter(interpreted_hopper, monkeypatch, case, config):
    mosaic_interpreter.complete(monkeypatch)
    module = split_keys if isinstance(config, SplitForwardConfig) else forward
    f = kernel(case, multiprocessors=1, config=config, forward=module.forward)
    wanted, actual = (f(*arrays_beyond(case, "float16", x))[0] for x in (0, np.nan))
    assert np.all(np.isfinite(wanted))
    np.testing.assert_array_equal(actual, wanted)


@parametrize(
    ("keys", "query_lengths"), [(80, None), (80, (70, 9)), (300, None), (300, (65, 9))], quick=()
)
def test_gradients_in_the_interpreter(interpreted_hopper, monkeypatch, keys, query_lengths):
    """The kernels for up to 256 keys and those for more read operands without NaN."""
    mosaic_interpreter.complete(monkeypatch)
    case = Case("gradients", 70, keys, 1, 1, batch=2, head_size=64, key_lengths=(keys, 33))
    case = dataclasses.replace(case, query_lengths=query_lengths)
    actual, wanted = (gradients(case, "float16", number, "pallas") for number in (np.nan, 0))
    jax.tree.map(np.testing.assert_array_equal, actual, wanted)


@parametrize("config", [ForwardConfig(takes_turns=True), ForwardConfig(consumers=3)], quick=())
def test_without_races(race_detector, monkeypatch, config):
    mosaic_interpreter.complete(monkeypatch)
    case = Case("one CTA", 250, 200, 1, 1, batch=1, head_size=32, key_lengths=(99,))
    output, _ = kernel(case, multiprocessors=1, config=config)(
        *arrays_beyond(case, "float16", np.nan)
    )
    assert np.all(np.isfinite(output))


ON_A_GPU = (
    Case("few queries", 1, 1000, 8, 2, head_size=128, key_lengths=(130, 1000)),
    Case("chunk", 32, 1000, 8, 2, head_size=64, key_lengths=(0, 999)),
    Case("long", 700, 700, 32, head_size=128, key_lengths=(700, 129)),
    Case("long, grouped, wide", 700, 700, 32, 2, head_size=256, key_lengths=(65, 511)),
    Case("causal", 700, 700, 32, head_size=64, is_causal=True, key_lengths=(340, 700)),
    Case("parts", 300, 700, 4, head_size=128, key_lengths=(700, 129)),
    Case("odd heads", 300, 203, 4, head_size=72, key_lengths=(99, 203)),
    Case(
        "long queries", 700, 700, 32, 4, head_size=64, key_lengths=(65, 511), query_lengths=(9, 577)
    ),
    Case("short queries", 197, 197, 4, head_size=64, key_lengths=(99, 197), query_lengths=(190, 5)),
    Case("short", 197, 197, 4, head_size=64, key_lengths=(99, 197)),
    Case("short, odd heads", 70, 130, 4, head_size=40, key_lengths=(130, 3)),
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_A_GPU, ids=str)
@pytest.mark.parametrize("implementation", ["pallas", "cuda"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_on_a_gpu(case, implementation, dtype):
    if implementation == "pallas" and dtype == "float32":
        pytest.skip("Pallas kernels have operands of 16 bits")
    if dtype == "float32" and case.head_size > 128:
        pytest.skip("CUDA C kernels take float32 heads of up to 128")
    f = jax.jit(
        functools.partial(
            jaxfused.dot_product_attention,
            **lengths(case),
            is_causal=case.is_causal,
            implementation=implementation,
        )
    )
    wanted, actual = (np.asarray(f(*arrays_beyond(case, dtype, x)[:3])) for x in (0, np.nan))
    assert np.all(np.isfinite(wanted.astype(np.float32)))
    np.testing.assert_array_equal(actual, wanted)
    results = (gradients(case, dtype, number, implementation) for number in (np.nan, 0))
    jax.tree.map(np.testing.assert_array_equal, *results)
