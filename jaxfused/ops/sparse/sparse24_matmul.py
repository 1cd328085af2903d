"""sparse24_matmul: validation, choice of implementation, gradients."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.sparse import sparse24_cuda
from jaxfused.ops.sparse.coordinates import check_dense
from jaxfused.ops.sparse.sparse24 import Sparse24, taken, unpruned_gradient
from jaxfused.runtime import resharding, sharding
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.checks import as_arrays, check_floating, python_numbers
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.product_xla import product, weight_product
from jaxfused.runtime.promotion import common_dtype
from jaxfused.runtime.roofline import UNMODELLED, is_modelled
from jaxfused.runtime.runner import ROWS, Axes, Results, Runner, batched_rows


@python_numbers
def sparse24_matmul(
    x: jax.Array,
    weight: Sparse24 | jax.Array,
    *,
    straight_through: bool = False,
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Product with a matrix that keeps two of each four numbers along its first axis.

    .. math:: y = x W

    Hopper's sparse tensor cores multiply the kept numbers in half the instructions of a dense product.
    The gradient of x is the dense product dy W^T, because W^T is not 2:4 sparse along its summed axis F.
    That of the weight is the dense product x^T dy, from which a `Sparse24` takes the numbers it keeps.

    Args:
      x: [..., D], float32, bfloat16 or float16. The kernel multiplies bfloat16.
      weight: a `Sparse24` of shape (D, F), or a dense [D, F], which is pruned and packed in every call,
        as training needs it.
      straight_through: for a dense weight, whether all its numbers have a gradient, or only those that
        are kept.
      precision: of XLA's products, as in `jax.lax.dot`.
      implementation: None for the fastest that can run, or "cuda", "xla".

    Returns:
      y, [..., F], of the operands' common dtype.

    Raises:
      ValueError: shapes or dtypes do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> dense = jnp.tile(jnp.array([[1.0], [-4.0], [3.0], [-200.0]]), (16, 8))
      >>> weight = jaxfused.Sparse24.from_dense(dense)
      >>> jaxfused.sparse24_matmul(jnp.ones((2, 64)), weight)[0, 0]
      Array(-3264., dtype=float32)

    On a GPU forward-mode differentiation and gradients of gradients need `implementation="xla"`.

    Source: Mishra et al., "Accelerating Sparse Deep Neural Networks", 2021,
    https://arxiv.org/abs/2104.08378
    """
    op = "sparse24_matmul"
    check_dense(op, "x", x)
    [x] = as_arrays(x)
    is_packed = isinstance(weight, Sparse24)
    if not is_packed:
        [weight] = as_arrays(weight)
    values: Any = weight.values if isinstance(weight, Sparse24) else weight
    check_floating(op, dict(x=x, weight=values))
    if values.ndim != 2:
        raise ValueError(
            f"{op}: weight has shape {weight.shape}; pass one matrix, and use jax.vmap for several."
        )
    depth, features = weight.shape
    if depth % 4 or x.ndim == 0 or x.shape[-1] != depth:
        raise ValueError(
            f"{op}: x has shape {x.shape} and weight {weight.shape}; pass x of shape (..., D) and a"
            " weight of shape (D, F), D a multiple of 4."
        )
    if straight_through and is_packed:
        raise ValueError(
            f"{op}: straight_through is True, but a Sparse24 has only the numbers that are kept;"
            " pass the dense weight."
        )
    dtype = common_dtype(x.dtype, values.dtype)
    if 0 in (*x.shape, features):
        return jnp.zeros((*x.shape[:-1], features), dtype)
    whole = None
    if isinstance(weight, Sparse24):
        packed = weight
    else:
        [dense] = resharding.whole(weight)
        packed = Sparse24.from_dense(jax.lax.stop_gradient(dense) if straight_through else dense)
        whole = dense.astype(dtype) if straight_through else None
    x, values = x.astype(dtype), packed.values.astype(dtype)
    device = dispatch.current_device(x)
    missing = {"pallas": f"Mosaic has no sparse products for Hopper, so {op} has no Pallas kernel"}
    run = Runner(implementation, device)
    if takes_reference(op, implementation, device, x, values, missing=missing):
        if not sharding.is_explicit(x, values):
            dense = Sparse24(values, packed.metadata).to_dense()
            if whole is not None:
                dense = unpruned_gradient(whole, packed.places)
            return named(_dense_product(x, dense, precision), op, "output")
        run = Runner("xla", device)
    leading = sharding.leading_axes(x.ndim - 1, _WHOLE)
    operands = (x, values, packed.metadata, whole)
    axes = (leading + "k", "fc", "stw", "kf")
    aligned = sharding.align(operands, operand_axes=axes, whole=_WHOLE)
    return _sparse24_matmul(run, Options(precision), *aligned)


