"""`paged_attention(prefix_pages=)`: the pages that all sequences share are attended to once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused import dispatch
from tests.support.arrays import put
from tests.support.calls import have_library
from tests.support.lowering import kernels

PAGES, PAGE = 3, 8
"""Shared pages, and tokens of a page."""


def operands(tokens=1, heads=(4, 2), size=16, layout="KPSH", dtype=jnp.float32, page=PAGE):
    """Returns queries, pages, lengths and the table of four sequences that share PAGES; one is empty."""
    random = np.random.default_rng(tokens)
    table = random.permutation(32)[:24].reshape(4, 6)
    table[:, :PAGES] = table[0, :PAGES]
    table[1] = 99  # The empty sequence's pages are not read.
    lengths = np.array([PAGES * page + tokens + 5, 0, 6 * page, PAGES * page + tokens])
    shape = (heads[1], 32, page, size) if layout == "KPSH" else (32, page, heads[1], size)
    query = put(random.normal(size=(4, tokens, heads[0], size)), dtype)
    key, value = (put(random.normal(size=shape), dtype) for _ in range(2))
    return query, key, value, put(lengths), put(table.astype(np.int32))


def call(pages, *arrays, implementation=None, **options):
    attend = functools.partial(jaxfused.paged_attention, scale=0.3, prefix_pages=pages, **options)
    return attend(*arrays, implementation=implementation)


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (1, dict(layout="PSKH")),
        (3, dict(attn_logits_soft_cap=5.0, sinks=np.linspace(-1, 1, 4, dtype=np.float32))),
    ],
)
def test_output_and_gradients_are_those_of_whole_sequences(tokens, options):
    query, *pools, lengths, table = operands(tokens, layout=options.get("layout", "KPSH"))

    def of(pages):
        def loss(query, *pools):
            output = call(pages, query, *pools, lengths, table, **options)
            return jnp.sum(output**2), output

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(query, *pools)

    for part, whole in zip(jax.tree.leaves(of(PAGES)), jax.tree.leaves(of(0)), strict=True):
        np.testing.assert_allclose(part, whole, rtol=1e-4, atol=1e-5)


def test_quantised_pages_are_shared():
    query, *pools, lengths, table = operands()
    pools = [jaxfused.quantize(pool, "int8", axis=-1) for pool in pools]
    part, whole = (call(pages, query, *pools, lengths, table) for pages in (PAGES, 0))
    np.testing.assert_allclose(part, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["table", "length", "pool"])
def test_sequences_without_the_pages_are_attended_to_whole(change):
    query, *pools, lengths, table = operands()
    if change == "table":
        table = table.at[2, 1].set(31)
    elif change == "length":
        lengths = lengths.at[3].set(PAGES * PAGE)
    else:
        table = table.at[:, 0].set(-1)
    arrays = (query, *pools, lengths, table)
    np.testing.assert_array_equal(call(PAGES, *arrays), call(0, *arrays))


@pytest.mark.parametrize("pages", [-1, 6, 1.5])
def test_pages_that_do_not_fit_are_refused(pages):
    with pytest.raises(ValueError, match="prefix_pages"):
        call(pages, *operands())


def test_parts_run_as_kernels(monkeypatch):
    have_library(monkeypatch)
    arrays = operands(heads=(8, 2), size=128, dtype=jnp.bfloat16, page=64)
    with dispatch.assume(dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)):
        names = kernels(functools.partial(call, PAGES), *arrays)
    own = whole = "jaxfused_cached_attention"
    assert sorted(names) == sorted([own, "attention_forward", whole])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5])
def test_kernels_agree_with_xla(tokens):
    arrays = operands(tokens, heads=(8, 2), size=128, dtype=jnp.bfloat16, page=16)
    part = call(PAGES, *arrays, implementation="cuda", sinks=put(np.linspace(-1, 1, 8)))
    whole = call(0, *arrays, implementation="xla", sinks=put(np.linspace(-1, 1, 8)))
    part, whole = (np.asarray(x, np.float32) for x in (part, whole))
    np.testing.assert_allclose(part, whole, rtol=2**-6, atol=2e-2)
