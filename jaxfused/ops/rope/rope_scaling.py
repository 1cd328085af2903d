"""Scalings of rope's frequencies for sequences longer than those of the training."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class RopeScaling:
    r"""Rotation rates of the pairs: here unscaled, theta^(-2 i / rotary_dim) a position for pair i.

    The classes derived from it say how a model trained on short sequences gets the angles of long
    ones; their formulas are those of Hugging Face transformers' modeling_rope_utils.py.

    Source: Su et al., "RoFormer", 2021, https://arxiv.org/abs/2104.09864
    """

    positive: ClassVar[tuple[str, ...]] = ()
    """Fields that must be positive numbers, if they are not None."""

    def __post_init__(self) -> None:
        for name in self.positive:
            value = getattr(self, name)
            if value is not None and not _is_positive(value):
                raise ValueError(
                    f"{type(self).__name__}: {name} is {value!r}, of which there are no frequencies;"
                    " pass a positive, finite number."
                )

    def frequencies(self, rotary_dim: int, theta: float) -> np.ndarray:
        """Radians per position of each pair, [rotary_dim / 2], fastest first."""
        return theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)

    def attention_factor(self) -> float:
        """Factor by which cos and sin are multiplied."""
        return 1.0

    @property
    def depends_on_length(self) -> bool:
        """True if the frequencies depend on a sequence's length; `at_length` then computes them."""
        return False

    def at_length(self, rotary_dim: int, theta: float, length: jax.Array) -> jax.Array:
        """Returns the frequencies for sequences of `length` positions, if they depend on the length."""
        del length
        return jnp.asarray(self.frequencies(rotary_dim, theta), jnp.float32)


@dataclass(frozen=True)
class LinearRope(RopeScaling):
    """Position interpolation: every frequency is divided by `factor`.

    Source: Chen et al., "Extending Context Window of Large Language Models via Positional
    Interpolation", 2023, https://arxiv.org/abs/2306.15595
    """

    positive = ("factor",)

    factor: float

    def frequencies(self, rotary_dim: int, theta: float) -> np.ndarray:
        return super().frequencies(rotary_dim, theta) / self.factor


@dataclass(frozen=True)
class NTKRope(RopeScaling):
    """NTK-aware: theta becomes theta * factor^(rotary_dim / (rotary_dim - 2)).

    The fastest pair keeps its frequency, and the slowest pair's is divided by `factor`. The form
    whose factor grows with the sequence is `DynamicNTKRope`.

    Source: bloc97, 2023, as in Peng et al., "YaRN", section 3.1, https://arxiv.org/abs/2309.00071
    """

    positive = ("factor",)

    factor: float

    def frequencies(self, rotary_dim: int, theta: float) -> np.ndarray:
        _check_several_pairs(self, rotary_dim)
        theta = theta * self.factor ** (rotary_dim / (rotary_dim - 2))
        return super().frequencies(rotary_dim, theta)


@dataclass(frozen=True)
class DynamicNTKRope(RopeScaling):
    """`NTKRope` with factor L / trained_length * factor - (factor - 1) for L positions.

    Up to `trained_length` positions nothing is scaled. `length` is L; None takes 1 + the largest
    position of a call, of all its rows, so that a decoder's frequencies change from step to step, and
    its cached keys were rotated by earlier ones. Pass a length to prevent that.

    Source: emozilla and bloc97, 2023, as in Peng et al., "YaRN", section 3.3,
    https://arxiv.org/abs/2309.00071
    """

    positive = ("factor", "trained_length", "length")

    factor: float
    trained_length: int
    length: int | None = None

    @property
    def depends_on_length(self) -> bool:
        return self.length is None

    def frequencies(self, rotary_dim: int, theta: float) -> np.ndarray:
        length = max(self.trained_length, self.length or 0)
        growth = self.factor * length / self.trained_length - (self.factor - 1.0)
        return NTKRope(growth).frequencies(rotary_dim, theta)

    def at_length(self, rotary_dim: int, theta: float, length: jax.Array) -> jax.Array:
        _check_several_pairs(self, rotary_dim)
        ratio = jnp.maximum(length / self.trained_length, 1.0)
        growth = self.factor * ratio - (self.factor - 1.0)
        exponents = -np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim - 2)
        unscaled = jnp.asarray(RopeScaling.frequencies(self, rotary_dim, theta), jnp.float32)
        return unscaled * growth**exponents


