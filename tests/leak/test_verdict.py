"""The verdict over engines that are made up, one fault at a time."""

from dataclasses import replace

import pytest

from ruler_bench.leak.arms import Arm
from ruler_bench.leak.join import ArmFacts
from ruler_bench.leak.verdict import judge, judge_run

ALL = ("persistent", "persistent_again", "fresh", "fresh_again", "reference", "shuffled")
COUNT = 20


def _records(made, names, changed=None, **changes):
    """Records of arms; `changed(name, ordinal)` gives what is not right, as answer's arguments."""
    found = []
    for name in names:
        for ordinal in range(COUNT):
            how = changed(name, ordinal) if changed else None
            found.append(made.answer(name, ordinal, **{**changes, **(how or {})}))
    return found


def _classes(verdict):
    return {one.ordinal: one.verdict for one in verdict.indices if one.verdict != "ok"}


def _is_warm(name):
    return name in ("persistent", "persistent_again", "shuffled")


def test_a_clean_run_says_what_it_excludes(made):
    verdict = judge(_records(made, ALL), made.arms(*ALL), prompts=made.prompts(COUNT))
    assert (verdict.verdict, verdict.status) == ("ok", 0)
    assert verdict.sentence.startswith("niah_single_1: OK. No answer of 20 changes")
    assert verdict.excluded_leak_rate == pytest.approx(1 - 0.05 ** (1 / 20))
    assert "13.9%" in verdict.sentence


def test_only_audited_indices_count_towards_the_bound(made):
    verdict = judge(_records(made, ALL), made.arms(*ALL), audited=[1, 4, 7])
    assert verdict.audited == 3
    assert verdict.excluded_leak_rate == pytest.approx(1 - 0.05 ** (1 / 3))


def test_the_sentence_of_a_leak(made):
    bad = {2, 4, 7, 9, 11, 15}

    def leak(name, ordinal):
        if _is_warm(name) and ordinal in bad:
            return {"text": f" {made.number(3)}." if ordinal == 4 else " 99."}
        return None

    verdict = judge(_records(made, ALL, leak), made.arms(*ALL), prompts=made.prompts(COUNT))
    assert verdict.sentence == (
        "niah_single_1: LEAK. 6 of 20 answers change when the engine has served others; "
        "first at position 2; index 4 prints the answer of index 3."
    )
    assert verdict.status == 3
    assert _classes(verdict) == dict.fromkeys(sorted(bad), "leak")
    assert verdict.excluded_leak_rate is None
    kinds = [one.kind for one in verdict.evidence]
    order = ["canary", "same path", "correctness", "hint"]
    assert kinds == sorted(kinds, key=order.index)
    assert kinds[0] == "canary"


@pytest.mark.parametrize(
    ("names", "bad", "expected"),
    [
        (("persistent",), 8, "leak"),
        (("persistent",), 7, "unstable"),
        (("persistent", "persistent_again"), 8, "leak"),
        (("persistent", "persistent_again"), 7, "unstable"),
        (("persistent", "persistent_again", "shuffled"), 5, "leak"),
        (("persistent", "persistent_again", "shuffled"), 4, "unstable"),
    ],
)
def test_the_more_lives_the_fewer_texts_are_enough(made, names, bad, expected):
    """Prediction files: no tokens, no digests, no margins; a life may have another kernel."""

    def changed(name, ordinal):
        return {"text": " 12"} if _is_warm(name) and 0 < ordinal <= bad else None

    names = (*names, "fresh", "fresh_again")
    verdict = judge(_records(made, names, changed, tokens=False), made.arms(*names))
    assert (verdict.verdict, verdict.count(expected)) == (expected, bad)
    assert verdict.status == (3 if expected == "leak" else 5)
    if expected == "unstable":
        assert "rounds differently for its whole life is not excluded" in verdict.sentence
    needed = {one.verdict: one.how for one in verdict.support}["leak"]
    least = {1: 8, 2: 8, 3: 5}[len(names) - 2]
    assert f"{least} answers that differ" in needed


