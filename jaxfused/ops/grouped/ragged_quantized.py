"""Grouped products with quantised matrices: choice of implementation, kernel, gradient of the rows."""

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.grouped import ragged_dot_xla
from jaxfused.ops.grouped.grouped_stages import GroupedProduct, equal_sizes
from jaxfused.ops.grouped.ragged_dot_xla import Options
from jaxfused.ops.quantized.quantized_matmul import exponents_of, of_columns, why_no_kernel_reads
from jaxfused.runtime import sharding
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.checks import as_arrays, check_floating
from jaxfused.runtime.estimate import kernels_first
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.quantized_array import QuantizedArray, as_operand, assembled
from jaxfused.runtime.runner import Axes, Results, Runner
from jaxfused.runtime.scale_groups import of_each_column
from jaxfused.runtime.stated_gradient import stated_gradient
from jaxfused.runtime.vmap import OneByOne
from pallas_kernels.gemm import grouped_quantized
from pallas_kernels.gemm.quantized import Packed

_OP = "ragged_dot"


def checked_weights(op: str, transposed: bool, **weights: Any) -> tuple[Any, ...]:
    """Returns the named matrices of experts after checks: floats, or quantised along axis -2."""
    return tuple(
        w if w is None else _checked(op, name, w, transposed) for name, w in weights.items()
    )


def _checked(op: str, name: str, w: Any, transposed: bool) -> jax.Array | QuantizedArray:
    if not isinstance(w, QuantizedArray):
        [w] = as_arrays(w)
        check_floating(op, {name: w})
        return w
    if transposed:
        flag = "transpose_rhs" if name == "rhs" else "transpose_weights"
        raise ValueError(
            f"{op}: {flag}=True was passed with a quantised {name}, whose layout is its own; leave it"
            " out, and pass a QuantizedArray of shape [groups, inputs, outputs]."
        )
    if w.axis != -2:
        raise ValueError(
            f"{op}: {name} was quantised along axis {w.axis}, but the products sum over axis -2; pass"
            f" jaxfused.quantize({name}, axis=-2)."
        )
    return w


def ragged_dot(
    options: Options,
    lhs: jax.Array,
    rhs: QuantizedArray,
    *sizes: jax.Array,
    implementation: dispatch.Implementation | None,
) -> jax.Array:
    """Returns each group of lhs's rows [M, K] times its matrix of rhs [E, K, N], which is frozen.

    Args:
      sizes: group sizes [G] and the offset [1].
    """
    exponents = exponents_of(rhs)
    rhs = jax.lax.stop_gradient(as_operand(_OP, "rhs", rhs))
    parts = jax.tree.leaves(rhs)
    device = dispatch.current_device(lhs)
    missing = {"cuda": f"there is no CUDA kernel of {_OP} yet"}
    why_xla = why_no_kernel_reads(rhs)
    if why_xla is not None:
        missing["pallas"] = why_xla
    run = Runner(implementation, device)
    if takes_reference(_OP, implementation, device, lhs, *parts, missing=missing, why_xla=why_xla):
        if not sharding.is_explicit(lhs, *parts):
            return named(_in_xla(options, lhs, rhs, *sizes), _OP, "output")
        run = Runner("xla", device)
    scale, zero_point = of_columns(rhs)
    if exponents is not None and exponents.shape == rhs.scale.shape:
        scale = of_each_column(exponents, rhs.shape[-1])
    weights = Weights(rhs.layout, rhs.codebook)
    arrays = (lhs, rhs.values, scale, zero_point, *sizes)
    arrays = sharding.align(arrays, operand_axes=weights.letters, whole=weights.whole)
    return _ragged_dot(run, options, weights, *arrays)


# --- in XLA ---------------------------------------------------------------------------------------


@functools.partial(stated_gradient, nondiff_argnums=(0,), linear=(1,))
def _in_xla(options: Options, lhs: jax.Array, rhs: QuantizedArray, *sizes: jax.Array) -> jax.Array:
    return ragged_dot_xla.rows_product(options, lhs, rhs, *sizes)


def _in_xla_bwd(options: Options, saved, dy):
    rhs, *sizes = saved
    back = replace(options, transpose_rhs=True, out_dtype=options.dtype)
    dlhs = ragged_dot_xla.rows_product(back, dy.astype(options.dtype), rhs, *sizes)
    return dlhs, jax.tree.map(lambda part: None, rhs), *(None for _ in sizes)


