"""manifest.json read back: damage is said in words for people."""

import pytest

from ruler_bench.errors import UsageError
from ruler_bench.manifest import MANIFEST, read_manifest

DAMAGED = {
    b"{}": "has no format_version",
    b"[1, 2]": "is no JSON object",
    b"null": "is no JSON object",
    b'{"format_version": 1,\n  "task": }': "is no JSON from line 2, column 11 on",
    b"": "is no JSON from line 1, column 1 on",
    b'{"format_version": "1"}': "format_version is no number",
    b'{"format_version": 1}': "task is no text",
    b"\xff{}": "is no UTF-8 text",
    b"[" * 200_000: "is nested too deeply",
}


@pytest.mark.parametrize("content", DAMAGED, ids=lambda one: repr(one[:20]))
def test_damage_is_said_with_what_to_do(tmp_path, content):
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(UsageError) as refused:
        read_manifest(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path / MANIFEST} is damaged ({DAMAGED[content]}). Restore it from a copy, or start "
        "anew with overwrite=true."
    )


def test_no_manifest_is_no_damage(tmp_path):
    assert read_manifest(tmp_path) is None
