import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import ConfigurationError
from backends.engine.policy import POLICIES, FullPolicy, policy_name


@settings(deadline=None)
@given(keys=st.integers(0, 500), attend=st.none() | st.integers(1, 600))
def test_full_reads_every_key_once_cut_at_multiples(keys, attend):
    spans = FullPolicy().spans(keys, attend)
    assert [position for span in spans for position in range(*span)] == list(range(keys))
    if attend is None:
        assert len(spans) <= 1
    else:
        assert {start // attend for start, _ in spans} == {start / attend for start, _ in spans}
        assert all(start // attend == (stop - 1) // attend for start, stop in spans)


def test_names():
    assert policy_name(None) == "full"
    assert policy_name({"name": "full"}) == "full"
    assert POLICIES["full"].name == "full"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("xattention", r"backend\.policy='xattention': policy is a group.*backend/policy=NAME"),
        ({"name": "ful"}, "Did you mean 'full'"),
        ({"threshold": 0.9}, "name=None: unknown"),
        ({"name": "full", "threshold": 0.9}, r"backend\.policy\.threshold is no setting"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        policy_name(settings)
