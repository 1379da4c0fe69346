"""The pieces training sequences are made of, tokenised once: words, names, essays, wording.

A piece ends where the pre-tokenizer splits, so pieces laid side by side are the tokens of the
joined text. Everything is kept in one file, so that the machine that trains needs neither the
essays nor a sentence splitter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int16]
Offsets = npt.NDArray[np.int32]

HEX_DIGITS = "0123456789abcdef"


@dataclass(frozen=True)
class Ragged:
    """Many short token sequences in one array.

    Attributes:
        tokens: all of them in a row, [total_tokens].
        starts: where each one begins, and where the last one ends, [count + 1].
    """

    tokens: Tokens
    starts: Offsets

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> Ragged:
        """Lay sequences of token ids side by side."""
        lengths = [len(sequence) for sequence in sequences]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        flat = [token for sequence in sequences for token in sequence]
        return cls(np.array(flat, np.int16), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Tokens:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def __iter__(self) -> Iterator[Tokens]:
        return (self[index] for index in range(len(self)))


@dataclass(frozen=True)
class Corpus:
    """Tokenised pieces.

    Attributes:
        adjectives: each with a space before it.
        nouns: each with the hyphen that joins it to an adjective before it.
        names: of variables, five letters with a space before them, in alphabetical order.
        example_names: likewise, of the three letters that the worked example has.
        essay: the essays as one text, with a space before it, [essay_tokens].
        word_starts: where each word (its space) begins in `essay`, ascending.
        sentence_starts: where each sentence (its space) begins in `essay`, ascending.
        sentence_heads: the first word of each sentence without the space before it.
        sentence_head_tokens: how many tokens that word has with its space.
        noise: one unit of the noise haystack.
        characters: tokens of each of 0-9 and a-f, [16].
        spaced_characters: likewise with a space before; -1 for digits, whose space stands alone.
        wording: tokens of a piece of wording, by name.
        wrappers: names of the templates that wrap a question; the first is the plain one.
        end_of_text, pad: ids.
    """

    adjectives: Ragged
    nouns: Ragged
    names: Ragged
    example_names: Ragged
    essay: Tokens
    word_starts: Offsets
    sentence_starts: Offsets
    sentence_heads: Ragged
    sentence_head_tokens: Offsets
    noise: Tokens
    characters: Tokens
    spaced_characters: Tokens
    wording: Mapping[str, Tokens]
    wrappers: tuple[str, ...]
    end_of_text: int
    pad: int

    def save(self, path: Path) -> None:
        """Write everything to one compressed file."""
        arrays: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Ragged):
                arrays[f"{name}.tokens"], arrays[f"{name}.starts"] = value.tokens, value.starts
            elif isinstance(value, Mapping):
                arrays |= {f"{name}/{key}": piece for key, piece in value.items()}
            else:
                arrays[name] = np.array(value)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}

        def ragged(name: str) -> Ragged:
            return Ragged(arrays[f"{name}.tokens"], arrays[f"{name}.starts"])

        return cls(
            adjectives=ragged("adjectives"),
            nouns=ragged("nouns"),
            names=ragged("names"),
            example_names=ragged("example_names"),
            essay=arrays["essay"],
            word_starts=arrays["word_starts"],
            sentence_starts=arrays["sentence_starts"],
            sentence_heads=ragged("sentence_heads"),
            sentence_head_tokens=arrays["sentence_head_tokens"],
            noise=arrays["noise"],
            characters=arrays["characters"],
            spaced_characters=arrays["spaced_characters"],
            wording={
                name.removeprefix("wording/"): piece
                for name, piece in arrays.items()
                if name.startswith("wording/")
            },
            wrappers=tuple(str(name) for name in arrays["wrappers"]),
            end_of_text=int(arrays["end_of_text"]),
            pad=int(arrays["pad"]),
        )
