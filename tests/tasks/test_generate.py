"""Lengths without room: an end, and a number that is true."""

import dataclasses
import re
from collections.abc import Callable

import pytest

from ruler_bench.errors import UsageError
from ruler_bench.tasks import DataSpec, TaskSpec, fit, generate
from ruler_bench.tokenizer import FolderTokenizer

MakeSpec = Callable[..., DataSpec]


def least_length(error: BaseException) -> int:
    return int(re.search(r" is (\d+) \(", str(error))[1])


@pytest.mark.parametrize(
    ("task", "length", "num_samples"),
    [
        ("niah_single_1", 1, 20),
        ("niah_single_1", 130, 3),
        ("niah_single_2", 256, 5),
        ("niah_multikey_2", 200, 20),
        ("niah_multikey_3", 256, 10),
        ("niah_multiquery", 700, 5),
    ],
)
def test_the_least_length_named_works_and_one_less_does_not(
    spec: MakeSpec, smollm2: FolderTokenizer, task: str, length: int, num_samples: int
) -> None:
    data = spec(task, length, seed=3, tokenizer=smollm2)
    with pytest.raises(UsageError, match=rf"length={length} .*{task}") as caught:
        generate(data, num_samples)
    least = least_length(caught.value)
    samples = generate(dataclasses.replace(data, length=least), num_samples)
    assert len(samples) == num_samples
    assert all(sample.length <= least for sample in samples)
    with pytest.raises(UsageError):
        generate(dataclasses.replace(data, length=least - 1), num_samples)


def test_the_message_is_one_line(spec: MakeSpec) -> None:
    with pytest.raises(UsageError) as caught:
        generate(spec(length=128), 1)
    assert "\n" not in str(caught.value)
    assert "tokens" in str(caught.value) or "length" in str(caught.value)


def test_a_tight_length_is_drawn_again_until_it_fits(
    spec: MakeSpec, smollm2: FolderTokenizer
) -> None:
    """At the least length some draws do not fit; the samples still come, as the reference's do."""
    with pytest.raises(UsageError) as caught:
        generate(spec("niah_multikey_3", 300, tokenizer=smollm2), 3)
    tight = spec("niah_multikey_3", least_length(caught.value), tokenizer=smollm2)
    assert len(generate(tight, 3)) == 3
    assert fit.MAX_REDRAWS >= 100


def test_a_haystack_without_places_for_its_needles_ends(
    spec: MakeSpec, task: Callable[[str], TaskSpec]
) -> None:
    crowded = dataclasses.replace(task("niah_single_1"), name="mine", num_keys=5)
    with pytest.raises(UsageError, match="least length"):
        generate(spec(crowded, 150), 2)


def test_progress_tells_what_is_going_on(spec: MakeSpec) -> None:
    lines: list[str] = []
    generate(spec(), 2, lines.append)
    assert len(lines) == 3
    assert "1600" in lines[0]
    assert lines[-1].endswith("sample 2 of 2")
