"""Keys and values beyond a sequence's length never count, not even NaN, forward and backward."""

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
    """Returns the arrays of a case, with a number in keys and values beyond the lengths."""
    query, key, value, *rest = case.arrays(jnp.dtype(dtype))
    is_key = np.arange(case.keys) < np.array(case.key_lengths)[:, None]
    key, value = (jnp.where(is_key[..., None, None], x, number) for x in (key, value))
    return query, key, value, *rest


@parametrize("dtype", ["float32", "bfloat16"], quick=(0,))
def test_in_xla_with_gradients(dtype):
    def f(*arrays):
        options = dict(key_value_seq_lengths=np.array(SPLIT.key_lengths))
        return jaxfused.dot_product_attention(*arrays, implementation="xla", **options)

    def run(number):
        arrays = arrays_beyond(SPLIT, dtype, number)[:3]
        return jax.value_and_grad(lambda *a: jnp.sum(f(*a) ** 2), (0, 1, 2))(*arrays)

    jax.tree.map(np.testing.assert_array_equal, run(np.nan), run(0))


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


@parametrize("keys", [80, 300], quick=())
def test_gradients_in_the_interpreter(interpreted_hopper, monkeypatch, keys):
    """The kernels for up to 256 keys and those for more read keys and values without NaN."""
    mosaic_interpreter.complete(monkeypatch)
    case = Case("gradients", 70, keys, 1, 1, batch=2, head_size=64, key_lengths=(keys, 33))

    def loss(*arrays):
        options = dict(key_value_seq_lengths=np.array(case.key_lengths), implementation="pallas")
        return jnp.sum(jaxfused.dot_product_attention(*arrays, **options).astype(jnp.float32) ** 2)

    def run(number):
        return jax.grad(loss, (0, 1, 2))(*arrays_beyond(case, "float16", number)[:3])

    jax.tree.map(np.testing.assert_array_equal, run(np.nan), run(0))


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
            key_value_seq_lengths=np.array(case.key_lengths),
            is_causal=case.is_causal,
            implementation=implementation,
        )
    )
    wanted, actual = (np.asarray(f(*arrays_beyond(case, dtype, x)[:3])) for x in (0, np.nan))
    assert np.all(np.isfinite(wanted.astype(np.float32)))
    np.testing.assert_array_equal(actual, wanted)
    loss = jax.jit(jax.grad(lambda *a: jnp.sum(f(*a).astype(jnp.float32) ** 2), (0, 1, 2)))
    gradients = (loss(*arrays_beyond(case, dtype, x)[:3]) for x in (0, np.nan))
    jax.tree.map(np.testing.assert_array_equal, *gradients)
