"""fwe: counts by the zeta distribution, worked out anew."""

import math
from collections import Counter
from collections.abc import Callable

import pytest

from ruler_bench.tasks import DataSpec, TaskSpec, generate

MakeSpec = Callable[..., DataSpec]


def coded(text: str) -> list[str]:
    return text.split(" coded words. ")[1].split("\nQuestion", maxsplit=1)[0].split()


@pytest.mark.parametrize("length", [600, 1600, 5000])
def test_counts_follow_the_zeta_distribution(spec: MakeSpec, length: int) -> None:
    data = spec("fwe", length)
    for sample in generate(data, 2):
        counts = Counter(coded(sample.input))
        ranked = [counts.pop("..."), *sorted(counts.values(), reverse=True)]
        # Some size gives these counts: that of the dots bounds it from both sides.
        zeta = math.pi**2 / 6
        sizes = range(math.floor(ranked[0] * zeta), math.ceil((ranked[0] + 1) * zeta) + 1)
        vocabulary = (length - 50) // 50
        expected = [
            [n for k in range(1, vocabulary + 1) if (n := math.floor(size / (k * k * zeta)))]
            for size in sizes
        ]
        assert ranked in expected
        assert [counts[word] for word in sample.outputs] == ranked[1:4]
        assert sample.length == data.tokenizer.count(sample.prompt) + 50 <= length


def test_words_are_drawn_anew_for_each_sample(spec: MakeSpec) -> None:
    first, second = (set(coded(sample.input)) for sample in generate(spec("fwe"), 2))
    assert first & second == {"..."}


def test_shape_and_number_of_words(spec: MakeSpec, changed_task: Callable[..., TaskSpec]) -> None:
    task = changed_task("fwe", coded_wordlen=3, vocab_size=5, alpha=1.5)
    words = set(coded(generate(spec(task, 2000), 1)[0].input))
    assert len(words) == 5
    assert {len(word) for word in words} == {3}


def test_a_vocabulary_of_every_word_there_is(
    spec: MakeSpec, changed_task: Callable[..., TaskSpec]
) -> None:
    """Words are drawn again until all differ."""
    sample = generate(spec(changed_task("fwe", coded_wordlen=1, vocab_size=26), 2000), 1)[0]
    assert len(set(sample.outputs)) == 3
