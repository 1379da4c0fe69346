import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import ConfigurationError
from backends.engine.policy import (
    POLICIES,
    FullPolicy,
    Model,
    dense_spans,
    make_policy,
    policy_name,
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


def test_names():
    assert policy_settings(None) == {"name": "full"}
    assert policy_name({"name": "full"}) == "full"
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
