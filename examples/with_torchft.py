"""torchft, each process a replica group: torchrun --nproc-per-node 2 examples/with_torchft.py."""

import os

import torch
import torchft
from torch import nn
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer

from hdet import AutoLR

STEPS = 100
rank = int(os.environ["RANK"])

# Elsewhere `torchft_lighthouse` is a program of its own; here the first process hosts it, and tells the other.
meeting = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
if rank == 0:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
    meeting.set("lighthouse", lighthouse.address())
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = AutoLR(torch.optim.lr_scheduler.CosineAnnealingLR(inner, STEPS), interval=4)
parts = {"model": model, "optimizer": inner, "scheduler": scheduler}  # the model first

manager = torchft.Manager(
    pg=torchft.ProcessGroupGloo(),
    min_replica_size=1,
    state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
    load_state_dict=lambda state: [part.load_state_dict(state[name]) for name, part in parts.items()],
    replica_id=f"replica{rank}",
    lighthouse_addr=meeting.get("lighthouse").decode(),
    store_addr="127.0.0.1",
    store_port=store.port,
    hostname="127.0.0.1",
    rank=0,
    world_size=1,
)
ddp = torchft.DistributedDataParallel(manager, model)
optimizer = torchft.Optimizer(manager, inner)
while (step := manager.current_step()) < STEPS:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(2 * step + rank))
    optimizer.zero_grad()
    loss = (ddp(x).squeeze(-1) - x.sin().sum(-1)).square().mean()
    loss.backward()
    optimizer.step()
    if manager.current_step() > step:  # it was committed
        scheduler.step()  # without the loss, which is this replica's alone: all must decide alike
if rank == 0:
    print(f"last loss {loss.item():.3f}, learned scale {scheduler.history[-1].scales[0]:.2f}")
meeting.set(f"done {rank}", "")
meeting.wait(["done 0", "done 1"])
manager.shutdown(wait=False)
