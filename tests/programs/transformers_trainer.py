"""Trains a tiny language model with the Trainer of transformers, offline; see test_libraries.py."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def main() -> None:
    set_seed(3)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **shape))
    tokens = torch.randint(0, 32, (26, 8), generator=torch.Generator().manual_seed(1))
    args = TrainingArguments(
        output_dir=sys.argv[1],
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=5,
        learning_rate=0.01,
        logging_steps=1,
        save_steps=5,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
    trainer.train()
    losses = [f"{entry['loss']:.9f}" for entry in trainer.state.log_history if "loss" in entry]
    weights = sum(parameter.double().sum() for parameter in model.parameters())
    print(f"result world {args.world_size} losses {' '.join(losses)}\n", end="", flush=True)
    print(f"result weights {weights.item():.9f}\n", end="", flush=True)


if __name__ == "__main__":
    main()