def test_three_texts_that_differ_are_too_few(made):
    names = ("persistent", "fresh", "fresh_again")

    def changed(name, ordinal):
        return {"text": " 12"} if name == "persistent" and 0 < ordinal <= 3 else None

    verdict = judge(_records(made, names, changed, tokens=False), made.arms(*names))
    assert (verdict.verdict, verdict.status) == ("unstable", 5)
    assert "too few to tell a leak from noise (p = 0.037)" in verdict.sentence


def test_by_more_than_rounding_six_answers_of_one_life_are_enough(made):
    """Margins tell that no near tie fell the other way, so that no other kernel explains it."""
    names = ("persistent", "fresh", "fresh_again")
    for margin, expected in ((10.0, "leak"), (0.02, "unstable")):

        def changed(name, ordinal):
            return {"text": " 12"} if name == "persistent" and 0 < ordinal <= 6 else None

        records = _records(made, names, changed, bits=None, margin=margin)
        assert judge(records, made.arms(*names)).verdict == expected


def test_a_leak_inside_right_answers_counts(made):
    def leak(name, ordinal):
        return {"bits": "stale"} if _is_warm(name) and ordinal >= 3 else None

    verdict = judge(_records(made, ALL, leak), made.arms(*ALL))
    assert verdict.verdict == "leak"
    assert verdict.count("leak") == 17
    assert "17 of them still scored right" in verdict.sentence
    assert all("in the logits alone" in one.reason for one in verdict.indices[3:])


def test_one_leaked_answer_is_enough_where_fresh_bits_agree_and_it_repeats(made):
    def leak(name, ordinal):
        return {"bits": "stale"} if name.startswith("persistent") and ordinal == 19 else None

    verdict = judge(_records(made, ALL, leak), made.arms(*ALL))
    assert (verdict.verdict, _classes(verdict)) == ("leak", {19: "leak"})


@pytest.mark.parametrize(
    ("count", "bad", "expected"),
    [(2, (1,), "unstable"), (9, (4,), "unstable"), (10, (4,), "leak"), (3, (1, 2), "leak")],
)
def test_one_answer_that_comes_again_among_few_may_be_a_race(made, count, bad, expected):
    def hit(name, ordinal):
        return {"text": " 12"} if name.startswith("persistent") and ordinal in bad else None

    names = ALL[:4]
    records = [one for one in _records(made, names, hit) if one.ordinal < count]
    assert judge(records, made.arms(*names)).verdict == expected


def test_bits_are_not_compared_where_settings_that_decide_them_differ(made):
    def rounded(name, ordinal):
        return {"bits": name}

    settings = {name: {**made.OWN, "threads": number} for number, name in enumerate(ALL, 1)}
    verdict = judge(_records(made, ALL, rounded), made.arms(*ALL, **settings))
    assert verdict.verdict == "ok"
    assert any("not bit by bit (threads: 3 and 1)" in note for note in verdict.notes)


def test_a_proof_is_enough_with_one_arm(made):
    def leak(name, ordinal):
        return {"text": f" {made.number(3)}."} if ordinal == 4 else None

    records = _records(made, ("persistent",), leak)
    verdict = judge(records, made.arms("persistent"), prompts=made.prompts(COUNT))
    assert (verdict.verdict, verdict.status) == ("leak", 3)
    assert _classes(verdict)[4] == "leak"


def test_what_a_fresh_engine_prints_too_is_no_leak(made):
    def wrong(name, ordinal):
        return {"text": f" {made.number(3)}."} if ordinal == 4 else None

    verdict = judge(_records(made, ALL, wrong), made.arms(*ALL), prompts=made.prompts(COUNT))
    assert _classes(verdict) == {4: "model_limit"}
    assert verdict.status == 0


