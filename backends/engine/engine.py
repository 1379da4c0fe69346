"""The request loop: admit, prefill, decode, release. Greedy, one request at a time."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from backends.base import (
    ConfigurationError,
    FinishReason,
    Generation,
    NonFiniteLogits,
    OutOfMemory,
    PromptTooLong,
    Request,
    RequestCancelled,
    RequestError,
)
from backends.digest import trace_logits
from backends.engine import faults, memory
from backends.engine.block_attention import make_block_kernel
from backends.engine.cache.base import (
    KVCache,
    OneStep,
    Scalars,
    Sequence,
    SparseStep,
    Step,
    StepPlan,
)
from backends.engine.cache.offload import OffloadCache
from backends.engine.cache.resident import ResidentCache
from backends.engine.checkpoint import CheckpointWriter
from backends.engine.graph import CapturedParts
from backends.engine.model import Decoder
from backends.engine.ops import make_ops
from backends.engine.parts import Parts, TokenInput
from backends.engine.pinned import HostPool
from backends.engine.plan import draw, weight_source
from backends.engine.policy import dense_spans
from backends.engine.settings import Settings, resolve_device, resolve_dtype
from backends.engine.shape import find_model, read_shape
from backends.engine.sparse import Selection, Sparse, Tally
from backends.engine.steps import Attention, ManyRows, OneRow, Record, SparseRows
from backends.engine.streams import make_streams
from backends.engine.timeline import Timeline
from backends.engine.weights import WeightSource
from backends.engine.workspace import Workspace


class Engine:
    """Answers requests greedily, with keys and values on the device or in CPU memory.

    For equal chunk_tokens, attend_tokens, kernel, dtype and threads one prompt gives the same
    logits to the last bit, wherever its keys and values lie and whatever was served before: the
    shapes of all products and attention calls follow from these settings and the positions
    alone, and nothing is chosen, compiled or allocated for the cache while serving.

    Args:
        settings: from one of the presets in `backends.engine`.
        weights: by transformers' names, instead of the files in the model's folder.

    Raises:
        ConfigurationError: a setting cannot be honoured.
    """

    def __init__(
        self, settings: Settings, weights: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self._settings = settings
        self._device = resolve_device(settings.device)
        self._open = False
        self._cancelled = _Cancelled()
        torch.set_num_threads(settings.threads)
        folder = find_model(settings.model_path)
        shape = read_shape(folder)
        self._recorder = _recorder(settings)
        self._timeline = _timeline(settings, self._device)
        with torch.inference_mode(), weight_source(folder, weights) as source:
            self._ops = make_ops(self._device, resolve_dtype(settings.dtype, self._device))
            self._blueprint = draw(settings, self._device, shape, source, self._ops)
            self._plan = self._blueprint.plan()
            self._check_plan()
            self._host = HostPool(device=self._device)
            try:
                self._build(source)
            except BaseException as error:
                self._free()
                if _is_out_of_memory(error):
                    raise ConfigurationError(
                        f"weights and KV cache for backend.max_model_len={self._context_tokens} "
                        f"tokens do not fit the memory of {self._device}: {_first_line(error)}"
                    ) from error
                raise
        self._open = True

    @property
    def _context_tokens(self) -> int:
        return self._blueprint.context_tokens

    def _check_plan(self) -> None:
        """Print the memory plan, and refuse one that does not fit."""
        settings = self._settings
        limits = memory.read_limits(
            self._device, settings.device_memory_gb, settings.host_memory_gb
        )
        for line in self._plan.lines(limits):
            print(f"memory plan: {line}", file=sys.stderr)
        for line in memory.check(self._plan, limits, self._blueprint.alternatives()):
            print(f"memory plan: {line}", file=sys.stderr)
        memory.cap_device(self._device, settings.device_memory_gb, memory.OUTSIDE_ALLOCATOR_BYTES)

    def _build(self, source: WeightSource) -> None:
        """Allocate every buffer that there will ever be, and warm up."""
        blueprint, settings = self._blueprint, self._settings
        parts = Parts(OffloadCache, Attention, Decoder, TokenInput, Selection)
        if settings.fault is not None:
            parts = faults.apply(settings.fault, parts)
        self._decoder = parts.decoder(
            blueprint.shape, source, self._device, blueprint.dtype, self._ops
        )
        work = self._allocate(blueprint.work_buffers())
        self._work = Workspace(work)
        self._decoder.work_in(self._work)
        self._scalars = Scalars.on(self._device)
        self._streams = make_streams(self._device, synchronise=settings.synchronise)
        tensors = self._allocate(blueprint.cache_buffers())
        self._offload: OffloadCache | None = None
        self._resident: ResidentCache | None = None
        if blueprint.geometry is not None:
            self._offload = parts.offload_cache(
                blueprint.layout,
                blueprint.geometry,
                tensors,
                self._streams,
                poisoned=settings.poison,
            )
        if blueprint.resident_tokens:
            self._resident = ResidentCache(tensors, poisoned=settings.poison)
        self._attention = parts.attention(
            blueprint.kernel, self._ops, self._work, poisoned=settings.poison
        )
        self._tally = Tally(self._device)
        self._sparse: Sparse | None = None
        if blueprint.policy.sparse:
            self._sparse = Sparse(
                parts.selection(blueprint.policy),
                make_block_kernel(self._device, work, self._work.attended),
                self._work.query,
                blueprint.shape.layers,
            )
        self._input = parts.token_input()
        self._logits = _HostLogits(blueprint.shape.vocabulary, self._device)
        self._whole_step: CapturedParts | None = None
        self._layer_parts: CapturedParts | None = None
        self._warm_up()

    def _allocate(self, buffers: tuple[memory.Buffer, ...]) -> dict[str, torch.Tensor]:
        tensors = {
            buffer.name: torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device)
            for buffer in buffers
            if buffer.place == "device"
        }
        on_host = [buffer for buffer in buffers if buffer.place == "host"]
        return tensors | self._host.allocate_many(on_host, pin=self._device.type == "cuda")

    def _warm_up(self) -> None:
        """Run each kind of step once on a GPU, so that nothing is compiled while serving.

        What a kernel allocates for a call is allocated once in full, so that the allocator holds
        it from then on.
        """
        if self._device.type != "cuda":
            return
        passing = [
            torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device)
            for buffer in self._blueprint.passing_buffers()
        ]
        del passing
        for cache in self._caches():
            self._warm_up_sparse(cache)
            for want_logits in (False, True):  # without, the last layer has keys and no queries
                self._warm_up_prompt(cache, want_logits=want_logits)
        if self._captures:
            self._capture()
        torch.cuda.synchronize(self._device)

    def _warm_up_prompt(self, cache: KVCache, *, want_logits: bool) -> None:
        sequence = cache.admit(-1, min(3, self._context_tokens))
        try:
            if self._context_tokens >= 3:
                self._many(cache, sequence, (0, 0), want_logits=want_logits, following=None)
            if want_logits:
                self._one_token(cache, sequence, 0, None)
        finally:
            cache.release(sequence)

    def _warm_up_sparse(self, cache: KVCache) -> None:
        if self._sparse is None:
            return
        try:
            self._sparse.warm_up(*cache.layer_rows())
        except Exception as error:  # a compiler's, of many kinds
            if _is_out_of_memory(error):
                raise
            raise ConfigurationError(
                f"backend.policy.name={self._blueprint.policy.name}: its kernels cannot be "
                f"compiled here ({type(error).__name__}: {_first_line(error)}); install Triton and "
                "a PyTorch that fit this GPU, or use backend/policy=full."
            ) from error

    def _capture(self) -> None:
        """Capture steps of one token: whole where keys lie still, else what is between copies."""
        self._scalars.position.zero_()
        self._scalars.stop.fill_(1)
        if self._resident is not None:
            self._whole_step = CapturedParts([self._resident_step(self._resident)], self._device)
        if self._offload is not None:
            self._layer_parts = CapturedParts(self._parts_of_layers(self._offload), self._device)

    @property
    def _captures(self) -> bool:
        """Whether steps of one token are replayed from graphs."""
        return (
            self._blueprint.decodes_by_splits
            and not self._settings.poison
            and self._recorder is None
        )

    def _caches(self) -> list[KVCache]:
        return [cache for cache in (self._resident, self._offload) if cache is not None]

    def _cache_for(self, tokens: int) -> KVCache:
        """Return where a request of `tokens` tokens in all is kept."""
        if self._resident is not None and tokens <= self._blueprint.resident_tokens:
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
            RequestCancelled: `cancel` was called; the request is released.
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

    def cancel(self, request_id: int) -> None:
        """End a request, from any thread.

        The one under way stops before its next layer, `generate` raises RequestCancelled, and the
        request is released. One that has not begun is refused when it comes. One that is over is
        not affected.
        """
        self._cancelled.add(request_id)

    def describe(self) -> dict[str, Any]:
        """Return every setting in force, and the bytes that are allocated for good."""
        settings, blueprint = self._settings, self._blueprint
        in_force: dict[str, Any] = {
            "model_path": settings.model_path,
            "architecture": blueprint.shape.architecture,
            "device": str(self._device),
            "threads": settings.threads,
            "max_model_len": self._context_tokens,
            "dtype": str(blueprint.dtype).removeprefix("torch."),
            "attention": blueprint.kernel.name,
            "block_attention": None if self._sparse is None else self._sparse.kernel.name,
            "ops": self._ops.name,
            "decode": self._decode_name(),
            "chunk_tokens": settings.chunk_tokens,
            "attend_tokens": settings.attend_tokens,
            "policy": blueprint.policy.describe(),
            "poison": settings.poison,
            "synchronise": settings.synchronise,
            "fault": settings.fault,
            "device_memory_gb": settings.device_memory_gb,
            "host_memory_gb": settings.host_memory_gb,
            "checkpoint": settings.checkpoint,
            "checkpoint_tensors": settings.checkpoint_tensors,
            "timeline": settings.timeline,
        }
        if settings.offload is not None:
            in_force |= {
                "offload": settings.offload.mode,
                "resident_tokens": blueprint.resident_tokens,
                settings.offload.slots_key: settings.offload.num_gpu_blocks,
                "kvcache_block_size": settings.offload.block_tokens(self._context_tokens),
                "prefix_cache": settings.offload.prefix_cache,
                "prefix_cache_tokens": settings.offload.prefix_cache_tokens or 0,
            }
        return in_force | {
            "compile_seconds": None
            if self._sparse is None
            else self._sparse.kernel.compile_seconds,
            "weight_bytes": self._decoder.weight_bytes,
            "device_buffer_bytes": self._device_buffer_bytes(),
            "host_buffer_bytes": sum(
                buffer.nbytes
                for cache in self._caches()
                for buffer in cache.host_buffers().values()
            ),
            "memory_plan": self._plan.to_json(),
        }

    def _settings_that_count(self) -> dict[str, Any]:
        """Return what decides results, for a comparison: no sizes, and no paths of this machine."""
        left_out = {
            "checkpoint",
            "checkpoint_tensors",
            "compile_seconds",
            "device_buffer_bytes",
            "device_memory_gb",
            "host_buffer_bytes",
            "host_memory_gb",
            "memory_plan",
            "timeline",
            "weight_bytes",
        }
        found = {key: value for key, value in self.describe().items() if key not in left_out}
        return found | {"model_path": Path(self._settings.model_path).name}

    def _decode_name(self) -> str:
        if self._whole_step is not None or self._layer_parts is not None:
            return "captured graphs"
        return "kernels for one token" if self._blueprint.decodes_by_splits else "general kernels"

    def _kernel_name(self) -> str:
        dense = self._blueprint.kernel.name
        return dense if self._sparse is None else f"{self._sparse.kernel.name}+{dense}"

    def close(self) -> None:
        """Free weights and buffers. A second call does nothing."""
        if self._open:
            self._open = False
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._free()

    def _free(self) -> None:
        for name in (
            "_whole_step",
            "_layer_parts",
            "_resident",
            "_offload",
            "_attention",
            "_sparse",
            "_work",
            "_decoder",
            "_streams",
            "_scalars",
            "_logits",
        ):
            self.__dict__.pop(name, None)
        gc.collect()
        self._host.release()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _check(self, request: Request) -> None:
        if not self._open:
            raise RequestError(f"request {request.request_id}: the engine is closed")
        prompt, vocabulary = request.prompt_token_ids, self._blueprint.shape.vocabulary
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
        copied_before = dict(self._streams.copied_bytes)
        timeline = self._timeline
        with nullcontext() if timeline is None else timeline.request(request.request_id):
            answer = self._answer(request)
        sparse = self._tally.figures()
        return Generation(
            token_ids=tuple(answer.token_ids),
            finish_reason=answer.finish_reason or "length",
            logits_digest=tuple(answer.digests),
            top2_margin=tuple(answer.margins),
            prompt_tokens=len(request.prompt_token_ids),
            ttft_seconds=answer.first_token_at - answer.started_at,
            decode_seconds=answer.done_at - answer.first_token_at,
            bytes_up=self._streams.copied_bytes["up"] - copied_before["up"],
            bytes_down=self._streams.copied_bytes["down"] - copied_before["down"],
            peak_device_bytes=self._peak_device_bytes(),
            kernel=self._kernel_name(),
            reused_tokens=answer.reused_tokens,
            copy_hidden_share=None if timeline is None else timeline.copy_hidden_share(),
            density=sparse.density,
            dense_share=sparse.dense_share,
            estimation_seconds=sparse.estimation_seconds,
            attention_seconds=sparse.attention_seconds,
        )

    def _answer(self, request: Request) -> _Answer:
        answer = _Answer(request)
        self._tally = Tally(self._device)
        total = len(request.prompt_token_ids) + request.max_new_tokens
        cache = self._cache_for(total)
        self._cancelled.check(request.request_id)
        sequence = cache.admit(request.request_id, total, request.prompt_token_ids)
        answer.reused_tokens = sequence.reused
        try:
            self._begin_record(request, sequence)
            logits = self._prefill(cache, sequence, request)
            while True:
                row = self._logits.fetch(logits)
                token = answer.choose(row)
                if answer.finish_reason is None:
                    following = self._following(sequence, answer)
                    logits = self._one_token(cache, sequence, token, following)
                # The row is looked through while the device computes the next.
                answer.trace(row)
                sequence.prefilled = True
                if answer.finish_reason is not None:
                    return answer
        finally:
            cache.release(sequence)
            self._cancelled.forget(request.request_id)
            if self._recorder is not None:
                self._recorder.end()

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

    def _prefill(self, cache: KVCache, sequence: Sequence, request: Request) -> torch.Tensor:
        """Run what is left of the prompt by chunks; return the logits after its last token."""
        prompt = request.prompt_token_ids
        chunk = self._settings.chunk_tokens or len(prompt)
        logits = None
        for start in range(sequence.length, len(prompt), chunk):
            stop = min(start + chunk, len(prompt))
            if stop < len(prompt):
                size = min(chunk, len(prompt) - stop)
                following = self._step_plan(stop, size, last=stop + size == len(prompt))
            elif request.max_new_tokens > 1:
                following = self._step_plan(stop, 1, last=True)
            else:
                following = None
            logits = self._forward(
                cache, sequence, prompt[start:stop], stop == len(prompt), following
            )
        if logits is None:
            raise AssertionError("a prompt without logits")
        return logits

    def _following(self, sequence: Sequence, answer: _Answer) -> StepPlan | None:
        """Return the step after the one that is about to be asked for, if there may be one."""
        if len(answer.token_ids) + 1 >= answer.request.max_new_tokens:
            return None
        return self._step_plan(sequence.length + 1, 1, last=True)

    def _step_plan(self, length: int, count: int, *, last: bool) -> StepPlan:
        """Plan a step of `count` tokens after `length` others."""
        # A single new token sees every key, so its own joins the last span.
        keys = length + (1 if count == 1 else 0)
        spans = dense_spans(keys, self._settings.attend_tokens)
        layers = self._blueprint.shape.layers
        reads_all = last or (count == 1 and self._blueprint.decodes_by_splits)
        return StepPlan(
            count,
            spans,
            layers if reads_all else layers - 1,
            sparse=count > 1 and self._blueprint.policy.sparse,
        )

    def _forward(
        self,
        cache: KVCache,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        want_logits: bool,
        following: StepPlan | None,
    ) -> torch.Tensor | None:
        """Run one step: the tokens that follow the sequence, through all layers."""
        if len(token_ids) == 1 and self._blueprint.decodes_by_splits:
            return self._one(cache, sequence, token_ids[0], following)
        return self._many(cache, sequence, token_ids, want_logits=want_logits, following=following)

    def _one_token(
        self, cache: KVCache, sequence: Sequence, token: int, following: StepPlan | None
    ) -> torch.Tensor:
        token = self._input.lay(sequence, token)
        if self._blueprint.decodes_by_splits:
            return self._one(cache, sequence, token, following)
        logits = self._many(cache, sequence, (token,), want_logits=True, following=following)
        if logits is None:
            raise AssertionError("a step without logits")
        return logits

    def _many(
        self,
        cache: KVCache,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        *,
        want_logits: bool,
        following: StepPlan | None,
    ) -> torch.Tensor | None:
        """Run a step through the kernels for many rows."""
        self._scalars.position.fill_(sequence.length)
        record = self._record_for(sequence, len(token_ids), want_logits=want_logits)
        plan = self._step_plan(sequence.length, len(token_ids), last=want_logits)
        step = cache.begin(sequence, plan)
        rooms = self._rooms(step, plan, sequence, record)
        logits = self._decoder.forward(
            torch.tensor(token_ids, device=self._device),
            self._scalars.position,
            rooms,
            want_logits=want_logits,
            observer=None if record is None else _Recorded(record),
        )
        if record is not None and logits is not None:
            record("logits", self._blueprint.shape.layers, logits[None])
        step.finish(following)
        return logits

    def _rooms(
        self, step: Step, plan: StepPlan, sequence: Sequence, record: Record | None
    ) -> ManyRows:
        """Return what a step through the kernels for many rows attends by."""
        request_id, watch = sequence.request_id, self._watch(sequence)
        if self._sparse is None or not plan.sparse:
            return ManyRows(
                step,
                self._attention,
                rows=plan.count,
                request_id=request_id,
                watch=watch,
                record=record,
            )
        return SparseRows(
            cast(SparseStep, step),
            plan,
            sequence.length,
            attention=self._attention,
            sparse=self._sparse,
            tally=self._tally,
            request_id=request_id,
            watch=watch,
            record=record,
        )

    def _one(
        self, cache: KVCache, sequence: Sequence, token: int, following: StepPlan | None
    ) -> torch.Tensor:
        """Run a step through the kernels for one row."""
        scalars = self._scalars
        scalars.token.fill_(token)
        scalars.position.fill_(sequence.length)
        scalars.stop.fill_(sequence.length + 1)
        record = self._record_for(sequence, 1, want_logits=True)
        plan = self._step_plan(sequence.length, 1, last=True)
        step = cache.begin_one(sequence, plan, scalars)
        if cache is self._resident and self._whole_step is not None:
            self._cancelled.check(sequence.request_id)
            self._whole_step.replay(0)
            logits = self._work.logits[0]
        elif self._layer_parts is not None:
            logits = self._replay_layers(self._layer_parts, sequence, step)
        else:
            rooms = OneRow(
                step,
                self._attention,
                scalars,
                request_id=sequence.request_id,
                watch=self._watch(sequence),
                record=record,
            )
            logits = self._decoder.forward_one(
                scalars.token,
                scalars.position,
                rooms,
                observer=None if record is None else _Recorded(record),
            )
        if record is not None:
            record("logits", self._blueprint.shape.layers, logits[None])
        step.finish(following)
        return logits

    def _replay_layers(
        self, parts: CapturedParts, sequence: Sequence, step: OneStep
    ) -> torch.Tensor:
        """Run one token's step: the parts between copies from graphs, attention from slots."""
        for layer in range(self._blueprint.shape.layers):
            self._cancelled.check(sequence.request_id)
            step.room(layer)  # waits until the tail is free
            parts.replay(layer)
            step.written(layer)
            where = f"request {sequence.request_id}, layer {layer}"
            query = self._decoder.query_of_one
            self._attention.splits(query, layer, step, self._scalars, where)
        parts.replay(self._blueprint.shape.layers)
        return self._work.logits[0]

    def _resident_step(self, cache: ResidentCache) -> Callable[[], None]:
        """Return one token's whole step in the resident cache, for a capture."""
        scalars, blank = self._scalars, Sequence(-1)
        plan = self._step_plan(0, 1, last=True)

        def run() -> None:
            rooms = OneRow(
                cache.begin_one(blank, plan, scalars),
                self._attention,
                scalars,
                request_id=blank.request_id,
                watch=lambda _: None,
                record=None,
            )
            self._decoder.forward_one(scalars.token, scalars.position, rooms)

        return run

    def _parts_of_layers(self, cache: OffloadCache) -> list[Callable[[], None]]:
        """Return the parts of one token's step before, between and after the layers' attention."""
        scalars, decoder, layers = self._scalars, self._decoder, self._blueprint.shape.layers

        def part(layer: int) -> None:
            if layer == 0:
                decoder.enter_one(scalars.token)
            else:
                decoder.mix_one(layer - 1, self._attention.combine(scalars))
            if layer < layers:
                decoder.project_one(layer, scalars.position, cache.tail_of_one(layer, scalars))
            else:
                decoder.logits_of_one()

        return [partial(part, layer) for layer in range(layers + 1)]

    def _watch(self, sequence: Sequence) -> Callable[[int], None]:
        return lambda _: self._cancelled.check(sequence.request_id)

    def _begin_record(self, request: Request, sequence: Sequence) -> None:
        if self._recorder is not None:
            settings = self._settings_that_count()
            self._recorder.begin(request.request_id, request.prompt_token_ids, settings)
            # What is reused ends at a multiple of chunk_tokens.
            self._steps_recorded = sequence.reused // (self._settings.chunk_tokens or 1)

    def _record_for(self, sequence: Sequence, rows: int, *, want_logits: bool) -> Record | None:
        """Return what writes a step's rows down."""
        recorder = self._recorder
        if recorder is None or sequence.request_id < 0:
            return None
        chunk, stop = self._steps_recorded, sequence.length + rows
        self._steps_recorded += 1

        def record(name: str, layer: int, tensor: torch.Tensor) -> None:
            # Where there are fewer rows than tokens, they are those of the last tokens.
            recorder.record(name, layer, chunk, stop - tensor.shape[0], tensor)

        return record


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Records what the decoder alone knows: the positions that it was given, the residual rows."""

    record: Record

    def starts(self, rotation: torch.Tensor) -> None:
        """See `Observer.starts`."""
        self.record("rotation", -1, rotation)

    def layer_done(self, layer: int, hidden: torch.Tensor) -> None:
        """See `Observer.layer_done`."""
        self.record("hidden", layer, hidden)


class _Cancelled:
    """Which requests somebody wants ended; used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: set[int] = set()

    def add(self, request_id: int) -> None:
        with self._lock:
            self._ids.add(request_id)

    def check(self, request_id: int) -> None:
        """Raise RequestCancelled if this request is to end, and forget it."""
        with self._lock:
            if request_id not in self._ids:
                return
            self._ids.discard(request_id)
        raise RequestCancelled(f"request {request_id} was cancelled")

    def forget(self, request_id: int) -> None:
        with self._lock:
            self._ids.discard(request_id)


