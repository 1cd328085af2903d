"""Patterns of images [B, H, W, C]: convolutions, norms, pools, upsampling."""

from tests.program_fuzz import rows
from tests.program_fuzz.writer import Writer


def conv(w: Writer, x: str) -> str:
    """Writes a convolution with per-channel arithmetic after it."""
    batch, height, width, channels = w.shapes[x]
    features = w.pick(channels, 6)
    kind = w.pick("dense", "dense", "depthwise", "patches", "strided")
    groups, window, stride, padding = 1, w.pick(1, 3), 1, "'SAME'"
    if kind == "depthwise":
        groups, features, window = channels, channels, 3
    if kind == "patches" and height % 2 == width % 2 == 0:
        window, stride, padding = 2, 2, "'VALID'"
    if kind == "strided":
        window, stride, padding = 3, 2, "((1, 0), (1, 1))"
    weights = w.input(window, window, channels // groups, features, kind="weight")
    made = [
        (size + sum(pads) - window) // stride + 1
        for size, pads in zip(
            (height, width),
            ((1, 0), (1, 1)) if kind == "strided" else ((window - 1, 0),) * 2,
            strict=True,
        )
    ]
    if padding == "'VALID'":
        made = [height // 2, width // 2]
    shape = (batch, *made, features)
    y = w.let(
        f"lax.conv_general_dilated({x}, {weights}, ({stride}, {stride}), {padding},"
        f" dimension_numbers=('NHWC', 'HWIO', 'NHWC'), feature_group_count={groups})",
        shape,
    )
    for _ in range(w.pick(0, 1, 2)):
        vector = w.input(features, kind="positive")
        number = w.number()
        y = w.let(
            w.pick(
                f"{y} + {vector}",
                f"{vector} - {y}",
                f"{y} - {vector}",
                f"{y} * {vector}",
                f"{y} / {vector}",
                f"{number} - {y}",
                f"{y} * {number}",
                f"{y} + {vector}[:, None, None, None]" if features == batch else f"{y} + {number}",
                f"{y} + {vector}[:, None]" if features == shape[2] else f"{y} / {number}",
            ),
            shape,
            y,
        )
        y = w.perturbed(y)
    y = rows.residual(w, x, y)
    return w.perturbed(rows.activation(w, y)) if w.draw.chance(0.5) else y


def norm(w: Writer, x: str) -> str:
    """Writes a norm over groups, channels, whole images or the batch."""
    shape = w.shapes[x]
    channels = shape[-1]
    y = w.perturbed(w.let(f"wide({x})", shape, x) if w.draw.chance(0.4) else x)
    kind = w.pick("group", "group", "instance", "image", "batch", "batch")
    if kind == "group":
        groups = w.pick(2, channels)
        y = w.let(
            f"{y}.reshape({(*shape[:-1], groups, channels // groups)})",
            (*shape[:-1], groups, channels // groups),
        )
        axes: tuple[int, ...] = (1, 2, 4)
    else:
        axes = {"instance": (1, 2), "image": (1, 2, 3), "batch": (0, 1, 2)}[kind]
    if w.odd(0.5):
        axes = w.pick(axes[1:], (1, 2), axes)
    _, array, variance = rows.moments(w, y, axes, is_rms=w.odd())
    if w.shapes[array] != w.shapes[y]:
        array = y
    if kind == "batch" and w.draw.chance(0.5):
        correction = w.number() if w.odd(2) else "1.0"
        w.beside.append(w.let(f"{correction} * {variance}", w.shapes[variance]))
    y = w.let(f"{w.perturbed(rows.divided(w, array, variance, None))}.reshape({shape})", shape)
    if w.draw.chance(0.7):
        scale = w.input(channels, kind="scale")
        y = w.perturbed(
            w.let(w.pick(f"{y} * {scale}", f"{scale} * {y}", f"{y} * (1 + {scale})"), shape)
        )
    if w.draw.chance(0.6):
        y = w.perturbed(w.let(f"{y} + {w.input(channels)}", shape))
    if w.draw.chance(0.3):
        one = w.number() if w.odd() else "1"
        scale, shift = w.input(shape[0], channels), w.input(shape[0], channels)
        y = w.let(f"{y} * ({one} + {scale}[:, None, None]) + {shift}[:, None, None]", shape, y)
    y = w.let(f"{y}.astype(dtype)", shape, y)
    y = rows.residual(w, x, y)
    return w.perturbed(rows.activation(w, y)) if w.draw.chance(0.5) else y


def pool(w: Writer, x: str) -> str:
    """Writes the maximum of each window."""
    batch, height, width, channels = w.shapes[x]
    window = w.pick("(1, 2, 2, 1)", "(1, 2, 2, 1)", "(1, 2, 2, 2)" if w.odd() else "(1, 2, 2, 1)")
    shape = (batch, height // 2, width // 2, channels // 2 if window.endswith("2)") else channels)
    return w.perturbed(
        w.let(f"lax.reduce_window({x}, -jnp.inf, lax.max, {window}, {window}, 'VALID')", shape)
    )


def enlarged(w: Writer, x: str) -> str:
    """Writes `jax.image.resize`, or something near it."""
    batch, height, width, channels = w.shapes[x]
    factor = w.pick(2, 2, 2, 3)
    shape = (batch, factor * height, factor * width, channels)
    method = w.pick("nearest", "cubic") if w.odd() else "bilinear"
    return w.perturbed(w.let(f"jax.image.resize({x}, {shape}, '{method}')", shape))
