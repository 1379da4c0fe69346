"""The evidence for an index says what differs, and from where on."""

import pytest

from ruler_bench.leak.verdict import judge

ARMS = ("persistent", "fresh", "fresh_again")


@pytest.mark.parametrize(
    ("changes", "words", "first"),
    [
        ({"bits": "others"}, "logits from token 0", 0),
        (
            {"text": " none.", "bits": "others"},
            "logits from token 0, in tokens from token 1, 20 logits apart",
            0,
        ),
        ({"text": " none."}, "tokens from token 1, 20 logits apart", 1),
        ({"text": " none.", "tokens": False}, "text from character 0", 0),
    ],
)
def test_what_differs_and_from_where_on(made, changes, words, first):
    records = [one for name in ARMS for one in made.stream(name, 20)]
    changed = [one for one in records if one.arm != "persistent" or one.ordinal < 10]
    changed += [made.answer("persistent", one, **changes) for one in range(10, 20)]
    verdict = judge(changed, made.arms(*ARMS))
    assert verdict.verdict == "leak"
    (index,) = [one for one in verdict.indices if one.ordinal == 10]
    (path,) = [one.text for one in index.evidence if one.kind == "same path"]
    assert path == f"persistent and fresh differ in {words}"
    assert index.first_difference == first
