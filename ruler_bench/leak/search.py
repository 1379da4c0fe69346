"""The search for the shortest sequence of requests after which an answer changes.

A probe is never asked for twice where one try decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ruler_bench.leak.probe import (
    LEVELS,
    TEXT,
    TOKENS,
    Answer,
    Ask,
    Probe,
    Start,
    change,
    counts_as,
    is_same,
    probe,
)
from ruler_bench.leak.shrink import ddmin, last_that_show, smaller_items
from ruler_bench.tokenizer import Tokenizer


class NotReproduced(Exception):  # noqa: N818 (what was found; nothing is wrong with the harness)
    """The change did not show again, or fresh engines disagree among themselves."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a search may ask.

    Attributes:
        repeats: how often what matters is asked: the whole, the result, and every probe where the
            change does not show each time.
        max_requests: of all probes together; None for any number.
    """

    repeats: int = 3
    max_requests: int | None = None


@dataclass(frozen=True)
class Smallest:
    """The smallest sequence that was found.

    Attributes:
        asks: the requests, the victim last.
        level: how its answer changes.
        expected, wrong: the victim's answer alone, and after the others.
        whole_wrong: its answer after all that the run had asked before it.
        shown, tries: in how many of how many repeats of these requests it changed.
        whole_shown: of as many repeats of the whole sequence.
        whole_requests: of the run's own sequence.
        is_smallest: whether it shows in every repeat and, as tried, no more without any one of
            its requests.
        why_not: why that cannot be said; "" where it can.
        probes, requests: asked by the search.
        settings: the engine's, in force.
    """

    asks: tuple[Ask, ...]
    level: str
    expected: Answer
    wrong: Answer
    whole_wrong: Answer
    shown: int
    tries: int
    whole_shown: int
    whole_requests: int
    is_smallest: bool
    why_not: str
    probes: int
    requests: int
    settings: Mapping[str, Any] = field(default_factory=dict)


class Search:
    """Looks for the smallest sequence after which one request's answer changes."""

    def __init__(
        self,
        start: Start,
        victim: Ask,
        tokenizer: Tokenizer,
        limits: Limits,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Prepare a search; nothing is asked yet.

        Args:
            start: builds a new engine.
            victim: the request whose answer changes.
            tokenizer: of the model; cuts prompts and decodes answers.
            limits: how much may be asked.
            progress: gets a line for each step forward.
        """
        self._start = start
        self._victim = victim
        self._tokenizer = tokenizer
        self._limits = limits
        self._progress = progress
        self._known: dict[tuple[Ask, ...], list[Probe]] = {}
        self._shown: list[tuple[Ask, ...]] = []
        self._tries = 1
        self._is_spent = False
        self._may_fail: frozenset[int] = frozenset()
        self._level = TOKENS
        self._bits = False
        self._fresh = Answer()
        self._wrong = Answer()
        self._kept = Answer()
        self._keeps_answer = False
        self.probes = 0
        self.requests = 0

    def run(self, predecessors: Sequence[Ask]) -> Smallest:
        """Search.

        Args:
            predecessors: what the engine served before the victim, in order.

        Raises:
            NotReproduced: it does not show, or fresh engines disagree.
            ConfigurationError, StartFailed: the engine cannot be built.
        """
        whole = tuple(predecessors)
        self._ask_fresh()
        whole_shown = self._ask_whole(whole)
        self._shown.append(whole)
        found = ddmin(last_that_show(whole, self._shows), self._shows)
        # What a shorter request leaves behind is mostly something else, and so is the wrong answer.
        is_kept, self._keeps_answer = self._keeps_answer, False
        # A model that is asked half a prompt may never stop: short answers first.
        found = smaller_items(found, _shorter_answers, self._shows)
        found = smaller_items(found, self._shorter_prompts, self._shows)
        # A request that was needed beside long ones may not be beside short ones.
        self._kept = self._wrong_after(found)
        self._keeps_answer = is_kept
        found = ddmin(found, self._shows)
        self._keeps_answer = False
        return self._confirmed(found, whole, whole_shown)

    def _ask(self, predecessors: tuple[Ask, ...]) -> Probe:
        self.probes += 1
        self.requests += len(predecessors) + 1
        return probe(self._start, (*predecessors, self._victim), self._tokenizer)

    def _ask_fresh(self) -> None:
        """Ask the victim alone, several times.

        Raises:
            NotReproduced: fresh engines disagree, so that no other answer means anything.
        """
        found = [self._ask(()) for _ in range(max(2, self._limits.repeats))]
        answers = [one.answer or Answer(error="no answer") for one in found]
        self._fresh = first = answers[0]
        if first.error is not None:
            raise NotReproduced(f"a fresh engine fails at this request ({first.error})")
        if any(change(one, first, False) for one in answers):
            raise NotReproduced(
                f"{len(answers)} fresh engines do not agree about this request, so that another "
                "answer after others means nothing"
            )
        self._bits = all(change(one, first, True) is None for one in answers)

    def _ask_fresh_again(self) -> None:
        """Ask the victim alone once more, after all others.

        Raises:
            NotReproduced: a new engine answers otherwise than before: something outlives engines.
        """
        answer = self._ask(()).answer
        if answer is None or change(answer, self._fresh, self._bits) is not None:
            raise NotReproduced(
                "after the search a fresh engine answers otherwise than before it: what it was "
                "asked outlives an engine, so that no probe means anything"
            )

    def _ask_whole(self, whole: tuple[Ask, ...]) -> int:
        """Ask the run's own sequence several times, and return how often the answer changes.

        A change that shows each time is looked for with one try a probe. Where tokens change,
        what changes the logits alone is not what is looked for.

        Raises:
            NotReproduced: it never changes.
        """
        repeats = self._limits.repeats
        found = [self._ask(whole) for _ in range(repeats)]
        levels = [self._change(one.answer) for one in found]
        seen = [one for one in levels if one is not None]
        if not seen:
            raise NotReproduced(
                f"after the {len(whole)} requests before it, the answer is that of a fresh engine "
                f"in {repeats} of {repeats} repeats"
            )
        self._level = max(seen, key=LEVELS.index)
        wrong = [
            one.answer
            for one, level in zip(found, levels, strict=True)
            if one.answer is not None and counts_as(level, self._level)
        ]
        self._wrong = self._kept = wrong[0]
        # Where it is always the same wrong answer, leaving requests out must not make it another.
        is_visible = self._level in (TOKENS, TEXT)
        self._keeps_answer = (
            is_visible and len(wrong) == repeats and all(is_same(one, wrong[0]) for one in wrong)
        )
        shown = sum(counts_as(one, self._level) for one in levels)
        self._may_fail = frozenset().union(*(one.failed for one in found))
        self._tries = 1 if shown == repeats else repeats
        self._progress(
            f"{_size(whole)} before it: the answer changes in {shown} of {repeats} repeats"
        )
        return shown

    def _wrong_after(self, predecessors: tuple[Ask, ...]) -> Answer:
        """Return the wrong answer that a sequence showed when it was last asked."""
        probes = self._known.get(predecessors, ())
        shown = [one.answer for one in probes if self._is_shown(one) and one.answer is not None]
        return shown[-1] if shown else self._wrong

    def _change(self, answer: Answer | None) -> str | None:
        return None if answer is None else change(answer, self._fresh, self._bits)

    def _is_shown(self, found: Probe) -> bool:
        """Whether a probe shows what is looked for, and not, say, what a failed request left."""
        is_change = counts_as(self._change(found.answer), self._level)
        if self._keeps_answer and found.answer is not None:
            is_change = is_change and is_same(found.answer, self._kept)
        return is_change and found.failed <= self._may_fail

    def _shows(self, predecessors: tuple[Ask, ...]) -> bool:
        if predecessors not in self._known:
            limit = self._limits.max_requests
            if limit is not None and self.requests + len(predecessors) + 1 > limit:
                self._is_spent = True
                return False
            probes = self._known[predecessors] = []
            while len(probes) < self._tries and not any(map(self._is_shown, probes)):
                probes.append(self._ask(predecessors))
            if any(map(self._is_shown, probes)):
                self._shown.append(predecessors)
                self._progress(f"{_size(predecessors)} before it: the answer still changes")
        return any(map(self._is_shown, self._known[predecessors]))

    def _shorter_prompts(self, ask: Ask) -> Iterator[Ask]:
        """Yield a request with the first and with the second half of its prompt."""
        ids = ask.prompt_token_ids
        if len(ids) < 2:
            return
        after = ask.cancel_after_seconds
        for kept in (ids[: len(ids) // 2], ids[len(ids) - len(ids) // 2 :]):
            yield replace(
                ask,
                prompt=self._tokenizer.decode(list(kept)),
                prompt_token_ids=kept,
                # Half the work takes at most half as long, and must not be done before its end.
                cancel_after_seconds=None if after is None else after / 2,
            )

    def _confirmed(
        self, found: tuple[Ask, ...], whole: tuple[Ask, ...], whole_shown: int
    ) -> Smallest:
        """Ask the result again several times; where it does not show, what it was made from.

        Raises:
            NotReproduced: nothing shows again.
        """
        repeats = self._limits.repeats
        candidates = [found, *(one for one in reversed(self._shown) if one != found)]
        for asks in candidates:
            probes = [self._ask(asks) for _ in range(repeats)]
            shown = [one for one in probes if self._is_shown(one)]
            if not shown:
                continue
            self._ask_fresh_again()
            why_not = self._why_not(asks is found, len(shown))
            return Smallest(
                asks=(*asks, self._victim),
                level=self._level,
                expected=self._fresh,
                wrong=shown[0].answer or Answer(),
                whole_wrong=self._wrong,
                shown=len(shown),
                tries=repeats,
                whole_shown=whole_shown,
                whole_requests=len(whole) + 1,
                is_smallest=not why_not,
                why_not=why_not,
                probes=self.probes,
                requests=self.requests,
                settings=shown[0].settings,
            )
        raise NotReproduced(
            f"the answer changed in {whole_shown} of {repeats} repeats of the whole, and nothing "
            "of what was found shows again"
        )

    def _why_not(self, is_last: bool, shown: int) -> str:
        repeats = self._limits.repeats
        if self._is_spent:
            return f"--max-requests {self._limits.max_requests} was reached"
        if not is_last:
            return "smaller sequences showed it once and did not again"
        if shown < repeats or self._tries > 1:
            return (
                f"it does not show each time, and a request was left out after {self._tries} "
                + ("try" if self._tries == 1 else "tries")
            )
        return ""


def _shorter_answers(ask: Ask) -> Iterator[Ask]:
    """Yield a request for one token, which is mostly enough, and for half as many."""
    for new_tokens in dict.fromkeys((1, ask.max_new_tokens // 2)):
        if 0 < new_tokens < ask.max_new_tokens:
            yield replace(ask, max_new_tokens=new_tokens)


def _size(asks: Sequence[Ask]) -> str:
    prompts = sum(len(one.prompt_token_ids) for one in asks)
    answers = sum(one.max_new_tokens for one in asks)
    return f"{_counted(len(asks))} of {prompts} prompt tokens and up to {answers} new ones"


def _counted(requests: int) -> str:
    return "1 request" if requests == 1 else f"{requests} requests"
