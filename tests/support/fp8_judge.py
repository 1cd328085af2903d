"""Judges the gradients of an mlp in float8, and its kernels, on a GPU.

Two float8 results are not compared with each other: XLA may leave out a rounding to bfloat16 between two
operations, which can change a float8 by its last bit, a sixteenth of the value. Each result is compared
with float64.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxfused
from jaxfused import dispatch
from jaxfused.ops.fp8 import fp8_xla
from jaxfused.runtime.activation import activate
from pallas_kernels.gemm import fp8 as pallas_fp8
from tests.support.arrays import put

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def operands(rows, seed=0, dtype=jnp.bfloat16):
    """Returns (x, w1, b1, w2, b2, dy) of an mlp with 256, 512 and 128 features."""
    rng = np.random.default_rng(seed)
    shapes = ((rows, 256), (256, 512), (512,), (512, 128), (128,), (rows, 128))
    scales = (1.0, 1 / 16, 1.0, 1 / 16, 1.0, 1.0)
    return [
        put(scale * rng.normal(size=shape), dtype)
        for shape, scale in zip(shapes, scales, strict=True)
    ]


def mlp_and_gradients(activation, implementation, precision="fp8"):
    """Returns a function of `operands` to the result and the gradients of all before dy."""

    def run(*arrays):
        *primals, dy = arrays
        y, vjp = jax.vjp(
            lambda *a: jaxfused.mlp(
                *a,
                activation=activation,
                save="hidden",
                precision=precision,
                implementation=implementation,
            ),
            *primals,
        )
        return y, *vjp(dy)

    return run


def truth(activation, arrays):
    """Returns the result and gradients in float64, without rounding."""
    with jax.enable_x64(True):
        *primals, dy = (put(np.asarray(a, np.float64)) for a in arrays)

        def mlp(x, w1, b1, w2, b2):
            return activate(activation, x @ w1 + b1) @ w2 + b2

        y, vjp = jax.vjp(mlp, *primals)
        return [np.asarray(a) for a in (y, *vjp(dy))]


NAMES = ("y", "dx", "dw1", "db1", "dw2", "db2")


def errors(results, exact):
    """Returns the error of each result by name, relative to the truth's size."""
    return {
        name: float(np.linalg.norm(np.asarray(a, np.float64) - t) / np.linalg.norm(t))
        for name, a, t in zip(NAMES, results, exact, strict=True)
    }


def excess(ours, xla, exact):
    """Returns the errors that exceed what is allowed, ours and XLA's, by name.

    The limit is 1.1 times the reference's own error plus the rounding of the results.
    """
    ours, xla = errors(ours, exact), errors(xla, exact)
    rounding = 2.0**-8
    return {n: (ours[n], xla[n]) for n in NAMES if not ours[n] <= 1.1 * xla[n] + rounding}


def kernel_differences(rows):
    """Returns each kernel's difference from the reference for the same float8 operands, by name.

    The unit is the last place of bfloat16 at the compared value, or at a tenth of the largest if that is
    more: sums of tensor cores have fewer bits than float32.
    """
    rng = np.random.default_rng(1)

    def float8(dtype, *shape):
        return put(rng.normal(size=shape), jnp.float32).astype(dtype)

    x, w, dy, w2 = (
        float8(E4M3, rows, 256),
        float8(E4M3, 512, 256),
        float8(E5M2, rows, 128),
        float8(E4M3, 512, 128),
    )
    xt, dyt = float8(E4M3, 256, rows), float8(E5M2, 512, rows)
    bias = put(rng.normal(size=512), jnp.bfloat16)
    slope = put(rng.integers(-14, 127, (rows, 512)), jnp.int8)
    scales = (jnp.full(1, 0.03), jnp.full(1, 0.5))
    unit = (*scales, jnp.full(1, 1 / 112))
    options = pallas_fp8.LayerOptions(None, None, jnp.bfloat16, True, "value")
    multiprocessors = dispatch.current_device().multiprocessors

    def pair(product, candidates):
        """Returns the results of the kernel and of XLA."""
        config = candidates(product.work, multiprocessors)[0]
        return product.run(multiprocessors=multiprocessors, config=config), fp8_xla.run(product)

    layer = x, w, scales, bias, None, options
    by_slope = dict(dtype=jnp.bfloat16, maximise=True)
    pairs = {
        "z": pair(pallas_fp8.layer(*layer), pallas_fp8.candidates),
        "dz": pair(
            pallas_fp8.hidden_gradient_by_slope(dy, w2, unit, slope, **by_slope),
            pallas_fp8.candidates,
        ),
        "dw": pair(
            pallas_fp8.weight_gradient(xt, dyt, scales, out_dtype=jnp.bfloat16),
            pallas_fp8.promoted_candidates,
        ),
    }
    found = {}
    for name, (ours, expected) in pairs.items():
        maxima = ours.get(f"max_{name}")
        a, b = (np.asarray(results[name], np.float64) for results in (ours, expected))
        size = np.maximum(np.abs(b), 0.1 * np.abs(b).max())
        found[name] = float((np.abs(a - b) / size).max() * 2**7)
        if maxima is not None:
            rows_of = a if name == "z" else np.abs(a)
            same = np.array_equal(np.asarray(maxima).max(axis=0), rows_of.max(axis=1))
            found[f"maxima of {name}"] = 0.0 if same else np.inf
    return found
