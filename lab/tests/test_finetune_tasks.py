from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from hdet_lab.models.gpt import GPT, next_token_loss
from hdet_lab.models.lora import LoRA
from hdet_lab.tasks import batch_of, code_gpt, finetune, finetune_lora
from hdet_lab.tasks import pretrained as pretrained_module
from hdet_lab.tasks.digest import data_sha256
from hdet_lab.tasks.pretrained import Pretraining, pretrained
from small_tasks import small_finetune

SIZES: dict[str, Any] = {"context": 8, "num_layers": 2, "width": 8, "num_heads": 2}


def make_gpt(seed: int = 0) -> GPT:
    return GPT(20, generator=torch.Generator().manual_seed(seed), **SIZES)


def matrices(model: torch.nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2]


def test_a_model_is_pretrained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = small_finetune(tmp_path)
    (file,) = (tmp_path / "pretrained").iterdir()
    assert file.name.startswith("code-gpt-12-")
    monkeypatch.setattr(pretrained_module, "pretrain", lambda *_: pytest.fail("trained again"))
    source = code_gpt(tmp_path, sha256=None, batch_rows=4, context=8, num_layers=1, width=8, num_heads=2)
    assert torch.equal(pretrained(tmp_path, source, Pretraining(steps=12)), task.weights)
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        pretrained(tmp_path, source, Pretraining(steps=12, lr=1e-3))


def test_pretraining_learns(tmp_path: Path) -> None:
    small_finetune(tmp_path)
    source = code_gpt(tmp_path, sha256=None, batch_rows=8, num_validation=20, **SIZES)
    model = source.build()
    before = source.evaluate(model)["loss"]
    torch.nn.utils.vector_to_parameters(
        pretrained_module.pretrain(source, Pretraining(steps=60, lr=0.03)), model.parameters()
    )
    assert source.evaluate(model)["loss"] < 0.7 * before


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    task = small_finetune(tmp_path)
    source = code_gpt(tmp_path, sha256=None, batch_rows=4, context=8, num_layers=1, width=8, num_heads=2)
    (file,) = (tmp_path / "pretrained").iterdir()
    torch.save(task.weights + 1, file)
    with pytest.raises(ValueError, match="must have the hash in its name, but got"):
        pretrained(tmp_path, source, Pretraining(steps=12))
    file.with_name(f"{file.stem[:-12]}{'0' * 12}.pt").write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match="must hold one model pre-trained with the same settings, but has code-gpt"):
        pretrained(tmp_path, source, Pretraining(steps=12))


def test_a_folder_that_cannot_be_made_is_told_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_finetune(tmp_path)
    source = code_gpt(tmp_path, sha256=None, **SIZES)
    monkeypatch.setattr(pretrained_module, "pretrain", lambda *_: pytest.fail("trained first"))
    (tmp_path / "file").touch()
    with pytest.raises(
        FileNotFoundError, match=r"pretrained is missing and cannot be made .* choose another data folder"
    ):
        pretrained(tmp_path / "file", source, Pretraining())


def test_both_start_from_the_pretrained_model(tmp_path: Path) -> None:
    full = small_finetune(tmp_path)
    model = full.build(3)
    assert torch.equal(parameters_to_vector(model.parameters()), full.weights)
    (tmp_path / "more").mkdir()
    lora = small_finetune(tmp_path / "more", finetune_lora)
    batch = batch_of(full, 0)
    assert torch.equal(lora.loss(lora.build(3), batch), full.loss(model, batch))
    assert list(lora.groups(lora.build())) == ["down", "up"]
    with torch.no_grad():
        model.head.weight.add_(1.0)  # type: ignore[operator, union-attr]
    assert torch.equal(parameters_to_vector(full.build(3).parameters()), full.weights)  # which training leaves alone
    before = data_sha256(full)
    full.weights = full.weights + 1
    assert data_sha256(full) != before


def test_lora_is_a_low_rank_change_of_the_matrices() -> None:
    base = make_gpt()
    plain = copy.deepcopy(base)
    model = LoRA(base, matrices(base), rank=2, alpha=6.0)
    with torch.no_grad():
        for up in model.up:
            up.normal_()
        for name, down, up in zip(model.targets, model.down, model.up, strict=True):
            dict(plain.named_parameters())[name].add_(3.0 * up @ down)
    tokens = torch.arange(16).view(2, 8)
    torch.testing.assert_close(model(tokens), plain(tokens))
    assert {name.partition(".")[0] for name, _ in model.named_parameters()} == {"down", "up"}
    assert not list(model.buffers())
    assert model.double()(tokens).dtype == torch.float64
    with pytest.raises(ValueError, match="rank must be at least 1, but got rank=0"):
        LoRA(base, matrices(base), rank=0)


def test_lora_is_that_of_peft() -> None:
    peft = pytest.importorskip("peft")
    ours = LoRA(make_gpt(), matrices(make_gpt()), rank=3, alpha=5.0, generator=torch.Generator().manual_seed(1))
    names = [name.removesuffix(".weight") for name in ours.targets]
    config = peft.LoraConfig(r=3, lora_alpha=5.0, lora_dropout=0.0, target_modules=names)
    theirs = peft.get_peft_model(make_gpt(), config)
    layers = [theirs.base_model.model.get_submodule(name) for name in names]
    with torch.no_grad():
        for index, layer in enumerate(layers):
            ours.up[index].normal_(generator=torch.Generator().manual_seed(index))
            layer.lora_A["default"].weight.copy_(ours.down[index])
            layer.lora_B["default"].weight.copy_(ours.up[index])
    tokens = torch.randint(20, (3, 9), generator=torch.Generator().manual_seed(2))
    losses = [next_token_loss(model, tokens) for model in (ours, theirs)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
    for index, layer in enumerate(layers):
        torch.testing.assert_close(ours.down[index].grad, layer.lora_A["default"].weight.grad)
        torch.testing.assert_close(ours.up[index].grad, layer.lora_B["default"].weight.grad)
    trained = sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    assert trained == sum(p.numel() for p in ours.parameters())


def test_default_sizes() -> None:
    with torch.device("meta"):
        model = GPT(256, generator=None, **finetune.SIZES)
        lora = LoRA(model, matrices(model))
    assert sum(p.numel() for p in model.parameters()) == 387_744
    assert sum(p.numel() for p in lora.parameters()) == 36_864
