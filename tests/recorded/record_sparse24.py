"""Records what torch packs a 2:4 matrix into, in sparse24.npz.

Run in an environment with torch 2.13.0: `python -m tests.recorded.record_sparse24`.
"""

from pathlib import Path

import numpy as np
import torch
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

ROWS, COLUMNS = 64, 128


def main() -> None:
    rng = np.random.default_rng(0)
    dense = np.zeros((ROWS, COLUMNS // 4, 4), np.float16)
    for group in dense.reshape(-1, 4):
        group[rng.choice(4, 2, replace=False)] = rng.integers(1, 9, 2) * rng.choice([-1, 1], 2)
    matrix = torch.from_numpy(dense.reshape(ROWS, COLUMNS))
    values, metadata = sparse_semi_structured_from_dense_cutlass(matrix)
    np.savez_compressed(
        Path(__file__).with_name("sparse24.npz"),
        torch=torch.__version__,
        dense=matrix.numpy().astype(np.int8),
        values=values.numpy().astype(np.int8),
        metadata=metadata.numpy(),
    )


if __name__ == "__main__":
    main()
