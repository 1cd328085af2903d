"""Code shared by stages whose Pallas kernel is one matrix product with an epilogue."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import jax

from jaxfused import dispatch
from jaxfused.runtime.runner import Results
from pallas_kernels.gemm.cost import Work
from pallas_kernels.gemm.fused_product import FusedProduct
from pallas_kernels.gemm.matmul import fitting


class ProductStage:
    """A `Stage` whose Pallas kernel is the `FusedProduct` that `product` returns."""

    results: ClassVar[Sequence[str]]
    """Names of the `FusedProduct`'s results in the stage's order; one that is not computed is None."""

    def product(self, *operands: Any) -> FusedProduct:
        """Returns the `FusedProduct` of these operands, which may be arrays or only their shapes."""
        raise NotImplementedError

    def work(self, *operands: Any) -> Work:
        """Returns the product's sizes, from which its time is predicted."""
        return self.product(*operands).work_beside_xla

    def configs(
        self, implementation: str, device: dispatch.Device, *operands: Any
    ) -> Sequence[Hashable]:
        """Returns the configs of the kernel, predicted fastest first: `HasConfigs.configs`."""
        if implementation != "pallas":
            return ()
        return fitting(self.work(*operands), device.multiprocessors)

    def in_pallas(self, device: dispatch.Device, *operands: Any, config: Any) -> Results:
        """Launches the kernel of the product."""
        product = self.product(*operands)
        return self.in_order(product.run(multiprocessors=device.multiprocessors, config=config))

    def in_order(self, found: Mapping[str, jax.Array]) -> Results:
        """Returns the results in the order of `results`, given the product's results by name."""
        return tuple(found.get(name) for name in self.results)
