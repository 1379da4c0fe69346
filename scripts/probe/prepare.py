"""Make the tokenizer, the corpus of pieces and the real prompts for evaluation (no GPU needed)."""

from __future__ import annotations

import json
import re
import uuid
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from random import Random
from string import ascii_uppercase

import numpy as np
from tokenizers import Tokenizer

from ruler_bench.tasks import DataSpec, generate
from ruler_bench.tasks.essays import load_essays
from ruler_bench.tasks.spec import NiahTask, TaskSpec, VariableTrackingTask
from ruler_bench.tasks.template import singular
from ruler_bench.tasks.wording import (
    FIRST_LINK,
    LINK,
    MODEL_TEMPLATES,
    NEEDLE,
    NIAH_ANSWER_PREFIX,
    NIAH_TEMPLATE,
    NOISE,
    TASK,
    VARIABLE_TRACKING_ANSWER_PREFIX,
    VARIABLE_TRACKING_TEMPLATE,
)
from ruler_bench.tasks.words import load_words
from ruler_bench.tokenizer import load_tokenizer
from scripts.probe import bpe
from scripts.probe.corpus import HEX_DIGITS, Corpus, Ragged
from scripts.probe.families import CHAINS, NEEDLES, NeedleFamily
from scripts.probe.prompts import Prompt

VALUE_KINDS = ("numbers", "uuids")
COUNTS = ("one", "many")

ESSAY_WORDS = 110_000
"""Of the corpus: its first words, before it repeats."""

NAMES = 2**18
"""Names of variables in the corpus; more than a model of the probe's size can learn by heart."""
NAME_LETTERS, EXAMPLE_NAME_LETTERS = 5, 3


@cache
def wrappers() -> dict[str, str]:
    """Return the templates a prompt can stand in: the reference's, and the probe's own chat."""
    return {**MODEL_TEMPLATES, "chat": f"{bpe.USER}\n{TASK}\n{bpe.ASSISTANT}\n"}


def prompt_template(wrapper: str, count: str, kind: str) -> str:
    """Return the whole prompt's template with {context} and {query} left open.

    Args:
        wrapper: name of the template around the question.
        count: "one" or "many" values asked for.
        kind: of the values, numbers or uuids.
    """
    template = wrappers()[wrapper].replace(TASK, NIAH_TEMPLATE) + NIAH_ANSWER_PREFIX
    if count == "one":
        template = singular(template)
        kind = kind[:-1]
    return template.replace("{type_needle_v}", kind)


def adjectives() -> list[str]:
    """Return the adjectives of keys, sorted."""
    return _word_list("adjectivelist.txt")


def nouns() -> list[str]:
    """Return the nouns of keys, sorted."""
    return _word_list("nounlist.txt")


def _word_list(name: str) -> list[str]:
    load_words()  # refuses another version than the data's
    text = (files("wonderwords.assets") / name).read_text(encoding="utf-8")
    return sorted({line.rstrip() for line in text.splitlines()})


@cache
def essay_sentences() -> list[str]:
    """Return the sentences of the essays, which a space joins to the text."""
    return load_essays().sentences(ESSAY_WORDS)


def needle_line(kind: str, key: str, value: str) -> str:
    """Return a needle as it stands on a line of its own."""
    return NEEDLE.format(type_needle_v=kind, key=key, value=value)


def variable_names(letters: int, most: int) -> list[str]:
    """Return names of so many upper-case letters, sorted: all of them, or `most` evenly chosen.

    One is chosen at random from each of `most` stretches of the alphabetical order.
    """
    total = len(ascii_uppercase) ** letters
    starts = np.linspace(0, total, min(most, total) + 1).astype(int)
    numbers = np.random.default_rng(NAMES).integers(starts[:-1], starts[1:])
    places = len(ascii_uppercase) ** np.arange(letters - 1, -1, -1)
    digits = numbers[:, None] // places % len(ascii_uppercase)
    return ["".join(row) for row in np.array(list(ascii_uppercase))[digits].tolist()]


