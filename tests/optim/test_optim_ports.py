"""Equal optimizers of other libraries and ours: the rows of "Port from" in the docs."""

import functools
from pathlib import Path

import jax
import numpy as np
import optax

from jaxfused import optim
from tests.cases.optimizer_ports import RECORDED, STEPS, parameters_and_gradients, summary
from tests.support.grids import parametrize

ROUNDING = 3e-7
"""Tolerance after 20 steps of about 0.01, for parameters of about 0.1."""
BFLOAT16 = 2e-4
"""Tolerance for Muon of torch, timm and pytorch-optimizer, whose iterations are in bfloat16."""


adamw = functools.partial(optim.adamw, 0.01, weight_decay=0.1)
adafactor = functools.partial(optim.adafactor, 0.01, min_dim_size_to_factor=1)
muon = functools.partial(optim.muon, 0.01)
torchs = functools.partial(muon, bias_correction=False, clamp_norm=True, eps=1e-7, adam_eps=1e-8)
# By other library's optimizer: ours, and the largest difference.
ROWS = {
    # "torch AdamW" is timm's AdamWLegacy and pytorch-optimizer's AdamW, bit for bit.
    "torch AdamW": (adamw, ROUNDING),
    "torch Adam": (lambda: optim.adam(0.01), ROUNDING),
    "timm NAdamW": (lambda: adamw(nesterov="timm"), ROUNDING),
    "torch NAdam": (lambda: adamw(nesterov="torch"), ROUNDING),
    # Keras computes powers of beta in float32.
    "keras Nadam": (lambda: optim.adam(0.01, nesterov="keras"), 1e-6),
    # "lion-pytorch Lion" is timm's, bit for bit.
    "lion-pytorch Lion": (lambda: optim.lion(1e-3, weight_decay=0.1), ROUNDING),
    "keras Lion": (lambda: optim.lion(1e-3, weight_decay=0.1), ROUNDING),
    "torch SGD": (
        lambda: optax.chain(optax.add_decayed_weights(0.1), optim.sgd(0.01, momentum=0.9)),
        ROUNDING,
    ),
    "torch SGD nesterov": (lambda: optim.sgd(0.01, momentum=0.9, nesterov=True), ROUNDING),
    "timm Lamb no clipping": (lambda: optim.lamb(0.01, weight_decay=0.1), ROUNDING),
    "timm Lamb": (
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optim.lamb(0.01, weight_decay=0.1)),
        ROUNDING,
    ),
    "timm Lamb no decay": (
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optim.adam(0.01, eps=1e-6)),
        ROUNDING,
    ),
    # Keras adds eps before the bias correction.
    "keras Lamb": (
        lambda: optax.chain(optim.lamb(0.01), optax.add_decayed_weights(-0.01 * 0.1)),
        3e-5,
    ),
    "torch Adafactor": (adafactor, ROUNDING),
    "torch Adafactor decay": (lambda: adafactor(weight_decay_rate=0.1 * 0.01), ROUNDING),
    "transformers Adafactor": (adafactor, ROUNDING),
    "transformers Adafactor momentum": (lambda: adafactor(momentum=0.9), ROUNDING),
    "keras Adafactor": (adafactor, ROUNDING),
    "timm Adafactor": (lambda: adafactor(multiply_by_parameter_scale=False), ROUNDING),
    "torch Muon": (torchs, BFLOAT16),
    "torch Muon nesterov=False": (lambda: muon(nesterov=False), BFLOAT16),
    "timm Muon": (
        lambda: muon(
            nesterov=False,
            ns_coeffs="quintic",
            consistent_rms=0.2,
            muon_weight_dimension_numbers="flatten",
        ),
        BFLOAT16,
    ),
    "timm Muon polar_express": (
        functools.partial(torchs, ns_coeffs="polar_express", consistent_rms=0.2),
        1e-6,
    ),
    "pytorch-optimizer Muon": (
        lambda: muon(nesterov=False, muon_weight_dimension_numbers="flatten"),
        BFLOAT16,
    ),
}


def distances(name, tx):
    """Returns the largest differences from the recorded values, after the first and the last step."""
    params, grads = parameters_and_gradients()
    recorded = RECORDED[name]
    params = {k: params[k] for k in recorded}
    grads = {k: np.stack([g[k] for g in grads]) for k in recorded}

    @jax.jit
    def train(params, state):
        def body(carry, g):
            params, state = carry
            updates, state = tx.update(g, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        return jax.lax.scan(body, (params, state), grads, length=STEPS)[1]

    seen = train(params, tx.init(params))
    return np.max(
        [
            np.abs([np.subtract(summary(k, seen[k][t]), recorded[k][t]).tolist() for t in (0, -1)])
            for k in recorded
        ],
        axis=(0, 2),
    )


@parametrize("name", [*ROWS], quick=(0, 2, 3, 4, 7, 11, 12, 18))
def test_equals(name):
    make, tolerance = ROWS[name]
    first, last = distances(name, make())
    assert first <= tolerance and last <= tolerance, (first, last)


def test_cannot_agree():
    """Keras' Adam adds eps before the bias correction, so it is 32 times as large in the first step."""
    first, last = distances("keras AdamW", adamw())
    assert 1e-6 < first < 1e-3 and 1e-6 < last < 1e-3


def test_every_row_is_in_the_docs():
    docs = Path(__file__).parents[2] / "docs/operators/optimizers.md"
    text = docs.read_text()
    for name in ROWS:
        library, optimizer, *_ = name.split()
        assert any(library in line and optimizer in line for line in text.splitlines()), name
