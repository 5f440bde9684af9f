# mypy: disable-error-code="no-any-return"
"""What the ranks of a test world do with models of transformers, tiny and with random weights: see tests/full.

The oracle is the same model in one process on the whole batch, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import ddp

ROWS, TOKENS, WORDS, STEPS = 6, 7, 29, 5  # rows of a batch: as many for each of 2 or 3 ranks
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Any], Tensor] = lambda out: out.loss
    shift: int = 0  # labels at the beginning of a row that nothing predicts


def _words(generator: torch.Generator) -> Tensor:
    return torch.randint(3, WORDS, (ROWS, TOKENS), generator=generator)


def _text(generator: torch.Generator) -> Batch:
    words = _words(generator)
    return {"input_ids": words, "labels": words.clone()}


def _pair(generator: torch.Generator) -> Batch:
    return {"input_ids": _words(generator), "labels": _words(generator)}


def _images(generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS, 3, 8, 8, generator=generator, dtype=torch.float64)


def _clip() -> nn.Module:
    tower = {"hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**tower, "vocab_size": WORDS, "max_position_embeddings": TOKENS, "eos_token_id": 2, "pad_token_id": 1}
    return CLIPModel(
        CLIPConfig(text_config=text, vision_config={**tower, "image_size": 8, "patch_size": 4}, projection_dim=6)
    )


def _whisper() -> nn.Module:
    sizes = {"d_model": 12, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "dropout": 0.0}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    places = {"num_mel_bins": 4, "max_source_positions": 5, "max_target_positions": TOKENS, "vocab_size": WORDS}
    return WhisperForConditionalGeneration(WhisperConfig(**sizes, **heads, **special, **places))


def _t5() -> nn.Module:
    sizes = {"vocab_size": WORDS, "d_model": 12, "d_kv": 6, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def _gpt2() -> nn.Module:
    sizes = {"vocab_size": WORDS, "n_positions": TOKENS, "n_embd": 12, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def _mixtral() -> nn.Module:
    """With so many experts that most ranks leave some unused."""
    sizes = {"vocab_size": WORDS, "hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 32, "num_experts_per_tok": 1}
    config = MixtralConfig(**sizes, **heads, max_position_embeddings=TOKENS)
    config._experts_implementation = "eager"
    return MixtralForCausalLM(config)


def _vit() -> nn.Module:
    sizes = {"hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**sizes, **dropout, image_size=8, patch_size=4, num_labels=5))


CASES = {
    "gpt2": Case(_gpt2, _text, shift=1),
    "t5": Case(_t5, _pair),
    "mixtral": Case(_mixtral, _text, shift=1),
    "vit": Case(_vit, lambda g: {"pixel_values": _images(g), "labels": torch.randint(5, (ROWS,), generator=g)}),
    "whisper": Case(
        _whisper,
        lambda g: {
            "input_features": torch.randn(ROWS, 4, 10, generator=g, dtype=torch.float64),
            "labels": _words(g),
        },
    ),
    # Its own loss compares every row with every other; without it, logit_scale is unused.
    "clip": Case(
        _clip,
        lambda g: {"input_ids": _words(g), "pixel_values": _images(g)},
        lambda out: (out.text_embeds - out.image_embeds).square().mean(),
    ),
}


def made(case: Case) -> nn.Module:
    torch.manual_seed(2)
    return case.make().double().train()


def batches(case: Case, *, padded: bool = False) -> list[Batch]:
    """For each step the whole batch; `padded`, with other numbers of labels in each row."""
    generator = torch.Generator().manual_seed(4)
    found = [case.batch(generator) for _ in range(STEPS)]
    if padded:
        for batch in found:
            ends = torch.randint(2, TOKENS + 1, (ROWS, 1), generator=generator)
            batch["labels"] = batch["labels"].masked_fill(torch.arange(TOKENS) >= ends, -100)
    return found


def shard(batch: Batch) -> Batch:
    return {name: tensor[dist.get_rank() :: dist.get_world_size()].contiguous() for name, tensor in batch.items()}


def trained(module: nn.Module, backward: Callable[[Batch], None], given: list[Batch]) -> Tensor:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for batch in given:
        backward(batch)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def alone(case: Case, *, padded: bool = False) -> Tensor:
    module = made(case)
    return trained(module, lambda batch: case.loss(module(**batch)).backward(), batches(case, padded=padded))


def wrapped(case: Case, wrapper: Callable[[nn.Module], Any]) -> Tensor:
    module = made(case)
    model = wrapper(module)
    return trained(module, lambda batch: case.loss(model(**shard(batch))).backward(), batches(case))


def padded(case: Case) -> Tensor:
    """Ranks have other numbers of labels, which weigh their means."""
    module = made(case)
    model = ddp.DistributedDataParallel(module)

    def backward(batch: Batch) -> None:
        own = shard(batch)
        model.backward(model(**own).loss, weight=(own["labels"][:, case.shift :] != -100).sum())

    return trained(module, backward, batches(case, padded=True))


def torchs(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)


def models_train_as_alone(names: list[str]) -> dict[str, dict[str, float]]:
    """The largest differences of the parameters after the last step, by model and by what it is compared with."""
    with pytest.MonkeyPatch.context() as patch:
        # Norms, routers and losses are in single precision whatever the model is, so that a loss divided by 3 ranks has
        # other gradients in the eighth digit.
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        return {name: _differences(name, CASES[name]) for name in names}


def _differences(name: str, case: Case) -> dict[str, float]:
    begin = torch.cat([parameter.detach().reshape(-1) for parameter in made(case).parameters()])
    expected, found = alone(case), wrapped(case, ddp.DistributedDataParallel)
    differences = {"moved": expected - begin, "alone": found - expected, "torch": found - wrapped(case, torchs)}
    if name not in ("vit", "clip"):
        differences["padded"] = padded(case) - alone(case, padded=True)
    return {what: difference.abs().max().item() for what, difference in differences.items()}
