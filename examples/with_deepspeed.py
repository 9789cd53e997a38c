"""DeepSpeed at ZeRO stage 0: torchrun --nproc-per-node 2 examples/with_deepspeed.py [FOLDER]."""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from hdet import AutoLR, Ensemble

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
settings = {"ensemble": Ensemble(spread=0.2), "interval": 4}
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    lr_scheduler=lambda optimizer: AutoLR(CosineAnnealingLR(optimizer, 100), model=model, **settings),
    config={
        "train_micro_batch_size_per_gpu": 32,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 0},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    },
)
# Shards, and the copies of the weights that "fp16" and "bf16" train, are no replicas of the model.
assert engine.zero_optimization_stage() == 0
assert engine.optimizer is engine.basic_optimizer
scheduler = engine.lr_scheduler  # stepped by engine.step()

data = torch.Generator().manual_seed(dist.get_rank())  # each replica sees its own part of the data
for _micro_step in range(200):
    x = torch.randn(32, 8, generator=data)
    loss = (engine(x).squeeze(-1) - x.sin().sum(-1)).square().mean()
    scheduler.observe(loss)
    engine.backward(loss)
    engine.step()

folder = sys.argv[1] if len(sys.argv) > 1 else "deepspeed_state"
with scheduler.converged():  # the mean of the replicas, and the scheduler
    engine.save_checkpoint(folder, tag="last")
engine.load_checkpoint(folder, tag="last")
if dist.get_rank() == 0:
    print(f"last loss {loss.item():.3f}, learned scale {scheduler.history[-1].scales[0]:.2f}")
dist.destroy_process_group()