def test_one_arm_says_which_are_needed(made):
    def wrong(name, ordinal):
        return {"text": " 12."} if ordinal in (3, 8) else None

    verdict = judge(_records(made, ("persistent",), wrong), made.arms("persistent"))
    assert (verdict.verdict, verdict.status) == ("undecided", 0)
    assert "2 wrong): fresh and fresh_again are needed" in verdict.sentence
    assert {one.verdict for one in verdict.indices} == {"undecided"}
    needed = {one.verdict: one.how for one in verdict.support}
    assert not any(one.is_possible for one in verdict.support)
    assert "fresh" in needed["leak"]
    assert "reference" in needed["engine_fault"]
    assert "persistent_again" in needed["race"]


def test_two_arms_do_not_tell_a_leak_from_noise(made):
    def bad(name, ordinal):
        return {"text": " 12."} if name == "persistent" and ordinal in (3, 8) else None

    names = ("persistent", "fresh")
    verdict = judge(_records(made, names, bad), made.arms(*names))
    assert (verdict.verdict, verdict.status) == ("undecided", 5)
    assert "fresh_again is needed" in verdict.sentence


def test_two_arms_suffice_where_only_the_warm_one_is_wrong_often(made):
    def bad(name, ordinal):
        return {"text": " 12."} if name == "persistent" and ordinal > 8 else None

    names = ("persistent", "fresh")
    verdict = judge(_records(made, names, bad, bits=None), made.arms(*names))
    assert (verdict.verdict, verdict.count("leak")) == ("leak", 11)


def test_a_reference_that_must_have_equal_bits_stands_in_for_fresh_again(made):
    def bad(name, ordinal):
        return {"bits": "stale"} if name == "persistent" and ordinal > 2 else None

    names = ("persistent", "fresh", "reference")
    verdict = judge(_records(made, names, bad), made.arms(*names))
    assert verdict.verdict == "leak"


def test_a_race(made):
    def race(name, ordinal):
        if name in ("persistent", "persistent_again") and ordinal >= 4:
            return {"bits": f"{name}"}
        return None

    names = ALL[:4]
    verdict = judge(_records(made, names, race), made.arms(*names))
    assert (verdict.verdict, verdict.status) == ("race", 3)
    assert verdict.count("race") == 16
    assert "RACE. 16 of 20 answers differ when the engine has served others" in verdict.sentence


def test_a_race_that_hits_some_requests(made):
    """As on a GPU: now and then, at other places in each run, order or not."""

    def race(name, ordinal):
        hit = {"persistent": (3, 8, 12, 17), "persistent_again": (5, 8, 13), "shuffled": (2, 6)}
        return {"bits": name} if ordinal in hit.get(name, ()) else None

    names = ("persistent", "persistent_again", "fresh", "fresh_again", "shuffled")
    verdict = judge(_records(made, names, race), made.arms(*names))
    assert verdict.verdict == "race"
    assert set(_classes(verdict).values()) == {"race"}
    assert verdict.count("race") == 8


def test_a_race_that_hits_most_requests_in_the_same_way(made):
    def race(name, ordinal):
        spared = {"persistent": (4, 11), "persistent_again": (0, 9, 14)}
        return {"text": " 12."} if ordinal not in spared.get(name, range(COUNT)) else None

    names = ALL[:4]
    verdict = judge(_records(made, names, race), made.arms(*names))
    assert verdict.verdict == "race"
    assert verdict.count("race") == 20


def test_a_leak_with_one_answer_that_does_not_come_again_is_a_leak(made):
    def leak(name, ordinal):
        if not name.startswith("persistent") or ordinal < 3:
            return None
        return {"bits": name if ordinal == 7 else "stale"}

    names = ALL[:4]
    verdict = judge(_records(made, names, leak), made.arms(*names))
    assert (verdict.verdict, verdict.count("leak"), verdict.count("race")) == ("leak", 16, 1)


