"""Rows of training: tokens and what each one is for the loss, laid out and put into batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scripts.probe.corpus import Tokens
from scripts.probe.families import FAMILIES

Rng = np.random.Generator
Pieces = Sequence[Tokens]

REAL_ANSWER_WEIGHT = 4.0  # its one answer stands against many in a dense sequence
FEW_ANSWERS = 0.03  # answer tokens, as a share of all: a batch with less weighs less

# What a token is, for the loss: padding, anything else, or answer of family f (+ in a real one).
PADDING, ELSEWHERE, DENSE_ANSWER = 0, 1, 2
REAL_ANSWER = DENSE_ANSWER + len(FAMILIES)


class Row(NamedTuple):
    """One sequence, padded to its length.

    Attributes:
        tokens: [length].
        kinds: PADDING, ELSEWHERE, DENSE_ANSWER + family or REAL_ANSWER + family, [length].
    """

    tokens: Tokens
    kinds: npt.NDArray[np.uint8]


class Batch(NamedTuple):
    """Rows of one length, and the places where the loss is taken.

    Attributes:
        tokens: [rows, length].
        positions: flat places in `tokens` whose next token is predicted, [loss_positions].
        targets: that next token, [loss_positions].
        answer_weights: sum to 1 over the answers (less where they are few), 0 elsewhere,
            [loss_positions].
        other_weights: sum to 1 over the rest, 0 on answers and fillers, [loss_positions].
        families: family of the answer, or len(FAMILIES), [loss_positions].
    """

    tokens: npt.NDArray[np.int16]
    positions: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int16]
    answer_weights: npt.NDArray[np.float32]
    other_weights: npt.NDArray[np.float32]
    families: npt.NDArray[np.int8]


def size(pieces: Pieces) -> int:
    """Return the tokens of pieces laid side by side."""
    return sum(map(len, pieces))


def lay_out(length: int, pad: int, parts: Sequence[tuple[Pieces, int]]) -> Row:
    """Lay pieces, each group with what its tokens are, in a row padded to `length` tokens."""
    tokens = np.full(length, pad, np.int16)
    kinds = np.full(length, PADDING, np.uint8)
    place = 0
    for pieces, kind in parts:
        joined = np.concatenate(pieces)
        tokens[place : place + len(joined)] = joined
        kinds[place : place + len(joined)] = kind
        place += len(joined)
    return Row(tokens, kinds)


def with_loss_positions(
    rng: Rng, tokens: npt.NDArray[np.int16], kinds: npt.NDArray[np.uint8], loss_positions: int
) -> Batch:
    """Choose the places of the loss in rows.

    Args:
        rng: chooses.
        tokens: of the rows, [rows, length].
        kinds: of the tokens, [rows, length].
        loss_positions: how many places; answers come first, then a random choice of the rest.
    """
    next_tokens, next_kinds = np.zeros_like(tokens), np.zeros_like(kinds)  # 0 is PADDING
    next_tokens[:, :-1], next_kinds[:, :-1] = tokens[:, 1:], kinds[:, 1:]
    next_tokens, next_kinds = next_tokens.ravel(), next_kinds.ravel()
    answers = np.flatnonzero(next_kinds >= DENSE_ANSWER)
    others = np.flatnonzero(next_kinds == ELSEWHERE)
    answers = rng.permutation(answers)[: loss_positions * 7 // 8]
    num_others = min(loss_positions - len(answers), len(others))
    others = rng.choice(others, num_others, replace=False, shuffle=False)
    filler = np.zeros(loss_positions - len(answers) - num_others, np.int64)
    positions = np.concatenate([answers, others, filler])
    kinds_there = next_kinds[answers].astype(int)
    weights = np.where(kinds_there >= REAL_ANSWER, REAL_ANSWER_WEIGHT, 1.0)
    answer_weights = np.zeros(loss_positions, np.float32)
    # A batch of a few real sequences has few answers; they must not weigh like thousands.
    answer_weights[: len(answers)] = weights / max(weights.sum(), FEW_ANSWERS * tokens.size)
    other_weights = np.zeros(loss_positions, np.float32)
    other_weights[len(answers) : len(answers) + num_others] = 1 / max(num_others, 1)
    families = np.full(loss_positions, len(FAMILIES), np.int8)
    families[: len(answers)] = (kinds_there - DENSE_ANSWER) % len(FAMILIES)
    return Batch(
        tokens=tokens,
        positions=positions.astype(np.int32),
        targets=next_tokens[positions],
        answer_weights=answer_weights,
        other_weights=other_weights,
        families=families,
    )
