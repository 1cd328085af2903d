"""Stages of linear_softmax_cross_entropy: logits of one chunk of rows at a time, and their gradient."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfused import dispatch
from jaxfused.ops.linear import linear_cuda
from jaxfused.ops.loss import cross_entropy_cuda, cross_entropy_xla
from jaxfused.ops.loss.cross_entropy_stages import unpacked
from jaxfused.ops.loss.cross_entropy_xla import Options, Pulls
from jaxfused.runtime.estimate import kernels_first
from jaxfused.runtime.runner import ROWS, Axes, Results, batched_rows

_IN_CHUNKS = "a kernel writes the loss and the gradient of a chunk of logits in one pass"


@dataclass(frozen=True)
class Constants:
    """Static arguments of a call of linear_softmax_cross_entropy."""

    options: Options
    chunk_size: int | None
    sum_dtype: Any
    """Dtype of the sums of w's gradient; None for w's dtype if the chunks are few (`_NARROW_CHUNKS`)."""


_CHUNK_ROWS = 4096
"""Least number of rows of a default chunk if w's gradient is summed in float32. With fewer rows, the
sums would be read and written more often, and the products would be too short to hide that."""
_NARROW_ROWS = 2048
"""Least number of rows of a default chunk if w's gradient is summed in w's 16-bit dtype."""
_NARROW_CHUNKS = 3
"""Largest number of default chunks of 16-bit sums. The error of so few roundings is well below the
tolerance of tests/support, if the terms of different chunks do not cancel."""
_TILE_ROWS, _TILE_COLUMNS = 128, 256
"""Rows and columns of a product's tile in cuBLAS."""
_UNROLLED_CHUNKS = 8
"""Largest number of chunks that the program unrolls; more chunks run as a loop."""


@dataclass(frozen=True)
class Forward:
    """Computes (statistics [N, 5], dx, dw, dbias) from x [N, D], w, bias and classes, by chunks.

    Gradients are those of the sum of coefficients [N] * losses; without coefficients they are None.
    """

    constants: Constants

    @property
    def name(self) -> str:
        return "linear_softmax_cross_entropy forward"

    def axes(self, x, w, bias, classes, coefficients) -> Axes:
        row = ROWS + "d"
        results = (row, "dv", None if bias is None else "v")
        return Axes(
            (row, "dv", "v", ROWS, ROWS),
            (ROWS + "s", *((None,) * 3 if coefficients is None else results)),
            whole="dvs",
        )

    def why_not(self, device, x, w, *others) -> Mapping[str, str | None]:
        return _why_not(device, x, w)

    def run(self, implementation, device, x, w, bias, classes, coefficients) -> Results:
        options = self.constants.options

        def step(layer: _Layer, chunk, sums):
            x, classes, coefficients = chunk
            logits = layer.logits(x)
            dlogits, statistics = cross_entropy_cuda.forward(
                logits,
                classes,
                None,
                coefficients,
                label_smoothing=options.label_smoothing,
                z_loss=options.z_loss,
                soft_cap=options.logits_soft_cap,
                in_place=True,
            )
            if dlogits is None:
                return None, (statistics, None)
            dx, sums = layer.gradients(x, dlogits, sums)
            return sums, (statistics, dx)

        def reference_step(layer: _Layer, chunk, sums):
            x, classes, coefficients = chunk
            logits = layer.logits(x)
            statistics = cross_entropy_xla.row_statistics(logits, classes, options)
            packed = jnp.stack(statistics, axis=-1)
            if coefficients is None:
                return None, (packed, None)
            pulls = cross_entropy_xla.pulls_of(statistics, coefficients, w.shape[1], options)
            dlogits = cross_entropy_xla.row_gradients(
                logits, classes, statistics, pulls, options.logits_soft_cap
            )
            dx, sums = layer.gradients(x, dlogits.astype(logits.dtype), sums)
            return sums, (packed, dx)

        layer = _Layer(w, bias, self.constants, len(x), x.dtype, device, implementation)
        steps = step if implementation == "cuda" else reference_step
        sums, (statistics, dx) = layer.over_chunks(steps, (x, classes, coefficients))
        dw, dbias = (None, None) if sums is None else layer.finished(sums)
        return statistics, dx, dw, dbias

    estimate = kernels_first(_IN_CHUNKS)
    batched = batched_rows


