"""Case: everything that a set of arms shows, before anyone gives it a name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from backends.base import OUTLIVES_CLOSE
from ruler_bench.leak.arms import (
    ENGINE_PER_SAMPLE_IN_PROCESS,
    ONE_ENGINE,
    REFERENCES,
    is_batched,
)
from ruler_bench.leak.canary import Canaries, Canary, scan
from ruler_bench.leak.differences import (
    ANSWERS,
    BITS,
    CORRECTNESS,
    LEVELS,
    LOGITS,
    Difference,
    NumericFloor,
    difference,
    has_bits,
    largest_shift,
    numeric_floor,
)
from ruler_bench.leak.join import (
    FRESH,
    FRESH_AGAIN,
    PERSISTENT,
    PERSISTENT_AGAIN,
    REFERENCE,
    REFERENCE_AGAIN,
    SHUFFLED,
    ArmFacts,
    Joined,
    bits_differ_by,
)
from ruler_bench.leak.life_noise import LifeNoise, are_too_many
from ruler_bench.leak.stale_question import stale_questions
from ruler_bench.leak.tests_of_difference import (
    EXACT_ALPHA,
    VERDICT_ALPHA,
    Counted,
    all_in,
    lives_apart_in_bits,
    odd_one_out,
    one_of_two,
    warm_against_fresh,
)
from ruler_bench.records import Record

LEAST_EXACT = 2
"""Indices at which two controls must agree to the bit before an engine counts as bit-stable."""

REPEATED_BY_A_RACE = 4
"""So many differences may come again for each that does not: a race that hits 8 of 9 requests."""

LEAST_ALIKE = 10
"""Answers that two warm runs must give alike before one that fresh engines do not give is called a
leak: with fewer, a race may have hit the same request in both."""

LEAST_ROUNDED = 3
"""Indices that must agree between two orders before a difference is put down to rounding."""


@dataclass(frozen=True)
class WarmTest:
    """One warm arm against two controls.

    Attributes:
        arm: the warm arm.
        differing: ordinals at which it differs from the fresh arm, the controls being equal.
        tests: the odd-one-out test by level; without a control, one-sided by correctness, of all
            differences and of those by more than rounding.
        right_only: ordinals at which only this arm is right.
        wrong_only: ordinals at which only the fresh arm is right.
    """

    arm: str
    differing: tuple[int, ...]
    tests: Mapping[str, Counted]
    right_only: int
    wrong_only: int


class Case:
    """Arms side by side, and what their comparison shows.

    Attributes:
        joined: the records.
        fresh: the arm of fresh engines, or None.
        control: a second arm on the same path that is not warm: fresh again, else a reference that
            must have the same bits.
        main: the warm arm that the sentences are about, or None.
        warm: every arm of one engine whose answers must equal the fresh ones.
        life_noise: whether noise that an engine keeps for its life may be behind it.
        canaries: what the scan found; None where no prompt was at hand.
    """

    def __init__(self, joined: Joined, prompts: Mapping[str, str] | None) -> None:
        self.joined = joined
        fresh = [name for name in (FRESH, FRESH_AGAIN) if joined.has(name)]
        self.fresh = fresh[0] if fresh else None
        self.warm = [name for name in joined.answers if self._is_warm(name)]
        mains = (PERSISTENT, PERSISTENT_AGAIN, SHUFFLED)
        ranked = [name for name in mains if name in self.warm] or self.warm
        self.main = ranked[0] if ranked else None
        self.control = self._control(fresh)
        self.life_noise = LifeNoise(self)
        self.canaries = self._scan(prompts)

    @property
    def ordinals(self) -> tuple[int, ...]:
        """Ordinals that every core arm has answered."""
        return self.joined.compared

    def facts(self, name: str) -> ArmFacts:
        """Return an arm's facts."""
        return self.joined.facts[name]

    @property
    def shares_process(self) -> bool:
        """Whether the fresh engines were built in one process, so that they are less than fresh."""
        names = [one for one in (self.fresh, self.control) if one is not None]
        return any(self.facts(one).arm.lifetime == ENGINE_PER_SAMPLE_IN_PROCESS for one in names)

    def _is_warm(self, name: str) -> bool:
        facts = self.facts(name)
        return (
            name not in (REFERENCE, REFERENCE_AGAIN, FRESH, FRESH_AGAIN)
            and not name.startswith("chunks_")
            and facts.arm.lifetime == ONE_ENGINE
        )

    def _control(self, fresh: Sequence[str]) -> str | None:
        if len(fresh) > 1:
            return fresh[1]
        if (
            fresh
            and self.joined.has(REFERENCE)
            and self.bits_differ_by(fresh[0], REFERENCE) is None
        ):
            return REFERENCE
        return None

    def _scan(self, prompts: Mapping[str, str] | None) -> Canaries | None:
        streams = {
            name: stream
            for name, stream in self.joined.streams.items()
            if self.facts(name).order_known and self.facts(name).arm.lifetime == ONE_ENGINE
        }
        if not prompts or not streams:
            return None
        found = scan(streams, prompts)
        managed = [one for one in streams if self.facts(one).arm.settings.get(OUTLIVES_CLOSE)]
        tested = {name: one for name, one in streams.items() if name not in REFERENCES}
        others = (
            one
            for name in self.joined.streams.keys() - tested.keys()
            for one in self.joined.streams[name]
        )
        stale = stale_questions(tested, prompts, managed, others)
        return replace(found, proofs=found.proofs + stale) if found.outputs else None

    @functools.cached_property
    def proofs(self) -> list[Canary]:
        """Canaries at indices of the samples that a fresh engine does not print, too."""
        found = []
        for one in self.canaries.proofs if self.canaries else ():
            fresh = self.joined.get(self.fresh, one.ordinal) if self.fresh else None
            printed = fresh is not None and one.value in (fresh.output or "").lower()
            if one.ordinal in self.joined.known and not printed:
                found.append(one)
        return found

    # --- pairs ----------------------------------------------------------------------------------

    def bits_differ_by(self, a: str, b: str) -> str | None:
        """Return why two arms must not be compared bit by bit, or None where they may."""
        return bits_differ_by(self.facts(a), self.facts(b))

    @functools.cache  # noqa: B019 (a case lives as long as its verdict is worked out)
    def _bitwise(self, a: str, b: str) -> bool:
        return self.bits_differ_by(a, b) is None

    def differ(self, a: str, b: str, ordinal: int) -> Difference | None:
        """Return how two arms' answers differ, at the strictest level that they may be held to."""
        return self._difference(a, b, ordinal, self._bitwise(a, b))

    def _difference(self, a: str, b: str, ordinal: int, bitwise: bool) -> Difference | None:
        """Return how two arms' answers differ.

        A batch rounds otherwise than a row alone. Where no margin tells by how much, the two are
        only held to be right or wrong alike.
        """
        mine, theirs = self.answer(a, ordinal), self.answer(b, ordinal)
        found = difference(mine, theirs, bitwise)
        if found is None or found.gap is not None or is_batched(a) == is_batched(b):
            return found
        return None if mine.correct == theirs.correct else found

    def beside(self, record: Record, reference: Record) -> Difference | None:
        """Return how two answers to a prompt beside the samples differ."""
        return difference(record, reference, self._bitwise(record.arm, reference.arm))

    def answer(self, name: str, ordinal: int) -> Record:
        """Return an arm's answer.

        Raises:
            KeyError: it has none.
        """
        return self.joined.answers[name][ordinal]

    def both(self, *names: str) -> list[int]:
        """Return the compared ordinals that all these arms have."""
        return [
            one for one in self.ordinals if all(one in self.joined.answers[name] for name in names)
        ]

    # --- what the arms show together ------------------------------------------------------------

    @functools.cached_property
    def unstable(self) -> dict[int, Difference]:
        """Where fresh differs from fresh again."""
        return self._differing(FRESH, FRESH_AGAIN)

    @functools.cached_property
    def warm_pair(self) -> dict[int, Difference]:
        """Where persistent differs from persistent again."""
        return self._differing(PERSISTENT, PERSISTENT_AGAIN)

    @functools.cached_property
    def reference_pair(self) -> dict[int, Difference]:
        """Where the reference differs from itself."""
        return self._differing(REFERENCE, REFERENCE_AGAIN)

    def _differing(self, a: str, b: str) -> dict[int, Difference]:
        if not self.joined.has(a, b):
            return {}
        found = {one: self.differ(a, b, one) for one in self.both(a, b)}
        return {one: how for one, how in found.items() if how is not None}

    @functools.cached_property
    def is_exact(self) -> bool:
        """Whether the controls are equal to the last bit at every index: no noise at all."""
        fresh, control = self.fresh, self.control
        if fresh is None or control is None or not self._bitwise(fresh, control):
            return False
        ordinals = self.both(fresh, control)
        return len(ordinals) >= LEAST_EXACT and all(
            has_bits(self.answer(fresh, one), self.answer(control, one))
            and self.differ(fresh, control, one) is None
            for one in ordinals
        )

    def calm(self, ordinal: int) -> bool:
        """Whether the controls agree at an index."""
        if self.fresh is None or self.control is None:
            return self.fresh is not None
        return self.differ(self.fresh, self.control, ordinal) is None

    # --- tests ----------------------------------------------------------------------------------

    @functools.cached_property
    def warm_tests(self) -> list[WarmTest]:
        """Every warm arm against the controls, the main one first."""
        if self.fresh is None:
            return []
        arms = sorted(self.warm, key=lambda name: name != self.main)
        return [self._warm_test(name, self.fresh) for name in arms]

    def _warm_test(self, name: str, fresh: str) -> WarmTest:
        ordinals = self.both(name, fresh)
        differing = [
            one for one in ordinals if self.calm(one) and self.differ(name, fresh, one) is not None
        ]
        right_only, wrong_only = self._scored(name, fresh, ordinals)
        if self.control is None:
            far = [one for one in differing if self.life_noise.is_beyond_rounding(name, fresh, one)]
            far_right, far_wrong = self._scored(name, fresh, far)
            tests = {
                CORRECTNESS: one_of_two(wrong_only, wrong_only + right_only),
                LOGITS: one_of_two(far_wrong, far_wrong + far_right),
            }
        else:
            tests = {level: self._odd(level, name, fresh, self.control) for level in LEVELS}
        return WarmTest(name, tuple(differing), tests, right_only, wrong_only)

    def _scored(self, warm: str, fresh: str, ordinals: Sequence[int]) -> tuple[int, int]:
        """Return at how many indices only the warm answer is right, and only the fresh one."""
        right = [
            (bool(self.answer(warm, one).correct), bool(self.answer(fresh, one).correct))
            for one in ordinals
        ]
        return right.count((True, False)), right.count((False, True))

    def _odd(self, level: str, name: str, fresh: str, control: str) -> Counted:
        """Test whether `name` is the odd one of three."""
        same = self.sameness(level)
        odd = cases = 0
        for one in self.both(name, fresh, control):
            warm_is_odd = same(fresh, control, one)
            equal = warm_is_odd + same(name, fresh, one) + same(name, control, one)
            cases += equal == 1
            odd += equal == 1 and warm_is_odd
        return odd_one_out(odd, cases)

    def sameness(self, level: str) -> Callable[[str, str, int], bool]:
        """Return whether two arms' answers to an ordinal are the same, at one of LEVELS."""

        def correctness(a: str, b: str, ordinal: int) -> bool:
            return self.answer(a, ordinal).correct == self.answer(b, ordinal).correct

        def answers(a: str, b: str, ordinal: int) -> bool:
            return self._difference(a, b, ordinal, bitwise=False) is None

        def bits(a: str, b: str, ordinal: int) -> bool:
            return self.differ(a, b, ordinal) is None

        def logits(a: str, b: str, ordinal: int) -> bool:
            return not self.life_noise.is_beyond_rounding(a, b, ordinal)

        found = {BITS: bits, LOGITS: logits, ANSWERS: answers, CORRECTNESS: correctness}
        return found[level]

    @functools.cached_property
    def repeated(self) -> list[int]:
        """Where both runs of the warm engine give the same answer, another than the fresh one."""
        if self.fresh is None or not self.joined.has(PERSISTENT, PERSISTENT_AGAIN):
            return []
        return [
            one
            for one in self.both(PERSISTENT, PERSISTENT_AGAIN, self.fresh)
            if self.calm(one)
            and one not in self.warm_pair
            and self.differ(PERSISTENT, self.fresh, one) is not None
        ]

    @functools.cached_property
    def pooled_tests(self) -> dict[str, Counted]:
        """All warm arms at once against the two controls, by answers and by logits; none where
        there is one warm arm.
        """
        fresh, control = self.fresh, self.control
        if fresh is None or control is None:
            return {}
        warm = [
            one
            for one in self.warm
            if all(each in self.joined.answers[one] for each in self.ordinals)
        ]
        if len(warm) < 2:
            return {}
        names, ordinals = [*warm, fresh, control], self.both(fresh, control)
        return {
            level: warm_against_fresh([self._classes(level, names, one) for one in ordinals])
            for level in (ANSWERS, LOGITS)
        }

    def _classes(self, level: str, names: Sequence[str], ordinal: int) -> list[int]:
        """Return a number for each arm's answer, the same for the same answer."""
        same = self.sameness(level)
        found: list[int] = []
        for place, name in enumerate(names):
            equal = (one for one in range(place) if same(names[one], name, ordinal))
            first = next(equal, None)
            found.append(place if first is None else found[first])
        return found

    @functools.cached_property
    def exact_test(self) -> Counted | None:
        """Of a bit-stable engine: whether all that differs is warm, over all warm arms.

        Where another kernel for a life is not promised away, only what differs by more than
        rounding counts.
        """
        fresh = self.fresh
        if not self.is_exact or not self.warm_tests or fresh is None:
            return None
        firm = {
            one.arm: self._firm(one) for one in self.warm_tests if self._bitwise(one.arm, fresh)
        }
        groups = [
            (
                sum(self.joined.get(arm, one) is not None for arm in firm),
                sum(one in found for found in firm.values()),
            )
            for one in self.both(fresh)
        ]
        differing = sum(bad for _, bad in groups)
        return Counted(differing, differing, all_in(groups))

    def _firm(self, test: WarmTest) -> set[int]:
        """Return where a warm arm differs by more than noise of its life could make it."""
        noise = self.life_noise
        return {
            one
            for one in test.differing
            if noise.is_promised_away or noise.is_beyond_rounding(test.arm, self.fresh or "", one)
        }

    @functools.cached_property
    def race_test(self) -> Counted | None:
        """Whether two warm runs differ at more indices than two fresh ones."""
        return self._race_test(BITS)

    def _race_test(self, level: str) -> Counted | None:
        if not self.joined.has(PERSISTENT, PERSISTENT_AGAIN, FRESH, FRESH_AGAIN):
            return None
        warm = self._unlike(level, PERSISTENT, PERSISTENT_AGAIN)
        fresh = self._unlike(level, FRESH, FRESH_AGAIN)
        return one_of_two(len(warm - fresh), len(warm ^ fresh))

    def _unlike(self, level: str, a: str, b: str) -> set[int]:
        same = self.sameness(level)
        return {one for one in self.both(a, b) if not same(a, b, one)}

    @functools.cached_property
    def has_race(self) -> bool:
        """Whether the warm runs' differences among themselves are shown to be a race.

        Where fresh engines are equal to the bit and warm ones are shown to differ from them, there
        is no noise that two warm runs could differ by.
        """
        if self.race_test is None or not self.warm_pair:
            return False
        if self.is_exact and self.leaking:
            return True
        level = EXACT_ALPHA if self.is_exact else VERDICT_ALPHA
        return self.race_test.p_value <= level and self._is_more_than_two_kernels(level)

    def _is_more_than_two_kernels(self, level: float) -> bool:
        """Whether two warm runs differ by more than engines with different kernels do."""
        noise = self.life_noise
        if self.leaking or (self.is_exact and noise.is_promised_away):
            return True
        far, seen = self._race_test(LOGITS), self._race_test(ANSWERS)
        if far is not None and far.p_value <= level:
            return True
        pair = (PERSISTENT, PERSISTENT_AGAIN)
        visible = sum(noise.is_no_near_tie(*pair, one) for one in self.both(*pair))
        many = are_too_many(visible, len(self.both(*pair)))
        return many and seen is not None and seen.p_value <= level

    @functools.cached_property
    def race_explains(self) -> bool:
        """Whether the race is behind all that differs when warm, also what differs alike twice.

        A request that is hit in both runs may be answered wrongly in the same way. A leak without a
        race, on the other hand, comes again at every index.
        """
        if not self.has_race:
            return False
        few = len(self.repeated) <= REPEATED_BY_A_RACE * len(self.warm_pair)
        return not self.repeated or (self.is_exact and few)

    @functools.cached_property
    def leaking(self) -> list[str]:
        """Warm arms whose differences are shown not to be noise.

        Where a canary proves that an arm's engine leaks, its other differences are put down to the
        leak, too.
        """
        if all(set(test.differing) <= self.rounded for test in self.warm_tests):
            return []
        if self._all_leak:
            return [test.arm for test in self.warm_tests if test.differing]
        proven = {one.arm for one in self.proofs}
        return [
            test.arm for test in self.warm_tests if test.arm in proven or self._leaks_alone(test)
        ]

    @functools.cached_property
    def _all_leak(self) -> bool:
        """Whether all warm arms together show that they leak."""
        noise, apart = self.life_noise, self.life_noise.apart[ANSWERS]
        for name, test in self.pooled_tests.items():
            if test.p_value > VERDICT_ALPHA / 2:
                continue
            if name == LOGITS or (apart is not None and apart.carries_a_verdict):
                return True
            if any(noise.is_seen_too_often(one.arm) for one in self.warm_tests):
                return True
        exact = self.exact_test
        return exact is not None and (exact.p_value <= EXACT_ALPHA or self._repeats)

    @property
    def _repeats(self) -> bool:
        """Whether a bit-stable engine gives another answer than fresh ones, alike in two runs."""
        if not self.repeated or self.warm_pair:
            return False
        noise, fresh = self.life_noise, self.fresh or ""
        answers = len(self.both(PERSISTENT, PERSISTENT_AGAIN, fresh))
        if len(self.repeated) == 1 and answers < LEAST_ALIKE:
            return False
        if noise.is_promised_away or any(
            noise.is_beyond_rounding(PERSISTENT, fresh, one) for one in self.repeated
        ):
            return True
        odd = len(self.repeated)
        return lives_apart_in_bits(2, odd, answers - odd) <= VERDICT_ALPHA

    def _leaks_alone(self, test: WarmTest) -> bool:
        """Whether one warm arm shows that it leaks."""
        noise, arms = self.life_noise, len(self.warm_tests)
        level = VERDICT_ALPHA / arms / (2 if self.pooled_tests else 1)
        for name, found in test.tests.items():
            if found.p_value <= level and (name == LOGITS or noise.excludes(test.arm, name)):
                return True
        if not self.is_exact or test.tests[BITS].p_value > EXACT_ALPHA / arms:
            return False
        if noise.is_promised_away or test.tests[LOGITS].p_value <= EXACT_ALPHA / arms:
            return True
        odd = test.tests[BITS].count
        equal = len(self.both(test.arm, self.fresh or "", self.control or "")) - odd
        return lives_apart_in_bits(1, odd, equal) <= VERDICT_ALPHA / arms

    @functools.cached_property
    def rounded(self) -> frozenset[int]:
        """Where a warm engine rounds differently from a cold one, whatever it served before.

        Some engines take other kernels once they are warm. That is no leak where the tokens are the
        same, margins move by no more than rounding, and another order of requests gives the same
        bits at every index. Our own engine promises that nothing adapts: there, bits are bits.
        """
        if self.fresh is None or not self.joined.has(PERSISTENT, SHUFFLED):
            return frozenset()
        if "attend_tokens" in self.facts(PERSISTENT).arm.settings:
            return frozenset()
        later = [
            one
            for one in self.both(PERSISTENT, SHUFFLED, self.fresh)
            if self.answer(PERSISTENT, one).position and self.answer(SHUFFLED, one).position
        ]
        if any(self.differ(PERSISTENT, SHUFFLED, one) for one in later):
            return frozenset()
        low = numeric_floor([], [self.facts(PERSISTENT).arm.settings.get("dtype")]).low
        found = set()
        for one in later:
            how = self.differ(PERSISTENT, self.fresh, one)
            warm, cold = self.answer(PERSISTENT, one), self.answer(self.fresh, one)
            if how is not None and (how.is_visible or largest_shift(warm, cold) > low):
                return frozenset()
            if how is not None:
                found.add(one)
        return frozenset(found if len(found) >= LEAST_ROUNDED else ())

    # --- the reference --------------------------------------------------------------------------

    @functools.cached_property
    def floor(self) -> NumericFloor | None:
        """The numeric floor between the tested engine's path and the reference's."""
        own = self.fresh or self.main
        if own is None or not self.joined.has(REFERENCE):
            return None
        return self._floor(own, REFERENCE)

    @functools.cached_property
    def noise_floor(self) -> NumericFloor | None:
        """The numeric floor between two engines on the same path."""
        if self.fresh is None or self.main is None:
            return None
        return self._floor(self.fresh, self.control or self.main)

    def _floor(self, a: str, b: str) -> NumericFloor:
        pairs = [(self.answer(a, one), self.answer(b, one)) for one in self.both(a, b)]
        return numeric_floor(pairs, [self.facts(name).arm.settings.get("dtype") for name in (a, b)])

    @functools.cached_property
    def fault_test(self) -> Counted | None:
        """Whether the reference is right where fresh engines are wrong, more than the reverse."""
        if self.fresh is None or not self.joined.has(REFERENCE):
            return None
        right = [
            (self.answer(self.fresh, one).correct, self.answer(REFERENCE, one).correct)
            for one in self.both(self.fresh, REFERENCE)
            if one not in self.unstable and one not in self.reference_pair
        ]
        wrong_only, right_only = right.count((False, True)), right.count((True, False))
        return one_of_two(wrong_only, wrong_only + right_only)
