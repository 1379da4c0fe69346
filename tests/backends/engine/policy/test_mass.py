"""What is kept of some weights, against the rule in words, one item at a time."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.engine.policy.mass import FIXED_POINT, fixed_point, keep_most, keep_share

WEIGHTS = st.lists(st.integers(0, 3) | st.integers(0, 2**46), min_size=1, max_size=12)


def by_weight(weights, forced):
    """Items that are not forced, the heaviest first, of equals the first first."""
    others = [item for item in range(len(weights)) if not forced[item]]
    return sorted(others, key=lambda item: (-weights[item], item))


@settings(deadline=None)
@given(data=st.data(), weights=WEIGHTS, share=st.sampled_from([0.125, 0.5, 0.75, 0.9, math.inf]))
def test_keep_share(data, weights, share):
    forced = data.draw(st.lists(st.booleans(), min_size=len(weights), max_size=len(weights)))
    wanted = list(forced)
    for item in by_weight(weights, forced):
        before = sum(weight for weight, kept in zip(weights, wanted, strict=True) if kept)
        wanted[item] = sum(weights) == 0 or before < share * sum(weights)
        if not wanted[item]:
            break
    shares = torch.tensor([share], dtype=torch.float64)
    found = keep_share(torch.tensor(weights), torch.tensor(forced), shares)
    assert found.tolist() == wanted


@settings(deadline=None)
@given(data=st.data(), weights=WEIGHTS, count=st.integers(1, 14))
def test_keep_most(data, weights, count):
    forced = data.draw(st.lists(st.booleans(), min_size=len(weights), max_size=len(weights)))
    room = len(weights) if sum(weights) == 0 else max(count - sum(forced), 0)
    kept = by_weight(weights, forced)[:room]
    wanted = [forced[item] or item in kept for item in range(len(weights))]
    found = keep_most(torch.tensor([weights, weights]), torch.tensor(forced), count)
    assert found.tolist() == [wanted, wanted]


def test_of_many_equals_the_first_are_kept():
    """Of more items than a sort handles in one piece, where one that is not stable would show."""
    weights = torch.ones(3, 5000, dtype=torch.int64)
    forced = torch.zeros(5000, dtype=torch.bool)
    wanted = torch.arange(5000) < 1250
    assert torch.equal(keep_most(weights, forced, 1250), wanted.expand(3, -1))
    share = torch.tensor([[0.25]], dtype=torch.float64)
    assert torch.equal(keep_share(weights, forced, share), wanted.expand(3, -1))


def test_fixed_point_is_exact_down_to_its_unit():
    shares = torch.tensor([1.0, 0.5, 2.0**-40, 2.0**-41, 0.0, math.nan, 1 / 3])
    units = fixed_point(shares).tolist()
    assert units[:6] == [2**40, 2**39, 1, 0, 0, 0]
    assert units[6] == int(shares[6].item() * FIXED_POINT)