@dataclass(frozen=True)
class Backward:
    """Computes (dx, dw, dbias) from pulls [N, 3], the coefficients of each row's gradient of logits."""

    constants: Constants

    @property
    def name(self) -> str:
        return "linear_softmax_cross_entropy backward"

    def axes(self, x, w, bias, classes, statistics, pulls) -> Axes:
        row = ROWS + "d"
        return Axes(
            (row, "dv", "v", ROWS, ROWS + "s", ROWS + "p"),
            (row, "dv", None if bias is None else "v"),
            whole="dvsp",
        )

    def why_not(self, device, x, w, *others) -> Mapping[str, str | None]:
        return _why_not(device, x, w)

    def run(self, implementation, device, x, w, bias, classes, statistics, pulls) -> Results:
        cap = self.constants.options.logits_soft_cap

        def step(layer: _Layer, chunk, sums):
            x, classes, statistics, pulls = chunk
            logits = layer.logits(x)
            if implementation == "cuda":
                dlogits = cross_entropy_cuda.backward(
                    logits, classes, None, statistics, pulls, soft_cap=cap, in_place=True
                )
            else:
                dlogits = cross_entropy_xla.row_gradients(
                    logits,
                    classes,
                    unpacked(statistics),
                    Pulls(*jnp.unstack(pulls, axis=-1)),
                    cap,
                ).astype(logits.dtype)
            dx, sums = layer.gradients(x, dlogits, sums)
            return sums, (dx,)

        layer = _Layer(w, bias, self.constants, len(x), x.dtype, device, implementation)
        sums, (dx,) = layer.over_chunks(step, (x, classes, statistics, pulls))
        return dx, *layer.finished(sums)

    estimate = kernels_first(_IN_CHUNKS)
    batched = batched_rows


def _why_not(device, x, w) -> dict[str, str | None]:
    """Returns why each implementation cannot run x [N, D] and w [D, V], forward or backward."""
    reason = cross_entropy_cuda.why_unsupported(
        compute_capability=device.compute_capability,
        rows=x.shape[0],
        features=w.shape[1],
        dtype=x.dtype,
    )
    return {"cuda": reason, "xla": None}


class _Sums(NamedTuple):
    """Gradients of w [D, V] and bias [V] (or None), summed over the chunks so far."""

    dw: jax.Array
    dbias: jax.Array | None


