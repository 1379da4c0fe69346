"""Attention to chosen blocks and the choice itself, each alone: right first, then fast.

What is measured are the engine's own kernel for blocks, its dense kernels and its policy. Before
anything is timed, a slice of its rows is compared with plain float64; what is wrong is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from backends.engine.attention import Kernel, attention
from backends.engine.block_attention import BlockKernel
from backends.engine.policy import BLOCK_TOKENS, Model, Place, causal_blocks, make_policy
from scripts.bench.ceilings import Bench
from scripts.bench.sparse_kernel import make_kernel
from scripts.bench.structured import FirstLayer
from scripts.bench.timing import free_memory
from scripts.bench.work import causal_operations

CHECKED_BLOCKS = 3
"""Blocks of queries that are compared with float64: the first, one in the middle, the last."""
CHECKED_ROWS = 16
"""Of each of them, the last ones."""
LARGEST_ERROR = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 1e-3}
LARGEST_SHARE_UNLIKE = 0.02
"""Of the blocks that a policy keeps, how many may be others than in float64."""


def model_of(bench: Bench) -> Model:
    """Return what a policy may know of the shape."""
    shape = bench.shape
    return Model(shape.layers, shape.heads, shape.kv_heads, shape.head_dim)


def whole(tokens: int) -> Place:
    """Return the place of a whole prompt."""
    return Place(0, tokens, tokens)


def causal_count(tokens: int) -> int:
    """Return how many blocks of keys a prompt's blocks of queries may see, for one head."""
    blocks = whole(tokens).key_blocks
    return blocks * (blocks + 1) // 2


def random_blocks(bench: Bench, tokens: int, share: float) -> torch.Tensor:
    """Return random blocks and the diagonal, bool [heads, query_blocks, key_blocks].

    Each causal block beside the diagonal is kept with the same probability, so that `share` of
    all causal ones are kept on average; the diagonal alone where that is more.
    """
    place = whole(tokens)
    causal = causal_blocks(place, bench.device)
    others = causal_count(tokens) - place.query_blocks
    wanted = share * causal_count(tokens) - place.query_blocks
    chance = min(max(wanted / others, 0.0), 1.0) if others else 0.0
    shape = (bench.shape.heads, place.query_blocks, place.key_blocks)
    generator = torch.Generator(bench.device).manual_seed(round(1000 * share))
    kept = torch.rand(shape, device=bench.device, generator=generator) < chance
    diagonal = torch.eye(place.query_blocks, dtype=torch.bool, device=bench.device)
    return (kept & causal) | diagonal


