"""Patterns of attention and rotation on [B, T, N, H]."""

from tests.program_fuzz.writer import Writer

NUMBERS = ("-1e9", "-1e9", "-1e30", "jnp.finfo(jnp.float32).min", "-jnp.inf")
ODD_NUMBERS = ("-1e4", "-100.0", "-1e8", "0.0", "-2.3819763e38")


def mask(w: Writer, batch: int, queries: int, keys: int) -> str:
    """Writes a mask that broadcasts to [B, N, T, S]."""
    shape = (1, 1, queries, keys)
    kind = w.pick("causal", "causal", "window", "padding", "argument", "both", "constant")
    rows, columns = f"jnp.arange({queries})[:, None]", f"jnp.arange({keys})[None]"
    if kind == "causal":
        expression = w.pick(
            f"jnp.tril(jnp.ones(({queries}, {keys}), bool))[None, None]",
            f"({rows} >= {columns})[None, None]",
        )
    elif kind == "window":
        size = w.pick(1, 2, 3)
        expression = f"(({rows} >= {columns}) & ({rows} - {columns} < {size}))[None, None]"
    elif kind == "constant":
        offset = w.pick(0, 2, -2)
        expression = f"((({rows} - {offset} - {columns}) // 2) <= 0)[None, None]"
    elif kind == "padding":
        shape = (batch, 1, 1, keys)
        return w.let(f"{w.input(batch, keys, kind='mask')}[:, None, None]", shape)
    elif kind == "argument":
        shape = (batch, 1, queries, keys)
        return w.let(f"{w.input(batch, queries, keys, kind='mask')}[:, None]", shape)
    else:
        shape = (batch, 1, queries, keys)
        padding = w.input(batch, keys, kind="mask")
        expression = f"({rows} >= {columns})[None, None] & {padding}[:, None, None]"
    return w.let(expression, shape)


def masked(w: Writer, logits: str, batch: int, number: str) -> str:
    """Masks the logits by a select, a sum or a product."""
    shape = w.shapes[logits]
    allowed = mask(w, batch, *shape[-2:])
    if w.odd(3):
        number = w.pick(*ODD_NUMBERS)
    wanted = f"jnp.where({allowed}, {logits}, {number})"
    added = f"jnp.where({allowed}, 0.0, {number}).astype({logits}.dtype)"
    multiplied = f"(1 - {allowed}.astype({logits}.dtype)) * {number}"
    kind = w.pick("choice", "choice", "sum", "sum", "product")
    if kind == "choice":
        return w.let(wanted, shape, logits)
    if kind == "sum" or number in ("-jnp.inf",):
        return w.let(f"{logits} + {added}", shape, logits)
    return w.let(f"{logits} + {multiplied}", shape, logits)


def softmax(w: Writer, logits: str) -> str:
    """Writes softmax over the last axis, by JAX or by hand."""
    shape = w.shapes[logits]
    rows = (*shape[:-1], 1)
    if w.draw.chance(0.5):
        axis = -2 if w.odd(0.5) else -1
        return w.let(f"jax.nn.softmax({logits}, axis={axis})", shape)
    if w.draw.chance(0.4):
        return softmax_by_logarithm(w, logits)
    most = w.let(f"{logits}.max(-1, keepdims=True)", rows)
    is_square = shape[-1] == shape[-2]
    if is_square and w.odd():
        most = w.let(f"jnp.swapaxes({most}, -1, -2)", (*shape[:-2], 1, shape[-1]), most)
    if w.draw.chance(0.5):
        most = w.let(f"lax.stop_gradient({most})", w.shapes[most], most)
    shifted = logits
    if w.draw.chance(0.7):
        shifted = w.perturbed(w.let(f"{logits} - {most}", shape))
    exponentials = w.perturbed(w.let(f"jnp.exp({shifted})", shape))
    total = w.perturbed(w.let(f"{exponentials}.sum(-1, keepdims=True)", rows))
    if is_square and w.odd():
        total = w.let(f"jnp.swapaxes({total}, -1, -2)", (*shape[:-2], 1, shape[-1]), total)
    quotient = w.pick(f"{exponentials} / {total}", f"{exponentials} * (1 / {total})")
    return w.let(quotient, shape)


