import pytest

from ruler_bench.sharing import is_secret_key, portable_path


def test_paths_in_manifests_tell_no_home_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert portable_path(str(tmp_path / "model")) == "model"
    assert portable_path("org/model") == "org/model"
    assert portable_path(str(tmp_path / "not" / "made" / "yet")) == "not/made/yet"
    assert portable_path("/no-such-folder/v1") == "/no-such-folder/v1"
    assert portable_path("/" + "x" * 5000) == "/" + "x" * 5000


@pytest.mark.parametrize("key", ["api_key", "OPENAI_API_KEY", "client_secret", "password"])
def test_secret_keys_are_known(key):
    assert is_secret_key(key)


@pytest.mark.parametrize("key", ["tokenizer", "chunk_tokens", "num_keys", "task.key_type"])
def test_ordinary_keys_are_not_secret(key):
    assert not is_secret_key(key)
