"""Patterns on rows of features [B, T, D]: norms, products, MLPs, short convolutions."""

from tests.program_fuzz.writer import Writer

ACTIVATIONS = (
    "jax.nn.relu({z})",
    "jax.nn.gelu({z})",
    "jax.nn.gelu({z}, approximate=False)",
    "jax.nn.silu({z})",
    "jnp.square(jax.nn.relu({z}))",
    "jax.nn.relu6({z})",
    "jax.nn.leaky_relu({z})",
    "jax.nn.hard_swish({z})",
    "{z} * jax.nn.relu6({z} + 3) / 6",
    "jax.nn.hard_sigmoid({z})",
    "jax.nn.mish({z})",
    "{z} * jax.nn.sigmoid(1.702 * {z})",
    "{z} / (1 + jnp.exp(-{z}))",
    "0.5 * {z} * (1 + jnp.tanh(np.sqrt(2 / np.pi).item() * ({z} + 0.044715 * {z}**3)))",
)
ODD_ACTIVATIONS = (
    "jnp.tanh({z})",
    "jax.nn.sigmoid({z})",
    "1 / (1 + jnp.exp(-{z}))",
    "jnp.tanh({z} / {n})",
    "jnp.square({z})",
    "{z}**3",
    "{z} * jnp.tanh({z})",
    "{z} * jax.nn.sigmoid(1.7 * {z})",
    "{z} * jax.nn.sigmoid({z} + {n})",
    "{z} * jax.nn.sigmoid({n} * {z})",
    "jax.nn.silu({z}) + {n}",
    "jax.nn.silu({z}) * {n}",
    "0.5 * {z} * (1 + jnp.tanh(0.8 * ({z} + 0.0447 * {z}**3)))",
    "jax.nn.gelu({z} * {n})",
    "jnp.maximum({z}, 0)",
    "jnp.clip({z}, 0, 6)",
    "jnp.where({z} > 0, {z}, 0)",
    "jnp.minimum(jax.nn.relu({z}), {n})",
    "jnp.where({z} > {n}, {z}, 0)",
    "jax.nn.leaky_relu({z}, {n})",
    "jax.nn.relu6({z} + {n}) / 6",
    "{z} * jax.nn.relu6({z} + 3) * {n}",
    "jax.nn.relu({z} - {n})",
    "jax.nn.elu({z})",
    "jax.nn.softplus({z})",
    "{z}",
)


def activation(w: Writer, z: str) -> str:
    """Writes an activation that the operators support, or another one."""
    of = ODD_ACTIVATIONS if w.odd(2) else ACTIVATIONS
    return w.let(w.pick(*of).format(z=z, n=w.number()), w.shapes[z], z)


def mean(
    w: Writer, value: str, axes: int | tuple[int, ...], shape: tuple[int, ...], keep: bool
) -> str:
    """Returns the expression of a mean over axes of an array of this shape, or something near it."""
    of = (axes,) if isinstance(axes, int) else axes
    count = 1
    for axis in of:
        count *= shape[axis]
    if w.odd(1.5):
        count = w.pick(count - 1 or 2, count + 1, count + 2, count * 1.001, count * 2)
    total = f"jnp.sum({value}, axis={axes}, keepdims={keep})"
    return w.pick(
        f"jnp.mean({value}, axis={axes}, keepdims={keep})",
        f"{total} / {count}",
        f"{total} * (1 / {count})",
        f"{total} * {1 / count:.8g}" if w.odd() else f"{total} / {count}",
    )


def moments(
    w: Writer, x: str, axes: int | tuple[int, ...], *, is_rms: bool
) -> tuple[str, str, str]:
    """Returns (x, x to be divided, its variance with axes of length 1); the second is centred or x."""
    shape = w.shapes[x]
    of = {axis % len(shape) for axis in ((axes,) if isinstance(axes, int) else axes)}
    kept = tuple(1 if axis in of else size for axis, size in enumerate(shape))
    if of == {len(shape) - 1} and w.draw.chance(0.2):
        return by_product_with_itself(w, x, kept, is_rms=is_rms)
    if is_rms:
        square = w.perturbed(w.let(w.pick(f"{x} * {x}", f"jnp.square({x})", f"{x}**2"), shape))
        return x, x, w.perturbed(w.let(mean(w, square, axes, shape, True), kept))
    middle = w.let(mean(w, x, axes, shape, True), kept)
    if len(shape) > 1 and shape[-1] == shape[-2] and of == {len(shape) - 1} and w.odd():
        middle = w.let(f"jnp.swapaxes({middle}, -1, -2)", (*shape[:-2], 1, shape[-1]))
    else:
        middle = w.perturbed(middle)
    centred = w.perturbed(w.let(f"{x} - {middle}", shape))
    kind = w.pick("deviations", "var", "two means")
    if kind == "deviations":
        square = w.let(w.pick(f"{centred} * {centred}", f"jnp.square({centred})"), shape)
        variance = w.let(mean(w, square, axes, shape, True), kept)
    elif kind == "var":
        ddof = w.pick(1, 2) if w.odd(3) else 0
        variance = w.let(f"jnp.var({x}, axis={axes}, keepdims=True, ddof={ddof})", kept)
    else:
        square = w.let(mean(w, f"jnp.square({x})", axes, shape, True), kept)
        less = f"{w.number()} * " if w.odd() else ""
        variance = w.let(f"{square} - {less}jnp.square({middle})", kept)
        if w.draw.chance(0.5):
            least = w.number() if w.odd() else "0.0"
            variance = w.let(f"jnp.maximum({variance}, {least})", kept)
    return x, w.pick(x, middle) if w.odd(0.5) else centred, w.perturbed(variance)


