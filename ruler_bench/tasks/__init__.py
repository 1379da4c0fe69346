"""The tasks: samples that are byte for byte RULER's."""

from __future__ import annotations

from ruler_bench.tasks.cache import load_questions
from ruler_bench.tasks.generate import generate
from ruler_bench.tasks.sample import Question, Sample
from ruler_bench.tasks.spec import DataSpec, TaskSpec, make_task

__all__ = ["DataSpec", "Question", "Sample", "TaskSpec", "generate", "load_questions", "make_task"]
