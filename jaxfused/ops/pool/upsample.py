"""upsample: validation, choice of implementation, gradient."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.pool import resize_xla, upsample_cuda, upsample_xla
from jaxfused.runtime import resharding, sharding
from jaxfused.runtime.checks import check_floating, check_images, for_each_axis, python_numbers
from jaxfused.runtime.estimate import kernels_first
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.runner import Axes, Results, Runner
from jaxfused.runtime.vmap import merged_batch, unmerged_images

NO_PALLAS = "there is no Pallas kernel of upsample"


@python_numbers
def upsample(
    x: jax.Array,
    factor: int | Sequence[int] = 2,
    *,
    method: str = "bilinear",
    size: int | Sequence[int] | None = None,
    align_corners: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Images enlarged by whole factors, as `jax.image.resize` enlarges them.

    Bilinear by 2, along each axis, with x continued beyond its ends by its first and last value:

    .. math:: y_{2i} = \tfrac14 x_{i-1} + \tfrac34 x_i, \qquad
              y_{2i+1} = \tfrac34 x_i + \tfrac14 x_{i+1}

    Args:
      x: [B, *spatial, C] with one spatial axis or more, float32, bfloat16 or float16 (float64 with
        implementation "xla").
      factor: one int for all spatial axes, or one for each.
      method: "bilinear" (over any number of axes) or "nearest"; `jaxfused.resize` has more.
      size: of the result, in place of a factor: one int for all spatial axes, or one for each.
      align_corners: whether the first and the last bilinear result equal the first and the last value;
        otherwise values are at the centres of equal parts.
      implementation: None for the fastest that can run, or "cuda" (bilinear by 2 over two axes), "xla".

    Returns:
      y, [B, *spatial * factor, C] of x's dtype; sums are float32 (float64 for float64 inputs).

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jnp.array([[0.0, 4.0]]).reshape(1, 1, 2, 1)
      >>> jaxfused.upsample(x)[0, 0, :, 0]
      Array([0., 1., 3., 4.], dtype=float32)

    Where a kernel runs, forward-mode differentiation and gradients of gradients need
    `implementation="xla"`.

    Source: `jax.image.resize`.
    """
    op = "upsample"
    x = jnp.asarray(x)
    check_floating(op, dict(x=x))
    check_images(op, x)
    spatial = x.ndim - 2
    factors = tuple(factor) if isinstance(factor, Sequence) else (factor,) * spatial
    if len(factors) != spatial or any(not isinstance(f, int) or f < 1 for f in factors):
        raise ValueError(
            f"{op}: factor is {factor!r}, but x has {spatial} spatial axes;"
            f" pass one positive int, or {spatial} of them."
        )
    if method not in ("bilinear", "nearest"):
        raise ValueError(f"{op}: method={method!r} is not known; pass 'bilinear' or 'nearest'.")
    if align_corners and method == "nearest":
        raise ValueError(
            f"{op}: align_corners=True goes with method 'bilinear', but method is {method!r}; leave one"
            " out."
        )
    device = dispatch.current_device(x)
    missing = {"pallas": NO_PALLAS}
    if size is not None or align_corners:
        missing["cuda"] = (
            f"it upsamples by a factor between centres, and size is {size!r}, align_corners"
            f" {align_corners}"
        )
        takes_reference(op, implementation, device, x, missing=missing)
        sizes = tuple(n * f for n, f in zip(x.shape[1:-1], factors, strict=True))
        if size is not None:
            sizes = for_each_axis(op, "size", size, spatial)
        return resize_xla.resize_to(x, sizes, method=method, align_corners=align_corners)
    if (method, factors) != ("bilinear", (2, 2)):
        missing["cuda"] = (
            f"it upsamples bilinearly by (2, 2), and method is {method!r}, factor {factors}"
        )
    if takes_reference(op, implementation, device, x, missing=missing):
        return upsample_xla.upsample(resharding.whole_images(x), factors=factors, method=method)
    aligned = sharding.align((x,), operand_axes=(_SMALL,), whole=_WHOLE)
    return _upsample(Runner(implementation, device), *aligned)


@functools.partial(kernel_gradient, nondiff_argnums=(0,), op="upsample")
def _upsample(run: Runner, x):
    return run(_Stage(backward=False), x)[0]


def _upsample_fwd(run: Runner, x):
    return _upsample(run, x), None


def _upsample_bwd(run: Runner, saved, dy):
    del saved
    return run(_Stage(backward=True), dy)


_upsample.defvjp(_upsample_fwd, _upsample_bwd)


_SMALL, _LARGE = "bhwc", "buvc"
_WHOLE = "hwuv"


@dataclass(frozen=True)
class _Stage:
    """Computes y [B, 2 H, 2 W, C] from x [B, H, W, C]; backward, dx from dy."""

    backward: bool

    @property
    def name(self) -> str:
        return f"upsample {'backward' if self.backward else 'forward'}"

    def axes(self, x) -> Axes:
        letters = (_LARGE, _SMALL) if self.backward else (_SMALL, _LARGE)
        return Axes(letters[:1], letters[1:], whole=_WHOLE)

    def why_not(self, device, x) -> Mapping[str, str | None]:
        reason = upsample_cuda.why_unsupported(
            compute_capability=device.compute_capability, shape=self._small(x), dtype=x.dtype
        )
        return {"cuda": reason, "pallas": NO_PALLAS, "xla": None}

    estimate = kernels_first("a kernel reads each pixel once, and XLA's resize is several kernels")

    def run(self, implementation, device, x) -> Results:
        if implementation == "cuda":
            f = upsample_cuda.gradient if self.backward else upsample_cuda.upsample
            return (f(x),)
        enlarge = functools.partial(upsample_xla.upsample, factors=(2, 2), method="bilinear")
        if not self.backward:
            return (enlarge(x),)
        wide = x.astype(accumulator_dtype(x.dtype))
        (dx,) = jax.vjp(enlarge, jnp.zeros_like(wide, shape=self._small(x)))[1](wide)
        return (dx.astype(x.dtype),)

    def batched(self, call, axis_size, in_batched, x) -> Results:
        return unmerged_images(axis_size, call(self, merged_batch(x)))

    def _small(self, x) -> tuple[int, int, int, int]:
        images, height, width, channels = x.shape
        if self.backward:
            height, width = height // 2, width // 2
        return images, height, width, channels
