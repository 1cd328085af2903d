"""The gated unit that `fuse` calls, by each implementation."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxfused import dispatch
from jaxfused.ops.linear.gated_unit import gate, gated_unit
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.fused import normal
from tests.support.grids import parametrize
from tests.support.lowering import kernels


def plain(x, w_gate, w_up, b_gate, b_up):
    gate, up = (
        x @ w.astype(x.dtype) + b.astype(x.dtype) for w, b in ((w_gate, b_gate), (w_up, b_up))
    )
    return jax.nn.sigmoid(gate) * up


def run(x, w_gate, w_up, b_gate, b_up, *, packs=False, implementation=None):
    if packs:
        w_gate, w_up = jnp.concatenate([w_gate, w_up], axis=1), None
        b_gate, b_up = jnp.concatenate([b_gate, b_up]), None
    return gated_unit(x, w_gate, w_up, b_gate=b_gate, b_up=b_up, implementation=implementation)


def arguments(dtype, rows=(3, 50), features=64, hidden=96):
    weights = (normal(i, features, hidden, scale=0.2) for i in (1, 2))
    return normal(0, *rows, features, dtype=dtype), *weights, normal(3, hidden), normal(4, hidden)


@parametrize("packs", [False, True], quick=(0,))
@parametrize("dtype", ["bfloat16", "float32"], quick=(0,))
def test_is_as_accurate_as_the_program(dtype, packs):
    assert_values_and_gradients(functools.partial(run, packs=packs), plain, *arguments(dtype))


def test_gradients_take_one_kernel_for_both_products():
    def gradients(dh, *args):
        f = functools.partial(run, implementation="pallas")
        return jax.vjp(f, *args)[1](dh)

    args = arguments("bfloat16")
    with dispatch.assume(dispatch.Device("gpu", "NVIDIA H200", (9, 0), multiprocessors=132)):
        found = kernels(gradients, jnp.zeros((3, 50, 96), jnp.bfloat16), *args)
    assert found[0] == "gated_unit" and "gated_input_gradient" in found


def plain_gate(x, w, bias, y):
    return jax.nn.sigmoid(x @ w.astype(x.dtype) + bias.astype(x.dtype)) * y


def gate_arguments(dtype, rows=(3, 50), features=64, hidden=96):
    x, w, _, bias, _ = arguments(dtype, rows, features, hidden)
    return x, w, bias, normal(5, *rows, hidden, dtype=dtype)


@parametrize("dtype", ["bfloat16", "float32"], quick=(0,))
def test_gate_is_as_accurate_as_the_program(dtype):
    assert_values_and_gradients(gate, plain_gate, *gate_arguments(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [None, "pallas", "cuda", "xla"])
def test_gate_on_a_gpu_is_as_accurate_as_the_program(implementation):
    f = functools.partial(gate, implementation=implementation)
    assert_values_and_gradients(f, plain_gate, *gate_arguments("bfloat16", (64, 512), 128, 128))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["pallas", "cuda", "xla"])
@pytest.mark.parametrize("packs", [False, True])
def test_kernels_are_as_accurate_as_the_program(packs, implementation):
    f = functools.partial(run, packs=packs, implementation=implementation)
    assert_values_and_gradients(f, plain, *arguments("bfloat16", (4, 300), 128, 128))
