"""Cases of the sweep: an operator with sizes and options, drawn at random or parsed from JSON."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, get_args

from benchmarks.run.draw import HEAD_SIZES, MOST_ELEMENTS, MOST_FLOPS, VISION_TOKENS, Draw
from benchmarks.sweep import image_configs, quantized_configs
from benchmarks.sweep.image_configs import (
    Conv,
    DepthwiseConv,
    ImageNorm,
    InvertedResidual,
    Pool,
    Upsample,
)
from benchmarks.sweep.product_sizes import ACTIVATIONS, eights, hidden_features, product_fits
from benchmarks.sweep.quantized_configs import (
    Fp8Linear,
    Fp8MLP,
    QuantizedConv,
    QuantizedMatmul,
    QuantizedNorm,
    QuantizedProduct,
    QuantizedRows,
)

MOST_TRUTH_LOGITS = 2**30
"""Most logits of the query heads that share a key head; the float32 truth computes them at once."""


@dataclass(frozen=True)
class Norm:
    """layer_norm or rms_norm over [batch, tokens, width]."""

    operator: str
    batch: int
    tokens: int
    width: int
    dtype: str
    residual: bool
    bias: bool
    pre_bias: bool = False
    """True if a bias and a relu are applied before the norm."""

    def fits(self) -> bool:
        return self.batch * self.tokens * self.width <= MOST_ELEMENTS

    def tiny(self) -> "Norm":
        return replace(self, batch=_least(self.batch), tokens=_least(self.tokens), width=24)


@dataclass(frozen=True)
class Attention:
    """dot_product_attention; a query attends to at most `window` keys before its own, 0 for all."""

    batch: int
    queries: int
    keys: int
    key_heads: int
    group: int
    head_size: int
    dtype: str
    causal: bool = False
    window: int = 0
    segments: int = 0
    """Number of documents packed into a sequence, 0 for no segment ids."""
    lengths: bool = False
    bias_batch: int = 0
    """Batch size of a bias [batch, heads, queries, keys], 0 for no bias."""
    operator: ClassVar[str] = "attention"

    @property
    def heads(self) -> int:
        return self.key_heads * self.group

    def logits(self) -> int:
        return self.batch * self.heads * self.queries * self.keys

    def fits(self) -> bool:
        return (
            4 * self.logits() * self.head_size <= MOST_FLOPS
            and self.group * self.queries * self.keys <= MOST_TRUTH_LOGITS
            and self.bias_batch * self.heads * self.queries * self.keys <= MOST_ELEMENTS
            and self.batch * self.queries * self.heads * self.head_size <= MOST_ELEMENTS
            and self.batch * self.keys * self.key_heads * self.head_size <= MOST_ELEMENTS
        )

    def tiny(self) -> "Attention":
        return replace(
            self,
            batch=_least(self.batch),
            queries=min(self.queries, 9),
            keys=min(self.keys, 9),
            key_heads=_least(self.key_heads),
            group=_least(self.group),
            head_size=16,
            window=min(self.window, 3),
            bias_batch=min(self.bias_batch, 1),
        )


@dataclass(frozen=True)
class Linear:
    """linear over [batch, tokens, width] to `out` features."""

    batch: int
    tokens: int
    width: int
    out: int
    dtype: str
    param_dtype: str
    bias: bool
    activation: str | None
    residual: bool
    operator: ClassVar[str] = "linear"

    def fits(self) -> bool:
        rows = self.batch * self.tokens
        return product_fits(rows, self.width, self.out)

    def tiny(self) -> "Linear":
        return replace(self, batch=_least(self.batch), tokens=_least(self.tokens), width=16, out=24)


@dataclass(frozen=True)
class MLP:
    """mlp or gated_mlp over [batch, tokens, width]; with `stacked`, w_gate and w_up are concatenated."""

    operator: str
    batch: int
    tokens: int
    width: int
    hidden: int
    dtype: str
    param_dtype: str
    bias: bool
    activation: str
    residual: bool
    save: str
    stacked: bool = False

    def fits(self) -> bool:
        rows = self.batch * self.tokens
        products = 3 if self.operator == "gated_mlp" else 2
        return product_fits(products * rows, self.width, self.hidden)

    def tiny(self) -> "MLP":
        return replace(
            self, batch=_least(self.batch), tokens=_least(self.tokens), width=16, hidden=24
        )


@dataclass(frozen=True)
class Rope:
    """rope of q [batch, tokens, heads, head_size] and, unless `key_heads` is 0, of k."""

    batch: int
    tokens: int
    heads: int
    key_heads: int
    head_size: int
    rotary_dim: int
    dtype: str
    interleaved: bool
    tables: bool
    """True if cos and sin are operands; else the operator computes them for positions 0, 1, 2, ..."""
    operator: ClassVar[str] = "rope"

    def fits(self) -> bool:
        return self.batch * self.tokens * self.heads * self.head_size <= MOST_ELEMENTS

    def tiny(self) -> "Rope":
        return replace(
            self,
            batch=_least(self.batch),
            tokens=min(self.tokens, 5),
            heads=2,
            key_heads=min(self.key_heads, 1),
            head_size=16,
            rotary_dim=16 if self.rotary_dim == self.head_size else 8,
        )


@dataclass(frozen=True)
class QKVProjection:
    """qkv_projection over [batch, tokens, width]."""

    batch: int
    tokens: int
    width: int
    key_heads: int
    group: int
    head_size: int
    dtype: str
    param_dtype: str
    bias: bool
    norm: bool
    rope: bool
    interleaved: bool
    operator: ClassVar[str] = "qkv_projection"

    @property
    def heads(self) -> int:
        return self.key_heads * self.group

    @property
    def out(self) -> int:
        return (self.heads + 2 * self.key_heads) * self.head_size

    def fits(self) -> bool:
        return product_fits(self.batch * self.tokens, self.width, self.out)

    def tiny(self) -> "QKVProjection":
        return replace(
            self,
            batch=_least(self.batch),
            tokens=_least(self.tokens),
            width=16,
            key_heads=_least(self.key_heads),
            group=_least(self.group),
            head_size=16,
        )


@dataclass(frozen=True)
class CrossEntropy:
    """The mean of softmax_cross_entropy over [batch, tokens, classes], with the cotangent 1."""

    batch: int
    tokens: int
    classes: int
    dtype: str
    smoothing: float
    ignored: bool
    """True if some labels are ignored."""
    operator: ClassVar[str] = "softmax_cross_entropy"

    def fits(self) -> bool:
        return self.batch * self.tokens * self.classes <= 4 * MOST_ELEMENTS

    def tiny(self) -> "CrossEntropy":
        return replace(
            self,
            batch=_least(self.batch),
            tokens=min(self.tokens, 3),
            classes=min(self.classes, 30),
        )


Config = Norm | Attention | Linear | MLP | Rope | QKVProjection | CrossEntropy
Config |= ImageNorm | Conv | DepthwiseConv | InvertedResidual | Pool | Upsample
Config |= QuantizedMatmul | QuantizedProduct | QuantizedRows | QuantizedNorm | QuantizedConv
Config |= Fp8Linear | Fp8MLP


def _least(size: int) -> int:
    return min(size, 2)


# --- drawing cases at random ----------------------------------------------------------------------


def _norm(draw: Draw, operator: str) -> Norm:
    name = operator.removesuffix("_residual")
    batch, tokens = draw.batch_and_tokens()
    # One case in ten normalises heads, as the norms of queries and keys do.
    of_heads = draw.chance(0.1)
    return Norm(
        operator=name,
        batch=batch,
        tokens=tokens * draw.pick((4, 12, 16, 32)) if of_heads else tokens,
        width=draw.pick(HEAD_SIZES) if of_heads else draw.width(),
        dtype=draw.dtype("float32"),
        residual=operator != name,
        bias=name == "layer_norm" and draw.chance(0.9),
    )


def _attention(draw: Draw) -> Attention:
    kind = draw.pick(("vision", "vision", "vision", "swin", *["text"] * 5, "decode", "cross"))
    dtype = draw.dtype()
    if kind == "swin":
        config = Attention(
            batch=draw.shard(draw.batch(4096)),
            queries=(tokens := draw.pick((49, 64, 144))),
            keys=tokens,
            key_heads=draw.pick((3, 4, 6, 8, 12, 16, 24, 32)),
            group=1,
            head_size=32,
            dtype=dtype,
            bias_batch=1,
        )
    elif kind == "vision":
        tokens = draw.pick(VISION_TOKENS) if draw.chance(0.8) else draw.size(1, 4096)
        config = Attention(
            batch=draw.shard(draw.batch(512)),
            queries=tokens,
            keys=tokens,
            key_heads=draw.shard(draw.pick((3, 6, 12, 16))),
            group=1,
            head_size=draw.pick((64, 64, 64, 72, 80, 96, 112, 128)),
            dtype=dtype,
            lengths=draw.chance(0.15),
        )
    else:
        config = _text_attention(draw, kind, dtype)
    return config


def _text_attention(draw: Draw, kind: str, dtype: str) -> Attention:
    keys = draw.tokens()
    sizes: dict[str, Any] = dict(
        batch=draw.shard(draw.batch(16)),
        queries=keys,
        keys=keys,
        key_heads=draw.shard(draw.pick((1, 2, 4, 8, 8, 16, 32))),
        group=draw.pick((1, 1, 2, 4, 5, 7, 8)),
        head_size=draw.pick(HEAD_SIZES),
        dtype=dtype,
    )
    if kind == "decode":
        sizes |= dict(batch=draw.rounded(1, 128), queries=draw.pick((1, 1, 1, 4)), lengths=True)
        return Attention(**sizes)
    if kind == "cross":
        return Attention(**sizes | dict(queries=draw.rounded(1, 4096), lengths=draw.chance(0.5)))
    mask = draw.pick(
        ("causal", "causal", "causal", "none", "window", "segments", "lengths", "bias")
    )
    masks: dict[str, dict[str, Any]] = {
        "causal": dict(causal=True),
        "none": dict(),
        "window": dict(causal=True, window=draw.pick((128, 512, 1024, 4096))),
        "segments": dict(causal=draw.chance(0.7), segments=draw.between(2, 9)),
        "lengths": dict(causal=draw.chance(0.5), lengths=True),
        "bias": dict(causal=draw.chance(0.5), bias_batch=draw.pick((1, sizes["batch"]))),
    }
    return Attention(**sizes, **masks[mask])


def _linear(draw: Draw) -> Linear:
    batch, tokens = draw.batch_and_tokens()
    width = draw.width(8192)
    out = draw.shard(hidden_features(draw, width)) if draw.chance(0.6) else draw.width(8192)
    if draw.chance(0.3):
        width, out = out, width
    return Linear(
        batch=batch,
        tokens=tokens,
        width=width,
        out=out,
        dtype=draw.dtype(),
        param_dtype=draw.pick(("same", "same", "same", "float32")),
        bias=draw.chance(0.6),
        activation=draw.pick((None, None, *ACTIVATIONS)),
        residual=draw.chance(0.3),
    )


def _mlp(draw: Draw, operator: str) -> MLP:
    batch, tokens = draw.batch_and_tokens()
    width = draw.width(8192)
    hidden = draw.shard(hidden_features(draw, width))
    if draw.chance(0.1):
        hidden = eights(draw.size(16, 8192)) + draw.pick((0, 0, 0, 1))
    gated = operator == "gated_mlp"
    return MLP(
        operator=operator,
        batch=batch,
        tokens=tokens,
        width=width,
        hidden=hidden,
        dtype=draw.dtype(),
        param_dtype=draw.pick(("same", "same", "same", "float32")),
        bias=draw.chance(0.15 if gated else 0.85),
        activation=draw.pick(("silu", "silu", "gelu_tanh") if gated else ACTIVATIONS),
        residual=draw.chance(0.3),
        save=draw.pick(("hidden", "hidden", "preactivation")),
        stacked=gated and draw.chance(0.25),
    )


def _rope(draw: Draw) -> Rope:
    batch, tokens = draw.batch_and_tokens()
    key_heads, head_size = draw.shard(draw.pick((1, 2, 4, 8, 12, 16, 32))), draw.pick(HEAD_SIZES)
    partly = draw.chance(0.15) and head_size % 4 == 0
    return Rope(
        batch=batch,
        tokens=tokens,
        heads=key_heads * draw.pick((1, 1, 2, 4, 8)),
        key_heads=0 if draw.chance(0.1) else key_heads,
        head_size=head_size,
        rotary_dim=head_size // 2 if partly else head_size,
        dtype=draw.dtype(),
        interleaved=draw.chance(0.25),
        tables=draw.chance(0.75),
    )


def _qkv_projection(draw: Draw) -> QKVProjection:
    batch, tokens = draw.batch_and_tokens()
    head_size = draw.pick(HEAD_SIZES)
    width = draw.width(8192)
    group = draw.pick((1, 1, 1, 2, 4, 8))
    heads = max(1, width // head_size) if draw.chance(0.8) else draw.pick((8, 12, 16, 32))
    return QKVProjection(
        batch=batch,
        tokens=tokens,
        width=width,
        key_heads=draw.shard(max(1, heads // group)),
        group=group,
        head_size=head_size,
        dtype=draw.dtype(),
        param_dtype=draw.pick(("same", "same", "same", "float32")),
        bias=draw.chance(0.3),
        norm=draw.chance(0.4),
        rope=draw.chance(0.5),
        interleaved=draw.chance(0.2),
    )


def _cross_entropy(draw: Draw) -> CrossEntropy:
    # A classifier has one label for each image, a language model one for each token.
    of_images = draw.chance(0.3)
    classes = (10, 100, 1000, 1000, 21841) if of_images else _VOCABULARIES
    return CrossEntropy(
        batch=draw.shard(draw.batch(4096 if of_images else 16)),
        tokens=1 if of_images else draw.tokens(8192),
        classes=draw.pick(classes) if draw.chance(0.9) else draw.size(2, 260_000),
        dtype=draw.dtype("float32", "float32"),
        smoothing=0.1 if draw.chance(0.3) else 0.0,
        ignored=not of_images and draw.chance(0.3),
    )


_VOCABULARIES = (32000, 32768, 49152, 50257, 50304, 65536, 100_352, 128_256, 151_936, 256_000)
"""Vocabulary sizes of Llama, Mistral, StarCoder, GPT-2, Phi, Llama 3, Qwen and Gemma."""


OPERATORS: dict[str, Callable[[Draw], Config]] = {
    "layer_norm": lambda draw: _norm(draw, "layer_norm"),
    "layer_norm_residual": lambda draw: _norm(draw, "layer_norm_residual"),
    "rms_norm": lambda draw: _norm(draw, "rms_norm"),
    "rms_norm_residual": lambda draw: _norm(draw, "rms_norm_residual"),
    "attention": _attention,
    "linear": _linear,
    "mlp": lambda draw: _mlp(draw, "mlp"),
    "gated_mlp": lambda draw: _mlp(draw, "gated_mlp"),
    "rope": _rope,
    "qkv_projection": _qkv_projection,
    "softmax_cross_entropy": _cross_entropy,
    "group_norm": lambda draw: image_configs.image_norm(draw, "group_norm"),
    "batch_norm": lambda draw: image_configs.image_norm(draw, "batch_norm"),
    "conv": image_configs.conv,
    "depthwise_conv": image_configs.depthwise_conv,
    "inverted_residual": image_configs.inverted_residual,
    "max_pool": image_configs.max_pool,
    "upsample": image_configs.upsample,
    "quantized_matmul": quantized_configs.quantized_matmul,
    "quantized_product": quantized_configs.quantized_product,
    "quantize_rows": quantized_configs.quantize_rows,
    "quantized_norm": quantized_configs.quantized_norm,
    "quantized_conv": quantized_configs.quantized_conv,
    "fp8_linear": quantized_configs.fp8_linear,
    "fp8_mlp": quantized_configs.fp8_mlp,
}


def drawn(operator: str, seed: int, index: int) -> Config:
    """Returns case `index` of a seed: the first one drawn that is within the sweep's bounds of size."""
    draw = Draw(seed, f"{operator} {index}")
    config = OPERATORS[operator](draw)
    while not config.fits():
        config = OPERATORS[operator](draw)
    return config


# --- cases as lines of JSON -----------------------------------------------------------------------


def label(config: Config) -> str:
    """Returns the operator's name in tables; a norm with a residual has its own row."""
    with_residual = isinstance(config, Norm) and config.residual
    return config.operator + ("_residual" if with_residual else "")


def to_line(config: Config) -> str:
    return json.dumps({"operator": config.operator} | asdict(config), separators=(",", ":"))


def from_line(line: str) -> Config:
    values = json.loads(line)
    named = {kind.operator: kind for kind in get_args(Config) if hasattr(kind, "operator")}
    several = {"layer_norm": Norm, "rms_norm": Norm, "mlp": MLP, "gated_mlp": MLP}
    kinds = named | several | {"group_norm": ImageNorm, "batch_norm": ImageNorm}
    kind = kinds[values["operator"]]
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names})