def softmax_by_logarithm(w: Writer, logits: str) -> str:
    """Writes softmax over the last axis as exponentials of log-probabilities."""
    shape = w.shapes[logits]
    rows = (*shape[:-1], 1)
    most = w.let(f"lax.stop_gradient({logits}.max(-1, keepdims=True))", rows)
    shifted = w.perturbed(w.let(f"{logits} - {most}", shape))
    total = w.perturbed(w.let(f"jnp.exp({shifted}).sum(-1, keepdims=True)", rows))
    kind = w.pick("lse", "lse", "log_softmax", "by hand", "shifted")
    if kind == "log_softmax":
        logs = w.let(f"jax.nn.log_softmax({logits})", shape)
    elif kind == "lse":
        lse = w.let(f"jax.nn.logsumexp({logits}, axis=-1, keepdims=True)", rows)
        logs = w.let(f"{logits} - {w.perturbed(lse)}", shape)
    elif kind == "by hand":
        lse = w.perturbed(w.let(f"jnp.log({total}) + {most}", rows))
        logs = w.let(f"{logits} - {lse}", shape)
    else:
        logs = w.let(f"{shifted} - jnp.log({total})", shape)
    return w.let(f"jnp.exp({w.perturbed(logs)})", shape)


def with_sink(w: Writer, logits: str) -> str:
    """Writes gpt-oss' softmax, whose last logit of each row stands for no key, or something near it."""
    *rows, keys = shape = w.shapes[logits]
    sinks = w.input(*(rows if w.odd(0.5) else (rows[1], 1)), 1)
    column = w.let(f"jnp.broadcast_to({sinks}, {(*rows, 1)}).astype({logits}.dtype)", (*rows, 1))
    columns = w.pick(
        f"[{logits}, {column}]", f"[{column}, {logits}]" if w.odd(0.5) else f"[{logits}, {column}]"
    )
    both = w.let(f"jnp.concatenate({columns}, -1)", (*rows, keys + 1))
    if w.draw.chance(0.5):
        both = w.let(f"{both} - {both}.max(-1, keepdims=True)", w.shapes[both])
    p = w.perturbed(softmax(w, both))
    return w.let(f"{p}[..., {'1:' if w.odd(0.5) else ':-1'}]", shape)


def capped(w: Writer, logits: str) -> str:
    """Writes Gemma's soft cap, or something near it."""
    shape = w.shapes[logits]
    cap = w.pick("5.0", "2.0", "30.0")
    inside = w.perturbed(w.let(f"{logits} / {w.number() if w.odd() else cap}", shape))
    if w.odd(2):
        inside = w.let(f"{inside} {w.pick('+', '-')} {w.number()}", shape, inside)
    bounded = w.perturbed(w.let(f"jnp.tanh({inside})", shape))
    return w.perturbed(w.let(f"{bounded} * {cap}", shape))


