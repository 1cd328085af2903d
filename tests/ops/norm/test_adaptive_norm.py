"""layer_norm and rms_norm with parameters per image and a gate, compared with their float64 truth."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused.runtime.activation import activate
from pallas_kernels.rows import layer_norm_configs
from pallas_kernels.rows.tiles import RowTiles
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels
from tests.support.tolerances import assert_accurate


class Inputs(NamedTuple):
    x: Any
    scale: Any
    bias: Any
    image_scale: Any
    image_shift: Any
    residual: Any
    pre_bias: Any
    gate: Any


@dataclass(frozen=True)
class Case:
    """One call: the shape, how many axes images have, and which operands are absent."""

    name: str
    shape: tuple[int, ...]
    image_axes: int = 1
    op: str = "layer_norm"
    absent: tuple[str, ...] = ("residual", "pre_bias", "gate")
    shared_gate: bool = False
    pre_activation: str | None = None
    activation: str | None = None

    def inputs(self, dtype: str) -> tuple[Inputs, tuple[Any, Any]]:
        """Returns the operands, and the cotangents of y and of the next residual."""
        random = np.random.default_rng(0)
        *leading, features = self.shape
        images = (*leading[: self.image_axes], features)
        shapes = Inputs(
            self.shape,
            (features,),
            (features,),
            images,
            images,
            self.shape,
            (features,),
            (features,) if self.shared_gate else images,
        )
        arrays = {
            name: None
            if name in self.absent
            else put(random.normal(0.2, 1.0, shape).astype(jnp.dtype(dtype)))
            for name, shape in shapes._asdict().items()
        }
        dy, dh = (
            put(random.standard_normal(self.shape).astype(jnp.dtype(dtype))) for _ in range(2)
        )
        return Inputs(**arrays), (dy, None if "residual" in self.absent else dh)

    def plain(self, inputs: Inputs, rounded_to: Any):
        """Returns (y, next residual or None) by the formula, in the dtype of `inputs`.

        By definition the norm reads the next residual as rounded to its dtype, `rounded_to`.
        """
        x, scale, bias, image_scale, image_shift, residual, pre_bias, gate = inputs

        def along(vector):
            leading = vector.shape[:-1]
            return vector.reshape(
                *leading, *(1,) * (len(self.shape) - vector.ndim), vector.shape[-1]
            )

        h = x if pre_bias is None else x + along(pre_bias)
        h = h if gate is None else h * along(gate)
        if residual is not None:
            h = h + residual
            h = h + jax.lax.stop_gradient(h.astype(rounded_to).astype(h.dtype) - h)
        u = activate(self.pre_activation, h)
        if self.op == "layer_norm":
            u = u - jnp.mean(u, axis=-1, keepdims=True)
        y = u * jax.lax.rsqrt(jnp.mean(u * u, axis=-1, keepdims=True) + 1e-6)
        y = y if scale is None else y * along(scale)
        y = y if bias is None else y + along(bias)
        y = y if image_scale is None else y * (1 + along(image_scale))
        y = y if image_shift is None else y + along(image_shift)
        return activate(self.activation, y), None if residual is None else h

    def call(self, inputs: Inputs, *, implementation: str | None = None):
        x, scale, bias, *_ = inputs
        keywords = {
            name: a for name, a in inputs._asdict().items() if name not in Inputs._fields[:3]
        }
        result = getattr(jaxfused, self.op)(
            x,
            scale,
            bias,
            pre_activation=self.pre_activation,
            activation=self.activation,
            implementation=implementation,
            **keywords,
        )
        return (result, None) if inputs.residual is None else result


def results(f, inputs: Inputs, cotangents) -> dict[str, Any]:
    """Returns results and gradients by their names."""
    (y, h), vjp = jax.vjp(f, inputs)
    (gradients,) = vjp(cotangents)
    found = {"y": y, "next_residual": h}
    found |= {f"d{name}": value for name, value in gradients._asdict().items()}
    return {name: value for name, value in found.items() if value is not None}


def check(case: Case, dtype: str, implementation: str) -> None:
    inputs, cotangents = case.inputs(dtype)
    formula = jax.jit(lambda *args: results(lambda i: case.plain(i, inputs.x.dtype), *args))
    plain = formula(inputs, cotangents)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(jnp.float64), (inputs, cotangents))
        truth = jax.tree.map(np.asarray, formula(*wide))
    call = functools.partial(case.call, implementation=implementation)
    actual = jax.jit(lambda i, c: results(call, i, c))(inputs, cotangents)
    assert actual.keys() == truth.keys()
    for name in actual:
        assert_accurate(name, actual[name], plain[name], truth[name])


ALL = ()
CASES = (
    Case("modulated", (3, 13, 256)),
    Case("modulated_without_affine", (2, 9, 384), absent=("scale", "bias", *Case("", ()).absent)),
    Case("gated", (3, 9, 256), absent=ALL),
    Case("rms_gated", (2, 10, 128), op="rms_norm", absent=("bias",)),
    Case("gated_rows_of_ctas", (3, 5, 2048), absent=("pre_bias",)),
    Case("layer_scale", (2, 9, 256), absent=("image_scale", "image_shift"), shared_gate=True),
    Case("two_image_axes", (2, 3, 7, 256), image_axes=2, absent=ALL),
    Case("no_image_axes", (13, 256), image_axes=0, absent=ALL),
    Case("activations", (2, 8, 256), absent=ALL, pre_activation="gelu_tanh", activation="silu"),
    Case("rms_shift", (2, 5, 64), op="rms_norm", absent=("image_scale", "residual", "gate")),
    Case("more_images_than_ctas", (37, 4, 256)),
    Case("eight_rows_a_tile", (2, 13, 1152)),
)
by_name = {case.name: case for case in CASES}
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@parametrize("case", CASES, quick=(2, 6), ids=lambda case: case.name)
@parametrize("dtype", ["float32", "bfloat16"], quick=(1,))
def test_reference_is_accurate(case, dtype):
    check(case, dtype, "xla")


@pytest.mark.usefixtures("interpreted_hopper")
@parametrize("case", CASES, quick=(2,), ids=lambda case: case.name)
def test_pallas_in_the_interpreter(case):
    check(case, "bfloat16", "pallas")


@pytest.mark.gpu
@each_case
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_on_the_gpu(case, dtype, implementation):
    check(case, dtype, implementation)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("race_detector")
@pytest.mark.parametrize("features", [256, 2048])
def test_pallas_does_not_race(features):
    case = Case("", (2, 8, features), absent=ALL)
    inputs, cotangents = case.inputs("bfloat16")
    call = functools.partial(case.call, implementation="pallas")
    jax.block_until_ready(results(call, inputs, cotangents))


def test_the_backward_keeps_multiprocessors_busy():
    """No config gives each CTA an SM of its own for a hundred images."""
    guesses = layer_norm_configs.backward_candidates(256, 1152, 2, 2, 1)
    for segments in (16, 64, 100, 131, 140, 1000):
        config = layer_norm_configs._balanced(guesses, segments, 132)[0]
        tiles = RowTiles.plan(config, 256 * segments, 1152, segments, 132)
        room = 132 * config.ctas_per_multiprocessor
        assert tiles.ctas >= 0.8 * room * -(-segments // room), segments


# --- transformations ------------------------------------------------------------------------------

IMPLEMENTATIONS = [
    pytest.param("xla", marks=pytest.mark.exhaustive),
    pytest.param("pallas", marks=pytest.mark.gpu),
]


def check_vmap(implementation: str) -> None:
    """A model of one image under vmap calls the kernels for all images, for gradients too."""
    case = by_name["two_image_axes"]
    inputs, cotangents = case.inputs("float32")
    axes = Inputs(0, None, None, 0, 0, 0, None, 0)

    def all_images(call, inputs):
        y, h = call(inputs)
        return jnp.sum(y * cotangents[0]) + jnp.sum(h * cotangents[1])

    def per_image(inputs):
        return case.call(inputs, implementation=implementation)

    vmapped = jax.vmap(jax.vmap(per_image, (axes,)), (axes,))
    expected = jax.value_and_grad(functools.partial(all_images, case.call))(inputs)
    actual = jax.jit(jax.value_and_grad(functools.partial(all_images, vmapped)))(inputs)
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap(implementation):
    check_vmap(implementation)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("interpreted_hopper")
def test_pallas_vmap_in_the_interpreter():
    check_vmap("pallas")


@pytest.mark.exhaustive
@parametrize("image_axes", [0, 1, 2], quick=(2,))
def test_one_kernel_a_direction(hopper, image_axes):
    case = Case("", (2, 3, 64, 256), image_axes, absent=ALL)
    inputs, cotangents = case.inputs("bfloat16")
    call = functools.partial(case.call, implementation="pallas")
    assert kernels(lambda i, c: results(call, i, c), inputs, cotangents) == [
        "layer_norm_forward",
        "layer_norm_backward",
    ]


# --- what is refused ------------------------------------------------------------------------------

X = np.zeros((2, 3, 64), np.float32)
IMAGES = np.zeros((2, 64), np.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(image_scale=IMAGES[:1]), "layer_norm: image_scale has shape (1, 64)"),
        (dict(image_shift=IMAGES[:, :3]), "image_shift has shape (2, 3)"),
        (dict(image_scale=IMAGES, image_shift=X), "image_shift has shape (2, 3, 64)"),
        (dict(gate=IMAGES), "layer_norm: a gate was passed without a residual"),
        (dict(gate=IMAGES.astype(int), residual=X), "gate has dtype int"),
        (dict(image_scale=IMAGES, implementation="cuda"), "no parameters of each image"),
    ],
    ids=str,
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError) as raised:
        jaxfused.layer_norm(**{"x": X, **arguments})
    assert message in str(raised.value)
    assert str(raised.value).endswith(".")


def test_few_rows_of_an_image_leave_pallas(hopper):
    x = jax.ShapeDtypeStruct((5, 3, 64), jnp.float32)
    scale = jax.ShapeDtypeStruct((5, 64), jnp.float32)
    with pytest.raises(ValueError, match=r"at least 4 rows, got 3 with parameters of their own"):
        jax.eval_shape(
            lambda x, s: jaxfused.layer_norm(x, image_scale=s, implementation="pallas"), x, scale
        )


def test_gradients_without_images(hopper):
    x, image_scale, scale = jnp.ones((0, 3, 8)), jnp.ones((0, 8)), jnp.ones(8)
    y, pullback = jax.vjp(
        lambda *args: jaxfused.layer_norm(args[0], args[1], image_scale=args[2]),
        x,
        scale,
        image_scale,
    )
    assert [gradient.shape for gradient in pullback(y)] == [x.shape, scale.shape, image_scale.shape]