@dataclass(frozen=True)
class YarnRope(RopeScaling):
    """YaRN: pairs of many turns within the trained length keep their frequency, others are slowed.

    A pair that turns more than `beta_fast` times within `trained_length` keeps its frequency; that of
    one that turns less than `beta_slow` times is divided by `factor`; between the two a linear ramp
    blends. The ramp's ends are rounded outwards to whole pairs; with `truncate=False`, as in gpt-oss,
    they stay fractions.

    cos and sin are multiplied by `attention`, by default m(1) = 0.1 ln(factor) + 1, or where
    `mscale` and `mscale_all_dim` are both set, as DeepSeek's are, by m(mscale) / m(mscale_all_dim)
    with m(s) = 0.1 s ln(factor) + 1.

    Source: Peng et al., "YaRN", 2023, https://arxiv.org/abs/2309.00071
    """

    positive = ("factor", "trained_length", "beta_fast", "beta_slow", "attention")

    factor: float
    trained_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention: float | None = None
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_order(self, "beta_slow", "beta_fast")

    def frequencies(self, rotary_dim: int, theta: float) -> np.ndarray:
        frequencies = super().frequencies(rotary_dim, theta)

        def pair_with_turns(turns: float) -> float:
            wavelength = self.trained_length / turns
            return rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_with_turns(self.beta_fast), pair_with_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        pairs = np.arange(rotary_dim // 2)
        # The published code replaces a ramp of width 0 by one of 0.001.
        interpolated = np.clip((pairs - low) / (high - low or 0.001), 0.0, 1.0)
        return frequencies * (1.0 - interpolated + interpolated / self.factor)

    def attention_factor(self) -> float:
        if self.attention is not None:
            return self.attention
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def logit_factor(self) -> float:
        """m(mscale_all_dim)^2: DeepSeek V2 and V3 multiply the scale of their attention by it."""
        return self._magnitude(self.mscale_all_dim or 0.0) ** 2

    def _magnitude(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0


@dataclass(frozen=True)
class Llama3Rope(RopeScaling):
    """Llama 3.1's scaling: YaRN's idea with a ramp over the turns within the trained length.

    The frequency of a pair that turns more than `high_freq_factor` times within `trained_length` is
    kept, that of one that turns less than `low_freq_factor` times is divided by `factor`, with a linear
    ramp between.

    Source: Llama Team, "The Llama 3 Herd of Models", 2024, https://arxiv.org/abs/2407.21783, and
    the function apply_scaling of its published code.
    """

    positive = ("factor", "trained_length", "low_freq_factor", "high_freq_factor")

    factor: float = 8.0
    trained_length: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_order(self, "low_freq_factor", "high_freq_factor")

    def frequencies(self, rotary_dim: int, theta: float) -> np.ndarray:
        frequencies = super().frequencies(rotary_dim, theta)
        turns = self.trained_length * frequencies / (2 * math.pi)
        # In Llama 4 Scout both factors are 1: a ramp of width 0, which is a step.
        width = self.high_freq_factor - self.low_freq_factor or 1e-9
        kept = np.clip((turns - self.low_freq_factor) / width, 0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / self.factor)


@dataclass(frozen=True)
class LongRope(RopeScaling):
    """LongRoPE, used by Phi-3 and Phi-4: each pair's frequency is divided by a factor of its own.

    Up to `trained_length` positions these are `short_factor`, beyond it `long_factor`. `length` is the
    number of positions; None takes 1 + the largest position of a call, of all its rows, so that a
    decoder beyond `trained_length` rotates new keys by other angles than its cached keys. Pass a length
    to prevent that. cos and sin are multiplied by `attention`, by default sqrt(1 + ln(factor) /
    ln(trained_length)), at any length.

    Source: Ding et al., "LongRoPE", 2024, https://arxiv.org/abs/2402.13753
    """

    positive = ("trained_length", "factor", "attention", "length")

    short_factor: tuple[float, ...]
    """Factors up to `trained_length`, [rotary_dim / 2]."""
    long_factor: tuple[float, ...]
    """Factors beyond `trained_length`, [rotary_dim / 2]."""
    trained_length: int
    factor: float = 1.0
    """Ratio of the longest sequence's length to the trained length."""
    attention: float | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # Modules need hashable attributes, so lists become tuples.
        for name in ("short_factor", "long_factor"):
            factors = tuple(float(factor) for factor in getattr(self, name))
            if not all(map(_is_positive, factors)):
                raise ValueError(
                    f"LongRope: {name} is {factors}, but frequencies are divided by its numbers; pass"
                    " positive, finite ones."
                )
            object.__setattr__(self, name, factors)

    @property
    def depends_on_length(self) -> bool:
        return self.length is None

    def frequencies(self, rotary_dim: int, theta: float) -> np.ndarray:
        is_long = self.length is not None and self.length > self.trained_length
        return self._divided(rotary_dim, theta, "long_factor" if is_long else "short_factor")

    def at_length(self, rotary_dim: int, theta: float, length: jax.Array) -> jax.Array:
        short, long = (
            jnp.asarray(self._divided(rotary_dim, theta, name), jnp.float32)
            for name in ("short_factor", "long_factor")
        )
        return jnp.where(length > self.trained_length, long, short)

    def attention_factor(self) -> float:
        if self.attention is not None:
            return self.attention
        if self.factor <= 1.0:
            return 1.0
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.trained_length))

    def _divided(self, rotary_dim: int, theta: float, name: str) -> np.ndarray:
        factors = getattr(self, name)
        if len(factors) != rotary_dim // 2:
            raise ValueError(
                f"LongRope: {name} has {len(factors)} numbers, but {rotary_dim} features that rotate"
                f" are {rotary_dim // 2} pairs; pass one number for each pair."
            )
        return super().frequencies(rotary_dim, theta) / np.asarray(factors)


