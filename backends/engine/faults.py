"""Seeded faults: what real engines got wrong, built into this one by name, to prove a detector.

`backend.fault=NAME` replaces one collaborator of the engine (`backends.engine.parts`) by one with
that fault, of `backends.engine.seeded`. Nothing else knows of it.

Kinds of fault, by where they come from:

    A  state of an earlier request that was not cleared
    B  stale keys, tables and prefix hits
    C  races of copies
    D  edges, positions, chunks
    F  cancelled requests
    G  static buffers of captured steps

A fault of kind A or B answers the first request of every life of an engine as a sound one does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil, lcm
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from backends.base import ConfigurationError
from backends.engine.parts import Parts
from backends.engine.policy import BLOCK_TOKENS, Place
from backends.engine.seeded import blocks, edges, patterns, races, requests
from backends.engine.settings import require_name

if TYPE_CHECKING:
    from backends.engine.plan import Blueprint

Kind = Literal["A", "B", "C", "D", "E", "F", "G", "H", "I"]
Verdict = Literal["leak", "race", "engine_fault"]

SHORT_TAIL_TOKENS = 8
"""A seven-digit answer has a few tokens more."""


ALWAYS_READ_BLOCKS = 2
"""The first block and a query's own: every policy reads these, whatever is in them."""


