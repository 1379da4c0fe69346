"""Tokenizers and specs for the tests of tasks."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from ruler_bench.splitting import SPACES
from ruler_bench.tasks import DataSpec, TaskSpec, make_task
from ruler_bench.tokenizer import FolderTokenizer, Tokenizer

TESTS = Path(__file__).parent.parent
CONFIGS = TESTS.parent / "configs" / "task"

MakeSpec = Callable[..., DataSpec]


@pytest.fixture(scope="session", autouse=True)
def _one_thread_for_tokenizers() -> Iterator[None]:
    """Keep threads out of it: over batches of a few words they wait longer than they work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        yield


class WordTokenizer:
    """A word or a whitespace character is a token: quick, and easy to count by hand."""

    name = "words"
    fingerprint = "words-1"
    adds_bos = False

    def __init__(self, cuts: re.Pattern[str] | None = SPACES) -> None:
        self.cuts = cuts
        self.texts_counted = 0

    def count(self, text: str) -> int:
        return self.counts([text])[0]

    def counts(self, texts: Sequence[str]) -> list[int]:
        self.texts_counted += len(texts)
        return [len(re.findall(r"\S+|\s", text)) for text in texts]

    def encode_prompt(self, text: str) -> list[int]:
        return [0] * self.count(text)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join("?" for _ in ids)

    def chat_prompt(self, user: str) -> str:
        return f"<user> there are some {{answers}}\n{user}<assistant>\n"


def load_task(name: str) -> TaskSpec:
    return make_task(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()))


@pytest.fixture(scope="session")
def smollm2() -> FolderTokenizer:
    folder = TESTS / "data" / "tokenizers" / "smollm2"
    return FolderTokenizer(str(folder), folder)


@pytest.fixture(scope="session")
def qa_data() -> Path:
    """A folder of made-up questions in the schemas of SQuAD and HotpotQA."""
    return TESTS / "data" / "qa"


@pytest.fixture
def make_word_tokenizer() -> type[WordTokenizer]:
    return WordTokenizer


@pytest.fixture
def word_tokenizer() -> WordTokenizer:
    return WordTokenizer()


@pytest.fixture
def task() -> Callable[[str], TaskSpec]:
    """Read a task from configs/task."""
    return load_task


@pytest.fixture
def changed_task() -> Callable[..., TaskSpec]:
    """Read a task from configs/task and change some of its parameters."""
    return lambda name, **changes: dataclasses.replace(load_task(name), **changes)


@pytest.fixture
def spec(word_tokenizer: WordTokenizer) -> MakeSpec:
    """Make a DataSpec; what is not named is niah_single_1 at 1600 words and spaces."""

    def make(
        task: str | TaskSpec = "niah_single_1",
        length: int = 1600,
        seed: int = 42,
        template: str = "base",
        tokenizer: Tokenizer = word_tokenizer,
        *,
        qa_data: Path | None = None,
    ) -> DataSpec:
        return DataSpec(
            task=load_task(task) if isinstance(task, str) else task,
            length=length,
            seed=seed,
            template=template,
            tokenizer=tokenizer,
            qa_data=qa_data,
        )

    return make