def tokenizer_texts(random: Random) -> Iterator[tuple[str, int]]:
    """Yield the texts the tokenizer learns from, each with its weight.

    Wording and noise weigh most, so that each of their words is one token. The first words of the
    essays weigh more than the rest: every essay haystack begins with them, and the smallest one
    (500 words) must leave room for needles and question at a length of 1024 tokens.
    """
    text = " ".join(essay_sentences())
    yield text, 3
    yield " " + " ".join(text.split(" ")[:1000]), 30
    for adjective in adjectives():
        yield f" {adjective}", 6
    for noun in nouns():
        yield f"-{noun}", 6
    for wrapper in wrappers():
        for count in COUNTS:
            for kind in VALUE_KINDS:
                yield prompt_template(wrapper, count, kind), 20
    yield NOISE, 2000
    yield "\n" + NOISE, 2000
    for kind in VALUE_KINDS:
        yield needle_line(kind, "", ""), 2000
        yield "\n" + needle_line(kind, "", ""), 2000
    for _ in range(200):
        yield str(uuid.UUID(int=random.getrandbits(128), version=4)), 1


def make_tokenizer(folder: Path, vocab_size: int, max_length_tokens: int) -> None:
    """Train the tokenizer and write its three files, the chat template included."""
    counts: Counter[str] = bpe.count_pieces(tokenizer_texts(Random(0)))
    folder.mkdir(parents=True, exist_ok=True)
    bpe.build_tokenizer(counts, vocab_size).save(str(folder / "tokenizer.json"))
    config = bpe.tokenizer_config(max_length_tokens)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(bpe.CHAT_TEMPLATE + "\n")


def make_corpus(tokenizer: Tokenizer) -> Corpus:
    """Tokenise every piece that a training sequence can hold."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_names(letters: int) -> Ragged:
        names = [f" {name}" for name in variable_names(letters, NAMES)]
        return Ragged.of([row.ids for row in tokenizer.encode_batch_fast(names)])

    sentences = essay_sentences()
    text = " " + " ".join(sentences)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    token_at = {start: index for index, (start, _) in reversed(list(enumerate(encoding.offsets)))}
    word_spaces = [index for index, character in enumerate(text) if character == " "]
    sentence_spaces = accumulate((len(sentence) + 1 for sentence in sentences[:-1]), initial=0)
    heads = [sentence.split(" ", 1)[0] for sentence in sentences]

    return Corpus(
        adjectives=Ragged.of([encode(f" {word}") for word in adjectives()]),
        nouns=Ragged.of([encode(f"-{word}") for word in nouns()]),
        names=encode_names(NAME_LETTERS),
        example_names=encode_names(EXAMPLE_NAME_LETTERS),
        essay=np.array(encoding.ids, np.int16),
        word_starts=np.array([token_at[space] for space in word_spaces], np.int32),
        sentence_starts=np.array([token_at[space] for space in sentence_spaces], np.int32),
        sentence_heads=Ragged.of([encode(head) for head in heads]),
        sentence_head_tokens=np.array([len(encode(f" {head}")) for head in heads], np.int32),
        noise=np.array(encode(NOISE), np.int16),
        characters=np.array([tokenizer.token_to_id(c) for c in HEX_DIGITS], np.int16),
        spaced_characters=np.array(
            [-1 if c.isdigit() else encode(f" {c}")[0] for c in HEX_DIGITS], np.int16
        ),
        # The letter stands for the text that follows: two newlines at an end would be one token.
        wording={
            name: np.array(
                encode(f"{piece}V")[:-1] if piece.endswith("\n") else encode(piece)
            ).astype(np.int16)
            for name, piece in wording().items()
        },
        wrappers=tuple(wrappers()),
        end_of_text=bpe.SPECIAL_TOKENS.index(bpe.END_OF_TEXT),
        pad=bpe.SPECIAL_TOKENS.index(bpe.PAD),
    )


def wording() -> dict[str, str]:
    """Cut the prompts' wording into the pieces around context, key and value."""
    pieces = {name: name for name in (" ", "\n", ",", ".", " and")}
    for kind in VALUE_KINDS:
        needle, key_to_value, _ = re.split(" KEY| VALUE", needle_line(kind, "KEY", "VALUE"))
        pieces[f"needle_line.{kind}"] = needle
        pieces[f"needle.{kind}"] = " " + needle
        pieces["is"] = key_to_value
        for count in COUNTS:
            for wrapper in wrappers():
                template = prompt_template(wrapper, count, kind)
                opening, ask, answer, end = re.split(r"\{context\}| \{query\}", template)
                pieces[f"open.{wrapper}.{count}.{kind}"] = opening
                pieces[f"ask.{count}.{kind}"] = ask
                pieces[f"answer.{wrapper}.{count}.{kind}"] = answer
                pieces[f"end.{count}"] = end
    return pieces | chain_wording()


