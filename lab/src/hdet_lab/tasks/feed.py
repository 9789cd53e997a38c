"""A short-video feed in time order, one epoch, three engagement labels (KuaiRand-Pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hdet_lab.models.feed import FeedModel
from hdet_lab.tasks.base import Batch
from hdet_lab.tasks.feed_data import LABELS, load_feed


class FeedTask:
    """Click, long view and like of each shown video, from who saw it, what it is, and the user's earlier watching.

    The log is in time order and every row is trained on once, so a step's loss is progressive: taken before anything
    was learned from its rows. The seed of a run decides its initial weights only.

    Args:
        data: folder that holds ``kuairand-pure/`` with log.npz, users.npz, items.npz and histories.npz.
        batch_rows: rows of a global batch.
        num_test_days: the last days of the log, held out for validation.
        history: how many of a user's latest watched videos the model sees.
        width, num_layers, num_heads: of the transformer over the history.
        field_width: of the embedding of each categorical field.
    """

    def __init__(
        self,
        data: str | Path = "data",
        *,
        batch_rows: int = 512,
        num_test_days: int = 4,
        history: int = 32,
        width: int = 64,
        num_layers: int = 2,
        num_heads: int = 2,
        field_width: int = 16,
    ) -> None:
        self.data = load_feed(data, history)
        num_days = int(self.data.day[-1]) + 1
        num_train = int((self.data.day < num_days - num_test_days).sum())
        if num_train < batch_rows:
            raise ValueError(
                f"the {num_days - num_test_days} days before the last {num_test_days} must fill a batch of "
                f"{batch_rows} rows, but have {num_train}"
            )
        self.name = "feed"
        self.batch_rows = batch_rows
        self.total_steps = num_train // batch_rows
        self.validation_rows = torch.arange(num_train, len(self.data.day))
        self.sizes = {"width": width, "num_layers": num_layers, "num_heads": num_heads, "field_width": field_width}

    def to(self, device: torch.device | str) -> FeedTask:
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self.data).items() if isinstance(v, Tensor)}
        self.data = replace(self.data, **moved)
        return self

    def build(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # torch's layers initialise themselves first
            return FeedModel(
                num_items=self.data.num_items,
                num_fields=self.data.fields.shape[1],
                num_values=self.data.num_values,
                num_labels=len(LABELS),
                history=self.data.past.shape[1],
                generator=torch.Generator().manual_seed(seed),
                **self.sizes,
            )

    def groups(self, model: nn.Module) -> Mapping[str, Sequence[str]]:
        """The paper's four: embedding tables; biases and norms; the other matrices outside and inside the blocks."""
        groups: dict[str, list[str]] = {"embedding": [], "no_decay": [], "non_embedding": [], "transformer": []}
        for name, parameter in model.named_parameters():
            if name.startswith(("items.", "fields.", "behaviours.", "positions")):
                groups["embedding"].append(name)
            elif parameter.dim() <= 1:
                groups["no_decay"].append(name)
            else:
                groups["transformer" if name.startswith("blocks.") else "non_embedding"].append(name)
        return groups

    def rows(self, step: int, *, seed: int = 0) -> Tensor:
        if not 0 <= step < self.total_steps:
            raise ValueError(f"step must be in [0, {self.total_steps}), one epoch, but got step={step}")
        return torch.arange(step * self.batch_rows, (step + 1) * self.batch_rows)

    def gather(self, rows: Tensor) -> Batch:
        """(fields, item, past, behaviour, labels)."""
        data = self.data
        rows = rows.to(data.item.device)
        user = data.user[rows]
        return data.fields[rows].long(), data.item[rows], data.past[user], data.behaviour[user], data.labels[rows]

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Sum over the labels of their binary cross-entropy."""
        *inputs, labels = batch
        logits = model(*inputs)
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype)) * len(LABELS)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """``loss``, and for each label ``ne/…``, its entropy over that of the base rate, and ``auc/…``."""
        scores, truth = [], []
        for rows in torch.split(self.validation_rows, 2048):
            *inputs, labels = self.gather(rows)
            scores.append(model(*inputs).double())
            truth.append(labels.double())
        logits, labels = torch.cat(scores), torch.cat(truth)
        entropy = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(0)
        rate = labels.mean(0)
        normal = F.binary_cross_entropy(rate, rate, reduction="none")
        figures = {"loss": entropy.sum().item()}
        for index, label in enumerate(LABELS):
            figures[f"ne/{label}"] = (entropy[index] / normal[index]).item()
            figures[f"auc/{label}"] = auc(logits[:, index], labels[:, index])
        return figures


def auc(scores: Tensor, labels: Tensor) -> float:
    """Chance that a positive scores above a negative, ties counting half; NaN where there is only one kind."""
    _, inverse, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0).double() - (counts.double() - 1) / 2)[inverse]
    positives = labels.sum()
    negatives = len(labels) - positives
    above = ranks[labels > 0].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))
