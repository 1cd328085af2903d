"""How many microseconds a norm is expected to take by each implementation: which one runs first.

A kernel over rows takes a time to start, a time for what it reads and writes, and a time for what it
does once a row. Those three, for each kernel, were fitted to kernel times on an H200; benchmarks/LAB.md
says how well the choice that follows from them does. On another GPU the same order is the best guess.
"""

import math
from dataclasses import dataclass, replace

from jaxfused.ops.norm import layer_norm_cuda
from pallas_kernels.rows import layer_norm_configs as pallas_layer_norm_configs
from pallas_kernels.rows.tiles import RowConfig, RowTiles


@dataclass(frozen=True)
class Norm:
    """A stage of a norm over [rows, features], as its kernel sees it."""

    rows: int
    features: int
    itemsize: int
    residual: bool
    subtract_mean: bool
    parameters: int
    """Vectors that the forward reads; as many sums over rows does the backward make."""
    general: bool
    """True if there is an activation that the CUDA kernels choose at run time."""
    multiprocessors: int
    segments: int = 1

    def megabytes(self, matrices: int) -> float:
        """Of so many matrices, and as many more as a residual adds."""
        return matrices * self.rows * self.features * self.itemsize / 1e6

    @property
    def is_small_for_xla(self) -> bool:
        """True if XLA's program without a mean starts sooner than a kernel that others cannot join."""
        few = self.rows <= (1 if self.features <= layer_norm_cuda.FEW_ROWS_FEATURES else 2)
        few = few or (not self.aligned and self.rows * self.features <= _SMALL)
        return few and not self.subtract_mean

    @property
    def aligned(self) -> bool:
        """True if each row starts at a multiple of 16 bytes."""
        return self.features * self.itemsize % 16 == 0

    @property
    def is_coalesced(self) -> bool:
        """True if XLA's threads, a value each, read memory as fast as vectors do."""
        return self.aligned or self.itemsize >= 4


@dataclass(frozen=True)
class _Kernel:
    """Microseconds of a kernel."""

    start: float
    per_megabyte: float
    per_thousand_rows: float = 0.0
    mean: float = 0.0
    """Of a norm with a mean, more."""

    def microseconds(self, norm: Norm, megabytes: float) -> float:
        thousands = norm.rows / 1000
        start = self.start + (self.mean if norm.subtract_mean else 0.0)
        return start + self.per_megabyte * megabytes + self.per_thousand_rows * thousands


