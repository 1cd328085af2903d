"""Rotary position embedding in plain jax.numpy: the angles, their scalings, and the rotation."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.reference.promotion import accumulator_dtype, along_last_axis


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool) -> jax.Array:
    """Rotates the first R features of every head of [..., T, N, H] by the angles of [..., T, R/2].

    A pair is (i, i + R/2), or (2 i, 2 i + 1) if interleaved. The rotation is linear in x and its
    transpose is the rotation back, so that its gradient keeps cos and sin alone.
    """
    rotary_dim = 2 * cos.shape[-1]
    wide = accumulator_dtype(x.dtype)
    rotated, rest = x[..., :rotary_dim].astype(wide), x[..., rotary_dim:]
    # The axes before the positions, where the tables have none of their own, and the heads.
    axes = (*range(x.ndim - 1 - cos.ndim), -2)
    cos, sin = (jnp.expand_dims(table.astype(wide), axes) for table in (cos, sin))
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = jnp.split(rotated, 2, axis=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    if interleaved:
        rotated = jnp.stack(pair, axis=-1).reshape(rotated.shape)
    else:
        rotated = jnp.concatenate(pair, axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1)


# --- angles ---------------------------------------------------------------------------------------


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


def tables(
    positions: jax.Array, rotary_dim: int, theta: float, scaling: RopeScaling
) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) of float32 angles, positions.shape + (rotary_dim / 2,)."""
    frequencies = jnp.asarray(scaling.frequencies(rotary_dim, theta), jnp.float32)
    positions = positions.astype(jnp.float32)[..., None]
    return _cos_sin(positions * along_last_axis(frequencies, positions), scaling)


def axial_tables(
    height: int, width: int, rotary_dim: int, theta: float
) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), [height * width, rotary_dim / 2]: half of the pairs turn with the row.

    The other half turn with the column; both halves have the frequencies of rotary_dim / 2.
    """
    scaling = RopeScaling()
    frequencies = jnp.asarray(scaling.frequencies(rotary_dim // 2, theta), jnp.float32)
    shape = (height, width, rotary_dim // 4)
    row, column = (
        jnp.broadcast_to(
            jnp.expand_dims(jnp.arange(n, dtype=jnp.float32), axes) * frequencies[None, None], shape
        )
        for n, axes in ((height, (1, 2)), (width, (0, 2)))
    )
    angles = jnp.concatenate([row, column], axis=-1)
    return _cos_sin(angles.reshape(height * width, rotary_dim // 2), scaling)


def _cos_sin(angles: jax.Array, scaling: RopeScaling) -> tuple[jax.Array, jax.Array]:
    factor = scaling.attention_factor()
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor
