"""rope, qkv_projection, the losses and the optimizers with any combination of their options."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfused
from benchmarks.draw import HEAD_SIZES, Draw
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

# --- rotations ------------------------------------------------------------------------------------


def _head_size(draw: Draw) -> int:
    """Even, because features rotate in pairs."""
    return draw.pick(HEAD_SIZES) if draw.chance(0.75) else 2 * draw.size(1, 130)


def draw_rope(draw: Draw) -> Options:
    head_size = _head_size(draw)
    partly = draw.chance(0.35)
    batch = rows(draw, 8)
    return dict(
        batch=batch,
        tokens=length(draw, 600),
        heads=draw.between(1, 9),
        key_heads=draw.between(0, 4),
        head_size=head_size,
        rotary_dim=2 * draw.between(1, head_size // 2) if partly else head_size,
        dtype=draw.pick(DTYPES),
        interleaved=draw.chance(0.35),
        angles=draw.pick(("offset", "offsets", "positions", "tables", "tables of each")),
        theta=draw.pick((100.0, 10000.0)),
    )


def rope(options: Options) -> Problem:
    o, rng = options, rng_of(options)
    lead, tokens = tuple(o["batch"]), o["tokens"]
    heads = {"q": o["heads"], "k": o["key_heads"]}
    operands = {
        name: Operand((*lead, tokens, count, o["head_size"]), o["dtype"])
        for name, count in heads.items()
        if count
    }
    constants: dict[str, Any] = {}
    if o["angles"] == "offsets":
        constants["offset"] = rng.integers(0, 500, lead).astype(np.int32)
    elif o["angles"] == "positions":
        constants["positions"] = rng.integers(0, 500, (*lead, tokens)).astype(np.int32)
    elif o["angles"].startswith("tables"):
        of_each = lead if o["angles"].endswith("each") else ()
        shape = (*of_each, tokens, o["rotary_dim"] // 2)
        angles = rng.uniform(-3, 3, shape).astype(np.float32)
        constants |= {"cos": np.cos(angles), "sin": np.sin(angles)}

    def run(operands: Any, constants: Any, how: How) -> Any:
        more = dict(constants)
        if "cos" not in more:
            more |= dict(theta=o["theta"], rotary_dim=o["rotary_dim"])
            more |= dict(offset=3) if o["angles"] == "offset" else {}
        return jaxfused.rope(
            operands["q"],
            operands.get("k"),
            interleaved=o["interleaved"],
            implementation=how.implementation,
            **more,
        )

    return Problem(run, operands, constants)


def draw_qkv_projection(draw: Draw) -> Options:
    dtype, head_size = draw.pick(DTYPES), _head_size(draw)
    partly = draw.chance(0.2)
    return dict(
        batch=rows(draw, 8),
        tokens=length(draw, 300),
        width=features(draw, 900),
        key_heads=draw.between(1, 4),
        group=draw.pick((1, 1, 2, 3)),
        head_size=head_size,
        rotary_dim=2 * draw.between(1, head_size // 2) if partly else head_size,
        dtype=dtype,
        param_dtype=draw.pick((dtype, dtype, "float32")),
        bias=draw.chance(0.4),
        q_scale=draw.chance(0.4),
        k_scale=draw.chance(0.4),
        scale_offset=draw.pick((0.0, 0.0, 1.0)),
        rope=draw.chance(0.6),
        interleaved=draw.chance(0.3),
    )


def qkv_projection(options: Options) -> Problem:
    o, rng = options, rng_of(options)
    heads = o["key_heads"] * o["group"]
    out = (heads + 2 * o["key_heads"]) * o["head_size"]
    scale = 1.0 - o["scale_offset"]
    operands = present(
        x=Operand((*o["batch"], o["tokens"], o["width"]), o["dtype"]),
        w=weight((o["width"], out), o["param_dtype"]),
        bias=parameter(out, o["param_dtype"] if o["bias"] else None),
        q_scale=parameter(o["head_size"], "float32" if o["q_scale"] else None, scale),
        k_scale=parameter(o["head_size"], "float32" if o["k_scale"] else None, scale),
    )
    constants = {}
    if o["rope"]:
        angles = rng.uniform(-3, 3, (o["tokens"], o["rotary_dim"] // 2)).astype(np.float32)
        constants = {"cos": np.cos(angles), "sin": np.sin(angles)}

    def run(operands: Any, constants: Any, how: How) -> Any:
        return jaxfused.qkv_projection(
            operands["x"],
            operands["w"],
            operands.get("bias"),
            heads=heads,
            key_heads=o["key_heads"],
            q_scale=operands.get("q_scale"),
            k_scale=operands.get("k_scale"),
            scale_offset=o["scale_offset"],
            interleaved=o["interleaved"],
            precision="highest" if how.exact else None,
            implementation=how.implementation,
            **constants,
        )

    return Problem(run, operands, constants, tf32=o["dtype"] == "float32")


# --- losses ---------------------------------------------------------------------------------------


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
    )


def softmax_cross_entropy(options: Options) -> Problem:
    shape = (*options["rows"], options["classes"])
    operands = {"logits": Operand(shape, options["dtype"], 0.0, 3.0)}
    return _loss(options, operands, jaxfused.softmax_cross_entropy, ("logits",), {})


def linear_softmax_cross_entropy(options: Options) -> Problem:
    o = options
    operands = present(
        x=Operand((*o["rows"], o["width"]), o["dtype"]),
        w=weight((o["width"], o["classes"]), o["dtype"]),
        bias=parameter(o["classes"], "float32" if o["bias"] else None),
    )
    more = dict(chunk_size=o["chunk_size"])
    return _loss(o, operands, jaxfused.linear_softmax_cross_entropy, ("x", "w"), more)


def _loss(
    o: Options, operands: dict[str, Operand], loss: Any, first: tuple[str, ...], more: Any
) -> Problem:
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
    # By default small logits are XLA's, and it is the kernels that are to be tried.
    on_gpu = jax.default_backend() == "gpu"
    # Soft labels of a linear layer have none.
    kernels = "cuda" if on_gpu and not (o["soft"] and "w" in operands) else None

    def run(operands: Any, constants: Any, how: How) -> Any:
        given = dict(constants)
        bias = {"bias": operands["bias"]} if "bias" in operands else {}
        # A product has no precision of its own here.
        with jax.default_matmul_precision("highest" if how.exact else "default"):
            return loss(
                *(operands[name] for name in first),
                given.pop("labels"),
                implementation=how.implementation or kernels,
                **given,
                **bias,
                **more,
                **common,
            )

    eps = float(jnp.finfo(o["dtype"]).eps)

    def noise(operands: Any, constants: Any, results: Any, cotangents: Any) -> dict[str, Any]:
        """Logits and their gradients are kept in x's dtype."""
        del results
        x, w, bias = operands["x"], operands["w"], operands.get("bias")
        logits = (x @ w).astype(jnp.float32)
        logits = logits if bias is None else logits + bias
        # A row's loss has the errors of its label's logit and of the largest ones.
        of_rows = eps * jnp.max(jnp.abs(logits), axis=-1, initial=0.0)
        if o["reduction"] != "none":
            of_rows = jnp.sqrt(jnp.sum(of_rows**2))
        if o["reduction"] == "mean":
            of_rows = of_rows / max(1, logits[..., 0].size)
        found = {"result 0": of_rows}
        if bias is None or cotangents is None:
            return found

        def of_logits(logits: jax.Array) -> jax.Array:
            return jaxfused.softmax_cross_entropy(
                logits, **constants, **common, implementation="xla"
            )

        # The bias's gradient is the sum over rows of the logits'.
        (dlogits,) = jax.vjp(of_logits, logits)[1](cotangents[0])
        rows = dlogits.reshape(-1, dlogits.shape[-1])
        return found | {"bias": eps * jnp.sqrt(jnp.sum(rows**2, axis=0))}

    rounds = "w" in operands and o["dtype"] != "float32"
    return Problem(run, operands, constants, tf32="w" in operands, noise=noise if rounds else None)


# --- optimizers -----------------------------------------------------------------------------------

_OPTIMIZERS = {
    "sgd": (jaxfused.optim.sgd, optax.sgd, dict(momentum=0.9)),
    "adam": (jaxfused.optim.adam, optax.adam, dict()),
    "adamw": (jaxfused.optim.adamw, optax.adamw, dict(weight_decay=0.1)),
    "lamb": (jaxfused.optim.lamb, optax.lamb, dict(weight_decay=0.1)),
}
"""Without lion, whose sign of nearly nothing is luck."""


def draw_optimizer(draw: Draw) -> Options:
    return dict(
        optimizer=draw.pick(sorted(_OPTIMIZERS)),
        shapes=[[*rows(draw, 60), features(draw, 200)] for _ in range(draw.between(1, 4))],
        dtype=draw.pick(("float32", "float32", "bfloat16")),
        max_norm=draw.pick((None, 0.1, 100.0)),
    )


def optimizer_step(options: Options) -> Problem:
    """Two steps: the second has moments to start from."""
    o = options
    ours, theirs, arguments = _OPTIMIZERS[o["optimizer"]]
    operands = {}
    for index, shape in enumerate(o["shapes"]):
        for name in ("p", "g", "h"):
            operands[f"{name}{index}"] = Operand(tuple(shape), o["dtype"])

    def run(operands: Any, constants: Any, how: How) -> Any:
        del constants
        params, *gradients = (
            [operands[f"{name}{index}"] for index in range(len(o["shapes"]))] for name in "pgh"
        )
        optimizer = (ours if how.implementation is None else theirs)(1e-2, **arguments)
        state = optimizer.init(params)
        for gradient in gradients:
            if how.implementation is None:
                params, state = optimizer.step(gradient, state, params, max_norm=o["max_norm"])
                continue
            if o["max_norm"] is not None:
                gradient, _ = optax.clip_by_global_norm(o["max_norm"]).update(gradient, None)
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
        return tuple(params)

    return Problem(run, operands, {}, with_gradient=False)
