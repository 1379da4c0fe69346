"""Runs the steps of requests: plans each, gives the decoder what it attends by, replays graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from backends.base import Request
from backends.engine.admission import Cancelled
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
from backends.engine.parts import TokenInput
from backends.engine.plan import Blueprint
from backends.engine.policy import dense_spans
from backends.engine.sparse import Sparse, Tally
from backends.engine.steps import Attention, ManyRows, OneRow, Record, SparseRows
from backends.engine.workspace import Workspace


class StepRunner:
    """Runs one step at a time, through the kernels for many rows or those for one.

    Args:
        blueprint: of the engine.
        decoder: the arithmetic between tokens and logits.
        attention: the kernels for dense attention.
        sparse: policy and kernel of sparse prefill, None where all keys are read.
        work: the buffers that all of these compute in.
        scalars: where kernels read a single token's place.
        token_input: takes the token that a step of one token starts from.
        resident: the cache whose steps of one token are replayed as a whole, if there is one.
        cancelled: asked before each layer.
        recorder: is shown what steps compute, if anybody wants it.

    Attributes:
        tally: what sparse prefill costs; a new one for each request.
        whole_step: one token's step in the resident cache, once captured.
        layer_parts: one token's step in the offload cache, cut where layers attend, once captured.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        *,
        decoder: Decoder,
        attention: Attention,
        sparse: Sparse | None,
        work: Workspace,
        scalars: Scalars,
        token_input: TokenInput,
        resident: ResidentCache | None,
        cancelled: Cancelled,
        recorder: CheckpointWriter | None,
    ) -> None:
        self._blueprint = blueprint
        self._settings = blueprint.settings
        self._device = blueprint.device
        self._decoder = decoder
        self._attention = attention
        self._sparse = sparse
        self._work = work
        self._scalars = scalars
        self._input = token_input
        self._resident = resident
        self._cancelled = cancelled
        self._recorder = recorder
        self._steps_recorded = 0
        self.tally = Tally(self._device)
        self.whole_step: CapturedParts | None = None
        self.layer_parts: CapturedParts | None = None

    def let_go(self) -> None:
        """Hold nothing any more, not even where an error's traceback still holds this object."""
        self.__dict__.clear()

    def prefill(self, cache: KVCache, sequence: Sequence, request: Request) -> torch.Tensor:
        """Run what is left of the prompt by chunks; return the logits after its last token."""
        prompt = request.prompt_token_ids
        chunk = self._settings.chunk_tokens or len(prompt)
        logits = None
        for start in range(sequence.length, len(prompt), chunk):
            stop = min(start + chunk, len(prompt))
            if stop < len(prompt):
                size = min(chunk, len(prompt) - stop)
                following = self.step_plan(stop, size, last=stop + size == len(prompt))
            elif request.max_new_tokens > 1:
                following = self.step_plan(stop, 1, last=True)
            else:
                following = None
            logits = self._forward(
                cache, sequence, prompt[start:stop], stop == len(prompt), following
            )
        if logits is None:
            raise AssertionError("a prompt without logits")
        return logits

    def step_plan(self, length: int, count: int, *, last: bool) -> StepPlan:
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
        return self.many(cache, sequence, token_ids, want_logits=want_logits, following=following)

    def one_token(
        self, cache: KVCache, sequence: Sequence, token: int, following: StepPlan | None
    ) -> torch.Tensor:
        """Run the step of the token that was just chosen; return the logits after it."""
        token = self._input.lay(sequence, token)
        if self._blueprint.decodes_by_splits:
            return self._one(cache, sequence, token, following)
        logits = self.many(cache, sequence, (token,), want_logits=True, following=following)
        if logits is None:
            raise AssertionError("a step without logits")
        return logits

    def many(
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
        plan = self.step_plan(sequence.length, len(token_ids), last=want_logits)
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
            tally=self.tally,
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
        plan = self.step_plan(sequence.length, 1, last=True)
        step = cache.begin_one(sequence, plan, scalars)
        if cache is self._resident and self.whole_step is not None:
            self._cancelled.check(sequence.request_id)
            self.whole_step.replay(0)
            logits = self._work.logits[0]
        elif self.layer_parts is not None:
            logits = self._replay_layers(self.layer_parts, sequence, step)
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

    def resident_step(self, cache: ResidentCache) -> Callable[[], None]:
        """Return one token's whole step in the resident cache, for a capture."""
        scalars, blank = self._scalars, Sequence(-1)
        plan = self.step_plan(0, 1, last=True)

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

    def parts_of_layers(self, cache: OffloadCache) -> list[Callable[[], None]]:
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

    def begin_record(
        self, request: Request, sequence: Sequence, settings: Callable[[], dict[str, Any]]
    ) -> None:
        """Begin the record of a request, where there are any.

        Args:
            request: that was admitted.
            sequence: what its cache knows of it.
            settings: asked for the settings that decide results.
        """
        if self._recorder is not None:
            self._recorder.begin(request.request_id, request.prompt_token_ids, settings())
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
