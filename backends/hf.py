"""TransformersBackend: greedy `generate` of Hugging Face transformers, one request at a time."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.generation.configuration_utils import (
    DYNAMIC_CACHE_IMPLEMENTATIONS,
    STATIC_CACHE_IMPLEMENTATIONS,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from backends.base import (
    ConfigurationError,
    Generation,
    NonFiniteLogits,
    OutOfMemory,
    PromptTooLong,
    Request,
    RequestError,
)
from backends.digest import LogitsTrace, trace_logits

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_IMPLEMENTATIONS = (*DYNAMIC_CACHE_IMPLEMENTATIONS, *STATIC_CACHE_IMPLEMENTATIONS)
DEFAULT_CACHE = "dynamic"
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
WARM_UP_TOKENS = 8

_LOADING_ERRORS = (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError)


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
        attn_implementation: str | None = None,
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
            attn_implementation: as in `from_pretrained`; None is transformers' choice.

        Raises:
            ConfigurationError: a value is unknown, the device is missing, or the model cannot be
                loaded or run with these settings.
        """
        self._cache = cache_implementation or DEFAULT_CACHE
        _check_name("cache_implementation", self._cache, CACHE_IMPLEMENTATIONS)
        self._device = _device(device)
        if threads is not None:
            torch.set_num_threads(threads)
        self._model_path = model_path
        self._model: Any = _load(
            model_path, self._device, _dtype(dtype, self._device), attn_implementation
        )
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
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        trace = _Trace()
        start = time.perf_counter()
        token_ids = self._continue(request, trace)
        stopped = token_ids[-1] in request.stop_token_ids
        return Generation(
            token_ids=token_ids,
            finish_reason="stop" if stopped else "length",
            logits_digest=tuple(row.digest for row in trace.rows),
            top2_margin=tuple(row.top2_margin for row in trace.rows),
            prompt_tokens=len(request.prompt_token_ids),
            ttft_seconds=trace.seconds[0] - start,
            decode_seconds=trace.seconds[-1] - trace.seconds[0],
            peak_device_bytes=self._peak_device_bytes(),
            kernel=self._model.config._attn_implementation,
        )

    def describe(self) -> dict[str, Any]:
        """Return the settings in force."""
        return {
            "model_path": self._model_path,
            "device": str(self._device),
            "threads": torch.get_num_threads(),
            "max_model_len": self._max_model_len,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "cache_implementation": self._cache,
            "attn_implementation": self._model.config._attn_implementation,
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

    def _continue(self, request: Request, trace: _Trace) -> tuple[int, ...]:
        """Return the generated ids, the stop token included."""
        prompt = torch.tensor([request.prompt_token_ids], device=self._device)  # (1, prompt)
        message = ""
        try:
            ids = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=self._generation_config(request),
                logits_processor=LogitsProcessorList([trace]),
            )  # (1, prompt + generated)
            return tuple(ids[0, prompt.shape[1] :].tolist())
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            message = _first_line(error)
        # Outside of the handler, where no traceback keeps the tensors of the request alive.
        self._free_device_memory()
        raise OutOfMemory(message)

    def _generation_config(self, request: Request) -> GenerationConfig:
        """Return a configuration of our own: nothing of the model's file may change a token."""
        static = self._cache in STATIC_CACHE_IMPLEMENTATIONS
        return GenerationConfig(
            do_sample=False,
            num_beams=1,
            use_cache=True,
            max_new_tokens=request.max_new_tokens,
            eos_token_id=list(request.stop_token_ids) or None,
            # Never used with one request at a time; unset, transformers warns.
            pad_token_id=request.stop_token_ids[0] if request.stop_token_ids else 0,
            cache_implementation=self._cache,
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
                f"{self._device}: {_first_line(error)}"
            ) from error

    def _peak_device_bytes(self) -> int | None:
        if self._device.type != "cuda":
            return None
        return int(torch.cuda.max_memory_allocated(self._device))

    def _free_device_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class _Trace(LogitsProcessor):  # type: ignore[misc]
    """Notes each token's logits and the time they were there; changes nothing."""

    def __init__(self) -> None:
        self.rows: list[LogitsTrace] = []
        self.seconds: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note `scores`, (1, vocab), the raw logits: no other processor runs before this one."""
        row = trace_logits(scores[0])
        if not row.finite:
            raise NonFiniteLogits(
                f"the logits of generated token {len(self.rows)} hold NaN or infinity"
            )
        self.rows.append(row)
        self.seconds.append(time.perf_counter())
        return scores


def _load(
    model_path: str, device: torch.device, dtype: torch.dtype, attn_implementation: str | None
) -> Any:
    """Return the model in evaluation mode on the device.

    Raises:
        ConfigurationError: see `TransformersBackend`.
    """
    options: dict[str, Any] = {"dtype": dtype}
    if attn_implementation is not None:
        if "/" not in attn_implementation:  # with a slash it is a kernel from the hub
            # Names with a bar are for transformers' paged batching, not for `generate`.
            names = (name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in name)
            allowed = {"eager", *names}
            _check_name("attn_implementation", attn_implementation, allowed)
        options["attn_implementation"] = attn_implementation
    _check_folder(model_path)
    try:
        with _quiet_transformers():
            config = AutoConfig.from_pretrained(model_path)
            if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
                raise ConfigurationError(
                    f"model {model_path}: transformers has no causal language model for "
                    f"model_type={config.model_type!r}."
                )
            model, loading = AutoModelForCausalLM.from_pretrained(
                model_path, config=config, output_loading_info=True, **options
            )
            _check_complete(model_path, loading["missing_keys"])
            model.generation_config = GenerationConfig()
            return model.eval().to(device)
    except ConfigurationError:
        raise
    except _LOADING_ERRORS as error:
        raise ConfigurationError(
            f"model {model_path}: transformers cannot load it: {_first_line(error)}"
        ) from error


def _check_folder(model_path: str) -> None:
    folder = Path(model_path)
    if not folder.is_dir():
        return  # a hub name; transformers says what is wrong with it
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"model folder {folder} holds no config.json.")
    if not any(path for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern)):
        raise ConfigurationError(
            f"model folder {folder} holds no weights ({' or '.join(WEIGHT_PATTERNS)})."
        )


def _check_complete(model_path: str, missing: Iterable[str]) -> None:
    """Refuse weights that lack tensors: transformers would fill them with random numbers."""
    names = sorted(missing)
    if names:
        raise ConfigurationError(
            f"model {model_path}: its weights lack {len(names)} tensors, {names[0]} for one; "
            "download them again, or check config.json."
        )


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
    _check_name("dtype", name, ("auto", *DTYPES))
    return DTYPES[name]


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


def _check_name(key: str, name: str, allowed: Iterable[str]) -> None:
    names = sorted(allowed)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigurationError(
            f"backend.{key}={name}: unknown.{hint} Allowed: {', '.join(names)}."
        )


def _is_out_of_memory(error: Exception) -> bool:
    # On a CPU torch raises a plain RuntimeError.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        "can't allocate memory" in str(error)
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep loading bars and remarks off the terminal: what matters is checked and raised."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
