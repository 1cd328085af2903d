"""Compares a model of another library with itself under `jaxfused.fuse`."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxfused
from jaxfused.fusion import report
from tests.support.tolerances import FACTOR, ulp


def assert_adopts(model, params, *args, into, into_float32=None):
    """Asserts that `fuse` finds these operators in `model(dtype)`, a function of params and `args`.

    `into_float32` are the model's operators in float32, if they differ. In float32, results and
    gradients equal the model's own up to rounding. In bfloat16 their errors against float32 are at most
    twice the model's own.
    """
    wide, narrow = model(jnp.float32), model(jnp.bfloat16)
    for f, operators in ((wide, into if into_float32 is None else into_float32), (narrow, into)):
        with report.recorded() as reports:
            jax.eval_shape(jaxfused.fuse(f), params, *args)
        assert reports[0].counts() == operators, str(reports[0])
    truth = results(wide, params, *args)
    assert_near(results(jaxfused.fuse(wide), params, *args), truth, truth, 2e-5)
    plain = results(narrow, params, *args)
    assert_near(results(jaxfused.fuse(narrow), params, *args), plain, truth, 0.0)


DIRECTIONS = 4
"""Directions of gradients. A 16-bit error in one gradient is luck; the largest of a few is a
yardstick."""


def results(f, params, *args):
    """Returns the model's result and its gradients along random directions."""
    y = f(params, *args)

    @jax.jit
    def gradient(params, direction):
        return jax.grad(lambda p: jnp.sum(f(p, *args).astype(jnp.float32) * direction))(params)

    keys = jax.random.split(jax.random.key(1), DIRECTIONS)
    along = [gradient(params, jax.random.normal(key, y.shape)) for key in keys]
    return {"y": y, "gradients": jax.tree.map(lambda *a: jnp.stack(a), *along)}


def assert_near(ours, plain, truth, tolerance):
    """Asserts that errors are at most twice the model's own, relative to the largest gradient."""
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(truth["gradients"]))
    for (path, a), b, t in zip(
        jax.tree.leaves_with_path(ours), jax.tree.leaves(plain), jax.tree.leaves(truth), strict=True
    ):
        assert a.dtype == b.dtype, jax.tree_util.keystr(path)
        a, b, t = (np.asarray(array, np.float64) for array in (a, b, t))
        # A gradient that cancels to rounding errors is compared with the size of its terms.
        scale = max(np.abs(t).max(), 1e-2 * largest)
        unit = ulp(scale, jnp.dtype(jnp.bfloat16)) if tolerance == 0.0 else 0.0
        allowed = FACTOR * np.abs(b - t).max() + tolerance * scale + unit
        error = np.abs(a - t).max()
        assert error <= allowed, f"{jax.tree_util.keystr(path)}: error {error}, allowed {allowed}"
