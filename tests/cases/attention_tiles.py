"""Draws, configs and a call of attention's long kernels, for tests whose CTAs have several tiles."""

from dataclasses import replace

import numpy as np

from pallas_kernels.attention import attention
from pallas_kernels.attention.backward import BackwardConfig
from pallas_kernels.attention.backward_dq import QueryGradientConfig
from pallas_kernels.attention.forward import ForwardConfig
from pallas_kernels.attention.key_gradient_config import KeyGradientConfig

DEFAULT = (ForwardConfig(), QueryGradientConfig(), KeyGradientConfig())
TURNS = (
    ForwardConfig(takes_turns=True),
    QueryGradientConfig(key_block=64),
    KeyGradientConfig(multiplies_early=False),
)
ONE_CONSUMER = (
    ForwardConfig(consumers=1, key_block=64),
    QueryGradientConfig(),
    KeyGradientConfig(query_block=96, tile_stages=1),
)
SPLIT_ROLES = (ForwardConfig(), QueryGradientConfig(), KeyGradientConfig(splits_roles=True))
WIDE = (ForwardConfig(), QueryGradientConfig(), KeyGradientConfig(query_block=128))


NARROW = (
    ForwardConfig(consumers=1, key_block=64),
    QueryGradientConfig(consumers=1, key_block=64),
    KeyGradientConfig(warpgroups=1),
)


def with_own_lists(configs, shares=1, **forward):
    """Returns configs in which consumers visit ranges of their own; `forward` has further options."""
    first, queries, keys = configs
    own = dict(own_lists=True, shares=shares)
    return replace(first, **own, **forward), replace(queries, **own), replace(keys, **own)


def draws(random, queries, keys, heads, head_size):
    """Returns query, key, value and dout of one sequence and one key head, in float16."""
    return tuple(
        random.normal(size=(1, count, n, head_size)).astype(np.float16)
        for count, n in ((queries, heads), (keys, 1), (keys, 1), (queries, heads))
    )


def in_kernels(configs, query, key, value, dout, operands, logits):
    """Returns the output and the gradients, by configs of the forward and of the backward's kernels."""
    for_out, *backward = configs
    how = dict(logits=logits, multiprocessors=1)
    out, lse, *rest = attention.forward(query, key, value, operands, **how, config=for_out)
    if rest:
        operands = operands._replace(lse_rest=rest[0][:, :, : query.shape[1], None])
    gradients = attention.backward(
        query, key, value, operands, out, lse, dout, None, **how, config=BackwardConfig(*backward)
    )
    return out, *gradients
