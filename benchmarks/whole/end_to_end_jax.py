"""Whole training steps in JAX: with jaxfused, and as users of Flax and Optax write them.

Both variants are the same network with as many parameters, in bfloat16 with float32 parameters, under
AdamW and clipping by the global norm. In an inference workload parameters are bfloat16, and our variant
folds batch norms into the convolutions.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr

import jaxfused
import jaxfused.nnx
from benchmarks.cases.attention import padded_cudnn_attention
from examples.classify.convnext import CONVNEXTS, ConvNeXt, ConvNeXtSize
from examples.classify.resnet import RESNETS, ResNet, ResNetSize
from examples.optimizers import is_decayed
from examples.unet.model import UNet
from examples.vit.model import MODELS, Attention, VisionTransformer, ViTSize
from jaxfused.modules.conv import Norm

State = tuple[Any, Any, Any]
"""Tuple (parameters, state of the optimizer, running averages of batch norms)."""
Batch = tuple[jax.Array, jax.Array]
"""Pair (images, labels)."""

OPTIMIZER: dict[str, Any] = dict(learning_rate=1e-3, weight_decay=0.05)
MAX_NORM = 1.0


@dataclass(frozen=True)
class Program:
    """Functions to compile: from a key to the state, and from (state, batch) to (state, loss)."""

    init: Callable[[jax.Array], State]
    step: Callable[[State, Batch], tuple[State, jax.Array]]


@dataclass(frozen=True)
class Workload:
    """A network at a batch size, in every variant."""

    name: str
    make_batch: Callable[[jax.Array], Batch]
    programs: Mapping[str, Callable[[], Program]]
    """Functions that build the program, by variant."""
    forward_flops: Callable[[], int]
    """Function that returns the operations of the matrix products of a forward pass over the batch."""
    answers: bool = False
    """True if a step is a forward pass only, without gradients."""
    network: "Callable[[Any], Network] | None" = None
    """Function of a dtype that returns the stock network computed in it, where one can choose."""
    must: float | None = None
    """Bar: how many times as fast as stock the step has to be under `fuse`."""
    aim: float | None = None

    def flops(self) -> int:
        """Returns the operations of the matrix products of a step."""
        return (1 if self.answers else 3) * self.forward_flops()


def workloads() -> dict[str, Workload]:
    return {
        "vit-b16": vit("vit-b16", MODELS["vit-b16"], batch=256),
        "vit-l16": vit("vit-l16", MODELS["vit-l16"], batch=128),
        "unet": unet("unet", batch=32),
        "convnext-t": convnext("convnext-t", CONVNEXTS["convnext-t"], batch=256),
        "resnet-50": resnet("resnet-50", RESNETS["resnet-50"], "batch_norm", batch=256),
        "resnet-50-gn": resnet("resnet-50-gn", RESNETS["resnet-50"], "group_norm", batch=256),
        **{
            f"unet-answers-{batch}": unet(
                f"unet-answers-{batch}", batch=batch, image_size=512, answers=True
            )
            for batch in (1, 16)
        },
        **{
            f"convnext-t-answers-{batch}": convnext(
                f"convnext-t-answers-{batch}", CONVNEXTS["convnext-t"], batch=batch, answers=True
            )
            for batch in (1, 64)
        },
        **{
            f"resnet-50-answers-{batch}": resnet(
                f"resnet-50-answers-{batch}",
                RESNETS["resnet-50"],
                "batch_norm",
                batch=batch,
                answers=True,
            )
            for batch in (1, 64)
        },
    }


def vit(
    name: str, size: ViTSize, *, batch: int, image_size: int = 224, classes: int = 1000
) -> Workload:
    """Returns the workload of a Vision Transformer that classifies by a class token."""
    make_batch = functools.partial(_images_and_labels, batch, image_size, classes)

    def ours(
        attention: Attention = jaxfused.dot_product_attention,
        precision: Literal["fp8"] | None = None,
        copies: bool = False,
    ) -> Program:
        def build() -> VisionTransformer:
            return VisionTransformer(
                size,
                image_size=image_size,
                channels=3,
                classes=classes,
                dtype=jnp.bfloat16,
                precision=precision,
                attention=attention,
                rngs=nnx.Rngs(0),
            )

        return _with_jaxfused(build, jaxfused.softmax_cross_entropy, copies=copies)

    def stock(
        attention: Callable[..., jax.Array] = nn.dot_product_attention,
        make: Callable[[Network], Program] = with_optax,
    ) -> Program:
        model = StockViT(size, classes, attention)
        return make(_of_flax(model, make_batch, _softmax_cross_entropy))

    return Workload(
        name,
        make_batch,
        {
            "ours": ours,
            "ours-copies": functools.partial(ours, copies=True),
            "ours-fp8": functools.partial(ours, precision="fp8"),
            "ours-cudnn": functools.partial(ours, padded_cudnn_attention),
            "fused": functools.partial(stock, make=with_fuse),
            "stock": stock,
            "cudnn": functools.partial(stock, padded_cudnn_attention),
        },
        lambda: _forward_flops(
            StockViT(size, classes, nn.dot_product_attention), jax.eval_shape(make_batch, _KEY)[0]
        ),
    )


def unet(
    name: str,
    *,
    batch: int,
    image_size: int = 256,
    base: int = 64,
    levels: int = 5,
    groups: int = 32,
    answers: bool = False,
) -> Workload:
    """Returns the workload of a U-Net, with group norm and SiLU, for foreground and background."""

    def make_batch(key: jax.Array) -> Batch:
        keys = jax.random.split(key)
        shape = (batch, image_size, image_size)
        images = jax.random.normal(keys[0], (*shape, 3), jnp.bfloat16)
        return images, jax.random.bernoulli(keys[1], shape=shape).astype(jnp.int32)

    def build() -> UNet:
        return UNet(
            base=base,
            levels=levels,
            groups=groups,
            channels=3,
            dtype=jnp.bfloat16,
            rngs=nnx.Rngs(0),
        )

    losses = (jaxfused.segmentation_loss, _segmentation_loss)
    return _workload(name, build, StockUNet(base, levels, groups), make_batch, losses, answers)


def convnext(
    name: str,
    size: ConvNeXtSize,
    *,
    batch: int,
    image_size: int = 224,
    classes: int = 1000,
    answers: bool = False,
) -> Workload:
    """Returns the workload of a ConvNeXt without stochastic depth."""

    def build() -> ConvNeXt:
        return ConvNeXt(
            size,
            image_size=image_size,
            channels=3,
            classes=classes,
            dtype=jnp.bfloat16,
            rngs=nnx.Rngs(0),
        )

    make_batch = functools.partial(_images_and_labels, batch, image_size, classes)
    losses = (jaxfused.softmax_cross_entropy, _softmax_cross_entropy)
    return _workload(name, build, StockConvNeXt(size, classes), make_batch, losses, answers)


def resnet(
    name: str,
    size: ResNetSize,
    norm: Norm,
    *,
    batch: int,
    image_size: int = 224,
    classes: int = 1000,
    answers: bool = False,
) -> Workload:
    """Returns the workload of a ResNet with batch norm, as in its paper, or with group norm."""

    def build() -> ResNet:
        return ResNet(
            size, norm=norm, channels=3, classes=classes, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
        )

    make_batch = functools.partial(_images_and_labels, batch, image_size, classes)
    losses = (jaxfused.softmax_cross_entropy, _softmax_cross_entropy)
    stock = StockResNet(size, norm, classes, training=not answers)

    def network(dtype: Any) -> Network:
        return _of_flax(stock.clone(dtype=dtype), make_batch, losses[1])

    made = _workload(name, build, stock, make_batch, losses, answers)
    return replace(made, network=network)


def _workload(
    name: str,
    build: Callable[[], nnx.Module],
    stock: nn.Module,
    make_batch: Callable[[jax.Array], Batch],
    losses: tuple[Callable[[jax.Array, jax.Array], jax.Array], ...],
    answers: bool,
) -> Workload:
    def ours() -> Program:
        return _answers_of_jaxfused(build) if answers else _with_jaxfused(build, losses[0])

    def flax() -> Program:
        if answers:
            return _answers_of_flax(stock, make_batch)
        return with_optax(_of_flax(stock, make_batch, losses[1]))

    programs = {"ours": ours, "stock": flax}
    if not answers:
        programs["fused"] = lambda: with_fuse(_of_flax(stock, make_batch, losses[1]))
    return Workload(
        name,
        make_batch,
        programs,
        lambda: _forward_flops(stock, jax.eval_shape(make_batch, _KEY)[0]),
        answers,
    )


def _images_and_labels(batch: int, image_size: int, classes: int, key: jax.Array) -> Batch:
    keys = jax.random.split(key)
    images = jax.random.normal(keys[0], (batch, image_size, image_size, 3), jnp.bfloat16)
    return images, jax.random.randint(keys[1], (batch,), 0, classes)


_KEY = jax.eval_shape(lambda: jax.random.key(0))


# --- training and inference steps -----------------------------------------------------------------


def _with_jaxfused(
    build: Callable[[], nnx.Module],
    loss: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    copies: bool = False,
) -> Program:
    """Returns a training step; with `copies`, layers read the optimizer's bfloat16 copies of weights.

    No weight is then converted in a step, and weights' gradients are rounded to bfloat16, as in stock's
    program and under torch's autocast.
    """
    graphdef = nnx.graphdef(nnx.eval_shape(build))
    optimizer = jaxfused.optim.adamw(**OPTIMIZER)

    def init(key: jax.Array) -> State:
        del key  # `build` has its own key.
        params, averages = nnx.state(build(), nnx.Param, ...)
        params, averages = nnx.to_pure_dict(params), nnx.to_pure_dict(averages)
        if copies:
            return params, optimizer.init_step(params, compute_dtype=jnp.bfloat16), averages
        return params, optimizer.init(params), averages

    def loss_of(params: Any, averages: Any, batch: Batch) -> tuple[jax.Array, Any]:
        images, labels = batch
        model = nnx.merge(graphdef, params, averages)
        value = loss(model(images), labels)
        return value, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        params, opt_state, averages = state
        of_loss = jax.value_and_grad(loss_of, has_aux=True)
        read = params
        if copies:
            kernels = is_decayed(params)
            read = jax.tree.map(
                lambda k, copy, p: copy if k else p, kernels, opt_state.compute, params
            )
        (value, averages), gradients = of_loss(read, averages, batch)
        params, opt_state = optimizer.step(gradients, opt_state, params, max_norm=MAX_NORM)
        return (params, opt_state, averages), value

    return Program(init, step)


@dataclass(frozen=True)
class Network:
    """A network and its loss as users of its library write them."""

    init: Callable[[jax.Array], tuple[Any, Any]]
    """Function of a key that returns (parameters, running averages of batch norms)."""
    loss: Callable[[Any, Any, Batch], tuple[jax.Array, Any]]
    """Function of (parameters, averages, batch) that returns (loss, averages)."""

    def forward_flops(self, make_batch: Callable[[jax.Array], Batch]) -> int:
        shapes = jax.eval_shape(self.init, _KEY), jax.eval_shape(make_batch, _KEY)
        return product_flops(jax.make_jaxpr(self.loss)(*shapes[0], shapes[1]).jaxpr)


def with_optax(network: Network) -> Program:
    """Returns the step as users of Optax write it."""
    optimizer = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adamw(**OPTIMIZER))
    of_loss = jax.value_and_grad(network.loss, has_aux=True)

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        params, opt_state, averages = state
        (value, averages), gradients = of_loss(params, averages, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, averages), value

    return Program(_init_with(network, optimizer), step)


def with_fuse(network: Network) -> Program:
    """Returns the step of `with_optax` with `fuse` around the loss, and jaxfused's AdamW."""
    optimizer = jaxfused.optim.adamw(**OPTIMIZER)
    of_loss = jax.value_and_grad(jaxfused.fuse(network.loss), has_aux=True)

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        params, opt_state, averages = state
        (value, averages), gradients = of_loss(params, averages, batch)
        params, opt_state = optimizer.step(gradients, opt_state, params, max_norm=MAX_NORM)
        return (params, opt_state, averages), value

    return Program(_init_with(network, optimizer), step)


