"""Checks for other people's backends: ours pass, and each way to break the contract is named."""

import functools
import sys
from pathlib import Path

import pytest

from backends.base import ConfigurationError
from ruler_bench.testing import check_backend
from ruler_bench.testing.__main__ import main
from ruler_bench.testing.settings import _agrees

LENGTH = 448
RELEASE_SECONDS = 0.5


@pytest.fixture(scope="module")
def scripted():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        import scripted

        yield scripted
        scripted.LeavesThread.ended.set()


def states(report):
    return {one.name: one.state for one in report.results}


def test_an_engine_that_keeps_it_passes_every_check(scripted):
    report = check_backend(scripted.Scripted, length=LENGTH, asked={"speed": 1})
    assert set(states(report).values()) == {"kept"}
    assert list(states(report)) == [
        *("methods", "describe", "answers", "limits", "stop", "errors", "determinism"),
        *("leakage", "order", "release"),
    ]
    assert sum(one.cases for one in report.results) > 50
    assert str(report).count(" kept, ") == 10


BROKEN = {
    "NoClose": ("methods", "there is no method close"),
    "Drops": ("describe", "does not tell the setting speed"),
    "OtherValue": ("describe", "speed=1 where 3 was asked for"),
    "NoJson": ("describe", "describe() returned values that JSON does not have"),
    "Changing": ("describe", "says something else when called again"),
    "Keywords": ("describe", "takes **rest"),
    "NoAnswer": ("answers", "generate() returned list, not a Generation"),
    "NoStopToken": ("answers", "is no stop token"),
    "AlwaysStop": ("limits", "finish_reason=stop"),
    "Unlimited": ("limits", "must be at most max_new_tokens=1"),
    "OwnStops": ("stop", "with stop_token_ids="),
    "Truncates": ("limits", "was answered; must raise PromptTooLong"),
    "OtherError": ("limits", "raised ValueError: too long; must be PromptTooLong"),
    "OneTooFew": ("limits", "a request of just max_model_len=512 tokens"),
    "DiesOfErrors": ("limits", "after PromptTooLong the engine no longer answers"),
    "Unguarded": ("errors", "token id -1 raised IndexError"),
    "Random": ("limits", "or so"),
    "Drifting": ("determinism", "equal tokens, but another logits_digest at token 0"),
    "Previous": ("leakage", "the answer is another prompt's"),
    "Uncleared": (
        "leakage",
        "the short prompt, after a longer one: the answer is another prompt's",
    ),
    "KeyedByLength": ("leakage", "after another of its length: the answer is another prompt's"),
    "OfItsClass": ("answers", "the answer is another prompt's"),
    "SwapsRows": ("order", "with 2 requests in flight: the answer is another prompt's"),
    "ClosesOnce": ("release", "a second close() raised AssertionError: closed already"),
    "AnswersOn": ("release", "generate after close() answers"),
    "HangsClosed": ("release", "generate after close() hangs for 0.5 s"),
    "LeavesThread": ("release", "leaves threads running that keep the process alive: pump"),
    "KeepsPort": ("answers", "could not be built after close() of the one before it: OSError"),
    "NoLateCancel": ("errors", "cancel() of a request that is over raised KeyError"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_violation_is_named_in_one_line(scripted, name):
    check, message = BROKEN[name]
    factory = getattr(scripted, name)
    if name == "OtherValue":
        factory = functools.partial(factory, speed=3)
    asked = {"speed": 3} if name == "OtherValue" else None
    with pytest.raises(AssertionError) as caught:
        check_backend(factory, length=LENGTH, asked=asked, release_seconds=RELEASE_SECONDS)
    title, *lines = str(caught.value).splitlines()
    assert name in title
    assert [one for one in lines if one.startswith(f"{check}: ") and message in one], lines
    assert lines == caught.value.report.violations


def test_every_violation_is_of_another_class(scripted):
    """No seeded engine is left out above."""
    broken = {
        name
        for name, one in vars(scripted).items()
        if isinstance(one, type) and one.__module__ == "scripted"
    }
    assert broken - {"Scripted", "Refuses"} == set(BROKEN)


@pytest.mark.parametrize(
    ("asked", "found", "agrees"),
    [
        (None, 3, True),
        ("auto", "float32", True),
        ("block", 512, True),
        ("a", "b", False),
        ((1, 2), [1, 2], True),
        (3, 4, False),
        ({"a": None, "b": 1}, {"a": 2, "b": 1, "c": 0}, True),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, False),
        ({"a": 1}, {}, False),
    ],
)
def test_what_is_left_to_the_engine_may_be_anything(asked, found, agrees):
    assert _agrees(asked, found) is agrees


def test_engines_that_promise_tokens_alone_may_say_so(scripted):
    check_backend(scripted.Drifting, length=LENGTH, equal_bits=False)


def test_what_the_first_constructor_raises_is_not_hidden(scripted):
    with pytest.raises(ConfigurationError, match="cannot be honoured"):
        check_backend(scripted.Refuses, length=LENGTH)


# --- from the command line; tests/backends/test_contract.py checks our own ------------------------


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_the_command_has_help_of_its_own(cli, word):
    finished = cli(word, entry=main)
    assert finished.status == 0
    assert finished.out.startswith("usage: python -m ruler_bench.testing backend=NAME")


def test_the_command_says_what_it_checked_and_what_it_could_not(cli):
    finished = cli("backend=oracle", f"length={LENGTH}", "device=cpu", entry=main)
    assert finished.status == 0, finished.out + finished.err
    assert "leakage      kept, 18 cases" in finished.out
    assert finished.out.count("not checked: ") == 3


def test_a_violation_is_status_1_and_wrong_usage_2(cli, scripted, monkeypatch):
    monkeypatch.syspath_prepend(Path(scripted.__file__).parent)
    arguments = ("backend=custom", f"length={LENGTH}", "device=cpu")
    finished = cli(*arguments, "backend._target_=scripted.Drops", entry=main)
    assert finished.status == 1
    assert "violation: describe() does not tell the setting speed" in finished.out
    finished = cli("backend=nothing", entry=main)
    assert finished.status == 2
    assert "unknown backend" in finished.err
    assert sys.modules["scripted"] is scripted
