"""Accelerate: torchrun --nproc-per-node 2 examples/with_accelerate.py [FOLDER]."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hdet import AutoLR, Ensemble
from hdet.integrations.accelerate import HDETScheduler

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
x = torch.randn(4096, 8)
loader = DataLoader(TensorDataset(x, x.sin().sum(-1)), batch_size=16)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 64)

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
scheduler = HDETScheduler(accelerator, AutoLR(schedule, ensemble=Ensemble(spread=0.2), interval=4))

for inputs, labels in loader:
    with accelerator.accumulate(model):
        loss = (model(inputs).squeeze(-1) - labels).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step(loss)  # with every micro-batch; counts optimizer steps
        optimizer.zero_grad()

folder = sys.argv[1] if len(sys.argv) > 1 else "accelerate_state"
scheduler.save_state(folder)  # the mean of the replicas, and the scheduler
accelerator.wait_for_everyone()
scheduler.load_state(folder)
accelerator.print(f"last loss {loss.item():.3f}, learned scale {scheduler.history[-1].scales[0]:.2f}")
accelerator.end_training()
