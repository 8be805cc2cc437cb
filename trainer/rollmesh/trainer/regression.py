"""The loss of a value that is regressed on noisy outcomes: squared, or linear beyond an error (Huber 1964).

RIQL (2023-10, arXiv:2310.12955; code: YangRui2015/RIQL) trains value functions on corrupted data with it, because one
wrong reward then pulls a value by a bounded gradient:

    h(e) = e^2                          if |e| <= huber
           2 huber |e| - huber^2        beyond

Its code has sigma, with huber = 1 / sigma^2, and divides h by 2 huber. Here h keeps the scale of the squared loss, so
that `huber` can be set without another weight or learning rate. 0 is the squared loss. `huber` has the unit of the
reward.
"""

from __future__ import annotations

from torch import Tensor


def regression_loss(error: Tensor, huber: float) -> Tensor:
    """Return h(error), of the shape of `error`."""
    if not huber:
        return error.square()
    inside = error.clamp(-huber, huber)
    return inside * (2 * error - inside)
