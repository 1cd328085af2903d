"""ragged_mlp: validation, choice of implementation, gradient."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.grouped import ragged_dot_xla, ragged_mlp_xla
from jaxfused.ops.grouped.grouped_stages import (
    GroupedProduct,
    GroupedWeights,
    HiddenLayer,
    InputGradient,
)
from jaxfused.ops.grouped.ragged_dot import check_groups, checked_sizes, ragged_dot
from jaxfused.ops.grouped.ragged_mlp_xla import Options
from jaxfused.ops.grouped.ragged_quantized import checked_weights
from jaxfused.runtime import sharding
from jaxfused.runtime.activation import activate
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.checks import (
    as_arrays,
    check_activation,
    check_floating,
    check_shape,
    python_numbers,
)
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.quantized_array import QuantizedArray
from jaxfused.runtime.runner import Runner


@python_numbers
def ragged_mlp(
    x: jax.Array,
    w_gate: jax.Array | QuantizedArray | None,
    w_up: jax.Array | QuantizedArray | None,
    w_down: jax.Array | QuantizedArray,
    group_sizes: jax.Array,
    *,
    activation: str | None = "silu",
    group_offset: jax.Array | int | None = None,
    transpose_weights: bool = False,
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Grouped perceptrons: runs of rows of one matrix, each multiplied by its own group's weights.

    .. math::
        y_i = \bigl(\text{activation}(x_i G_{e(i)}) \odot (x_i U_{e(i)})\bigr) D_{e(i)}

    where the rows of group e come after those of the groups before it, and e(i) is the group of row i,
    as in `ragged_dot`. On a GPU one kernel computes both first products and the hidden layer. The
    backward pass reads both products, which are saved, and computes the hidden layer again.

    Rows of no group give zeros, as do their gradients, whatever values they hold. Products are of x's
    dtype, with sums in float32.

    Args:
      x: [M, D], float32, bfloat16 or float16 (float64 with implementation "xla").
      w_gate: [E, D, F]; or [E, D, 2 F] with `w_up=None`: the gate's columns, then those of w_up, as most
        checkpoints pack them; or None without a gate: activation(x U) D.
      w_up: [E, D, F], or None where w_gate holds both.
      w_down: [E, F, N].
      group_sizes: [E], integers: the rows of each group.
      activation: None or a name of `jaxfused.ACTIVATIONS`, of the gate.
      group_offset: the index in `group_sizes`, [G] then, of the group that the first matrices are for,
        as in `ragged_dot`.
      transpose_weights: whether weights are [E, F, D] (or [E, 2 F, D]) and [E, N, F], as in most
        checkpoints. They are not copied. If it is False, any weight may be a `QuantizedArray`, as in
        `ragged_dot`; each product then has a kernel of its own.
      precision: of the products, as in `jax.lax.dot`.
      implementation: None for the fastest that can run, or "pallas", "xla".

    Returns:
      y, [M, N], of x's dtype.

    Raises:
      ValueError: shapes or dtypes do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jnp.array([[1.0], [2.0], [3.0]])
      >>> w = jnp.array([[[1.0]], [[10.0]]])
      >>> jaxfused.ragged_mlp(x, w, w, w, jnp.array([2, 1]), activation="relu").ravel()
      Array([1.e+00, 4.e+00, 9.e+03], dtype=float32)

    On a GPU forward-mode differentiation and gradients of gradients need `implementation="xla"`.

    Source: Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", 2022,
    https://arxiv.org/abs/2211.15841; Shazeer, "GLU Variants Improve Transformer", 2020,
    https://arxiv.org/abs/2002.05202
    """
    op = "ragged_mlp"
    x, group_sizes = as_arrays(x, group_sizes)
    check_floating(op, dict(x=x))
    w_gate, w_up, w_down = checked_weights(
        op, transpose_weights, w_gate=w_gate, w_up=w_up, w_down=w_down
    )
    check_activation(op, activation)
    if x.ndim != 2:
        raise ValueError(f"{op}: x has shape {x.shape}; pass one matrix [rows, features].")
    check_perceptrons(op, x, w_gate, w_up, w_down, transpose_weights)
    check_groups(op, "w_down", w_down, group_sizes, group_offset is not None)
    sizes, offset = checked_sizes(op, group_sizes, group_offset, w_down.shape[0])
    if any(isinstance(w, QuantizedArray) for w in (w_gate, w_up, w_down)):
        product = functools.partial(
            ragged_dot,
            group_sizes=sizes,
            precision=precision,
            preferred_element_type=x.dtype,
            group_offset=offset,
            transpose_rhs=transpose_weights,
            implementation=implementation,
        )
        return _by_products(product, activation, x, w_gate, w_up, w_down)
    options = Options(op, activation, w_gate is not None, transpose_weights, precision)
    first: Any = w_up if w_gate is None else w_gate
    second: Any = None if w_gate is None else w_up
    down: Any = w_down
    device = dispatch.current_device(x)
    missing = {"cuda": f"there is no CUDA kernel of {op} yet"}
    run = Runner(implementation, device)
    operands = (x, first, second, down, sizes, offset)
    if takes_reference(op, implementation, device, x, first, down, missing=missing):
        if not sharding.is_explicit(x, first, down):
            first, second, down = _cast(x, first, second, down)
            y = ragged_mlp_xla.ragged_mlp(options, x, first, second, down, sizes, offset)
            return named(y, op, "output")
        run = Runner("xla", device)
    is_joined = w_gate is not None and w_up is None
    of_first = "efd" if transpose_weights else "edf"
    aligned = sharding.align(
        operands,
        operand_axes=(
            "md",
            of_first.replace("f", "j") if is_joined else of_first,
            of_first,
            "enf" if transpose_weights else "efn",
            "g",
            "o",
        ),
        # The columns of gate and up in one concatenated array are not split: a device's shard would
        # not hold the same columns of both.
        whole="mdegonjf" if is_joined else "mdegon",
    )
    return _ragged_mlp(run, options, *aligned)


