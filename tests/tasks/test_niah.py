"""The needle tasks: what the text must look like."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ruler_bench.tasks import DataSpec, generate
from ruler_bench.tasks.niah import DEPTHS, Niah
from ruler_bench.tasks.spec import NiahTask
from ruler_bench.tasks.wording import MODEL_TEMPLATES
from ruler_bench.tokenizer import FolderTokenizer

CONFIGS = Path(__file__).parent.parent.parent / "configs" / "task"

MakeSpec = Callable[..., DataSpec]

TASKS = sorted(path.stem for path in CONFIGS.glob("niah_*.yaml"))


def test_depths_are_those_of_the_reference() -> None:
    """As printed by numpy: round(linspace(0, 100, 40))."""
    assert (
        tuple(
            int(one)
            for one in [
                "0",
                "3",
                "5",
                "8",
                "10",
                "13",
                "15",
                "18",
                "21",
                "23",
                "26",
                "28",
                "31",
                "33",
                "36",
                "38",
                "41",
                "44",
                "46",
                "49",
                "51",
                "54",
                "56",
                "59",
                "62",
                "64",
                "67",
                "69",
                "72",
                "74",
                "77",
                "79",
                "82",
                "85",
                "87",
                "90",
                "92",
                "95",
                "97",
                "100",
            ]
        )
        == DEPTHS
    )


@pytest.mark.parametrize("name", TASKS)
def test_sample_says_where_its_answer_is(spec: MakeSpec, name: str) -> None:
    data = spec(name, 1700)
    for ordinal, sample in enumerate(generate(data, 6)):
        context = sample.input.split("\n", 1)[1].rsplit("\nWhat", 1)[0]
        key = sample.input.rsplit(" for ", 1)[1].split(" mentioned")[0].split(", ")[0]
        needle = context.index(f" {key} is: {sample.outputs[0]}.")
        start = context.rindex("One of the special magic", 0, needle)
        assert sample.ordinal == ordinal
        assert sample.task == name
        assert sample.depth == pytest.approx(start / len(context), abs=1e-12)
        assert sample.answer_offset == sample.input.index(sample.outputs[0])
        before = sample.input[: sample.answer_offset]
        assert sample.answer_token_position == data.tokenizer.count(before)
        assert sample.length == data.tokenizer.count(sample.prompt) + 128 <= 1700
        assert sample.tokens_to_generate == 128


@pytest.mark.parametrize("name", TASKS)
def test_more_samples_leave_the_earlier_ones(spec: MakeSpec, name: str) -> None:
    data = spec(name, 1700, seed=7)
    assert generate(data, 5)[:2] == generate(data, 2)


def test_seed_length_and_template_matter(spec: MakeSpec) -> None:
    variants = [spec(), spec(seed=43), spec(length=1700), spec(template="RWKV")]
    first = [generate(variant, 3) for variant in variants]
    assert all(one != other for i, one in enumerate(first) for other in first[:i])


def test_counting_in_pieces_or_whole_gives_the_same_samples(
    spec: MakeSpec, make_word_tokenizer: Callable[..., object]
) -> None:
    whole = make_word_tokenizer(cuts=None)
    for name in ("niah_single_1", "niah_multikey_1", "niah_multikey_3"):
        assert generate(spec(name), 4) == generate(spec(name, tokenizer=whole), 4)


@pytest.mark.parametrize("name", sorted(MODEL_TEMPLATES))
def test_one_value_is_asked_for_in_the_singular(spec: MakeSpec, name: str) -> None:
    before, _, after = MODEL_TEMPLATES[name].partition("{task_template}")
    sample = generate(spec("niah_single_3", template=name), 1)[0]
    for plural, single in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        before, after = before.replace(plural, single), after.replace(plural, single)
    assert sample.input.startswith(before + "A special magic uuid is hidden within")
    assert sample.input.endswith(" mentioned in the provided text?" + after)
    assert sample.answer_prefix.startswith(" The special magic uuid for ")
    assert sample.answer_prefix.endswith(" mentioned in the provided text is")


def test_lwm_chat_is_garbled_as_the_reference_garbles_it(spec: MakeSpec) -> None:
    one = generate(spec("niah_single_1", template="lwm-chat"), 1)[0]
    several = generate(spec("niah_multiquery", template="lwm-chat", length=1700), 1)[0]
    assert one.input.startswith("You is a helpful assistant. USER: A special")
    assert several.input.startswith("You are a helpful assistant. USER: Some special")


def test_several_values_are_asked_for_in_the_plural(spec: MakeSpec) -> None:
    sample = generate(spec("niah_multiquery", length=1700), 1)[0]
    first, second, third, last = sample.input.rsplit("magic numbers for ", 1)[1].split(", ")
    assert last.startswith("and ")
    assert len(sample.outputs) == 4
    assert sample.answer_prefix == (
        f" The special magic numbers for {first}, {second}, {third}, {last.split(' mentioned')[0]}"
        " mentioned in the provided text are"
    )


def test_chat_template_stays_as_it_is(spec: MakeSpec) -> None:
    sample = generate(spec(template="chat"), 1)[0]
    assert sample.input.startswith("<user> there are some {answers}\nA special magic number is")
    assert sample.input.endswith(" mentioned in the provided text?<assistant>\n")
    assert sample.answer_prefix.startswith(" The special magic number for ")


def test_chat_template_of_a_real_tokenizer(spec: MakeSpec, smollm2: FolderTokenizer) -> None:
    sample = generate(spec(template="chat", tokenizer=smollm2), 1)[0]
    assert "<|im_start|>user\nA special magic number" in sample.input
    assert sample.input.endswith("text?<|im_end|>\n<|im_start|>assistant\n")


def test_essay_places_at_both_ends_and_together_leave_spaces(spec: MakeSpec) -> None:
    """The reference joins empty stretches too: a space at the start, at the end, or a double."""
    one = [sample.input for sample in generate(spec("niah_single_2", 1300), 200)]
    assert any("afterwards.\n One of" in text for text in one)
    assert any(". \nWhat" in text for text in one)
    many = [sample.input for sample in generate(spec("niah_multikey_1", 1400), 40)]
    assert any(".  One of the special" in text for text in many)


def test_keys_come_from_one_stream(spec: MakeSpec) -> None:
    """The first draw begins with the key that the seed's stream begins with."""
    data = spec("niah_multikey_3", seed=9)
    niah = Niah(data, data.task)
    text = "".join(niah.probe(5).parts)
    stream = random.Random(9)
    key = f"{stream.getrandbits(128):032x}"
    assert key[:8] in text
    assert text.count("One of the special magic uuids") == 6


def test_a_line_needle_is_never_last(spec: MakeSpec) -> None:
    for sample in generate(spec("niah_single_1", 500), 50):
        assert sample.input.rsplit("\n", 1)[0].endswith("There and back again.")


def test_custom_task_with_several_needles_among_lines(spec: MakeSpec) -> None:
    task = NiahTask(
        name="mine",
        kind="niah",
        haystack="noise",
        key_type="numbers",
        value_type="words",
        num_keys=2,
        num_values=2,
        num_queries=2,
        tokens_to_generate=16,
        metric="all",
    )
    sample = generate(spec(task, 600), 1)[0]
    assert len(sample.outputs) == 4
    assert sample.input.count("One of the special magic words for ") == 4
    assert all(f" is: {word}." in sample.input for word in sample.outputs)
