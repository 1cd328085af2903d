"""The largest error that a result may have: one rule for every operator, dtype and implementation.

An implementation is compared with a float64 truth. The cost of low precision is measured, not guessed:
the plain jax.numpy version of the same formula is computed in the same low precision, and its largest
error over the array is the reference.
"""

import jax
import jax.numpy as jnp
import numpy as np

FACTOR = 2.0
"""Largest allowed multiple of the plain version's largest error."""
ULPS = 1.0
"""Additional allowed units in the last place of the output's dtype, at the truth's largest magnitude."""


def ulp(magnitude: float, dtype: jnp.dtype) -> float:
    """Returns the distance between neighbouring numbers of `dtype` at `magnitude`."""
    info = jnp.finfo(dtype)
    exponent = np.floor(np.log2(max(magnitude, float(info.smallest_normal))))
    return float(2.0 ** (exponent - info.nmant))


_NEAR_OVERFLOW = 0.01


def assert_accurate(name: str, actual: jax.Array, plain: jax.Array, truth: np.ndarray) -> None:
    """Asserts that `actual` is as near to `truth` as the rule requires, and NaN or Inf where `truth` is.

    The truth also counts as infinite if it exceeds the dtype's largest number.

    Args:
      name: what is compared, for the message.
      actual: the implementation's result, in its own dtype.
      plain: the same computed by plain jax.numpy in low precision.
      truth: the same in float64.
    """
    assert truth.dtype == np.float64, f"{name}: the truth is {truth.dtype}, not float64"
    assert actual.shape == plain.shape == truth.shape, (
        f"{name}: shapes {actual.shape}, {plain.shape}, {truth.shape}"
    )
    assert actual.dtype == plain.dtype, f"{name}: dtypes {actual.dtype}, {plain.dtype}"
    if truth.size == 0:
        return
    ours = np.asarray(actual, np.float64)
    naive = np.asarray(plain, np.float64)
    largest = float(jnp.finfo(actual.dtype).max)
    # Values that an allowed error may move across the overflow limit are not compared.
    near = np.isclose(np.abs(truth), largest, rtol=_NEAR_OVERFLOW)
    ours, naive, truth = (np.where(near, 0.0, a) for a in (ours, naive, truth))
    truth = np.where(np.abs(truth) > largest, np.copysign(np.inf, truth), truth)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(truth), f"{name}: NaN")
    for sign in (np.inf, -np.inf):
        np.testing.assert_array_equal(ours == sign, truth == sign, f"{name}: {sign}")
    finite = np.isfinite(truth)
    if not finite.any():
        return
    error = np.abs(ours - truth)[finite].max()
    # If low precision fails altogether (0 / 0 of an epsilon that float16 rounds to 0), the plain result
    # is no reference, and only one unit is allowed.
    plain_error = np.abs(naive - truth)[finite & np.isfinite(naive)].max(initial=0.0)
    unit = ulp(np.abs(truth[finite]).max(), actual.dtype)
    allowed = FACTOR * plain_error + ULPS * unit
    assert error <= allowed, (
        f"{name} ({actual.dtype}): error {error:.3e} is over {allowed:.3e}"
        f" = {FACTOR} x {plain_error:.3e} of plain jax.numpy + {ULPS} ulp of {unit:.3e}"
    )
