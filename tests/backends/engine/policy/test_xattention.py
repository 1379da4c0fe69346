"""XAttention's settings, and what they lead to; the rule itself is in test_estimate.py."""

import json
import math

import pytest
import torch

from backends.base import ConfigurationError
from backends.engine.policy import Model, Place, make_policy
from backends.engine.policy.estimate import Rule, select_blocks

MODEL = Model(layers=2, heads=4, kv_heads=2, head_dim=16)
TABLE = [[0.2, 0.4, 0.6, 1.0], [1, 1, 1, 1]]


def make(**given):
    return make_policy({"name": "xattention"} | given, MODEL)


def test_settings_in_force_and_their_defaults():
    wanted = {"name": "xattention", "stride": 8, "threshold": 0.9, "norm": 1.0}
    assert make().describe() == wanted
    assert make(threshold=TABLE).describe()["threshold"] == TABLE


def test_settings_reach_the_rule(draw):
    query, keys = draw(500, MODEL)
    place = Place(0, 500, 500)
    shares = torch.full((4,), 0.7, dtype=torch.float64)
    wanted = select_blocks(query, keys, place, Rule(16, 1 / (math.sqrt(16) * 16 * 0.5), shares))
    assert torch.equal(
        make(stride=16, threshold=0.7, norm=0.5).select(query, keys, 1, place), wanted
    )
    assert not torch.equal(make(stride=16, threshold=0.7).select(query, keys, 1, place), wanted)


@pytest.mark.parametrize("as_file", [False, True])
def test_a_table_sets_layers_and_heads_apart(as_file, draw, tmp_path):
    table = TABLE
    if as_file:
        table = str(tmp_path / "thresholds.json")
        (tmp_path / "thresholds.json").write_text(json.dumps(TABLE), encoding="utf-8")
    policy = make(threshold=table)
    assert policy.describe() == make(threshold=TABLE).describe()
    query, keys = draw(900, MODEL)
    place = Place(0, 900, 900)
    found = policy.select(query, keys, 0, place)
    for head, threshold in enumerate(TABLE[0][:3]):
        alone = make(threshold=threshold).select(query, keys, 0, place)
        assert torch.equal(found[head], alone[head])
    assert found[3].sum() == 8 * 9 // 2
    assert found[0].sum() < found[2].sum() < found[3].sum()
    assert policy.select(query, keys, 1, place) is None


def test_threshold_one_is_dense(draw):
    for threshold in (1, 1.0, [[1.0] * 4] * 2):
        assert make(threshold=threshold).select(*draw(300, MODEL), 0, Place(0, 300, 300)) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stride": 0}, r"policy\.stride=0 is below 1"),
        ({"stride": 8.0}, r"policy\.stride=8\.0 is not a whole number"),
        ({"stride": 12}, r"policy\.stride=12 does not divide a block of 128.*8 and 16"),
        ({"stride": 256}, r"policy\.stride=256 does not divide"),
        ({"norm": 0}, r"policy\.norm=0: allowed are numbers above 0"),
        ({"norm": math.inf}, r"policy\.norm=inf: allowed"),
        ({"norm": "1"}, r"policy\.norm='1': allowed"),
        ({"threshold": 0}, r"policy\.threshold=0: allowed is a number above 0 and at most 1"),
        ({"threshold": 1.01}, r"policy\.threshold=1\.01: allowed"),
        ({"threshold": math.nan}, r"policy\.threshold=nan: allowed"),
        ({"threshold": True}, r"policy\.threshold=True: allowed.*2 layers of 4 heads"),
        ({"threshold": None}, r"policy\.threshold=None: allowed.*2 layers of 4 heads"),
        ({"threshold": [0.9, 0.9]}, r"policy\.threshold=\[0\.9, 0\.9\]: allowed.*2 layers of 4"),
        ({"threshold": [[0.9] * 4]}, r"threshold: the table is for 1 layers, .* model has 2"),
        ({"threshold": []}, r"threshold: the table is for 0 layers"),
        ({"threshold": [[0.9] * 4, [0.9] * 2]}, r"layer 1 of the table has 2 .* 4 query heads"),
        ({"threshold": [[0.9] * 4, [0.9, 0, 1, 1]]}, r"threshold\[1\]\[1\]=0: allowed is a number"),
        ({"threshold": [[0.9] * 4, [0.9, 1, 1, "1"]]}, r"threshold\[1\]\[3\]='1': allowed is"),
        ({"threshold": "missing.json"}, r"threshold=missing\.json: cannot be read as a JSON file"),
        ({"treshold": 0.9}, r"policy\.treshold is no setting.*Did you mean 'threshold'"),
    ],
)
def test_bad_settings_are_refused(given, message):
    with pytest.raises(ConfigurationError, match=message):
        make(**given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0.9, ", "cannot be read as a JSON file"),
        ("{}", r"thresholds\.json': allowed are a number.*2 layers of 4 heads"),
        ('"other.json"', r"thresholds\.json': allowed are"),
        ("2", r"thresholds\.json': allowed is a number above 0"),
        ("[[1, 1, 1, 1]]", "the table is for 1 layers"),
    ],
)
def test_a_bad_file_is_refused(text, message, tmp_path):
    path = tmp_path / "thresholds.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=message):
        make(threshold=str(path))


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "thresholds.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="cannot be read as a JSON file"):
        make(threshold=str(path))
