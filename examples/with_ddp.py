"""Plain DistributedDataParallel: torchrun --nproc-per-node 2 examples/with_ddp.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hdet import AutoLR, Ensemble

STEPS = 200

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
scheduler = AutoLR(schedule, model=model, ensemble=Ensemble(spread=0.2), interval=4)

data = torch.Generator().manual_seed(dist.get_rank())  # each replica sees its own part of the data
for _step in range(STEPS):
    x = torch.randn(32, 8, generator=data)
    loss = (model(x).squeeze(-1) - x.sin().sum(-1)).square().mean()
    loss.backward()
    optimizer.step()
    scheduler.step(loss)
    optimizer.zero_grad()

with scheduler.converged():  # the mean of the replicas
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(9))
    held_out = (model(x).squeeze(-1) - x.sin().sum(-1)).square().mean().item()
if dist.get_rank() == 0:
    record = scheduler.history[-1]
    print(f"held-out loss {held_out:.3f}, learned scale {record.scales[0]:.1f}, learning rates {record.values[0]}")
dist.destroy_process_group()
