"""Training sequences of variable tracking: the task's wording, and answers that follow from it."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer

from ruler_bench.tasks import DataSpec, generate
from ruler_bench.tokenizer import load_tokenizer
from scripts import train_probe
from scripts.probe import prepare
from scripts.probe.corpus import Corpus
from scripts.probe.families import CHAINS, FAMILIES
from scripts.probe.rows import DENSE_ANSWER, ELSEWHERE, PADDING, REAL_ANSWER, Row
from scripts.probe.sequences import SequenceBuilder

VT = FAMILIES.index(CHAINS)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
END_OF_TEXT = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(train_probe.ASSETS / "tokenizer.json"))


@pytest.fixture(scope="module")
def builder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> SequenceBuilder:
    path = tmp_path_factory.mktemp("corpus") / "corpus.npz"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "NAMES", 2**12)  # all of them take seconds
        prepare.make_corpus(tokenizer).save(path)
    return SequenceBuilder(Corpus.load(path))


def text_of(tokenizer: Tokenizer, row: Row) -> str:
    ids = row.tokens[row.kinds != PADDING].tolist()
    return tokenizer.decode(ids, skip_special_tokens=False)


def as_pattern(prompt: str) -> str:
    """Return a prompt with names by their order of appearance, and values likewise."""
    found: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return found.setdefault(match[0], f"<{len(match[0])} letters or digits, {len(found)}>")

    return re.sub(r"\b(?!VAR\b)(?:[A-Z]{5}|[A-Z]{3}|[0-9]{5})\b", number, prompt)


def without_noise(prompt: str) -> str:
    """Take out the haystack, whose places are drawn; only the order of the links is left."""
    return prompt.replace(f"{NOISE}\n", "")


@pytest.mark.parametrize("template", ["base", "meta-chat", "chat", "Phi3"])
def test_a_real_sequence_is_a_prompt_of_the_task(
    builder: SequenceBuilder, tokenizer: Tokenizer, template: str
) -> None:
    (task,) = (task for task in prepare.task_specs() if task.name == CHAINS.name)
    probe = load_tokenizer(str(train_probe.ASSETS))
    (sample,) = generate(DataSpec(task, 4096, 5, template, probe), 1)
    expected = as_pattern(sample.prompt)
    example_lines = expected.split("\n\nMemorize")[0].count(NOISE)
    rng = np.random.default_rng(1)
    for length in (1024, 4096):
        row = builder._chains.real_row(rng, length, template, REAL_ANSWER + VT)
        text = text_of(tokenizer, row)
        answer = tokenizer.decode(row.tokens[row.kinds == REAL_ANSWER + VT].tolist())
        prompt = text.removesuffix(END_OF_TEXT).removesuffix(answer)
        assert without_noise(as_pattern(prompt)) == without_noise(expected)
        example, question = prompt.split("\n\nMemorize")
        # What follows is what the example shows: a space before each name of the chain.
        chain = re.findall(r"VAR ([A-Z]{5}) =", question)
        assert answer == "".join(f" {name}" for name in chain)
        shown = re.findall(r"VAR ([A-Z]{3}) =", example)
        assert example.endswith(", they are: " + "".join(f" {name}" for name in shown))
        assert example.count(NOISE) == example_lines
        # RULER puts a link before a line that has none yet.
        lines = question.split("\nQuestion: ")[0].split("\n")[2:]
        assert lines[-1] == NOISE
        assert not any(NOISE not in (a, b) for a, b in pairwise(lines))
    real_lines = sample.prompt.count(NOISE)
    assert real_lines - 11 <= prompt.count(NOISE) <= real_lines + 11


def test_the_pieces_of_a_real_prompt_are_its_tokens(
    builder: SequenceBuilder, tokenizer: Tokenizer
) -> None:
    rng = np.random.default_rng(2)
    for template in builder.corpus.wrappers:
        row = builder._chains.real_row(rng, 1024, template, REAL_ANSWER + VT)
        ids = row.tokens[row.kinds != PADDING].tolist()
        assert ids[-1] == builder.corpus.end_of_text
        text = tokenizer.decode(ids[:-1], skip_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids[:-1]


@pytest.mark.parametrize("length", [512, 1024, 4096])
def test_every_answer_of_a_dense_sequence_follows_from_its_text(
    builder: SequenceBuilder, tokenizer: Tokenizer, length: int
) -> None:
    rng = np.random.default_rng(length)
    hops = set()
    for _ in range(40):
        row = builder.dense_row(rng, length, VT)
        assert set(row.kinds.tolist()) <= {PADDING, ELSEWHERE, DENSE_ANSWER + VT}
        text = text_of(tokenizer, row)
        context, *turns = text.rpartition("Memorize and track")[2].split("\nQuestion: ")
        values = dict(re.findall(r"\nVAR ([A-Z]{5}) = (\d{5})(?=\n|$)", context))
        before = dict(re.findall(r"\nVAR ([A-Z]{5}) = VAR ([A-Z]{5}) (?=\n|$)", context))
        links = re.findall(r"\nVAR ([A-Z]{5}) = ", context)
        assert len(links) == len(set(links)) == len(values) + len(before)
        assert len(set(values.values())) == len(values)
        marked = 0
        for turn in turns:
            asked = re.match(r"Find all variables that are assigned the value (\d{5}) in", turn)
            stated = re.search(
                r"above, (\d) variables are assigned the value (\d{5}), they are: "
                r"((?: [A-Z]{5})+)<\|endoftext\|>$",
                turn,
            )
            assert asked, turn
            assert stated, turn
            assert stated[2] == asked[1]
            # Brute force: which variables lead back to the value, in the order of the text?
            expected = []
            for name in links:
                root = name
                while root in before:
                    root = before[root]
                if values[root] == asked[1]:
                    expected.append(name)
            assert stated[3].split() == expected
            assert int(stated[1]) == len(expected)
            hops.add(len(expected) - 1)
            marked += len(tokenizer.encode(stated[3]).ids) + 1
        assert int((row.kinds == DENSE_ANSWER + VT).sum()) == marked > 0
    assert hops == set(range(CHAINS.num_hops + 1))


def test_names_in_order_are_alike_and_never_twice() -> None:
    names = prepare.variable_names(5, 5000)
    assert names == sorted(set(names))
    assert len(names) == 5000
    assert {len(name) for name in names} == {5}
    assert len({name[0] for name in names}) == 26
    assert len(prepare.variable_names(3, 2**18)) == 26**3


def test_evaluation_takes_turns_through_the_tasks() -> None:
    made = prepare.make_prompts(train_probe.ASSETS, (1024,), 2, seed=3)
    tasks = [prompt.task for prompt in made]
    assert tasks[: len(FAMILIES)] == tasks[len(FAMILIES) :]
    assert set(tasks) == {family.name for family in FAMILIES}
    assert [p.tokens_to_generate for p in made[:2]] == [30, 128]
