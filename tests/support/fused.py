"""What tests of `jaxfused.fuse` ask of a function: what is found in it, and that the rest stays."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxfused
from jaxfused.fuse import report
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put


def fusion(f, *args, without=()):
    """What `fuse` finds in `f(*args)`, which is traced only."""
    with report.recorded() as reports:
        jax.eval_shape(jaxfused.fuse(f, without=without), *args)
    (found,) = reports
    return found


def counts(f, *args, without=()):
    """How many sites there are of each operator."""
    return fusion(f, *args, without=without).counts()


def assert_fuses(f, *args, into):
    """Of `f` and the float arrays `args` these operators are made, which lose no accuracy."""
    found = fusion(f, *args)
    assert found.counts() == into, str(found)
    assert_values_and_gradients(jaxfused.fuse(f), f, *args)


def assert_left_alone(f, *args, because=None):
    """Nothing is replaced in `f`: the same bits, and a near miss with these words where there is one."""
    found = fusion(f, *args)
    assert found.counts() == {}, str(found)
    if because is not None:
        assert because in str(found), str(found)
    same = jax.jit(lambda *args: (jaxfused.fuse(f)(*args), f(*args)))(*args)
    for ours, plain in zip(*map(jax.tree.leaves, same), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(plain))


def normal(seed, *shape, dtype="float32", scale=1.0):
    """A random array, of numbers that bfloat16 has."""
    rng = np.random.default_rng(seed)
    return put(scale * rng.normal(size=shape), jnp.bfloat16).astype(dtype)


def wide(x):
    """The array in float32, or in float64 where it is, as models write `x.astype(float32)`."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
