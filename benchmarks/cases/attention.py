"""dot_product_attention, plain and causal, forward and with gradients: long sequences and a ViT's."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.cases import of_config
from benchmarks.run.case import BEST_PEER, TERAFLOPS, Bar, Case, Function
from benchmarks.sweep.attention import stock_fits
from benchmarks.sweep.configs import Attention

Shape = tuple[int, ...]
"""Sizes (batch, tokens, heads, head size), or (batch, tokens, heads, key heads, head size)."""

_LONGEST: Shape = (1, 16384, 16, 128)
_VIT: tuple[Shape, ...] = ((64, 197, 12, 64), (256, 197, 12, 64))
PLAIN: tuple[Shape, ...] = ((4, 4096, 16, 128), _LONGEST, (4, 4096, 16, 64), *_VIT)
CAUSAL: tuple[Shape, ...] = (
    (4, 4096, 16, 128),
    (2, 8192, 32, 8, 128),
    (4, 4096, 16, 64),
    (2, 4096, 16, 256),
    (1, 4096, 16, 4, 512),
    (4, 2048, 8, 320),
)
_LARGEST_HEAD = 256
"""Head size beyond which the kernel is one of its own, which XLA may beat, and has no gradient."""
QUICK_PLAIN = (PLAIN[0], _VIT[0])
QUICK_CAUSAL = CAUSAL[:2]

# If a query gives nearly all of its weight to one key, its gradient is the difference of two nearly
# equal numbers, one of which comes from an output rounded to bfloat16.
GRADIENT_ERROR_LIMIT = 5e-2


def cases(
    quick: bool = False,
    plain: Sequence[Shape] | None = None,
    causal: Sequence[Shape] | None = None,
) -> list[Case]:
    """Returns a case for each operation at each shape, in the order of measurement."""
    plain = plain or (QUICK_PLAIN if quick else PLAIN)
    causal = causal or (QUICK_CAUSAL if quick else CAUSAL)
    return [
        _case(shape, is_causal=is_causal, with_gradient=with_gradient)
        for is_causal, shapes in ((False, plain), (True, causal))
        for with_gradient in (False, True)
        for shape in shapes
    ]


# --- ours and the peers, as functions of (q, k, v) ------------------------------------------------


def padded_cudnn_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Pads the tokens to a multiple of 64: cuDNN's attention refuses gradients of other lengths."""
    length = query.shape[1]
    padding = ((0, 0), (0, -length % 64), (0, 0), (0, 0))
    lengths = jnp.full(len(query), length, jnp.int32)
    attended = jax.nn.dot_product_attention(
        *(jnp.pad(array, padding) for array in (query, key, value)),
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return attended[:, :length]


def _tokamax(q, k, v, *, is_causal, implementation):
    import tokamax

    return tokamax.dot_product_attention(
        q, k, v, is_causal=is_causal, implementation=implementation
    )


def in_torch(q, k, v, *, backend, is_causal):
    import torch
    from torch.nn import attention

    with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
        output = torch.nn.functional.scaled_dot_product_attention(
            *(array.transpose(1, 2) for array in (q, k, v)),
            is_causal=is_causal,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return output.transpose(1, 2)


# --- the cases ------------------------------------------------------------------------------------


def _case(shape: Shape, *, is_causal: bool, with_gradient: bool) -> Case:
    batch, length, heads, *shared, head_size = shape
    key_heads = shared[0] if shared else heads
    config = Attention(
        batch=batch,
        queries=length,
        keys=length,
        key_heads=key_heads,
        group=heads // key_heads,
        head_size=head_size,
        dtype="bfloat16",
        causal=is_causal,
    )
    peers: dict[str, Function] = {
        "cudnn": partial(jax.nn.dot_product_attention, is_causal=is_causal, implementation="cudnn"),
        "tokamax": partial(_tokamax, is_causal=is_causal, implementation="mosaic"),
    }
    if length % 64:
        peers["cudnn_padded"] = padded_cudnn_attention
        peers["tokamax_triton"] = partial(_tokamax, is_causal=is_causal, implementation="triton")
    of_torch = {"torch_cudnn": "CUDNN_ATTENTION", "torch_flash": "FLASH_ATTENTION"}
    logits = f"its logits alone take {4 * config.logits() / 2**30:.0f} GiB"
    direction = of_config.WITH_GRADIENTS if with_gradient else of_config.FORWARD
    return of_config.case(
        f"{'causal ' if is_causal else ''}attention {direction}",
        shape,
        config,
        stock="jax.nn",
        with_gradient=with_gradient,
        # The backward reads q, k, v and the output.
        read_again=4 * batch * length * (heads + key_heads) * head_size if with_gradient else 0,
        flops=4 * config.logits() * head_size // (2 if is_causal else 1),
        # Two products forward, and five backward, which computes the logits again.
        backward=5 / 2,
        bars=_bars(shape, is_causal=is_causal, with_gradient=with_gradient),
        peers=peers,
        torch_peers={
            name: partial(partial, in_torch, backend=backend, is_causal=is_causal)
            for name, backend in of_torch.items()
        },
        skipped={} if stock_fits(config) else dict.fromkeys(("reference", "xla"), logits),
        error_limit=GRADIENT_ERROR_LIMIT if with_gradient else 1e-2,
    )


def _bars(shape: Shape, *, is_causal: bool, with_gradient: bool) -> tuple[Bar, ...]:
    bars = [Bar("tokamax", must=1.0), Bar("cudnn", aim=1.0)]
    if shape[-1] > _LARGEST_HEAD:
        return () if with_gradient else (Bar("reference", must=1.0, ours="pallas"),)
    if shape in _VIT and with_gradient:
        # JAX refuses cuDNN's gradient for 197 tokens.
        bars = [Bar("tokamax", must=1.0), Bar(BEST_PEER, must=1.3)]
    if shape == _LONGEST:
        bars.append(Bar(TERAFLOPS, aim=600.0 if with_gradient else 700.0))
    if shape == PLAIN[0] and not is_causal:
        bars.append(Bar(TERAFLOPS, must=220.0 if with_gradient else 250.0, ours="cuda"))
    return tuple(bars)
