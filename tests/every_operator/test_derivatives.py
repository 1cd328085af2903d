"""All public functions have derivatives of both modes, and compile nothing twice."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

import jaxfused
from tests.every_operator.test_strict_modes import FUNCTIONS
from tests.support.compilation import no_compilation
from tests.support.grids import parametrize

NAMES = [*FUNCTIONS]
DTYPES = ("bfloat16", "float32")
QUICK = [
    *(
        2 * NAMES.index(name)
        for name in ("dot_product_attention-plain", "linear", "gated_mlp-inputs")
    ),
    *(2 * NAMES.index(name) for name in ("softmax_cross_entropy", "linear_softmax_cross_entropy")),
    2 * NAMES.index("quantized_matmul-int8"),
]
each_function = parametrize(
    ("name", "dtype"), [(name, dtype) for name in NAMES for dtype in DTYPES], quick=QUICK
)


@each_function
def test_forward_mode_on_a_cpu(name, dtype):
    """Both the function and its gradient have forward-mode derivatives."""
    f, args = FUNCTIONS[name][1](jnp.dtype(dtype))

    def loss(*args):
        leaves = jax.tree.leaves(f(*args))
        return sum(jnp.sum(jnp.square(jnp.maximum(y.astype(jnp.float32), -1e3))) for y in leaves)

    def derivatives(*args):
        gradient = jax.grad(loss, argnums=tuple(range(len(args))))
        return jax.jvp(loss, args, args), jax.jvp(gradient, args, args), jax.linearize(f, *args)[0]

    (_, tangent), _, _ = jax.jit(derivatives)(*args)
    assert np.isfinite(tangent)


@each_function
def test_no_second_call_compiles_outside_of_jit(name, dtype):
    """Neither forward nor gradient is compiled anew, which would be slow and leak memory."""
    f, args = FUNCTIONS[name][1](jnp.dtype(dtype))

    def value_and_gradients():
        y, vjp = jax.vjp(f, *args)
        return f(*args), vjp(y)

    value_and_gradients()
    with no_compilation():
        value_and_gradients()


@parametrize(
    "name",
    ["adafactor", "adam", "adamw", "adamw8bit", "lamb", "lion", "muon", "sgd"],
    quick=(3, 6),
)
def test_no_second_step_compiles_outside_of_jit(name):
    def arrays(factor):
        stacked = jnp.full((2, 3, 4), factor, jnp.bfloat16)
        return {"w": jnp.full((8, 16), factor), "b": jnp.full(16, factor), "stacked": stacked}

    optimizer = getattr(jaxfused.optim, name)(0.1)
    state, stepped = optimizer.init(arrays(1.0)), optimizer.init(arrays(1.0))
    params = arrays(1.0)
    given = [(arrays(0.1), arrays(0.1)) for _ in range(3)]
    for i, (gradients, more) in enumerate(given):
        with no_compilation() if i == 2 else contextlib.nullcontext():
            _, state = optimizer.update(gradients, state, params)
            params, stepped = optimizer.step(more, stepped, params)
