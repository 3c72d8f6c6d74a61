"""The orthogonal factor of a matrix, by Newton and Schulz's iteration.

With G = U S V^T it approaches U V^T: all singular values near 1. The quintic of Keller Jordan, "Muon: An
optimizer for hidden layers in neural networks" (2024), X <- a X + (b A + c A A) X with A = X X^T, is steep at
zero and does not converge: after five steps singular values lie between about 0.7 and 1.2, which serves too.
"""

from __future__ import annotations

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def orthogonalise(matrix: torch.Tensor, *, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """[..., rows, cols] -> the same shape in ``dtype``, each matrix on its own.

    The order of operations for one matrix is that of `torch.optim.Muon`, which has ``dtype`` bf16.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.to(dtype)
    if tall:
        x = x.mT
    x = x / _norm(x).clamp(min=EPS)  # a singular value above 1 would be thrown far away
    product = torch.baddbmm if x.ndim == 3 else torch.addmm
    for _ in range(steps):
        gram = x @ x.mT
        x = product(x, product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _norm(x: torch.Tensor) -> torch.Tensor:
    """Frobenius norms, which bound the largest singular value."""
    return x.norm() if x.ndim == 2 else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
