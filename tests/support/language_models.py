"""Small language models of transformers, with random weights and nothing left at a default."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from support.case import randomize_

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class LanguageModel:
    """A class of transformers, its configuration, and, where it is folded, how many gammas can be moved and cannot."""

    name: str
    config: str
    options: dict[str, Any]
    moved: int | None = None
    left: int | None = None

    def build(self) -> nn.Module:
        transformers = importlib.import_module("transformers")
        torch.manual_seed(0)
        model = getattr(transformers, self.name)(getattr(transformers, self.config)(**self.options)).eval()
        for module in model.modules():
            if all(parameter.dim() == 1 for parameter in module.parameters()):
                randomize_(module)
        return model

    def example(self) -> dict[str, torch.Tensor]:
        ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(1))
        return {"input_ids": ids} | ({"decoder_input_ids": ids.flip(1)} if self.name.startswith("T5") else {})


def _of(name: str, config: str, moved: int, left: int, **options: Any) -> LanguageModel:
    return LanguageModel(name, config, {**SMALL, **options}, moved, left)


LANGUAGE_MODELS: list[LanguageModel] = [
    # Two norms in each layer, and the last, before the head.
    _of("LlamaForCausalLM", "LlamaConfig", 5, 0),
    # The head is the embedding: the last norm stays. So do two in each layer, whose outputs are added to the stream.
    _of("Gemma2ForCausalLM", "Gemma2Config", 4, 5, head_dim=8),
    # Norms of queries and keys come before a rotation.
    _of("Qwen3ForCausalLM", "Qwen3Config", 5, 4, head_dim=8),
    LanguageModel(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
        4,
        1,
    ),
    # Two norms in each layer of the encoder, three in each of the decoder. The last of the encoder is returned, the
    # last of the decoder is scaled.
    LanguageModel(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        10,
        2,
    ),
]
