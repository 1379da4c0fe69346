"""Values of config.json that no model can have: one line names the file and the key."""

import json
import math

import pytest

from backends.base import ConfigurationError
from backends.engine import gpu_only
from backends.engine.shape import OPTIONAL_SIZES, REQUIRED_SIZES, find_model, read_shape

SIZES = (*REQUIRED_SIZES, *OPTIONAL_SIZES)
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.fixture
def refusal(tiny, tmp_path):
    """Read the tiny model's configuration with other settings, and return the one line said."""

    def read(settings, reader=read_shape):
        config = json.loads((tiny / "config.json").read_text())
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config | settings))
        with pytest.raises(ConfigurationError) as caught:
            reader(tmp_path)
        text = str(caught.value)
        assert "\n" not in text
        assert str(path) in text
        return text

    return read


@pytest.mark.parametrize("value", [0, -1, True, "48", 48.0, [48], {}], ids=repr)
@pytest.mark.parametrize("key", SIZES)
def test_sizes_are_integers_from_1(refusal, key, value):
    assert f"{key}={value!r} is wrong; write an integer of at least 1." in refusal({key: value})


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size"])
def test_a_required_size_is_never_null(refusal, key):
    assert key in refusal({key: None})


def test_an_engine_says_so_too(refusal):
    def start(folder):
        return gpu_only(model_path=str(folder))

    assert "num_key_value_heads=0 is wrong" in refusal({"num_key_value_heads": 0}, start)


@pytest.mark.parametrize("value", [0, -1e-6, True, "small", math.nan, math.inf, None], ids=repr)
def test_an_epsilon_that_is_no_number_above_0(refusal, value):
    assert "rms_norm_eps" in refusal({"rms_norm_eps": value})


@pytest.mark.parametrize(
    "settings", [{"head_dim": 15}, {"head_dim": 1}, {"head_dim": None, "hidden_size": 4}], ids=repr
)
def test_an_odd_head(refusal, settings):
    assert "even" in refusal(settings)


@pytest.mark.parametrize("value", [0, -1, True, "x", [1], math.nan, math.inf], ids=repr)
@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ({"rope_type": "default"}, "rope_theta"),
        *((rope, key) for rope in (LINEAR, LLAMA3, YARN) for key in rope if key != "rope_type"),
    ],
    ids=lambda one: one if isinstance(one, str) else one["rope_type"],
)
def test_rope_numbers_are_above_0(refusal, rope, key, value):
    said = refusal({"rope_parameters": rope | {key: value}})
    assert f"{key}={value!r} is wrong; write a number above 0." in said


@pytest.mark.parametrize("value", ["x", 0, None], ids=repr)
def test_rope_theta_by_its_old_name(refusal, value):
    said = refusal({"rope_parameters": None, "rope_scaling": None, "rope_theta": value})
    assert f"rope_theta={value!r} is wrong; write a number above 0." in said


@pytest.mark.parametrize(
    "rope",
    [
        5,
        "linear",
        [LINEAR],
        {"rope_type": 5, "rope_theta": 1e4},
        {"rope_type": ["linear"], "rope_theta": 1e4},
        *(
            {name: value for name, value in rope.items() if name != key}
            for rope in (LINEAR, LLAMA3)
            for key in rope
            if key not in ("rope_type", "rope_theta", "original_max_position_embeddings")
        ),
    ],
    ids=repr,
)
def test_rope_parameters_that_are_none(refusal, rope):
    assert "rope" in refusal({"rope_parameters": rope})


@pytest.mark.parametrize("value", ["LlamaForCausalLM", [3], [["LlamaForCausalLM"]], 3, {"a": 1}])
def test_architectures_that_are_no_names(refusal, value):
    assert "architectures=" in refusal({"architectures": value})


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_config_that_is_no_object(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"config\.json .*correct it") as caught:
        read_shape(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a" * 5000, "~no-such-user-anywhere/model"])
def test_a_name_that_cannot_be_looked_up(name):
    with pytest.raises(ConfigurationError, match=r"cannot be looked up .*name a folder") as caught:
        find_model(name)
    assert "\n" not in str(caught.value)