@dataclass(frozen=True)
class ProportionalRope(RopeScaling):
    """The scaling of Gemma 4 and LFM 3: pairs over the whole head, of which only the fastest turn.

    Pair i turns by theta^(-2 i / rotary_dim) / factor where i < fraction * rotary_dim / 2, and the
    others not at all. `rotary_dim` is the whole head here, unlike in other rotations of a part of the
    head.

    Source: `_compute_proportional_rope_parameters` of transformers 5.23.0.
    """

    positive = ("fraction", "factor")

    fraction: float
    factor: float = 1.0

    def frequencies(self, rotary_dim: int, theta: float) -> np.ndarray:
        turns = np.arange(rotary_dim // 2) < int(self.fraction * rotary_dim // 2)
        return np.where(turns, super().frequencies(rotary_dim, theta) / self.factor, 0.0)


def _is_positive(value: Any) -> bool:
    """Returns whether value is a positive, finite number of Python or NumPy, or such an array."""
    if isinstance(value, str):
        return False
    try:
        return 0.0 < float(value) < math.inf
    except TypeError:
        return False


def _check_order(scaling: RopeScaling, slow: str, fast: str) -> None:
    """Checks that field `slow` <= field `fast`; pairs that turn more often than `fast` are unscaled."""
    slowest, fastest = getattr(scaling, slow), getattr(scaling, fast)
    if slowest > fastest:
        raise ValueError(
            f"{type(scaling).__name__}: {slow} is {slowest} and {fast} {fastest}, but pairs that turn"
            f" often are those that are kept; pass {slow} <= {fast}."
        )


def _check_several_pairs(scaling: RopeScaling, rotary_dim: int) -> None:
    if rotary_dim <= 2:
        raise ValueError(
            f"{type(scaling).__name__}: rotary_dim is {rotary_dim}, but between the fastest and the"
            " slowest pair frequencies are scaled; pass 4 or more, or no scaling for one pair."
        )
