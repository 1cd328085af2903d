"""Checks of `jaxfused.fuse` on a function: which sites it finds, and that the rest is unchanged."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxfused
from jaxfused.fusion import report
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put


def fusion(f, *args, without=()):
    """Returns what `fuse` finds in `f(*args)`, which is only traced."""
    with report.recorded() as reports:
        jax.eval_shape(jaxfused.fuse(f, without=without), *args)
    (found,) = reports
    return found


def counts(f, *args, without=()):
    """Returns the number of sites of each operator."""
    return fusion(f, *args, without=without).counts()


def assert_fuses(f, *args, into):
    """Asserts that `f(*args)` fuses into these operators without losing accuracy."""
    found = fusion(f, *args)
    assert found.counts() == into, str(found)
    assert_values_and_gradients(jaxfused.fuse(f), f, *args)


def assert_left_alone(f, *args, because=None):
    """Asserts that `f` keeps its bits and, if `because` is given, has a near miss with these words."""
    found = fusion(f, *args)
    assert found.counts() == {}, str(found)
    if because is not None:
        assert because in str(found), str(found)
    same = jax.jit(lambda *args: (jaxfused.fuse(f)(*args), f(*args)))(*args)
    for ours, plain in zip(*map(jax.tree.leaves, same), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(plain))


def normal(seed, *shape, dtype="float32", scale=1.0):
    """Draws a random array of numbers that bfloat16 represents."""
    rng = np.random.default_rng(seed)
    return put(scale * rng.normal(size=shape), jnp.bfloat16).astype(dtype)


def wide(x):
    """Converts an array to float32, but leaves float64, as models write `x.astype(float32)`."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
