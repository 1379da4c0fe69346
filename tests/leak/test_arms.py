"""Arms by name, and through the manifest and back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ruler_bench.errors import UsageError
from ruler_bench.leak.arms import (
    ACTIONS,
    KINDS,
    LIFETIMES,
    Arm,
    arms_of,
    kind_of,
    swept_setting,
)

plain = st.dictionaries(
    st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5) | st.booleans()
)
arms = st.builds(
    Arm,
    name=st.sampled_from(sorted(KINDS)),
    lifetime=st.sampled_from(LIFETIMES),
    backend=st.text(max_size=5),
    settings=plain,
    order=st.text(max_size=5),
    actions=st.lists(st.sampled_from(ACTIONS), max_size=2).map(tuple),
)


@given(st.lists(arms, unique_by=lambda one: one.name, max_size=4))
def test_arms_survive_the_manifest(found):
    entries = json.loads(json.dumps({one.name: one.to_manifest() for one in found}))
    assert arms_of({"arms": entries}) == {one.name: one for one in found}


@pytest.mark.parametrize("field", ["lifetime", "backend", "settings", "order", "actions"])
@pytest.mark.parametrize("value", [None, 5, "eternal"])
def test_a_damaged_entry_is_named(field, value):
    entry = Arm("fresh", LIFETIMES[0], "x", {}).to_manifest()
    if isinstance(value, str) and field in ("backend", "order"):
        value = ["a list"]
    with pytest.raises(ValueError, match=f"arms.fresh.{field}"):
        arms_of({"arms": {"fresh": entry | {field: value}}})
    with pytest.raises(ValueError, match=r"arms\.fresh is no object"):
        arms_of({"arms": {"fresh": value}})


def test_a_manifest_of_before_has_no_arms():
    assert arms_of({}) == {}


@pytest.mark.parametrize(
    ("name", "settings", "value"),
    [("slots_2", ("num_gpu_blocks", "num_kv_buffers"), 2), ("chunks_512", ("chunk_tokens",), 512)],
)
def test_sweeps_are_named_by_their_value(name, settings, value):
    assert swept_setting(name) == (settings, value)
    assert not kind_of(name).is_fresh


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("frsh", "fresh"),
        ("presistent", "persistent"),
        ("slots", "slots_2"),
        ("slots_x", "slots_2"),
        ("slots_0", "slots_2"),
        ("slots-2", "slots_2"),
        ("chunk_512", "chunks_2"),
        ("aXa", "axa"),
    ],
)
def test_an_unknown_arm_is_said_with_the_nearest(name, near):
    with pytest.raises(UsageError, match=f"unknown arm {name!r}. Did you mean {near!r}") as error:
        kind_of(name)
    assert "slots_<n>" in str(error.value)
