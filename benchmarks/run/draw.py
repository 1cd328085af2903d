"""Random sizes from a seed, for the commands that draw their cases: sweep and fuzz.

Each case has its own random stream: the fifth case of a seed is the same whether it is drawn alone or
with a thousand others.
"""

import zlib
from collections.abc import Sequence

import numpy as np

VISION_WIDTHS = (96, 128, 192, 256, 384, 512, 768, 1024, 1152, 1280, 1408, 1536, 1664)
"""Features of ViT, SigLIP and Swin."""
LANGUAGE_WIDTHS = (1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 8192)
"""Features of decoders like Llama, Qwen and Gemma."""
VISION_TOKENS = (49, 64, 144, 196, 197, 256, 257, 576, 577, 729, 784, 1024, 1370, 3136, 4096)
"""Patches of an image, with and without a class token; 49 and 64 are windows of Swin."""
HEAD_SIZES = (32, 64, 64, 64, 72, 80, 96, 112, 128, 128, 128, 160, 192, 256)
"""Head sizes to draw from; common ones are listed more than once."""

MOST_ELEMENTS = 2**27
"""Largest number of elements of an operand: 256 MiB in bfloat16, several times the L2 of any GPU."""
MOST_FLOPS = 1.5e12
"""Largest number of operations of a forward: a few milliseconds on an H200, and a second in float32."""


class Draw:
    """Random stream that depends only on a seed and a name; sizes are at most `largest`."""

    def __init__(self, seed: int, name: str, largest: int | None = None):
        self._largest = largest
        self._rng = np.random.default_rng([seed, zlib.crc32(name.encode())])

    def pick[T](self, options: Sequence[T]) -> T:
        return options[int(self._rng.integers(len(options)))]

    def chance(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def between(self, low: int, high: int) -> int:
        """Draws from low to high, both included, all equally likely."""
        return int(self._rng.integers(low, high + 1))

    def size(self, low: int, high: int) -> int:
        """Draws from low to high, both included, uniformly in the logarithm."""
        high = max(low, self.bounded(high))
        exponent = self._rng.uniform(np.log(low), np.log(high + 1))
        return min(high, max(low, int(np.exp(exponent))))

    def bounded(self, size: int) -> int:
        """Bounds a size by the largest that this stream draws."""
        return size if self._largest is None else min(size, self._largest)

    def rounded(self, low: int, high: int) -> int:
        """Draws a size from low to high, often a power of two or a multiple of 8 or 128."""
        value = self.size(low, high)
        unit = self.pick((1, 8, 128, 1 << (value.bit_length() - 1)))
        return value if unit > value else max(low, value // unit * unit)

    # --- sizes of networks ------------------------------------------------------------------------

    def width(self, most: int = 16384) -> int:
        """Draws the features of a layer; one in ten is any multiple of 8, one in 16 is odd."""
        kind = self._rng.random()
        if kind < 1 / 16:
            width = self.size(16, most) | 1
        elif kind < 0.16:
            width = self.size(16, most) // 8 * 8
        else:
            width = self.pick(VISION_WIDTHS if kind < 0.58 else LANGUAGE_WIDTHS)
        return min(width, most)

    def batch_and_tokens(self) -> tuple[int, int]:
        """Draws (batch, tokens): of images and patches, of texts, or one token a sequence (decode)."""
        kind = self.pick(("vision",) * 4 + ("text",) * 4 + ("decode",))
        if kind == "vision":
            batch, tokens = self.batch(512), self.pick(VISION_TOKENS)
        elif kind == "text":
            batch, tokens = self.batch(16), self.tokens()
        else:
            batch, tokens = self.rounded(1, 512), 1
        return self.shard(batch), tokens

    def batch(self, most: int) -> int:
        """Draws a batch size: the larger of two draws, because training has large batches."""
        return max(self.rounded(1, most), self.rounded(1, most))

    def tokens(self, most: int = 32768) -> int:
        """Draws the tokens of a text: mostly many, any number from 1 up."""
        return self.rounded(128 if self.chance(0.75) else 1, most)

    def shard(self, size: int) -> int:
        """Returns an axis' size on one of 1, 2, 4 or 8 devices; half of the draws have one device."""
        return max(1, size // self.pick((1, 1, 1, 2, 4, 8)))

    def dtype(self, *rare: str) -> str:
        """Draws bfloat16 in most cases, and float16 or one of `rare` in the others."""
        return self.pick(("bfloat16",) * 6 + ("float16", *rare))
