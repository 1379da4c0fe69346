"""The request loop: admit, prefill, decode, release. Greedy, one request at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from hashlib import blake2b
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
from backends.engine import attention
from backends.engine.cache.base import KVCache, KVLayout, KVSpan, Sequence, Step
from backends.engine.cache.resident import ResidentCache
from backends.engine.model import Decoder, find_model, read_shape
from backends.engine.policy import POLICIES
from backends.engine.settings import Settings, resolve_device, resolve_dtype

DIGEST_BYTES = 8


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
            self._resident = self._make_resident_cache()
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise ConfigurationError(
                f"weights and KV cache for {self._context_tokens} tokens do not fit the memory "
                f"of {self._device}: {_first_line(error)} Lower max_model_len."
            ) from error
        self._open = True

    def _make_resident_cache(self) -> ResidentCache:
        return ResidentCache(self._layout(), self._context_tokens, poisoned=self._settings.poison)

    def _layout(self) -> KVLayout:
        shape = self._decoder.shape
        return KVLayout(shape.layers, shape.kv_heads, shape.head_dim, self._dtype, self._device)

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
        except (torch.OutOfMemoryError, MemoryError) as error:
            reason = _first_line(error)
        # Raised out here, where no traceback holds on to the failed request's tensors.
        raise OutOfMemory(f"request {request.request_id}: out of memory: {reason}")

    def describe(self) -> dict[str, Any]:
        """Return every setting in force, and the bytes that are allocated for good."""
        settings = self._settings
        return {
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
            "weight_bytes": self._decoder.weight_bytes,
            "device_buffer_bytes": {
                name: buffer.nbytes for name, buffer in self._resident.device_buffers().items()
            },
        }

    def close(self) -> None:
        """Free weights and buffers. A second call does nothing."""
        if self._open:
            self._open = False
            del self._decoder, self._resident
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
        cache = self._resident
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
            peak_device_bytes=self._peak_device_bytes(),
            kernel=self._kernel.name,
        )

    def _peak_device_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return sum(buffer.nbytes for buffer in self._resident.device_buffers().values())

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
        row = logits.cpu().numpy()
        best, second = torch.from_numpy(row).topk(2).values.tolist()
        if not torch.from_numpy(row).isfinite().all():
            raise NonFiniteLogits(
                f"request {self.request.request_id}: NaN or infinity in the logits of new token "
                f"{len(self.token_ids)}"
            )
        token = int(row.argmax())
        self.token_ids.append(token)
        self.digests.append(blake2b(row.tobytes(), digest_size=DIGEST_BYTES).hexdigest())
        self.margins.append(best - second)
        if token in self.request.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.request.max_new_tokens:
            self.finish_reason = "length"


def _context_tokens(settings: Settings, max_positions: int) -> int:
    context = max_positions if settings.max_model_len is None else settings.max_model_len
    if context > max_positions:
        raise ConfigurationError(
            f"max_model_len={context} is beyond the model's max_position_embeddings="
            f"{max_positions}."
        )
    return context


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
