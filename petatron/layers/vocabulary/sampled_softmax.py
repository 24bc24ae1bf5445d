"""Sampled softmax: the loss of a target among sampled items, corrected so that it estimates the softmax over all of them.

Of the partition function Z = sum_c exp(s_c) over all items c, the target's term is exact, and the rest is estimated by candidates that were
drawn with known probabilities (Bengio & Senecal, 2008). With e_c the expected number of times that c is among the candidates, and m_c how
often it is:

    loss = -s_y + log( exp(s_y) + sum_(candidates c != y) m_c exp(s_c) / e_c )

E[m_c] = e_c, so the sum is Z in expectation: log e_c is what is called the log-Q correction. A candidate that is the target is left out (an
accidental hit). Candidates may come from several sources, whose expected numbers add up:

    uniform     n draws from all V items       e_c = n / V
    in batch    the n targets of a micro-batch e_c = n q_c,  with q_c the share of c among all targets (Yi et al., 2019)

T tokens, N distinct candidates, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expected_counts(
    shares_N: Tensor, *, num_items: int, num_uniform: int | Tensor, num_in_batch: int | Tensor
) -> Tensor:
    """Returns how often each item is expected among candidates of both sources; `shares_N` are those of the items among all targets.

    >>> expected_counts(torch.tensor([0.5, 0.0]), num_items=10, num_uniform=5, num_in_batch=4)
    tensor([2.5000, 0.5000])
    """
    return num_uniform / num_items + num_in_batch * shares_N


def sampled_softmax_losses(
    x_TD: Tensor,
    target_rows_TD: Tensor,
    targets_T: Tensor,
    candidate_rows_ND: Tensor,
    candidates_N: Tensor,
    log_weights_N: Tensor,
) -> Tensor:
    """Returns token losses [T] in at least float32; `log_weights_N` are log(m_c / e_c) of the candidates.

    >>> x, rows = torch.tensor([[1.0]]), torch.tensor([[2.0], [3.0]])
    >>> all_items = torch.arange(2)
    >>> loss = sampled_softmax_losses(x, rows[:1], all_items[:1], rows, all_items, torch.zeros(2))
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(rows.t(), all_items[:1]))
    True
    """
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    target_T = (x_TD * target_rows_TD).sum(dim=-1, dtype=wide)
    scores_TN = (x_TD @ candidate_rows_ND.t()).to(wide) + log_weights_N.to(wide)
    scores_TN = scores_TN.masked_fill(candidates_N == targets_T.unsqueeze(1), float("-inf"))
    return torch.cat((target_T.unsqueeze(1), scores_TN), dim=1).logsumexp(dim=1) - target_T
