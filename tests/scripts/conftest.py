"""Fixtures shared by the tests of the scripts."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def _in_the_end_nothing_is_left_out() -> Iterator[None]:
    """Let the interpreter free all when it ends; some libraries complain of what they then hold."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _modules_left_out_of_garbage(_in_the_end_nothing_is_left_out: None) -> None:
    """Freeze what lives between tests, modules above all.

    Every engine that ends has garbage looked for, which takes a third of a second where all that
    was ever imported is looked through. Anew for each test, since an engine imports more.
    """
    gc.collect()
    gc.freeze()