class _HostLogits:
    """Brings rows of logits to CPU memory, into two buffers that take turns."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._rows = torch.empty(2, vocabulary, dtype=torch.float32, pin_memory=self._on_gpu)
        self._next = 0

    def fetch(self, logits: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [vocabulary] once they are there; good for one more call."""
        row = self._rows[self._next]
        self._next = 1 - self._next
        row.copy_(logits, non_blocking=True)
        if self._on_gpu:
            torch.cuda.current_stream(logits.device).synchronize()
        return row


@dataclass(slots=True)
class _Answer:
    """The tokens chosen so far, and what they were chosen from. Times are of perf_counter."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    reused_tokens: int = 0
    started_at: float = field(default_factory=time.perf_counter)
    first_token_at: float = 0.0
    done_at: float = 0.0

    def choose(self, row: torch.Tensor) -> int:
        """Choose the best token from logits [vocabulary]; the lowest id among equals."""
        # NumPy promises the first of equal maxima, PyTorch does not.
        token = int(row.numpy().argmax())
        self.token_ids.append(token)
        self.done_at = time.perf_counter()
        if len(self.token_ids) == 1:
            self.first_token_at = self.done_at
        if token in self.request.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.request.max_new_tokens:
            self.finish_reason = "length"
        return token

    def trace(self, row: torch.Tensor) -> None:
        """Keep what a record holds of the logits that the last token was chosen from.

        Raises:
            NonFiniteLogits: there is NaN or infinity among them.
        """
        trace = trace_logits(row)
        if not trace.finite:
            raise NonFiniteLogits(
                f"request {self.request.request_id}: NaN or infinity in the logits of new token "
                f"{len(self.token_ids) - 1}"
            )
        self.digests.append(trace.digest)
        self.margins.append(trace.top2_margin)


def _recorder(settings: Settings) -> CheckpointWriter | None:
    if settings.checkpoint is None:
        return None
    return CheckpointWriter(Path(settings.checkpoint), tensors=settings.checkpoint_tensors)


def _timeline(settings: Settings, device: torch.device) -> Timeline | None:
    return None if settings.timeline is None else Timeline(Path(settings.timeline), device)


def _is_out_of_memory(error: BaseException) -> bool:
    """Say whether memory ran out; PyTorch's CPU and pinned allocators raise plain RuntimeErrors."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, RequestError):
        return False
    text = str(error).lower()
    return "out of memory" in text or "can't allocate memory" in text


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
