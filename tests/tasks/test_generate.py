"""Lengths without room: an end, and a number that is true."""

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ruler_bench.errors import UsageError
from ruler_bench.tasks import DataSpec, TaskSpec, generate
from ruler_bench.tasks.draw import Draw
from ruler_bench.tasks.niah import Niah
from ruler_bench.tokenizer import FolderTokenizer, load_tokenizer

MakeSpec = Callable[..., DataSpec]

PROBE = Path(__file__).parent.parent.parent / "ruler_bench" / "assets" / "probe"


def least_length(error: BaseException) -> int:
    return int(re.search(r" is (\d+) \(", str(error))[1])


@pytest.mark.parametrize(
    "case",
    [
        ("niah_single_1", 1, 10),
        ("niah_single_1", 130, 3),
        ("niah_single_2", 256, 2),
        ("niah_multikey_2", 200, 2),
        ("niah_multikey_3", 256, 2),
        ("niah_multiquery", 700, 1),
        ("vt", 300, 3),
        ("cwe", 775, 1),
        ("fwe", 60, 3),
        ("qa_1", 200, 3),
        ("qa_2", 400, 3),
    ],
)
def test_the_least_length_named_works_and_one_less_does_not(
    spec: MakeSpec,
    smollm2: FolderTokenizer,
    qa_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[str, int, int],
) -> None:
    task, length, num_samples = case
    data = spec(task, length, seed=3, tokenizer=smollm2, qa_data=qa_data)
    with pytest.raises(UsageError, match=rf"length={length} .*{task}") as caught:
        generate(data, num_samples)
    least = least_length(caught.value)
    samples = generate(dataclasses.replace(data, length=least), num_samples)
    assert len(samples) == num_samples
    assert all(sample.length <= least for sample in samples)
    # What is named then does not matter, and takes as long to find.
    monkeypatch.setattr(sys.modules[generate.__module__], "_least_length", lambda *_: -1)
    with pytest.raises(UsageError, match="too small"):
        generate(dataclasses.replace(data, length=least - 1), num_samples)


def test_the_message_is_one_line(spec: MakeSpec) -> None:
    with pytest.raises(UsageError) as caught:
        generate(spec(length=128), 1)
    assert "\n" not in str(caught.value)
    assert "tokens" in str(caught.value) or "length" in str(caught.value)


def test_a_tight_length_is_drawn_again_until_it_fits(
    spec: MakeSpec, smollm2: FolderTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the least length some draws do not fit; the samples still come, as the reference's do."""
    drawn: list[Draw] = []
    draw = Niah.draw

    def noted(niah: Niah, size: int, ordinal: int) -> Draw:
        drawn.append(draw(niah, size, ordinal))
        return drawn[-1]

    monkeypatch.setattr(Niah, "draw", noted)
    assert len(generate(spec("niah_multikey_3", 711, seed=3, tokenizer=smollm2), 2)) == 2
    assert len(drawn) > 10


def test_hundreds_of_draws_that_miss_by_a_little(spec: MakeSpec) -> None:
    """The reference needs up to 924 draws for one of these."""
    probe = load_tokenizer(str(PROBE))
    samples = generate(spec("cwe", 922, tokenizer=probe), 5)
    assert [sample.length for sample in samples] == [906, 917, 915, 921, 909]


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


OTHERS = ("vt", "cwe", "fwe", "qa_1", "qa_2")


@pytest.mark.parametrize("name", OTHERS)
def test_more_samples_leave_the_earlier_ones(spec: MakeSpec, qa_data: Path, name: str) -> None:
    data = spec(name, 2000, seed=7, qa_data=qa_data)
    assert generate(data, 5)[:2] == generate(data, 2)


@pytest.mark.parametrize("name", OTHERS)
def test_seed_length_and_template_matter(spec: MakeSpec, qa_data: Path, name: str) -> None:
    variants = [{}, {"seed": 43}, {"length": 2500}, {"template": "RWKV"}, {"template": "chat"}]
    first = [
        generate(spec(name, qa_data=qa_data, **{"length": 2000, **one}), 2) for one in variants
    ]
    assert all(one != other for i, one in enumerate(first) for other in first[:i])


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("template", ["base", "vicuna-chat"])
def test_counting_in_pieces_or_whole_gives_the_same_samples(
    spec: MakeSpec,
    qa_data: Path,
    make_word_tokenizer: Callable[..., object],
    name: str,
    template: str,
) -> None:
    whole = make_word_tokenizer(cuts=None)
    pieces = generate(spec(name, 2000, template=template, qa_data=qa_data), 3)
    assert pieces == generate(
        spec(name, 2000, template=template, tokenizer=whole, qa_data=qa_data), 3
    )


@pytest.mark.parametrize("name", OTHERS)
def test_every_sample_has_its_length(
    spec: MakeSpec, smollm2: FolderTokenizer, qa_data: Path, name: str
) -> None:
    """The pieces add up to what the tokenizer makes of the whole prompt."""
    data = spec(name, 1500, seed=5, template="Phi3", tokenizer=smollm2, qa_data=qa_data)
    for sample in generate(data, 4):
        tokens = len(smollm2.encode_prompt(sample.prompt)) - smollm2.adds_bos
        assert sample.length == tokens + sample.tokens_to_generate <= 1500


@pytest.mark.parametrize("name", OTHERS)
def test_templates_with_braces_stay_as_they_are(spec: MakeSpec, qa_data: Path, name: str) -> None:
    sample = generate(spec(name, 2000, template="chat", qa_data=qa_data), 1)[0]
    assert "<user> there are some {answers}\n" in sample.input
    assert sample.input.endswith("<assistant>\n")
