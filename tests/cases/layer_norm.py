"""Cases of layer_norm and rms_norm, with their truth and the plain low-precision reference."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxfused
from jaxfused.runtime.activation import ACTIVATIONS, activate
from tests.support.arrays import put


class Inputs(NamedTuple):
    """The arrays of a call, with the cotangents of its results."""

    x: jax.Array
    scale: jax.Array | None
    bias: jax.Array | None
    residual: jax.Array | None
    pre_bias: jax.Array | None
    dy: jax.Array
    dnext_residual: jax.Array | None


class Results(NamedTuple):
    """Results of a call, and the gradients of its arrays."""

    y: Any
    next_residual: Any
    dx: Any
    dscale: Any
    dbias: Any
    dresidual: Any
    dpre_bias: Any


@dataclass(frozen=True)
class Case:
    """One call: its shape, its operands and its constants. Dtypes are given by name."""

    name: str
    shape: tuple[int, ...]
    op: str = "layer_norm"
    scale: bool = True
    bias: bool = True
    residual: bool = False
    pre_bias: bool = False
    pre_activation: str | None = None
    activation: str | None = None
    epsilon: float = 1e-6
    scale_offset: float = 0.0
    round_before_scale: bool = False
    parameter_dtype: str | None = None
    """Dtype of the parameters; None for x's."""
    residual_dtype: str | None = None
    """Dtype of the residual; None for x's."""

    def shapes(self, dtype: str) -> Inputs:
        """Returns the shapes of a call's arrays, with None for operands that this case lacks."""
        features = self.shape[-1:]
        parameter_dtype = self.parameter_dtype or dtype
        residual_dtype = self.residual_dtype or dtype

        def array(shape, dtype, present=True):
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) if present else None

        return Inputs(
            x=array(self.shape, dtype),
            scale=array(features, parameter_dtype, self.scale),
            bias=array(features, parameter_dtype, self.bias),
            residual=array(self.shape, residual_dtype, self.residual),
            pre_bias=array(features, parameter_dtype, self.pre_bias),
            dy=array(self.shape, dtype),
            dnext_residual=array(self.shape, residual_dtype, self.residual),
        )

    def inputs(self, dtype: str, seed: int = 0) -> Inputs:
        """Draws normally distributed arrays; x has a mean that is not zero and rows of unlike scale."""
        random = np.random.default_rng(seed)
        arrays = {
            name: None if shape is None else random.standard_normal(shape.shape)
            for name, shape in self.shapes(dtype)._asdict().items()
        }
        row_scale = 2.0 ** random.uniform(-1, 1, (*self.shape[:-1], 1))
        arrays["x"] = (arrays["x"] + 0.5) * row_scale
        return jax.tree.map(
            lambda shape, array: put(array.astype(shape.dtype)),
            self.shapes(dtype),
            Inputs(**arrays),
        )

    def call(self, x, scale, bias, residual, pre_bias, *, implementation: str | None = None):
        """Returns (y, next_residual or None) of the public function."""
        result = getattr(jaxfused, self.op)(
            x,
            scale,
            bias,
            epsilon=self.epsilon,
            scale_offset=self.scale_offset,
            round_before_scale=self.round_before_scale,
            residual=residual,
            pre_bias=pre_bias,
            pre_activation=self.pre_activation,
            activation=self.activation,
            implementation=implementation,
        )
        return (result, None) if residual is None else result

    def results(self, inputs: Inputs, *, implementation: str | None = None) -> Results:
        """Returns results and gradients of the public function."""
        *operands, dy, dnext_residual = inputs
        outputs, vjp = jax.vjp(
            lambda *operands: self.call(*operands, implementation=implementation), *operands
        )
        return Results(*outputs, *vjp((dy, dnext_residual)))

    def plain(self, inputs: Inputs) -> Results:
        """Computes the formula in jax.numpy, in x's dtype throughout, as one writes it first."""
        dtype = inputs.x.dtype
        results = self.evaluate(inputs, dtype)
        dtypes = Results(
            dtype,
            *(None if a is None else a.dtype for a in (inputs.residual, inputs.x, *inputs[1:5])),
        )
        return Results(
            *(None if r is None else r.astype(d) for r, d in zip(results, dtypes, strict=True))
        )

    def truth(self, inputs: Inputs) -> Results:
        """Computes the formula in float64, as NumPy arrays."""
        with jax.enable_x64(True):
            results = jax.jit(lambda inputs: self.evaluate(inputs, jnp.float64))(inputs)
            return jax.tree.map(np.asarray, results)

    def evaluate(self, inputs: Inputs, dtype: Any) -> Results:
        """Computes the formula and its gradients in `dtype`, without rounding results."""
        x, scale, bias, residual, pre_bias, dy, dnext_residual = (
            None if a is None else a.astype(dtype) for a in inputs
        )
        total = x
        if pre_bias is not None:
            total = total + pre_bias
        if residual is not None:
            total = total + residual
        # By definition the norm reads the next residual after its rounding.
        h = total if residual is None else total.astype(inputs.residual.dtype).astype(dtype)

        def norm(h, scale, bias):
            u = activate(self.pre_activation, h)
            if self.op == "layer_norm":
                u = u - jnp.mean(u, axis=-1, keepdims=True)
            y = u * jax.lax.rsqrt(jnp.mean(u * u, axis=-1, keepdims=True) + self.epsilon)
            if scale is not None:
                y = y * (scale + self.scale_offset)
            if bias is not None:
                y = y + bias
            return activate(self.activation, y)

        y, vjp = jax.vjp(norm, h, scale, bias)
        dx, dscale, dbias = vjp(dy)
        if dnext_residual is not None:
            dx = dx + dnext_residual
        return Results(
            y=y,
            next_residual=None if residual is None else total,
            dx=dx,
            dscale=dscale,
            dbias=dbias,
            dresidual=None if residual is None else dx,
            dpre_bias=None if pre_bias is None else dx.sum(axis=tuple(range(dx.ndim - 1))),
        )