def by_product_with_itself(
    w: Writer, x: str, kept: tuple[int, ...], *, is_rms: bool
) -> tuple[str, str, str]:
    """Returns what `moments` does, with squares summed by a product of the array with itself."""
    shape = w.shapes[x]
    u = x
    if not is_rms:
        u = w.perturbed(w.let(f"{x} - jnp.mean({x}, axis=-1, keepdims=True)", shape))
    other = w.perturbed(u) if w.odd() else u
    total = w.pick(
        f"jnp.einsum('...d,...d->...', {u}, {other})[..., None]",
        f"jnp.vecdot({u}, {other})[..., None]",
    )
    count = w.pick(shape[-1] + 1, shape[-1] * 2) if w.odd() else shape[-1]
    square = w.perturbed(w.let(total, kept))
    return x, u, w.perturbed(w.let(w.pick(f"{square} / {count}", f"{square} * {1 / count}"), kept))


def divided(w: Writer, array: str, variance: str, factor: str | None) -> str:
    """Writes the array over the root of its variance, times a factor."""
    shape, of_variance = w.shapes[array], w.shapes[variance]
    epsilon = w.pick("1e-6", "1e-5", "1e-3")
    if w.odd():
        root = w.pick(
            f"jnp.sqrt({variance}) + {epsilon}",
            f"jnp.sqrt(jnp.maximum({variance}, {epsilon}))",
            f"jnp.sqrt({variance} * {w.number()} + {epsilon})",
            f"jnp.sqrt(jnp.maximum({variance} - 0.3, 0.0) + {epsilon})",
            f"{variance} + {epsilon}",
        )
        result = f"{array} / ({root})"
        return w.let(result if factor is None else f"{result} * {factor}", shape)
    if w.draw.chance(0.1):
        of_variance = shape
        variance = w.let(f"jnp.broadcast_to({variance}, {shape})", shape)
    summed = w.perturbed(w.let(f"{variance} + {epsilon}", of_variance))
    reciprocal = w.perturbed(
        w.let(
            w.pick(f"lax.rsqrt({summed})", f"1 / jnp.sqrt({summed})", f"{summed}**-0.5"),
            of_variance,
        )
    )
    if factor is None:
        return w.let(
            w.pick(
                f"{array} * {reciprocal}",
                f"{reciprocal} * {array}",
                f"{array} / jnp.sqrt({summed})",
            ),
            shape,
        )
    return w.let(
        w.pick(
            f"{array} * {reciprocal} * {factor}",
            f"{array} * ({factor} * {reciprocal})",
            f"({factor} * {array}) * {reciprocal}",
            f"{array} * {factor} / jnp.sqrt({summed})",
        ),
        shape,
    )


def in_two_terms(w: Writer, x: str, axis: int, variance: str, factor: str | None) -> str:
    """Writes x * inverse + (bias - mean * inverse), as Keras does."""
    shape, kept = w.shapes[x], w.shapes[variance]
    inverse = w.perturbed(w.let(f"lax.rsqrt({variance} + 1e-3)", kept))
    if factor is not None:
        inverse = w.let(f"{inverse} * {factor}", ())
        del w.shapes[inverse]  # It depends on the factor.
    if w.odd():
        middle = w.let(f"{x}.mean(1, keepdims=True)", (shape[0], 1, *shape[2:]))
    else:
        middle = w.perturbed(w.let(f"{x}.mean({axis}, keepdims=True)", kept))
    bias = w.input(shape[-1])
    number = f" * {w.number()}" if w.odd() else ""
    shift = w.pick(f"({bias} - {middle} * {inverse}{number})", f"-{middle} * {inverse} + {bias}")
    return w.let(w.pick(f"{x} * {inverse} + {shift}", f"{shift} + {x} * {inverse}"), shape)


