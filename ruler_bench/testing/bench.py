"""Engines under check, and what they answer."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

from backends.base import Backend, Generation, Request, RequestError
from ruler_bench.answer import check_answer, checked_generation
from ruler_bench.errors import one_line
from ruler_bench.testing.prompts import Prompt, Prompts


class Unanswered(Exception):  # noqa: N818 (what happened)
    """A request that every engine must answer failed, or its answer is not as it must be."""


class Bench:
    """Builds engines one after the other, asks them, and closes them."""

    def __init__(
        self, factory: Callable[[], Backend], prompts: Prompts, equal_bits: bool = True
    ) -> None:
        self.factory = factory
        self.prompts = prompts
        self.equal_bits = equal_bits
        self._built = 0
        self._open: list[Backend] = []
        self._alone: dict[str, Generation] = {}
        self._numbers = itertools.count()

    # --- engines --------------------------------------------------------------------------------

    def engine(self) -> Backend:
        """Build an engine.

        Raises:
            Exception: what the constructor of the first one raises.
            Unanswered: a later one could not be built.
        """
        try:
            found = self.factory()
        except Exception as error:
            if not self._built:
                raise
            raise Unanswered(
                f"an engine could not be built after close() of the one before it: {told(error)}"
            ) from error
        self._built += 1
        self._open.append(found)
        return found

    def close(self, engine: Backend) -> None:
        """Close an engine.

        Raises:
            Unanswered: it failed at that.
        """
        self._open = [one for one in self._open if one is not engine]
        try:
            engine.close()
        except Exception as error:
            raise Unanswered(f"close() raised {told(error)}") from error

    def close_all(self) -> None:
        """Close what is open, whatever it says to that."""
        for one in self._open:
            with contextlib.suppress(Exception):
                one.close()

    # --- requests -------------------------------------------------------------------------------

    def request(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        stop_token_ids: tuple[int, ...] | None = None,
    ) -> Request:
        """Return a request with a number that no other has."""
        return Request(
            request_id=next(self._numbers),
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            max_new_tokens=prompt.max_new_tokens if max_new_tokens is None else max_new_tokens,
            stop_token_ids=(
                self.prompts.stop_token_ids if stop_token_ids is None else stop_token_ids
            ),
        )

    def ask(
        self,
        engine: Backend,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        stop_token_ids: tuple[int, ...] | None = None,
    ) -> Generation:
        """Ask a request that must be answered.

        Raises:
            Unanswered: it was not, or the answer is not as `Generation` says.
        """
        return self.send(engine, prompt, self.request(prompt, max_new_tokens, stop_token_ids))

    def send(self, engine: Backend, prompt: Prompt, request: Request) -> Generation:
        """Ask this very request; see `ask`."""
        try:
            found = engine.generate(request)
        except Exception as error:
            raise Unanswered(f"{prompt.name}: generate raised {told(error)}") from error
        try:
            answer = checked_generation(found)
            check_answer(answer, request, self.prompts.vocabulary)
        except RequestError as error:
            raise Unanswered(f"{prompt.name}: {one_line(error)}") from error
        return answer

    def ask_alone(self, engine: Backend, prompt: Prompt) -> None:
        """Ask a new engine its only request, keep the answer for `alone`, and close it.

        Raises:
            Unanswered: see `ask` and `close`.
        """
        try:
            self._alone[prompt.name] = self.ask(engine, prompt)
        finally:
            self.close(engine)

    def alone(self, prompt: Prompt) -> Generation:
        """Return the answer of the engine that was asked this prompt and nothing else."""
        return self._alone[prompt.name]

    # --- answers --------------------------------------------------------------------------------

    def difference(
        self, found: Generation, expected: Generation, tokens_alone: bool = False
    ) -> str | None:
        """Return what is different in an answer, or None; logits only where bits must be equal."""
        texts = [self.prompts.text_of(one) for one in (found, expected)]
        if texts[0] != texts[1]:
            return f"{_shown(texts[0])} instead of {_shown(texts[1])}"
        if found.token_ids != expected.token_ids:
            return f"token_ids {found.token_ids} instead of {expected.token_ids}"
        if found.finish_reason != expected.finish_reason:
            return f"finish_reason {found.finish_reason} instead of {expected.finish_reason}"
        if tokens_alone or not self.equal_bits:
            return None
        for field in ("logits_digest", "top2_margin"):
            mine, other = getattr(found, field), getattr(expected, field)
            if mine != other:
                place = _first_difference(mine, other)
                return f"equal tokens, but another {field} at token {place}: other logits"
        return None

    def foreign_needle(self, prompt: Prompt, answer: Generation) -> str | None:
        """Return the needle of another prompt that an answer holds, or None."""
        text = self.prompts.text_of(answer)
        needles = (one.needle for one in self.prompts.all if one.needle not in prompt.text)
        return next((one for one in needles if one in text), None)


def told(error: BaseException) -> str:
    """Return type and message of an error."""
    return f"{type(error).__name__}: {one_line(error)}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "...")


def _first_difference(mine: object, other: object) -> int:
    if not isinstance(mine, tuple) or not isinstance(other, tuple):
        return 0
    pairs = enumerate(itertools.zip_longest(mine, other))
    return next(place for place, (one, two) in pairs if one != two)
