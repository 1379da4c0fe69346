"""Variable tracking: RULER's vt, draw for draw as variable_tracking.py makes it.

https://github.com/NVIDIA/RULER/blob/c3f5e3b/scripts/data/synthetic/variable_tracking.py

A sample, shortened; a worked example of the same kind stands before it:

    Memorize and track the chain(s) of variable assignment hidden in the following text.

    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
    VAR KIMBV = 85303
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
    VAR KUYAW = VAR KIMBV
    ...
    Question: Find all variables that are assigned the value 85303 in the text above. Answer:
    According to the chain(s) of variable assignment in the text above, 5 variables are assigned
    the value 85303, they are:
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from itertools import pairwise

from ruler_bench.errors import UsageError
from ruler_bench.tasks.counting import PartCounter
from ruler_bench.tasks.draw import SHORT_LENGTH, Draw, FailedDrawError, largest_size, line_parts
from ruler_bench.tasks.fit import DoesNotFitError, Fitting
from ruler_bench.tasks.spec import DataSpec, VariableTrackingTask
from ruler_bench.tasks.wording import (
    FIRST_LINK,
    LINK,
    NOISE,
    VARIABLE_TRACKING_ANSWER_PREFIX,
    VARIABLE_TRACKING_TEMPLATE,
)

NAME_LETTERS = 5
VALUES = (10_000, 99_999)
"""The least, and one more than the largest."""

EXAMPLE_TOKENS = 500
EXAMPLE_STEP = 5
EXAMPLE_NAME_LETTERS = 3
EXAMPLE_VALUE = "12345"


class VariableTracking:
    """Draws prompts from one random stream; a size is that of the haystack, in lines.

    The example is drawn first, to a length of its own. Each sample gets it with other names and
    another value.

    Args:
        spec: what decides the data.
        task: its task.
        counter: counts the example's tokens.

    Raises:
        UsageError: the example takes more than its 500 tokens.
    """

    def __init__(self, spec: DataSpec, task: VariableTrackingTask, counter: PartCounter) -> None:
        template = spec.model_template()
        self._chains = _Chains(task, spec.seed)
        self._before, self._after = template.before, template.after
        self._example = self._draw_example(counter)
        self._example_tokens = counter.count(line_parts(self._example.split("\n")))
        self.step = 10 if spec.length >= SHORT_LENGTH else 5
        self.least_size = task.num_hops + 1
        self.first_size = self.step

    def largest_size(self, length: int, tokens_per_unit: float) -> int:
        """See `Drawer`."""
        return largest_size(length, tokens_per_unit, self.step)

    def probe(self, size: int) -> Draw:
        """Draw a prompt without the example, whose tokens count as they are before it is drawn
        anew.
        """
        parts, prefix, names = _until_drawn(self._chains, size)
        parts[0] = self._before + parts[0]
        _put_at_end(parts, self._after, prefix)
        return Draw(parts, prefix, names, missing_tokens=self._example_tokens)

    def draw(self, size: int, ordinal: int) -> Draw:
        """Draw a prompt, then the example's names and value.

        Raises:
            FailedDrawError: a name was drawn twice.
        """
        parts, prefix, names = self._chains.draw(size)
        example = self._chains.rename(self._example)
        _put_at_end(parts, self._after, prefix)
        first = line_parts(f"{self._before}{example}\n".split("\n"))
        first[-1] += parts[0]
        return Draw([*first, *parts[1:]], prefix, names)

    def _draw_example(self, counter: PartCounter) -> str:
        """Return the example: a prompt without the model's template, and its answer."""
        fitting = Fitting(_Example(self._chains), counter, EXAMPLE_TOKENS, tokens_to_generate=0)
        try:
            draw, _ = fitting.next_draw(fitting.find_size(), 0)
        except DoesNotFitError as error:
            raise UsageError(
                f"the worked example of vt takes {error.totals[0]} tokens of this tokenizer and"
                f" has room for {EXAMPLE_TOKENS} at any length; name another tokenizer with"
                " tokenizer=NAME."
            ) from error
        return "".join(draw.parts) + " " + " ".join(draw.answers) + "\n"


