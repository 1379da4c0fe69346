"""The words of wonderwords 2.2.0: every "adjective-noun" as a key, and every word by itself.

RULER (niah.py) sorts the set of all products and draws from it. Here a rank leads straight to its
string, without the six million strings, so that `random.Random.choice` draws the same word from the
same state.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import overload

from ruler_bench.errors import UsageError

WONDERWORDS_VERSION = "2.2.0"
"""Other versions hold other nouns, so that the same seed gives other keys."""

POOL_LISTS = ("nounlist.txt", "adjectivelist.txt", "verblist.txt")


class AdjectiveNouns(Sequence[str]):
    """Every distinct `f"{adjective}-{noun}"`, in sorted order; acts as the list does.

    Adjectives sort by their name with the hyphen appended. One block of words follows another,
    except that "blue-eyed-..." falls among "blue-...": such adjectives form one family, whose
    words are merged.
    """

    def __init__(self, adjectives: Iterable[str], nouns: Iterable[str]) -> None:
        self._nouns = sorted(set(nouns))
        families: list[list[str]] = []
        for adjective in sorted({f"{adjective}-" for adjective in adjectives}):
            if families and adjective.startswith(families[-1][0]):
                families[-1].append(adjective)
            else:
                families.append([adjective])
        self._roots = [family[0] for family in families]
        self._merged = {
            index: sorted({prefix + noun for prefix in family for noun in self._nouns})
            for index, family in enumerate(families)
            if len(family) > 1
        }
        sizes = (len(self._merged.get(i, self._nouns)) for i in range(len(families)))
        self._starts = list(accumulate(sizes, initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, rank: int) -> str: ...
    @overload
    def __getitem__(self, rank: slice) -> list[str]: ...
    def __getitem__(self, rank: int | slice) -> str | list[str]:
        if isinstance(rank, slice):
            return [self[i] for i in range(*rank.indices(len(self)))]
        if rank < 0:
            rank += len(self)
        if not 0 <= rank < len(self):
            raise IndexError(f"rank {rank} of {len(self)} words")
        family = bisect_right(self._starts, rank) - 1
        offset = rank - self._starts[family]
        merged = self._merged.get(family)
        return merged[offset] if merged is not None else self._roots[family] + self._nouns[offset]


@cache
def load_words() -> AdjectiveNouns:
    """Return the ranked words of the installed wonderwords.

    Raises:
        UsageError: wonderwords is missing or is not version 2.2.0.
    """
    folder = _word_lists_folder()
    return AdjectiveNouns(
        adjectives=_read_lines(folder / "adjectivelist.txt"),
        nouns=_read_lines(folder / "nounlist.txt"),
    )


@cache
def load_pool() -> tuple[str, ...]:
    """Return every distinct noun, adjective and verb of the installed wonderwords, sorted.

    Raises:
        UsageError: wonderwords is missing or is not version 2.2.0.
    """
    folder = _word_lists_folder()
    return tuple(sorted({word for name in POOL_LISTS for word in _read_lines(folder / name)}))


def words_fingerprint() -> dict[str, str]:
    """Return the version and the content hash of the lists of adjectives and nouns."""
    return _fingerprint("adjectivelist.txt", "nounlist.txt")


def pool_fingerprint() -> dict[str, str]:
    """Return the version and the content hash of the lists of nouns, adjectives and verbs."""
    return _fingerprint(*POOL_LISTS)


@cache
def _fingerprint(*names: str) -> dict[str, str]:
    digest = hashlib.sha256()
    for name in names:
        digest.update((_word_lists_folder() / name).read_bytes())
    return {"wonderwords": WONDERWORDS_VERSION, "sha256": digest.hexdigest()}


def _word_lists_folder() -> Path:
    spec = importlib.util.find_spec("wonderwords")
    install = f"pip install wonderwords=={WONDERWORDS_VERSION}"
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"the word lists are missing: {install}")
    version = importlib.metadata.version("wonderwords")
    if version != WONDERWORDS_VERSION:
        raise UsageError(
            f"wonderwords {version} is installed; its lists give other keys than RULER's data,"
            f" only {WONDERWORDS_VERSION} is allowed: {install}"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "assets"


def _read_lines(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as lines:
        return [line.rstrip() for line in lines]
