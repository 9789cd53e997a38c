from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hdet_lab.models.denoiser import Denoiser
from hdet_lab.models.vit import ViT, patches
from hdet_lab.tasks import FashionTask, fashion_batch_8, fashion_batch_1024
from small_tasks import small_diffusion, write_fashion


def test_batches_of_other_sizes(tmp_path: Path) -> None:
    write_fashion(tmp_path)
    for make, size in ((fashion_batch_8, 8), (fashion_batch_1024, 1024), (FashionTask, 128)):
        assert len(make(tmp_path, check=False).rows(0)) == size


def test_patches_are_squares_of_the_image() -> None:
    image = torch.arange(36).view(1, 6, 6)
    found = patches(image, 3)
    assert found.shape == (1, 4, 9)
    assert found[0, 1].tolist() == [3, 4, 5, 9, 10, 11, 15, 16, 17]
    assert found[0, 2].tolist() == [18, 19, 20, 24, 25, 26, 30, 31, 32]


def test_vit_sees_every_patch_from_every_other() -> None:
    model = ViT(10, size=8, num_layers=1, width=8, num_heads=2)
    assert sum(p.numel() for p in ViT(10).parameters()) == 343_018
    embedded = torch.randn(1, 4, 8, requires_grad=True)
    model.blocks[0](embedded, torch.zeros(()))[0, 0].sum().backward()
    assert embedded.grad is not None
    assert (embedded.grad.abs().sum(-1) > 0).all()
    with pytest.raises(ValueError, match=r"patch \(5\) must divide the size of the images \(28\)"):
        ViT(10, patch=5)


def test_validation_has_images_and_noise_of_its_own(tmp_path: Path) -> None:
    task = small_diffusion(tmp_path)
    trained = torch.cat([task.rows(step) for step in range(300)])
    assert int((trained % 50).max()) == 39
    assert set((trained // 50).tolist()) == set(range(16))
    assert (task.validation_rows % 50).tolist() == list(range(40, 50))
    assert set((task.validation_rows // 50).tolist()) == set(range(16, 20))
    images, noise, time = task.gather(trained)
    assert (images.min().item(), images.max().item()) == (-1.0, 1.0)
    assert noise.std().item() == pytest.approx(1.0, abs=0.05)
    assert (time.min() >= 0) & (time.max() <= 1)


def test_at_the_end_of_time_all_is_noise() -> None:
    model = Denoiser(4, widths=(3,))
    with torch.no_grad():
        for parameter in model.mlp.parameters():
            parameter.zero_()
    images, noise = torch.randn(2, 5, 4).unbind()
    torch.testing.assert_close(model(images, noise, torch.ones(5)), noise)
    assert model(images, noise, torch.zeros(5)).abs().max() == 0
    model.mlp.head.bias.data.fill_(2.0)
    assert (model(images, noise, torch.zeros(5)) == 2).all()