def _init_with(network: Network, optimizer: Any) -> Callable[[jax.Array], State]:
    def init(key: jax.Array) -> State:
        params, averages = network.init(key)
        return params, optimizer.init(params), averages

    return init


def _of_flax(
    model: nn.Module,
    make_batch: Callable[[jax.Array], Batch],
    loss: Callable[[jax.Array, jax.Array], jax.Array],
) -> Network:
    def init(key: jax.Array) -> tuple[Any, Any]:
        averages, params = flax.core.pop(model.init(key, make_batch(key)[0]), "params")
        return params, averages

    def loss_of(params: Any, averages: Any, batch: Batch) -> tuple[jax.Array, Any]:
        images, labels = batch
        variables = {"params": params, **averages}
        logits, averages = model.apply(variables, images, mutable=["batch_stats"])
        return loss(logits, labels), averages

    return Network(init, loss_of)


def _answers_of_jaxfused(build: Callable[[], nnx.Module]) -> Program:
    def trained() -> nnx.Module:
        model = build()
        jaxfused.nnx.fold_batch_norms(model)
        return model

    graphdef = nnx.graphdef(nnx.eval_shape(trained))
    return _answers(
        lambda key: nnx.to_pure_dict(nnx.state(trained())),
        lambda params, images: nnx.merge(graphdef, params)(images),
    )


