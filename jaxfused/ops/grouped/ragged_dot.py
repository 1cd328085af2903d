"""ragged_dot: validation, choice of implementation, gradient."""

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused import dispatch
from jaxfused.ops.grouped import ragged_dot_xla
from jaxfused.ops.grouped.ragged_dot_xla import Options
from jaxfused.runtime import sharding
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.checks import as_arrays, as_int32, check_floating, python_numbers
from jaxfused.runtime.estimate import kernels_first
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.promotion import common_dtype
from jaxfused.runtime.runner import Axes, Results, Runner
from jaxfused.runtime.vmap import OneByOne
from pallas_kernels.gemm import grouped, grouped_weight_gradient
from pallas_kernels.gemm.cost import WeightWork, Work


@python_numbers
def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: Any = None,
    group_offset: jax.Array | int | None = None,
    *,
    transpose_rhs: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""A grouped product: runs of rows of one matrix, each multiplied by a matrix of its own.

    .. math::
        y_i = \text{lhs}_i \, \text{rhs}_{e(i)}

    where the rows of group e come after those of the groups before it, and e(i) is the group of row i.
    It has the arguments and the meaning of `jax.lax.ragged_dot`. Sums and gradients are accumulated in
    float32 (float64 for float64), and rounded once.

    Rows that no group has (beyond the sum of the sizes, or of groups for which rhs has no matrix) are
    zeros, as are their gradients, whatever they hold: NaN there, or in another group's rows or matrix,
    reaches no other result. A size below 0 counts as 0, and rows beyond the last one are cut off: the
    device alone knows the sizes.

    Args:
      lhs: [M, K], float32, bfloat16 or float16 (float64 with implementation "xla").
      rhs: [E, K, N], a matrix for each group; with `transpose_rhs` [E, N, K].
      group_sizes: [E], integers: the rows of each group.
      precision: of the product, as in `jax.lax.dot`.
      preferred_element_type: dtype of the result; by default the operands' common one, in which they are
        multiplied.
      group_offset: the index in `group_sizes`, [G] then, of the group that rhs's first matrix is for; an
        integer, or an array of shape [] or [1]. The other groups' rows are zeros: each device of
        expert parallelism has some groups' matrices.
      transpose_rhs: whether rhs is [E, N, K], as most checkpoints of experts are. It is not copied.
      implementation: None for the fastest that can run, or "pallas", "xla".

    Returns:
      y, [M, N].

    Raises:
      ValueError: shapes or dtypes do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> rows = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
      >>> experts = jnp.array([[[1.0], [0.0]], [[0.0], [1.0]]])
      >>> jaxfused.ragged_dot(rows, experts, jnp.array([1, 2])).ravel()
      Array([1., 4., 6., 0.], dtype=float32)

    On a GPU forward-mode differentiation and gradients of gradients need `implementation="xla"`.

    Source: `jax.lax.ragged_dot`; Gale et al., "MegaBlocks: Efficient Sparse Training with
    Mixture-of-Experts", 2022, https://arxiv.org/abs/2211.15841
    """
    op = "ragged_dot"
    lhs, rhs, group_sizes = as_arrays(lhs, rhs, group_sizes)
    check_floating(op, dict(lhs=lhs, rhs=rhs))
    _check_shapes(op, lhs, rhs, group_sizes, group_offset is not None, transpose_rhs)
    if group_sizes.dtype.itemsize < 4:
        # Dtypes of 8 and 16 bits may not hold the number of all rows.
        group_sizes = group_sizes.astype(jnp.int32)
    offset = _offset(op, group_offset, group_sizes, rhs.shape[0])
    dtype = common_dtype(lhs.dtype, rhs.dtype)
    out_dtype = jnp.dtype(dtype if preferred_element_type is None else preferred_element_type)
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise ValueError(
            f"{op}: preferred_element_type is {out_dtype}, but the result is of floating-point numbers;"
            " pass jnp.float32, jnp.bfloat16 or jnp.float16."
        )
    options = Options(transpose_rhs, dtype, out_dtype, precision)
    device = dispatch.current_device(lhs)
    missing = {"cuda": f"there is no CUDA kernel of {op} yet"}
    operands = (lhs, rhs, group_sizes, offset)
    run = Runner(implementation, device)
    if takes_reference(op, implementation, device, lhs, rhs, missing=missing):
        if not sharding.is_explicit(lhs, rhs):
            return named(ragged_dot_xla.ragged_dot(options, *operands), op, "output")
        run = Runner("xla", device)
    rhs_axes = "enk" if transpose_rhs else "ekn"
    aligned = sharding.align(
        operands, operand_axes=("mk", rhs_axes, "g", "o"), whole="mego", parts="k"
    )
    return _ragged_dot(run, options, *aligned)


def _check_shapes(
    op: str,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    has_offset: bool,
    transpose_rhs: bool,
) -> None:
    if lhs.ndim != 2:
        raise ValueError(f"{op}: lhs has shape {lhs.shape}; pass one matrix [rows, features].")
    features = lhs.shape[1]
    wanted = (
        f"(groups, features, {features})" if transpose_rhs else f"(groups, {features}, features)"
    )
    if rhs.ndim != 3 or rhs.shape[2 if transpose_rhs else 1] != features:
        raise ValueError(
            f"{op}: rhs has shape {rhs.shape}, but lhs has {features} features in its last axis;"
            f" pass rhs of shape {wanted}."
        )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"{op}: group_sizes has dtype {group_sizes.dtype}, but it counts rows; pass integers."
        )
    if group_sizes.ndim != 1:
        raise ValueError(
            f"{op}: group_sizes has shape {group_sizes.shape}; pass one size for each group."
        )
    groups = rhs.shape[0]
    if group_sizes.shape[0] != groups and not has_offset:
        raise ValueError(
            f"{op}: group_sizes has {group_sizes.shape[0]} sizes, but rhs has {groups} matrices; pass"
            " one size for each, or group_offset where rhs has the matrices of some groups."
        )


def _offset(op: str, offset: Any, group_sizes: jax.Array, groups: int) -> jax.Array:
    """Returns the group offset as int32 [1]."""
    if offset is None:
        return jnp.zeros(1, jnp.int32)
    known = offset if isinstance(offset, int | np.integer | np.ndarray) else None
    array = as_int32(offset)
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.shape not in ((), (1,)):
        raise ValueError(
            f"{op}: group_offset has shape {array.shape} and dtype {array.dtype}, but it is the index of"
            " a group; pass an integer, or an array of one."
        )
    total = group_sizes.shape[0]
    if known is not None and not 0 <= int(np.asarray(known).reshape(())) <= total - groups:
        raise ValueError(
            f"{op}: group_offset is {int(np.asarray(known).reshape(()))}, but there are {total} sizes"
            f" for {groups} matrices; pass an offset from 0 to {total - groups}."
        )
    return array.reshape(1)


# --- gradient -------------------------------------------------------------------------------------


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="ragged_dot")
def _ragged_dot(run: Runner, options: Options, lhs, rhs, group_sizes, offset):
    [y] = run(GroupedProduct("ragged_dot forward", options), lhs, rhs, group_sizes, offset)
    return y


def _fwd(run: Runner, options: Options, *operands):
    return named(_ragged_dot(run, options, *operands), "ragged_dot", "output"), operands


def _bwd(run: Runner, options: Options, operands, dy):
    lhs, rhs, *sizes = operands
    dy = dy.astype(options.dtype)
    back = replace(options, transpose_rhs=not options.transpose_rhs, out_dtype=jnp.dtype(lhs.dtype))
    [dlhs] = run(GroupedProduct("ragged_dot dlhs", back), dy, rhs, *sizes)
    factors = (dy, lhs) if options.transpose_rhs else (lhs, dy)
    of_weights = replace(options, transpose_rhs=False, out_dtype=jnp.dtype(rhs.dtype))
    [drhs] = run(GroupedWeights(of_weights, rhs.shape[0]), *factors, *sizes)
    return dlhs, drhs, None, None


_ragged_dot.defvjp(_fwd, _bwd)


# --- kernels --------------------------------------------------------------------------------------


_GROUPS_AT_ONCE = "a kernel multiplies the rows of all groups in one launch"


@dataclass(frozen=True)
class GroupedProduct(OneByOne):
    """Computes (y [M, N],) from lhs [M, K], rhs, group_sizes [G] and the offset [1]."""

    name: str
    options: Options

    def axes(self, *operands) -> Axes:
        del operands
        rhs = "enk" if self.options.transpose_rhs else "ekn"
        return Axes(("mk", rhs, "g", "o"), ("mn",), whole="mego", parts="k")

    def on_parts(self, names, call, *operands) -> Results:
        """Adds up the products of the devices' features in float32."""
        wide = replace(self, options=replace(self.options, out_dtype=jnp.dtype(jnp.float32)))
        [y] = call(wide, *operands)
        return (jax.lax.psum(y, tuple(names)).astype(self.options.out_dtype),)

    estimate = kernels_first(_GROUPS_AT_ONCE)

    def why_not(self, device, lhs, rhs, sizes, offset) -> Mapping[str, str | None]:
        del sizes, offset
        reason = grouped.why_unsupported(
            compute_capability=device.compute_capability,
            dtypes={"lhs": lhs.dtype, "rhs": rhs.dtype},
            features={"lhs": lhs.shape[1], "the result": self.width(rhs)},
            out_dtype=self.options.out_dtype,
            rows=lhs.shape[0],
            groups=rhs.shape[0],
        )
        return {"pallas": reason, "xla": None}

    def width(self, rhs: Any) -> int:
        return rhs.shape[1 if self.options.transpose_rhs else 2]

    def configs(self, implementation, device, lhs, rhs, sizes, offset) -> Sequence[Hashable]:
        del sizes, offset
        if implementation != "pallas":
            return ()
        work = Work(
            lhs.shape[0],
            self.width(rhs),
            lhs.shape[1],
            written_bytes=self.options.out_dtype.itemsize,
            k_last=self.options.transpose_rhs,
            groups=rhs.shape[0],
        )
        return grouped.candidates(work, self.options.out_dtype, device.multiprocessors)

    def run(self, implementation, device, lhs, rhs, sizes, offset, config: Any = None) -> Results:
        options = self.options
        if implementation == "xla":
            return (ragged_dot_xla.rows_product(options, lhs, rhs, sizes, offset),)
        y = grouped.grouped_product(
            lhs,
            [rhs],
            sizes,
            offset.reshape(()),
            b_transposed=options.transpose_rhs,
            out_dtype=options.out_dtype,
            multiprocessors=device.multiprocessors,
            config=config,
            name="ragged_dot",
        )
        return (y,)

    def examples(self, random, device, lhs, rhs, sizes, offset):
        """Returns random operands with groups of equal sizes."""
        del device
        return [random(lhs), random(rhs), _equal_sizes(lhs, sizes), jnp.zeros_like(offset)]


