"""The search for the haystack's size, where the tokenizer cannot serve."""

import json
import shutil
from pathlib import Path

import pytest

from ruler_bench.errors import UsageError
from ruler_bench.tasks import generate
from ruler_bench.tokenizer import load_tokenizer

SMOLLM2 = Path(__file__).parent.parent / "data" / "tokenizers" / "smollm2"


def no_tokens(content: dict) -> None:
    content["model"] |= {"vocab": {}, "merges": []}
    content["added_tokens"] = []


def tokens_of_other_texts(content: dict) -> None:
    no_tokens(content)
    content["model"]["vocab"] = {"\u0424": 0}


@pytest.mark.parametrize("change", [no_tokens, tokens_of_other_texts])
def test_a_tokenizer_without_tokens_for_the_text(spec, tmp_path, change) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(SMOLLM2, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UsageError, match="gives no tokens for the text of niah_single_1") as caught:
        generate(spec(tokenizer=load_tokenizer(str(folder))), 1)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
