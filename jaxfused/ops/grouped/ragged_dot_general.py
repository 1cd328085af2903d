"""ragged_dot_general: grouped products by dimension numbers, by `ragged_dot` or its wgrad."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused import dispatch
from jaxfused.ops.grouped import ragged_dot_xla
from jaxfused.ops.grouped.grouped_stages import GroupedProduct, GroupedWeights
from jaxfused.ops.grouped.ragged_dot import check_groups, checked_sizes, ragged_dot
from jaxfused.ops.grouped.ragged_dot_xla import Options
from jaxfused.runtime import sharding
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.checks import as_arrays, python_numbers
from jaxfused.runtime.gate import choose_without_stages, takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.promotion import common_dtype
from jaxfused.runtime.runner import Runner

_OP = "ragged_dot_general"


@python_numbers
def ragged_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: Any = None,
    group_offset: jax.Array | int | None = None,
    *,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""A grouped product of axes in any order, with the arguments of `jax.lax.ragged_dot_general`.

    .. math::
        y_{i n} = \sum_k \text{lhs}_{i k} \, \text{rhs}_{e(i) k n} \quad \text{or} \quad
        y_{e m n} = \sum_{i:\, e(i) = e} \text{lhs}_{i m} \, \text{rhs}_{i n}

    where e(i) is the group of index i along the ragged axis. The first is for a ragged axis of lhs that
    is not summed, if it is lhs's only such axis; the second for one that is summed, if it is the only
    such axis. Both have the kernels, the numerics and the gradients of `ragged_dot`. XLA computes all
    other dimension numbers, such as batch axes, and other dtypes, and multiplies all rows by all
    groups' matrices. Axes that do not lie as the kernels take them are transposed first.

    Args:
      lhs: float32, bfloat16 or float16.
      rhs: as `ragged_dot_dimension_numbers` say.
      group_sizes: [G], integers.
      ragged_dot_dimension_numbers: `jax.lax.RaggedDotDimensionNumbers`.
      precision: of the product, as in `jax.lax.dot`.
      preferred_element_type: dtype of the result; by default the operands' common one.
      group_offset: as in `ragged_dot`, for a ragged axis that is not summed.
      implementation: None for the fastest that can run, or "pallas", "xla".

    Returns:
      The axes of lhs that are neither summed nor a batch, then those of rhs; for a ragged axis that is
      summed, the groups come before them.

    Raises:
      ValueError: shapes or dtypes do not fit, or the named implementation cannot run.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> of_weights = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
      >>> x, dy = jnp.array([[1.0], [2.0], [3.0]]), jnp.ones((3, 1))
      >>> jaxfused.ragged_dot_general(x, dy, jnp.array([2, 1]), of_weights).ravel()
      Array([3., 3.], dtype=float32)

    Source: `jax.lax.ragged_dot_general`.
    """
    lhs, rhs, group_sizes = as_arrays(lhs, rhs, group_sizes)
    numbers = ragged_dot_dimension_numbers
    _check_axes(lhs, rhs, group_sizes, numbers)
    missing = {"cuda": f"there is no CUDA kernel of {_OP} yet"}
    dispatch.choose(_OP, implementation, {**missing, "pallas": None, "xla": None})
    plan = _plan(lhs, rhs, group_sizes, numbers, group_offset)
    if isinstance(plan, str):
        reasons = {"pallas": plan, **missing, "xla": None}
        choose_without_stages(_OP, implementation, reasons, lhs, rhs)
        if group_offset is not None:
            raise ValueError(
                f"{_OP}: group_offset was passed, but XLA has none, and of ragged_dot {plan}; pass"
                " matrices for all groups, without group_offset."
            )
        in_xla = functools.partial(
            jax.lax.ragged_dot_general,
            ragged_dot_dimension_numbers=numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )
        if sharding.is_explicit(lhs, rhs):
            # JAX has no rule for Explicit axes here.
            in_xla = jax.sharding.auto_axes(in_xla, out_sharding=jax.P())
        try:
            return in_xla(lhs, rhs, group_sizes)
        except TypeError as error:
            raise ValueError(f"{_OP}: {error}") from error
    left, right = plan.matrices(lhs, rhs)
    options = dict(precision=precision, preferred_element_type=preferred_element_type)
    if plan.sums_rows:
        y = _ragged_weights(left, right, group_sizes, implementation=implementation, **options)
    else:
        check_groups(_OP, "rhs", right, group_sizes, group_offset is not None)
        checked_sizes(_OP, group_sizes, group_offset, right.shape[0])
        y = ragged_dot(
            left,
            right,
            group_sizes,
            group_offset=group_offset,
            transpose_rhs=plan.transpose_rhs,
            implementation=implementation,
            **options,
        )
    return y.reshape(plan.result)


def _check_axes(lhs, rhs, group_sizes, numbers: jax.lax.RaggedDotDimensionNumbers) -> None:
    """Checks that the axes exist, that those of both operands agree, and that sizes are integers."""
    if not isinstance(numbers, jax.lax.RaggedDotDimensionNumbers):
        raise ValueError(
            f"{_OP}: ragged_dot_dimension_numbers is {numbers!r}; pass"
            " jax.lax.RaggedDotDimensionNumbers(...)."
        )
    ((of_lhs, of_rhs), (batch_lhs, batch_rhs)) = numbers.dot_dimension_numbers
    left, right = (*of_lhs, *batch_lhs), (*of_rhs, *batch_rhs)
    for name, array, axes in (
        ("lhs", lhs, (*left, *numbers.lhs_ragged_dimensions)),
        ("rhs", rhs, (*right, *numbers.rhs_group_dimensions)),
    ):
        if not all(0 <= axis < array.ndim for axis in axes):
            raise ValueError(
                f"{_OP}: the dimension numbers name axes {axes} of {name}, which has shape"
                f" {array.shape}; pass axes that it has."
            )
    sizes = [lhs.shape[a] for a in left], [rhs.shape[a] for a in right]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{_OP}: axes {left} of lhs have sizes {tuple(sizes[0])}, but axes {right} of rhs, which"
            f" they are multiplied with, have {tuple(sizes[1])}; pass operands that agree."
        )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer) or group_sizes.ndim == 0:
        raise ValueError(
            f"{_OP}: group_sizes has shape {group_sizes.shape} and dtype {group_sizes.dtype}, but it"
            " counts the rows of each group; pass integers [groups]."
        )