class Need(NamedTuple):
    """What an engine must be like for a fault to show.

    Attributes:
        words: what it needs, for a message.
        met: whether an engine is so.
    """

    words: str
    met: Callable[[Blueprint], bool]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        description: what goes wrong.
        source: a public bug that it stands for, repository#thread, or code, repository@commit.
        kind: its letter, see above.
        expected: the verdict that is right.
        settings: command-line overrides under which it shows.
        parts: the collaborators that are replaced, by their names in `Parts`.
        needs: what it cannot show without.
        arm: the arm that shows it, where the usual ones cannot.
    """

    description: str
    source: str
    kind: Kind
    expected: Verdict
    settings: list[str]
    parts: Mapping[str, Any]
    needs: tuple[Need, ...] = ()
    arm: str | None = None


def check(name: str, blueprint: Blueprint) -> None:
    """Check that a fault is known, and can show in this engine.

    Raises:
        ConfigurationError: it is unknown (the nearest is named), or cannot show (settings that
            show it are named).
    """
    require_name("backend.fault", name, FAULTS)
    fault = FAULTS[name]
    for need in fault.needs:
        if not need.met(blueprint):
            raise ConfigurationError(
                f"backend.fault={name} cannot show under these settings, it needs {need.words}: "
                f"use {' '.join(fault.settings)}."
            )


def apply(name: str, parts: Parts) -> Parts:
    """Return the parts with those of a fault in place of the sound ones."""
    return replace(parts, **FAULTS[name].parts)


def _offloads(blueprint: Blueprint) -> bool:
    return blueprint.geometry is not None and not blueprint.resident_tokens


def _streams(blueprint: Blueprint) -> bool:
    geometry = blueprint.geometry
    if geometry is None:
        return False
    context_blocks = ceil(geometry.context_tokens / geometry.block_tokens)
    return blueprint.shape.layers * context_blocks > geometry.slots


def _begins_blocks(blueprint: Blueprint) -> bool:
    geometry = blueprint.geometry
    return geometry is not None and blueprint.chunk_tokens % geometry.block_tokens != 0


def _fills_blocks(blueprint: Blueprint) -> bool:
    geometry = blueprint.geometry
    if geometry is None:
        return False
    step = lcm(blueprint.chunk_tokens, geometry.block_tokens)
    return step % blueprint.attend_tokens == 0 and step < blueprint.context_tokens


def _reads_spans(blueprint: Blueprint) -> bool:
    return not blueprint.policy.sparse


def _ever_reads_spans(blueprint: Blueprint) -> bool:
    return not blueprint.policy.sparse or not blueprint.decodes_by_splits


def _merges(blueprint: Blueprint) -> bool:
    if not blueprint.policy.sparse:
        return blueprint.merges
    # Sparse prefill merges nothing; a step of one token does where its spans are cut.
    return not blueprint.decodes_by_splits and blueprint.attend_tokens < blueprint.context_tokens


def _looks(blueprint: Blueprint) -> bool:
    """Say whether what is kept depends on queries and keys, in some layer, and may differ."""
    policy, shape = blueprint.policy, blueprint.shape
    if not policy.sparse or not policy.reads_keys:
        return False
    if blueprint.context_tokens <= ALWAYS_READ_BLOCKS * BLOCK_TOKENS:
        return False
    query = torch.zeros(2, shape.heads, shape.head_dim)
    keys = torch.zeros(2, shape.kv_heads, shape.head_dim)
    found = (policy.select(query, keys, layer, Place(0, 2, 2)) for layer in range(shape.layers))
    return any(blocks is not None for blocks in found)


OFFLOAD = Need("every request's keys and values in CPU memory", _offloads)
STREAMING = Need("more blocks than slots", _streams)
CHUNKS = Need("prompts of several chunks", lambda drawn: drawn.chunk_tokens < drawn.context_tokens)
MERGES = Need("attention in several pieces", _merges)
SPANS = Need("prefill that reads spans, as with backend/policy=full", _reads_spans)
SPANS_EVER = Need("steps that read spans, as with backend/policy=full", _ever_reads_spans)
LOOKS = Need(
    "a policy that leaves out blocks by queries and keys, and prompts of more than "
    f"{ALWAYS_READ_BLOCKS * BLOCK_TOKENS} tokens",
    _looks,
)
BLOCKS = Need(
    "several blocks a request",
    lambda drawn: drawn.geometry is not None and drawn.geometry.blocks > 1,
)
PREFIXES = Need(
    "a prefix cache", lambda drawn: drawn.geometry is not None and drawn.geometry.prefix_cache
)
NO_PREFIXES = Need(
    "no prefix cache",
    lambda drawn: drawn.geometry is not None and not drawn.geometry.prefix_cache,
)
STAGES = Need(
    "stages beside the slots",
    lambda drawn: drawn.geometry is not None and not drawn.geometry.stages_are_slots,
)
BEGUN_BLOCKS = Need("chunks that end within a block", _begins_blocks)
FILLED_BLOCKS = Need("chunks that end where a block and a span end", _fills_blocks)
GENERAL_DECODE = Need(
    "decode by the general kernels, as with attend_tokens that are no multiple of 256",
    lambda drawn: not drawn.decodes_by_splits,
)
SHORT_TAIL = Need(
    f"blocks of at most {SHORT_TAIL_TOKENS} tokens, so that an answer fills the tail",
    lambda drawn: drawn.geometry is not None and drawn.geometry.tail_tokens <= SHORT_TAIL_TOKENS,
)

TWO_SLOTS = ["backend=offload", "backend.num_gpu_blocks=2"]
SMALL_BLOCKS = [
    "backend=offload",
    "backend.kvcache_block_size=6",
    "backend.attend_tokens=500",
    "backend.num_gpu_blocks=88",
]

FAULTS: Mapping[str, Fault] = {
    "cpu_kv_read_past_length": Fault(
        "Blocks in CPU memory that earlier requests filled are read past the end of the chunk.",
        "GeeeekExplorer/nano-vllm#213",
        "A",
        "leak",
        TWO_SLOTS,
        {"offload_cache": requests.ReadsPastLength},
        (OFFLOAD, CHUNKS, BLOCKS, SPANS),
    ),
    "decode_buffer_kept": Fault(
        "The buffer of new tokens still counts the rows of the last answer.",
        "vllm-project/vllm#29436",
        "A",
        "leak",
        ["backend=offload"],
        {"offload_cache": requests.KeepsDecodeRows},
        (OFFLOAD,),
    ),
    "tracked_by_id": Fault(
        "Where an answer starts is kept in a dictionary by id() of the request, and never removed.",
        "vllm-project/vllm#42019",
        "A",
        "leak",
        ["backend=offload"],
        {"offload_cache": requests.TracksById},
        (OFFLOAD,),
    ),
    "stale_block_table": Fault(
        "Freed blocks are handed out again while loads still go by an earlier request's table.",
        "GeeeekExplorer/nano-vllm#163",
        "B",
        "leak",
        ["backend=offload"],
        {"offload_cache": blocks.KeepsTable},
        (OFFLOAD, BLOCKS),
    ),
    "truncated_prefix_hash": Fault(
        "A prefix is matched by a hash of the first tokens of each block, and not confirmed.",
        "waybarrios/vllm-mlx#444",
        "B",
        "leak",
        [
            "backend=offload",
            "backend.prefix_cache=true",
            "backend.prefix_cache_tokens=8192",
            "backend.chunk_tokens=512",
        ],
        {"offload_cache": blocks.MatchesByHash},
        (OFFLOAD, PREFIXES),
    ),
    "double_free_after_cancel": Fault(
        "A cancelled request frees its blocks twice, so that a later one is given a block twice.",
        "sgl-project/sglang#23392",
        "F",
        "leak",
        ["backend=offload"],
        {"offload_cache": blocks.FreesTwice},
        (OFFLOAD, BLOCKS, NO_PREFIXES),
        arm="cancel",
    ),
    "slot_loaded_while_read": Fault(
        "A slot is loaded anew before its reader is done.",
        "vllm-project/vllm#47282",
        "C",
        "race",
        TWO_SLOTS,
        {"offload_cache": races.LoadsBeforeRead},
        (OFFLOAD, STREAMING),
    ),
    "slot_read_before_load": Fault(
        "A slot is read before its load is done.",
        "LMCache/LMCache#4385",
        "C",
        "race",
        TWO_SLOTS,
        {"offload_cache": races.ReadsBeforeLoad},
        (OFFLOAD,),
    ),
    "download_read_early": Fault(
        "A block is loaded before the copy that brings it down is done.",
        "vllm-project/vllm#45704",
        "C",
        "race",
        TWO_SLOTS,
        {"offload_cache": races.LoadsBeforeDownload},
        (OFFLOAD, STAGES),
    ),
    "partial_block_copied_whole": Fault(
        "A chunk that begins within a block is copied over the whole block.",
        "vllm-project/vllm#36580",
        "D",
        "engine_fault",
        ["backend=offload", "backend.chunk_tokens=384"],
        {"offload_cache": edges.CopiesWholeBlocks},
        (OFFLOAD, CHUNKS, BEGUN_BLOCKS),
    ),
    "positions_restart_each_chunk": Fault(
        "Positions are counted from 0 in every chunk of a prompt.",
        "huggingface/transformers#43082",
        "D",
        "engine_fault",
        ["backend=offload"],
        {"decoder": edges.RestartsPositions},
        (CHUNKS,),
    ),
    "block_dropped_at_exact_multiple": Fault(
        "A block that is exactly full when a chunk ends is left out of the history.",
        "vllm-project/vllm#7380",
        "D",
        "engine_fault",
        ["backend=offload"],
        {"offload_cache": edges.DropsFullBlocks},
        (OFFLOAD, CHUNKS, FILLED_BLOCKS, SPANS_EVER),
    ),
    "accumulator_not_rescaled": Fault(
        "Partial results of attention are merged without rescaling the earlier ones.",
        "sgl-project/sglang#40903",
        "D",
        "engine_fault",
        ["backend=offload"],
        {"attention": edges.KeepsOldScale},
        (MERGES,),
    ),
    "ring_overflow_at_last_token": Fault(
        "The ring of new tokens looks empty to the token that fills it, which sees none of them.",
        "huggingface/transformers#37574",
        "D",
        "engine_fault",
        SMALL_BLOCKS,
        {"offload_cache": edges.EmptyWhenFull},
        (OFFLOAD, SHORT_TAIL, MERGES, GENERAL_DECODE),
    ),
    "stale_decode_input": Fault(
        "The first step of an answer runs before its static input is filled.",
        "GeeeekExplorer/nano-vllm#175",
        "G",
        "leak",
        ["backend=offload"],
        {"token_input": requests.KeepsInput},
    ),
    "block_lost_each_request": Fault(
        "Each request gives back a block too few; when they run out, one serves several times.",
        "vllm-project/vllm#37076",
        "A",
        "leak",
        ["backend=offload", "backend.max_model_len=16384"],
        {"offload_cache": blocks.LosesBlocks},
        (OFFLOAD, BLOCKS, NO_PREFIXES),
        arm="aged",
    ),
    "pattern_of_the_first_prompt": Fault(
        "The blocks that the first prompt read are kept, and every later prompt reads them.",
        "microsoft/MInference@fb56c91",
        "A",
        "leak",
        # On a GPU what keeps much goes dense; at this threshold, at any length, it does not.
        ["backend=xattn", "backend.policy.threshold=0.5"],
        {"selection": patterns.KeepsFirstPattern},
        (LOOKS,),
    ),
}
"""The faults by name."""
