"""Operations of `ragged_dot` and `ragged_mlp`: grouped products, and their gradients of weights."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.ops.grouped import ragged_dot_xla, ragged_mlp_xla
from jaxfused.ops.grouped.ragged_dot_xla import Options
from jaxfused.runtime.estimate import kernels_first
from jaxfused.runtime.runner import Axes, Results
from jaxfused.runtime.vmap import OneByOne
from pallas_kernels.gemm import grouped, grouped_mlp, grouped_weight_gradient
from pallas_kernels.gemm.cost import WeightWork

_GROUPS_AT_ONCE = "a kernel multiplies the rows of all groups in one launch"


def equal_sizes(rows: int, sizes: Any) -> jax.Array:
    """Returns group sizes, each rows // groups, in the shape [groups] and dtype of `sizes`."""
    return jnp.full(sizes.shape, rows // sizes.shape[0], sizes.dtype)


class _Grouped(OneByOne):
    """Base of operations that one grouped kernel runs; group sizes and offset are the last operands."""

    estimate = kernels_first(_GROUPS_AT_ONCE)

    @property
    def results(self) -> Sequence[str]:
        """Names of the kernel's outputs, in the order in which `run` returns them."""
        raise NotImplementedError

    def product(self, *operands: Any) -> grouped.GroupedProduct:
        """Returns the kernel's product for these operands, which may be arrays or only their shapes."""
        raise NotImplementedError

    def in_xla(self, *operands: Any) -> Results:
        """Computes the results in XLA."""
        raise NotImplementedError

    def why_not(self, device, *operands) -> Mapping[str, str | None]:
        product = self.product(*operands)
        first, second = product.a[0], product.b[0]
        features = {"lhs": first.shape[1], "the result": product.work.n}
        reason = grouped.why_unsupported(
            compute_capability=device.compute_capability,
            dtypes={"lhs": first.dtype, "rhs": second.dtype},
            features=features,
            out_dtype=jnp.dtype(next(iter(product.outputs.values()))),
            rows=first.shape[0],
            groups=second.shape[0],
        )
        return {"pallas": reason, "xla": None}

    def configs(self, implementation, device, *operands) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        return self.product(*operands).candidates(device.multiprocessors)

    def run(self, implementation, device, *operands, config: Any = None) -> Results:
        if implementation == "xla":
            return self.in_xla(*operands)
        *_, sizes, offset = operands
        found = self.product(*operands).run(
            sizes, offset.reshape(()), multiprocessors=device.multiprocessors, config=config
        )
        return tuple(found.get(name) for name in self.results)

    def examples(self, random, device, *operands):
        """Returns random operands with groups of equal sizes."""
        del device
        *arrays, sizes, offset = operands
        rows = arrays[0].shape[0]
        drawn = [None if a is None else random(a) for a in arrays]
        return [*drawn, equal_sizes(rows, sizes), jnp.zeros_like(offset)]


@dataclass(frozen=True)
class GroupedProduct(_Grouped):
    """Computes (y [M, N],): the rows of each group of lhs [M, K] times the group's matrix of rhs."""

    name: str
    options: Options

    results = ("y",)

    def axes(self, *operands) -> Axes:
        del operands
        rhs = "enk" if self.options.transpose_rhs else "ekn"
        return Axes(("mk", rhs, "g", "o"), ("mn",), whole="mego", parts="k")

    def on_parts(self, names, call, *operands) -> Results:
        """Sums, in float32, the products of devices that each hold a shard of the summed features."""
        wide = replace(self, options=replace(self.options, out_dtype=jnp.dtype(jnp.float32)))
        [y] = call(wide, *operands)
        return (jax.lax.psum(y, tuple(names)).astype(self.options.out_dtype),)

    def product(self, lhs, rhs, sizes, offset) -> grouped.GroupedProduct:
        del sizes, offset
        return grouped.GroupedProduct(
            name="ragged_dot",
            a=(lhs,),
            b=(rhs,),
            b_transposed=self.options.transpose_rhs,
            epilogue=lambda y: {"y": y},
            outputs={"y": self.options.out_dtype},
        )

    def in_xla(self, *operands) -> Results:
        return (ragged_dot_xla.rows_product(self.options, *operands),)


@dataclass(frozen=True)
class HiddenLayer(_Grouped):
    """Computes (h, *preactivations) [M, F] of a perceptron from x [M, D], its first weights and groups.

    With a gate, h = activation(gate) * up; the weights of gate and up may be one concatenated array.
    """

    options: ragged_mlp_xla.Options
    saves: bool
    """True to return the preactivations; else they are None."""

    @property
    def name(self) -> str:
        return f"{self.options.op} hidden layer"

    @property
    def results(self) -> Sequence[str]:
        return ("h", *(("gate", "up") if self.options.gated else ("z", None)))

    def axes(self, x, w_first, w_second, sizes, offset) -> Axes:
        del x, w_first, sizes, offset
        of_weights = "edf" if not self.options.transposed else "efd"
        hidden = "" if w_second is None and self.options.gated else "f"
        saved = "mf" if self.saves else None
        return Axes(
            ("md", of_weights if hidden else of_weights.replace("f", "j"), of_weights, "g", "o"),
            ("mf", saved, saved if self.options.gated else None),
            whole="mdegjo" if hidden else "mdefgjo",
        )

    def product(self, x, w_first, w_second, sizes, offset) -> grouped.GroupedProduct:
        del sizes, offset
        return grouped_mlp.hidden_layer(
            x,
            tuple(w for w in (w_first, w_second) if w is not None),
            activation=self.options.activation,
            gated=self.options.gated,
            transposed=self.options.transposed,
            saves=self.saves,
        )

    def in_xla(self, *operands) -> Results:
        h, *saved = ragged_mlp_xla.hidden_layer(self.options, *operands)
        return (h, *(saved if self.saves else (None, None)))


@dataclass(frozen=True)
class InputGradient(_Grouped):
    """Computes (dx [M, D],), the sum of two dz [M, F] times the transposes of their weights."""

    options: ragged_mlp_xla.Options
    out_dtype: Any

    results = ("dx",)

    @property
    def name(self) -> str:
        return f"{self.options.op} input gradient"

    def axes(self, *operands) -> Axes:
        del operands
        weights = "efd" if self.options.transposed else "edf"
        return Axes(("mf", "mf", weights, weights, "g", "o"), ("md",), whole="mdego", parts="f")

    def on_parts(self, names, call, *operands) -> Results:
        """Sums, in float32, the products of devices that each hold a shard of the hidden features."""
        [dx] = call(replace(self, out_dtype=jnp.dtype(jnp.float32)), *operands)
        return (jax.lax.psum(dx, tuple(names)).astype(self.out_dtype),)

    def product(self, dgate, dup, w_gate, w_up, sizes, offset) -> grouped.GroupedProduct:
        del sizes, offset
        return grouped_mlp.input_gradient(
            (dgate, dup),
            (w_gate, w_up),
            transposed=self.options.transposed,
            out_dtype=self.out_dtype,
        )

    def in_xla(self, *operands) -> Results:
        return (ragged_mlp_xla.input_gradient(self.options, self.out_dtype, *operands),)


@dataclass(frozen=True)
class GroupedWeights(OneByOne):
    """Computes (dw [E, K, N],): x^T @ dy over the rows of each group, of x [M, K] and dy [M, N]."""

    op: str
    options: Options
    groups: int

    @property
    def name(self) -> str:
        return f"{self.op} drhs"

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
            name=f"{self.op}_drhs",
        )
        return (dw,)

    def examples(self, random, device, x, dy, sizes, offset):
        """Returns random operands with groups of equal sizes."""
        del device
        return [random(x), random(dy), equal_sizes(x.shape[0], sizes), jnp.zeros_like(offset)]
