"""Real prompts of the evaluation tasks as token ids, in one small file."""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Prompt:
    """One evaluation prompt.

    Attributes:
        task: its name.
        length: tokens of prompt and generation the sample was made for.
        tokens_to_generate: limit for the answer.
        tokens: the prompt, [prompt_tokens].
        outputs: reference answers.
    """

    task: str
    length: int
    tokens_to_generate: int
    tokens: npt.NDArray[np.int16]
    outputs: tuple[str, ...]


def save(path: Path, prompts: list[Prompt]) -> None:
    """Write prompts to one xz file: a JSON line about them, then their tokens in a row."""
    header = [
        [p.task, p.length, p.tokens_to_generate, len(p.tokens), list(p.outputs)] for p in prompts
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wb", preset=4) as file:
        file.write((json.dumps(header) + "\n").encode())
        for prompt in prompts:
            file.write(prompt.tokens.astype("<i2").tobytes())


def load(path: Path) -> list[Prompt]:
    """Read what `save` wrote."""
    with lzma.open(path, "rb") as file:
        header = json.loads(file.readline())
        return [
            Prompt(task, length, limit, np.frombuffer(file.read(2 * count), "<i2"), tuple(outputs))
            for task, length, limit, count, outputs in header
        ]
