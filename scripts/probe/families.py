"""The kinds of question that training shows: the evaluation tasks, and how often each comes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NeedleFamily:
    """Questions of a needle task.

    Attributes:
        name: of the evaluation task.
        haystack: noise, essay or needle.
        keys, values: words, numbers or uuids.
        num_keys, num_values, num_queries: as the evaluation task has them.
        share: share of the training sequences.
    """

    name: str
    haystack: str
    keys: str
    values: str
    num_keys: int
    num_values: int
    num_queries: int
    share: float


@dataclass(frozen=True)
class ChainFamily:
    """Questions of variable tracking.

    Attributes:
        name: of the evaluation task.
        num_hops: assignments of a chain after its first, as the evaluation task has them.
        share: share of the training sequences.
    """

    name: str
    num_hops: int
    share: float


CHAIN_SHARE = 0.35
_REST = 1 - CHAIN_SHARE

NEEDLES = (
    NeedleFamily("niah_single_1", "noise", "words", "numbers", 1, 1, 1, 0.08 * _REST),
    NeedleFamily("niah_single_2", "essay", "words", "numbers", 1, 1, 1, 0.07 * _REST),
    NeedleFamily("niah_single_3", "essay", "words", "uuids", 1, 1, 1, 0.11 * _REST),
    NeedleFamily("niah_multikey_1", "essay", "words", "numbers", 4, 1, 1, 0.07 * _REST),
    NeedleFamily("niah_multikey_2", "needle", "words", "numbers", 1, 1, 1, 0.15 * _REST),
    NeedleFamily("niah_multikey_3", "needle", "uuids", "uuids", 1, 1, 1, 0.16 * _REST),
    NeedleFamily("niah_multivalue", "essay", "words", "numbers", 1, 4, 1, 0.26 * _REST),
    NeedleFamily("niah_multiquery", "essay", "words", "numbers", 4, 1, 4, 0.10 * _REST),
)
CHAINS = ChainFamily("vt", 4, CHAIN_SHARE)

FAMILIES: tuple[NeedleFamily | ChainFamily, ...] = (*NEEDLES, CHAINS)
