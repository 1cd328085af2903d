"""The state dict of torchvision's DeepLabV3 with numbers that follow from the arrays' names."""

import numpy as np

from tests.recorded.values import parameter


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the array of that name, like one of a trained network."""
    if name.endswith("running_var"):
        return np.abs(parameter(f"{name}.weight", shape)) + np.float32(0.5)
    return parameter(name, shape)
