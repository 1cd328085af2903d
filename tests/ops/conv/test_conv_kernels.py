"""The Hopper convolution alone: plans, windows, odd sizes, every form of epilogue."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.conv.conv import conv
from pallas_kernels.conv.product import ConvConfig
from pallas_kernels.conv.weight_gradient import ConvWeightGradientConfig, weight_gradient
from pallas_kernels.conv.window import Boxes, Window
from tests.support.arrays import put
from tests.support.grids import parametrize

SMALL = ConvConfig(tile_m=64, tile_n=64, stages=2, epilogue_columns=32)
ROWS = replace(SMALL, plan="rows")
RESIDENT = replace(SMALL, plan="resident")
FEW_PIXELS = ConvWeightGradientConfig(64, 64, 2)


CUBE = dict(strides=(1, 1, 1), dilation=(1, 1, 1))


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    features: int = 64
    kernel: tuple[int, ...] = (3, 3)
    padding: tuple[tuple[int, int], ...] = ((1, 1), (1, 1))
    strides: tuple[int, ...] = (1, 1)
    dilation: tuple[int, ...] = (1, 1)
    epilogue: bool = False
    """True if bias and residual are added, and the sum is returned in two dtypes."""
    flipped: bool = False
    config: ConvConfig = SMALL
    dtype: str = "bfloat16"

    @property
    def window(self) -> Window:
        return Window(self.kernel, self.padding, self.strides, self.dilation)

    def operands(self):
        """Returns small integers, whose sums are exact in float32 in any order."""
        rng = np.random.default_rng(0)

        def array(*shape):
            return put(rng.integers(-2, 3, size=shape), self.dtype)

        channels = self.shape[-1]
        pair = (self.features, channels) if self.flipped else (channels, self.features)
        result = (self.shape[0], *self.window.result(self.shape[1:-1]), self.features)
        bias = put(rng.integers(-9, 10, size=self.features), self.dtype)
        return array(*self.shape), array(*self.kernel, *pair), bias, array(*result)

    def run(self, x, w, bias, residual, multiprocessors):
        def epilogue(z, *, bias=None, residual=None):
            return {"y": z + bias + residual, "wide": z} if self.epilogue else {"y": z}

        return conv(
            x,
            w,
            window=self.window,
            epilogue=epilogue,
            outputs={"y": self.dtype} | ({"wide": jnp.float32} if self.epilogue else {}),
            vectors={"bias": bias if self.epilogue else None},
            matrices={"residual": residual if self.epilogue else None},
            flipped=self.flipped,
            config=self.config,
            multiprocessors=multiprocessors,
        )

    def expected(self, x, w, bias, residual):
        if self.flipped:
            w = jnp.flip(w, range(len(self.kernel))).swapaxes(-1, -2)
        letters = "DHW"[-len(self.kernel) :]
        z = jax.lax.conv_general_dilated(
            x.astype(jnp.float32),
            w.astype(jnp.float32),
            self.strides,
            self.padding,
            rhs_dilation=self.dilation,
            dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        )
        if not self.epilogue:
            return {"y": z.astype(self.dtype)}
        return {"y": (z + bias + residual).astype(self.dtype), "wide": z}

    def check(self, multiprocessors=2):
        operands = self.operands()
        actual = jax.jit(lambda *args: self.run(*args, multiprocessors))(*operands)
        expected = self.expected(*operands)
        assert actual.keys() == expected.keys()
        for name, result in actual.items():
            np.testing.assert_array_equal(
                np.asarray(result, np.float32), np.asarray(expected[name], np.float32)
            )


INTERPRETED = (
    Case((1, 9, 11, 64), epilogue=True),
    Case((2, 7, 8, 24), 40, epilogue=True, config=ROWS),
    Case((1, 10, 9, 72), 64, config=replace(RESIDENT, stages=3)),
    # A box of two images, whose rows are two parts of a tile.
    Case((3, 8, 8, 64), config=replace(RESIDENT, tile_m=128)),
    Case((3, 8, 8, 64), epilogue=True, config=replace(SMALL, tile_m=128, ping_pong=False)),
    Case((3, 8, 8, 64), config=replace(ROWS, ping_pong=False)),
    Case((2, 8, 8, 64), 128, config=replace(SMALL, cluster=2)),
    # Strides: images of even and odd sizes, with padding on both sides or none.
    Case((2, 8, 10, 64), strides=(2, 2)),
    Case((1, 9, 7, 64), padding=((0, 1), (2, 0)), strides=(2, 2), kernel=(3, 2)),
    Case((1, 8, 9, 64), strides=(1, 2), kernel=(1, 1), padding=((0, 0), (0, 0))),
    Case((1, 9, 8, 16), dilation=(2, 3), padding=((2, 1), (3, 0))),
    Case((1, 9, 8, 16), dilation=(2, 1), padding=((2, 2), (-1, 1)), config=ROWS),
    # The gradient of x, which reads the weights flipped.
    Case((1, 8, 9, 24), 40, flipped=True, config=replace(SMALL, tile_n=48, epilogue_columns=16)),
    Case((1, 8, 9, 64), flipped=True, config=RESIDENT),
    Case((3, 8, 9, 64), 72, epilogue=True, config=replace(SMALL, tile_n=96, turns_weights=True)),
    # Windows of one axis and of three.
    Case((2, 1, 100, 16), kernel=(1, 4), padding=((0, 0), (3, 0)), dilation=(1, 2)),
    Case((1, 3, 5, 8, 64), kernel=(3, 3, 3), padding=((1, 1),) * 3, **CUBE),
    Case((1, 3, 5, 8, 16), kernel=(2, 3, 1), padding=((1, 0), (1, 1), (0, 0)), **CUBE, config=ROWS),
)


@parametrize("case", INTERPRETED, quick=(3, 13))
def test_in_the_interpreter(case, interpreted_hopper):
    case.check()


@parametrize("plan", ["taps", "rows", "resident"], quick=(2,))
def test_two_arrays_in_the_interpreter(plan, interpreted_hopper):
    """The first array's channels fill whole steps of K, and the second's end in a partial step."""
    first = 64 if plan == "resident" else 128
    case = Case((1, 9, 8, first + 40), config=replace(SMALL, plan=plan), epilogue=True)
    x, *others = case.operands()
    parts = x[..., :first], x[..., first:]
    actual = jax.jit(lambda *args: case.run(args[:2], *args[2:], 2))(*parts, *others)
    for name, expected in case.expected(x, *others).items():
        np.testing.assert_array_equal(
            np.asarray(actual[name], np.float32), np.asarray(expected, np.float32)
        )


@dataclass(frozen=True)
class WeightsCase:
    shape: tuple[int, ...]
    features: int = 64
    kernel: tuple[int, ...] = (3, 3)
    padding: tuple[tuple[int, int], ...] = ((1, 1), (1, 1))
    dilation: tuple[int, ...] = (1, 1)
    config: ConvWeightGradientConfig = FEW_PIXELS

    def check(self, multiprocessors):
        rng = np.random.default_rng(0)
        strides = (1,) * len(self.kernel)
        window = Window(self.kernel, self.padding, strides, self.dilation)
        result = window.result(self.shape[1:-1])
        x, dz = (
            put(rng.integers(-2, 3, size=shape), jnp.bfloat16)
            for shape in (self.shape, (self.shape[0], *result, self.features))
        )
        letters = "DHW"[-len(self.kernel) :]

        def convolve(w):
            return jax.lax.conv_general_dilated(
                x.astype(jnp.float32),
                w,
                strides,
                self.padding,
                rhs_dilation=self.dilation,
                dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
            )

        w = jnp.zeros((*self.kernel, self.shape[-1], self.features))
        (expected,) = jax.vjp(convolve, w)[1](dz.astype(jnp.float32))
        actual = jax.jit(
            lambda x, dz: weight_gradient(
                x, dz, window=window, multiprocessors=multiprocessors, config=self.config
            )
        )(x, dz)
        np.testing.assert_array_equal(actual, expected)


WEIGHTS = (
    WeightsCase((2, 8, 8, 64)),
    WeightsCase((3, 9, 11, 128), 128, config=ConvWeightGradientConfig(128, 128, 2)),
    WeightsCase((3, 8, 8, 64), config=ConvWeightGradientConfig(64, 128, 2, parts=3)),
    WeightsCase((1, 12, 9, 64), kernel=(2, 3), padding=((0, 1), (2, 1)), dilation=(2, 3)),
    WeightsCase((1, 3, 8, 9, 64), kernel=(2, 3, 3), padding=((1, 0),) * 3, dilation=(1, 1, 1)),
    WeightsCase((2, 8, 8, 24), 40),
    WeightsCase((2, 1, 70, 64), kernel=(1, 4), padding=((0, 0), (3, 0))),
)


@pytest.mark.parametrize(
    ("sizes", "box"), [((3, 9, 20), (1, 8, 8)), ((1, 9, 20), (1, 8, 8)), ((1, 1, 70), (1, 1, 64))]
)
def test_boxes_beyond_the_last_begin_beyond_an_axis_that_copies_have(sizes, box):
    """A TMA copy drops axes of size 1, so a start beyond such an axis would not be noticed."""
    boxes = Boxes(sizes, box)
    for index in range(2 * boxes.count):
        beyond = [
            int(start) >= size
            for start, size, b in zip(boxes.start(index), sizes, box, strict=True)
            if size > 1 or b > 1
        ]
        assert any(beyond) == (index >= boxes.count)


def test_axes_of_one_element_are_not_padded():
    plain = Window((3, 3), ((0, 0), (1, 1)), (1, 1), (1, 1))
    assert plain.why_unfit((1, 5)) is None
    assert "an axis of 1," in plain.why_unfit((5, 1))
    # The gradient of x pads the smaller result of a valid convolution.
    assert "an axis of 1," in plain.transposed().why_unfit((1, 5))
    strided = replace(plain, padding=((0, 1), (0, 1)), strides=(2, 2))
    assert strided.why_unfit((3, 3)) is None
    assert "an axis of 2, which a stride of 2 spans" in strided.why_unfit((2, 4))


@parametrize("case", WEIGHTS, quick=(1,))
def test_weight_gradient_in_the_interpreter(case, interpreted_hopper):
    case.check(4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [INTERPRETED[1], INTERPRETED[2], WEIGHTS[0]], ids=str)
def test_threads_do_not_race(case, race_detector):
    case.check(2)


LARGE = (
    Case((5, 57, 61, 64), config=replace(RESIDENT, tile_m=128, stages=4)),
    Case((5, 57, 61, 64), epilogue=True, config=replace(ROWS, tile_m=128)),
    Case((4, 32, 32, 320), 320, config=replace(SMALL, tile_m=128, tile_n=160, turns_weights=True)),
    Case(
        (3, 28, 28, 64),
        320,
        epilogue=True,
        config=replace(SMALL, tile_m=128, tile_n=160, turns_weights=True, ping_pong=False),
    ),
    Case((5, 14, 14, 128), 256, config=replace(SMALL, tile_m=128, tile_n=128, ping_pong=False)),
    Case((3, 57, 55, 128), 128, strides=(2, 2), config=replace(SMALL, tile_m=128, tile_n=128)),
    Case((2, 9, 20, 21, 64), kernel=(3, 3, 3), padding=((1, 1),) * 3, **CUBE, config=ROWS),
    WeightsCase((5, 57, 61, 64), config=ConvWeightGradientConfig(64, 64, 8)),
    WeightsCase((2, 64, 64, 320), 320, config=ConvWeightGradientConfig(64, 128, 4)),
    # The steps of the single image do not divide evenly into parts: the last part ends beyond the image.
    WeightsCase((1, 128, 128, 128), 256, config=ConvWeightGradientConfig(128, 64, 4, parts=5)),
    WeightsCase(
        (1, 1, 900, 64),
        64,
        (1, 3),
        ((0, 0), (1, 1)),
        config=ConvWeightGradientConfig(64, 64, 4, parts=4),
    ),
)
"""Cases with enough tiles to keep all SMs busy."""


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*INTERPRETED, *WEIGHTS, *LARGE], ids=str)
def test_on_a_gpu(case):
    case.check(jax.devices()[0].core_count)
