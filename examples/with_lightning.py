"""Lightning: torchrun --nproc-per-node 2 examples/with_lightning.py."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hdet.integrations.lightning import HDETCallback


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return (self.layers(batch[0]).squeeze(-1) - batch[1]).square().mean()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 128)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(num_samples: int, seed: int) -> DataLoader:
    x = torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x.sin().sum(-1)), batch_size=16)


if __name__ == "__main__":
    pl.seed_everything(0, verbose=False)
    callback = HDETCallback(interval=2)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=4,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), loader(1024, 0), loader(128, 1))
    if trainer.is_global_zero:
        scale = callback.scheduler.history[-1].scales[0]
        print(f"held-out loss {trainer.callback_metrics['val_loss']:.3f}, learned scale {scale:.1f}")
