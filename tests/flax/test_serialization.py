"""`flax.serialization` writes and reads every pytree of this package, as Orbax and pickle do."""

import inspect
import re
from pathlib import Path

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jaxfused
import jaxfused.linen
from jaxfused import QuantizationRule, QuantizedArray, optim
from jaxfused.runtime.rectified import Rectified
from tests.flax.test_modules import normal

WEIGHTS = {"w": jnp.ones((16, 512)), "b": jnp.ones(7)}
GRADIENTS = jax.tree.map(lambda a: 0.5 * a, WEIGHTS)


def params():
    return jaxfused.linen.MLP(128).init(jax.random.key(0), jnp.ones((2, 256)))


def quantised(**options):
    return jaxfused.quantize_params(params(), [QuantizationRule("", **options)])


def stepped(transformation, **options):
    state = transformation.init_step(WEIGHTS, **options)
    return transformation.step(
        jax.tree.map(jnp.array, GRADIENTS), state, jax.tree.map(jnp.array, WEIGHTS)
    )[1]


TREES = {
    "int8": lambda: quantised(dtype="int8", input_dtype="int8"),
    "int4 columns": lambda: quantised(
        dtype="int4", group_size=64, layout="columns", symmetric=False
    ),
    "float8": lambda: quantised(dtype="float8_e4m3fn", group_size=(32, 32)),
    "partial blocks": lambda: {
        "w": QuantizedArray(
            jnp.ones((192, 4), jnp.int8), jnp.ones((2, 1)), None, -2, group_size=128
        )
    },
    "codes and offsets": lambda: {
        "w": QuantizedArray(
            jnp.ones((4, 96), jnp.uint8),
            jnp.ones((3, 4)),
            None,
            -2,
            "columns",
            offset=jnp.ones((3, 4)),
            codebook=jaxfused.quantization.CODEBOOKS["nf4"],
        )
    },
    "adamw8bit": lambda: optim.adamw8bit(1e-3).init(WEIGHTS),
    "muon": lambda: optim.muon(1e-3).init(WEIGHTS),
    "adafactor": lambda: optim.adafactor(1e-3).init(WEIGHTS),
    "step": lambda: stepped(optim.adamw(1e-3), ema_decay=0.9),
    "step of 8 bits": lambda: stepped(
        optim.adamw8bit(1e-3), ema_decay=0.9, compute_dtype=jnp.bfloat16, loss_scale=8.0
    ),
    "counted steps": lambda: stepped(optim.adamw(1e-3), ema_decay=lambda count: 0.5),
    "fp8": lambda: {"fp8": jaxfused.Fp8State.zeros("mlp")},
    "images": lambda: {
        "r": Rectified(jnp.ones(3)),
        "c": jaxfused.Concatenated(jnp.ones((2, 3)), jnp.ones((2, 1))),
    },
}


@pytest.mark.parametrize("name", TREES)
def test_round_trips(name):
    tree = TREES[name]()
    target = jax.tree.map(jnp.zeros_like, tree)
    for restored in (
        flax.serialization.from_bytes(target, flax.serialization.to_bytes(tree)),
        flax.serialization.from_state_dict(target, flax.serialization.to_state_dict(tree)),
    ):
        assert jax.tree.structure(restored) == jax.tree.structure(tree)
        chex.assert_trees_all_equal(restored, tree, strict=False)
        chex.assert_trees_all_equal_dtypes(restored, tree)


def test_every_state_of_the_package_is_known():
    """All pytree classes are registered, except those that exist only within a call."""
    within = {"ObservedKernel", "Mask"}
    inspect.getmembers(jaxfused)  # imports all
    source = Path(jaxfused.__file__).parent
    registered = r"@jax\.tree_util\.register_\w+\n(?:@.*\n)*class (\w+)"
    classes = {
        name for path in source.rglob("*.py") for name in re.findall(registered, path.read_text())
    }
    known = {kind.__name__ for kind in flax.serialization._STATE_DICT_REGISTRY}
    assert len(classes) > len(within)
    assert classes - within <= known, classes - within - known


def test_a_train_state_goes_on_where_it_was():
    model, x = jaxfused.linen.MLP(32), normal(0, 2, 16)
    state = TrainState.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(0), x)["params"],
        tx=optax.chain(optax.clip_by_global_norm(1.0), optim.adamw8bit(1e-2)),
    )
    gradients = jax.grad(lambda p: jnp.sum(model.apply({"params": p}, x) ** 2))(state.params)
    once = state.apply_gradients(grads=gradients)
    restored = flax.serialization.from_bytes(state, flax.serialization.to_bytes(once))
    twice, again = (s.apply_gradients(grads=gradients) for s in (once, restored))
    chex.assert_trees_all_equal(twice.params, again.params)


def test_what_is_read_is_what_is_used():
    layer, x = jaxfused.linen.MLP(128), normal(0, 2, 256)
    tree = quantised(dtype="int4", group_size=64)
    target = jax.tree.map(jnp.zeros_like, tree)
    restored = flax.serialization.from_bytes(target, flax.serialization.to_bytes(tree))
    np.testing.assert_array_equal(layer.apply(restored, x), layer.apply(tree, x))


def test_targets_that_are_made_otherwise():
    state = flax.serialization.to_state_dict(quantised(dtype="int8", layout="rows"))
    for options, words in (
        (dict(dtype="int4"), r"values is int8\[256, 128\], but the target's is uint8"),
        (dict(dtype="int8", group_size=64), "state's scale is"),
        (dict(dtype="int8", layout="columns"), "the state has values, but the target has columns"),
        (dict(dtype="int8", symmetric=False), "zero_point is None, but the target's is int8"),
    ):
        with pytest.raises(ValueError, match=f"QuantizedArray: .*{words}.*; pass a target"):
            flax.serialization.from_state_dict(quantised(**{"layout": "rows", **options}), state)
    state = flax.serialization.to_state_dict(TREES["step"]())
    del state["ema"]
    with pytest.raises(ValueError, match="StepState: the state has no ema"):
        flax.serialization.from_state_dict(TREES["step"](), state)
    # Parts that are None in the target may be missing, because older versions did not write them.
    state = flax.serialization.to_state_dict(TREES["step"]())
    missing = [name for name, part in list(state.items()) if part is None]
    for name in missing:
        del state[name]
    assert missing
    flax.serialization.from_state_dict(TREES["step"](), state)
