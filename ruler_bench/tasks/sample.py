"""Sample: one question of a task, as text. Question: the same as an engine gets it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One question of a task.

    Attributes:
        task: name of the task, such as niah_single_1.
        ordinal: 0, 1, 2... within the task at one length and seed.
        input: the prompt up to the answer prefix.
        answer_prefix: the words the answer continues; the prompt is `input + answer_prefix`.
        outputs: every reference answer.
        length: prompt tokens plus `tokens_to_generate`, as the reference counts (no BOS).
        tokens_to_generate: generation limit of the task.
        depth: place of the first needle asked for, 0 (start) to 1 (end) of the context;
            None where a task has no place.
        answer_offset: character offset of the first answer in `input` (the reference writes it
            into its `index` field).
        answer_token_position: tokens of `input` before that offset (the reference's
            `token_position_answer`).
    """

    task: str
    ordinal: int
    input: str
    answer_prefix: str
    outputs: tuple[str, ...]
    length: int
    tokens_to_generate: int
    depth: float | None = None
    answer_offset: int | None = None
    answer_token_position: int | None = None

    @property
    def prompt(self) -> str:
        """The text an engine continues."""
        return self.input + self.answer_prefix


@dataclass(frozen=True, slots=True)
class Question:
    """A sample with its prompt as the engine's model tokenises it.

    Attributes:
        sample: the text.
        prompt_token_ids: the prompt, BOS included once where the tokenizer has one.
    """

    sample: Sample
    prompt_token_ids: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of prompt and generation together, as the engine counts them."""
        return len(self.prompt_token_ids) + self.sample.tokens_to_generate
