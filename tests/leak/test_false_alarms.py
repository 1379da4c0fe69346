"""No leak, race or engine fault in runs over engines that are clean but noisy."""

from random import Random

import pytest

from ruler_bench.leak.verdict import judge

RUNS, SAMPLES = 300, 20
NAMES = ("persistent", "persistent_again", "fresh", "fresh_again", "reference", "shuffled")
ALARMS = ("leak", "race", "engine_fault")


def _tie(made, rng, ordinal):
    """Two answers between which rounding decides, and where they part."""
    right = f" {made.number(ordinal)}."
    place = rng.randrange(1, 8)
    other = right[:place] + str((int(right[place]) + 1) % 10) + right[place + 1 :]
    return right, other, place


def _near_ties(made, rng, rate, with_bits):
    """Rounding flips 1 to 10% of the answers; every logit moves a little in every run."""
    ties = {one: _tie(made, rng, one) for one in range(SAMPLES) if rng.random() < 2 * rate}
    for name in NAMES:
        for ordinal in range(SAMPLES):
            text, margin = f" {made.number(ordinal)}.", [rng.gauss(12, 0.002) for _ in range(9)]
            if ordinal in ties:
                first, second, place = ties[ordinal]
                text = rng.choice((first, second))
                margin[place] = abs(rng.gauss(0, 0.002))
            bits = rng.random() if with_bits else None
            yield made.answer(name, ordinal, text, margin=margin, bits=bits)


def _random_outputs(made, rng, rate, with_margins):
    """Now and then seven random digits, in any arm."""
    for name in NAMES:
        for ordinal in range(SAMPLES):
            wrong = f" {rng.randint(10**6, 10**7 - 1)}."
            text = wrong if rng.random() < rate else None
            margin = 8.0 if with_margins else None
            yield made.answer(name, ordinal, text, margin=margin, bits=None)


def _wrong_when_fresh(made, rng, rate, with_flips):
    """A model that finds another value of the same prompt, the same one every time."""
    limits = {one for one in range(SAMPLES) if rng.random() < 4 * rate}
    for name in NAMES:
        for ordinal in range(SAMPLES):
            text = f" {made.number(1000 + ordinal)}." if ordinal in limits else None
            flips = with_flips and rng.random() < rate
            yield made.answer(name, ordinal, " 7" if flips else text, bits=None)


LIVES = (
    ("persistent", "fresh"),
    ("persistent", "fresh", "fresh_again"),
    ("persistent", "persistent_again", "fresh", "fresh_again"),
    NAMES,
)
"""Sets of arms; the fewer, the less is known of what an engine keeps for its life."""


def _kernels(made, rng, names, samples, *, share, tells):
    """Each engine takes a kernel for its life, which turns near ties and changes all bits.

    A share of the engines takes one, the others another; with None each has one of its own.
    """
    rate = rng.choice((0.01, 0.02, 0.05, 0.1))
    ties = {one: _tie(made, rng, one) for one in range(samples) if rng.random() < 2 * rate}
    kernels = {name: _kernel(rng, share) for name in names}
    for name in names:
        for ordinal in range(samples):
            kernel = _kernel(rng, share) if name.startswith("fresh") else kernels[name]
            rounding = Random(f"{kernel} {ordinal}")
            text = f" {made.number(ordinal)}."
            margin = [8 + rounding.uniform(-0.001, 0.001) for _ in range(9)]
            if ordinal in ties:
                turned = kernel == 1 if share else rounding.random() < 0.5
                text, place = ties[ordinal][turned], ties[ordinal][2]
                margin[place] = 0.003
            yield made.answer(
                name,
                ordinal,
                text,
                margin=margin if tells != "text" else None,
                bits=f"kernel {kernel}" if tells == "bits" else None,
                tokens=tells != "text",
            )


def _kernel(rng, share):
    return int(rng.random() < share) if share else rng.randrange(10**9)


@pytest.mark.parametrize("tells", ["bits", "margins", "text"])
@pytest.mark.parametrize("share", [0.5, 0.2, 0.05, 0.9, None])
def test_no_alarm_where_an_engine_rounds_otherwise_for_its_life(made, share, tells):
    """Whatever the engine tells, however many answers there are, however common its kernel is."""
    alarms = []
    for seed, names in enumerate(LIVES * 5):
        rng = Random(f"{share} {tells} {seed}")
        samples = rng.choice((2, 3, 5, 8, 12, 20, 20, 40))
        # Of an engine that is not ours: ours promises the same kernels in every life.
        arms = {name: made.arm(name, {"dtype": "float32"}, "server") for name in names}
        arms = {**arms, "reference": made.arm("reference", made.OTHER_PATH)}
        records = list(_kernels(made, rng, names, samples, share=share, tells=tells))
        verdict = judge(records, arms, prompts=made.prompts(samples))
        alarms += [(seed, verdict.sentence)] if any(verdict.count(one) for one in ALARMS) else []
    assert alarms == []


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("noise", [_near_ties, _random_outputs, _wrong_when_fresh])
def test_no_alarm_in_300_clean_and_noisy_runs(made, noise, known):
    arms = made.arms(*NAMES, reference=made.OTHER_PATH)
    prompts = made.prompts(SAMPLES)
    alarms = []
    for seed in range(RUNS // 6 if noise is not _random_outputs else RUNS // 3):
        rng = Random(f"{noise.__name__} {known} {seed}")
        verdict = judge(
            list(noise(made, rng, rng.uniform(0.01, 0.1), known)), arms, prompts=prompts
        )
        alarms += [seed] if any(verdict.count(name) for name in ALARMS) else []
    assert alarms == []


def test_no_alarm_where_the_arms_are_few(made):
    """Three arms in text alone, as from prediction files."""
    names = ("persistent", "fresh", "fresh_again")
    alarms = 0
    for seed in range(RUNS):
        rng = Random(seed)
        rate = rng.uniform(0.01, 0.1)
        records = [
            made.answer(name, one, " 7" if rng.random() < rate else None, tokens=False)
            for name in names
            for one in range(SAMPLES)
        ]
        verdict = judge(records, made.arms(*names))
        alarms += any(verdict.count(name) for name in ALARMS)
    assert alarms == 0


def test_the_same_noise_does_not_hide_a_leak(made):
    """The founding case in text alone: 34 of 100 answers change, on top of noise of 3%."""
    names = ("persistent", "persistent_again", "shuffled", "fresh", "fresh_again")
    for seed in range(8):
        rng = Random(seed)
        leaked = set(rng.sample(range(1, 100), 34))
        records = [
            made.answer(name, one, " 7" if bad else None, tokens=False)
            for name in names
            for one in range(100)
            for bad in [(one in leaked and name in names[:3]) or rng.random() < 0.03]
        ]
        verdict = judge(records, made.arms(*names))
        assert verdict.verdict == "leak"
        found = {one.ordinal for one in verdict.indices if one.verdict == "leak"}
        assert len(found & leaked) >= 28
        assert len(found - leaked) <= 14
