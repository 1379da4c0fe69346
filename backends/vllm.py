"""VLLMBackend: vLLM in this process, through its Python interface `vllm.LLM`.

Written after the sources of vLLM 0.33.0 and its documentation
(https://docs.vllm.ai/en/latest/api/vllm/entrypoints/llm/), run against vLLM 0.32.0 on CPUs
(docs/servers.md), and tested with a stand-in of the same signatures. `backend=openai` asks vLLM as
a server.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from backends.base import (
    ConfigurationError,
    EngineDied,
    Generation,
    PromptTooLong,
    Request,
    RequestError,
)
from backends.gathering import Gathering

INSTALL = 'pip install "ruler-bench[vllm]"'
LOGPROBS = 2
"""The best two tokens: their difference is the margin. The one that was chosen is the best."""
MAX_CONCURRENCY = 1024
OWN_ARGUMENTS = frozenset(
    {"model", "max_model_len", "dtype", "generation_config", "disable_log_stats", "logprobs_mode"}
)
"""Of `vllm.LLM`: what the harness decides, so that `extra` may not."""


class VLLMBackend:
    """A `vllm.LLM` that is kept for all requests: greedy, from token ids, with margins."""

    def __init__(
        self,
        *,
        model_path: str,
        device: str = "cuda",
        max_model_len: int | None = None,
        dtype: str = "auto",
        enable_prefix_caching: bool | None = None,
        kv_offloading_size: float | None = None,
        kv_offloading_backend: str | None = None,
        kv_transfer_config: dict[str, Any] | None = None,
        cpu_offload_gb: float | None = None,
        gpu_memory_utilization: float | None = None,
        kv_cache_dtype: str | None = None,
        block_size: int | None = None,
        tensor_parallel_size: int | None = None,
        enforce_eager: bool | None = None,
        trust_remote_code: bool = False,
        concurrency: int = 1,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Start vLLM. Settings that are None are left to it; `describe()` tells what it chose.

        Args:
            model_path: folder in Hugging Face format, or hub name.
            device: "cpu" or "cuda", which must be what vLLM was built for.
            max_model_len: tokens of prompt and generation one request may take.
            dtype: "auto" (the model's), "float32", "bfloat16" or "float16".
            enable_prefix_caching: whether blocks of earlier prompts are used again.
            kv_offloading_size: CPU memory for keys and values, in GiB, of all GPUs together.
            kv_offloading_backend: "native" or "lmcache".
            kv_transfer_config: of a KV connector, as in vLLM's KVTransferConfig.
            cpu_offload_gb: weights in CPU memory, in GiB a GPU.
            gpu_memory_utilization: share of the device's memory to take, 0 to 1.
            kv_cache_dtype: of keys and values, such as "fp8".
            block_size: tokens in a block.
            tensor_parallel_size: GPUs to share the model.
            enforce_eager: whether CUDA graphs are left out.
            trust_remote_code: whether code in the model's own folder may run.
            concurrency: requests in one call; `generate` may then be called from so many threads.
            extra: further arguments of `vllm.LLM`.

        Raises:
            ConfigurationError: vLLM is not installed, or does not start with these settings.
        """
        if not 1 <= concurrency <= MAX_CONCURRENCY:
            raise ConfigurationError(
                f"backend.concurrency={concurrency}: must be an integer in 1 to {MAX_CONCURRENCY}."
            )
        self._vllm = _import_vllm()
        self._device = _check_device(device)
        self.concurrency = concurrency
        self._gathering = Gathering(concurrency, self._answer, lambda one, first: True)
        asked = {
            "enable_prefix_caching": enable_prefix_caching,
            "kv_offloading_size": kv_offloading_size,
            "kv_offloading_backend": kv_offloading_backend,
            "kv_transfer_config": kv_transfer_config,
            "cpu_offload_gb": cpu_offload_gb,
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_cache_dtype": kv_cache_dtype,
            "block_size": block_size,
            "tensor_parallel_size": tensor_parallel_size,
            "enforce_eager": enforce_eager,
        }
        self._asked: dict[str, Any] = {
            **asked,
            "model_path": model_path,
            "max_model_len": max_model_len,
            "dtype": dtype,
            "trust_remote_code": trust_remote_code,
            "extra": _extra(extra, asked),
        }
        self._llm: Any = self._start(
            {
                **{key: one for key, one in asked.items() if one is not None},
                **self._asked["extra"],
                "model": model_path,
                "max_model_len": max_model_len,
                "dtype": dtype,
                "trust_remote_code": trust_remote_code,
                # Nothing of the model's own sampling settings may change a token.
                "generation_config": "vllm",
                "logprobs_mode": "raw_logprobs",
                "disable_log_stats": False,  # the times of requests come with them
            }
        )
        self._described = self._in_force()

    def _start(self, arguments: dict[str, Any]) -> Any:
        try:
            return self._vllm.LLM(**arguments)
        except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
            raise ConfigurationError(
                f"vLLM {_version(self._vllm)} does not start with model {arguments['model']}: "
                f"{_first_line(error)}; what it printed may say more."
            ) from error

    # --- requests -------------------------------------------------------------------------------

    def generate(self, request: Request) -> Generation:
        """Continue the prompt greedily.

        Raises:
            PromptTooLong: prompt and generation exceed max_model_len.
            EngineDied: vLLM's engine has ended.
            RequestError: vLLM refused the request, or it makes no sense.
        """
        self._check(request)
        if self.concurrency > 1:
            return self._gathering.ask(request)
        (found,) = self._answer([request])
        if isinstance(found, Exception):
            raise found
        return found

    def _check(self, request: Request) -> None:
        if self._llm is None:
            raise RequestError("the engine is closed")
        prompt = request.prompt_token_ids
        if not prompt or min(prompt) < 0:
            raise RequestError("the prompt holds no tokens, or negative ones")
        if request.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens={request.max_new_tokens} is below 1")
        context = self._described["max_model_len"]
        total_tokens = len(prompt) + request.max_new_tokens
        # vLLM would answer, and stop early.
        if context is not None and total_tokens > context:
            raise PromptTooLong(
                f"{len(prompt)} prompt tokens and {request.max_new_tokens} to generate are "
                f"{total_tokens}, more than max_model_len={context}"
            )

    def _answer(self, requests: Sequence[Request]) -> list[Generation | Exception]:
        """Answer requests in one call."""
        prompts = [
            self._vllm.TokensPrompt(prompt_token_ids=list(one.prompt_token_ids)) for one in requests
        ]
        parameters = [
            self._vllm.SamplingParams(
                temperature=0.0,
                max_tokens=one.max_new_tokens,
                # The request's own stop tokens and no others; one that is produced is kept.
                stop_token_ids=list(one.stop_token_ids),
                ignore_eos=True,
                logprobs=LOGPROBS,
                detokenize=False,
            )
            for one in requests
        ]
        try:
            found = self._llm.generate(prompts, parameters, use_tqdm=False)
        except Exception as error:
            # By name, since these classes have moved between vLLM's versions.
            names = {one.__name__ for one in type(error).__mro__}
            if "EngineDeadError" in names:
                raise EngineDied(f"vLLM's engine has ended: {_first_line(error)}") from error
            if names & {"VLLMError", "ValueError"}:
                raise RequestError(f"vLLM refused the request: {_first_line(error)}") from error
            raise
        return [_generation(one) for one in found]

    # --- settings and the end -------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return the settings in force, as vLLM resolved them."""
        return dict(self._described)

    def _in_force(self) -> dict[str, Any]:
        config = _at(self._llm, "llm_engine.vllm_config")
        # Where vLLM keeps what it made of each setting. `_at` is None where a version has it not.
        resolved = {
            "max_model_len": _at(config, "model_config.max_model_len"),
            "dtype": _name(_at(config, "model_config.dtype")),
            "enable_prefix_caching": _at(config, "cache_config.enable_prefix_caching"),
            "kv_offloading_size": _at(config, "cache_config.kv_offloading_size"),
            "kv_offloading_backend": _at(config, "cache_config.kv_offloading_backend"),
            "gpu_memory_utilization": _at(config, "cache_config.gpu_memory_utilization"),
            "kv_cache_dtype": _name(_at(config, "cache_config.cache_dtype")),
            "block_size": _at(config, "cache_config.block_size"),
            "tensor_parallel_size": _at(config, "parallel_config.tensor_parallel_size"),
            "enforce_eager": _at(config, "model_config.enforce_eager"),
        }
        return {
            **self._asked,
            **{key: one for key, one in resolved.items() if one is not None},
            "device": self._device,
            "concurrency": self.concurrency,
            "vllm_version": _version(self._vllm),
        }

    def close(self) -> None:
        """End vLLM's engine process and free the device. A second call does nothing."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        # `LLM` has no method for it; its engine core's client ends the process it started.
        shutdown: Callable[[], None] | None = _at(llm, "llm_engine.engine_core.shutdown")
        if shutdown is not None:
            shutdown()
        del llm
        gc.collect()


def _import_vllm() -> Any:
    try:
        import vllm  # noqa: PLC0415 (an optional extra, of several gigabytes)
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise _cannot_import(error) from error
        raise ConfigurationError(f"backend=vllm: vLLM is not installed; {INSTALL}") from error
    except (ImportError, OSError, RuntimeError) as error:
        raise _cannot_import(error) from error
    return vllm


def _cannot_import(error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"backend=vllm: vLLM is installed and cannot be imported ({_first_line(error)}); it needs "
        f"the versions of torch and CUDA that it was built for: {INSTALL} in a new environment."
    )


def _check_device(device: str) -> str:
    """Refuse a device that vLLM would not take: it has one of its own, found when it is imported.

    Raises:
        ConfigurationError: says how to choose another.
    """
    kind, _, index = device.partition(":")
    if index and index != "0":
        raise ConfigurationError(
            f"device={device}: vLLM takes the first GPU that it sees; use device={kind} and "
            f"CUDA_VISIBLE_DEVICES={index}."
        )
    from vllm.platforms import current_platform  # noqa: PLC0415

    own = getattr(current_platform, "device_type", None)
    if own and own != kind:
        raise ConfigurationError(
            f"device={device}: this vLLM runs on {own}; use device={own}, or another build of it."
        )
    return kind


def _extra(extra: dict[str, Any] | None, asked: Mapping[str, Any]) -> dict[str, Any]:
    taken = sorted({*asked, *OWN_ARGUMENTS, "trust_remote_code"} & set(extra or {}))
    if taken:
        key = taken[0]
        what = "the harness decides it" if key in OWN_ARGUMENTS else f"use backend.{key}"
        raise ConfigurationError(f"backend.extra.{key}: {what}; leave it out there.")
    return dict(extra or {})


def _generation(found: Any) -> Generation | Exception:
    """Return what vLLM answered; `found` is its RequestOutput, whose first output is the answer."""
    output = found.outputs[0]
    if output.finish_reason not in ("stop", "length"):
        return RequestError(f"vLLM ended the request with finish_reason={output.finish_reason}")
    metrics = found.metrics
    ttft_seconds, decode_seconds = None, None
    if metrics is not None:
        ttft_seconds = getattr(metrics, "first_token_latency", None) or None
        first, last = (getattr(metrics, f"{one}_token_ts", 0.0) for one in ("first", "last"))
        decode_seconds = last - first if first and last else None
    return Generation(
        token_ids=tuple(output.token_ids),
        finish_reason=output.finish_reason,
        top2_margin=_margins(output.logprobs),
        prompt_tokens=len(found.prompt_token_ids),
        ttft_seconds=ttft_seconds,
        decode_seconds=decode_seconds,
        reused_tokens=found.num_cached_tokens,
    )


def _margins(logprobs: Sequence[Mapping[int, Any]] | None) -> tuple[float, ...] | None:
    """Return best minus second best of each token; log-probabilities differ as logits do."""
    if logprobs is None:
        return None
    found = []
    for one in logprobs:
        best, second = sorted((entry.logprob for entry in one.values()), reverse=True)[:2]
        found.append(best - second)
    return tuple(found)


def _at(holder: Any, path: str) -> Any:
    """Return what lies at a path of attributes, or None: they are no public interface."""
    with contextlib.suppress(AttributeError):
        for name in path.split("."):
            holder = getattr(holder, name)
        return holder
    return None


def _name(value: Any) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


def _version(vllm: ModuleType) -> str:
    return str(getattr(vllm, "__version__", "of an unknown version"))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
