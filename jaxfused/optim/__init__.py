"""Optimizers: Optax's transformations, state and numbers, with a `step` that writes in place."""

from jaxfused.optim import ema as ema
from jaxfused.optim.adafactor import adafactor as adafactor
from jaxfused.optim.adam import adam as adam
from jaxfused.optim.adamw import adamw as adamw
from jaxfused.optim.adamw8bit import adamw8bit as adamw8bit
from jaxfused.optim.eight_bit import EightBitMoment as EightBitMoment
from jaxfused.optim.lamb import lamb as lamb
from jaxfused.optim.lion import lion as lion
from jaxfused.optim.magnitude_pruning import PruningState as PruningState
from jaxfused.optim.magnitude_pruning import magnitude_pruning as magnitude_pruning
from jaxfused.optim.muon import muon as muon
from jaxfused.optim.sgd import sgd as sgd
from jaxfused.optim.stepping import StepState as StepState
from jaxfused.optim.transformation import FusedTransformation as FusedTransformation
