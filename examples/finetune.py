"""Train a small GPT-2 on the text of Python's standard library, with the Trainer of Transformers.

pip install -e '.[transformers]'
laconic lab --bandwidth 100mbit -- python examples/finetune.py
laconic lab --bandwidth 100mbit -- python examples/finetune.py --framework  # Transformers' DDP

Interrupt it with Ctrl-C and pass --resume: it continues from its last checkpoint, bit for bit.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import laconic
from laconic.integrations.transformers import LaconicTrainer

LENGTH = 128


class Bytes(Dataset):
    """Pieces of text, one token per byte."""

    def __init__(self, data):
        self.pieces = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, index):
        piece = self.pieces[index].long()
        return {"input_ids": piece, "labels": piece}


def text():
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", default="finetune")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint")
    parser.add_argument("--framework", action="store_true", help="with Transformers' own DDP")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4)
    model = GPT2LMHeadModel(config)
    data = text()
    held_out = Bytes(data[-64 * LENGTH :])
    arguments = TrainingArguments(
        output_dir=options.folder,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        warmup_steps=20,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=50,
        save_steps=50,
        save_total_limit=2,
        logging_steps=10,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    given = {"train_dataset": Bytes(data[: -64 * LENGTH]), "eval_dataset": held_out}
    if options.framework:
        trainer = Trainer(model, arguments, **given)
    else:
        trainer = LaconicTrainer(model, arguments, **given, recipe=laconic.auto())
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model()
    result = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"loss {result['eval_loss']:.3f} after {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
