"""TransformersBackend: greedy `generate` of Hugging Face transformers, alone or in batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.configuration_utils import (
    DYNAMIC_CACHE_IMPLEMENTATIONS,
    STATIC_CACHE_IMPLEMENTATIONS,
)

from backends.base import (
    ConfigurationError,
    Generation,
    NonFiniteLogits,
    OutOfMemory,
    PromptTooLong,
    Request,
    RequestError,
)
from backends.gathering import Gathering
from backends.hf_load import check_name, first_line, load
from backends.hf_rows import PADDING_ID, Trace, ended, padded

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_IMPLEMENTATIONS = (*DYNAMIC_CACHE_IMPLEMENTATIONS, *STATIC_CACHE_IMPLEMENTATIONS)
DEFAULT_CACHE = "dynamic"
WARM_UP_TOKENS = 8
MAX_BATCH_SIZE = 1024
QUANTIZED = "quantized"


class TransformersBackend:
    """The model's own code in transformers, with the cache of its `generate`."""

    def __init__(
        self,
        *,
        model_path: str,
        device: str = "cpu",
        threads: int | None = None,
        max_model_len: int | None = None,
        dtype: str = "auto",
        cache_implementation: str | None = None,
        cache_config: dict[str, Any] | None = None,
        attn_implementation: str | None = None,
        batch_size: int = 1,
        trust_remote_code: bool = False,
    ) -> None:
        """Load the model and answer one throw-away request.

        Args:
            model_path: folder in Hugging Face format, or hub name.
            device: "cpu", "cuda" or "cuda:N".
            threads: CPU threads, for the whole process; None leaves them as they are.
            max_model_len: tokens of prompt and generation one request may take; None: as many as
                the model has positions.
            dtype: "float32", "bfloat16" or "float16"; "auto" is float32 on a CPU and bfloat16 on
                CUDA.
            cache_implementation: as in transformers' GenerationConfig; None is "dynamic". Static
                caches hold max_model_len tokens and are never compiled, so that an answer does
                not depend on the requests before it.
            cache_config: of the quantized cache, as in GenerationConfig: backend, nbits...
            attn_implementation: as in `from_pretrained`; None is transformers' choice.
            batch_size: requests in one call of `generate`, padded on the left; `generate` of the
                backend may then be called from so many threads.
            trust_remote_code: whether code in the model's own folder may run.

        Raises:
            ConfigurationError: a value is unknown, the device is missing, or the model cannot be
                loaded or run with these settings.
        """
        self._cache = cache_implementation or DEFAULT_CACHE
        check_name("cache_implementation", self._cache, CACHE_IMPLEMENTATIONS)
        self._cache_config = _cache_config(cache_config, self._cache)
        self._device = _device(device)
        self._threads = threads
        self._set_threads()
        self._model_path = model_path
        self._trust_remote_code = trust_remote_code
        self.concurrency = _batch_size(batch_size)
        self._gathering = Gathering(batch_size, self._answer, _may_share)
        options = {"dtype": _dtype(dtype, self._device), "trust_remote_code": trust_remote_code}
        self._model: Any = load(model_path, self._device, attn_implementation, options)
        self._max_model_len = _max_model_len(max_model_len, self._model.config)
        self._warm_up()

    def generate(self, request: Request) -> Generation:
        """Continue the prompt greedily.

        Raises:
            PromptTooLong: prompt and generation exceed max_model_len.
            OutOfMemory: the device ran out of memory; the request's memory is freed.
            NonFiniteLogits: a token's logits hold NaN or infinity.
            RequestError: the prompt is empty or holds an id outside the model's vocabulary, nothing
                is to be generated, or the engine is closed.
        """
        self._check(request)
        if self.concurrency > 1:
            return self._gathering.ask(request)
        (found,) = self._answer([request])
        if isinstance(found, Exception):
            raise found
        return found

    def _answer(self, requests: Sequence[Request]) -> list[Generation | Exception]:
        """Answer requests that `_check` let pass, in one call of transformers' `generate`."""
        self._set_threads()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        trace = Trace(len(requests))
        start = time.perf_counter()
        rows = self._continue(requests, trace)
        found: list[Generation | Exception] = []
        for number, (request, ids) in enumerate(zip(requests, rows, strict=True)):
            try:
                logits = trace.logits(number, len(ids))
            except NonFiniteLogits as error:
                found.append(error)
                continue
            stopped = ids[-1] in request.stop_token_ids
            found.append(
                Generation(
                    token_ids=ids,
                    finish_reason="stop" if stopped else "length",
                    logits_digest=tuple(one.digest for one in logits),
                    top2_margin=tuple(one.top2_margin for one in logits),
                    prompt_tokens=len(request.prompt_token_ids),
                    ttft_seconds=trace.seconds[0] - start,
                    decode_seconds=trace.seconds[len(ids) - 1] - trace.seconds[0],
                    peak_device_bytes=self._peak_device_bytes(),
                    kernel=self._model.config._attn_implementation,
                )
            )
        return found

    def describe(self) -> dict[str, Any]:
        """Return the settings in force."""
        return {
            "model_path": self._model_path,
            "device": str(self._device),
            "threads": torch.get_num_threads(),
            "max_model_len": self._max_model_len,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "cache_implementation": self._cache,
            "cache_config": self._cache_config,
            "attn_implementation": self._model.config._attn_implementation,
            "batch_size": self.concurrency,
            "trust_remote_code": self._trust_remote_code,
        }

    def close(self) -> None:
        """Free the model. A second call does nothing."""
        self._model = None
        self._free_device_memory()

    def _check(self, request: Request) -> None:
        if self._model is None:
            raise RequestError("the engine is closed")
        if request.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens={request.max_new_tokens} is below 1")
        prompt = request.prompt_token_ids
        total_tokens = len(prompt) + request.max_new_tokens
        if total_tokens > self._max_model_len:
            raise PromptTooLong(
                f"{len(prompt)} prompt tokens and {request.max_new_tokens} to generate are "
                f"{total_tokens}, more than max_model_len={self._max_model_len}"
            )
        if not prompt:
            # transformers would make up a prompt of its own here.
            raise RequestError("the prompt holds no tokens")
        vocabulary_tokens = self._model.get_input_embeddings().num_embeddings
        if not 0 <= min(prompt) <= max(prompt) < vocabulary_tokens:
            raise RequestError(
                f"the prompt holds token ids from {min(prompt)} to {max(prompt)} and the model has "
                f"{vocabulary_tokens} tokens: the tokenizer is not the model's"
            )

    def _continue(self, requests: Sequence[Request], trace: Trace) -> list[tuple[int, ...]]:
        """Return the generated ids of each request, the stop token included."""
        prompts, mask = padded([one.prompt_token_ids for one in requests], self._device)
        message = ""
        try:
            ids = self._model.generate(
                prompts,  # (requests, longest prompt)
                attention_mask=mask,
                generation_config=self._generation_config(requests),
                logits_processor=LogitsProcessorList([trace]),
            )  # (requests, longest prompt + generated)
            rows = ids[:, prompts.shape[1] :].tolist()
            return [
                ended(row, one.stop_token_ids, one.max_new_tokens)
                for row, one in zip(rows, requests, strict=True)
            ]
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            message = first_line(error)
        # Outside of the handler, where no traceback keeps the tensors of the request alive.
        self._free_device_memory()
        raise OutOfMemory(message)

    def _generation_config(self, requests: Sequence[Request]) -> GenerationConfig:
        """Return a configuration of our own: nothing of the model's file may change a token."""
        static = self._cache in STATIC_CACHE_IMPLEMENTATIONS
        return GenerationConfig(
            do_sample=False,
            num_beams=1,
            use_cache=True,
            max_new_tokens=max(one.max_new_tokens for one in requests),
            eos_token_id=list(requests[0].stop_token_ids) or None,
            # What follows a row's end while others go on; unset, transformers warns.
            pad_token_id=PADDING_ID,
            cache_implementation=self._cache,
            cache_config=self._cache_config,
            # One size for all requests: otherwise the cache grows with the longest one so far.
            max_cache_len=self._max_model_len if static else None,
            disable_compile=True,
        )

    def _warm_up(self) -> None:
        """Answer a throw-away request: settings that cannot work show here, not in each sample."""
        tokens = min(WARM_UP_TOKENS, self._max_model_len - 1)
        if tokens < 1:
            raise ConfigurationError(
                f"backend.max_model_len={self._max_model_len}: must be at least 2 tokens."
            )
        request = Request(-1, "", (0,) * tokens, max_new_tokens=1)
        try:
            self.generate(request)
        except NonFiniteLogits:
            return  # token 0 means nothing to the model; real prompts are judged one by one
        except (OutOfMemory, ImportError, ValueError, RuntimeError, AssertionError) as error:
            raise ConfigurationError(
                f"the model {self._model_path} does not run with "
                f"cache_implementation={self._cache}, "
                f"attn_implementation={self._model.config._attn_implementation} on "
                f"{self._device}: {first_line(error)}"
            ) from error

    def _set_threads(self) -> None:
        """Set the CPU threads: OpenMP keeps the number by the thread that asks."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)

    def _peak_device_bytes(self) -> int | None:
        if self._device.type != "cuda":
            return None
        return int(torch.cuda.max_memory_allocated(self._device))

    def _free_device_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"device={name}: must be cpu, cuda or cuda:N.") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"device={name}: must be cpu, cuda or cuda:N.")
    gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ConfigurationError(
            f"device={name}: torch {torch.__version__} sees {gpus} CUDA GPUs; use device=cpu, or "
            "a CUDA build of torch on a machine with a GPU."
        )
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    check_name("dtype", name, ("auto", *DTYPES))
    return DTYPES[name]


def _cache_config(config: dict[str, Any] | None, cache: str) -> dict[str, Any] | None:
    if config and cache != QUANTIZED:
        raise ConfigurationError(
            f"backend.cache_config: is of cache_implementation={QUANTIZED}, and this is {cache}; "
            "leave it out."
        )
    return config or None


def _batch_size(size: int) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_BATCH_SIZE:
        raise ConfigurationError(
            f"backend.batch_size={size}: must be an integer in 1 to {MAX_BATCH_SIZE}."
        )
    return size


def _may_share(request: Request, first: Request) -> bool:
    """Tell whether two requests may be rows of one call: it has one list of stop tokens."""
    return request.stop_token_ids == first.stop_token_ids


def _max_model_len(asked: int | None, config: Any) -> int:
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if asked is None:
        if positions is None:
            raise ConfigurationError(
                "backend.max_model_len is missing, and the model's config.json has no "
                "max_position_embeddings to take it from."
            )
        return positions
    if positions is not None and asked > positions:
        raise ConfigurationError(
            f"backend.max_model_len={asked} is beyond the model's "
            f"max_position_embeddings={positions}; use a shorter length or another model."
        )
    return asked


def _is_out_of_memory(error: Exception) -> bool:
    # On a CPU torch raises a plain RuntimeError.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        "can't allocate memory" in str(error)
    )
