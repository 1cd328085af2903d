"""Draws the program of a seed and a number."""

from benchmarks.run.draw import Draw
from tests.program_fuzz import heads, images, rows
from tests.program_fuzz.writer import Program, Writer

OF_ROWS = (
    rows.norm,
    rows.norm,
    rows.layer,
    rows.perceptron,
    rows.gated,
    rows.unit,
    rows.mixer,
    rows.squeezed,
    rows.short_conv,
    heads.self_attention,
)
OF_IMAGES = (images.conv, images.conv, images.norm, images.norm, images.pool, images.enlarged)

WRAPPERS = (
    "jax.jit(program)",
    "jax.checkpoint(program)",
    "lambda *a: lax.cond(True, program, program, *a)",
    "lambda *a: lax.platform_dependent(*a, tpu=program, default=program)",
    "lambda *a: jax.tree.map(lambda y: y[0], jax.vmap(program)(*(x[None] for x in a)))",
    "lambda *a: jax.tree.map(lambda y: y[0], lax.scan(lambda c, _: (c, program(*a)), 0, None, 1)[1])",
)


def program(seed: int, number: int) -> Program:
    """Returns the program of a number, which has its own random stream, the same in every run."""
    draw = Draw(seed, f"program {number}")
    w = Writer(draw, oddity=draw.pick((0.0, 0.03, 0.06, 0.12, 0.2)))
    kind = draw.pick(("rows",) * 5 + ("images",) * 3 + ("heads",) * 3 + ("loss",))
    if kind == "heads":
        result = heads.of_heads(w)
    elif kind == "images":
        result = w.input(w.pick(2, 4), w.pick(4, 6), w.pick(4, 6, 8), w.pick(4, 6, 8))
        if draw.chance(0.15):
            result = w.input(2, 12, 12, 4)
        for _ in range(w.pick(1, 1, 2, 3)):
            result = draw.pick(OF_IMAGES)(w, result)
    else:
        tokens = w.pick(4, 5, 8)
        result = w.input(w.pick(2, 3), tokens, w.pick(tokens, 8, 6, 16))
        if draw.chance(0.15):
            result = w.input(2, 3, w.pick(256, 300))
        for _ in range(w.pick(1, 1, 2, 3) - (kind == "loss")):
            result = draw.pick(OF_ROWS)(w, result)
        if kind == "loss":
            result = rows.cross_entropy(w, result)
    wrapper = draw.pick(WRAPPERS) if draw.chance(0.2) else "program"
    return w.program(result, wrapper=wrapper)
