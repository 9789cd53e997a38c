"""The Trainer of Transformers: torchrun --nproc-per-node 2 examples/with_transformers.py."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hdet import Ensemble
from hdet.integrations.transformers import HDETTrainerCallback

torch.manual_seed(0)
text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 120))
samples = [{"input_ids": t, "labels": t} for t in text[: len(text) // 16 * 16].view(-1, 16)]
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=128, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=60,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        eval_strategy="steps",
        eval_steps=30,
        save_strategy="no",
        logging_steps=20,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=samples, eval_dataset=samples[:32])
    callback = HDETTrainerCallback.attach(trainer, interval=2, ensemble=Ensemble(spread=0.2))
    trainer.train()
    if trainer.is_world_process_zero():
        losses = [round(entry["eval_loss"], 3) for entry in trainer.state.log_history if "eval_loss" in entry]
        print(f"evaluation losses {losses}, learned scale {callback.scheduler.history[-1].scales[0]:.2f}")
torch.distributed.destroy_process_group()