_FORWARD = {
    "pallas, a row for each warp": _Kernel(1.4, 0.24, 0.011, mean=0.3),
    "pallas, a row for each warp, full": _Kernel(1.4, 0.267, 0.011, mean=0.3),
    "pallas, a row for each CTA": _Kernel(1.5, 0.254),
    "cuda, few rows": _Kernel(1.5, 0.55, 0.17, mean=0.3),
    "cuda, narrow": _Kernel(1.8, 0.234, 0.002, mean=1.0),
    "cuda, a row for each warp": _Kernel(1.9, 0.229, mean=0.6),
    "cuda, a row for several warps": _Kernel(2.3, 0.233, 0.1, mean=1.0),
    "cuda, odd": _Kernel(2.8, 0.33, 0.06, mean=0.4),
    "cuda, odd, few features": _Kernel(2.5, 0.33, 0.12),
    "cuda, odd, within a warp": _Kernel(2.5, 0.33, 0.18),
    "cuda, odd, by four warps": _Kernel(7.0, 0.45),
    "cuda, odd and wide": _Kernel(7.7, 2.35),
    "xla": _Kernel(1.7, 0.26),
    "xla, mean square": _Kernel(1.2, 0.32),
    "xla, small": _Kernel(1.0, 0.7),
    "xla, little": _Kernel(1.2, 0.9),
    "xla, before its gradient": _Kernel(1.8, 0.32),
    "xla, sum before its gradient": _Kernel(0.7, 0.17),
    "xla, unaligned": _Kernel(1.3, 0.421, 0.364),
    "xla, unaligned and narrow": _Kernel(1.5, 1.07),
    "xla, unaligned, within a warp": _Kernel(1.5, 0.75),
    "xla, statistics alone": _Kernel(2.0, 0.3),
}
_BACKWARD = {
    "pallas, a row for each warp": _Kernel(2.9, 0.248, 0.01, mean=0.7),
    "pallas, a row for each CTA": _Kernel(2.4, 0.246, mean=1.0),
    "pallas, beyond the registers": _Kernel(3.6, 0.31),
    "pallas, a single CTA": _Kernel(1.3, 0.264, 37.0),
    "cuda, few rows": _Kernel(2.2, 0.65, 0.45),
    "cuda, few odd rows": _Kernel(2.8, 0.5, 1.7),
    "cuda, few wide rows": _Kernel(2.2, 0.85),
    "cuda, narrow": _Kernel(7.0, 0.258, mean=0.8),
    "cuda, a row for each warp": _Kernel(8.3, 0.234, 0.012, mean=1.7),
    "cuda, a row for several warps": _Kernel(5.8, 0.24, 0.1, mean=3.6),
    "cuda, odd": _Kernel(10.0, 0.213, 0.698),
    "cuda, odd and narrow": _Kernel(7.0, 0.33, 0.12),
    "cuda, beyond shared memory": _Kernel(14.0, 0.5),
    "cuda, odd, staged": _Kernel(25.0, 0.29),
    "cuda, odd beyond shared memory": _Kernel(14.0, 1.37),
    "xla": _Kernel(8.0, 0.75),
    "xla, few wide rows": _Kernel(3.0, 0.7),
    "xla, mean square": _Kernel(3.5, 0.36),
    "xla, mean square of fewer rows": _Kernel(3.0, 0.63),
    "xla, small": _Kernel(1.0, 2.0),
    "xla, unaligned and narrow": _Kernel(11.0, 2.1),
    "xla, unaligned, within a warp": _Kernel(11.0, 0.9),
}
_GENERAL = 1.25
"""How much longer the CUDA kernels take that choose an activation at run time."""
_THIRD_VECTOR = 1.17
"""How much longer they take for a third number of each feature, which their registers have no room for:
of rows [50432, 768] and [25216, 1024] after a residual, and more where the clock is low."""
_WIDEST_FEATURES = 8192
"""A longer row fits CUDA's ring in shared memory only if both halves begin at multiples of 16 bytes."""
_WIDEST_STAGED = {2: 16384, 4: 9600}
"""The most features of misaligned rows that CUDA's backward stages, by the bytes of a value."""
_WIDEST_ODD = 4096
"""Features that start anywhere and that a forward in CUDA holds in registers."""
_FEW_ODD = 128
"""Features that start anywhere, of so few that what is done once a row counts for more."""
_WARP, _NARROW_ODD = 32, 64
"""Features that start anywhere and of which XLA has one, or at most two, in each thread of a warp."""
_WIDE_FEATURES = 2048
"""Of wider rows of 16 bits CUDA's kernel of few rows takes longer than their bytes explain."""
_FEW_WIDE_ROWS = 128
"""Up to so many rows XLA has a block of threads each for the gradient of x, and few sums over them."""
_MANY_ROWS = 6000
"""Of so many on, XLA sums over the rows in the kernel of the gradient of x."""
_SMALL = 300_000
"""Values of a matrix."""
_LITTLE = 0.3
"""Megabytes of a norm with a mean whose kernel in XLA starts sooner than others."""
_KERNELS_APART = 1.0
"""What XLA takes for a sum with a residual, mean and variance in kernels of their own."""
_RESIDUAL_XLA, _RESIDUAL_XLA_NARROW = 1.6, 0.77
"""How much longer XLA takes for what it reads where it splits a norm after a residual in two: the sum of
rows that are slow to normalise costs less than their norm."""


