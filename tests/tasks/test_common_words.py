"""cwe: counted lists, and what happens where the words run out."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ruler_bench.errors import UsageError
from ruler_bench.folders import sources_dir
from ruler_bench.tasks import DataSpec, TaskSpec, generate, long_words
from ruler_bench.tasks.words import load_pool

MakeSpec = Callable[..., DataSpec]

BEYOND_POOL = 40_000
"""Tokens of a list of each word once that goes beyond the pool."""


def counted(text: str) -> Counter[str]:
    """Return how often each word of a numbered list stands, after a check of its numbers."""
    entries = re.findall(r"(\d+)\. (\S+)", text)
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    return Counter(word for _, word in entries)


@pytest.mark.parametrize(
    ("length", "example_counts", "counts"),
    [(4095, {3: 10, 1: 10}, (6, 1)), (4096, {10: 10, 3: 30}, (30, 3))],
)
def test_words_stand_as_often_as_they_should(
    spec: MakeSpec, length: int, example_counts: dict[int, int], counts: tuple[int, int]
) -> None:
    data = spec("cwe", length)
    for sample in generate(data, 2):
        example, text = (one.split("\nQuestion")[0] for one in sample.prompt.split("Below is")[1:])
        assert Counter(counted(example).values()) == example_counts
        words = counted(text)
        assert {word for word, count in words.items() if count == counts[0]} == set(sample.outputs)
        assert set(words.values()) == set(counts)
        assert len(sample.outputs) == 10
        assert sample.length == data.tokenizer.count(sample.prompt) + 120 <= length


def test_the_whole_chat_stands_twice(spec: MakeSpec) -> None:
    sample = generate(spec("cwe", 2000, template="meta-llama3"), 1)[0]
    assert sample.prompt.count("<|begin_of_text|>") == 2
    first = sample.prompt.split("\n<|begin_of_text|>")[0]
    context, answer = first.split("\nQuestion")[0], first.split(" in the list are:")[1]
    common = {word for word, count in counted(context).items() if count == 3}
    assert set(counted(answer)) == common
    assert len(common) == 10


def test_the_pool_is_that_of_wonderwords() -> None:
    assert len(load_pool()) == 8169


@pytest.fixture
def once(changed_task: Callable[..., TaskSpec]) -> TaskSpec:
    """Lists in which every word stands once, so that a short prompt takes many."""
    return changed_task("cwe", freq_cw=1, freq_ucw=1)


@pytest.fixture
def long_list(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A longer list of made-up words in the place of RULER's."""
    content = json.dumps({str(one): f"word{one:05d}" for one in range(20_000)}).encode()
    monkeypatch.setattr(long_words, "SHA256", hashlib.sha256(content).hexdigest())
    path = sources_dir() / long_words.FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    long_words.load_long_words.cache_clear()
    yield path
    path.unlink()
    long_words.load_long_words.cache_clear()


def test_without_the_long_list_the_message_tells_where_it_is_needed(
    spec: MakeSpec, once: TaskSpec
) -> None:
    with pytest.raises(UsageError) as caught:
        generate(spec(once, BEYOND_POOL), 1)
    message = str(caught.value)
    assert "\n" not in message
    assert "python scripts/fetch_data.py words" in message
    longest = int(re.search(r"up to length=(\d+) it is not needed", message)[1])
    assert 4096 < longest < BEYOND_POOL
    assert len(generate(spec(once, longest), 1)) == 1


def test_beyond_the_pool_the_long_list_serves(
    spec: MakeSpec, once: TaskSpec, long_list: Path
) -> None:
    """As in RULER, the whole list comes from the other words as soon as the pool is too small."""
    sample = generate(spec(once, BEYOND_POOL), 1)[0]
    text = sample.prompt.split("Below is")[2].split("\nQuestion")[0]
    assert len(counted(text)) > 8169
    assert all(re.fullmatch(r"word\d{5}", word) for word in counted(text))


def test_beyond_both_lists(spec: MakeSpec, once: TaskSpec, long_list: Path) -> None:
    with pytest.raises(UsageError, match="more than the 20000 there are"):
        generate(spec(once, 60_000), 1)


def test_another_list_is_refused(spec: MakeSpec, once: TaskSpec, long_list: Path) -> None:
    long_list.write_text('{"0": "other"}')
    with pytest.raises(UsageError, match=r"is not the list that RULER uses.*fetch_data"):
        generate(spec(once, BEYOND_POOL), 1)
