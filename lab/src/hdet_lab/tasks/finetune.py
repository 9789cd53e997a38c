"""Fine-tuning: a GPT that was pre-trained on Python source learns Shakespeare, with all its weights or with LoRA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from hdet_lab.models.lora import LoRA
from hdet_lab.tasks.code import code_gpt
from hdet_lab.tasks.pretrained import Pretraining, pretrained
from hdet_lab.tasks.text import SHAKESPEARE_SHA256, TextTask, read_shakespeare

SIZES = {"context": 64, "num_layers": 3, "width": 96, "num_heads": 4}
SIZES_10M = {"context": 128, "num_layers": 6, "width": 384, "num_heads": 6}


class FineTuneTask(TextTask):
    """:class:`TextTask` on bytes that starts from given weights. The seed decides the data order, and LoRA's start.

    Args:
        name: of the task.
        text: bytes.
        weights: the parameters of the GPT as one vector.
        rank: of LoRA on every matrix of the blocks; None to train all weights.
        **sizes: as in :class:`TextTask`.
    """

    def __init__(self, name: str, text: Tensor, weights: Tensor, *, rank: int | None = None, **sizes: int) -> None:
        super().__init__(name, text, 256, **sizes)
        self.weights = weights
        self.rank = rank

    def build(self, seed: int = 0) -> nn.Module:
        model = super().build(seed)
        vector_to_parameters(self.weights.clone(), model.parameters())
        if self.rank is None:
            return model
        targets = [name for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2]
        return LoRA(model, targets, rank=self.rank, generator=torch.Generator().manual_seed(seed))

    def groups(self, model: nn.Module) -> Mapping[str, Sequence[str]]:
        """``decay`` and ``no_decay``; with LoRA ``down`` and ``up``, which want different learning rates."""
        if self.rank is None:
            return super().groups(model)
        names = [name for name, _ in model.named_parameters()]
        return {part: [name for name in names if name.startswith(part)] for part in ("down", "up")}


def finetune_gpt(
    data: str | Path = "data",
    *,
    rank: int | None = None,
    pretraining: Pretraining | None = None,
    code: Mapping[str, Any] | None = None,
    sha256: str | None = SHAKESPEARE_SHA256,
    download: bool = True,
    name: str = "finetune-gpt",
    **sizes: int,
) -> FineTuneTask:
    """A byte-level GPT of 0.4M parameters, pre-trained on ``code-gpt``'s text, learns tinyshakespeare.

    Args:
        data: folder that holds, or receives, ``tinyshakespeare/``, ``code/`` and ``pretrained/``.
        rank: of LoRA; None to train all weights.
        pretraining: how the model was, or will be, pre-trained; default :class:`Pretraining`'s own.
        code: options of :func:`hdet_lab.tasks.code.code_gpt`; default the pinned text.
        sha256: what Shakespeare must hash to; None skips the check.
        download: fetch missing text from its origin.
        name: of the task.
        **sizes: as in :class:`TextTask`; those of the model are smaller where not given.
    """
    text = read_shakespeare(data, sha256=sha256, download=download)
    model = {key: sizes.pop(key, default) for key, default in SIZES.items()}
    source = code_gpt(data, **{"download": download, **(code or {}), **model})
    weights = pretrained(data, source, pretraining or Pretraining())
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return FineTuneTask(name, tokens, weights, rank=rank, **{"total_steps": 500, **sizes, **model})


def finetune_lora(data: str | Path = "data", *, rank: int = 8, **options: Any) -> FineTuneTask:
    """:func:`finetune_gpt` with LoRA on every matrix of the blocks: 37k parameters at rank 8, alpha 16."""
    return finetune_gpt(data, name="finetune-lora", rank=rank, **options)


def finetune_gpt_10m(data: str | Path = "data", *, name: str = "finetune-gpt-10m", **options: Any) -> FineTuneTask:
    """:func:`finetune_gpt` with a model of 10.8M parameters, batches of 8 and a context of 128. Wants a GPU."""
    how = Pretraining(steps=2000, lr=1e-3)
    return finetune_gpt(data, name=name, **{"batch_rows": 8, "pretraining": how, **SIZES_10M, **options})


def finetune_lora_10m(data: str | Path = "data", *, rank: int = 8, **options: Any) -> FineTuneTask:
    """:func:`finetune_gpt_10m` with LoRA."""
    return finetune_gpt_10m(data, name="finetune-lora-10m", rank=rank, **options)