_WHOLE = "kfcstw"


@dataclass(frozen=True)
class Options:
    """Static arguments of sparse24_matmul."""

    precision: Any


def _dense_product(x: jax.Array, dense: jax.Array, precision: Any) -> jax.Array:
    rows = "abcdeghij"[: x.ndim - 1]
    return product(
        f"{rows}k,kf->{rows}f", x, dense, out_dtype=x.dtype, precision=precision, of_weights=True
    )


# --- gradients ------------------------------------------------------------------------------------


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="sparse24_matmul")
def _sparse24_matmul(run: Runner, options: Options, x, values, metadata, whole):
    """Returns the product; `whole` is the unpruned weight, which only gets the gradient, or None."""
    del whole
    [y] = run(Sparse24Product(options), x, values, metadata)
    return y


def _fwd(run: Runner, options: Options, x, values, metadata, whole):
    y = _sparse24_matmul(run, options, x, values, metadata, whole)
    return named(y, "sparse24_matmul", "output"), (x, values, metadata, whole)


def _bwd(run: Runner, options: Options, saved, dy):
    del run
    x, values, metadata, whole = saved
    weight = Sparse24(values, metadata)
    dy = dy.astype(x.dtype)
    rows = "abcdeghij"[: x.ndim - 1]
    dx = product(
        f"{rows}f,kf->{rows}k",
        dy,
        weight.to_dense(),
        out_dtype=x.dtype,
        precision=options.precision,
    )
    dw = weight_product(x, dy, out_dtype=x.dtype, precision=options.precision)
    if whole is not None:
        return dx, None, None, dw
    return dx, taken(dw, weight.places), None, None


_sparse24_matmul.defvjp(_fwd, _bwd)


# --- kernel ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sparse24Product:
    """Computes (x @ w,) from x [M, D] and the values [F, D / 2] and metadata of w."""

    options: Options

    @property
    def name(self) -> str:
        return "sparse24_matmul forward"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes((ROWS + "k", "fc", "stw"), (ROWS + "f",), whole=_WHOLE)

    def batched(self, call, axis_size, in_batched, *operands) -> Results | None:
        return batched_rows(self, call, axis_size, in_batched, *operands)

    def why_not(self, device, x, values, metadata) -> Mapping[str, str | None]:
        del metadata
        reason = sparse24_cuda.why_unsupported(
            compute_capability=device.compute_capability,
            dtype=x.dtype,
            depth=x.shape[1],
            features=values.shape[0],
        )
        return {"cuda": reason, "xla": None}

    def estimate(self, device, able, x, values, metadata) -> Estimate:
        del able, metadata
        if not is_modelled(device):
            return UNMODELLED
        numbers = x.shape[1] * values.shape[0]
        if numbers >= _MANY_WEIGHTS or x.shape[0] * numbers >= _LARGE_PRODUCT:
            return Rule(("cuda",), "XLA first writes the matrix with its zeros")
        return Rule(("xla",), "the kernel takes longer to start than the product takes")

    def run(self, implementation, device, x, values, metadata) -> Results:
        del device
        if implementation == "cuda":
            return (sparse24_cuda.matmul(x, values, metadata),)
        dense = Sparse24(values, metadata).to_dense()
        return (_dense_product(x, dense, self.options.precision),)

    def examples(self, random, device, x, values, metadata):
        """Returns random operands; the weight keeps the first two of each four numbers."""
        del device
        return [random(x), random(values), jnp.full(metadata.shape, 0x44444444, metadata.dtype)]


_MANY_WEIGHTS, _LARGE_PRODUCT = 2**26, 16_000_000_000
"""Elements of the matrix, zeros included, and multiplications of the dense product, from which the
kernel is faster."""