def _equal_sizes(lhs: Any, sizes: Any) -> jax.Array:
    return jnp.full(sizes.shape, lhs.shape[0] // sizes.shape[0], sizes.dtype)


@dataclass(frozen=True)
class GroupedWeights(OneByOne):
    """Computes (dw [E, K, N],) from x [M, K], dy [M, N], group_sizes [G] and the offset [1]."""

    options: Options
    groups: int

    @property
    def name(self) -> str:
        return "ragged_dot drhs"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes(("mk", "mn", "g", "o"), ("ekn",), whole="mego")

    estimate = kernels_first(_GROUPS_AT_ONCE)

    def why_not(self, device, x, dy, sizes, offset) -> Mapping[str, str | None]:
        del sizes, offset
        reason = grouped.why_unsupported(
            compute_capability=device.compute_capability,
            dtypes={"lhs": x.dtype, "the cotangent": dy.dtype},
            features={"lhs": x.shape[1], "the cotangent": dy.shape[1]},
            out_dtype=self.options.out_dtype,
            rows=x.shape[0],
            groups=self.groups,
        )
        return {"pallas": reason, "xla": None}

    def configs(self, implementation, device, x, dy, sizes, offset) -> Sequence[Hashable]:
        del sizes, offset
        if implementation != "pallas":
            return ()
        out_dtype = self.options.out_dtype
        work = WeightWork(x.shape[0], x.shape[1], (dy.shape[1],), out_bytes=out_dtype.itemsize)
        return grouped_weight_gradient.candidates(
            work, self.groups, out_dtype, device.multiprocessors
        )

    def run(self, implementation, device, x, dy, sizes, offset, config: Any = None) -> Results:
        options = self.options
        if implementation == "xla":
            return (ragged_dot_xla.weight_product(options, self.groups, x, dy, sizes, offset),)
        dw = grouped_weight_gradient.grouped_weight_gradient(
            x,
            dy,
            sizes,
            offset.reshape(()),
            groups=self.groups,
            out_dtype=options.out_dtype,
            multiprocessors=device.multiprocessors,
            config=config,
            name="ragged_dot_drhs",
        )
        return (dw,)

    def examples(self, random, device, x, dy, sizes, offset):
        """Returns random operands with groups of equal sizes."""
        del device
        return [random(x), random(dy), _equal_sizes(x, sizes), jnp.zeros_like(offset)]
