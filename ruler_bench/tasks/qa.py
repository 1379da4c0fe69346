"""Questions over documents: RULER's qa_1 and qa_2, draw for draw as qa.py makes them.

https://github.com/NVIDIA/RULER/blob/c3f5e3b/scripts/data/synthetic/qa.py

A sample, shortened:

    Answer the question based on the given documents. ...

    Document 1:
    The Normans were the people who in the 10th and 11th centuries gave their name to Normandy ...

    Document 2:
    ...

    Answer the question based on the given documents. ...

    Question: In what country is Normandy located? Answer:
"""

from __future__ import annotations

import random

from ruler_bench.errors import UsageError
from ruler_bench.tasks.documents import QaItem, QaSource, load_documents
from ruler_bench.tasks.draw import Draw, FailedDrawError, largest_size, shuffled
from ruler_bench.tasks.spec import DataSpec, QaTask
from ruler_bench.tasks.wording import DOCUMENT, QA_ANSWER_PREFIX, QA_TEMPLATE

STEP = 10


class Qa:
    """Draws prompts from one random stream; a size is the number of documents.

    Sample i asks question i.

    Args:
        spec: what decides the data.
        task: its task.

    Raises:
        UsageError: the questions are missing, or not as they were published.
    """

    step = STEP
    least_size = 1
    first_size = STEP

    def __init__(self, spec: DataSpec, task: QaTask) -> None:
        self._source = load_documents(task.dataset, spec.qa_data)
        self._seed = spec.seed
        self._random = random.Random(spec.seed)
        self._pieces: dict[int, tuple[str, str, str]] = {}
        template = spec.model_template()
        head, _, question = QA_TEMPLATE.partition("{context}")
        self._head = template.before + head
        self._question, self._after = question, template.after

    def largest_size(self, length: int, tokens_per_unit: float) -> int:
        """See `Drawer`."""
        return largest_size(length, tokens_per_unit, STEP)

    def probe(self, size: int) -> Draw:
        """Draw the next prompt of the search, which is made with the first question."""
        return self.draw(size, 0)

    def draw(self, size: int, ordinal: int) -> Draw:
        """Draw the next prompt for a question, with `size` documents.

        Raises:
            FailedDrawError: the question comes with more documents than that.
            UsageError: it comes with more than the smallest prompt has.
        """
        item = self._source.items[ordinal]
        order = shuffled(self._draw_documents(item, size, ordinal), self._seed)
        parts = [self._head]
        joint = ""
        for number, document in enumerate(order, start=1):
            first, middle, last = self._document(document)
            word, _, start = DOCUMENT.format(number=number, document=first).partition(" ")
            parts[-1] += joint + word
            parts += [f" {start}", middle, last] if last else [f" {start}"]
            joint = "\n\n"
        question = self._question.format(query=item.question)
        parts[-1] += question + self._after + QA_ANSWER_PREFIX
        return Draw(parts, QA_ANSWER_PREFIX, item.answers)

    def _draw_documents(self, item: QaItem, size: int, ordinal: int) -> list[int]:
        """Return the places of the documents: the question's own, those of its article, others."""
        number = len(self._source.documents)
        if size >= number:  # all of them, over and over
            return [place % number for place in range(size)]
        own, related = list(item.needed), list(item.related)
        free = size - len(own)
        if len(own) > STEP:
            raise UsageError(
                f"{self._source.path}: question {ordinal} comes with {len(own)} documents; RULER's"
                f" smallest prompt has {STEP}."
            )
        if free < 0:
            raise FailedDrawError
        if free <= len(related):
            return own + self._random.sample(related, free)
        taken = set(own + related)
        others = [place for place in range(number) if place not in taken]
        return own + related + self._random.sample(others, free - len(related))

    def _document(self, place: int) -> tuple[str, str, str]:
        """Return a document in three parts: its first word, its last one, and what is between.

        What is between them is the same in every prompt, so that it is counted once.
        """
        if place not in self._pieces:
            text = self._source.documents[place]
            start, end = text.find(" "), text.rfind(" ")
            self._pieces[place] = (
                (text, "", "") if start == end else (text[:start], text[start:end], text[end:])
            )
        return self._pieces[place]


def check_questions(source: QaSource, num_samples: int) -> None:
    """Check that there is a question for each sample.

    Raises:
        UsageError: there are fewer.
    """
    if num_samples > len(source.items):
        raise UsageError(
            f"{source.path} has {len(source.items)} questions, fewer than the {num_samples} samples"
            f" asked for; use num_samples={len(source.items)} or less."
        )
