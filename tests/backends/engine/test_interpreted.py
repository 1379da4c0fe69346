"""Tests of kernels once more, with Triton's own run by its interpreter, all in one process."""

from pathlib import Path

HERE = Path(__file__).parent
FILES = (
    "ops/test_rows.py",
    "ops/test_decode.py",
    "policy/test_estimate.py",
    "test_block_mask.py",
    "test_one_token.py",
)


def test_under_the_interpreter(under_interpreter):
    said = under_interpreter(*(HERE / file for file in FILES)).splitlines()
    passed = {line.split("::")[0] for line in said if "PASSED" in line}
    assert {file for file in FILES if any(one.endswith(file) for one in passed)} == set(FILES)