_in_xla.defvjp(lambda options, lhs, *others: (_in_xla(options, lhs, *others), others), _in_xla_bwd)


# --- gradient -------------------------------------------------------------------------------------


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1, 2), op=_OP)
def _ragged_dot(run: Runner, options: Options, weights: "Weights", lhs, *others):
    [y] = run(QuantizedProduct(options, weights), lhs, *others)
    return y


def _fwd(run: Runner, options: Options, weights: "Weights", *operands):
    return named(_ragged_dot(run, options, weights, *operands), _OP, "output"), operands[1:]


def _bwd(run: Runner, options: Options, weights: "Weights", saved, dy):
    """Dequantises the matrices again, in their storage order, so that no float copy is saved."""
    *parts, sizes, offset = saved
    dy, *parts = jax.lax.optimization_barrier((dy.astype(options.dtype), *parts))
    w = weights.array(*parts).dequantize(options.dtype)
    back = replace(options, transpose_rhs=weights.layout == "rows", out_dtype=options.dtype)
    w = w if back.transpose_rhs else w.mT
    [dlhs] = run(GroupedProduct(f"{_OP} dlhs", back), dy, w, sizes, offset)
    return dlhs, *(None for _ in saved)


_ragged_dot.defvjp(_fwd, _bwd)


# --- kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """Static properties of quantised matrices [E, K, N]."""

    layout: Any
    codebook: tuple[float, ...] | None

    whole = "megokj"

    @property
    def letters(self) -> tuple[str, ...]:
        """Axis letters of lhs, values, scales, zero points, group sizes and offset."""
        values = "enk" if self.layout == "columns" else "ekn"
        return "mk", values, "ejn", "ejn", "g", "o"

    def array(self, values: Any, scale: Any, zero_point: Any) -> QuantizedArray:
        """Returns the matrices, assembled from their arrays; uint8 scales are E8M0 exponents."""
        if scale.dtype == jnp.uint8:
            scale = jax.lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu).astype(jnp.float32)
        return assembled(values, scale, zero_point, -2, self.layout, codebook=self.codebook)


@dataclass(frozen=True)
class QuantizedProduct(OneByOne):
    """Computes (y [M, N],): the rows of each group of lhs [M, K] times the group's quantised matrix."""

    options: Options
    weights: Weights

    name = "ragged_dot forward of quantised rhs"
    estimate = kernels_first("a kernel reads the quantised matrices of all groups in one launch")

    def axes(self, *operands) -> Axes:
        del operands
        return Axes(self.weights.letters, ("mn",), whole=self.weights.whole)

    def why_not(self, device, lhs, values, scale, zero_point, *sizes) -> Mapping[str, str | None]:
        del sizes
        reason = grouped_quantized.why_unsupported(
            compute_capability=device.compute_capability,
            x_dtype=lhs.dtype,
            out_dtype=self.options.out_dtype,
            x_shape=lhs.shape,
            w=self._packed(values, scale, zero_point),
        )
        return {"pallas": reason, "xla": None}

    def _packed(self, values, scale, zero_point) -> Packed:
        return Packed(values, scale, zero_point, self.weights.codebook)

    def configs(
        self, implementation, device, lhs, values, scale, zero_point, *sizes
    ) -> Sequence[Hashable]:
        del sizes
        if implementation != "pallas":
            return ()
        w = self._packed(values, scale, zero_point)
        return grouped_quantized.candidates(lhs.shape, w, device.multiprocessors)

    def run(
        self, implementation, device, lhs, values, scale, zero_point, sizes, offset, config=None
    ) -> Results:
        parts = (values, scale, zero_point)
        if implementation == "xla":
            rhs = self.weights.array(*parts)
            return (ragged_dot_xla.rows_product(self.options, lhs, rhs, sizes, offset),)
        y = grouped_quantized.forward(
            lhs,
            self._packed(*parts),
            sizes,
            offset.reshape(()),
            out_dtype=self.options.out_dtype,
            multiprocessors=device.multiprocessors,
            config=config,
            name="ragged_dot_quantized",
        )
        return (y,)

    def examples(self, random, device, lhs, values, scale, zero_point, sizes, offset):
        """Returns random operands with groups of equal sizes."""
        del device
        parts = [None if a is None else random(a) for a in (values, scale, zero_point)]
        return [random(lhs), *parts, equal_sizes(lhs.shape[0], sizes), jnp.zeros_like(offset)]