def norm(w: Writer, x: str) -> str:
    """Writes LayerNorm or RMSNorm, sometimes after a residual sum."""
    shape = w.shapes[x]
    if w.draw.chance(0.3):
        x = w.perturbed(w.let(f"{w.input(*shape)} + {x}", shape))
        if w.draw.chance(0.5):
            w.beside.append(x)
    is_wide = w.draw.chance(0.5)
    y = w.perturbed(w.let(f"wide({x})", shape, x) if is_wide else x)
    is_rms = w.draw.chance(0.4)
    axis = -2 if w.odd(0.5) else w.pick(-1, len(shape) - 1)
    _, array, variance = moments(w, y, axis, is_rms=is_rms)
    factor: str | None = None
    if w.draw.chance(0.7):
        scale = w.input(shape[-1], kind="scale")
        factor = w.pick(scale, scale, f"(1 + {scale})", f"wide({scale})", f"{scale}[None, None]")
        if w.odd():
            factor = w.pick(
                f"({w.number()} + {scale})", w.number(), f"({scale} * {w.number()})", array
            )
    if w.shapes[array] != shape:
        array = y
    if not is_rms and axis != -2 and w.draw.chance(0.25):
        y = w.perturbed(in_two_terms(w, y, axis, variance, factor))
    else:
        y = w.perturbed(divided(w, array, variance, factor))
    if w.draw.chance(0.4):
        bias = w.input(shape[-1])
        y = w.perturbed(w.let(w.pick(f"{y} + {bias}", f"{bias} + {y}", f"{y} - {bias}"), shape))
    if w.draw.chance(0.2):
        scale, shift = w.input(shape[0], shape[-1]), w.input(shape[0], shape[-1])
        one = w.number() if w.odd() else "1"
        y = w.let(f"{y} * ({one} + {scale}[:, None]) + {shift}[:, None]", shape, y)
    y = w.let(f"{y}.astype(dtype)", shape)
    return w.perturbed(activation(w, y)) if w.draw.chance(0.25) else y


def product(w: Writer, x: str, features: int, *, has_bias: bool | None = None) -> str:
    """Writes x [B, T, D] times a matrix, with a bias."""
    *rows, d = w.shapes[x]
    shape = (*rows, features)
    matrix = w.input(d, features, kind="weight")
    kind = w.pick("plain", "plain", "einsum", "dot", "turned")
    if kind == "turned":
        turned = w.let(f"jnp.swapaxes({matrix}, 0, 1)", (features, d))
        y = w.let(f"jnp.einsum('btd,fd->btf', {x}, {turned})", shape)
    else:
        y = w.let(
            {
                "plain": f"{x} @ {matrix}",
                "einsum": f"jnp.einsum('btd,df->btf', {x}, {matrix})",
                "dot": f"jnp.dot({x}, {matrix})",
            }[kind],
            shape,
        )
    y = w.perturbed(y)
    if w.draw.chance(0.6) if has_bias is None else has_bias:
        bias = w.input(features)
        y = w.perturbed(w.let(w.pick(f"{y} + {bias}", f"{bias} + {y}"), shape))
    return y


def layer(w: Writer, x: str) -> str:
    """Writes a product with its activation and residual."""
    shape = w.shapes[x]
    y = product(w, x, shape[-1])
    if w.draw.chance(0.8):
        y = w.perturbed(activation(w, y))
    return residual(w, x, y)


def residual(w: Writer, x: str, y: str) -> str:
    """Adds the input `x` to `y`, or returns `y`."""
    if w.shapes[x] != w.shapes[y] or not w.draw.chance(0.5):
        return y
    scaled = f"{w.number()} * {y}" if w.odd() else y
    return w.perturbed(w.let(w.pick(f"{x} + {scaled}", f"{scaled} + {x}"), w.shapes[y]))


def perceptron(w: Writer, x: str) -> str:
    """Writes two products with an activation between them."""
    features = w.shapes[x][-1]
    h = w.perturbed(activation(w, product(w, x, w.pick(8, 12, features))))
    return residual(w, x, product(w, h, features))


