"""Trains a tiny language model with the Trainer of transformers and resumes, offline; see test_resume.py.

Words: the folder, and a step at whose beginning rank 1 kills itself, once.
"""

import os
import signal
import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Dying(TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print(f"result begins at {state.global_step}\n", end="", flush=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if state.global_step == self.at and os.environ["RANK"] == "1" and is_first:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    set_seed(3)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **shape))
    tokens = torch.randint(0, 32, (32, 8), generator=torch.Generator().manual_seed(1))
    args = TrainingArguments(
        output_dir=sys.argv[1],
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=10,
        learning_rate=0.01,
        save_steps=4,
        report_to="none",
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[Dying(int(sys.argv[2]))])
    os.makedirs(args.output_dir, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))
    weights = sum(parameter.double().sum() for parameter in model.parameters())
    print(f"result weights {weights.item():.9f}\n", end="", flush=True)


if __name__ == "__main__":
    main()
