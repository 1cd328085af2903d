"""How the operands of a tensor parallel layer are split over a mesh, and the call on each device."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxfused.runtime import sharding
from jaxfused.runtime.mapped import over_mesh


def check_rows(op: str, x: jax.Array) -> None:
    """Checks that x has an axis of tokens and one of features."""
    if x.ndim < 2:
        raise ValueError(
            f"{op}: x has shape {x.shape}, but tokens and features are its last axes; pass x of shape"
            " [..., tokens, features]."
        )


@dataclass(frozen=True)
class Placement:
    """Which mesh axis splits a layer's features, and how rows [..., T, D] are split.

    Letters name the axes of an operand: "." all axes before the tokens, "t" the tokens, which are
    split over devices if `sequence_parallel`, "T" unsplit tokens, "f" split features, "-" another
    unsplit axis.
    """

    op: str
    axis_name: sharding.AxisName
    sequence_parallel: bool
    spec: P | None

    def run(
        self,
        f: Callable[..., Any],
        static: tuple[Hashable, ...],
        operands: Sequence[jax.Array | None],
        operand_axes: Sequence[str],
        result_axes: str | tuple[str, ...],
    ) -> Any:
        """Returns `f(*static, *operands)`, called directly within shard_map, else on each mesh device.

        `f` is a module-level function, and `static` are compared by value, as in `over_mesh`.
        """
        mesh = sharding.mesh_to_map(self.op, self.axis_name, operands[0])
        if mesh is None:
            return f(*static, *operands)
        leading = self._leading(mesh, operands[0])
        self._check_sizes(sharding.devices_along(mesh, self.axis_name), operands, operand_axes)
        letters = {
            "t": (self.axis_name if self.sequence_parallel else None,),
            "f": (self.axis_name,),
            ".": leading,
        }

        def spec(axes: str) -> P:
            return P(*(entry for letter in axes for entry in letters.get(letter, (None,))))

        specs = [
            None if operand is None else spec(axes)
            for operand, axes in zip(operands, operand_axes, strict=True)
        ]
        out = spec(result_axes) if isinstance(result_axes, str) else tuple(map(spec, result_axes))
        return over_mesh(
            f, static, tuple(operands), mesh=mesh, in_specs=tuple(specs), out_specs=out
        )

    def _leading(self, mesh: Any, x: Any) -> tuple[Any, ...]:
        """Returns how the axes of x before its tokens are split over the mesh."""
        count = x.ndim - 2
        spec = [*jax.typeof(x).sharding.spec] if mesh.explicit_axes else [*(self.spec or P())]
        leading = (*spec, *(None,) * count)[:count]
        sharding.check_split(self.op, "x", x.shape, leading, mesh)
        names = {name for entry in leading for name in sharding.names_of(entry)}
        if not names.isdisjoint(sharding.names_of(self.axis_name)):
            raise ValueError(
                f"{self.op}: the axes of x before its tokens are split by {leading!r}, and axis_name"
                f" is {self.axis_name!r}; split them by other axes of the mesh."
            )
        return leading

    def _check_sizes(self, size: int, operands: Sequence[Any], operand_axes: Sequence[str]) -> None:
        shared = {"f": "features"} | ({"t": "tokens"} if self.sequence_parallel else {})
        for operand, axes in zip(operands, operand_axes, strict=True):
            if operand is None:
                continue
            last = axes.replace(".", "")
            for letter, count in zip(last, operand.shape[operand.ndim - len(last) :], strict=True):
                if letter in shared and count % size:
                    raise ValueError(
                        f"{self.op}: an operand of shape {operand.shape} has {count}"
                        f" {shared[letter]}, but {self.axis_name!r} has {size} devices that share"
                        " them; pass a multiple."
                    )
