"""Every operator of the fuzz, with functions that draw its options and build its problem."""

import json
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.fuzz import attention, convolutions, images, losses, norms, others, products, sparse
from benchmarks.fuzz.problem import Options, Problem
from benchmarks.run.draw import Draw


class Operator(NamedTuple):
    draw: Callable[[Draw], Options]
    problem: Callable[[Options], Problem]
    share: int
    """Relative frequency of the operator's cases, larger for operators with more options."""


OPERATORS = {
    "attention": Operator(attention.draw_attention, attention.attention, 8),
    "layer_norm": Operator(norms.draw_norm, norms.layer_norm, 4),
    "rms_norm": Operator(norms.draw_norm, norms.rms_norm, 3),
    "linear": Operator(products.draw_linear, products.linear, 3),
    "mlp": Operator(products.draw_mlp, products.mlp, 3),
    "gated_mlp": Operator(products.draw_mlp, products.gated_mlp, 3),
    "ragged_dot": Operator(products.draw_ragged_dot, products.ragged_dot, 2),
    "ragged_mlp": Operator(products.draw_ragged_mlp, products.ragged_mlp, 2),
    "block_sparse_matmul": Operator(sparse.draw_block_sparse, sparse.block_sparse_matmul, 1),
    "sparse24_matmul": Operator(sparse.draw_sparse24, sparse.sparse24_matmul, 1),
    "sparse_matmul": Operator(sparse.draw_sparse_matmul, sparse.sparse_matmul, 1),
    "sampled_matmul": Operator(sparse.draw_sparse_matmul, sparse.sampled_matmul, 1),
    "rope": Operator(others.draw_rope, others.rope, 3),
    "qkv_projection": Operator(others.draw_qkv_projection, others.qkv_projection, 3),
    "group_norm": Operator(norms.draw_group_norm, norms.group_norm, 1),
    "batch_norm": Operator(norms.draw_batch_norm, norms.batch_norm, 1),
    "quantized_matmul": Operator(products.draw_quantized_matmul, products.quantized_matmul, 1),
    "conv": Operator(convolutions.draw_conv, convolutions.conv, 2),
    "depthwise_conv": Operator(convolutions.draw_depthwise_conv, convolutions.conv, 1),
    "quantized_conv": Operator(convolutions.draw_quantized_conv, convolutions.quantized_conv, 1),
    "quantize_rows": Operator(products.draw_quantize_rows, products.quantize_rows, 1),
    "max_pool": Operator(images.draw_max_pool, images.max_pool, 1),
    "upsample": Operator(images.draw_upsample, images.upsample, 1),
    "softmax_cross_entropy": Operator(losses.draw_cross_entropy, losses.softmax_cross_entropy, 1),
    "linear_softmax_cross_entropy": Operator(
        losses.draw_cross_entropy, losses.linear_softmax_cross_entropy, 1
    ),
    "sigmoid_cross_entropy": Operator(losses.draw_sigmoid, losses.sigmoid_cross_entropy, 1),
    "segmentation_loss": Operator(losses.draw_segmentation, losses.segmentation_loss, 1),
    "optimizer": Operator(others.draw_optimizer, others.optimizer_step, 1),
}


def drawn(seed: int, index: int, names: list[str], largest: int | None = None) -> Options:
    """Returns case `index` of a seed, among the operators `names`; `largest` bounds its sizes."""
    draw = Draw(seed, f"fuzz {index}", largest)
    name = draw.pick([name for name in names for _ in range(OPERATORS[name].share)])
    options = {"operator": name, "data": draw.between(0, 2**31 - 1)}
    # Some cases name "pallas" or "cuda", because autotuning may choose any kernel that can run.
    options |= dict(implementation=draw.pick((None, None, None, None, "pallas", "cuda")))
    options |= OPERATORS[name].draw(draw)
    # Under vmap either all operands have the batch axis, or only the first.
    vmap = draw.pick(("all", "first")) if draw.chance(0.2) else None
    return options | dict(vmap=vmap, vmap_size=draw.pick((1, 2, 3)), gradient=draw.chance(0.75))


def problem_of(options: Options) -> Problem:
    return OPERATORS[options["operator"]].problem(options)


def to_line(options: Options) -> str:
    """Returns the command that runs this case alone."""
    text = json.dumps(options, separators=(",", ":"))
    return f"python -m benchmarks fuzz --case '{text}'"