def attention(w: Writer, q: str, k: str, v: str) -> str:
    """Writes attention of q [B, T, N, H], k and v [B, S, K, H]."""
    batch, queries, heads, size = w.shapes[q]
    keys, key_heads = w.shapes[k][1:3]
    q, k, v = w.perturbed(q), w.perturbed(k), w.perturbed(v)
    scale = w.pick("H**-0.5", "0.3", "None").replace("H", str(size))
    if w.draw.chance(0.3):
        q = w.let(f"{q} * {w.number() if w.odd() else scale.replace('None', '0.5')}", w.shapes[q])
    if key_heads != heads:
        group = heads // key_heads
        k = w.let(f"jnp.repeat({k}, {group}, axis=2)", (batch, keys, heads, size))
        v = w.let(f"jnp.repeat({v}, {group}, axis=2)", (batch, keys, heads, w.shapes[v][-1]))
    shape = (batch, heads, queries, keys)
    logits = w.pick(
        f"jnp.einsum('btnh,bsnh->bnts', {q}, {k})",
        f"jnp.swapaxes({q}, 1, 2) @ {k}.transpose(0, 2, 3, 1)",
    )
    logits = w.perturbed(w.let(logits, shape))
    if scale != "None":
        step = w.pick(f"{logits} * {scale}", f"{logits} / {1 / eval(scale):.4g}")
        logits = w.perturbed(w.let(step, shape, logits))
    if w.odd(2):
        logits = w.let(f"{logits} {w.pick('+', '-')} {w.number()}", shape, logits)
    if w.draw.chance(0.3):
        logits = capped(w, logits)
    if w.draw.chance(0.25):
        bias = w.input(*w.pick((heads, queries, keys), (1, queries, keys), (heads, 1, keys)))
        logits = w.perturbed(w.let(w.pick(f"{logits} + {bias}", f"{logits} - {bias}"), shape))
    if w.odd():
        logits = of_windows(w, logits, shape)
    number = w.pick(*NUMBERS)
    for _ in range(w.pick(0, 1, 1, 1, 2)):
        logits = w.perturbed(masked(w, logits, batch, w.pick(*NUMBERS) if w.odd() else number))
    if w.odd():
        bias = w.input(heads, queries, keys)
        logits = w.let(f"{logits} + {bias}", shape, logits)
    if w.draw.chance(0.3):
        logits = w.let(f"wide({logits})", shape, logits)
    if w.draw.chance(0.2):
        p = with_sink(w, logits)
    elif w.draw.chance(0.1):
        where = mask(w, batch, queries, keys)
        p = w.perturbed(w.let(f"jax.nn.softmax({logits}, where={where}, axis=-1)", shape))
    else:
        p = w.perturbed(softmax(w, logits))
    p = w.let(f"{p}.astype({v}.dtype)", shape, p)
    result = (batch, queries, heads, w.shapes[v][-1])
    return w.perturbed(w.let(f"jnp.einsum('bnts,bsnh->btnh', {p}, {v})", result))


def of_heads(w: Writer) -> str:
    """Writes attention of three arguments."""
    batch, queries = w.pick(1, 2), w.pick(4, 5)
    keys, heads, size = w.pick(queries, queries, 4, 6), w.pick(2, 4), w.pick(4, 8)
    key_heads = w.pick(heads, heads, 2, 1)
    q = w.input(batch, queries, heads, size)
    k, v = (w.input(batch, keys, key_heads, size) for _ in range(2))
    if w.draw.chance(0.3):
        q, k = rotated(w, q), rotated(w, k) if keys == queries else k
    return attention(w, q, k, v)