def test_a_few_warm_differences_are_no_race_yet(made):
    def flips(name, ordinal):
        return {"text": " 12."} if name == "persistent_again" and ordinal in (4, 9) else None

    names = ALL[:4]
    verdict = judge(_records(made, names, flips, bits=None), made.arms(*names))
    assert (verdict.verdict, verdict.status) == ("unstable", 5)


def test_a_fault_that_fresh_engines_have_too(made):
    def fault(name, ordinal):
        return {"text": " 77."} if name != "reference" and ordinal % 7 == 1 else None

    arms = made.arms(*ALL, reference=made.OTHER_PATH)
    verdict = judge(_records(made, ALL, fault), arms)
    assert (verdict.verdict, verdict.status) == ("engine_fault", 4)
    assert _classes(verdict) == dict.fromkeys((1, 8, 15), "engine_fault")
    assert "above the floor" in verdict.indices[1].reason


def test_equal_settings_make_any_bit_a_fault(made):
    def fault(name, ordinal):
        return {"bits": "wrong"} if name != "reference" and ordinal == 5 else None

    verdict = judge(_records(made, ALL, fault), made.arms(*ALL))
    assert (verdict.verdict, _classes(verdict)) == ("engine_fault", {5: "engine_fault"})


def test_a_near_tie_is_no_fault(made):
    margins = [10.0, 10.0, 10.0, 0.004] + [10.0] * 5

    def tie(name, ordinal):
        if ordinal != 6:
            return None
        right = f" {made.number(6)}."
        flipped = right[:3] + "x" + right[4:]
        return {"text": right if name == "reference" else flipped, "margin": margins}

    arms = made.arms(*ALL, reference=made.OTHER_PATH)
    verdict = judge(_records(made, ALL, tie), arms)
    assert (verdict.verdict, verdict.status, _classes(verdict)) == ("ok", 0, {6: "near_tie"})
    assert "near tie: 0.008 logits, floor 0.02" in verdict.indices[6].reason
    assert "1 near tie" in verdict.sentence


def test_without_margins_a_fault_takes_many_answers(made):
    arms = made.arms(*ALL, reference=made.OTHER_PATH)
    for bad, expected in ((12, "engine_fault"), (3, "near_tie")):

        def fault(name, ordinal, bad=bad):
            return {"text": " 77."} if name != "reference" and ordinal < bad else None

        verdict = judge(_records(made, ALL, fault, margin=None, bits=None), arms)
        assert _classes(verdict) == dict.fromkeys(range(bad), expected)


def test_a_limit_of_the_model(made):
    def wrong(name, ordinal):
        return {"text": " 77."} if ordinal in (2, 12) else None

    verdict = judge(_records(made, ALL, wrong), made.arms(*ALL))
    assert (verdict.status, _classes(verdict)) == (0, {2: "model_limit", 12: "model_limit"})
    assert "2 wrong answers that are the model's" in verdict.sentence


def test_without_a_reference_a_limit_is_not_told_from_a_fault(made):
    def wrong(name, ordinal):
        return {"text": " 77."} if ordinal == 2 else None

    names = ALL[:4]
    verdict = judge(_records(made, names, wrong), made.arms(*names))
    assert _classes(verdict) == {2: "undecided"}
    assert verdict.status == 0
    assert "A reference would tell" in verdict.indices[2].reason


def test_a_wrong_reference_does_not_blame_the_engine(made):
    def wrong(name, ordinal):
        return {"text": " 77."} if name == "reference" and ordinal == 2 else None

    verdict = judge(_records(made, ALL, wrong), made.arms(*ALL, reference=made.OTHER_PATH))
    assert (verdict.verdict, verdict.indices[2].verdict) == ("ok", "ok")


