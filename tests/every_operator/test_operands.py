"""Operands of every public operator that are not JAX arrays: NumPy arrays and libraries' variables."""

import contextlib

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from benchmarks.without_gpu.target import H200
from jaxfused import QuantizedArray, dispatch
from jaxfused.runtime.rectified import Rectified
from tests.every_operator.test_strict_modes import FUNCTIONS
from tests.support.calls import calls


class Variable:
    """An object with `__jax_array__`, a shape, and a dtype given by name, like a variable of Keras."""

    def __init__(self, value):
        self.value = value
        self.shape, self.dtype, self.ndim = value.shape, str(value.dtype), value.ndim

    def __jax_array__(self):
        return self.value


KINDS = (flax.nnx.Param, Variable, np.asarray)
# `fuse` takes a program, and its operations accept what JAX's own accept.
OPERATORS = {name: case for name, (of, case) in FUNCTIONS.items() if of != "fuse"}


@pytest.mark.parametrize("name", OPERATORS)
def test_operands_that_are_no_arrays(name):
    for place, dtype, first in (
        (contextlib.nullcontext(), "float32", 0),
        (dispatch.assume(H200), "bfloat16", 1),
    ):
        f, args = OPERATORS[name](dtype)
        with place:
            expected = jax.eval_shape(f, *args)
            for start in (first, first + 1):
                others = [KINDS[(start + i) % len(KINDS)](a) for i, a in enumerate(args)]
                actual = jax.eval_shape(lambda f=f, others=others: f(*others))
                assert jax.tree.leaves(actual) == jax.tree.leaves(expected), others


def test_the_cases_are_of_all_operators():
    of_cases = {of for of, _ in FUNCTIONS.values()}
    with_operands = {
        name
        for name in dir(jaxfused)
        if name.islower()
        and not name.startswith("_")
        and getattr(getattr(jaxfused, name), "__module__", "").startswith("jaxfused.ops")
    }
    assert with_operands - of_cases == {"rope_from_config", "zigzag_order"}  # They take no array.


def test_parts_of_wrappers():
    x = np.ones((1, 4, 4, 8), np.float32)
    w = flax.nnx.Param(jnp.ones((3, 3, 16, 8)))
    parts = jaxfused.Concatenated(flax.nnx.Param(jnp.asarray(x)), Variable(jnp.asarray(x)))
    rectified = Rectified(Variable(jnp.concatenate([x, x], axis=-1)))
    one, other = (
        jax.jit(lambda given=given: jaxfused.conv(given, w))() for given in (parts, rectified)
    )
    np.testing.assert_array_equal(one, other)
    q = QuantizedArray(Variable(jnp.ones((8, 4), jnp.int8)), np.ones((1, 4), np.float32), None, -2)
    assert jax.eval_shape(
        lambda: jaxfused.quantized_matmul(Variable(jnp.ones((2, 8))), q)
    ).shape == (2, 4)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", ["linear", "ragged_dot", "rope", "max_pool", "group_norm"])
def test_floats_of_8_bits_are_refused_by_a_sentence(name, number):
    call = calls(rows=4, images=2)[name]
    narrow = [
        jax.ShapeDtypeStruct(o.shape, jnp.float8_e4m3fn if i == number else o.dtype)
        for i, o in enumerate(call.operands)
    ]
    if name in ("linear", "group_norm") and number == 1:  # Parameters are converted to x's dtype.
        jax.eval_shape(call.f, *narrow)
    elif number < len(narrow):
        with pytest.raises(ValueError, match=r"float8_e4m3fn.*, but .*; pass .*astype"):
            jax.eval_shape(call.f, *narrow)


NO_NUMBERS = (b"x", {}, object(), np.array(["a"]), [[1], [2, 3]], jnp.float32, abs)


@pytest.mark.parametrize("wrong", (*NO_NUMBERS, jax.ShapeDtypeStruct((2, 2), jnp.float32)))
def test_what_holds_no_numbers_is_no_operand(wrong):
    with pytest.raises(ValueError, match=r"layer_norm: x is .*; pass one"):
        jaxfused.layer_norm(wrong)
    x, w = jnp.ones((4, 2)), jnp.ones((1, 2, 2))
    with pytest.raises(
        ValueError, match=r"batched_lora: scale is .* a number or an array of.*; pass"
    ):
        jaxfused.batched_lora(x, w, w, jnp.zeros(4, jnp.int32), scale=wrong)
    with pytest.raises(ValueError, match=r"paged_attention: k_pages is .*; pass one"):
        jaxfused.paged_attention(x[None], wrong, w, [1], [[0]])
    with pytest.raises(ValueError, match=r"KVCache: counts is .*; pass one"):
        cache = jaxfused.KVCache.zeros(batch=1, length=1, key_heads=1, head_size=2)
        cache.advance(wrong)


def test_options_of_other_kinds_are_refused_by_name():
    x, pages = jnp.ones((4, 2)), jnp.ones((1, 8, 2, 2))
    with pytest.raises(ValueError, match="layer_norm: quantize_rows is True, which is no dtype"):
        jaxfused.layer_norm(x, quantize_rows=True)
    with pytest.raises(ValueError, match=r"quantize: group_size is \(\), but"):
        jaxfused.quantize(x, group_size=())
    with pytest.raises(ValueError, match="rope: positions have dtype complex64"):
        jaxfused.rope(x[None, None], offset=1j)
    with pytest.raises(ValueError, match=r"append_to_pages: num_seqs has .* shape .2,"):
        jaxfused.append_to_pages(pages, x[:, None], x[:, None], [1], [[0]], [0, 1], [1, 2])
