"""The mixture of experts for Flax NNX."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from jaxfused.dispatch import Implementation
from jaxfused.modules.initial import in_float32
from jaxfused.modules.moe import (
    Experts,
    Router,
    Routing,
    check_mixture,
    mixture,
    shared_expert_of,
)
from jaxfused.nnx.mlp import GatedMLP
from jaxfused.ops.grouped.expert_mlp import WeightOn
from jaxfused.runtime.checks import python_numbers
from jaxfused.runtime.sharding import AxisName

_EXPERT_INIT = jax.nn.initializers.lecun_normal(batch_axis=(0,))


class CorrectionBias(nnx.Variable):
    """The bias by which a router balances the load: no parameter, as it has no gradient."""


class MoE(nnx.Module):
    r"""A mixture of experts: perceptrons, and a router that sends each token to a few of them.

    .. math::
        y_t = \sum_j w_{tj} \bigl(\text{activation}(x_t G_{e}) \odot (x_t U_{e})\bigr) D_{e}
              + \text{shared}(x_t), \quad w_t, e_t = \text{router}(x_t W)

    No token is dropped unless `capacity_factor` says so, and nothing is computed for an expert that no
    token chose. Logits are in float32. The parameters are `router_kernel` [D, E], `w_gate` and `w_up`
    [E, D, F], `w_down` [E, F, D], and those of the shared expert, a `GatedMLP` called `shared`.

    Args:
      in_features: D.
      hidden_features: F, of each expert.
      num_experts: E.
      router: a function of logits [..., E] that returns `jaxfused.Routes`: `jaxfused.router` with its
        options, such as `functools.partial(jaxfused.router, k=2, normalise="sum")` for Mixtral.
      activation: None or a name of `jaxfused.ACTIVATIONS`, of the gate.
      use_gate: whether the experts have a gate; without one they are activation(x U) D.
      use_correction_bias: whether the router gets a bias [E] as `bias=`, an `nnx.Variable` without
        gradient that starts at 0.
      weight_on: whether the weights multiply the experts' "output" or "input", as in `expert_mlp`.
      shared_features: hidden features of the expert that all tokens have; 0 for none.
      use_shared_gate: whether its result is multiplied by the logistic of x [D] times a vector, as in
        Qwen2-MoE.
      capacity_factor: an expert takes at most this many times the tokens that it would have where all
        are used alike, as `capacity` of `expert_mlp` says; None drops none.
      expert_axis: the mesh axis, or a tuple of several, over which experts and tokens are split, as
        `expert_parallel_mlp` says; `capacity_factor` is then of the rows that two devices exchange. None
        for one device's experts.
      dtype: of the products and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters. Those of 16 bits are drawn in float32 and rounded.
      precision: of the experts' products, as in Flax.
      kernel_init: initialises the matrices of the experts, each by itself.
      router_init: initialises the router's kernel.
      rngs: gives the initialisers their keys.
      implementation: None for the fastest that can run, or "pallas", "xla".

    Example:
      >>> import functools
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused, jaxfused.nnx
      >>> router = functools.partial(jaxfused.router, k=2, normalise="sum")
      >>> moe = jaxfused.nnx.MoE(8, 16, 4, router=router, rngs=nnx.Rngs(0))
      >>> y, routing = moe(jnp.ones((2, 5, 8)), return_routing=True)
      >>> y.shape, routing.indices.shape
      ((2, 5, 8), (2, 5, 2))

    Source: `jaxfused.expert_mlp`.
    """

    @python_numbers
    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_experts: int,
        *,
        router: Router,
        activation: str | None = "silu",
        use_gate: bool = True,
        use_correction_bias: bool = False,
        weight_on: WeightOn = "output",
        shared_features: int = 0,
        use_shared_gate: bool = False,
        capacity_factor: float | None = None,
        expert_axis: AxisName | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = _EXPERT_INIT,
        router_init: Initializer = default_kernel_init,
        rngs: nnx.Rngs,
        implementation: Implementation | None = None,
    ):
        check_mixture("jaxfused.nnx.MoE", capacity_factor, shared_features, use_shared_gate)
        up = (num_experts, in_features, hidden_features)
        down = (num_experts, hidden_features, in_features)

        def param(init: Initializer, *shape: int) -> nnx.Param:
            return nnx.Param(in_float32(init)(rngs.params(), shape, param_dtype))

        self.router_kernel = param(router_init, in_features, num_experts)
        self.w_gate = param(kernel_init, *up) if use_gate else None
        self.w_up = param(kernel_init, *up)
        self.w_down = param(kernel_init, *down)
        self.correction_bias = (
            CorrectionBias(jnp.zeros(num_experts, jnp.float32)) if use_correction_bias else None
        )
        self.shared = nnx.data(
            GatedMLP(
                in_features,
                shared_features,
                activation=activation,
                dtype=dtype,
                param_dtype=param_dtype,
                precision=precision,
                rngs=rngs,
                implementation=implementation,
            )
            if shared_features
            else None
        )
        self.shared_gate = param(router_init, in_features, 1) if use_shared_gate else None
        self.router, self.activation, self.weight_on = router, activation, weight_on
        self.capacity_factor, self.dtype, self.precision = capacity_factor, dtype, precision
        self.expert_axis, self.implementation = expert_axis, implementation

    def __call__(
        self, x: jax.Array, *, return_routing: bool = False
    ) -> jax.Array | tuple[jax.Array, Routing]:
        """Applies the experts to x [..., D].

        Args:
          x: [..., D].
          return_routing: whether to return what the router found too, for
            `jaxfused.load_balancing_loss(routing.logits, routing.indices)`.

        Returns:
          [..., D]; or that and the `Routing`.
        """
        experts = Experts(
            self.router_kernel[...],
            None if self.correction_bias is None else self.correction_bias[...],
            None if self.w_gate is None else self.w_gate[...],
            self.w_up[...],
            self.w_down[...],
        )
        y, routing = mixture(
            x,
            experts,
            self.router,
            dtype=self.dtype,
            activation=self.activation,
            weight_on=self.weight_on,
            capacity_factor=self.capacity_factor,
            expert_axis=self.expert_axis,
            precision=self.precision,
            implementation=self.implementation,
        )
        if self.shared is not None:
            gate = None if self.shared_gate is None else self.shared_gate[...]
            y = shared_expert_of(y, jnp.asarray(x), self.shared(x), gate)
        return (y, routing) if return_routing else y