def test_an_unstable_reference(made):
    names = (*ALL[:5], "reference_again")

    def unstable(name, ordinal):
        if name.startswith("reference") and ordinal in (2, 9):
            return {"text": f" {made.number(ordinal)}." if name == "reference" else " 31."}
        return {"text": " 77."} if ordinal == 2 else None

    arms = made.arms(*names, reference=made.OTHER_PATH, reference_again=made.OTHER_PATH)
    verdict = judge(_records(made, names, unstable), arms)
    assert _classes(verdict) == {2: "unstable"}
    assert "The reference differs from itself" in verdict.indices[2].reason
    assert "between two runs of the reference" in verdict.sentence
    assert verdict.status == 5


def test_an_unstable_engine_and_what_passes(made):
    def flips(name, ordinal):
        return {"text": " 77."} if name == "fresh_again" and ordinal in (2, 9) else None

    records, arms = _records(made, ALL, flips, bits=None), made.arms(*ALL)
    verdict = judge(records, arms)
    assert (verdict.verdict, verdict.status, verdict.count("unstable")) == ("unstable", 5, 2)
    assert "2 of 20 answers differ between two fresh engines" in verdict.sentence
    assert judge(records, arms, max_unstable=0.1).status == 0
    assert judge(records, arms, max_unstable=0.09).status == 5


def test_max_unstable_does_not_hide_a_leak(made):
    def leak(name, ordinal):
        return {"text": " 12"} if _is_warm(name) and ordinal > 2 else None

    assert judge(_records(made, ALL, leak), made.arms(*ALL), max_unstable=1.0).status == 3


def test_a_warm_engine_that_only_rounds_differently(made):
    """Other kernels once warm, whatever was served before: class J, no fault."""
    hf = {"dtype": "float32", "threads": 1}

    def rounds(name, ordinal):
        cold = not _is_warm(name) or ordinal == 0
        return {"bits": "cold" if cold else "warm", "margin": 10.0 if cold else 10.0001}

    names = ("persistent", "persistent_again", "fresh", "fresh_again", "shuffled")
    arms = {name: made.arm(name, hf, "server") for name in names}
    verdict = judge(_records(made, names, rounds), arms)
    assert (verdict.verdict, verdict.status, verdict.count("near_tie")) == ("ok", 0, 19)
    ours = judge(_records(made, names, rounds), made.arms(*names))
    assert ours.verdict == "leak"


def test_an_aged_engine_is_an_arm_like_another(made):
    names = ("persistent", "fresh", "fresh_again", "aged")

    def late(name, ordinal):
        return {"bits": "stale"} if name == "aged" else None

    verdict = judge(_records(made, names, late), made.arms(*names))
    assert verdict.verdict == "leak"
    assert "(arm aged)" in verdict.sentence


def test_an_arm_that_alone_leaks_is_not_diluted_by_the_others(made):
    """As after a cancelled request: the other warm arms are clean."""
    names = ("persistent", "persistent_again", "fresh", "fresh_again", "cancel")

    def freed(name, ordinal):
        return {"bits": "stale"} if name == "cancel" and ordinal in (1, 5, 6, 12, 19) else None

    verdict = judge(_records(made, names, freed), made.arms(*names))
    assert (verdict.verdict, verdict.count("leak")) == ("leak", 5)
    assert "(arm cancel)" in verdict.sentence


def test_a_fault_at_another_length_shows_beside_the_samples(made):
    names = ("persistent", "fresh", "fresh_again", "reference")
    records = _records(made, names)
    cut = {"prompt_sha256": "c" * 64, "prompt_tokens": 1025, "step": 10_000_000}
    records += [
        made.answer("boundary", 7, " 44.", **cut),
        made.answer("reference", 7, **cut),
    ]
    arms = made.arms(*names, "boundary")
    verdict = judge(records, arms)
    assert (verdict.verdict, _classes(verdict)) == ("engine_fault", {7: "engine_fault"})
    assert "At 1025 tokens of prompt (arm boundary)" in verdict.indices[7].reason


