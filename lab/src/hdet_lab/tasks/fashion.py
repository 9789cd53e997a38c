"""Fashion-MNIST: grey images of clothes in ten classes, a small ResNet with BatchNorm."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hdet_lab.models.resnet import ResNet
from hdet_lab.tasks.base import Batch, decay_groups, evaluation_mode, random_rows
from hdet_lab.tasks.download import check_sha256, read_or_download

URL = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
# Of what is inside the .gz files, so that a recompressed copy passes.
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
NUM_CLASSES = 10
PAD = 2  # pixels that a training image is shifted by at most, in both directions


class FashionTask:
    """Which piece of clothing an image shows; the 10,000 test images validate.

    A row is an image in one of its variants: ``variant * images + image``, test images after training images. Variant 0
    is the image itself, the others are shifted by up to two pixels, or mirrored, or both. So the augmentation of a step
    is drawn with its rows.

    Args:
        data: folder that holds, or receives, ``fashion-mnist/`` with the four original .gz files.
        total_steps: default length of a run.
        batch_rows: images of a global batch.
        augment: train on all variants rather than on the images themselves.
        widths: of the blocks of the model.
        check: compare the files with their SHA-256.
        download: fetch missing files from their origin.
        name: of the task.
    """

    def __init__(
        self,
        data: str | Path = "data",
        *,
        total_steps: int = 2000,
        batch_rows: int = 128,
        augment: bool = True,
        widths: Sequence[int] = (32, 64, 96),
        check: bool = True,
        download: bool = True,
        name: str = "fashion",
    ) -> None:
        train_images, train_labels, test_images, test_labels = read_fashion(data, check=check, download=download)
        self.name = name
        self.total_steps = total_steps
        self.batch_rows = batch_rows
        self.widths = tuple(widths)
        self.num_train = len(train_images)
        self.labels = torch.cat([train_labels, test_labels]).long()
        self.validation_rows = torch.arange(self.num_train, len(self.labels))
        size = train_images.shape[-1]
        self.images = F.pad(torch.cat([train_images, test_images]), [PAD] * 4)
        self.pixels = _variants(size)
        self.num_variants = len(self.pixels) if augment else 1

    def to(self, device: torch.device | str) -> FashionTask:
        self.images, self.labels, self.pixels = (t.to(device) for t in (self.images, self.labels, self.pixels))
        return self

    def build(self, seed: int = 0) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):  # torch's layers initialise themselves first
            return ResNet(NUM_CLASSES, widths=self.widths, generator=generator)

    def groups(self, model: nn.Module) -> Mapping[str, Sequence[str]]:
        """``decay``: convolutions and the head's matrix; ``no_decay``: norms and biases."""
        return decay_groups(model)

    def rows(self, step: int, *, seed: int = 0) -> Tensor:
        drawn = random_rows(self.num_variants * self.num_train, self.batch_rows, seed=seed, step=step)
        return drawn // self.num_train * len(self.labels) + drawn % self.num_train

    def gather(self, rows: Tensor) -> Batch:
        """(images of bytes, labels)."""
        rows = rows.to(self.labels.device)
        image, variant = rows % len(self.labels), rows // len(self.labels)
        return self.images.flatten(1)[image[..., None, None], self.pixels[variant]], self.labels[image]

    def loss(self, model: Any, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """``loss``, and ``accuracy`` in [0, 1]."""
        loss = right = torch.zeros((), dtype=torch.float64, device=self.labels.device)
        with evaluation_mode(model):
            for rows in torch.split(self.validation_rows, 500):
                images, labels = self.gather(rows)
                logits = model(images).double()
                loss = loss + F.cross_entropy(logits, labels, reduction="sum")
                right = right + (logits.argmax(1) == labels).sum()
        num_rows = len(self.validation_rows)
        return {"loss": loss.item() / num_rows, "accuracy": right.item() / num_rows}


def fashion_batch_8(data: str | Path = "data", **options: Any) -> FashionTask:
    """:class:`FashionTask` with batches of 8 images."""
    return FashionTask(data, name="fashion-batch-8", **{"batch_rows": 8, **options})


def fashion_batch_1024(data: str | Path = "data", **options: Any) -> FashionTask:
    """:class:`FashionTask` with batches of 1024 images."""
    return FashionTask(data, name="fashion-batch-1024", **{"batch_rows": 1024, **options})


def read_fashion(data: str | Path, *, check: bool = True, download: bool = True) -> list[Tensor]:
    """Training images and labels, test images and labels, as :class:`FashionTask` finds them."""
    folder = Path(data) / "fashion-mnist"
    return [read_idx(folder, name, check=check, download=download) for name in SHA256]


def read_idx(folder: Path, name: str, *, check: bool = True, download: bool = True) -> Tensor:
    """The array in ``<folder>/<name>.gz``, bytes in the IDX format of the MNIST files."""
    path = folder / f"{name}.gz"
    content = gzip.decompress(read_or_download(path, f"{URL}{name}.gz", download=download))
    check_sha256(content, SHA256[name] if check else None, path)
    num_axes = content[3]
    start = 4 + 4 * num_axes
    shape = np.frombuffer(content, dtype=">u4", count=num_axes, offset=4).tolist()
    if content[:3] != b"\0\0\x08" or len(content) - start != np.prod(shape):
        raise ValueError(f"{path} must hold an IDX array of bytes, but its header says {content[:start].hex()}")
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).view(shape)


def _variants(size: int) -> Tensor:
    """(variants, size, size): which pixels of a padded, flattened image make up each variant; the plain one first."""
    span = 2 * PAD + 1
    padded = torch.arange((size + 2 * PAD) ** 2).view(size + 2 * PAD, size + 2 * PAD)
    shifts = sorted(((y, x) for y in range(span) for x in range(span)), key=lambda shift: shift != (PAD, PAD))
    windows = torch.stack([padded[y : y + size, x : x + size] for y, x in shifts])
    return torch.cat([windows, windows.flip(2)])