_EVERYTHING = dict(residual=True, pre_bias=True, pre_activation="gelu_tanh", activation="silu")

SHAPES = (
    Case("one_feature", (5, 1)),
    Case("three_features", (197, 3)),
    Case("D64", (3, 64)),
    Case("D64_one_tile", (4, 64)),
    Case("D64_many_rows", (133, 64), residual=True, pre_bias=True),
    Case("rms_D128_many_rows", (67, 128), "rms_norm", bias=False),
    Case("D197", (5, 197)),
    Case("D768", (197, 768)),
    Case("D1000", (1, 1000)),
    Case("D4096", (3, 4096)),
    Case("D16384", (2, 16384)),
    Case("D65536", (1, 65536)),
    Case("leading_axes", (2, 3, 5, 32)),
    Case("one_axis", (33,)),
    Case("no_rows", (0, 768), residual=True, pre_bias=True),
    Case("rms_one_feature", (1, 1), "rms_norm"),
    Case("rms_D197", (197, 197), "rms_norm"),
    Case("rms_D768", (5, 768), "rms_norm", bias=False),
    Case("rms_D8192", (3, 8192), "rms_norm", bias=False),
)
OPTIONS = (
    Case("no_parameters", (5, 768), scale=False, bias=False),
    Case("scale_only", (5, 768), bias=False),
    Case("bias_only", (5, 768), scale=False),
    Case("large_epsilon", (5, 768), epsilon=0.5),
    Case("residual", (13, 768), residual=True),
    Case("pre_bias", (13, 768), pre_bias=True),
    Case("residual_and_pre_bias", (13, 333), residual=True, pre_bias=True),
    Case("bias_relu_norm", (13, 1024), pre_bias=True, pre_activation="relu"),
    *(
        # Each activation once before and once after, never the same one twice.
        Case(f"{before}_norm_{after}", (5, 256), pre_activation=before, activation=after)
        for before, after in zip(ACTIVATIONS, [*ACTIVATIONS][1:] + [*ACTIVATIONS][:1], strict=True)
    ),
    # Activations that are not 0 at 0, where threads hold columns beyond the row.
    Case("sigmoid_norm_D5008", (1, 5008), pre_activation="sigmoid"),
    Case("sigmoid_norm_D333", (37, 333), pre_activation="sigmoid"),
    Case("hard_sigmoid_norm_D776", (613, 776), pre_activation="hard_sigmoid", residual=True),
    Case("everything", (37, 768), **_EVERYTHING),
    Case("everything_odd", (37, 333), **_EVERYTHING),
    Case("everything_without_parameters", (5, 768), scale=False, bias=False, **_EVERYTHING),
    Case("rms_everything", (37, 768), "rms_norm", scale_offset=1.0, **_EVERYTHING),
    Case("rms_everything_odd", (37, 333), "rms_norm", scale_offset=1.0, **_EVERYTHING),
    Case("rounded_everything", (37, 768), scale_offset=1.0, round_before_scale=True, **_EVERYTHING),
    Case("rms_rounded", (13, 1024), "rms_norm", bias=False, round_before_scale=True),
    Case("rms_residual", (13, 4096), "rms_norm", bias=False, residual=True),
    Case("rms_no_parameters", (5, 768), "rms_norm", scale=False, bias=False),
)
MIXED_DTYPES = (
    Case("float32_parameters", (13, 768), pre_bias=True, parameter_dtype="float32"),
    Case("bfloat16_parameters", (13, 768), pre_bias=True, parameter_dtype="bfloat16"),
    Case("float16_parameters", (13, 333), pre_bias=True, parameter_dtype="float16"),
    Case("float32_residual", (13, 768), residual=True, residual_dtype="float32"),
)
CASES = (*SHAPES, *OPTIONS, *MIXED_DTYPES)
DTYPES = ("float32", "bfloat16", "float16")
