"""Fixtures shared by the tests of the scripts."""

import gc

import pytest


@pytest.fixture(autouse=True)
def _modules_left_out_of_garbage() -> None:
    """Freeze what lives between tests, modules above all.

    Every engine that ends has garbage looked for, which takes a third of a second where all that
    was ever imported is looked through. Anew for each test, since an engine imports more.
    """
    gc.collect()
    gc.freeze()
