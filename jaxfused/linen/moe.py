"""The mixture of experts for Flax Linen."""

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from jaxfused.dispatch import Implementation
from jaxfused.linen.mlp import GatedMLP
from jaxfused.modules.initial import in_float32
from jaxfused.modules.moe import (
    Experts,
    Router,
    Routing,
    check_mixture,
    mixture,
    shared_expert_of,
)
from jaxfused.ops.grouped.expert_mlp import WeightOn
from jaxfused.runtime.checks import python_number_fields
from jaxfused.runtime.sharding import AxisName

_EXPERT_INIT = linen.initializers.lecun_normal(batch_axis=(0,))


@python_number_fields
class MoE(linen.Module):
    r"""A mixture of experts: perceptrons, and a router that sends each token to a few of them.

    .. math::
        y_t = \sum_j w_{tj} \bigl(\text{activation}(x_t G_{e}) \odot (x_t U_{e})\bigr) D_{e}
              + \text{shared}(x_t), \quad w_t, e_t = \text{router}(x_t W)

    No token is dropped unless `capacity_factor` says so, and nothing is computed for an expert that no
    token chose. Logits are in float32. The parameters are `router_kernel` [D, E], `w_gate` and `w_up`
    [E, D, F], `w_down` [E, F, D], and those of the shared expert, a `GatedMLP` called `shared`.

    Attributes:
      hidden_features: F, of each expert.
      num_experts: E.
      router: a function of logits [..., E] that returns `jaxfused.Routes`: `jaxfused.router` with its
        options, such as `functools.partial(jaxfused.router, k=2, normalise="sum")` for Mixtral.
      activation: None or a name of `jaxfused.ACTIVATIONS`, of the gate.
      use_gate: whether the experts have a gate; without one they are activation(x U) D.
      use_correction_bias: whether the router gets a bias [E] as `bias=`, from the collection
        "correction_bias"; it starts at 0.
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
      implementation: None for the fastest that can run, or "pallas", "xla".

    Example:
      >>> import functools
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused, jaxfused.linen
      >>> router = functools.partial(jaxfused.router, k=2, normalise="sum")
      >>> moe = jaxfused.linen.MoE(16, 4, router=router)
      >>> x = jnp.ones((2, 5, 8))
      >>> y, routing = moe.apply(moe.init(jax.random.key(0), x), x, return_routing=True)
      >>> y.shape, routing.indices.shape
      ((2, 5, 8), (2, 5, 2))

    Source: `jaxfused.expert_mlp`.
    """

    hidden_features: int
    num_experts: int
    router: Router
    activation: str | None = "silu"
    use_gate: bool = True
    use_correction_bias: bool = False
    weight_on: WeightOn = "output"
    shared_features: int = 0
    use_shared_gate: bool = False
    capacity_factor: float | None = None
    expert_axis: AxisName | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = _EXPERT_INIT
    router_init: Initializer = default_kernel_init
    implementation: Implementation | None = None

    @linen.compact
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
        check_mixture(
            "jaxfused.linen.MoE", self.capacity_factor, self.shared_features, self.use_shared_gate
        )
        features, hidden, count = x.shape[-1], self.hidden_features, self.num_experts

        def param(name: str, init: Initializer, *shape: int) -> jax.Array:
            return self.param(name, in_float32(init), shape, self.param_dtype)

        bias = None
        if self.use_correction_bias:
            zeros = lambda: jnp.zeros(count, jnp.float32)  # noqa: E731
            bias = self.variable("correction_bias", "correction_bias", zeros).value
        experts = Experts(
            param("router_kernel", self.router_init, features, count),
            bias,
            param("w_gate", self.kernel_init, count, features, hidden) if self.use_gate else None,
            param("w_up", self.kernel_init, count, features, hidden),
            param("w_down", self.kernel_init, count, hidden, features),
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
        if self.shared_features:
            shared = GatedMLP(
                self.shared_features,
                activation=self.activation,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                precision=self.precision,
                implementation=self.implementation,
                name="shared",
            )(x)
            gate = None
            if self.use_shared_gate:
                gate = param("shared_gate", self.router_init, features, 1)
            y = shared_expert_of(y, jnp.asarray(x), shared, gate)
        return (y, routing) if return_routing else y