@dataclass(frozen=True)
class _Layer:
    """Products of a linear layer whose logits exist for one chunk of rows at a time."""

    w: jax.Array
    bias: jax.Array | None
    constants: Constants
    rows: int
    dtype: Any
    """Dtype of x and of the products."""
    device: dispatch.Device
    implementation: str

    def logits(self, x: jax.Array) -> jax.Array:
        """Returns x @ w + bias in x's dtype. In this form XLA's product adds the bias."""
        w = self.w.astype(x.dtype)
        logits = jnp.einsum("nd,dv->nv", x, w, preferred_element_type=x.dtype)
        return logits if self.bias is None else logits + self.bias.astype(x.dtype)

    def gradients(
        self, x: jax.Array, dlogits: jax.Array, sums: _Sums | None
    ) -> tuple[jax.Array, _Sums]:
        """Returns dx [n, D] for a chunk's x [n, D] and dlogits [n, V], and the sums plus its terms.

        `sums` is None for the first chunk.
        """
        w = self.w.astype(x.dtype)
        dx = jnp.einsum("nv,dv->nd", dlogits, w, preferred_element_type=x.dtype)
        dbias = None
        if self.bias is not None:
            dbias = jnp.sum(dlogits.astype(jnp.float32), axis=0)
        if sums is None:
            # The first chunk's product rounds dw to x's dtype if the sums are 16-bit or there is
            # one chunk.
            rounds = self._is_narrow() or self._chunk_rows() >= self.rows
            dtype = x.dtype if rounds and self.w.dtype == x.dtype else jnp.float32
            dw = jnp.einsum("nd,nv->dv", x, dlogits, preferred_element_type=dtype)
            return dx, _Sums(dw, dbias)
        if self.implementation == "cuda":
            dw = linear_cuda.add_weight_gradient(sums.dw, x, dlogits)
        else:
            dw = sums.dw + jnp.einsum("nd,nv->dv", x, dlogits, preferred_element_type=sums.dw.dtype)
        if dbias is not None and sums.dbias is not None:
            dbias = sums.dbias + dbias
        return dx, _Sums(dw, dbias)

    def finished(self, sums: _Sums) -> tuple[jax.Array, jax.Array | None]:
        """Returns dw in w's dtype and dbias in float32."""
        return sums.dw.astype(self.w.dtype), sums.dbias

    def over_chunks(self, step: Callable[..., Any], rows: tuple[Any, ...]) -> Any:
        """Calls `step(layer, chunk, sums)` for each chunk of the arrays `rows`, each [N, ...].

        A step returns its sums and the chunk's results. Returns the last sums, and all chunks'
        results concatenated along their rows.
        """
        size = self._chunk_rows()
        whole = self.rows // size

        def chunk_at(start: int) -> Any:
            return jax.tree.map(lambda a: a[start : start + size], rows)

        sums, part = step(self, chunk_at(0), None)
        parts, done = [part], size
        if whole > _UNROLLED_CHUNKS:
            middle = jax.tree.map(
                lambda a: a[size : whole * size].reshape(whole - 1, size, *a.shape[1:]), rows
            )
            sums, part = lax.scan(lambda sums, chunk: step(self, chunk, sums), sums, middle)
            parts.append(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), part))
            done = whole * size
        for start in range(done, self.rows, size):
            # The barrier lets the next chunk's logits reuse the memory of the last chunk's logits.
            chunk, sums, parts[-1] = lax.optimization_barrier((chunk_at(start), sums, parts[-1]))
            sums, part = step(self, chunk, sums)
            parts.append(part)
        return sums, jax.tree.map(lambda *a: a[0] if len(a) == 1 else jnp.concatenate(a), *parts)

    def _chunk_rows(self) -> int:
        """Returns the number of rows of a chunk; the last chunk may have fewer."""
        if self.rows == 0:
            return 1
        if self.constants.chunk_size is not None:
            return min(self.constants.chunk_size, self.rows)
        most = self._most_rows()
        if not self._is_narrow():
            even = math.ceil(self.rows / math.ceil(self.rows / most))
            return min(self.rows, math.ceil(even / _TILE_ROWS) * _TILE_ROWS)
        wanted = min(max(math.ceil(self.rows / _NARROW_CHUNKS), _NARROW_ROWS), most)
        fewest = math.ceil(wanted / _TILE_ROWS) * _TILE_ROWS
        # The chunk's rows are those, from `fewest` to a third above `wanted`, whose dgrad takes the
        # fewest waves.
        sizes = range(fewest, min(self.rows, 4 * wanted // 3 + 1), _TILE_ROWS)
        return min(sizes, key=self._waves, default=min(fewest, self.rows))

    def _is_narrow(self) -> bool:
        """Returns whether w's gradient is summed over chunks in its own 16-bit dtype."""
        if not self.w.dtype == self.dtype != jnp.float32:
            return False
        if self.constants.sum_dtype is not None:
            return self.constants.sum_dtype == self.dtype
        return self.rows <= _NARROW_CHUNKS * (self.constants.chunk_size or self._most_rows())

    def _most_rows(self) -> int:
        """Returns how many rows of logits take as many bytes as a float32 dw; at least _CHUNK_ROWS."""
        return max(_CHUNK_ROWS, 4 * self.w.shape[0] // jnp.dtype(self.dtype).itemsize)

    def _waves(self, size: int) -> int:
        """Returns the waves of tiles that dgrad takes, summed over all chunks of `size` rows.

        dgrad is the product with the fewest tiles.
        """

        def waves(rows: int) -> int:
            tiles = math.ceil(rows / _TILE_ROWS) * math.ceil(self.w.shape[0] / _TILE_COLUMNS)
            return math.ceil(tiles / (self.device.multiprocessors or 1))

        return self.rows // size * waves(size) + waves(self.rows % size)