class Alone:
    """Attention alone at one prompt length, on random queries, keys and values.

    The kernel for blocks is made once, when it is first needed.

    Args:
        bench: shape, device, number type, clock.
        tokens: of the prompt.
    """

    def __init__(self, bench: Bench, tokens: int) -> None:
        self._bench, self._tokens = bench, tokens
        self._held: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._kernel: BlockKernel | None = None

    def release(self) -> None:
        """Give the memory back."""
        self._held = self._kernel = None
        free_memory(self._bench.device, collect=True)

    @torch.inference_mode()
    def dense(self, kernel: Kernel) -> dict[str, Any]:
        """Measure causal attention by one of the engine's dense kernels."""
        query, key, value = (one[: self._tokens] for one in self._operands())

        def call() -> torch.Tensor:
            return attention(query, key, value, causal=True, kernel=kernel).output

        return self._figures(call, blocks=None)

    @torch.inference_mode()
    def sparse(self, share: float) -> dict[str, Any]:
        """Measure the engine's kernel for blocks on random ones."""
        query, key, value = self._operands()
        place = whole(self._tokens)
        blocks = random_blocks(self._bench, self._tokens, share)
        found: dict[str, Any] = {}
        if self._kernel is None:
            self._kernel = make_kernel(self._bench, query.shape[0])
            self._kernel.warm_up(query, key, value)
            found["compile_seconds"] = self._kernel.compile_seconds
        kernel = self._kernel
        causal = self._bench.shape.heads * causal_count(self._tokens)
        found["kept_share"] = int(blocks.sum()) / causal
        return found | self._figures(
            lambda: kernel.attend(query, key, value, blocks, place), blocks=blocks
        )

    def _operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, in whole blocks of rows; those beyond the end are 0.

        There is room for one more token, as in the engine that whole prompts are measured with,
        so that both run the same program.
        """
        if self._held is None:
            shape, rows = self._bench.shape, whole(self._tokens + 1).key_blocks * BLOCK_TOKENS
            sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
            made = [self._bench.random(rows, heads, shape.head_dim) for heads in sizes]
            for one in made:
                one[self._tokens :] = 0
            self._held = (made[0], made[1], made[2])
        return self._held

    def _figures(
        self, call: Callable[[], torch.Tensor], blocks: torch.Tensor | None
    ) -> dict[str, Any]:
        error = max(self._errors(call(), blocks))
        largest = LARGEST_ERROR[self._bench.dtype]
        if not error <= largest:
            raise AssertionError(
                f"relative error {error:.2g} against float64, above {largest:g}: not timed"
            )
        seconds = self._bench.stopwatch.seconds_per_call(call)
        return {
            "seconds": seconds,
            "largest_relative_error": error,
            # As if all blocks were computed, so that the rates of rows compare.
            "causal_operations_per_second": causal_operations(self._bench.shape, self._tokens)
            / seconds,
        }

    def _errors(self, output: torch.Tensor, blocks: torch.Tensor | None) -> Iterator[float]:
        """Yield the relative error of each slice of rows: of a row, over its largest number."""
        query, key, value = self._operands()
        for rows in checked_rows(self._tokens):
            of_block = None if blocks is None else blocks[:, rows.start // BLOCK_TOKENS]
            wanted = reference(query[rows], key, value, rows, of_block)
            difference = (output[rows].double() - wanted).abs().amax(-1)
            yield float((difference / wanted.abs().amax(-1)).max())


def checked_query_blocks(tokens: int) -> list[int]:
    """Return the blocks of queries that are compared with float64."""
    last = whole(tokens).query_blocks - 1
    return sorted({round(last * part / (CHECKED_BLOCKS - 1)) for part in range(CHECKED_BLOCKS)})


def checked_rows(tokens: int) -> list[slice]:
    """Return the rows of these blocks that are compared."""
    stops = [min((one + 1) * BLOCK_TOKENS, tokens) for one in checked_query_blocks(tokens)]
    return [
        slice(max(stop - CHECKED_ROWS, (stop - 1) // BLOCK_TOKENS * BLOCK_TOKENS), stop)
        for stop in stops
    ]


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: slice,
    blocks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend in float64, a key head at a time.

    Args:
        query: [rows, heads, head_dim], at the positions `rows`, of one block of queries.
        key: [keys, kv_heads, head_dim], from position 0 on.
        value: like `key`.
        rows: positions.
        blocks: kept blocks of keys, bool [heads, key_blocks]; None is all.

    Returns:
        float64 [rows, heads, head_dim].
    """
    heads, head_dim = query.shape[1:]
    group = heads // key.shape[1]
    positions = torch.arange(rows.stop, device=query.device)
    seen = positions <= positions[rows][:, None]
    output = torch.empty(query.shape, dtype=torch.float64, device=query.device)
    for kv_head in range(key.shape[1]):
        keys, values = (one[: rows.stop, kv_head].double() for one in (key, value))
        of_group = slice(kv_head * group, (kv_head + 1) * group)
        scores = query[:, of_group].double().transpose(0, 1) @ keys.T / math.sqrt(head_dim)
        scores.masked_fill_(~seen, -torch.inf)
        if blocks is not None:
            kept = blocks[of_group].repeat_interleave(BLOCK_TOKENS, -1)[:, : rows.stop]
            scores.masked_fill_(~kept[:, None], -torch.inf)
        output[:, of_group] = (scores.softmax(-1) @ values).transpose(0, 1)
    return output


# --- the estimate -------------------------------------------------------------------------------


def xattention(bench: Bench, stride: int, threshold: float) -> Any:
    """Return the policy, with its published rule."""
    settings = {"name": "xattention", "stride": stride, "threshold": threshold}
    return make_policy(settings, model_of(bench))