def check_perceptrons(op: str, x, w_gate, w_up, w_down, transposed: bool) -> None:
    """Checks the shapes of x [..., D] and of the weights."""
    if w_gate is None and w_up is None:
        raise ValueError(f"{op}: w_gate and w_up are None; pass w_up for experts without a gate.")
    name, first = ("w_gate", w_gate) if w_up is None else ("w_up", w_up)
    features = x.shape[-1]
    inner, outer = (2, 1) if transposed else (1, 2)
    if first.ndim != 3 or first.shape[inner] != features:
        order = f"(E, hidden, {features})" if transposed else f"(E, {features}, hidden)"
        raise ValueError(
            f"{op}: {name} has shape {first.shape}, but x has {features} features in its last axis; pass"
            f" {name} of shape {order}."
        )
    hidden = first.shape[outer]
    if w_up is None:
        if hidden % 2:
            raise ValueError(
                f"{op}: w_gate has shape {w_gate.shape}, but without w_up it holds two matrices of one"
                " width; pass twice the hidden features, or pass w_up."
            )
        hidden //= 2
    else:
        check_shape(op, "w_gate", w_gate, w_up.shape, f"w_up has shape {w_up.shape}")
    groups = first.shape[0]
    if w_down.ndim != 3 or (w_down.shape[0], w_down.shape[inner]) != (groups, hidden):
        wanted = (
            f"({groups}, features, {hidden})" if transposed else f"({groups}, {hidden}, features)"
        )
        raise ValueError(
            f"{op}: w_down has shape {w_down.shape}, but {name} has shape {first.shape}; pass w_down of"
            f" shape {wanted}."
        )


def _by_products(product: Any, activation: str | None, x, w_gate, w_up, w_down) -> jax.Array:
    """Returns the perceptrons' results [M, N] by one grouped product per weight."""
    wide = accumulator_dtype(x.dtype)
    if w_gate is None:
        h = activate(activation, product(x, w_up).astype(wide))
    else:
        z = [product(x, w) for w in (w_gate, w_up) if w is not None]
        gate, up = jnp.split(z[0], 2, axis=-1) if w_up is None else z
        h = activate(activation, gate.astype(wide)) * up
    return product(h.astype(x.dtype), w_down)


# --- gradient -------------------------------------------------------------------------------------


def _cast(x: jax.Array, *weights: jax.Array | None) -> list[Any]:
    return [None if w is None else w.astype(x.dtype) for w in weights]


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="ragged_mlp")
def _ragged_mlp(run: Runner, options: Options, x, first, second, w_down, sizes, offset):
    return _forward(run, options, False, x, first, second, w_down, sizes, offset)[0]


def _forward(run: Runner, options: Options, saves: bool, x, first, second, w_down, sizes, offset):
    first, second, w_down = _cast(x, first, second, w_down)
    h, *saved = run(HiddenLayer(options, saves), x, first, second, sizes, offset)
    last = GroupedProduct(f"{options.op} forward", options.product(x.dtype))
    [y] = run(last, h, w_down, sizes, offset)
    return y, saved


def _fwd(run: Runner, options: Options, *operands):
    y, saved = _forward(run, options, True, *operands)
    y = named(y, options.op, "output")
    return y, (operands, named(tuple(saved), options.op, "preactivation"))


def _bwd(run: Runner, options: Options, saved, dy):
    (x, first, second, w_down, sizes, offset), preactivations = saved
    dy = dy.astype(x.dtype)
    of_x = options.product(x.dtype)
    narrow_first, narrow_second, narrow_down = _cast(x, first, second, w_down)

    def of_weights(w: jax.Array, rows: jax.Array, cotangent: jax.Array) -> jax.Array:
        stage_options = ragged_dot_xla.Options(
            False, of_x.dtype, jnp.dtype(w.dtype), options.precision
        )
        factors = (cotangent, rows) if options.transposed else (rows, cotangent)
        stage = GroupedWeights(options.op, stage_options, w.shape[0])
        return run(stage, *factors, sizes, offset)[0]

    back = options.product(x.dtype, back=True)
    [dh] = run(
        GroupedProduct(f"{options.op} hidden gradient", back), dy, narrow_down, sizes, offset
    )
    dfirst, dsecond, h = ragged_mlp_xla.hidden_gradient(options, dh, *preactivations)
    dw_down = of_weights(w_down, h, dy)
    if second is not None:
        both = InputGradient(options, jnp.dtype(x.dtype))
        [dx] = run(both, dfirst, dsecond, narrow_first, narrow_second, sizes, offset)
        dw_second = of_weights(second, x, dsecond)
    else:
        if options.gated:
            dfirst = jnp.concatenate([dfirst, dsecond], axis=1)
        stage = GroupedProduct(f"{options.op} input gradient", back)
        [dx] = run(stage, dfirst, narrow_first, sizes, offset)
        dw_second = None
    return dx, of_weights(first, x, dfirst), dw_second, dw_down, None, None


_ragged_mlp.defvjp(_fwd, _bwd)
