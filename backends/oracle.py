"""Oracle: a backend without a model. It shows the interface, and tests use it as their double."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backends.base import ConfigurationError, Generation, Request, RequestError

WRONG_ANSWER = " (wrong on purpose)"
MAX_DELAY_SECONDS = 86_400

_NEEDLE = re.compile(r"One of the special magic \w+ for (?P<key>[^:\n]+?) is: (?P<value>[^.\n]+)\.")
_QUESTION = re.compile(r"special magic \w+ for (?P<keys>[^:\n]+?) mentioned in the provided text")
_BETWEEN_KEYS = re.compile(r", and |, ")


_NO_SCRIPT = (
    "backend.script is missing: the oracle has no model and reads needles, and this task asks for "
    "none. Give it the answers: python -m ruler_bench.prepare with the same settings and out=FILE "
    "writes them, backend.script=FILE reads them; or choose a task niah_*, or a backend with a "
    "model."
)


class Oracle:
    """Answers from the prompt, or from a script, and fails where it is told to.

    Without a script it finds the needles in the prompt and so answers every needle task. With one
    it looks the exact prompt up. Positions count the requests of this engine, failed ones
    included, from 0.
    """

    def __init__(
        self,
        *,
        script: str | None = None,
        wrong: Sequence[int] = (),
        fail: Sequence[int] = (),
        delay_seconds: float = 0.0,
    ) -> None:
        """Read the script.

        Args:
            script: JSON-lines file as `python -m ruler_bench.prepare` writes: `input`,
                `answer_prefix` and `outputs`; an `answer` in a line stands in for its outputs.
            wrong: positions of the requests answered wrongly.
            fail: positions of the requests that raise RequestError.
            delay_seconds: how long each answer takes, up to MAX_DELAY_SECONDS.

        Raises:
            ConfigurationError: a value is of another kind or out of range, or the script cannot
                be read.
        """
        self._wrong = _positions("wrong", wrong)
        self._fail = _positions("fail", fail)
        self._delay_seconds = _delay(delay_seconds)
        self._script = script
        self._answers = None if script is None else _read_script(script)
        self._served = 0
        self._is_open = True

    def generate(self, request: Request) -> Generation:
        """Answer one request.

        Raises:
            RequestError: its position is in `fail`, there is no answer to the prompt, or the oracle
                is closed.
            ConfigurationError: it has no script, and the prompt asks for no needle.
        """
        if not self._is_open:
            raise RequestError("the oracle is closed")
        start = time.perf_counter()
        position = self._served
        self._served += 1
        if self._delay_seconds:
            time.sleep(self._delay_seconds)
        if position in self._fail:
            raise RequestError(f"request {position} fails, as backend.fail asks")
        answer = WRONG_ANSWER if position in self._wrong else self._answer(request.prompt)
        return Generation(
            text=answer, finish_reason="stop", ttft_seconds=time.perf_counter() - start
        )

    @classmethod
    def refuse_early(cls, prompt: str, /, **arguments: Any) -> None:
        """Refuse settings, and a task that needs a script; see dry_run.py.

        Raises:
            ConfigurationError: a setting is wrong or missing.
        """
        oracle = cls(**arguments)
        if oracle._answers is None and prompt.strip() and not _QUESTION.search(prompt):
            raise ConfigurationError(_NO_SCRIPT)

    def _answer(self, prompt: str) -> str:
        if self._answers is None:
            return answer_from_needles(prompt)
        if prompt not in self._answers:
            raise RequestError(
                f"the script {self._script} has no answer to the prompt that ends in "
                f"{prompt[-60:]!r}"
            )
        return self._answers[prompt]

    def describe(self) -> dict[str, Any]:
        """Return the settings in force."""
        return {
            "script": self._script,
            "wrong": sorted(self._wrong),
            "fail": sorted(self._fail),
            "delay_seconds": self._delay_seconds,
        }

    def close(self) -> None:
        """Answer no more; there is no device to free."""
        self._is_open = False


def answer_from_needles(prompt: str) -> str:
    """Return the values of the keys that the prompt asks for, in the order asked.

    Raises:
        RequestError: the prompt asks for no needle, or holds none for one of its keys.
    """
    if not prompt.strip():
        raise RequestError("the prompt is empty")
    questions = _QUESTION.findall(prompt)
    if not questions:
        raise RequestError(_NO_SCRIPT)
    values: dict[str, list[str]] = {}
    for needle in _NEEDLE.finditer(prompt):
        values.setdefault(needle["key"], []).append(needle["value"])
    keys = _BETWEEN_KEYS.split(questions[-1])
    missing = [key for key in keys if key not in values]
    if missing:
        raise RequestError(f"the prompt holds no needle for {missing[0]!r}")
    return " " + ", ".join(value for key in keys for value in values[key])


def _positions(key: str, positions: Sequence[int]) -> frozenset[int]:
    if not isinstance(positions, list | tuple):
        raise ConfigurationError(
            f"backend.{key}={positions!r}: must be a list of positions, "
            f"for instance backend.{key}=[0,3]."
        )
    for position in positions:
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            raise ConfigurationError(
                f"backend.{key}: {position!r} is no position; they are integers from 0, "
                f"for instance backend.{key}=[0,3]."
            )
    return frozenset(positions)


def _delay(seconds: float) -> float:
    if type(seconds) not in (int, float) or not 0 <= seconds <= MAX_DELAY_SECONDS:
        raise ConfigurationError(
            f"backend.delay_seconds={seconds!r}: must be a number of seconds in 0 to "
            f"{MAX_DELAY_SECONDS}, for instance backend.delay_seconds=0.5."
        )
    return seconds


def _read_script(script: str) -> dict[str, str]:
    """Return the answer to each prompt of a script."""
    if not isinstance(script, str):
        raise ConfigurationError(
            f"backend.script={script!r}: must be the path of a JSON-lines file, or null."
        )
    path = Path(script)
    answers: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                prompt, answer = _read_line(f"backend.script={path} line {number}", line)
                if answers.setdefault(prompt, answer) != answer:
                    raise ConfigurationError(
                        f"backend.script={path} line {number}: the same prompt has another answer "
                        "further up."
                    )
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigurationError(
            f"backend.script={path}: cannot be read ({reason}); name a JSON-lines file."
        ) from error
    return answers


def _read_line(where: str, line: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
        prompt = row["input"] + row.get("answer_prefix", "")
        answer = row["answer"] if "answer" in row else " " + ", ".join(_listed(row["outputs"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(
            f"{where}: must be a JSON object with input, answer_prefix, and outputs or answer "
            f"({type(error).__name__}: {error})."
        ) from error
    if not isinstance(answer, str):
        raise ConfigurationError(f"{where}: answer must be text.")
    return prompt, answer


def _listed(outputs: Any) -> list[str]:
    if not isinstance(outputs, list):
        raise TypeError("outputs must be a list of text")
    return outputs
