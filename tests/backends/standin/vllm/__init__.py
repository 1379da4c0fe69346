"""A stand-in for vLLM: names, parameters and fields of vLLM 0.33.0, a lookup instead of a model.

Parameters are those of `vllm.entrypoints.llm.LLM`, `vllm.sampling_params.SamplingParams` and
`vllm.inputs.TokensPrompt`, fields those of `vllm.outputs.RequestOutput` and `CompletionOutput`, as
https://docs.vllm.ai/en/latest/api/ lists them; of keyword arguments that go on to `EngineArgs`,
those that backends/vllm.py names. Whatever else it is given is a TypeError, as there.
"""

import functools
import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NotRequired, TypedDict

from backends.oracle import answer_from_needles
from ruler_bench.model_files import model_folder
from ruler_bench.tokenizer import load_tokenizer
from vllm.exceptions import EngineDeadError, VLLMValidationError

__version__ = "0.33.0"
ENGINE_ARGUMENTS = {
    "max_model_len": 4096,
    "enable_prefix_caching": None,
    "kv_offloading_size": None,
    "kv_offloading_backend": "native",
    "kv_transfer_config": None,
    "kv_cache_dtype": "auto",
    "block_size": None,
    "generation_config": "auto",
    "logprobs_mode": "raw_logprobs",
    "disable_log_stats": True,
    "max_num_seqs": None,
}
"""Of EngineArgs, with their defaults."""
FILLER = 9
STARTED = []
"""Every LLM that was built."""


@functools.cache
def probe_tokenizer():
    return load_tokenizer(str(model_folder("package:probe")))


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


@dataclass(kw_only=True)
class SamplingParams:
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class LLM:
    def __init__(
        self,
        model,
        *,
        tokenizer=None,
        trust_remote_code=False,
        tensor_parallel_size=1,
        dtype="auto",
        quantization=None,
        seed=0,
        gpu_memory_utilization=0.92,
        cpu_offload_gb=0,
        enforce_eager=False,
        kv_cache_memory_bytes=None,
        **kwargs,
    ):
        unknown = set(kwargs) - set(ENGINE_ARGUMENTS)
        if unknown:
            raise TypeError(f"EngineArgs got an unexpected keyword argument {min(unknown)!r}")
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError("1 validation error for CacheConfig\ngpu_memory_utilization")
        self.given = {"model": model, "trust_remote_code": trust_remote_code, **kwargs}
        known = {**ENGINE_ARGUMENTS, **kwargs}
        caching = known["enable_prefix_caching"]
        config = SimpleNamespace(
            model_config=SimpleNamespace(
                max_model_len=known["max_model_len"],
                dtype="torch.bfloat16" if dtype == "auto" else f"torch.{dtype}",
                enforce_eager=enforce_eager,
            ),
            cache_config=SimpleNamespace(
                enable_prefix_caching=True if caching is None else caching,
                kv_offloading_size=known["kv_offloading_size"],
                kv_offloading_backend=known["kv_offloading_backend"],
                gpu_memory_utilization=gpu_memory_utilization,
                cache_dtype=known["kv_cache_dtype"],
                block_size=known["block_size"] or 16,
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=tensor_parallel_size),
        )
        self.has_ended = False
        core = SimpleNamespace(shutdown=self._end)
        self.llm_engine = SimpleNamespace(vllm_config=config, engine_core=core)
        self.calls = []
        self.cached = set()
        self.dies = False
        STARTED.append(self)

    def _end(self, timeout=None):
        self.has_ended = True

    def generate(
        self,
        prompts,
        sampling_params=None,
        *,
        use_tqdm=True,
        lora_request=None,
        priority=None,
        tokenization_kwargs=None,
        mm_processor_kwargs=None,
    ):
        if self.dies:
            raise EngineDeadError
        self.calls.append((prompts, sampling_params))
        return [self._answer(one, how) for one, how in zip(prompts, sampling_params, strict=True)]

    def _answer(self, prompt, how):
        ids = prompt["prompt_token_ids"]
        if max(ids) >= 4096:
            raise VLLMValidationError(f"Token id {max(ids)} is out of vocabulary")
        stream = itertools.chain(self._tokens(ids), itertools.repeat(FILLER))
        found = []
        for one in itertools.islice(stream, how.max_tokens):
            found.append(one)
            if one in how.stop_token_ids:
                break
        logprobs = [
            {one: Logprob(-0.25, 1), FILLER + 1: Logprob(-0.25 - place, 2)}
            for place, one in enumerate(found)
        ]
        times = SimpleNamespace(first_token_latency=0.5, first_token_ts=2.0, last_token_ts=3.5)
        output = SimpleNamespace(
            index=0,
            text="",
            token_ids=found,
            cumulative_logprob=None,
            logprobs=logprobs if how.logprobs else None,
            finish_reason="stop" if found[-1] in how.stop_token_ids else "length",
            stop_reason=None,
        )
        cached = len(ids) // 16 * 16 if tuple(ids) in self.cached else 0
        self.cached.add(tuple(ids))
        return SimpleNamespace(
            request_id="0",
            prompt=None,
            prompt_token_ids=ids,
            outputs=[output],
            finished=True,
            metrics=None if self.given["disable_log_stats"] else times,
            num_cached_tokens=cached,
        )

    def _tokens(self, ids):
        tokenizer = probe_tokenizer()
        answer = answer_from_needles(tokenizer.decode(ids))
        return [*tokenizer.encode_prompt(answer)[1:], 0]
