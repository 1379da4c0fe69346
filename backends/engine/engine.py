"""The request loop: admit, prefill, decode, release. Greedy, one request at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import torch

from backends.base import (
    ConfigurationError,
    FinishReason,
    Generation,
    NonFiniteLogits,
    OutOfMemory,
    PromptTooLong,
    Request,
    RequestError,
)
from backends.digest import trace_logits
from backends.engine import attention
from backends.engine.cache.base import KVCache, KVLayout, KVSpan, Sequence, Step
from backends.engine.cache.offload import OffloadCache
from backends.engine.cache.resident import ResidentCache
from backends.engine.model import Decoder
from backends.engine.policy import POLICIES
from backends.engine.settings import Settings, resolve_device, resolve_dtype
from backends.engine.shape import find_model, read_shape
from backends.engine.streams import make_streams


class Engine:
    """Answers requests greedily, with keys and values on the device or in CPU memory.

    For equal chunk_tokens, attend_tokens, kernel, dtype and threads one prompt gives the same
    logits to the last bit, wherever its keys and values lie and whatever was served before: the
    shapes of all products and attention calls follow from these settings and the positions
    alone, and nothing is chosen, compiled or allocated for the cache while serving.

    Args:
        settings: from `backends.engine.gpu_only` or `backends.engine.offload`.

    Raises:
        ConfigurationError: a setting cannot be honoured.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._device = resolve_device(settings.device)
        self._dtype = resolve_dtype(settings.dtype, self._device)
        folder = find_model(settings.model_path)
        shape = read_shape(folder)
        self._context_tokens = _context_tokens(settings, shape.max_positions)
        self._policy = POLICIES[settings.policy]()
        torch.set_num_threads(settings.threads)
        try:
            self._kernel = attention.choose_kernel(
                settings.attention,
                self._device,
                self._dtype,
                (shape.heads, shape.kv_heads, shape.head_dim),
            )
            self._decoder = Decoder(shape, folder, self._device, self._dtype)
            self._make_caches()
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            raise ConfigurationError(
                f"weights and KV cache for backend.max_model_len={self._context_tokens} tokens do "
                f"not fit the memory of {self._device}: {_first_line(error)}"
            ) from error
        self._open = True

    def _make_caches(self) -> None:
        """Allocate every buffer for keys and values that there will ever be."""
        settings, shape, context = self._settings, self._decoder.shape, self._context_tokens
        layout = KVLayout(shape.layers, shape.kv_heads, shape.head_dim, self._dtype, self._device)
        self._streams = make_streams(self._device)
        self._offload: OffloadCache | None = None
        self._resident: ResidentCache | None = None
        self._resident_tokens = context
        if settings.offload is not None and settings.offload.mode != "never":
            self._offload = OffloadCache(
                layout,
                self._streams,
                context_tokens=context,
                block_tokens=settings.offload.kvcache_block_size,
                slots=settings.offload.num_gpu_blocks,
                chunk_tokens=settings.chunk_tokens or context,
                attend_tokens=settings.attend_tokens or context,
                poisoned=settings.poison,
            )
            longest = settings.offload.longest_resident_tokens
            self._resident_tokens = min(longest, context) if settings.offload.mode == "auto" else 0
        if self._resident_tokens:
            self._resident = ResidentCache(layout, self._resident_tokens, poisoned=settings.poison)

    def _caches(self) -> list[KVCache]:
        return [cache for cache in (self._resident, self._offload) if cache is not None]

    def _cache_for(self, tokens: int) -> KVCache:
        """Return where a request of `tokens` tokens in all is kept."""
        if self._resident is not None and tokens <= self._resident_tokens:
            return self._resident
        if self._offload is None:
            raise AssertionError("a request longer than the context was admitted")
        return self._offload

    def generate(self, request: Request) -> Generation:
        """Continue the prompt greedily.

        Raises:
            PromptTooLong: prompt and generation are longer than max_model_len; nothing was run.
            OutOfMemory: the device ran out of memory; the request is released.
            NonFiniteLogits: NaN or infinity came up; the request is released.
            RequestError: the request makes no sense, such as an empty prompt.
        """
        self._check(request)
        torch.set_num_threads(self._settings.threads)
        try:
            with torch.inference_mode():
                return self._serve(request)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            reason = _first_line(error)
        # Raised out here, where no traceback holds on to the failed request's tensors.
        raise OutOfMemory(f"request {request.request_id}: out of memory: {reason}")

    def describe(self) -> dict[str, Any]:
        """Return every setting in force, and the bytes that are allocated for good."""
        settings = self._settings
        in_force: dict[str, Any] = {
            "model_path": settings.model_path,
            "architecture": self._decoder.shape.architecture,
            "device": str(self._device),
            "threads": settings.threads,
            "max_model_len": self._context_tokens,
            "dtype": str(self._dtype).removeprefix("torch."),
            "attention": self._kernel.name,
            "chunk_tokens": settings.chunk_tokens,
            "attend_tokens": settings.attend_tokens,
            "policy": {"name": self._policy.name},
            "poison": settings.poison,
            "fault": settings.fault,
        }
        if settings.offload is not None:
            in_force |= {
                "offload": settings.offload.mode,
                "resident_tokens": self._resident_tokens,
                "num_gpu_blocks": settings.offload.num_gpu_blocks,
                "kvcache_block_size": settings.offload.kvcache_block_size,
            }
        return in_force | {
            "weight_bytes": self._decoder.weight_bytes,
            "device_buffer_bytes": self._device_buffer_bytes(),
            "host_buffer_bytes": sum(
                buffer.nbytes
                for cache in self._caches()
                for buffer in cache.host_buffers().values()
            ),
        }

    def close(self) -> None:
        """Free weights and buffers. A second call does nothing."""
        if self._open:
            self._open = False
            del self._decoder, self._resident, self._offload
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _check(self, request: Request) -> None:
        if not self._open:
            raise RequestError(f"request {request.request_id}: the engine is closed")
        prompt, vocabulary = request.prompt_token_ids, self._decoder.shape.vocabulary
        if not prompt:
            raise RequestError(f"request {request.request_id}: the prompt has no tokens")
        if request.max_new_tokens < 1:
            raise RequestError(
                f"request {request.request_id}: max_new_tokens={request.max_new_tokens} is below 1"
            )
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise RequestError(
                f"request {request.request_id}: token ids from {min(prompt)} to {max(prompt)}, "
                f"but the model's vocabulary is 0 to {vocabulary - 1}"
            )
        total = len(prompt) + request.max_new_tokens
        if total > self._context_tokens:
            raise PromptTooLong(
                f"request {request.request_id}: {len(prompt)} prompt tokens and "
                f"{request.max_new_tokens} to generate make {total}, but max_model_len is "
                f"{self._context_tokens}"
            )

    def _serve(self, request: Request) -> Generation:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        started = time.perf_counter()
        total = len(request.prompt_token_ids) + request.max_new_tokens
        cache = self._cache_for(total)
        copied_before = dict(self._streams.copied_bytes)
        answer = _Answer(request)
        sequence = cache.admit(request.request_id, total)
        try:
            answer.add(self._prefill(cache, sequence, request.prompt_token_ids))
            first_token = time.perf_counter()
            while answer.finish_reason is None:
                answer.add(self._forward(cache, sequence, answer.token_ids[-1:], want_logits=True))
            done = time.perf_counter()
        finally:
            cache.release(sequence)
        return Generation(
            token_ids=tuple(answer.token_ids),
            finish_reason=answer.finish_reason,
            logits_digest=tuple(answer.digests),
            top2_margin=tuple(answer.margins),
            prompt_tokens=len(request.prompt_token_ids),
            ttft_seconds=first_token - started,
            decode_seconds=done - first_token,
            bytes_up=self._streams.copied_bytes["up"] - copied_before["up"],
            bytes_down=self._streams.copied_bytes["down"] - copied_before["down"],
            peak_device_bytes=self._peak_device_bytes(),
            kernel=self._kernel.name,
        )

    def _peak_device_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return sum(self._device_buffer_bytes().values())

    def _device_buffer_bytes(self) -> dict[str, int]:
        return {
            name: buffer.nbytes
            for cache in self._caches()
            for name, buffer in cache.device_buffers().items()
        }

    def _prefill(
        self, cache: KVCache, sequence: Sequence, prompt: tuple[int, ...]
    ) -> torch.Tensor | None:
        """Run the prompt chunk by chunk; return the logits after its last token."""
        chunk = self._settings.chunk_tokens or len(prompt)
        logits = None
        for start in range(0, len(prompt), chunk):
            stop = min(start + chunk, len(prompt))
            logits = self._forward(
                cache, sequence, prompt[start:stop], want_logits=stop == len(prompt)
            )
        return logits

    def _forward(
        self,
        cache: KVCache,
        sequence: Sequence,
        token_ids: SequenceOf[int],
        *,
        want_logits: bool,
    ) -> torch.Tensor | None:
        """Run one step: the tokens that follow the sequence, through all layers."""
        count, layers = len(token_ids), self._decoder.shape.layers
        # A single new token sees every key, so its own joins the last span.
        keys = sequence.length + (1 if count == 1 else 0)
        spans = self._policy.spans(keys, self._settings.attend_tokens)
        step = cache.begin(sequence, count, spans, layers if want_logits else layers - 1)

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            new = step.append(layer, key, value)
            if not query.shape[0]:
                return query
            pieces = _pieces(step, layer, new, count, query.shape[0])
            return self._attend(sequence, layer, query, pieces)

        logits = self._decoder.forward(token_ids, sequence.length, attend, want_logits=want_logits)
        step.finish()
        return logits

    def _attend(
        self,
        sequence: Sequence,
        layer: int,
        query: torch.Tensor,
        pieces: Iterator[tuple[KVSpan, bool]],
    ) -> torch.Tensor:
        """Attend to the pieces in order and merge; returns [queries, heads, head_dim]."""
        merged: attention.Attended | None = None
        for piece, causal in pieces:
            part = attention.attention(
                query, piece.keys, piece.values, causal=causal, kernel=self._kernel
            )
            if self._settings.poison:
                _refuse_nan(part.output, sequence, layer, piece)
            merged = part if merged is None else attention.merge(merged, part)
        if merged is None:
            raise AssertionError("a step without keys")
        return merged.output.to(query.dtype)


