"""A small model that finds the noise in a noisy image."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hdet_lab.models.mlp import MLP

NUM_FREQUENCIES = 16


class Denoiser(nn.Module):
    """An MLP on the pixels and on sines of the time, beside a connection that passes the noisy image on.

    The image at time t in [0, 1] is cos(pi t / 2) of itself plus sin(pi t / 2) of the noise, so sin(pi t / 2) of it is
    the best linear guess of the noise for an image of unit variance; the MLP adds the rest.
    """

    def __init__(self, num_pixels: int, *, widths: Sequence[int], generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.mlp = MLP(num_pixels + 2 * NUM_FREQUENCIES, num_pixels, widths=widths, generator=generator)

    def forward(self, images: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """``images`` and ``noise``: (rows, pixels), ``time``: (rows,); returns the noise as it is found."""
        signal, share = (f(time * (math.pi / 2)).unsqueeze(-1) for f in (torch.cos, torch.sin))
        noisy = signal * images + share * noise
        frequencies = 2 ** torch.linspace(0, 6, NUM_FREQUENCIES, device=time.device, dtype=time.dtype)
        angles = time.unsqueeze(-1) * frequencies
        found: Tensor = share * noisy + self.mlp(torch.cat([noisy, angles.sin(), angles.cos()], dim=-1))
        return found