class _Plan(NamedTuple):
    """Transposes and shapes that make both operands matrices, and the shape of the result."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    left_shape: tuple[Any, ...]
    right_shape: tuple[Any, ...]
    result: tuple[Any, ...]
    sums_rows: bool
    transpose_rhs: bool = False

    def matrices(self, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (
            lhs.transpose(self.left).reshape(self.left_shape),
            rhs.transpose(self.right).reshape(self.right_shape),
        )


def _plan(lhs, rhs, group_sizes, numbers, group_offset) -> _Plan | str:
    """Returns how operands become those of `ragged_dot` or of its wgrad, or why they cannot."""
    ((of_lhs, of_rhs), batch) = numbers.dot_dimension_numbers
    of_lhs, of_rhs = (tuple(int(a) for a in axes) for axes in (of_lhs, of_rhs))
    ragged, of_groups = (
        tuple(int(a) for a in axes)
        for axes in (numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions)
    )
    if any(len(axes) for axes in batch):
        return "it takes no batch axes"
    if group_sizes.ndim != 1 or len(ragged) != 1:
        return "it takes one size for each group and one ragged axis"
    for name, array in dict(lhs=lhs, rhs=rhs).items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return f"it takes floating-point numbers, and {name} has dtype {array.dtype}"
    free = tuple(a for a in range(lhs.ndim) if a not in of_lhs)
    others = tuple(a for a in range(rhs.ndim) if a not in (*of_rhs, *of_groups))
    sizes, columns = lhs.shape, tuple(rhs.shape[a] for a in others)
    width = int(np.prod(columns))
    if ragged[0] in free:
        if free != ragged or len(of_groups) != 1:
            return "the ragged axis is not the only one of lhs that is not summed"
        summed = int(np.prod([sizes[a] for a in of_lhs]))
        groups, first = rhs.shape[of_groups[0]], (sizes[ragged[0]], summed)
        turned = max(of_rhs, default=0) == rhs.ndim - 1 and rhs.ndim > 2
        order = (*of_groups, *others, *of_rhs) if turned else (*of_groups, *of_rhs, *others)
        shape = (groups, width, summed) if turned else (groups, summed, width)
        result = (first[0], *columns)
        return _Plan((*ragged, *of_lhs), order, first, shape, result, False, turned)
    if of_lhs != ragged or of_groups:
        return "the ragged axis is not the only one that is summed"
    if group_offset is not None:
        return "it takes a group_offset for a ragged axis that is not summed"
    rows, kept = sizes[ragged[0]], tuple(sizes[a] for a in free)
    result = (group_sizes.shape[0], *kept, *columns)
    shapes = (rows, int(np.prod(kept))), (rows, width)
    return _Plan((*ragged, *free), (*of_rhs, *others), *shapes, result, True)


def _ragged_weights(
    x: jax.Array,
    dy: jax.Array,
    group_sizes: jax.Array,
    *,
    precision: jax.lax.PrecisionLike,
    preferred_element_type: Any,
    implementation: dispatch.Implementation | None,
) -> jax.Array:
    """Returns x^T @ dy over the rows of each group, [G, K, N], for x [M, K] and dy [M, N]."""
    dtype = common_dtype(x.dtype, dy.dtype)
    out_dtype = jnp.dtype(dtype if preferred_element_type is None else preferred_element_type)
    groups = group_sizes.shape[0]
    sizes, offset = checked_sizes(_OP, group_sizes, None, groups)
    options = Options(False, dtype, out_dtype, precision)
    device = dispatch.current_device(x)
    run = Runner(implementation, device)
    missing = {"cuda": f"there is no CUDA kernel of {_OP} yet"}
    if takes_reference(_OP, implementation, device, x, dy, missing=missing):
        if not sharding.is_explicit(x, dy):
            y = ragged_dot_xla.weight_product(options, groups, x, dy, sizes, offset)
            return named(y, _OP, "output")
        run = Runner("xla", device)
    aligned = sharding.align(
        (x, dy, sizes, offset), operand_axes=("mk", "mn", "g", "o"), whole="mgo"
    )
    return _weights(run, options, groups, *aligned)


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1, 2), op=_OP)
def _weights(run: Runner, options: Options, groups: int, x, dy, sizes, offset):
    [y] = run(GroupedWeights(_OP, options, groups), x, dy, sizes, offset)
    return y


def _fwd(run: Runner, options: Options, groups: int, *operands):
    return named(_weights(run, options, groups, *operands), _OP, "output"), operands


def _bwd(run: Runner, options: Options, groups: int, operands, dw):
    del groups
    x, dy, *sizes = operands
    dw = dw.astype(options.dtype)
    of_x = Options(True, options.dtype, jnp.dtype(x.dtype), options.precision)
    of_dy = Options(False, options.dtype, jnp.dtype(dy.dtype), options.precision)
    [dx] = run(GroupedProduct(f"{_OP} dlhs", of_x), dy, dw, *sizes)
    [ddy] = run(GroupedProduct(f"{_OP} drhs", of_dy), x, dw, *sizes)
    return dx, ddy, None, None


_weights.defvjp(_fwd, _bwd)
