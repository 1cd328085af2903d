"""Stand-ins in jax.numpy for the CUDA kernels of optimizer steps, to test their callers."""

import contextlib
import math

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.optimizer import gradient_norm_cuda, optimizer_step_cuda
from jaxfused.ops.optimizer.optimizer_step_cuda import Leaf, Scalars
from jaxfused.optim import EightBitMoment, eight_bit
from jaxfused.runtime import cuda_library, stochastic_rounding
from jaxfused.runtime.dropout import murmur

HOPPER = dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)


def wide(array):
    return None if array is None else array.astype(jnp.float32)


def sum_of_squares(factor, gradients):
    """Stands in for `gradient_norm.sum_of_squares`."""
    scaled = [factor * wide(g) for g in gradients]
    squares = sum(jnp.sum(g * g) for g in scaled)
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in scaled]))
    return jnp.stack([squares, jnp.where(finite, 0.0, 1.0)])


def direction(rule, s, nesterov, g, m, v):
    """Returns (direction, first moment, second moment)."""
    if rule == "lion":
        return jnp.sign(s.one_minus_b1 * g + s.b1 * m), s.one_minus_b2 * g + s.b2 * m, None
    if rule == "sgd":
        if m is None:
            return g, None, None
        m = g + s.b1 * m
        return (g + s.b1 * m if nesterov else m), m, None
    if rule != "lamb_write":
        m = s.one_minus_b1 * g + s.b1 * m
        v = s.one_minus_b2 * g * g + s.b2 * v
    top = s.moment_weight * m
    if nesterov:
        top = top + s.gradient_weight * g
    return top / (jnp.sqrt(v * s.inverse_bias2 + s.eps_root) + s.eps), m, v


def halves(random, i, array, shape):
    """Returns 16 random bits for each number of a leaf, or of this device's shard of it."""
    seeds, base = random[i, 2 * array : 2 * array + 2], random[i, 6]
    local = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    index = base + local
    for chunk, skip in zip(random[i, 7:10], random[i, 10:13], strict=True):
        index += jnp.where(chunk == 0, 0, local // jnp.maximum(chunk, 1) * skip)
    word = murmur(seeds[0] ^ (index >> 1), seeds[1])
    return jnp.where(index & 1, word >> 16, word & 0xFFFF)


@contextlib.contextmanager
def halves_of(random, i, array):
    """Makes the reference take its random bits from the kernels' table within this context."""
    own = stochastic_rounding.random_halves
    stochastic_rounding.random_halves = lambda seeds, shape: halves(random, i, array, shape)
    try:
        yield
    finally:
        stochastic_rounding.random_halves = own


def round_at_random(random, rounded, i, name, leaf, values):
    old = getattr(leaf, name)
    if name not in rounded or old is None or old.dtype != jnp.bfloat16:
        return values
    bits = halves(random, i, stochastic_rounding.ARRAYS.index(name), values.shape)
    return stochastic_rounding.round_to_bfloat16(values, bits).astype(jnp.float32)


def step(
    rule,
    scalars,
    stats,
    leaves,
    decays,
    *,
    clips,
    skips_nonfinite,
    nesterov,
    norms=None,
    random=None,
    rounded=(),
):
    """Stands in for `optimizer_step.step`."""
    s = Scalars(*scalars)
    factor = s.inverse_loss_scale
    if clips:
        norm = jnp.sqrt(stats[0])
        factor *= jnp.where(norm < s.max_norm, 1.0, s.max_norm / norm)
    skips = stats[1] != 0 if skips_nonfinite else jnp.array(False)
    new_leaves, new_norms = [], []
    for i, (leaf, decays_here) in enumerate(zip(leaves, decays, strict=True)):
        m, v = leaf.first_moment, leaf.second_moment
        coded = leaf.first_scale is not None
        assert coded == (rule == "adam_8bit")
        if coded:
            m = eight_bit.decode(EightBitMoment(m, leaf.first_scale))
            v = eight_bit.decode(EightBitMoment(v, leaf.second_scale))
        g, p, m, v, e = map(wide, (leaf.gradient, leaf.parameter, m, v, leaf.average))
        assert (g is None) == (rule == "lamb_write")
        u, m, v = direction(rule, s, nesterov, None if g is None else g * factor, m, v)
        if decays_here:
            u = u + s.weight_decay * p
        if rule in ("lamb_moments", "lamb_norms"):
            new_norms.append(jnp.stack([jnp.sum(p * p), jnp.sum(u * u)]))
        else:
            ratio = 1.0
            if rule in ("lamb_write", "lamb_whole"):
                zero = (norms[i, 0] == 0) | (norms[i, 1] == 0)
                ratio = jnp.where(zero, 1.0, jnp.sqrt(norms[i, 0]) / jnp.sqrt(norms[i, 1]))
            p = p - s.learning_rate * ratio * u
            p = round_at_random(random, rounded, i, "parameter", leaf, p)
            p = p.astype(leaf.parameter.dtype).astype(jnp.float32)
            if e is not None:
                e = s.average_decay * e + s.one_minus_average_decay * p
        if rule == "lamb_norms":
            new_leaves.append(leaf)
            continue
        if rule != "lamb_write":
            m = round_at_random(random, rounded, i, "first_moment", leaf, m)
            v = round_at_random(random, rounded, i, "second_moment", leaf, v)
        scales = (None, None)
        if coded:
            of_first = EightBitMoment(leaf.first_moment, leaf.first_scale)
            of_second = EightBitMoment(leaf.second_moment, leaf.second_scale)
            with halves_of(random, i, 1):
                m = eight_bit.encode(m, of_first, None)
            with halves_of(random, i, 2):
                v = eight_bit.encode(v, of_second, None)
            m, v, scales = m.codes, v.codes, (m.scales, v.scales)
        new = Leaf(g, p, m, v, e, None if leaf.copy is None else p, *scales)
        new_leaves.append(
            Leaf(
                *(
                    None if old is None else jnp.where(skips, old, value.astype(old.dtype))
                    for old, value in zip(leaf, new, strict=True)
                )
            )
        )
    return new_leaves, jnp.stack(new_norms) if new_norms else None


@contextlib.contextmanager
def stood_in_for(monkeypatch):
    """Makes steps run these stand-ins for the kernels within this context, without a GPU."""
    monkeypatch.setattr(optimizer_step_cuda, "step", step)
    monkeypatch.setattr(gradient_norm_cuda, "sum_of_squares", sum_of_squares)
    monkeypatch.setattr(cuda_library, "why_unavailable", lambda: None)
    with dispatch.assume(HOPPER):
        yield
    jax.clear_caches()
