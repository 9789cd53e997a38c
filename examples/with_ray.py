"""Ray Train, two workers: python examples/with_ray.py."""

import os
import tempfile

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import nn

from hdet import AutoLR, Ensemble

STEPS = 100


def train_loop_per_worker() -> None:
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))  # in DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    scheduler = AutoLR(schedule, model=model, ensemble=Ensemble(spread=0.2), interval=4)

    data = torch.Generator().manual_seed(dist.get_rank())  # each replica sees its own part of the data
    for step in range(1, STEPS + 1):
        x = torch.randn(32, 8, generator=data)
        loss = (model(x).squeeze(-1) - x.sin().sum(-1)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        optimizer.zero_grad()
        if step % 50 == 0:
            with scheduler.converged(), tempfile.TemporaryDirectory() as folder:  # on every worker
                state = {"model": model.module.state_dict(), "scheduler": scheduler.state_dict()}
                checkpoint = None
                if dist.get_rank() == 0:
                    torch.save(state, os.path.join(folder, "state.pt"))
                    checkpoint = ray.train.Checkpoint.from_directory(folder)
                scale = scheduler.history[-1].scales[0]
                ray.train.report({"loss": loss.item(), "scale": scale}, checkpoint=checkpoint)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as storage:
        trainer = ray.train.torch.TorchTrainer(
            train_loop_per_worker,
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=storage),
        )
        result = trainer.fit()
        with result.checkpoint.as_directory() as folder:
            steps = torch.load(os.path.join(folder, "state.pt"), weights_only=True)["scheduler"]["last_epoch"]
    print(f"{steps} steps, last loss {result.metrics['loss']:.3f}, learned scale {result.metrics['scale']:.2f}")
