"""The losses with any combination of their options."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfused
from benchmarks.fuzz.problem import (
    DTYPES,
    How,
    Operand,
    Options,
    Problem,
    features,
    length,
    parameter,
    present,
    rng_of,
    rows,
    weight,
)
from benchmarks.run.draw import Draw


def draw_cross_entropy(draw: Draw) -> Options:
    return dict(
        rows=rows(draw, 300),
        width=features(draw, 300),
        classes=features(draw, 3000),
        dtype=draw.pick(DTYPES),
        soft=draw.chance(0.2),
        label_smoothing=draw.pick((0.0, 0.0, 0.1)),
        z_loss=draw.pick((0.0, 0.0, 1e-3)),
        ignore=draw.chance(0.3),
        weights=draw.chance(0.25),
        reduction=draw.pick(("mean", "sum", "none")),
        chunk_size=draw.pick((None, 1, 7, 64)),
        bias=draw.chance(0.4),
        soft_cap=draw.pick((None, None, 5.0)),
        cotangent=draw.pick((None, "any", 0.5)),
        # By default XLA runs small logits; "cuda" makes the kernels run.
        implementation=draw.pick((None, "cuda", "cuda")),
    )


def softmax_cross_entropy(options: Options) -> Problem:
    shape = (*options["rows"], options["classes"])
    operands = {"logits": Operand(shape, options["dtype"], 0.0, 3.0)}
    return _loss(options, operands, jaxfused.softmax_cross_entropy, ("logits",), {})


def linear_softmax_cross_entropy(options: Options) -> Problem:
    o = _PLAIN | options
    operands = present(
        x=Operand((*o["rows"], o["width"]), o["dtype"]),
        w=weight((o["width"], o["classes"]), o["dtype"]),
        bias=parameter(o["classes"], "float32" if o["bias"] else None),
    )
    more = dict(chunk_size=o["chunk_size"])
    return _loss(o, operands, jaxfused.linear_softmax_cross_entropy, ("x", "w"), more)


_PLAIN: Options = dict(
    soft=False,
    label_smoothing=0.0,
    z_loss=0.0,
    ignore=False,
    weights=False,
    reduction="mean",
    soft_cap=None,
    cotangent=None,
    chunk_size=None,
    bias=False,
    cross_entropy_weight=1.0,
    dice_weight=1.0,
    smooth=1.0,
    tversky_alpha=0.5,
    tversky_beta=0.5,
    focal_gamma=0.0,
)
"""Values of a loss's options that a printed case may leave out."""


def _loss(
    options: Options, operands: dict[str, Operand], loss: Any, first: tuple[str, ...], more: Any
) -> Problem:
    o = _PLAIN | options
    rng, constants = rng_of(o), {}
    if o["soft"]:
        labels = rng.dirichlet(np.ones(o["classes"]), tuple(o["rows"]))
        constants["labels"] = labels.astype(np.float32)
    else:
        labels = rng.integers(0, o["classes"], tuple(o["rows"]))
        if o["ignore"]:
            labels = np.where(rng.random(labels.shape) < 0.3, -1, labels)
        constants["labels"] = np.asarray(labels, np.int32)
    if o["weights"]:
        constants["weights"] = rng.uniform(0, 2, tuple(o["rows"])).astype(np.float32)

    common: Any = dict(
        label_smoothing=o["label_smoothing"],
        z_loss=o["z_loss"],
        ignore_index=-1 if o["ignore"] and not o["soft"] else None,
        logits_soft_cap=o["soft_cap"],
        reduction=o["reduction"],
        cotangent=o["cotangent"],
    )

    def run(operands: Any, constants: Any, how: How) -> Any:
        given = dict(constants)
        bias = {"bias": operands["bias"]} if "bias" in operands else {}
        # The losses have no precision argument, so this context sets the precision.
        with jax.default_matmul_precision("highest" if how.exact else "default"):
            return loss(
                *(operands[name] for name in first),
                given.pop("labels"),
                implementation=how.implementation,
                **given,
                **bias,
                **more,
                **common,
            )

    is_product = "w" in operands
    eps = float(jnp.finfo(o["dtype"] if is_product else "float32").eps)

    def noise(operands: Any, constants: Any, results: Any, cotangents: Any) -> dict[str, Any]:
        """Returns the allowed noise of rounding: logits and gradients to x's dtype, sums to float32."""
        del results
        bias = operands.get("bias")
        logits = operands["x"] @ operands["w"] if is_product else operands["logits"]
        logits = logits.astype(jnp.float32)
        logits = logits if bias is None else logits + bias
        # A row's loss has the rounding errors of the label's logit and of the largest logits.
        of_rows = eps * jnp.max(jnp.abs(logits), axis=-1, initial=0.0)
        if o["reduction"] != "none":
            of_rows = jnp.sqrt(jnp.sum(of_rows**2))
        if o["reduction"] == "mean":
            of_rows = of_rows / max(1, logits[..., 0].size)
        found = {"result 0": of_rows}
        if cotangents is not None and not is_product:
            # A logit's gradient is the difference of its probability and its label, both up to 1. With
            # one class these are equal, and the gradient is their rounding error.
            of_row = jnp.max(jnp.abs(cotangents[0]), initial=0.0) * constants.get("weights", 1.0)
            of_row = of_row / (max(1, logits[..., 0].size) if o["reduction"] == "mean" else 1)
            of_row = jnp.broadcast_to(of_row, logits.shape[:-1])[..., None]
            found["logits"] = jnp.broadcast_to(2 * eps * of_row, logits.shape)
        if bias is None or cotangents is None:
            return found

        def of_logits(logits: jax.Array) -> jax.Array:
            return jaxfused.softmax_cross_entropy(
                logits, **constants, **common, implementation="xla"
            )

        # The bias's gradient is the logits' gradient summed over rows.
        (dlogits,) = jax.vjp(of_logits, logits)[1](cotangents[0])
        rows = dlogits.reshape(-1, dlogits.shape[-1])
        return found | {"bias": eps * jnp.sqrt(jnp.sum(rows**2, axis=0))}

    return Problem(run, operands, constants, tf32=is_product, noise=noise)