def _pieces(
    step: Step, layer: int, new: KVSpan, count: int, queries: int
) -> Iterator[tuple[KVSpan, bool]]:
    """Yield what the step's queries read, in ascending order, and whether causally."""
    for span in step.history(layer):
        yield span, False
    if count > 1:
        yield new, queries == count


def _refuse_nan(output: torch.Tensor, sequence: Sequence, layer: int, piece: KVSpan) -> None:
    if not bool(output.isfinite().all()):
        last = piece.start + piece.keys.shape[0] - 1
        raise NonFiniteLogits(
            f"request {sequence.request_id}, layer {layer}, {piece.place}: NaN in the attention "
            f"to tokens {piece.start} to {last}"
        )


@dataclass(slots=True)
class _Answer:
    """The tokens chosen so far, and what they were chosen from."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, logits: torch.Tensor | None) -> None:
        """Choose the best token from float32 logits [vocabulary]; the lowest id among equals.

        Raises:
            NonFiniteLogits: there is NaN or infinity among them.
        """
        if logits is None:
            raise AssertionError("a step without logits")
        trace = trace_logits(logits)
        if not trace.finite:
            raise NonFiniteLogits(
                f"request {self.request.request_id}: NaN or infinity in the logits of new token "
                f"{len(self.token_ids)}"
            )
        # NumPy promises the first of equal maxima, PyTorch does not.
        token = int(logits.cpu().numpy().argmax())
        self.token_ids.append(token)
        self.digests.append(trace.digest)
        self.margins.append(trace.top2_margin)
        if token in self.request.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.request.max_new_tokens:
            self.finish_reason = "length"


def _context_tokens(settings: Settings, max_positions: int) -> int:
    context = max_positions if settings.max_model_len is None else settings.max_model_len
    if context > max_positions:
        raise ConfigurationError(
            f"backend.max_model_len={context} is beyond the model's max_position_embeddings="
            f"{max_positions}."
        )
    return context


def _is_out_of_memory(error: BaseException) -> bool:
    """Say whether memory ran out; PyTorch's CPU and pinned allocators raise plain RuntimeErrors."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, RequestError):
        return False
    text = str(error).lower()
    return "out of memory" in text or "can't allocate memory" in text


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
