"""How small commands end: by their own status, wrong usage, Ctrl-C, SIGTERM."""

import os
import signal
import time

import pytest

from ruler_bench.command_line import (
    GOES_ON,
    INTERRUPTED,
    USAGE_ERROR,
    status_of,
    terminable,
)
from ruler_bench.errors import UsageError


def test_a_command_ends_with_its_own_status():
    assert status_of(lambda: 3) == 3


def test_wrong_usage_is_one_line(capsys):
    def wrong():
        raise UsageError("--length 0:\n must be at least 1.")

    assert status_of(wrong) == USAGE_ERROR
    assert capsys.readouterr().err == "error: --length 0: must be at least 1.\n"


@pytest.mark.parametrize(("words", "said"), [((), ""), ((GOES_ON,), f"{GOES_ON}\n")])
def test_ctrl_c_is_told_where_there_is_something_to_say(words, said, capsys):
    def interrupted():
        raise KeyboardInterrupt

    assert status_of(interrupted, *words) == INTERRUPTED
    assert capsys.readouterr().err == said


def test_sigterm_ends_a_command_as_ctrl_c_does_and_is_as_before_afterwards():
    def terminated():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    with terminable():
        assert status_of(terminated) == INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) is before
