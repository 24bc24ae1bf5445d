"""Newton-Schulz iteration: approximates the nearest semi-orthogonal matrix with GEMMs alone.

With X = U S V^T and singular values in (0, 1], one step with coefficients (a, b, c) is

    X <- a X + (b A + c A^2) X,   A = X X^T

which is the polynomial a s + b s^3 + c s^5 of every singular value and leaves U and V as they are. A few steps bring all singular
values near 1 (Jordan et al., Muon, 2024). A matrix is divided by its Frobenius norm first, so that none is above 1, and a tall one is
iterated transposed, where A is smaller. Rows may be permuted before or after, so stacked matrices may be stacked in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, cycle, islice, repeat

import torch
from torch import Tensor

from petatron.kernels.cpu_matmul import matmul

Coefficients = tuple[float, float, float]

# simple: one triple for all steps (Jordan et al. 2024). quintic: a triple for each of five steps (Cesista 2025).
# polar_express: the polynomials p that are optimal for singular values in [1e-3, 1], as p(x / 1.01) except in the last, convergent step,
# so that rounding cannot push a singular value beyond 1 (Amsel et al. 2025).
COEFFICIENT_SETS: dict[str, tuple[Coefficients, ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}
_SMALLEST_NORM = 1e-7


def step_coefficients(name: str, num_steps: int) -> tuple[Coefficients, ...]:
    """Returns the coefficients of every step. With more steps than triples the set repeats; polar_express repeats its last triple only.

    >>> step_coefficients("simple", 2)
    ((3.4445, -4.775, 2.0315), (3.4445, -4.775, 2.0315))
    """
    given = COEFFICIENT_SETS[name]
    endless = chain(given, repeat(given[-1])) if name == "polar_express" else cycle(given)
    return tuple(islice(endless, num_steps))


@torch.no_grad()
def newton_schulz(matrices: Tensor, coefficients: Sequence[Coefficients]) -> Tensor:
    """Orthogonalizes a matrix, or every matrix of a batch [..., rows, columns], in its own dtype."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide)
    x = (x / norm.clamp_min(_SMALLEST_NORM)).to(x.dtype)
    for a, b, c in coefficients:
        gram = matmul(x, x.mT)
        x = a * x + matmul(b * gram + c * matmul(gram, gram), x)
    return x.mT if tall else x