def gated(w: Writer, x: str) -> str:
    """Writes two products with a gated unit between them, of one matrix or two."""
    shape, hidden = w.shapes[x], w.pick(8, 12)
    if w.draw.chance(0.4):
        both = product(w, x, 2 * hidden)
        first, second = w.pick((f":{hidden}", f"{hidden}:"), ("::2", "1::2"))
        if w.odd():
            second = w.pick("::2", f":{hidden}", "1::2")
        gate = w.let(f"{both}[..., {first}]", (*shape[:-1], hidden))
        up = w.let(f"{both}[..., {second}]", (*shape[:-1], hidden))
        if w.draw.chance(0.3):
            gate, up = up, gate
    else:
        of_up = w.perturbed(x) if w.odd() else x
        gate, up = product(w, x, hidden), product(w, of_up, hidden)
    kind = w.pick("act", "act", "act", "sigmoid", "highway")
    gate = w.perturbed(
        activation(w, gate) if kind == "act" else w.let(f"jax.nn.sigmoid({gate})", w.shapes[gate])
    )
    mixed = f"{gate} * {up}"
    if kind == "highway":
        mixed = f"{gate} * {up} + (1 - {gate}) * {w.input(*w.shapes[gate])}"
    h = w.perturbed(w.let(mixed, w.shapes[gate]))
    return residual(w, x, product(w, h, shape[-1]))


def unit(w: Writer, x: str) -> str:
    """Writes a gate that no product reads: of another product of x, of another array, or of x."""
    shape = w.shapes[x]
    up = w.pick("product", "product", "array", "x")
    up = {"product": lambda: product(w, x, shape[-1]), "array": lambda: w.input(*shape)}.get(
        up, lambda: x
    )()
    gate = product(w, w.perturbed(x), shape[-1])
    gate = w.pick(activation, lambda w, z: w.let(f"jax.nn.sigmoid({z})", shape))(w, gate)
    h = w.let(w.pick(f"{gate} * {up}", f"{up} * {gate}"), shape)
    return residual(w, x, w.perturbed(h))


def mixer(w: Writer, x: str) -> str:
    """Writes an MLP over the tokens, between two transpositions."""
    batch, tokens, features = w.shapes[x]
    turned = w.let(f"jnp.swapaxes({x}, 1, 2)", (batch, features, tokens))
    y = perceptron(w, turned)
    y = w.let(f"jnp.swapaxes({y}, 1, 2)", (batch, tokens, features))
    return residual(w, x, y)


def squeezed(w: Writer, x: str) -> str:
    """Writes squeeze and excitation: gates of each image, from the mean of its rows."""
    batch, _, features = w.shapes[x]
    pooled = w.let(f"{x}.mean(1)", (batch, features))
    matrices = [w.input(features, 4, kind="weight"), w.input(4, features, kind="weight")]
    h = w.let(f"{pooled} @ {matrices[0]}", (batch, 4))
    h = activation(w, h)
    gate = w.let(f"jax.nn.sigmoid({h} @ {matrices[1]})", (batch, features))
    return residual(w, x, w.let(f"{x} * {w.perturbed(gate)}[:, None]", w.shapes[x]))


def short_conv(w: Writer, x: str) -> str:
    """Writes a causal depthwise convolution as a sum of shifts."""
    shape = w.shapes[x]
    length, features = shape[-2:]
    taps = w.pick(2, 3, 4)
    weights = w.input(taps, features)
    fill = f", constant_values={w.number()}" if w.odd() else ""
    before = taps - 1 if not w.odd() else taps
    zeros = f"jnp.zeros_like({x}[:, :{before}])"
    if w.draw.chance(0.6):
        padded = w.let(
            w.pick(
                f"jnp.pad({x}, ((0, 0), ({before}, 1), (0, 0)){fill})",
                f"jnp.concatenate([{zeros}, {x}, {zeros}[:, :1]], axis=1)",
            )
            if length > before
            else f"jnp.pad({x}, ((0, 0), ({before}, 1), (0, 0)){fill})",
            (shape[0], length + before + 1, features),
        )
        starts = [tap + w.pick(1, 1, -1) * w.odd(0.3) for tap in range(taps)]
        windows = [f"{padded}[:, {max(0, s)}:{max(0, s) + length}]" for s in starts]
    else:
        windows = [
            f"jnp.pad({x}[:, :{length - back}], ((0, 0), ({back}, 0), (0, 0)){fill})"
            for back in range(taps - 1, -1, -1)
        ]
    y = ""
    for tap, window in enumerate(windows):
        factor = f"{w.number()} * " if w.odd(0.4) else ""
        term = w.let(
            w.pick(f"{factor}{weights}[{tap}] * {window}", f"{window} * {weights}[{tap}]"), shape
        )
        term = w.perturbed(term) if w.odd(0.4) else term
        y = w.let(f"{y} + {term}", shape) if y else term
    if w.draw.chance(0.6):
        y = w.perturbed(w.let(f"{y} + {w.input(features)}", shape))
    return activation(w, y) if w.draw.chance(0.6) else y


