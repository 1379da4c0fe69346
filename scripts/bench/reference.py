"""transformers on the same weights and prompts: its Llama on the GPU alone, and offloaded."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LogitsProcessor,
    LogitsProcessorList,
)

from scripts.bench.ceilings import Bench
from scripts.bench.shapes import RandomWeights
from scripts.bench.timing import synchronise

OFFLOADED_CACHE = {"cuda": "offloaded", "cpu": "dynamic"}
"""By kind of device; on a CPU there is nothing to offload to."""

Run = tuple[list[int], list[float]]
"""The tokens, and the seconds that each took; the first is the prefill's."""


def build_model(bench: Bench, weights: RandomWeights, max_positions: int) -> Any:
    """Return transformers' Llama with these weights on the device, attending by SDPA."""
    config = LlamaConfig(**bench.shape.config(max_positions))
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=bench.dtype, attn_implementation="sdpa"
        )
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(weights[name])
    return model.eval()


@torch.inference_mode()
def forward(model: Any, prompt: Sequence[int], new_tokens: int, device: torch.device) -> Run:
    """Continue a prompt with a DynamicCache on the device, by the model's own forward pass.

    Only the last row's logits are asked for. So there is nothing of `generate` around it.
    """
    ids = torch.tensor([prompt], device=device)  # [1, tokens]
    cache = DynamicCache(config=model.config)
    token_ids: list[int] = []
    seconds: list[float] = []
    synchronise(device)
    with warnings.catch_warnings():
        # The name that every version from 5.17 takes; later ones call it deprecated.
        warnings.filterwarnings("ignore", message=".*past_key_values", category=FutureWarning)
        while len(token_ids) < new_tokens:
            started = time.perf_counter()
            logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            token_ids.append(int(ids))
            seconds.append(time.perf_counter() - started)
    return token_ids, seconds


@torch.inference_mode()
def generate_offloaded(
    model: Any, prompt: Sequence[int], new_tokens: int, device: torch.device
) -> Run:
    """Continue a prompt by `generate(cache_implementation="offloaded")`, as a user would."""
    ids = torch.tensor([prompt], device=device)  # [1, tokens]
    clock = _Clock(device)
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
        cache_implementation=OFFLOADED_CACHE[device.type],
        disable_compile=True,
    )
    synchronise(device)
    clock.start()
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=settings,
        logits_processor=LogitsProcessorList([clock]),
    )
    return answer[0, len(prompt) :].tolist(), clock.seconds


class _Clock(LogitsProcessor):  # type: ignore[misc]
    """Notes when the logits of each token are there; changes nothing."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: list[float] = []
        self._device = device
        self._last = 0.0

    def start(self) -> None:
        """Count the first token's time from now."""
        self._last = time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note the time; `scores` [1, vocabulary] come back as they are."""
        synchronise(self._device)
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now
        return scores