def _answers_of_flax(model: nn.Module, make_batch: Callable[[jax.Array], Batch]) -> Program:
    return _answers(lambda key: model.init(key, make_batch(key)[0]), model.apply)


def _answers(make: Callable[[jax.Array], Any], apply: Callable[..., jax.Array]) -> Program:
    """Returns an inference step with bfloat16 parameters; its loss is the mean of all logits."""

    def init(key: jax.Array) -> State:
        return jax.tree.map(lambda a: a.astype(jnp.bfloat16), make(key)), (), ()

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        return state, apply(state[0], batch[0]).mean()

    return Program(init, step)


def _softmax_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _segmentation_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    targets = labels.astype(jnp.float32)
    cross_entropy = optax.sigmoid_binary_cross_entropy(logits, targets).mean()
    probabilities = jax.nn.sigmoid(logits)
    overlap = 2 * (probabilities * targets).sum((1, 2)) + 1
    dice = overlap / ((probabilities + targets).sum((1, 2)) + 1)
    return cross_entropy + 1 - dice.mean()


# --- the networks as a user of Flax writes them ---------------------------------------------------


class StockViT(nn.Module):
    """The network of `examples.vit.model.VisionTransformer` in Flax Linen."""

    size: ViTSize
    classes: int
    attention: Callable[..., jax.Array]

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        size, dtype = self.size, jnp.bfloat16
        patch = (size.patch, size.patch)
        x = nn.Conv(size.width, patch, strides=patch, padding="VALID", dtype=dtype)(images)
        x = x.reshape(len(x), -1, size.width)
        token = self.param("class_token", nn.initializers.normal(0.02), (1, 1, size.width))
        x = jnp.concatenate([jnp.tile(token.astype(dtype), (len(x), 1, 1)), x], axis=1)
        shape = (1, *x.shape[1:])
        x = x + self.param("positions", nn.initializers.normal(0.02), shape).astype(dtype)
        for _ in range(size.depth):
            y = nn.LayerNorm(dtype=dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(
                size.heads, dtype=dtype, attention_fn=self.attention
            )(y)
            y = nn.LayerNorm(dtype=dtype)(x)
            y = nn.gelu(nn.Dense(size.hidden, dtype=dtype)(y), approximate=False)
            x = x + nn.Dense(size.width, dtype=dtype)(y)
        x = nn.LayerNorm(dtype=dtype)(x)
        head = nn.Dense(self.classes, kernel_init=nn.initializers.zeros, dtype=dtype)
        return head(x[:, 0]).astype(jnp.float32)


class StockUNet(nn.Module):
    """The network of `examples.unet.model.UNet` in Flax Linen."""

    base: int
    levels: int
    groups: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        def block(x: jax.Array, width: int) -> jax.Array:
            for _ in range(2):
                x = nn.Conv(width, (3, 3), use_bias=False, dtype=jnp.bfloat16)(x)
                x = nn.GroupNorm(self.groups, epsilon=1e-5, dtype=jnp.bfloat16)(x)
                x = nn.silu(x)
            return x

        widths = [self.base * 2**level for level in range(self.levels)]
        seen = []
        x = images
        for level, width in enumerate(widths):
            if level:
                x = nn.max_pool(x, (2, 2), strides=(2, 2))
            x = block(x, width)
            seen.append(x)
        for width, skip in reversed(list(zip(widths[:-1], seen[:-1], strict=True))):
            x = nn.ConvTranspose(width, (2, 2), strides=(2, 2), dtype=jnp.bfloat16)(x)
            x = block(jnp.concatenate([skip, x], axis=-1), width)
        return nn.Dense(1, dtype=jnp.bfloat16)(x)[..., 0].astype(jnp.float32)


class StockConvNeXt(nn.Module):
    """The network of `examples.classify.convnext.ConvNeXt` in Flax Linen."""

    size: ConvNeXtSize
    classes: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        size, dtype = self.size, jnp.bfloat16
        x = images
        for stage, (depth, width) in enumerate(zip(size.depths, size.widths, strict=True)):
            window = (2, 2) if stage else (size.patch, size.patch)
            x = nn.LayerNorm(dtype=dtype)(x) if stage else x
            x = nn.Conv(width, window, strides=window, padding="VALID", dtype=dtype)(x)
            x = x if stage else nn.LayerNorm(dtype=dtype)(x)
            for block in range(depth):
                kernel = (size.kernel, size.kernel)
                y = nn.Conv(width, kernel, feature_group_count=width, dtype=dtype)(x)
                y = nn.LayerNorm(dtype=dtype)(y)
                y = nn.gelu(nn.Dense(4 * width, dtype=dtype)(y), approximate=False)
                y = nn.Dense(width, dtype=dtype)(y)
                first = nn.initializers.constant(1e-6)
                scale = self.param(f"layer_scale_{stage}_{block}", first, (width,))
                x = x + scale.astype(dtype) * y
        x = nn.LayerNorm(dtype=dtype)(x.mean(axis=(1, 2)))
        head = nn.Dense(self.classes, kernel_init=nn.initializers.zeros, dtype=dtype)
        return head(x).astype(jnp.float32)


class StockResNet(nn.Module):
    """The network of `examples.classify.resnet.ResNet` in Flax Linen."""

    size: ResNetSize
    norm: Norm
    classes: int
    training: bool = True
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype

        def layer(x: jax.Array, width: int, kernel: int, strides: int = 1) -> jax.Array:
            x = nn.Conv(width, (kernel, kernel), strides, use_bias=False, dtype=dtype)(x)
            if self.norm == "group_norm":
                return nn.GroupNorm(size.groups, epsilon=1e-5, dtype=dtype)(x)
            return nn.BatchNorm(not self.training, momentum=0.9, dtype=dtype)(x)

        if size.is_small:
            x = nn.relu(layer(images, size.width, 3))
        else:
            x = nn.relu(layer(images, size.width, 7, 2))
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, depth in enumerate(size.depths):
            width = size.width * 2**stage
            after = 4 * width if size.bottleneck else width
            for block in range(depth):
                strides = 2 if stage and not block else 1
                shortcut = x
                if x.shape[-1] != after or strides > 1:
                    shortcut = layer(x, after, 1, strides)
                if size.bottleneck:
                    y = nn.relu(layer(nn.relu(layer(x, width, 1)), width, 3, strides))
                    y = layer(y, after, 1)
                else:
                    y = layer(nn.relu(layer(x, width, 3, strides)), width, 3)
                x = nn.relu(y + shortcut)
        head = nn.Dense(self.classes, kernel_init=nn.initializers.zeros, dtype=dtype)
        return head(x.mean(axis=(1, 2))).astype(jnp.float32)


# --- FLOPs ----------------------------------------------------------------------------------------


def _forward_flops(model: nn.Module, images: Any) -> int:
    params = jax.eval_shape(model.init, _KEY, images)
    apply = functools.partial(model.apply, mutable=["batch_stats"])
    return product_flops(jax.make_jaxpr(apply)(params, images).jaxpr)


def product_flops(jaxpr: Jaxpr) -> int:
    """Counts multiplications and additions in the matrix products and convolutions of a program."""
    total = 0
    for eqn in jaxpr.eqns:
        name, shapes = eqn.primitive.name, [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
        if name == "dot_general":
            left, _, out = shapes
            (contracted, _), _ = eqn.params["dimension_numbers"]
            total += 2 * math.prod(out) * math.prod(left[axis] for axis in contracted)
        elif name == "conv_general_dilated":
            _, kernel, out = shapes
            outputs = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
            taps = math.prod(kernel) // outputs
            # Multiplications by the zeros that a transposed convolution inserts do not count.
            total += 2 * math.prod(out) * taps // math.prod(eqn.params["lhs_dilation"])
        repeats = eqn.params["length"] if name == "scan" else 1
        for inner in eqn.params.values():
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
                total += repeats * product_flops(inner)
    return total
