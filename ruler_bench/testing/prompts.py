"""The prompts that a backend is checked with: needles, so that an answer tells whose it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backends.base import Generation
from ruler_bench.config import config_dir
from ruler_bench.model_files import model_folder, stop_token_ids, vocabulary_size
from ruler_bench.suites import task_from_file
from ruler_bench.tasks import DataSpec, Sample, generate
from ruler_bench.tokenizer import Tokenizer, load_tokenizer

TASK = "niah_single_1"
"""Its haystack is one sentence, repeated, so that it needs no data and a small model answers."""
SEED = 7


@dataclass(frozen=True)
class Prompt:
    """A question with one needle.

    Attributes:
        name: what messages call it.
        text, token_ids: the prompt, as in `Request`.
        needle: the answer that is expected.
        max_new_tokens: room for it.
    """

    name: str
    text: str
    token_ids: tuple[int, ...]
    needle: str
    max_new_tokens: int


@dataclass(frozen=True)
class Prompts:
    """Two prompts of equal length, a shorter one, and how to read the answers to them."""

    long: Prompt
    other: Prompt
    short: Prompt
    stop_token_ids: tuple[int, ...]
    vocabulary: int | None
    tokenizer: Tokenizer

    @property
    def all(self) -> Sequence[Prompt]:
        """All of them."""
        return (self.long, self.other, self.short)

    def too_long(self, max_model_len: int) -> Prompt:
        """Return a prompt that does not fit, even with one token to generate."""
        base = self.long
        times = max_model_len // len(base.token_ids) + 2
        text = base.text * times
        ids = tuple(self.tokenizer.encode_prompt(text))
        return Prompt("a prompt that does not fit", text, ids, base.needle, 1)

    def text_of(self, answer: Generation) -> str:
        """Return the text of an answer, without its stop token."""
        if answer.text is not None:
            return answer.text
        ids = list(answer.token_ids or ())
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return self.tokenizer.decode(ids)


def make_prompts(model: str, length: int) -> Prompts:
    """Return the prompts for a model's tokenizer.

    Args:
        model: folder, hub name, or "package:probe".
        length: tokens of prompt and generation; of the short one three quarters.

    Raises:
        UsageError: the model's folder is wrong, or the length has no room for a needle.
    """
    folder = model_folder(model)
    tokenizer = load_tokenizer(str(folder))
    task = task_from_file(config_dir(), TASK)

    def samples(tokens: int, count: int) -> list[Sample]:
        return generate(DataSpec(task, tokens, SEED, "base", tokenizer), count)

    def prompt(name: str, sample: Sample) -> Prompt:
        ids = tuple(tokenizer.encode_prompt(sample.prompt))
        return Prompt(name, sample.prompt, ids, sample.outputs[0], sample.tokens_to_generate)

    # The first sample of a shorter length has the needle of the longer one's first.
    long, other = samples(length, 2)
    short = samples(length * 3 // 4, 3)[2]
    return Prompts(
        long=prompt("the long prompt", long),
        other=prompt("the other prompt", other),
        short=prompt("the short prompt", short),
        stop_token_ids=stop_token_ids(folder),
        vocabulary=vocabulary_size(folder),
        tokenizer=tokenizer,
    )
