"""Needle in a haystack: RULER's eight niah tasks, draw for draw as niah.py makes them.

https://github.com/NVIDIA/RULER/blob/c3f5e3b/scripts/data/synthetic/niah.py

A sample of niah_single_1, shortened:

    A special magic number is hidden within the following text. Make sure to memorize it. ...
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
    One of the special magic numbers for wandering-age is: 8090293.
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
    What is the special magic number for wandering-age mentioned in the provided text? The
    special magic number for wandering-age mentioned in the provided text is
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass

from ruler_bench.tasks.draw import SHORT_LENGTH, Draw, largest_size, line_parts
from ruler_bench.tasks.essays import load_essays
from ruler_bench.tasks.spec import DataSpec, NiahTask
from ruler_bench.tasks.template import ModelTemplate, singular
from ruler_bench.tasks.wording import NEEDLE, NIAH_ANSWER_PREFIX, NIAH_TEMPLATE, NOISE
from ruler_bench.tasks.words import load_words

DEPTHS = tuple(round(100 * step / 39) for step in range(40))
"""Percent of the sentences before a needle; no value of the 40 lies halfway between integers."""


@dataclass(frozen=True)
class Needle:
    """One hidden sentence: `text` tells the `value` of `key`."""

    key: str
    value: str
    text: str


class Niah:
    """Draws prompts from one random stream; a size is that of the haystack, in words or lines.

    Args:
        spec: what decides the data.
        task: its task.
    """

    def __init__(self, spec: DataSpec, task: NiahTask) -> None:
        self._task = task
        self._seed = spec.seed
        self._random = random.Random(spec.seed)
        self._words = load_words() if "words" in (task.key_type, task.value_type) else None
        self._essays = load_essays() if task.haystack == "essay" else None
        self._frame = _Frame(task, spec.model_template())
        self.step = _step(task.haystack, spec.length)
        self.least_size = 1 if self._essays else task.num_keys * task.num_values
        self.first_size = self.step

    def largest_size(self, length: int, tokens_per_unit: float) -> int:
        """See `Drawer`."""
        return largest_size(length, tokens_per_unit, self.step)

    def draw(self, size: int, ordinal: int) -> Draw:
        """Draw the next prompt from the stream, whichever sample it is for."""
        return self.probe(size)

    def probe(self, size: int) -> Draw:
        """Draw the next prompt from the stream, with a haystack of `size` words or lines."""
        task = self._task
        needles = [self._draw_needles() for _ in range(task.num_keys)]
        order = [(k, v) for k in range(task.num_keys) for v in range(task.num_values)]
        random.Random(self._seed).shuffle(order)
        hidden = [needles[k][v].text for k, v in order]
        if self._essays is not None:
            parts, places = self._hide_in_essay(hidden, self._essays.sentences(size))
        else:
            parts, places = self._hide_in_lines(hidden, size)
        asked = self._random.sample(range(task.num_keys), task.num_queries)
        answers = tuple(needle.value for k in asked for needle in needles[k])
        depth = places[order.index((asked[0], 0))] / sum(map(len, parts))
        prefix = self._frame.put_around(parts, [needles[k][0].key for k in asked])
        return Draw(parts=parts, answer_prefix=prefix, answers=answers, depth=depth)

    def _draw_needles(self) -> list[Needle]:
        """Draw a key and its values."""
        key = self._draw_word(self._task.key_type)
        values = [self._draw_word(self._task.value_type) for _ in range(self._task.num_values)]
        return [Needle(key, value, self._needle_text(key, value)) for value in values]

    def _needle_text(self, key: str, value: str) -> str:
        return NEEDLE.format(type_needle_v=self._task.value_type, key=key, value=value)

    def _draw_word(self, kind: str) -> str:
        if self._words is not None and kind == "words":
            return self._random.choice(self._words)
        if kind == "numbers":
            return str(self._random.randint(10**6, 10**7 - 1))
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))

    def _hide_in_essay(
        self, needles: list[str], sentences: list[str]
    ) -> tuple[list[str], list[int]]:
        """Return the context in parts, and where in it each needle begins.

        Sentences and needles are joined with spaces. A stretch without sentences counts as an
        empty one: it leaves a space at the start, at the end, or a double one between needles.
        """
        depths = self._random.sample(DEPTHS, len(needles))
        cuts = sorted(int(len(sentences) * (depth / 100)) for depth in depths)
        parts: list[str] = []
        places: list[int] = []
        chars = previous = 0
        for cut, needle in zip([*cuts, len(sentences)], [*needles, None], strict=True):
            stretch = [f" {sentence}" for sentence in sentences[previous:cut]] or [" "]
            if not parts:
                stretch[0] = stretch[0][1:]
            parts += stretch
            previous = cut
            if needle is not None:
                chars += sum(map(len, stretch))
                places.append(chars + 1)
                parts.append(f" {needle}")
                chars += len(needle) + 1
        return parts, places

    def _hide_in_lines(self, needles: list[str], size: int) -> tuple[list[str], list[int]]:
        """Return the context in parts, and where in it each needle begins."""
        if self._task.haystack == "noise":
            lines = [NOISE] * size
        else:
            lines = [
                self._needle_text(
                    self._draw_word(self._task.key_type), self._draw_word(self._task.value_type)
                )
                for _ in range(size)
            ]
        rows = sorted(self._random.sample(range(size), len(needles)), reverse=True)
        for row, needle in zip(rows, needles, strict=True):
            lines.insert(row, needle)
        places = [
            sum(map(len, lines[:row])) + row  # every line before it ends with a newline
            for row in (row + len(rows) - 1 - above for above, row in enumerate(rows))
        ]
        return line_parts(lines), places


class _Frame:
    """The fixed text around context and question."""

    def __init__(self, task: NiahTask, template: ModelTemplate) -> None:
        before, after = template.before, template.after
        words, prefix, value_type = NIAH_TEMPLATE, NIAH_ANSWER_PREFIX, task.value_type
        if task.num_queries * task.num_values == 1:
            words, prefix, value_type = singular(words), singular(prefix), value_type[:-1]
            if template.is_task_wording:
                before, after = singular(before), singular(after)
        intro, _, question = words.partition("{context}")
        self._head = before + intro.format(type_needle_v=value_type)
        self._after = after
        self._question, self._prefix, self._value_type = question, prefix, value_type

    def put_around(self, context: list[str], keys: list[str]) -> str:
        """Add the text before and after the context to its parts, in place; return the prefix."""
        query = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
        values = {"type_needle_v": self._value_type, "query": query}
        context[0] = self._head + context[0]
        prefix = self._prefix.format(**values)
        context[-1] += self._question.format(**values) + self._after + prefix
        return prefix


def _step(haystack: str, length: int) -> int:
    if haystack == "essay":
        return 500
    return 25 if length >= SHORT_LENGTH else 5
