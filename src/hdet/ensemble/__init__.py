r"""Replicas that differ on purpose: Hyperparameter-Divergent Ensemble Training (arXiv 2604.24708).

N replicas of one model are trained side by side, as data parallelism does anyway. Each has a learning rate of its own,
every T steps their weights are averaged, and their losses tell where the shared learning rate should go. With r from 0
to N - 1, spread :math:`\alpha`, the all-reduced gradient g, and :math:`L_r` the mean loss of replica r over a round:

.. math::
    \rho_r &= 1 + \alpha (r - (N-1)/2) / \delta, \quad \delta = \max((N-1)/2, 1/2)                              & (1) \\
    \theta_r &\leftarrow \theta_r - \eta \rho_r g \quad \text{in every step}                                    & (2) \\
    \theta_r &\leftarrow \overline{\theta} \quad \text{every T steps}                                           & (3) \\
    s_r &= (\overline{L} - L_r) / \sigma, \quad w = \mathrm{softmax}(s)                                         & (4) \\
    \eta_w &= \textstyle\sum_r w_r \eta_r, \quad \eta_m = \overline{\eta_r}                                     & (5) \\
    \Delta &= \eta_w - \eta_m                                                                                   & (6) \\
    v &\leftarrow \beta v + (1 - \beta) \Delta, \quad \eta_m \leftarrow \eta_m (1 - \gamma) + \lambda v         & (7) \\
    \gamma &= 1 - \exp(-\log(f_{div} / f_{final}) / K), \quad K = (S - S_{warm}) / T                            & (8) \\
    \eta_r &\leftarrow \eta_m \rho_{\pi(r)}, \quad \pi \text{ a fresh permutation for every knob}               & (9) \\
    \theta_r &\leftarrow \theta_0 + \epsilon, \quad \epsilon \sim N(0, \nu^2 \|\theta_0\|^2 / d)                 & (10)

:class:`OneCycleAutoLR` is that method in the shape of torch's OneCycleLR. Where each equation is:

- (1), (9): ``hdet.policy.spread``, numbers only. (2): the optimizer, with the learning rate that the scheduler writes.
- (3): :mod:`hdet.ensemble.averaging`, and what may follow it, DiLoCo's and EASGD's steps: :mod:`hdet.ensemble.outer`.
- (4) to (7): :mod:`hdet.ensemble.controllers.paper`. (8): :mod:`hdet.ensemble.one_cycle`.
- (10): :func:`warm_noisy_init`.
- Eq. 1 to 9 in one file to read, replicas as a list of models in one process: :mod:`hdet.ensemble.reference`.

:class:`Explorer` does the same for any scalar (:mod:`hdet.ensemble.knobs`); :mod:`hdet.ensemble.generations` for what
pays off late. ``AutoLR(..., ensemble=Ensemble(spread=0.1))`` lets replicas differ under AutoLR.
"""

from hdet.ensemble import knobs
from hdet.ensemble.explorer import Explorer
from hdet.ensemble.one_cycle import OneCycleAutoLR
from hdet.ensemble.options import Averaging, Ensemble
from hdet.ensemble.warm_start import warm_noisy_init

__all__ = ["Averaging", "Ensemble", "Explorer", "OneCycleAutoLR", "knobs", "warm_noisy_init"]
