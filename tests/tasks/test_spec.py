"""What a task and its data may be set to, and what their fingerprint holds."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ruler_bench import tasks
from ruler_bench.errors import UsageError
from ruler_bench.tasks import DataSpec, TaskSpec
from ruler_bench.tokenizer import load_tokenizer

MakeSpec = Callable[..., DataSpec]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kind", "nihah", "Did you mean 'niah'"),
        ("haystack", "essays", "Did you mean 'essay'"),
        ("key_type", "word", "Did you mean 'words'"),
        ("value_type", 3, "numbers, uuids, words"),
        ("metric", "any", "all, part"),
        ("num_keys", 0, "task.num_keys=0: must be an integer of at least 1"),
        ("num_values", 1.5, "task.num_values=1.5"),
        ("tokens_to_generate", True, "task.tokens_to_generate=True"),
        ("num_queries", 2, "at most task.num_keys=1"),
        ("num_values", 6, "at most 5 needles"),
        ("name", "", "task.name"),
    ],
)
def test_a_wrong_task_is_named(
    task: Callable[[str], TaskSpec], key: str, value: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(task("niah_single_1"), **{key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 0}, "length=0"),
        ({"length": "4k"}, "length=4k"),
        ({"seed": -1}, "seed=-1: out of range"),
        ({"seed": 2**32}, "0 to 4294967295"),
        ({"seed": 1.0}, "seed=1.0"),
        ({"template": "meta-lama3"}, "Did you mean 'meta-llama3'"),
    ],
)
def test_wrong_data_settings_are_named(
    spec: MakeSpec, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        spec(**change)


def test_everything_that_decides_the_data_is_in_the_fingerprint(
    spec: MakeSpec, task: Callable[[str], TaskSpec], make_word_tokenizer: Callable[[], Any]
) -> None:
    other = make_word_tokenizer()
    other.fingerprint = "words-2"
    variants = [
        spec(),
        spec(seed=1),
        spec(length=1700),
        spec(template="Phi3"),
        spec(template="chat"),
        spec(tokenizer=other),
        spec("niah_single_2"),
        spec(dataclasses.replace(task("niah_single_1"), tokens_to_generate=64)),
    ]
    assert len({variant.fingerprint() for variant in variants}) == len(variants)
    assert spec().fingerprint() == spec().fingerprint()


def test_description_names_words_and_essays_where_they_are_used(spec: MakeSpec) -> None:
    assert "essays" not in spec("niah_single_1").describe()
    assert "words" not in spec("niah_multikey_3").describe()
    essay = spec("niah_single_2").describe()
    assert essay["essays"]["beyond_its_end"] == "repeats"
    assert essay["words"]["wonderwords"] == "2.2.0"


def test_description_is_json_without_paths(spec: MakeSpec) -> None:
    folder = Path(__file__).parent.parent / "data" / "tokenizers" / "smollm2"
    described = json.dumps(spec(tokenizer=load_tokenizer(str(folder))).describe())
    assert str(folder.parent) not in described


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("vt", "num_hops", 5, "places for at most 4 hops"),
        ("vt", "num_chains", 0, "task.num_chains=0: must be an integer of at least 1"),
        ("cwe", "num_cw", "10", "task.num_cw=10: must be an integer"),
        ("fwe", "alpha", 1, "task.alpha=1: out of range; must be above 1"),
        ("fwe", "alpha", float("nan"), "task.alpha=nan: out of range"),
        ("fwe", "alpha", "2", "task.alpha=2: must be a number"),
        ("fwe", "vocab_size", 0, "task.vocab_size=0"),
        ("fwe", "vocab_size", 26**6 + 1, "there are only 308915776 words"),
        ("qa_1", "dataset", "squat", "Did you mean 'squad'"),
        ("qa_2", "kind", "niah", "Did you mean|Allowed: qa"),
    ],
)
def test_a_wrong_parameter_of_the_other_tasks_is_named(
    changed_task: Callable[..., TaskSpec], name: str, key: str, value: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        changed_task(name, **{key: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "x"}, "task.kind is missing"),
        ({"kind": "niah", "num_kesy": 1}, "Did you mean 'task.num_keys'"),
        ({"kind": "qa", "name": "x"}, "task.tokens_to_generate is missing"),
        ({"kind": ["qa"]}, "unknown task.kind"),
        ({"kind": "variable_traking"}, "Did you mean 'variable_tracking'"),
    ],
)
def test_a_task_must_be_described_whole(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tasks.make_task(values)


def test_the_other_five_tasks_have_a_configuration(task: Callable[[str], TaskSpec]) -> None:
    """Tokens and rules of RULER's own table."""
    expected = {
        "vt": (30, "all"),
        "cwe": (120, "all"),
        "fwe": (50, "all"),
        "qa_1": (32, "part"),
        "qa_2": (32, "part"),
    }
    for name, (tokens, metric) in expected.items():
        read = task(name)
        assert (read.name, read.tokens_to_generate, read.metric) == (name, tokens, metric)


def test_all_eight_needle_tasks_have_a_configuration(task: Callable[[str], TaskSpec]) -> None:
    singles = [f"single_{i}" for i in (1, 2, 3)]
    multikeys = [f"multikey_{i}" for i in (1, 2, 3)]
    for name in (*singles, *multikeys, "multivalue", "multiquery"):
        read = task(f"niah_{name}")
        assert read.name == f"niah_{name}"
        assert (read.tokens_to_generate, read.metric) == (128, "all")