def chain_wording() -> dict[str, str]:
    """Cut the wording of variable tracking into the pieces around context, name and value."""
    variable, to_value, _ = re.split(r" \{name\}| \{value\}", FIRST_LINK)
    _, to_name, _ = re.split(r" \{name\}| \{before\}", LINK)
    opening, ask, asked = re.split(r"\{context\}| \{query\}", VARIABLE_TRACKING_TEMPLATE)
    answer, assigned, end = re.split(r" \{num_v\}| \{query\}", VARIABLE_TRACKING_ANSWER_PREFIX)
    pieces = {
        "chain.variable": variable,
        "chain.value": to_value,
        "chain.name": to_name,
        "chain.ask": ask,
        "chain.assigned": assigned,
        "chain.end": end,
        "chain.again": f"\n\n{opening}",
    }
    for wrapper, template in wrappers().items():
        before, _, after = template.partition(TASK)
        pieces[f"chain.open.{wrapper}"] = before + opening
        pieces[f"chain.answer.{wrapper}"] = asked + after + answer
    return pieces


def make_prompts(
    tokenizer_folder: Path, lengths: tuple[int, ...], num_samples: int, seed: int
) -> list[Prompt]:
    """Generate real samples of every task and tokenise their prompts.

    Within a length the tasks take turns, so that an evaluation cut short has seen them alike.
    """
    tokenizer = load_tokenizer(str(tokenizer_folder))
    prompts = []
    for length in lengths:
        by_task = [
            list(generate(DataSpec(task, length, seed, "base", tokenizer), num_samples))
            for task in task_specs()
        ]
        prompts += [
            Prompt(
                task=sample.task,
                length=length,
                tokens_to_generate=task.tokens_to_generate,
                tokens=np.array(tokenizer.encode_prompt(sample.prompt), np.int16),
                outputs=sample.outputs,
            )
            for samples in zip(*by_task, strict=True)
            for task, sample in zip(task_specs(), samples, strict=True)
        ]
    return prompts


def task_specs() -> list[TaskSpec]:
    """Return variable tracking and the eight needle tasks as they are evaluated."""
    return [
        VariableTrackingTask(
            name=CHAINS.name,
            kind=VariableTrackingTask.KIND,
            num_chains=1,
            num_hops=CHAINS.num_hops,
            tokens_to_generate=30,
            metric="all",
        ),
        *map(_needle_task, NEEDLES),
    ]


def _needle_task(family: NeedleFamily) -> NiahTask:
    return NiahTask(
        name=family.name,
        kind="niah",
        haystack=family.haystack,
        key_type=family.keys,
        value_type=family.values,
        num_keys=family.num_keys,
        num_values=family.num_values,
        num_queries=family.num_queries,
        tokens_to_generate=128,
        metric="all",
    )
