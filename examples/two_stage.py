"""The paper's two stages, a checkpoint and HDET from it: torchrun --nproc-per-node 2 examples/two_stage.py."""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from hdet import OneCycleAutoLR, warm_noisy_init

STEPS, LOW, HIGH = 150, 3e-3, 9 * 3e-3

dist.init_process_group("gloo")
rank = dist.get_rank()
data = torch.Generator().manual_seed(rank)  # each replica sees its own part of the data


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def loss_of(model, generator):
    x = torch.randn(32, 8, generator=generator)
    return (model(x).squeeze(-1) - x.sin().sum(-1)).square().mean()


def train(model, optimizer, advance):
    for _step in range(STEPS):
        loss = loss_of(model, data)
        loss.backward()
        optimizer.step()
        advance(loss)
        optimizer.zero_grad()
    return loss_of(model, torch.Generator().manual_seed(9)).item()


# Stage one: plain data-parallel training at a learning rate that is known to be fine, to its end.
model = DistributedDataParallel(build())
optimizer = torch.optim.Adam(model.parameters(), lr=LOW)
schedule = OneCycleLR(optimizer, LOW, STEPS)
first = train(model, optimizer, lambda _loss: schedule.step())
path = f"{tempfile.mkdtemp()}/checkpoint.pt"  # each rank has one; they are alike
torch.save(model.module.state_dict(), path)

# Stage two: every replica starts at its own point around the checkpoint, and trains with its own learning rate.
bare = build()
bare.load_state_dict(torch.load(path, weights_only=True))
model = DistributedDataParallel(bare)
warm_noisy_init(model, nu=0.01)  # after the wrapping, which would overwrite it
optimizer = torch.optim.Adam(model.parameters())
spread = {"ensemble_lr_spread_ratio": 1 / 9, "model_sync_interval": 5, "model": model}
scheduler = OneCycleAutoLR(optimizer, HIGH, STEPS, enable_auto_lr=True, auto_lr_warmup_steps=30, **spread)
second = train(model, optimizer, scheduler.step)
if rank == 0:
    print(f"held-out loss {first:.3f}, then {second:.3f}, learned scale {scheduler.history[-1].scales[0]:.2f}")
dist.destroy_process_group()