def forward_microseconds(implementation: str, norm: Norm, *, saves_statistics: bool) -> float:
    """Of the forward, by an implementation that can run."""
    megabytes = norm.megabytes(4 if norm.residual else 2)
    if implementation == "xla" and norm.is_small_for_xla:
        return _FORWARD["xla, small"].microseconds(norm, megabytes)
    if implementation == "xla":
        if saves_statistics and not backward_shares(norm):
            alone = forward_microseconds("xla", norm, saves_statistics=False)
            read = norm.megabytes(1)
            return alone + _FORWARD["xla, statistics alone"].microseconds(norm, read)
        if saves_statistics:
            # Its two halves share what they read.
            name = f"xla, {'sum ' if norm.residual else ''}before its gradient"
        else:
            name = _xla_forward(norm)
        if name == "xla" and norm.features <= 2048:
            # It computes with columns up to a power of two.
            megabytes *= math.sqrt(_power_of_two(norm.features) / norm.features)
        if name == "xla" and not norm.residual:
            if not norm.subtract_mean:
                name = "xla, mean square"
            elif norm.rows > 1 and megabytes <= _LITTLE:
                name = "xla, little"
        if norm.residual and name != "xla, sum before its gradient":
            megabytes *= _RESIDUAL_XLA_NARROW if _is_narrow_for_xla(norm) else _RESIDUAL_XLA
        apart = _KERNELS_APART if norm.residual and norm.subtract_mean else 0.0
        if apart and norm.rows == 1:
            name = "xla, small"
        return apart + _FORWARD[name].microseconds(norm, megabytes)
    matrices = 2 if norm.residual else 1
    shape = (norm.rows, norm.features, norm.itemsize, matrices, norm.parameters)
    if implementation == "pallas":
        config = pallas_layer_norm_configs.forward_candidates(*shape)[0]
        name = _pallas(config)
        if config.row_per_warp and config.slots == 3:
            # Four tiles for each CTA would not fit.
            name += ", full"
        return _FORWARD[name].microseconds(norm, megabytes)
    few_rows = layer_norm_cuda.forward_candidates(*shape)[0].few_rows
    name = _cuda(norm, few_rows)
    if name == "cuda, odd" and norm.features <= _FEW_ODD:
        name = f"cuda, odd, {'within a warp' if norm.features <= _WARP else 'few features'}"
    elif name == "cuda, odd" and norm.features > _WIDEST_ODD // 2:
        name = f"cuda, odd{', by four warps' if norm.features <= _WIDEST_ODD else ' and wide'}"
    microseconds = _FORWARD[name].microseconds(norm, megabytes)
    microseconds *= _THIRD_VECTOR if norm.parameters > 2 and not few_rows else 1.0
    return microseconds * (_GENERAL if norm.general else 1.0)


