"""fuse: runs a model as it is written, with operators of this package in place of its operations.

`fuse(f)` traces f to a jaxpr (`trace`), makes a graph of it that looks through calls of `jax.jit`
(`graph`), and asks one recogniser after the other, in `recognisers`, what it finds there:

1. `attention`: two products with a softmax between them.
2. `group_norm`: GroupNorm, InstanceNorm and the norm of whole images, with the scale and shift of each
   image, the residual sum and the activation after.
3. `batch_norm`: BatchNorm in training, with the residual sum and the activation after.
4. `norm`: LayerNorm and RMSNorm, with the residual sum and the bias before, and the activation after.
5. `projection`: the products of one array that become queries, keys and values, with norm and rotation.
6. `perceptron`: two products with an activation or a gated unit between them, and gated units alone.
7. `cross_entropy`: the loss of a product.
8. `product`: a product with its bias, activation and residual, or as the gate of another array.
9. `patches`: a convolution whose windows do not overlap.
10. `conv`: any other, with what follows each channel (a bias, BatchNorm in inference), the residual sum
    and the activation.
11. `short_conv`: a depthwise convolution written as shifts of one array, each times a number a channel.
12. `max_pool`: the largest value of each window of an image.
13. `upsample`: `jax.image.resize`, bilinear by 2.
14. `rotation`: a rotation of interleaved pairs, or of a part of the features, outside any projection.

A recogniser starts at an operation that its operator cannot do without (the root of a norm, the
softmax of an attention), and asks for the algebra around it (`algebra`), however it is written: a
product of powers, a sum of terms, a mean, seen through casts and broadcasts, and for images through
reshapes and transpositions (`frame`, `moments`). Activations are recognised by their values, and by
their derivatives if they have corners (`activation`). What it finds is a `site`: inputs, outputs and
the operations between them, whose results nothing else may use. `evaluate` runs the program with its
sites, and the rest unchanged. A convolution that shares its input with one other site returns it to
that site, so that its dgrad kernel adds both gradients (`shortcuts`).

The rules are these:

- Only a program that is not differentiated yet is changed. Its gradients are then the operators' own.
- An operator replaces operations only if it rounds no earlier than they do: with bfloat16 arguments
  only if the program's result is bfloat16 too. Dtypes stay.
- Nothing is replaced across a custom_vjp, a stop_gradient, or a custom_jvp of no known activation.
- A query without keys gets the program's result: the mean of the values if masked logits are one
  finite number. Masks of -inf are replaced only if each query provably has a key.
- Where exponentials of logits overflow because the program subtracts no maximum, it gets the softmax in
  place of NaN.
- On a GPU, operations are replaced only if a kernel takes their shapes and dtypes. What an operator
  refuses is never replaced.
- Random bits stay the program's own: an attention that drops probabilities is not replaced.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any, cast

from jaxfused.fusion import evaluate, graph, report
from jaxfused.fusion.recognise import recognise
from jaxfused.fusion.trace import trace


def fuse[F: Callable[..., Any]](f: F, *, without: Collection[str] = ()) -> F:
    r"""Returns f, with fused operators in the places of the operations that they compute.

    It goes around a model's forward, or a loss, and inside `jax.grad`:

        def loss(params, batch):
            logits = jaxfused.fuse(model.apply)(params, batch.images)
            ...

    `jaxfused.explain(jaxfused.fuse(f), *args)` says what is found, and why something is not. Activations
    are found however they are written, if they have the values of one of `jaxfused.ACTIVATIONS` and, at
    corners, its derivatives: `jnp.clip(x, 0, 6)` has others than `jax.nn.relu6`.

    Args:
      f: a function of arrays: `model.apply` of Flax's Linen or of Haiku, a module of `flax.nnx` or
        Equinox, or a plain function. It may be used inside and outside `jax.jit`, `jax.grad`,
        `jax.vmap`, `lax.scan` and `jax.checkpoint`. A function that is differentiated already, such
        as `jax.grad(loss)`, runs as it is.
      without: what to leave alone: names of operators ("layer_norm"), labels ("layer_norm#3") or lines
        ("model.py:12"), as `explain` prints them. By halves one finds the site that makes a difference.

    Returns:
      A function with f's signature, whose results are f's but for rounding. Arrays among the arguments
      are traced; everything else is static. It is traced at every call: call it inside `jax.jit`.

    Raises:
      ValueError: `without` is a string instead of a collection of them.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> def f(x, scale):
      ...     return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale
      >>> x, scale = jnp.ones((2, 8)), jnp.ones(8)
      >>> report = jaxfused.explain(jaxfused.fuse(f), x, scale)
      >>> report.fusions[0].counts()
      {'rms_norm': 1}

    Source: own work.
    """
    if isinstance(without, str):
        raise ValueError(
            f"fuse: without={without!r} is a string, but it holds several; pass ({without!r},)."
        )

    @functools.wraps(f, updated=())
    def fused(*args: Any, **kwargs: Any) -> Any:
        with trace(f, args, kwargs) as traced:
            program = graph.build(traced.jaxpr)
            refused: dict[str, str] = {}
            while True:
                found = recognise(program, name_of(f), tuple(without), refused)
                try:
                    results = evaluate.run(found.plan, traced.arguments)
                    break
                except evaluate.Refused as refusal:
                    if refusal.site.label in refused:
                        raise
                    refused[refusal.site.label] = str(refusal)
            report.record(found.report)
            return traced.finish(results)

    return cast(F, fused)


def name_of(f: Callable[..., Any]) -> str:
    """Returns the name of a function, or of the class of a module."""
    return getattr(f, "__qualname__", type(f).__name__)
