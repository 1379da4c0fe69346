"""The tests of this folder once more, with Triton's kernels run by its interpreter."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("module", ["test_rows.py", "test_decode.py"])
def test_under_the_interpreter(module, under_interpreter):
    under_interpreter(HERE / module)
