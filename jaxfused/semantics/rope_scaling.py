"""How rope's frequencies are scaled for sequences longer than those of the training."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RopeScaling:
    r"""How fast the pairs rotate: here unscaled, pair i by theta^(-2 i / rotary_dim) a position.

    The classes derived from it say how a model trained on short sequences gets the angles of long
    ones; their formulas are those of Hugging Face transformers' modeling_rope_utils.py.

    Source: Su et al., "RoFormer", 2021, https://arxiv.org/abs/2104.09864
    """

    def frequencies(self, rotary_dim: int, theta: float) -> np.ndarray:
        """Radians a position for each pair, [rotary_dim / 2], fastest first."""
        return theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)

    def attention_factor(self) -> float:
        """The number that cos and sin are multiplied by."""
        return 1.0


@dataclass(frozen=True)
class LinearRope(RopeScaling):
    """Position interpolation: every frequency is divided by `factor`.

    Source: Chen et al., "Extending Context Window of Large Language Models via Positional
    Interpolation", 2023, https://arxiv.org/abs/2306.15595
    """

    factor: float

    def frequencies(self, rotary_dim: int, theta: float) -> np.ndarray:
        return super().frequencies(rotary_dim, theta) / self.factor


@dataclass(frozen=True)
class NTKRope(RopeScaling):
    """NTK-aware: theta becomes theta * factor^(rotary_dim / (rotary_dim - 2)).

    So the fastest pair keeps its frequency and the slowest one's is divided by `factor`. The
    dynamic form for a sequence of length L takes factor * L / L_trained - (factor - 1) as factor.

    Source: bloc97, 2023, as in Peng et al., "YaRN", section 3.1, https://arxiv.org/abs/2309.00071
    """

    factor: float

    def frequencies(self, rotary_dim: int, theta: float) -> np.ndarray:
        theta = theta * self.factor ** (rotary_dim / (rotary_dim - 2))
        return super().frequencies(rotary_dim, theta)


@dataclass(frozen=True)
class YarnRope(RopeScaling):
    """YaRN: pairs that turn often within the trained length keep their frequency, rare ones don't.

    A pair that turns more than `beta_fast` times within `trained_length` is kept, one that turns
    less than `beta_slow` times is divided by `factor`, with a linear ramp over the pairs between.
    cos and sin are multiplied by `attention`, by default 0.1 ln(factor) + 1.

    Source: Peng et al., "YaRN", 2023, https://arxiv.org/abs/2309.00071
    """

    factor: float
    trained_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention: float | None = None

    def frequencies(self, rotary_dim: int, theta: float) -> np.ndarray:
        frequencies = super().frequencies(rotary_dim, theta)

        def pair_with_turns(turns: float) -> float:
            wavelength = self.trained_length / turns
            return rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(pair_with_turns(self.beta_fast)), 0)
        high = min(math.ceil(pair_with_turns(self.beta_slow)), rotary_dim - 1)
        pairs = np.arange(rotary_dim // 2)
        # 0.001 is the published code's guard against a ramp without width.
        interpolated = np.clip((pairs - low) / (high - low or 0.001), 0.0, 1.0)
        return frequencies * (1.0 - interpolated + interpolated / self.factor)

    def attention_factor(self) -> float:
        if self.attention is not None:
            return self.attention
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0


@dataclass(frozen=True)
class Llama3Rope(RopeScaling):
    """That of Llama 3.1: YaRN's idea with a ramp over the turns within the trained length.

    A pair that turns more than `high_freq_factor` times within `trained_length` is kept, one that
    turns less than `low_freq_factor` times is divided by `factor`, with a linear ramp between.

    Source: Llama Team, "The Llama 3 Herd of Models", 2024, https://arxiv.org/abs/2407.21783, and
    the function apply_scaling of its published code.
    """

    factor: float = 8.0
    trained_length: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def frequencies(self, rotary_dim: int, theta: float) -> np.ndarray:
        frequencies = super().frequencies(rotary_dim, theta)
        turns = self.trained_length * frequencies / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / width, 0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / self.factor)
