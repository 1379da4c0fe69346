"""The noisy engine: noise at the rate asked for, and nothing that one request leaves behind."""

import pytest

from backends.base import ConfigurationError, Request
from scripts.detector.noisy import NEAR_TIE_LOGITS, REVEALS, NoisyEngine

COUNT = 2000
PLAIN = ("near_tie_flips", "near_tie_prompts", "random_answers")


def value(number):
    return str(1_000_000 + 7919 * number % 9_000_000)


def request(number):
    prompt = (
        f"One of the special magic numbers for key-{number} is: {value(number)}. "
        f"What is the special magic number for key-{number} mentioned in the provided text?"
    )
    return Request(number, prompt, (1, 2, 3), 16)


def answers(engine, count=COUNT):
    return [engine.generate(request(one)) for one in range(count)]


@pytest.mark.parametrize("noise", PLAIN)
@pytest.mark.parametrize("rate", [0.01, 0.1])
def test_answers_change_at_the_rate_asked_for(noise, rate):
    found = answers(NoisyEngine(noise=noise, rate=rate, life="0"))
    changed = sum(one.text != f" {value(number)}." for number, one in enumerate(found))
    expected, deviation = COUNT * rate, (COUNT * rate * (1 - rate)) ** 0.5
    assert abs(changed - expected) < 5 * deviation


@pytest.mark.parametrize("noise", [*PLAIN, "wrong_when_fresh"])
def test_without_noise_every_life_gives_the_same_bits(noise):
    one, other = (answers(NoisyEngine(noise=noise, rate=0.0, life=life), 50) for life in ("a", "b"))
    assert one == other


def test_a_kernel_stays_for_a_life():
    lives = [
        answers(NoisyEngine(noise="kernel_by_life", rate=0.1, life=str(one)), 40)
        for one in range(8)
    ]
    assert len({tuple(one.logits_digest for one in life) for life in lives}) == 2


@pytest.mark.parametrize("dtype", NEAR_TIE_LOGITS)
def test_a_flip_is_at_a_near_tie_and_the_rest_is_sure(dtype):
    engine = NoisyEngine(noise="near_tie_flips", rate=0.1, dtype=dtype, life="0")
    for number, one in enumerate(answers(engine, 300)):
        right = f" {value(number)}."
        for place, (letter, margin) in enumerate(zip(one.text, one.top2_margin, strict=True)):
            if letter == right[place]:
                assert margin > 1
            else:
                assert margin <= NEAR_TIE_LOGITS[dtype]


def test_a_flip_comes_with_other_bits():
    quiet = answers(NoisyEngine(noise="near_tie_flips", rate=0.0, life="0"))
    noisy = answers(NoisyEngine(noise="near_tie_flips", rate=0.1, life="1"))
    for one, other in zip(quiet, noisy, strict=True):
        assert (one.token_ids == other.token_ids) == (one.logits_digest == other.logits_digest)


def test_a_wrong_answer_is_the_same_whenever_it_is_asked():
    first = answers(NoisyEngine(noise="wrong_when_fresh", rate=0.0, life="0"), 200)
    again = answers(
        NoisyEngine(noise="wrong_when_fresh", rate=0.0, path="reference", life="1"), 200
    )
    wrong = [number for number, one in enumerate(first) if value(number) not in one.text]
    assert 30 < len(wrong) < 90
    assert [one.text for one in first] == [one.text for one in again]
    other = NoisyEngine(
        noise="wrong_when_fresh", rate=0.0, path="reference", wrong="otherwise", life="1"
    )
    assert all(other.generate(request(one)).text != first[one].text for one in wrong)


@pytest.mark.parametrize("reveals", REVEALS)
def test_it_tells_no_more_than_asked(reveals):
    one = NoisyEngine(noise="near_tie_flips", rate=0.0, reveals=reveals).generate(request(1))
    told = [one.logits_digest, one.top2_margin, one.token_ids, one.text]
    assert [each is not None for each in told] == [
        REVEALS.index(reveals) <= place for place in range(len(REVEALS))
    ]


def test_life_does_not_depend_on_what_was_asked_before():
    """The chance of a flip is that of the request alone: drawn anew, whatever came before."""
    engine = NoisyEngine(noise="near_tie_prompts", rate=0.05, life="0")
    texts = [{engine.generate(request(one)).text for _ in range(30)} for one in range(100)]
    tied = sum(len(one) > 1 for one in texts)
    assert 2 <= tied <= 25
    assert all(f" {value(number)}." in one for number, one in enumerate(texts))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"noise": "hum"}, "noise"),
        ({"rate": 1.5}, "rate"),
        ({"rounding": -1.0}, "rounding"),
        ({"reveals": "all"}, "reveals"),
        ({"path": "other"}, "path"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_wrong_settings(settings, key):
    with pytest.raises(ConfigurationError, match=f"backend.{key}="):
        NoisyEngine(**{"noise": "near_tie_flips", "rate": 0.1, **settings})
