"""The Trainer of transformers with a tiny GPT-2 and a data set of datasets; nothing is fetched."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import trouble
from datasets import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


class Watch(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if trouble.comes(state.global_step):
            raise ValueError("bad batch")


def main():
    set_seed(1)
    words = torch.randint(0, 64, (640, 32)).tolist()
    dataset = Dataset.from_dict({"input_ids": words})
    dataset = dataset.map(lambda batch: {"labels": batch["input_ids"]}, batched=True)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=4,
        num_train_epochs=1,
        learning_rate=1e-3,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=dataset,
        data_collator=default_data_collator,
        callbacks=[Watch()],
    )
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"finished: {result.global_step} steps")


if __name__ == "__main__":
    main()
