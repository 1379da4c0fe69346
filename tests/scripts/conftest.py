"""Fixtures shared by the tests of the scripts."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _modules_left_out_of_garbage() -> None:
    """Freeze the imported modules' own objects, as commands do.

    Every engine that ends has garbage looked for, which takes a third of a second where all that
    the tests have imported is looked through.
    """
    gc.collect()
    gc.freeze()
