"""One pass of new tokens through the layers: where a step's cache meets its attention kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from backends.base import NonFiniteLogits
from backends.engine import attention
from backends.engine.attention import Attended, Kernel
from backends.engine.cache.base import KVSpan, OneStep, Scalars, SparseStep, Step, StepPlan
from backends.engine.model import Room
from backends.engine.ops import SPLIT_TOKENS, Ops, splits_for
from backends.engine.policy import Place
from backends.engine.sparse import Chosen, Sparse, Tally
from backends.engine.workspace import Workspace

Record = Callable[[str, int, torch.Tensor], None]
"""(name, layer, rows): shows rows of the step to whoever compares two runs."""

Watch = Callable[[int], None]
"""(layer): called before each layer; may raise to end the request."""


class Attention:
    """The attention kernels of an engine, and the buffers they write to.

    Args:
        kernel: for many queries.
        ops: for merges and for one query.
        work: the buffers.
        poisoned: stop at the first NaN.
    """

    def __init__(self, kernel: Kernel, ops: Ops, work: Workspace, *, poisoned: bool) -> None:
        self.poisoned = poisoned
        self._kernel = kernel
        self._ops = ops
        self._work = work

    def many(
        self, query: torch.Tensor, pieces: Iterator[tuple[KVSpan, bool]], where: str
    ) -> torch.Tensor:
        """Attend to pieces of keys in order, and merge.

        Args:
            query: [queries, heads, head_dim].
            pieces: keys and values, and whether causally. A piece may be overwritten as soon as
                the next is asked for.
            where: names request and layer in an error.

        Returns:
            Like `query`, in a buffer that the next call overwrites.

        Raises:
            NonFiniteLogits: poisoned, and NaN was read.
        """
        piece = next(pieces, None)
        merging = False
        while piece is not None:
            part = self._attend(query, *piece, where)
            piece = next(pieces, None)
            if merging:
                self._merge(part)
            elif piece is None:
                return part.output
            else:
                self._start_merge(part)
                merging = True
            del part  # before the next is allocated, as the memory plan has it
        if not merging:
            raise AssertionError("a step without keys")
        out = self._work.attended[: query.shape[0]]
        return out.copy_(self._merged(query.shape[0]).output)

    def splits(
        self, query: torch.Tensor, layer: int, step: OneStep, scalars: Scalars, where: str
    ) -> None:
        """Attend with one query to all keys of its step, split by split; `combine` comes next.

        Args:
            query: [1, heads, head_dim].
            layer: whose keys.
            step: gives them.
            scalars: the query's place.
            where: names request and layer in an error.

        Raises:
            NonFiniteLogits: poisoned, and NaN was read.
        """
        output, log_sum_exp = self._partial()
        tail_keys, tail_values = step.tail(layer) or (None, None)
        for piece in step.pieces(layer):
            keys = piece.keys.shape[0]
            self._ops.attend_splits(
                query[0],
                piece.keys,
                piece.values,
                piece.start,
                scalars.stop,
                tail_keys,
                tail_values,
                None if tail_keys is None else scalars.tail_start,
                keys,
                query.shape[-1] ** -0.5,
                output,
                log_sum_exp,
            )
            if self.poisoned:
                first = piece.start // SPLIT_TOKENS
                held = min(keys, int(scalars.stop) - piece.start)
                _refuse_nan(output[first : first + splits_for(held)], where, piece, held)

    def combine(self, scalars: Scalars) -> torch.Tensor:
        """Combine the splits of the last `splits`.

        Returns:
            [1, heads, head_dim], in a buffer that the next call overwrites.
        """
        attended = self._work.attended[:1]
        self._ops.combine_splits(*self._partial(), scalars.stop, attended[0])
        return attended

    def _partial(self) -> tuple[torch.Tensor, torch.Tensor]:
        output, log_sum_exp = self._work.partial_output, self._work.partial_log_sum_exp
        if output is None or log_sum_exp is None:
            raise AssertionError("no buffers for splits")
        return output, log_sum_exp

    def _attend(self, query: torch.Tensor, piece: KVSpan, causal: bool, where: str) -> Attended:
        part = attention.attention(
            query,
            piece.keys,
            piece.values,
            causal=causal,
            kernel=self._kernel,
            out=self._work.attended[: query.shape[0]],
        )
        if self.poisoned:
            _refuse_nan(part.output, where, piece, piece.keys.shape[0])
        return part

    def _merged(self, queries: int) -> Attended:
        output, log_sum_exp = self._work.merged, self._work.merged_log_sum_exp
        if output is None or log_sum_exp is None:
            raise AssertionError("no buffers for a merge")
        return Attended(output[:queries], log_sum_exp[:queries])

    def _start_merge(self, part: Attended) -> None:
        merged = self._merged(part.output.shape[0])
        merged.output.copy_(part.output)
        merged.log_sum_exp.copy_(part.log_sum_exp)

    def _merge(self, part: Attended) -> None:
        merged = self._merged(part.output.shape[0])
        self._ops.merge_into(*merged, *part)


class ManyRows:
    """A step of one or more tokens, for the general kernels; see `LayerRooms`.

    Args:
        step: of the cache.
        attention: the kernels.
        rows: new tokens.
        request_id: for messages.
        watch: called before each layer.
        record: shown what is computed.
    """

    def __init__(
        self,
        step: Step,
        attention: Attention,
        *,
        rows: int,
        request_id: int,
        watch: Watch,
        record: Record | None,
    ) -> None:
        self.rows = rows
        self._step = step
        self._attention = attention
        self._request_id = request_id
        self._watch = watch
        self._record = record

    def room(self, layer: int) -> Room:
        """Return where new keys and values go; see `LayerRooms.room`."""
        self._watch(layer)
        return self._step.room(layer)

    def written(self, layer: int) -> None:
        """Pass it on; see `LayerRooms.written`."""
        if self._record is not None:
            new = self._step.new(layer)
            self._record("key", layer, new.keys)
            self._record("value", layer, new.values)
        self._step.written(layer)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attend to the history and to the new tokens; see `LayerRooms.attend`."""
        where = f"request {self._request_id}, layer {layer}"
        attended = self._attend(layer, query, where)
        if self._record is not None:
            self._record("query", layer, query)
            self._record("attention", layer, attended)
        return attended

    def _attend(self, layer: int, query: torch.Tensor, where: str) -> torch.Tensor:
        return self._attention.many(query, self._pieces(layer, query.shape[0]), where)

    def _pieces(self, layer: int, queries: int) -> Iterator[tuple[KVSpan, bool]]:
        """Yield what the queries read, in ascending order, and whether causally."""
        for span in self._step.history(layer):
            yield span, False
        if self.rows > 1:  # the spans of a single token end with itself
            yield self._step.new(layer), queries == self.rows


