"""Servers of transformers that keep one cache for all requests, written as users write them.

Nothing here is broken on purpose: what a request leaves behind is what transformers' own caches
keep. With `renew=true` each does what transformers' documentation says, and nothing stays.

- One StaticCache, allocated once to spare allocation and compilation, and the loop of a prefill
  and of single tokens that transformers' documentation shows for it. The cache counts its tokens
  itself, so that without `reset()` a prompt is appended to those before it.
  https://huggingface.co/docs/transformers/v4.46.0/kv_cache
  https://github.com/huggingface/transformers/pull/48809 (on what `reset` is for)
- One DynamicCache with the beginning that all prompts share, computed once and given to each
  `generate`, which appends the rest of the prompt and the answer to it. The documentation copies
  it for each prompt.
  https://github.com/huggingface/transformers/pull/32929 (documentation, with the copy)
  https://github.com/huggingface/transformers/issues/32681 (the same loop in a comment)
  https://github.com/MemTensor/MemOS/issues/2301 (a stored cache that grows every turn)
  https://github.com/open-edge-platform/physical-ai-studio/pull/239 (a prefix, 51 tokens a step)
"""

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
)

from backends.base import Generation
from backends.digest import trace_logits


class _Server:
    """What both have in common: the model, and what is recorded of an answer."""

    def __init__(self, *, model_path, device, threads, renew):
        torch.set_num_threads(threads)
        self.device, self.threads, self.renew = device, threads, renew
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self.model = self.model.eval().to(device)

    def generate(self, request):
        prompt = torch.tensor([request.prompt_token_ids], device=self.device)
        trace = _Trace()
        ids = self.answer(prompt, request.max_new_tokens, request.stop_token_ids, trace)
        return Generation(
            token_ids=tuple(ids),
            finish_reason="stop" if ids[-1] in request.stop_token_ids else "length",
            logits_digest=tuple(row.digest for row in trace.rows),
            top2_margin=tuple(row.top2_margin for row in trace.rows),
        )

    def describe(self):
        return {
            "device": self.device,
            "threads": self.threads,
            "dtype": "float32",
            "renew": self.renew,
        }

    def close(self):
        self.model = None


class OneStaticCache(_Server):
    """Prefills and decodes with a StaticCache that is made once."""

    def __init__(
        self,
        *,
        model_path: str,
        device: str = "cpu",
        threads: int = 1,
        cache_tokens: int = 8192,
        renew: bool = False,
    ) -> None:
        super().__init__(model_path=model_path, device=device, threads=threads, renew=renew)
        self.cache_tokens = cache_tokens
        self.cache = StaticCache(config=self.model.config, max_cache_len=cache_tokens)

    @torch.no_grad()
    def answer(self, prompt, max_new_tokens, stop_token_ids, trace):
        if self.renew:
            self.cache.reset()
        ids, tokens = [], prompt
        while len(ids) < max_new_tokens and (not ids or ids[-1] not in stop_token_ids):
            logits = self.model(tokens, past_key_values=self.cache).logits[:, -1]
            trace(tokens, logits)
            tokens = logits.argmax(-1, keepdim=True)
            ids.append(int(tokens))
        return ids

    def describe(self):
        return super().describe() | {"cache_tokens": self.cache_tokens}


class OnePrefixCache(_Server):
    """Computes the first tokens of the first prompt once, for all: a common instruction."""

    def __init__(
        self,
        *,
        model_path: str,
        device: str = "cpu",
        threads: int = 1,
        prefix_tokens: int = 16,
        renew: bool = False,
    ) -> None:
        super().__init__(model_path=model_path, device=device, threads=threads, renew=renew)
        self.prefix_tokens = prefix_tokens
        self.prefix = None

    def answer(self, prompt, max_new_tokens, stop_token_ids, trace):
        if self.prefix is None:
            beginning = prompt[:, : self.prefix_tokens]
            with torch.no_grad():
                self.prefix = DynamicCache(config=self.model.config)
                self.model(beginning, past_key_values=self.prefix)
        rest = prompt[:, self.prefix_tokens :]
        ids = self.model.generate(
            rest,
            attention_mask=torch.ones_like(prompt),
            past_key_values=copy.deepcopy(self.prefix) if self.renew else self.prefix,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(stop_token_ids),
            pad_token_id=stop_token_ids[0],
            logits_processor=LogitsProcessorList([trace]),
        )
        return ids[0, rest.shape[1] :].tolist()

    def describe(self):
        return super().describe() | {"prefix_tokens": self.prefix_tokens}


class _Trace(LogitsProcessor):
    """Notes the logits of each token."""

    def __init__(self):
        self.rows = []

    def __call__(self, input_ids, scores):
        self.rows.append(trace_logits(scores[0]))
        return scores