@torch.inference_mode()
def density(bench: Bench, layer: FirstLayer, stride: int, threshold: float) -> float:
    """Return the share of the causal blocks that XAttention keeps."""
    tokens = layer.key.shape[0]
    kept = xattention(bench, stride, threshold).select(layer.query, layer.key, 0, whole(tokens))
    if kept is None:
        return 1.0
    return int(kept.sum()) / (bench.shape.heads * causal_count(tokens))


@torch.inference_mode()
def estimation(bench: Bench, layer: FirstLayer, stride: int, threshold: float) -> dict[str, Any]:
    """Measure what XAttention takes to choose the blocks of one layer for a whole prompt."""
    policy, place = xattention(bench, stride, threshold), whole(layer.key.shape[0])
    kept = policy.select(layer.query, layer.key, 0, place)
    if kept is None:
        raise AssertionError("a threshold of 1 is dense; there is nothing to measure")
    unlike = unlike_share(kept, layer, stride, threshold)
    if not unlike <= LARGEST_SHARE_UNLIKE:
        raise AssertionError(f"{unlike:.1%} of the blocks are not those of float64: not timed")
    seconds = bench.stopwatch.seconds_per_call(
        lambda: policy.select(layer.query, layer.key, 0, place)
    )
    return {
        "seconds": seconds,
        "density": int(kept.sum()) / (bench.shape.heads * causal_count(place.keys)),
        "unlike_share": unlike,
    }


def unlike_share(kept: torch.Tensor, layer: FirstLayer, stride: int, threshold: float) -> float:
    """Return how many blocks of the checked rows are not as the rule has them in float64.

    Args:
        kept: bool [heads, query_blocks, key_blocks].
        layer: queries and keys.
        stride: of the rule.
        threshold: likewise.

    Returns:
        Those that are kept by one of the two alone, over those that float64 keeps.
    """
    unlike = total = 0
    for block in checked_query_blocks(layer.key.shape[0]):
        wanted = rule_in_float64(layer, block, stride, threshold)
        found = kept[:, block, : block + 1]
        unlike += int((found != wanted).sum())
        total += int(wanted.sum())
    return unlike / total


def rule_in_float64(layer: FirstLayer, block: int, stride: int, threshold: float) -> torch.Tensor:
    """Read XAttention's rule plainly for one block of queries; a block of zeros fills the end up.

    Returns:
        bool [heads, block + 1].
    """
    stop = (block + 1) * BLOCK_TOKENS
    heads, head_dim = layer.query.shape[1:]
    group = heads // layer.key.shape[1]
    kept = torch.zeros(heads, block + 1, dtype=torch.bool, device=layer.query.device)
    rows = _filled(layer.query[block * BLOCK_TOKENS : stop], BLOCK_TOKENS)
    cells = BLOCK_TOKENS // stride
    own = torch.arange(cells, device=rows.device) + block * cells
    hidden = torch.arange(stop // stride, device=rows.device) > own[:, None]
    real = own * stride < layer.query.shape[0]
    for head in range(heads):
        keys = _filled(layer.key[:stop, head // group], stop)
        columns = keys.view(-1, stride * head_dim)
        reversed_rows = rows[:, head].view(cells, stride, head_dim).flip(1)
        scores = reversed_rows.reshape(cells, -1) @ columns.T / (math.sqrt(head_dim) * stride)
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)[real]
        mass = shares.view(-1, block + 1, cells).sum((0, 2))
        kept[head] = _heaviest(mass, threshold)
    return kept


def _filled(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return rows in float64, with rows of zeros up to `count`."""
    filled = torch.zeros(count, *rows.shape[1:], dtype=torch.float64, device=rows.device)
    filled[: rows.shape[0]] = rows
    return filled


def _heaviest(mass: torch.Tensor, threshold: float) -> torch.Tensor:
    """Keep the first and the last, then the heaviest while those before hold less than asked."""
    masses: Sequence[float] = mass.tolist()
    last = len(masses) - 1
    kept = {0, last}
    held, wanted = sum(masses[one] for one in kept), threshold * sum(masses)
    others = sorted(range(1, last), key=lambda one: -masses[one])
    for one in others:
        if held >= wanted:
            break
        kept.add(one)
        held += masses[one]
    return torch.tensor([one in kept for one in range(len(masses))], device=mass.device)