class _Example:
    """Draws the example; see `Drawer`."""

    def __init__(self, chains: _Chains) -> None:
        self._chains = chains
        self.step = self.first_size = EXAMPLE_STEP
        self.least_size = chains.links

    def largest_size(self, length: int, tokens_per_unit: float) -> int:
        return largest_size(length, tokens_per_unit, self.step)

    def probe(self, size: int) -> Draw:
        return self._whole(*_until_drawn(self._chains, size, is_example=True))

    def draw(self, size: int, ordinal: int) -> Draw:
        return self._whole(*self._chains.draw(size, is_example=True))

    def _whole(self, parts: list[str], prefix: str, names: tuple[str, ...]) -> Draw:
        _put_at_end(parts, "", prefix)
        return Draw(parts, prefix, names)


class _Chains:
    """The random streams, one of names and places and one of values, and what is drawn of them."""

    def __init__(self, task: VariableTrackingTask, seed: int) -> None:
        from numpy.random import RandomState  # noqa: PLC0415 (no other task needs it)

        self.links = task.num_hops + 1
        self._num_chains = task.num_chains
        self._random = random.Random(seed)
        self._values = RandomState(seed)

    def draw(self, size: int, is_example: bool = False) -> tuple[list[str], str, tuple[str, ...]]:
        """Draw the task's own part of a prompt, with a haystack of `size` lines.

        Returns:
            Its parts up to the question, the answer prefix, and the names asked for.

        Raises:
            FailedDrawError: a name was drawn twice.
        """
        chains = self._draw_chains(is_example)
        lines = [NOISE] * size
        for value, names in chains:
            places = sorted(self._random.sample(range(len(lines)), len(names)))
            for before, (place, link) in enumerate(zip(places, _links(value, names), strict=True)):
                lines.insert(place + before, link)
        value, names = chains[0]
        head, _, question = VARIABLE_TRACKING_TEMPLATE.partition("{context}")
        parts = line_parts(lines)
        parts[0] = head + parts[0]
        parts[-1] += question.format(query=value)
        prefix = VARIABLE_TRACKING_ANSWER_PREFIX.format(num_v=self.links, query=value)
        return parts, prefix, tuple(names)

    def _draw_chains(self, is_example: bool) -> list[tuple[str, list[str]]]:
        """Draw the value and the names of every chain.

        A name drawn twice is made up for by another at the end, which begins one chain more that
        nobody can finish; RULER fails there, after it has drawn a value for it.
        """
        letters = EXAMPLE_NAME_LETTERS if is_example else NAME_LETTERS
        wanted = self._num_chains * self.links
        names = [self._name(letters) for _ in range(wanted)]
        while len(set(names)) < wanted:
            names.append(self._name(letters))
        chains = []
        for start in range(0, len(names), self.links):
            value = EXAMPLE_VALUE if is_example else self._value()
            chains.append((value, names[start : start + self.links]))
        if len(chains[-1][1]) < self.links:
            raise FailedDrawError
        return chains

    def rename(self, example: str) -> str:
        """Give the example's chain other names and another value, wherever they stand in it."""
        for name in example.split()[-self.links :]:
            example = example.replace(name, self._name(len(name)))
        return example.replace(EXAMPLE_VALUE, self._value())

    def _name(self, letters: int) -> str:
        return "".join(self._random.choices(string.ascii_uppercase, k=letters))

    def _value(self) -> str:
        return str(self._values.randint(*VALUES))


def _until_drawn(
    chains: _Chains, size: int, is_example: bool = False
) -> tuple[list[str], str, tuple[str, ...]]:
    """Draw again where a name was drawn twice: the reference's search ends there with an error."""
    while True:
        try:
            return chains.draw(size, is_example)
        except FailedDrawError:
            continue


def _links(value: str, names: Sequence[str]) -> list[str]:
    later = [LINK.format(name=name, before=before) for before, name in pairwise(names)]
    return [FIRST_LINK.format(name=names[0], value=value), *later]


def _put_at_end(parts: list[str], after: str, prefix: str) -> None:
    parts[-1] += after + prefix