class SparseRows(ManyRows):
    """A step of several tokens, each of which reads the blocks that the policy chooses.

    Where dense attention is faster, the layer goes as in `ManyRows`.

    Args:
        step: of the cache.
        plan: of that step.
        start: position of the first new token.
        attention: the kernels for dense attention.
        sparse: the policy and the kernel for blocks.
        tally: counts what this request costs.
        request_id: the request's counter.
        watch: called before each layer.
        record: shown what is computed.
    """

    def __init__(
        self,
        step: SparseStep,
        plan: StepPlan,
        start: int,
        *,
        attention: Attention,
        sparse: Sparse,
        tally: Tally,
        request_id: int,
        watch: Watch,
        record: Record | None,
    ) -> None:
        super().__init__(
            step, attention, rows=plan.count, request_id=request_id, watch=watch, record=record
        )
        self._sparse_step = step
        self._sparse = sparse
        self._tally = tally
        self._place = Place(start, plan.count, start + plan.count)
        self._reading_layers = plan.reading_layers
        self._known: dict[int, Chosen | None] = {}
        self._load_ahead(0)

    def _load_ahead(self, layer: int) -> None:
        """Start to load the keys of a layer that will be read."""
        if layer < self._reading_layers:
            known = self._known[layer] = self._sparse.known(layer, self._place)
            self._sparse_step.load_ahead(layer, None if known is None else known.read)

    def _attend(self, layer: int, query: torch.Tensor, where: str) -> torch.Tensor:
        """Attend to the blocks that the policy chooses, all keys where dense is faster."""
        chosen = self._choose(layer)
        self._tally.count(chosen)
        keys = self._sparse_step.layer_keys(layer, chosen.read)
        values = self._sparse_step.layer_values(layer, chosen.read)
        with self._tally.attending():
            if chosen.blocks is None:
                attended = super()._attend(layer, query, where)
            else:
                attended = self._sparse.attend(keys, values, chosen.blocks, self._place)
                attended = attended[self.rows - query.shape[0] : self.rows]
        if chosen.blocks is not None and self._attention.poisoned:
            _refuse_nan(attended, where, KVSpan(keys, values, 0, "chosen blocks"), self._place.keys)
        self._load_ahead(layer + 1)
        return attended

    def _choose(self, layer: int) -> Chosen:
        known = self._known.pop(layer)
        if known is not None and known.blocks is None:
            return known
        keys = self._sparse_step.layer_keys(layer, None if known is None else known.read)
        with self._tally.estimating():
            return self._sparse.choose(keys, layer, self._place, self._request_id, known)


class OneRow:
    """A step of one token, for the kernels made for it; see `LayerRooms`.

    Args:
        step: of the cache.
        attention: the kernels.
        scalars: the token's place.
        request_id: for messages.
        watch: called before each layer.
        record: shown what is computed.
    """

    rows = 1

    def __init__(
        self,
        step: OneStep,
        attention: Attention,
        scalars: Scalars,
        *,
        request_id: int,
        watch: Watch,
        record: Record | None,
    ) -> None:
        self._step = step
        self._attention = attention
        self._scalars = scalars
        self._request_id = request_id
        self._watch = watch
        self._record = record

    def room(self, layer: int) -> Room:
        """Return where the new key and value go; see `LayerRooms.room`."""
        self._watch(layer)
        return self._step.room(layer)

    def written(self, layer: int) -> None:
        """Pass it on; see `LayerRooms.written`."""
        if self._record is not None:
            room = self._step.room(layer)
            row = 0 if room.row is None else int(room.row)
            self._record("key", layer, room.keys[row : row + 1])
            self._record("value", layer, room.values[row : row + 1])
        self._step.written(layer)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attend to all keys; see `LayerRooms.attend`."""
        where = f"request {self._request_id}, layer {layer}"
        self._attention.splits(query, layer, self._step, self._scalars, where)
        attended = self._attention.combine(self._scalars)
        if self._record is not None:
            self._record("query", layer, query)
            self._record("attention", layer, attended)
        return attended


def _refuse_nan(output: torch.Tensor, where: str, piece: KVSpan, keys: int) -> None:
    if not bool(output.isfinite().all()):
        raise NonFiniteLogits(
            f"{where}, {piece.place}: NaN in the attention to tokens {piece.start} to "
            f"{piece.start + keys - 1}"
        )
