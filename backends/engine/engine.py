"""The request loop: admit, prefill, decode, release. Greedy, one request at a time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from backends.base import ConfigurationError, Generation, OutOfMemory, Request, RequestError
from backends.digest import trace_logits
from backends.engine import description, faults, memory
from backends.engine.admission import Cancelled, check_request
from backends.engine.answer import Answer, HostLogits
from backends.engine.block_attention import make_block_kernel
from backends.engine.cache.base import KVCache, Scalars, Sequence, StepPlan
from backends.engine.cache.offload import OffloadCache
from backends.engine.cache.resident import ResidentCache
from backends.engine.checkpoint import CheckpointWriter
from backends.engine.graph import CapturedParts
from backends.engine.model import Decoder
from backends.engine.ops import make_ops
from backends.engine.out_of_memory import first_line, is_out_of_memory
from backends.engine.parts import Parts, TokenInput
from backends.engine.pinned import HostPool
from backends.engine.plan import draw, weight_source
from backends.engine.settings import Settings, resolve_device, resolve_dtype
from backends.engine.shape import find_model, read_shape
from backends.engine.sparse import Selection, Sparse, Tally
from backends.engine.step_runner import StepRunner
from backends.engine.steps import Attention
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
        self._cancelled = Cancelled()
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
                if is_out_of_memory(error):
                    raise ConfigurationError(
                        f"weights and KV cache for backend.max_model_len={self._context_tokens} "
                        f"tokens do not fit the memory of {self._device}: {first_line(error)}"
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
        self._sparse: Sparse | None = None
        if blueprint.policy.sparse:
            self._sparse = Sparse(
                parts.selection(blueprint.policy),
                make_block_kernel(self._device, work, self._work.attended),
                self._work.query,
                blueprint.shape.layers,
            )
        self._input = parts.token_input()
        self._logits = HostLogits(blueprint.shape.vocabulary, self._device)
        self._runner = StepRunner(
            blueprint,
            decoder=self._decoder,
            attention=self._attention,
            sparse=self._sparse,
            work=self._work,
            scalars=self._scalars,
            token_input=self._input,
            resident=self._resident,
            cancelled=self._cancelled,
            recorder=self._recorder,
        )
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
        runner = self._runner
        sequence = cache.admit(-1, min(3, self._context_tokens))
        try:
            if self._context_tokens >= 3:
                runner.many(cache, sequence, (0, 0), want_logits=want_logits, following=None)
            if want_logits:
                runner.one_token(cache, sequence, 0, None)
        finally:
            cache.release(sequence)

    def _warm_up_sparse(self, cache: KVCache) -> None:
        if self._sparse is None:
            return
        try:
            self._sparse.warm_up(*cache.layer_rows())
        except Exception as error:  # a compiler's, of many kinds
            if is_out_of_memory(error):
                raise
            raise ConfigurationError(
                f"backend.policy.name={self._blueprint.policy.name}: its kernels cannot be "
                f"compiled here ({type(error).__name__}: {first_line(error)}); install Triton and "
                "a PyTorch that fit this GPU, or use backend/policy=full."
            ) from error

    def _capture(self) -> None:
        """Capture steps of one token: whole where keys lie still, else what is between copies."""
        runner = self._runner
        self._scalars.position.zero_()
        self._scalars.stop.fill_(1)
        if self._resident is not None:
            runner.whole_step = CapturedParts([runner.resident_step(self._resident)], self._device)
        if self._offload is not None:
            runner.layer_parts = CapturedParts(runner.parts_of_layers(self._offload), self._device)

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
            if not is_out_of_memory(error):
                raise
            reason = first_line(error)
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
        return description.in_force(
            self._blueprint,
            block_kernel=None if self._sparse is None else self._sparse.kernel,
            ops=self._ops.name,
            decode=self._decode_name(),
            weight_bytes=self._decoder.weight_bytes,
            caches=self._caches(),
            plan=self._plan,
        )

    def _settings_that_count(self) -> dict[str, Any]:
        return description.settings_that_count(self.describe())

    def _decode_name(self) -> str:
        if self._runner.whole_step is not None or self._runner.layer_parts is not None:
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
        runner = self.__dict__.pop("_runner", None)
        if runner is not None:
            runner.let_go()
        for name in (
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
        shape = self._blueprint.shape
        check_request(request, shape.vocabulary, self._context_tokens)

    def _serve(self, request: Request) -> Generation:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        copied_before = dict(self._streams.copied_bytes)
        timeline = self._timeline
        with nullcontext() if timeline is None else timeline.request(request.request_id):
            answer = self._answer(request)
        sparse = self._runner.tally.figures()
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

    def _answer(self, request: Request) -> Answer:
        answer = Answer(request)
        self._runner.tally = Tally(self._device)
        total = len(request.prompt_token_ids) + request.max_new_tokens
        cache = self._cache_for(total)
        self._cancelled.check(request.request_id)
        sequence = cache.admit(request.request_id, total, request.prompt_token_ids)
        answer.reused_tokens = sequence.reused
        try:
            self._runner.begin_record(request, sequence, self._settings_that_count)
            logits = self._runner.prefill(cache, sequence, request)
            while True:
                row = self._logits.fetch(logits)
                token = answer.choose(row)
                if answer.finish_reason is None:
                    following = self._following(sequence, answer)
                    logits = self._runner.one_token(cache, sequence, token, following)
                # The row is looked through while the device computes the next.
                answer.keep(trace_logits(row))
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
        return sum(description.device_buffer_bytes(self._caches()).values())

    def _following(self, sequence: Sequence, answer: Answer) -> StepPlan | None:
        """Return the step after the one that is about to be asked for, if there may be one."""
        if len(answer.token_ids) + 1 >= answer.request.max_new_tokens:
            return None
        return self._runner.step_plan(sequence.length + 1, 1, last=True)


def _recorder(settings: Settings) -> CheckpointWriter | None:
    if settings.checkpoint is None:
        return None
    return CheckpointWriter(Path(settings.checkpoint), tensors=settings.checkpoint_tensors)


def _timeline(settings: Settings, device: torch.device) -> Timeline | None:
    return None if settings.timeline is None else Timeline(Path(settings.timeline), device)
