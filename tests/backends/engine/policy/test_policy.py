from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import ConfigurationError
from backends.engine.policy import (
    POLICIES,
    FullPolicy,
    Model,
    Place,
    dense_spans,
    make_policy,
    policy_settings,
)

MODEL = Model(layers=2, heads=4, kv_heads=2, head_dim=16)


@settings(deadline=None)
@given(keys=st.integers(0, 500), attend=st.none() | st.integers(1, 600))
def test_dense_spans_hold_every_key_once_cut_at_multiples(keys, attend):
    spans = dense_spans(keys, attend)
    assert [position for span in spans for position in range(*span)] == list(range(keys))
    if attend is None:
        assert len(spans) <= 1
    else:
        assert {start // attend for start, _ in spans} == {start / attend for start, _ in spans}
        assert all(start // attend == (stop - 1) // attend for start, stop in spans)


SPARSE = [
    {"name": "xattention", "threshold": 0.5},
    {"name": "xattention", "stride": 16, "threshold": [[0.3, 0.9, 0.6, 1.0], [0.5] * 4]},
    {"name": "minference", "vertical": 40, "slash": 120},
    {"name": "minference", "budget": 0.6},
    {"name": "a_shape", "first_tokens": 1, "recent_tokens": 130},
]


def test_every_policy_is_among_the_sparse_ones_or_full():
    assert {given["name"] for given in SPARSE} | {"full"} == set(POLICIES)


@pytest.mark.parametrize("given_settings", SPARSE, ids=str)
def test_blocks_are_causal_and_no_row_is_empty(given_settings, draw):
    policy = make_policy(given_settings, MODEL)
    assert policy.sparse

    @settings(deadline=None, derandomize=True, max_examples=15)
    @given(
        first=st.integers(0, 4),
        queries=st.integers(1, 400),
        scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0]),
        seed=st.integers(0, 100),
    )
    def check(first, queries, scale, seed):
        place = Place(first * 128, queries, first * 128 + queries)
        query, keys = draw(place.keys, MODEL, seed)
        found = policy.select(query[place.start :] * scale, keys, seed % 2, place)
        assert found.shape == (4, place.query_blocks, place.key_blocks)
        own = place.first_block + torch.arange(place.query_blocks)
        assert not found[:, torch.arange(place.key_blocks) > own[:, None]].any()
        assert found[:, torch.arange(place.query_blocks), own].all()
        assert found[:, :, 0].all()
        known = policy.known(0, place)
        assert (known is None) == policy.reads_keys
        assert known is None or torch.equal(known, found)

    check()


@pytest.mark.parametrize("given_settings", SPARSE, ids=str)
def test_nothing_is_kept_between_calls(given_settings, draw):
    calls = []
    for tokens, layer, seed in [(500, 0, 1), (500, 1, 1), (500, 0, 2), (130, 0, 3), (640, 1, 4)]:
        query, keys = draw(tokens, MODEL, seed)
        start = 0 if tokens % 128 else 256
        calls.append((query[start:], keys, layer, Place(start, tokens - start, tokens)))
    policy = make_policy(given_settings, MODEL)
    held = repr(vars(policy))
    alone = [make_policy(given_settings, MODEL).select(*call) for call in calls]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 2, 0, 4, 1]):
        copies = [tuple(part.clone() for part in calls[index][:2]) for index in order]
        for index, (query, keys) in zip(order, copies, strict=True):
            assert torch.equal(policy.select(query, keys, *calls[index][2:]), alone[index])
            assert torch.equal(query, calls[index][0])
            assert torch.equal(keys, calls[index][1])
    assert repr(vars(policy)) == held


@pytest.mark.parametrize("given_settings", SPARSE, ids=str)
def test_heads_of_a_group_read_its_keys(given_settings, draw, whole):
    """Grouped heads select what they would with keys of their own."""
    query, keys = draw(500, MODEL)
    grouped = make_policy(given_settings, MODEL)
    apart = make_policy(given_settings, MODEL._replace(kv_heads=4))
    assert torch.equal(
        whole(grouped.select, query, keys),
        whole(apart.select, query, keys.repeat_interleave(2, dim=1)),
    )


def peak_bytes(call):
    """What `call` allocates of CPU memory at most, by PyTorch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    sizes = [
        event.nbytes()
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    return max(accumulate(sizes, initial=0))


@pytest.mark.parametrize("given_settings", SPARSE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scratch_is_no_more_than_said(given_settings, dtype, draw):
    model = Model(layers=2, heads=4, kv_heads=2, head_dim=32)
    policy = make_policy(given_settings, model)
    for start, queries in [(0, 1), (0, 128), (0, 700), (4096, 1024), (27_904, 20), (0, 9000)]:
        place = Place(start, queries, start + queries)
        query, keys = draw(place.keys, model, dtype=dtype)
        taken = peak_bytes(lambda: policy.select(query[start:], keys, 0, place))  # noqa: B023
        room = policy.scratch_bytes(queries, place.keys)
        assert 0 < taken <= room


def test_names():
    assert policy_settings(None) == {"name": "full"}
    assert policy_settings({"name": "full"}) == {"name": "full"}
    assert all(make_policy({"name": name}, MODEL).name == name for name in POLICIES)
    assert isinstance(make_policy(None, MODEL), FullPolicy)


@pytest.mark.parametrize("name", POLICIES)
def test_settings_in_force_build_the_same_policy(name):
    described = make_policy({"name": name}, MODEL).describe()
    assert described["name"] == name
    assert make_policy(described, MODEL).describe() == described


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("xattention", r"backend\.policy='xattention': policy is a group.*backend/policy=NAME"),
        ({"name": "ful"}, "Did you mean 'full'"),
        ({"name": "ashape"}, "Did you mean 'a_shape'"),
        ({"threshold": 0.9}, "name=None: unknown"),
        ({"name": ["full"]}, "unknown"),
        ({"name": "full", "threshold": 0.9}, r"backend\.policy\.threshold is no setting.*has none"),
        (
            {"name": "a_shape", "first_token": 3},
            r"policy\.first_token is no.*first_tokens, recent.*Did you mean 'first_tokens'",
        ),
        ({"name": "full", 3: 0.9}, r"backend\.policy\.3 is no setting"),
        ({"name": "a_shape", "first_tokens": 0}, r"policy\.first_tokens=0 is below 1"),
        ({"name": "a_shape", "recent_tokens": None}, r"policy\.recent_tokens=None is not a whole"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        make_policy(settings, MODEL)