def test_missing_answers_are_said(made):
    records = [one for one in _records(made, ALL) if one.arm != "fresh" or one.ordinal < 15]
    verdict = judge(records, made.arms(*ALL))
    assert verdict.compared == 15
    assert verdict.count("undecided") == 5
    assert any("fresh has no answer to ordinals 15" in note for note in verdict.notes)
    assert verdict.verdict == "ok"


def test_onset_trend_and_order_are_told(made):
    def late(name, ordinal):
        return {"bits": "stale"} if _is_warm(name) and ordinal >= 14 else None

    verdict = judge(_records(made, ALL, late), made.arms(*ALL))
    found = {one.name: one for one in verdict.tests}
    assert "14 equal answers" in found["onset"].finding
    assert found["onset"].p_value < 0.001
    assert found["trend over the life (Cochran-Armitage)"].p_value < 0.001
    assert "in both orders 6" in found["dependence on the predecessor (Fisher)"].finding


def test_fresh_engines_in_one_process_are_labelled(made):
    arm = replace(made.arm("fresh"), lifetime="engine_per_sample_in_process")
    arms = {**made.arms(*ALL), "fresh": arm}
    verdict = judge(_records(made, ALL), arms)
    assert any("less than fresh" in note for note in verdict.notes)
    assert (verdict.verdict, verdict.status) == ("ok", 0)
    for said in (
        "others of its own",
        "what outlives an engine there",
        "is not excluded; fresh=process would tell",
        "Leaks that end with their engine, in more than 13.9%",
    ):
        assert said in verdict.sentence
    assert "outlives" not in judge(_records(made, ALL), made.arms(*ALL)).sentence


def test_an_order_that_is_not_known_gives_no_position_and_no_canary(made):
    def leak(name, ordinal):
        return {"text": f" {made.number(3)}."} if _is_warm(name) and ordinal > 4 else None

    names = ("persistent", "fresh", "fresh_again")
    arms = {
        name: ArmFacts(Arm(name, made.arm(name).lifetime, "", {}), order_known=False)
        for name in names
    }
    verdict = judge(_records(made, names, leak), arms, prompts=made.prompts(COUNT))
    assert verdict.verdict == "leak"
    assert "position" not in verdict.sentence
    assert not any(one.kind == "canary" for one in verdict.evidence)
    assert not any(one.name == "onset" for one in verdict.tests)


def test_a_run_is_judged_by_its_manifest(made):
    manifest = {
        "task": "niah_single_1",
        "arms": {name: made.arm(name).to_manifest() for name in ALL},
        "fresh": {"on": "suspects", "audited": [0, 1]},
        "device": "CPU",
        "lives": [],
    }
    verdict = judge_run(manifest, _records(made, ALL), made.prompts(COUNT))
    assert (verdict.verdict, verdict.audited) == ("ok", 2)


@pytest.mark.parametrize("failing", [("persistent",), ("persistent", "persistent_again")])
def test_what_fails_only_when_warm_is_never_ok(made, failing):
    def changed(name, ordinal):
        if name in failing and ordinal in (3, 7):
            return {"error": "KeyError: 3", "output": None, "score": None, "correct": None}
        return None

    verdict = judge(_records(made, ALL, changed), made.arms(*ALL), prompts=made.prompts(COUNT))
    assert (verdict.verdict, verdict.status) == ("undecided", 5)
    assert "2 samples failed in an engine that had served others" in verdict.sentence
    assert "First at index 3." in verdict.sentence
    patient = judge(_records(made, ALL, changed), made.arms(*ALL), max_unstable=0.2)
    assert (patient.verdict, patient.status) == ("undecided", 0)


def test_what_fails_when_fresh_too_says_nothing_of_a_leak(made):
    def changed(name, ordinal):
        if ordinal == 3:
            return {"error": "OutOfMemory", "output": None, "score": None, "correct": None}
        return None

    verdict = judge(_records(made, ALL, changed), made.arms(*ALL), prompts=made.prompts(COUNT))
    assert (verdict.verdict, verdict.status) == ("ok", 0)