# --- binary and segmentation losses -----------------------------------------------------------------


def draw_sigmoid(draw: Draw) -> Options:
    return dict(
        shape=[*rows(draw, 300), features(draw, 1000)],
        dtype=draw.pick(DTYPES),
        soft=draw.chance(0.3),
        label_smoothing=draw.pick((0.0, 0.0, 0.1)),
        focal_gamma=draw.pick((0.0, 0.0, 2.0)),
        focal_alpha=draw.pick((None, None, 0.25)),
        ignore=draw.chance(0.3),
        weights=draw.chance(0.25),
        reduction=draw.pick(("mean", "sum", "none")),
    )


def sigmoid_cross_entropy(options: Options) -> Problem:
    o = options
    shape = tuple(o["shape"])
    names = ("label_smoothing", "focal_gamma", "focal_alpha", "reduction")
    given = {name: o[name] for name in names}
    return _of_pixels(o, shape, 2, o["soft"], jaxfused.sigmoid_cross_entropy, given)


def draw_segmentation(draw: Draw) -> Options:
    sides = [draw.size(1, 60) for _ in range(draw.pick((1, 2, 2, 3)))]
    return dict(
        shape=[length(draw, max(1, min(40, 2**14 // math.prod(sides)))), *sides],
        classes=draw.pick((None, 2, 3, 4, 8, 19, 21, draw.size(2, 150))),
        dtype=draw.pick(DTYPES),
        soft=draw.chance(0.3),
        cross_entropy_weight=draw.pick((1.0, 1.0, 0.0)),
        dice_weight=draw.pick((1.0, 1.0, 0.5)),
        smooth=draw.pick((1.0, 1e-3)),
        tversky_alpha=draw.pick((0.5, 0.3)),
        tversky_beta=draw.pick((0.5, 0.7)),
        focal_gamma=draw.pick((0.0, 0.0, 2.0)),
        ignore=draw.chance(0.3),
        weights=draw.chance(0.25),
        reduction=draw.pick(("mean", "sum", "none")),
    )


def segmentation_loss(options: Options) -> Problem:
    o, classes = _PLAIN | options, options["classes"]
    shape = (*o["shape"], *(() if classes is None else (classes,)))
    names = ("cross_entropy_weight", "dice_weight", "smooth", "tversky_alpha", "tversky_beta")
    given = {name: o[name] for name in (*names, "focal_gamma", "reduction")}
    soft = o["soft"] and classes is None
    return _of_pixels(o, shape, classes or 2, soft, jaxfused.segmentation_loss, given)


def _of_pixels(
    o: Options, shape: tuple[int, ...], classes: int, soft: bool, loss: Any, given: dict[str, Any]
) -> Problem:
    """Returns a problem whose labels have the shape `o["shape"]` and, if soft, are from 0 to 1."""
    rng, labelled = rng_of(o), tuple(o["shape"])
    labels = rng.random(labelled) if soft else rng.integers(0, classes, labelled)
    if o["ignore"] and not soft:
        labels = np.where(rng.random(labelled) < 0.3, -1, labels)
        given = given | dict(ignore_index=-1)
    constants = {"labels": labels.astype(np.float32 if soft else np.int32)}
    if o["weights"]:
        constants["weights"] = rng.uniform(0, 2, labelled).astype(np.float32)

    def run(operands: Any, constants: Any, how: How) -> Any:
        return loss(operands["logits"], **constants, **given, implementation=how.implementation)

    return Problem(run, {"logits": Operand(shape, o["dtype"], 0.0, 3.0)}, constants)