def backward_microseconds(implementation: str, norm: Norm) -> float:
    """Of the backward with the gradients of parameters, by an implementation that can run."""
    megabytes = norm.megabytes(4 if norm.residual else 3)
    if implementation == "xla":
        name = "xla"
        if norm.is_small_for_xla:
            name = "xla, small"
        elif norm.features > _WIDEST_FEATURES and norm.rows <= _FEW_WIDE_ROWS:
            name = "xla, few wide rows"
        elif norm.subtract_mean and _is_narrow_for_xla(norm):
            # It is slow enough that one more array to read is hidden.
            name, megabytes = _xla_forward(norm), norm.megabytes(3)
        elif norm.is_coalesced and not norm.subtract_mean:
            # With many rows the sums over them are made by the kernel of the gradient of x.
            many = norm.rows >= _MANY_ROWS or (norm.features <= 128 and norm.rows >= 1024)
            name = "xla, mean square" if many else "xla, mean square of fewer rows"
            if many and norm.features <= 2048:
                megabytes *= _power_of_two(norm.features) / norm.features
        return _BACKWARD[name].microseconds(norm, megabytes)
    matrices = 3 if norm.residual else 2
    shape = (norm.rows, norm.features, norm.itemsize, matrices, norm.parameters)
    if implementation == "pallas":
        config = pallas_layer_norm_configs.backward_candidates(*shape)[0]
        tiles = RowTiles.plan(config, norm.rows, norm.features, norm.segments, norm.multiprocessors)
        if tiles.ctas == norm.segments:
            one = replace(norm, rows=norm.rows // norm.segments)
            return _BACKWARD["pallas, a single CTA"].microseconds(one, megabytes)
        # The sums of each CTA, in float32, are written and read.
        megabytes += 2 * norm.parameters * tiles.ctas * norm.features * 4 / 1e6
        return _BACKWARD[_pallas(config)].microseconds(norm, megabytes)
    few_rows = layer_norm_cuda.backward_candidates(*shape)[0].few_rows
    name = _cuda_backward(norm, few_rows)
    if few_rows and norm.features > _WIDE_FEATURES and norm.itemsize == 2:
        name = "cuda, few wide rows"
    if norm.features > _WIDEST_FEATURES and norm.features * norm.itemsize % 32:
        name = f"cuda, {'' if norm.aligned else 'odd '}beyond shared memory"
        if not norm.aligned and norm.features <= _WIDEST_STAGED[norm.itemsize]:
            name = "cuda, odd, staged"
    microseconds = _BACKWARD[name].microseconds(norm, megabytes)
    return microseconds * (_GENERAL if norm.general else 1.0)


def backward_shares(norm: Norm) -> bool:
    """Whether XLA makes the backward too, in kernels that it shares with a forward of its own."""
    return not norm.subtract_mean and _backward_is_xla(norm)


def _backward_is_xla(norm: Norm) -> bool:
    """Returns whether no kernel is expected to be faster in the backward."""
    kernels = ["cuda"]
    matrices = 3 if norm.residual else 2
    if pallas_layer_norm_configs.backward_candidates(
        norm.rows, norm.features, norm.itemsize, matrices, norm.parameters
    ):
        kernels.append("pallas")
    fastest = min(backward_microseconds(kernel, norm) for kernel in kernels)
    return backward_microseconds("xla", norm) < fastest


def _pallas(config: RowConfig) -> str:
    """The name of the kernel of a config."""
    if not config.keeps_tile:
        return "pallas, beyond the registers"
    return f"pallas, a row for each {'warp' if config.row_per_warp else 'CTA'}"


def _xla_forward(norm: Norm) -> str:
    """The name of XLA's forward, which reads rows in vectors where they begin at multiples of four."""
    if norm.is_coalesced or norm.features % 4 == 0:
        return "xla"
    if norm.features <= _WARP:
        return "xla, unaligned, within a warp"
    return f"xla, unaligned{' and narrow' if norm.features <= _NARROW_ODD else ''}"


def _is_narrow_for_xla(norm: Norm) -> bool:
    return _xla_forward(norm) != "xla" and norm.features <= _NARROW_ODD


def _cuda(norm: Norm, few_rows: bool) -> str:
    """The name of the kernel that runs a norm."""
    if few_rows:
        return "cuda, few rows"
    if not norm.aligned:
        return "cuda, odd"
    if norm.features <= 256:
        return "cuda, narrow"
    return f"cuda, a row for {'each warp' if norm.features <= 1024 else 'several warps'}"


def _cuda_backward(norm: Norm, few_rows: bool) -> str:
    """The same of a backward, where odd rows have a kernel of their own while they are narrow."""
    if few_rows and not norm.aligned:
        return "cuda, few odd rows"
    name = _cuda(norm, few_rows)
    return f"{name} and narrow" if name == "cuda, odd" and norm.features <= 512 else name


def _power_of_two(value: int) -> int:
    """The first from `value` on."""
    return 1 << (value - 1).bit_length()
