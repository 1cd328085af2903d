"""ragged_dot: validation, choice of implementation, gradient."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused import dispatch
from jaxfused.ops.grouped import ragged_dot_xla, ragged_mlp_xla, ragged_quantized
from jaxfused.ops.grouped.grouped_stages import GroupedProduct, GroupedWeights, HiddenLayer
from jaxfused.ops.grouped.ragged_dot_xla import Options, cleared
from jaxfused.runtime import sharding
from jaxfused.runtime.activation import activate, value_and_slope
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.checks import (
    as_arrays,
    as_int32,
    check_activation,
    check_floating,
    python_numbers,
)
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.promotion import accumulator_dtype, common_dtype
from jaxfused.runtime.quantized_array import QuantizedArray
from jaxfused.runtime.runner import Runner


@python_numbers
def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array | QuantizedArray,
    group_sizes: jax.Array,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: Any = None,
    group_offset: jax.Array | int | None = None,
    *,
    activation: str | None = None,
    transpose_rhs: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""A grouped product: runs of rows of one matrix, each multiplied by a matrix of its own.

    .. math::
        y_i = \text{activation}(\text{lhs}_i \, \text{rhs}_{e(i)})

    where the rows of group e come after those of the groups before it, and e(i) is the group of row i.
    It has the arguments and the meaning of `jax.lax.ragged_dot`. Sums and gradients are accumulated in
    float32 (float64 for float64), and rounded once.

    Rows of no group (beyond the sum of the sizes, or of groups for which rhs has no matrix) give zeros
    and zero gradients, whatever values they hold. NaN in a group's rows or matrix reaches no other
    group. A size below 0 counts as 0, and groups are cut off at row M, without an error: the host does
    not know the sizes.

    Args:
      lhs: [M, K], float32, bfloat16 or float16 (float64 with implementation "xla").
      rhs: [E, K, N], a matrix for each group; with `transpose_rhs` [E, N, K]. Or a `QuantizedArray` of
        shape [E, K, N] with axis -2, which is frozen: `jaxfused.quantization.stack` makes one of the
        experts of a checkpoint. The kernel takes the formats of `quantized_matmul`'s kernel, with a
        multiple of 16 columns; other formats, and the gradient of lhs, dequantise the matrices.
      group_sizes: [E], integers: the rows of each group.
      precision: of the product, as in `jax.lax.dot`.
      preferred_element_type: dtype of the result; by default the operands' common one, in which they are
        multiplied.
      group_offset: the index in `group_sizes`, [G] then, of the group that rhs's first matrix is for; an
        integer, or an array of shape [] or [1]. The other groups' rows are zeros.
        Expert parallelism needs it, where a device has the matrices of some groups.
      activation: None or a name of `jaxfused.ACTIVATIONS`, of the product, as tokamax has it;
        `ragged_mlp` also has a gate.
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
    lhs, group_sizes = as_arrays(lhs, group_sizes)
    check_floating(op, dict(lhs=lhs))
    [w] = ragged_quantized.checked_weights(op, transpose_rhs, rhs=rhs)
    _check_shapes(op, lhs, w, group_sizes, group_offset is not None, transpose_rhs)
    group_sizes, offset = checked_sizes(op, group_sizes, group_offset, w.shape[0])
    is_quantized = isinstance(w, QuantizedArray)
    dtype = lhs.dtype if is_quantized else common_dtype(lhs.dtype, w.dtype)
    out_dtype = jnp.dtype(dtype if preferred_element_type is None else preferred_element_type)
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise ValueError(
            f"{op}: preferred_element_type is {out_dtype}, but the result is of floating-point numbers;"
            " pass jnp.float32, jnp.bfloat16 or jnp.float16."
        )
    check_activation(op, activation)
    options = Options(transpose_rhs, dtype, out_dtype, precision)
    if is_quantized:
        y = ragged_quantized.ragged_dot(
            options, lhs, w, group_sizes, offset, implementation=implementation
        )
        if activation is None:
            return y
        y = activate(activation, y.astype(accumulator_dtype(out_dtype)))
        return cleared(y, w.shape[0], group_sizes, offset).astype(out_dtype)
    device = dispatch.current_device(lhs)
    missing = {"cuda": f"there is no CUDA kernel of {op} yet"}
    operands = (lhs, w, group_sizes, offset)
    run = Runner(implementation, device)
    if takes_reference(op, implementation, device, lhs, w, missing=missing):
        if not sharding.is_explicit(lhs, w):
            y = ragged_dot_xla.activated(options, activation, *operands)
            return named(y, op, "output")
        run = Runner("xla", device)
    rhs_axes = "enk" if transpose_rhs else "ekn"
    aligned = sharding.align(
        operands, operand_axes=("mk", rhs_axes, "g", "o"), whole="mego", parts="k"
    )
    if activation is None:
        return _ragged_dot(run, options, *aligned)
    if lhs.dtype == w.dtype == out_dtype:
        first = ragged_mlp_xla.Options(op, activation, False, transpose_rhs, precision)
        return _activated(run, options, first, *aligned)
    wide = replace(options, out_dtype=accumulator_dtype(out_dtype))
    y = activate(activation, _ragged_dot(run, wide, *aligned))
    return cleared(y, w.shape[0], group_sizes, offset).astype(out_dtype)


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
    check_groups(op, "rhs", rhs, group_sizes, has_offset)


def check_groups(
    op: str,
    name: str,
    rhs: jax.Array | QuantizedArray,
    group_sizes: jax.Array,
    has_offset: bool,
) -> None:
    """Checks that there is one size for each matrix of `rhs`, or any number with an offset."""
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
            f"{op}: group_sizes has {group_sizes.shape[0]} sizes, but {name} has {groups} matrices; pass"
            f" one size for each, or group_offset where {name} has the matrices of some groups."
        )


def checked_sizes(
    op: str, group_sizes: jax.Array, offset: Any, groups: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the sizes in a dtype that counts all rows, and the group offset as int32 [1]."""
    if group_sizes.dtype.itemsize < 4:
        # Dtypes of 8 and 16 bits may not hold the number of all rows.
        group_sizes = group_sizes.astype(jnp.int32)
    return group_sizes, _offset(op, offset, group_sizes, groups)


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
    [drhs] = run(GroupedWeights("ragged_dot", of_weights, rhs.shape[0]), *factors, *sizes)
    return dlhs, drhs, None, None


_ragged_dot.defvjp(_fwd, _bwd)


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1, 2), op="ragged_dot")
def _activated(run: Runner, options: Options, first, lhs, rhs, group_sizes, offset):
    return run(HiddenLayer(first, False), lhs, rhs, None, group_sizes, offset)[0]


def _activated_fwd(run: Runner, options: Options, first, lhs, rhs, *sizes):
    y, z, _ = run(HiddenLayer(first, True), lhs, rhs, None, *sizes)
    z = named(z, "ragged_dot", "preactivation")
    return named(y, "ragged_dot", "output"), (z, lhs, rhs, *sizes)


def _activated_bwd(run: Runner, options: Options, first, saved, dy):
    z, *operands = saved
    wide = accumulator_dtype(z.dtype)
    _, slope = value_and_slope(first.activation, z.astype(wide))
    return _bwd(run, options, operands, dy.astype(wide) * slope)


_activated.defvjp(_activated_fwd, _activated_bwd)
