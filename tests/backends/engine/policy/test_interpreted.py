"""The tests of the estimate once more, with Triton's kernels run by its interpreter."""

from pathlib import Path

HERE = Path(__file__).parent


def test_under_the_interpreter(under_interpreter):
    under_interpreter(HERE / "test_estimate.py")
