"""Leaks that nobody here made: transformers' caches, reused as users reuse them, are found."""

import json
from pathlib import Path

import pytest

from ruler_bench.leak.classes import LEAK, OK

HERE = Path(__file__).parent
SHORT_CACHE = "+backend.cache_tokens=1024"
"""Each token reads the whole static cache: room for the three prompts that pile up in it."""
ARMS = "arms=[persistent,persistent_again,fresh,fresh_again]"

# Newer versions call the argument otherwise, and the oldest that is allowed does not know that.
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def _servers(monkeypatch):
    monkeypatch.syspath_prepend(HERE)


@pytest.fixture
def asked(cli, workdir):
    """Run the harness on one of the servers; return its exit status, verdict.json and records."""

    def ask(server, *settings, samples=3):
        finished = cli(
            "task=niah_single_1",
            "length=256",
            "task.tokens_to_generate=16",
            f"num_samples={samples}",
            "device=cpu",
            "threads=1",
            "backend=custom",
            f"backend._target_=reused_caches.{server}",
            ARMS,
            "out=here",
            *settings,
        )
        folder = workdir / "here"
        assert (folder / "verdict.json").exists(), finished.err
        rows = [json.loads(one) for one in (folder / "records.jsonl").read_text().splitlines()]
        assert not [row["error"] for row in rows if row["error"]]
        return finished, json.loads((folder / "verdict.json").read_text()), rows

    return ask


def outputs(rows, arm):
    return [row["output"] for row in rows if row["arm"] == arm]


def evidence(verdict, ordinal):
    (index,) = [one for one in verdict["indices"] if one["ordinal"] == ordinal]
    return [f"{one['kind']}: {one['text']}" for one in index["evidence"]]


def classes(verdict):
    return [one["verdict"] for one in sorted(verdict["indices"], key=lambda one: one["ordinal"])]


def test_one_static_cache_without_reset_is_found_though_every_answer_is_right(asked):
    finished, verdict, rows = asked("OneStaticCache", SHORT_CACHE, "fresh=inprocess")
    assert finished.status == 3
    assert finished.out.startswith(
        "niah_single_1: LEAK. 2 of 3 answers change when the engine has served others; "
        "first at position 1; 2 of them still scored right."
    )
    assert (verdict["verdict"], verdict["status"]) == (LEAK, 3)
    assert classes(verdict) == [OK, LEAK, LEAK]
    assert all(row["correct"] for row in rows)
    assert outputs(rows, "persistent") == outputs(rows, "fresh")
    for ordinal in (1, 2):
        assert evidence(verdict, ordinal) == [
            "same path: persistent and fresh differ in logits from token 0"
        ]


def test_one_prefix_cache_that_generate_appends_to_is_found_in_real_processes(asked):
    finished, verdict, rows = asked("OnePrefixCache")
    assert finished.status == 3
    assert finished.out.startswith(
        "niah_single_1: LEAK. 2 of 3 answers change when the engine has served others; "
        "first at position 1"
    )
    assert (verdict["verdict"], verdict["status"]) == (LEAK, 3)
    assert classes(verdict) == [OK, LEAK, LEAK]
    assert [row["correct"] for row in rows if row["arm"] == "persistent"] == [True, False, False]
    assert all(row["correct"] for row in rows if row["arm"].startswith("fresh"))
    # The answer is mixed from both samples' (transformers 5.24, with hints besides) or is the first
    # one's, whole (5.17: canaries, which come first).
    found = evidence(verdict, 1)
    assert {one.partition(":")[0] for one in found} - {"canary", "hint"} == {
        "same path",
        "correctness",
    }
    path = next(one for one in found if one.startswith("same path"))
    assert path.startswith("same path: persistent and fresh differ in ")
    assert " from token 0, " in path
    assert path.endswith("logits apart")
    assert "correctness: persistent is wrong, fresh is right" in found
    assert verdict["arms"]["fresh"]["lifetime"] == "engine_per_sample"


@pytest.mark.parametrize(
    "server", [("OneStaticCache", SHORT_CACHE), ("OnePrefixCache",)], ids=lambda server: server[0]
)
def test_the_same_servers_used_as_documented_are_ok(asked, server):
    finished, verdict, rows = asked(*server, "+backend.renew=true", "fresh=inprocess", samples=2)
    assert finished.status == 0, finished.out
    assert (verdict["verdict"], verdict["status"]) == (OK, 0)
    assert classes(verdict) == [OK] * 2
    assert all(row["correct"] for row in rows)
    by_arm = {
        arm: [row["logits_digest"] for row in rows if row["arm"] == arm]
        for arm in ("persistent", "persistent_again", "fresh", "fresh_again")
    }
    assert len({json.dumps(one) for one in by_arm.values()}) == 1