def cross_entropy(w: Writer, x: str) -> str:
    """Writes the cross-entropy of a product, sometimes smoothed, with a z-loss or of capped logits."""
    rows = w.shapes[x][:-1]
    classes = w.pick(*rows[-1:], 9)
    logits = product(w, x, classes)
    if w.draw.chance(0.15):
        cap = w.pick("5.0", "2.0")
        bounded = f"jnp.tanh({logits} / {w.pick(cap, w.number()) if w.odd() else cap})"
        logits = w.let(f"{cap} * {bounded}", (*rows, classes), logits)
    labels = w.input(*rows, kind=f"labels:{classes}")
    wide = w.let(f"wide({logits})", (*rows, classes), logits)
    if w.draw.chance(0.4):
        return loss_by_log_softmax(w, wide, labels)
    most = f"{wide}.max(-1, keepdims=True)"
    if not w.odd():
        most = f"lax.stop_gradient({most})"
    most = w.let(most, (*rows, 1))
    shifted = w.perturbed(w.let(f"{wide} - {most}", (*rows, classes)))
    total = w.let(f"jnp.log(jnp.exp({shifted}).sum(-1))", rows)
    by_hand = w.let(total if w.odd(2) else f"{total} + {most}[..., 0]", rows)
    lse = w.perturbed(w.pick(by_hand, w.let(f"jax.nn.logsumexp({wide}, axis=-1)", rows)))
    picked = label_of(w, w.perturbed(wide) if w.odd() else wide, labels)
    loss = w.perturbed(w.let(f"{lse} - {picked}", rows))
    if w.draw.chance(0.3):
        loss = w.let(f"{loss} + {w.number()} * {w.perturbed(lse)}**2", rows, loss)
    if w.draw.chance(0.3):
        loss = w.let(f"0.9 * {loss} + 0.1 * ({lse} - {wide}.mean(-1))", rows, loss)
    return loss


def label_of(w: Writer, array: str, labels: str) -> str:
    """Writes the label's entry of each row of an array [..., V]."""
    *rows, classes = w.shapes[array]
    hot = f"jax.nn.one_hot({labels}, {classes}, dtype={array}.dtype)"
    if w.odd(2):
        hot = f"({w.number()} * {hot} + {w.number()})"
    is_label = f"{labels}[..., None] == jnp.arange({classes})"
    kinds = [f"jnp.take_along_axis({array}, {labels}[..., None], axis=-1)[..., 0]"] * 3
    if len(rows) == 2:
        first, second = f"jnp.arange({rows[0]})[:, None]", f"jnp.arange({rows[1]})"
        start = w.pick(1, 1, -1) if w.odd() else 1
        kinds += [f"{array}[{first}, {second}[::{start}], {labels}]"]
    kinds += [f"({array} * {hot}).sum(-1)", f"jnp.where({is_label}, {array}, 0).sum(-1)"]
    kinds += [f"jnp.einsum('...v,...v->...', {hot}, {array})"]
    return w.let(w.pick(*kinds), rows)


def loss_by_log_softmax(w: Writer, logits: str, labels: str) -> str:
    """Writes a loss by log-probabilities, sometimes of some rows alone, or smoothed."""
    *rows, classes = w.shapes[logits]
    logs = w.perturbed(w.let(f"jax.nn.log_softmax({logits})", (*rows, classes)))
    if w.draw.chance(0.3) and rows[1] > 1:
        cut, shape = w.pick((":-1", (rows[0], rows[1] - 1)), ("::2", (rows[0], -(-rows[1] // 2))))
        logs = w.let(f"{logs}[:, {cut}]", (*shape, classes))
        labels, rows = w.let(f"{labels}[:, {cut}]", shape), [*shape]
    if w.draw.chance(0.3):
        is_label = f"{labels}[..., None] == jnp.arange({classes})"
        smooth = w.pick(
            f"0.9 * jax.nn.one_hot({labels}, {classes}, dtype={logs}.dtype) + 0.1 / {classes}",
            f"jnp.where({is_label}, 0.9, {w.number() if w.odd() else '0.1 / 7'})",
        )
        of, shape = w.pick(("-1", rows), ("-1", rows), ("(1, 2)", rows[:1]), ("None", ()))
        return w.let(f"-({logs} * ({smooth})).sum({of})", shape)
    loss = w.perturbed(w.let(f"-{label_of(w, logs, labels)}", rows))
    if w.draw.chance(0.3):
        loss = w.let(f"0.9 * {loss} - 0.1 * {logs}.mean(-1)", rows, loss)
    return loss
