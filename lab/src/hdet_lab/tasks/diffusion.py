"""Diffusion on Fashion-MNIST: find the noise that was added to an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hdet_lab.models.denoiser import Denoiser
from hdet_lab.tasks.base import Batch, decay_groups, random_rows
from hdet_lab.tasks.fashion import read_fashion


class FashionDiffusionTask:
    """The squared error of the noise found in noisy images; test images and noise of their own validate.

    A row is an image with one draw of noise and time: ``draw * images + image``, test images after training images. So
    the noise of a step is drawn with its rows. Pixels are from -1 to 1, times even in [0, 1].

    Args:
        data: folder that holds, or receives, ``fashion-mnist/`` with the four original .gz files.
        total_steps: default length of a run.
        batch_rows: images of a global batch.
        widths: of the hidden layers of the model.
        num_draws: of noise and time to train with; a quarter as many more validate.
        check, download: as in :class:`hdet_lab.tasks.fashion.FashionTask`.
    """

    def __init__(
        self,
        data: str | Path = "data",
        *,
        total_steps: int = 2000,
        batch_rows: int = 128,
        widths: Sequence[int] = (256, 256, 256),
        num_draws: int = 4096,
        check: bool = True,
        download: bool = True,
    ) -> None:
        train, _, test, _ = read_fashion(data, check=check, download=download)
        self.name = "fashion-diffusion"
        self.total_steps = total_steps
        self.batch_rows = batch_rows
        self.widths = tuple(widths)
        self.num_train, self.num_draws = len(train), num_draws
        self.images = torch.cat([train, test]).flatten(1)
        generator = torch.Generator().manual_seed(2**31)  # away from the seeds of runs
        num_all = num_draws + max(1, num_draws // 4)
        self.noise = torch.randn(num_all, self.images.shape[1], generator=generator)
        self.time = torch.rand(num_all, generator=generator)
        unseen = num_draws + torch.arange(len(test)) % (num_all - num_draws)
        self.validation_rows = unseen * len(self.images) + torch.arange(len(train), len(self.images))

    def to(self, device: torch.device | str) -> FashionDiffusionTask:
        self.images, self.noise, self.time = (t.to(device) for t in (self.images, self.noise, self.time))
        return self

    def build(self, seed: int = 0) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):  # torch's layers initialise themselves first
            return Denoiser(self.images.shape[1], widths=self.widths, generator=generator)

    def groups(self, model: nn.Module) -> Mapping[str, Sequence[str]]:
        """``decay``: matrices; ``no_decay``: biases."""
        return decay_groups(model)

    def rows(self, step: int, *, seed: int = 0) -> Tensor:
        drawn = random_rows(self.num_draws * self.num_train, self.batch_rows, seed=seed, step=step)
        return drawn // self.num_train * len(self.images) + drawn % self.num_train

    def gather(self, rows: Tensor) -> Batch:
        """(images from -1 to 1, noise, time)."""
        rows = rows.to(self.images.device)
        draw = rows // len(self.images)
        return self.images[rows % len(self.images)] / 127.5 - 1, self.noise[draw], self.time[draw]

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Mean over images and pixels."""
        dtype = next(model.parameters()).dtype
        images, noise, time = (tensor.to(dtype) for tensor in batch)
        return F.mse_loss(model(images, noise, time), noise)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        parts = torch.split(self.validation_rows, 1000)
        losses = torch.stack([self.loss(model, self.gather(rows)).double() * len(rows) for rows in parts])
        return {"loss": losses.sum().item() / len(self.validation_rows)}