def rotated(w: Writer, x: str) -> str:
    """Writes rope of x [B, T, N, H] by its positions."""
    _, length, _, size = shape = w.shapes[x]
    part = w.pick(size, size, size // 2)
    half = part // 2
    angles = w.let(
        f"jnp.arange({length}.0)[:, None] * 100.0 ** (-jnp.arange({half}) / {half})", (length, half)
    )
    cos = w.let(f"jnp.cos({angles})[None, :, None].astype({x}.dtype)", (1, length, 1, half))
    sin = w.let(f"jnp.sin({angles})[None, :, None].astype({x}.dtype)", (1, length, 1, half))
    if w.odd():
        sin = w.let(f"{w.number()} * {sin}", w.shapes[sin], sin)
    turned = x if part == size else w.let(f"{x}[..., :{part}]", (*shape[:-1], part))
    factor = f"{w.number()} * " if w.odd() else ""
    sign = w.pick("-", "+") if w.odd() else "-"
    kind = w.pick("halves", "neighbours", "rotate_half")
    if kind == "halves":
        a, b = f"{turned}[..., :{half}]", f"{turned}[..., {half}:]"
        y = f"jnp.concatenate([{a} * {cos} {sign} {b} * {sin}, {factor}{b} * {cos} + {a} * {sin}], -1)"
    elif kind == "neighbours":
        a, b = f"{turned}[..., ::2]", f"{turned}[..., 1::2]"
        y = (
            f"jnp.stack([{a} * {cos} {sign} {b} * {sin}, {b} * {cos} + {factor}{a} * {sin}], -1)"
            f".reshape({(*shape[:-1], part)})"
        )
    else:
        other = f"jnp.concatenate([-{turned}[..., {half}:], {turned}[..., :{half}]], -1)"
        y = f"{turned} * jnp.tile({cos}, 2) + {factor}{other} * jnp.tile({sin}, 2)"
    y = w.perturbed(w.let(y, (*shape[:-1], part)))
    return y if part == size else w.let(f"jnp.concatenate([{y}, {x}[..., {part}:]], -1)", shape)


def of_windows(w: Writer, logits: str, shape: tuple[int, ...]) -> str:
    """Adds a bias for each window of an image; the first axis of the logits is images times windows."""
    batch, _, queries, keys = shape
    images = w.pick(1, batch)
    windows = batch // images
    bias = w.input(windows, 1, queries, keys)
    split, added = (images, windows, *shape[1:]), f"{bias}[None]"
    if w.odd(2):
        split, added = (windows, images, *shape[1:]), f"{bias}[:, None]"
    logits = w.perturbed(w.let(f"{logits}.reshape({split}) + {added}", split))
    return w.let(f"{logits}.reshape({shape})", shape)


def self_attention(w: Writer, x: str) -> str:
    """Writes self-attention of x [B, T, D], with the products for q, k, v and the output."""
    batch, length, features = w.shapes[x]
    heads, size = 2, w.pick(4, 8)
    shape = (batch, length, heads, size)
    made = []
    if w.draw.chance(0.4):
        matrix = w.input(features, 3 * heads * size, kind="weight")
        both = w.perturbed(w.let(f"{x} @ {matrix}", (batch, length, 3 * heads * size)))
        if w.draw.chance(0.5):
            both = w.let(f"{both} + {w.input(3 * heads * size)}", w.shapes[both], both)
        for i in range(3):
            first = i * heads * size
            cut = f"{both}[..., {first}:{first + heads * size}].reshape({shape})"
            made.append(w.let(cut, shape))
    else:
        for _ in range(3):
            of = w.perturbed(x) if w.odd(0.5) else x
            if w.draw.chance(0.5):
                matrix = w.input(features, heads, size, kind="scale")
                y = w.let(f"jnp.einsum('btd,dnh->btnh', {of}, {matrix} * 0.2)", shape)
            else:
                matrix = w.input(features, heads * size, kind="weight")
                y = w.perturbed(w.let(f"{of} @ {matrix}", (batch, length, heads * size)))
                if w.draw.chance(0.4):
                    y = w.let(f"{y} + {w.input(heads * size)}", w.shapes[y], y)
                y = w.let(f"{y}.reshape({shape})", shape)
            made.append(w.perturbed(y))
    q, k, v = made
    if w.draw.chance(0.3):
        scales = [w.input(size, kind="scale") for _ in range(2)]
        q, k = (
            w.let(
                f"{y} * lax.rsqrt(jnp.mean({y} * {y}, -1, keepdims=True)"
                f" + {w.pick('1e-6', '1e-5') if w.odd() else '1e-6'}) * {scale}",
                shape,
                y,
            )
            for y, scale in zip((q, k), scales, strict=True)
        )
    if w.draw.chance(0.4):
        q, k = rotated(w, q), rotated(w, k)
    y = w.let(
        f"{attention(w, q, k, v)}.reshape({(batch, length, heads * size)})",
        (batch, length, heads * size),
    )
    return w.let(
        f"{y} @ {w.input(heads * size, features, kind='weight')}", (batch, length, features)
    )
