"""max_pool: validation, choice of implementation, gradient."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.pool import max_pool_cuda, max_pool_xla
from jaxfused.ops.pool.max_pool_cuda import Window
from jaxfused.ops.pool.pool_window import windows
from jaxfused.runtime import resharding, sharding
from jaxfused.runtime.checks import check_floating, check_images, python_numbers
from jaxfused.runtime.estimate import KERNELS, Estimate, Rule, kernels_first
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.runner import Axes, Results, Runner
from jaxfused.runtime.vmap import merged_batch, merged_images, unmerged_images

NO_PALLAS = "there is no Pallas kernel of max_pool"


@python_numbers
def max_pool(
    x: jax.Array,
    window: int | Sequence[int],
    *,
    strides: int | Sequence[int] | None = None,
    padding: str | int | Sequence[int | tuple[int, int]] = "VALID",
    ceil_mode: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""The largest value of each window, channel by channel.

    .. math:: y_{b, i, c} = \max_{j} x_{b, \text{strides} \cdot i + j - \text{low}, c}

    where j runs over the window. The gradient of y goes to the first of equal values, and is summed in a
    fixed order. Padding is never the largest value, and a NaN is larger than every number.

    Args:
      x: [B, *spatial, C] with one spatial axis or more, float32, bfloat16 or float16 (float64 with
        implementation "xla").
      window: its size, one int for all spatial axes or one for each; so are the strides.
      strides: steps between windows; None for 1, as in Flax.
      padding: "SAME", "VALID", an int for all sides, or for each spatial axis an int or a pair (low,
        high).
      ceil_mode: whether the last window may end beyond the padded edge, as in PyTorch; it begins in x or
        in the padding before it.
      implementation: None for the fastest that can run, or "cuda", "xla".

    Returns:
      y, [B, *spatial', C] of x's dtype.

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
      >>> jaxfused.max_pool(x, 2, strides=2)[0, ..., 0]
      Array([[ 5.,  7.],
             [13., 15.]], dtype=float32)

    Where a kernel runs, forward-mode differentiation and gradients of gradients need
    `implementation="xla"`.

    Source: the arguments are those of `flax.linen.max_pool`.
    """
    op = "max_pool"
    x = jnp.asarray(x)
    check_floating(op, dict(x=x))
    check_images(op, x)
    spatial = x.ndim - 2
    sizes, steps, pairs, _ = windows(op, x, window, strides, padding, ceil_mode)
    device = dispatch.current_device(x)
    missing = {"pallas": NO_PALLAS}
    if spatial > 2:
        missing["cuda"] = f"x has {spatial} spatial axes, and the kernels take 1 or 2"
    elif why_window := max_pool_cuda.why_window_unfit(sizes):
        missing["cuda"] = why_window
    if takes_reference(op, implementation, device, x, missing=missing):
        x = resharding.whole_images(x)
        return max_pool_xla.pool(x, window=sizes, strides=steps, padding=pairs)
    images = x if spatial == 2 else x[:, None]
    if spatial == 1:
        sizes, steps, pairs = (1, *sizes), (1, *steps), ((0, 0), *pairs)
    full = Window((sizes[0], sizes[1]), (steps[0], steps[1]), (pairs[0], pairs[1]))
    aligned = sharding.align((images,), operand_axes=(_IMAGES,), whole=_WHOLE)
    y = _pool(Runner(implementation, device), full, *aligned)
    return y if spatial == 2 else y[:, 0]


# --- gradient -------------------------------------------------------------------------------------


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="max_pool")
def _pool(run: Runner, window: Window, x):
    return run(_Forward(window, save_places=False), x)[0]


def _pool_fwd(run: Runner, window: Window, x):
    y, places = run(_Forward(window, save_places=True), x)
    # The gradient needs only x's height and width, which this empty array has.
    return y, (places, jnp.zeros_like(x, shape=(x.shape[1], x.shape[2], 0)))


def _pool_bwd(run: Runner, window: Window, saved, dy):
    places, like = saved
    return run(_Backward(window, (like.shape[0], like.shape[1])), dy, places)


_pool.defvjp(_pool_fwd, _pool_bwd)


# --- kernels --------------------------------------------------------------------------------------

_IMAGES, _RESULT = "bhwc", "buvc"
_WHOLE = "hwuv"


_FROM_PLACES = "a kernel finds the maxima and their places, which the gradient reads, in one pass"


@dataclass(frozen=True)
class _Forward:
    """Computes y from x [B, H, W, C], and `places`, the index of each maximum in its window, or None."""

    window: Window
    save_places: bool

    @property
    def name(self) -> str:
        return "max_pool forward"

    def axes(self, x) -> Axes:
        return Axes((_IMAGES,), (_RESULT, _RESULT if self.save_places else None), whole=_WHOLE)

    def why_not(self, device, x) -> Mapping[str, str | None]:
        return _why_not(device, self.window, x.shape, x.dtype)

    def estimate(self, device, able, x) -> Estimate:
        if self.save_places:
            return Rule(KERNELS, _FROM_PLACES)
        return Rule(("xla",), "XLA fuses a maximum that saves nothing else with what is around it")

    def run(self, implementation, device, x) -> Results:
        if implementation == "cuda":
            return max_pool_cuda.forward(x, window=self.window, save_places=self.save_places)
        options = _options(self.window)
        if self.save_places:
            return max_pool_xla.pool_and_places(x, **options)
        return max_pool_xla.pool(x, **options), None

    def batched(self, call, axis_size, in_batched, x) -> Results:
        return unmerged_images(axis_size, call(self, merged_batch(x)))


@dataclass(frozen=True)
class _Backward:
    """Computes dx [B, H, W, C] from dy and `places`, the index of each maximum in its window."""

    window: Window
    size: tuple[int, int]

    @property
    def name(self) -> str:
        return "max_pool backward"

    def axes(self, dy, places) -> Axes:
        return Axes((_RESULT, _RESULT), (_IMAGES,), whole=_WHOLE)

    def why_not(self, device, dy, places) -> Mapping[str, str | None]:
        shape = (dy.shape[0], *self.size, dy.shape[3])
        return _why_not(device, self.window, shape, dy.dtype)

    estimate = kernels_first(_FROM_PLACES)

    def run(self, implementation, device, dy, places) -> Results:
        if implementation == "cuda":
            dx = max_pool_cuda.backward(dy, places, size=self.size, window=self.window)
        else:
            options = _options(self.window)
            dx = max_pool_xla.gradient(dy, places, size=self.size, **options)
        return (dx,)

    def batched(self, call, axis_size, in_batched, dy, places) -> Results:
        images = merged_images(axis_size, in_batched, (dy, places))
        return unmerged_images(axis_size, call(self, *images))


def _options(window: Window) -> dict[str, tuple]:
    return dict(window=window.size, strides=window.strides, padding=window.padding)


def _why_not(device, window, shape, dtype) -> dict[str, str | None]:
    reason = max_pool_cuda.why_unsupported(
        compute_capability=device.compute_capability, shape=shape, window=window, dtype=dtype
    )
    return {"cuda": reason, "pallas": NO_PALLAS, "xla": None}
