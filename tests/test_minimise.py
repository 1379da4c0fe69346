"""The smallest reproducer: delta debugging, probes, runs on disk, replays."""

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import Generation
from ruler_bench.leak.probe import BITS, ERROR, TEXT, TOKENS, Answer, Ask, change
from ruler_bench.leak.search import Limits, NotReproduced, Search
from ruler_bench.leak.shrink import ddmin, last_that_show, smaller_items
from ruler_bench.lives import Failure, Reply
from ruler_bench.minimise import main

# --- delta debugging ----------------------------------------------------------------------------


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_what_is_needed_is_all_that_is_left(case):
    length, needed = case
    needed = needed or {0}
    found = ddmin(range(length), lambda items: needed <= set(items))
    assert found == tuple(sorted(needed))


@settings(max_examples=60)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12), st.integers(0, 10**9))
def test_of_any_test_at_all_no_single_item_can_be_left_out(items, salt):
    whole = tuple(enumerate(items))

    def shows(part):
        return part == whole or hash((salt, part)) % 3 == 0

    found = ddmin(whole, shows)
    assert found == whole or shows(found)
    for place in range(len(found)):
        rest = found[:place] + found[place + 1 :]
        assert not rest or not shows(rest)


def test_few_probes_where_the_last_item_is_to_blame():
    asked = []

    def shows(items):
        asked.append(items)
        return 63 in items

    assert ddmin(last_that_show(range(64), shows), shows) == (63,)
    assert asked == [(63,)]
    assert last_that_show(range(64), lambda items: 60 in items) == (60, 61, 62, 63)
    assert last_that_show(range(64), lambda items: 0 in items) == tuple(range(64))


@given(st.lists(st.integers(1, 500), min_size=1, max_size=5), st.integers(1, 40))
def test_items_are_halved_as_far_as_the_test_lets_them(items, least):
    items = [max(least, one) for one in items]
    found = smaller_items(
        items,
        lambda one: [one // 2] if one > 1 else [],
        lambda part: all(one >= least for one in part),
    )
    assert all(least <= one < 2 * least for one in found)


@pytest.mark.parametrize(
    ("answer", "fresh", "level"),
    [
        (Answer("a", (1, 2), ("x", "y")), Answer("a", (1, 2), ("x", "y")), None),
        (Answer("a", (1, 2), ("x", "z")), Answer("a", (1, 2), ("x", "y")), BITS),
        (Answer("a", (1, 3), ("x", "z")), Answer("a", (1, 2), ("x", "y")), TOKENS),
        (Answer("b"), Answer("a", (1, 2)), TEXT),
        (Answer(error="died"), Answer("a"), ERROR),
        (Answer("a"), Answer(error="died"), None),
    ],
)
def test_how_an_answer_changes(answer, fresh, level):
    assert change(answer, fresh, bits_are_promised=True) == level
    assert change(answer, fresh, bits_are_promised=False) == (None if level == BITS else level)


# --- the search, over engines made up here ------------------------------------------------------


class Words:
    """A tokenizer of numbers."""

    def decode(self, ids):
        return " ".join(map(str, ids))


def ask(number, tokens=64, new_tokens=32):
    ids = tuple(range(1000 * number, 1000 * number + tokens))
    return Ask(number, number, Words().decode(ids), ids, new_tokens, (7,))


class Engines:
    """Starts engines whose answer to each request a function of what came before decides."""

    can_cancel = False

    def __init__(self, answer):
        self.settings = {}
        self.answer = answer
        self.sequences = []

    def start(self):
        self.sequences.append([])
        return self

    def ask(self, request, cancel_after_seconds=None):
        before = self.sequences[-1]
        found = self.answer(request, list(before))
        before.append(request)
        if isinstance(found, str):
            return Reply(Failure(found))
        return Reply(Generation(token_ids=found, finish_reason="length"))

    def close(self):
        return None

    def end(self):
        pass


def search(answer, predecessors, victim=99, repeats=3, max_requests=None):
    engines = Engines(answer)
    look = Search(engines.start, ask(victim), Words(), Limits(repeats, max_requests))
    return look.run([ask(one) for one in predecessors]), engines


def ids_of(requests):
    return [one.request_id for one in requests]


@pytest.mark.parametrize("needed", [{0}, {6}, {12}, {2, 9}, {0, 5, 12}])
def test_the_requests_that_are_needed_are_left_and_cut_to_one_token(needed):
    def answer(request, before):
        return (1, 3) if needed <= set(ids_of(before)) and request.request_id == 99 else (1, 2)

    found, engines = search(answer, range(13))
    assert ids_of(found.asks) == [*sorted(needed), 99]
    assert [len(one.prompt_token_ids) for one in found.asks] == [1] * len(needed) + [64]
    assert [one.max_new_tokens for one in found.asks] == [1] * len(needed) + [32]
    assert (found.level, found.shown, found.tries) == (TOKENS, 3, 3)
    assert found.expected.token_ids == (1, 2)
    assert found.wrong.token_ids == (1, 3)
    assert found.is_smallest
    assert found.probes == len(engines.sequences)
    assert found.requests == sum(map(len, engines.sequences))


def test_lengths_end_where_half_of_them_shows_nothing():
    def answer(request, before):
        long = [one for one in before if len(one.prompt_token_ids) >= 20 and one.max_new_tokens > 8]
        return (1,) if long else (2,)

    found, _ = search(answer, range(3))
    (left, _) = found.asks
    assert 20 <= len(left.prompt_token_ids) < 40
    assert 8 < left.max_new_tokens <= 16
    assert left.prompt == Words().decode(left.prompt_token_ids)


def test_the_part_of_a_prompt_that_matters_is_kept():
    def answer(request, before):
        return (1,) if any(2040 in one.prompt_token_ids for one in before) else (2,)

    found, _ = search(answer, range(5))
    assert found.asks[0].prompt_token_ids == (2040,)


def test_no_sequence_is_asked_twice_but_those_that_are_repeated():
    def answer(request, before):
        return (1,) if {3, 8} <= set(ids_of(before)) else (2,)

    found, engines = search(answer, range(16), repeats=4)
    seen = {}
    for sequence in engines.sequences:
        seen[tuple(sequence)] = seen.get(tuple(sequence), 0) + 1
    # All; alone, and once more at the end; the result, first as a probe.
    assert sorted(count for count in seen.values() if count > 1) == [4, 5, 5]
    assert seen[tuple(one.request() for one in found.asks)] == 5


def test_other_tokens_are_not_exchanged_for_other_logits():
    class Digests(Engines):
        def ask(self, request, cancel_after_seconds=None):
            before = set(ids_of(self.sequences[-1]))
            self.sequences[-1].append(request)
            tokens = (1,) if 2 in before else (2,)
            digest = "warm" if before else "cold"
            return Reply(Generation(token_ids=tokens, logits_digest=(digest,)))

    engines = Digests(None)
    found = Search(engines.start, ask(99), Words(), Limits()).run([ask(one) for one in range(5)])
    assert (found.level, ids_of(found.asks)) == (TOKENS, [2, 99])
    found = Search(engines.start, ask(99), Words(), Limits()).run([ask(0), ask(1)])
    assert (found.level, ids_of(found.asks)) == (BITS, [1, 99])


def test_a_cut_prompt_that_fails_is_another_fault():
    def answer(request, before):
        if len(request.prompt_token_ids) < 10:
            return "too short"
        return (1,) if before else (2,)

    found, _ = search(answer, range(3))
    assert 10 <= len(found.asks[0].prompt_token_ids) < 20


def test_an_engine_that_fails_after_others():
    def answer(request, before):
        return "out of blocks" if request.request_id == 99 and 1 in ids_of(before) else (1,)

    found, _ = search(answer, range(3))
    assert (found.level, ids_of(found.asks)) == (ERROR, [1, 99])
    assert found.wrong.error == "out of blocks"


def test_a_race_is_told_as_often_as_it_showed_and_never_called_smallest():
    turns = [0]

    def answer(request, before):
        if request.request_id != 99 or 4 not in ids_of(before):
            return (1,)
        turns[0] += 1
        return (2,) if turns[0] % 3 == 0 else (1,)

    found, _ = search(answer, range(8), repeats=3)
    assert ids_of(found.asks) == [4, 99]
    assert (found.shown, found.tries, found.whole_shown) == (1, 3, 1)
    assert not found.is_smallest
    assert "does not show each time" in found.why_not


def test_what_showed_once_and_never_again_is_not_claimed():
    shown = []

    def answer(request, before):
        if request.request_id != 99 or not before:
            return (1,)
        if len(before) == 6:
            return (2,)
        # Each smaller sequence shows the first time it is asked, by chance.
        key = tuple(ids_of(before)), sum(len(one.prompt_token_ids) for one in before)
        first = key not in shown
        shown.append(key)
        return (2,) if first and len(before) == 1 and key[1] > 30 else (1,)

    found, _ = search(answer, range(6))
    assert len(found.asks) == 7
    assert not found.is_smallest
    assert "showed it once" in found.why_not


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda request, before: (1,), "3 of 3 repeats"),
        (lambda request, before: "broken", "a fresh engine fails"),
    ],
)
def test_what_does_not_show_again_has_no_reproducer(answer, reason):
    with pytest.raises(NotReproduced, match=reason):
        search(answer, range(4))


def test_fresh_engines_that_disagree_have_no_reproducer():
    turns = []

    def answer(request, before):
        turns.append(0)
        return (len(turns),)

    with pytest.raises(NotReproduced, match="do not agree"):
        search(answer, range(4))


def test_a_limit_of_requests_ends_the_search_with_what_was_found():
    def answer(request, before):
        return (1,) if {0, 15} <= set(ids_of(before)) else (2,)

    whole, _ = search(answer, range(16))
    found, _ = search(answer, range(16), max_requests=120)
    assert not found.is_smallest
    assert "--max-requests 120" in found.why_not
    assert whole.requests > 120
    assert {0, 15, 99} <= set(ids_of(found.asks))


# --- runs on disk -------------------------------------------------------------------------------

ENGINES = '''
import os
import threading
from backends.base import Generation, RequestCancelled

SERVED = set()


class Leaky:
    """Turns an answer around once it has served the samples in `needs`."""

    def __init__(self, *, needs: tuple = (), api_key: str = "", broken: bool = False):
        if broken or os.path.exists("broken"):
            raise OSError("the port is taken")
        self.needs, self.api_key, self.seen = needs, api_key, set()

    def generate(self, request):
        ids = tuple(request.prompt_token_ids[-40:-30])
        if self.needs and set(self.needs) <= self.seen:
            ids = ids[::-1]
        self.seen.add(request.request_id)
        return Generation(token_ids=ids, finish_reason="length")

    def describe(self):
        return {"needs": list(self.needs)}

    def close(self):
        pass


class Hasty(Leaky):
    """Answers wrongly after a request that was cancelled."""

    def __init__(self):
        super().__init__()
        self.ended = threading.Event()

    def generate(self, request):
        if request.request_id % 2 == 0 and not self.seen and self.ended.wait(2):
            self.needs = (0,)
            self.seen.add(0)
            raise RequestCancelled("cancelled")
        return super().generate(request)

    def cancel(self, request_id):
        self.ended.set()


class Telling(Leaky):
    """Tells how long the prompt before was."""

    def __init__(self):
        super().__init__()
        self.last = ()

    def generate(self, request):
        found = super().generate(request)
        if self.last:
            found = Generation(token_ids=found.token_ids + self.last, finish_reason="length")
        self.last = (len(request.prompt_token_ids) % 100 + 100,)
        return found


class LeakyModule(Leaky):
    """The same, but what was served outlives the engine in its process."""

    def __init__(self):
        super().__init__(needs=(0,))
        self.seen = SERVED
'''
SHORT = ("task=niah_single_1", "length=512", "device=cpu", "fresh=inprocess")
PAIR = "arms=[persistent,fresh]"


@pytest.fixture
def leaky(cli, workdir, monkeypatch):
    """Run a leaky engine of a module in the working folder."""
    (workdir / "leaky_engines.py").write_text(ENGINES)
    monkeypatch.syspath_prepend(workdir)

    def run(*arguments, name="Leaky", arms=PAIR):
        target = f"backend._target_=leaky_engines.{name}"
        mine = ("backend=custom", target, *SHORT, arms, "num_samples=8", "out=run")
        return cli(*mine, *arguments)

    return run


@pytest.fixture
def minimise(cli):
    def call(*arguments, fresh="inprocess"):
        return cli(*arguments, "--fresh", fresh, entry=main)

    return call


def kept(folder):
    names = ("reproducer.json", "expected.json", "wrong.json")
    rows = [json.loads(one) for one in (folder / "requests.jsonl").read_text().splitlines()]
    return rows, *(json.loads((folder / one).read_text()) for one in names)


@pytest.mark.parametrize(("needs", "ordinals"), [("[2]", [2, 3]), ("[1,4]", [1, 4, 5])])
def test_a_leak_ends_with_the_requests_that_it_needs(leaky, minimise, workdir, needs, ordinals):
    leaky(f"+backend.needs={needs}")
    finished = minimise("run")
    assert finished.status == 3, finished.err
    rows, about, expected, wrong = kept(workdir / "run" / "reproducer")
    assert [row["ordinal"] for row in rows] == ordinals
    assert [row["role"] for row in rows] == ["predecessor"] * (len(rows) - 1) + ["victim"]
    assert [len(row["prompt_token_ids"]) for row in rows[:-1]] == [1] * (len(rows) - 1)
    assert wrong["token_ids"] != expected["token_ids"]
    assert wrong["token_ids"][::-1] == expected["token_ids"]
    assert wrong["text"] != expected["text"]
    assert about["is_smallest"]
    assert f"{len(rows)} of {ordinals[-1] + 1} requests are enough" in finished.out
    # What the run recorded is what the reproducer shows.
    records = [json.loads(one) for one in (workdir / "run" / "records.jsonl").open()]
    (victim,) = [
        one for one in records if one["arm"] == "persistent" and one["ordinal"] == ordinals[-1]
    ]
    assert victim["output_tokens"] == wrong["token_ids"]
    assert about["notes"] == []
    assert str(workdir) not in json.dumps(about)


def test_the_command_of_the_readme_replays_it_on_any_backend(leaky, minimise, workdir):
    leaky("+backend.needs=[2]")
    assert minimise("run", "--out", "kept").status == 3
    readme = (workdir / "kept" / "README.md").read_text()
    (command,) = [line for line in readme.splitlines() if line.startswith("    python")]
    assert command.strip() == "python -m ruler_bench.minimise --replay kept"
    arguments = shlex.split(command)[3:]
    shown = minimise(*arguments, "--repeat", "2")
    assert shown.status == 3, shown.err
    assert "shows in 2 of 2: its answer changes from token" in shown.out
    sound = minimise(*arguments, "backend.needs=[]")
    assert sound.status == 0
    assert "does not show" in sound.out
    other = minimise(*arguments, "backend=oracle")
    assert other.status == 0
    assert "on oracle: does not show" in other.out
    assert "Note: a fresh engine answered" in other.out
    assert minimise(*arguments, "backend=oracle", "backend.wrong=[1]").status == 3


def test_a_chosen_answer_and_another_arm(leaky, minimise, workdir):
    leaky("+backend.needs=[6]", arms="arms=[persistent,shuffled,fresh]")
    assert minimise("run", "--ordinal", "7").status == 3
    assert [row["ordinal"] for row in kept(workdir / "run" / "reproducer")[0]] == [6, 7]
    assert minimise("run", "--arm", "shuffled").status == 3
    rows, about, *_ = kept(workdir / "run" / "reproducer")
    assert about["arm"] == "shuffled"
    assert len(rows) == 2
    assert rows[0]["ordinal"] == 6


@pytest.mark.parametrize(
    ("arm", "needs", "ordinals"),
    [("axa", "[0]", [0, 1]), ("aged", "[3,47]", [1_000_003, 1_000_047, 0])],
)
def test_requests_beside_the_samples_are_asked_again(leaky, minimise, arm, needs, ordinals):
    """`needs` are places in the arm's stream: of aged, requests that only age the engine."""
    leaky(f"+backend.needs={needs}", "num_samples=2", arms=f"arms=[{arm},fresh]")
    finished = minimise("run", "--arm", arm, "--ordinal", str(ordinals[-1]))
    assert finished.status == 3, finished.err
    rows, about, *_ = kept(Path("run/reproducer"))
    assert [row["ordinal"] for row in rows] == ordinals
    assert about["whole_requests"] == {"axa": 2, "aged": 51}[arm]
    assert ("aging" in Path("run/reproducer/README.md").read_text()) == (arm == "aged")


def test_a_cancelled_request_is_cancelled_again(leaky, minimise, workdir):
    ran = leaky("num_samples=2", name="Hasty", arms="arms=[cancel,fresh]")
    assert ran.status != 2, ran.err
    finished = minimise("run", "--arm", "cancel")
    assert finished.status == 3, finished.err
    rows, *_ = kept(workdir / "run" / "reproducer")
    assert [row["ordinal"] for row in rows] == [1, 0]
    assert rows[0]["cancel_after_seconds"] > 0
    assert rows[1]["cancel_after_seconds"] is None


def test_one_arm_is_enough_for_an_answer_that_is_named(leaky, minimise, workdir):
    leaky("+backend.needs=[2]", arms="arms=[persistent]")
    assert minimise("run", "--ordinal", "5").status == 3
    assert [row["ordinal"] for row in kept(workdir / "run" / "reproducer")[0]] == [2, 5]
    clean = minimise("run", "--ordinal", "1", "--out", "other")
    assert clean.status == 5
    assert "no reproducer" in clean.out
    assert not (workdir / "other").exists()


def test_a_secret_is_not_kept_and_asked_for(leaky, minimise, workdir):
    leaky("+backend.needs=[2]", "+backend.api_key=hunter2")
    refused = minimise("run")
    assert refused.status == 2
    assert "backend.api_key" in refused.err
    assert minimise("run", "backend.api_key=hunter2").status == 3
    folder = workdir / "run" / "reproducer"
    assert all("hunter2" not in one.read_text() for one in folder.iterdir())
    assert minimise("--replay", str(folder)).status == 2
    assert minimise("--replay", str(folder), "backend.api_key=hunter2").status == 3


def test_each_engine_has_a_process_of_its_own(leaky, minimise, workdir):
    leaky("fresh=process", "num_samples=4", name="LeakyModule")
    in_one = minimise("run", "--ordinal", "3", fresh="inprocess")
    assert in_one.status == 5, in_one.out
    assert "outlives an engine" in in_one.out
    finished = minimise("run", "--ordinal", "3", "--repeat", "1", fresh="process")
    assert finished.status == 3, finished.err + finished.out
    rows, about, *_ = kept(workdir / "run" / "reproducer")
    assert [row["ordinal"] for row in rows] == [0, 3]
    assert about["each_engine_in"] == "process"


def test_a_seeded_fault_of_the_engine_needs_one_request_before(cli, minimise, workdir):
    offload = ("backend=offload", "backend.num_gpu_blocks=2", "backend.kvcache_block_size=64")
    fault = ("backend.chunk_tokens=128", "backend.fault=cpu_kv_read_past_length")
    short = (*SHORT, "length=320", "task.tokens_to_generate=16")
    ran = cli(*offload, *fault, *short, PAIR, "num_samples=2", "out=run")
    assert ran.status != 2, ran.err
    finished = minimise("run", "--repeat", "1")
    assert finished.status == 3, finished.err
    rows, about, expected, wrong = kept(workdir / "run" / "reproducer")
    assert len(rows) == 2
    assert len(rows[0]["prompt_token_ids"]) < about["whole_prompt_tokens"] / 3
    assert expected["logits_digest"] != wrong["logits_digest"]
    assert about["backend_in_force"]["fault"] == "cpu_kv_read_past_length"
    replay = ("--replay", "run/reproducer", "--repeat", "1")
    assert minimise(*replay).status == 3
    assert minimise(*replay, "backend.fault=null").status == 0


# --- bad input ----------------------------------------------------------------------------------


def refused(finished, *words):
    assert finished.status == 2, finished.out + finished.err
    line = finished.err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    for word in words:
        assert word in line, line


def test_a_run_without_arms_to_compare(leaky, minimise):
    leaky("+backend.needs=[2]", arms="arms=[persistent]")
    refused(minimise("run"), "no arm to hold persistent against", "arms=[persistent,fresh]")
    leaky("overwrite=true", arms="arms=[fresh]")
    refused(minimise("run"), "unknown arm", "persistent", "fresh")
    refused(minimise("run", "--arm", "fresh"), "nothing came before it")


def test_a_clean_run(leaky, minimise):
    leaky()
    refused(minimise("run"), "answer alike", "nothing to reproduce")
    refused(minimise("run", "--ordinal", "3"), "--ordinal 3", "alike", "none")


def test_an_ordinal_that_does_not_exist_or_was_first(leaky, minimise):
    leaky("+backend.needs=[2]")
    refused(minimise("run", "--ordinal", "77"), "--ordinal 77", "0 to 7 (8 samples)")
    refused(minimise("run", "--ordinal", "1"), "those that differ: 3, 4, 5, 6, 7")
    leaky("+backend.needs=[2]", "overwrite=true", arms="arms=[persistent]")
    refused(minimise("run", "--ordinal", "0"), "first request of its engine")


def test_a_backend_that_cannot_be_rebuilt(leaky, minimise, workdir):
    leaky("+backend.needs=[2]")
    path = workdir / "run" / "manifest.json"
    text = path.read_text()
    (workdir / "broken").touch()
    refused(minimise("run"), "cannot be rebuilt", "the port is taken")
    (workdir / "broken").unlink()
    path.write_text(text.replace("leaky_engines.Leaky", "gone_engines.Leaky"))
    refused(minimise("run"), "run: ", "gone_engines.Leaky: cannot be imported")
    path.write_text(text.replace('"package:probe"', '"no/where/here"'))
    refused(minimise("run"), "model.path=no/where/here")
    path.write_text(text.replace('"seed": 42', '"seed": 43'))
    refused(minimise("run"), "another than the recorded one")
    path.write_text(text.replace('"haystack"', '"hay"'))
    refused(minimise("run"), "does not tell how it was run")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["name one run folder", "usage"]),
        (["nowhere"], ["nowhere: is no run folder"]),
        (["a", "b"], ["one run folder, not 2"]),
        (["a", "--ordinal", "-1"], ["--ordinal"]),
        (["a", "--ordinal", "x"], ["--ordinal x", "whole number"]),
        (["a", "--repeat", "0"], ["--repeat 0", "1 to 1000"]),
        (["a", "--max-requests", "0"], ["--max-requests 0"]),
        (["a", "--replay", "b"], ["does not go with --replay"]),
        (["--replay", "b", "--arm", "fresh"], ["--arm does not go with --replay"]),
        (["--replay", "nowhere"], ["nowhere/reproducer.json: cannot be read"]),
    ],
)
def test_wrong_usage(minimise, arguments, words):
    refused(minimise(*arguments), *words)


def test_a_replay_with_wrong_settings_or_a_damaged_folder(leaky, minimise, workdir):
    leaky("+backend.needs=[2]")
    assert minimise("run").status == 3
    folder = workdir / "run" / "reproducer"
    replay = ("--replay", str(folder))
    refused(minimise(*replay, "backend=offlaod"), "offlaod", "offload")
    refused(minimise(*replay, "backend.neads=[]"), "backend.neads", "backend.needs")
    refused(minimise(*replay, "task=niah_single_2"), "unknown key 'task'", "backend.KEY")
    refused(minimise(*replay, "threads=0"), "threads=0")
    refused(minimise(*replay, "device=gpu"), "device")
    requests = (folder / "requests.jsonl").read_text()
    (folder / "requests.jsonl").write_text(requests.splitlines()[0] + "\n")
    refused(minimise(*replay), "is damaged", "two requests")
    (folder / "requests.jsonl").write_text(requests[:-20])
    refused(minimise(*replay), "requests.jsonl: is damaged")


def test_a_folder_of_somebody_elses_is_left_alone(leaky, minimise, workdir):
    leaky("+backend.needs=[2]")
    (workdir / "mine").mkdir()
    (workdir / "mine" / "notes.txt").write_text("keep")
    refused(minimise("run", "--out", "mine"), "--out mine", "no reproducer")
    refused(minimise("run", "--out", "run/manifest.json"), "is a file")


# --- minimise=true ------------------------------------------------------------------------------


def test_a_run_minimises_its_own_leak_once(leaky, workdir):
    arms = "arms=[persistent,fresh,fresh_again]"
    command = ("+backend.needs=[2]", "minimise=true", "num_samples=10")
    ran = leaky(*command, arms=arms)
    assert ran.status == 3, ran.err
    folder = workdir / "run" / "reproducer"
    assert [row["ordinal"] for row in kept(folder)[0]] == [2, 3]
    assert "2 of 4 requests are enough" in ran.out
    (folder / "mine.txt").write_text("not looked for again")
    again = leaky(*command, arms=arms)
    assert again.status == 3
    assert "The reproducer is there already; replay: python -m ruler_bench.minimise" in again.out
    assert (folder / "mine.txt").exists()
    anew = leaky("overwrite=true", "num_samples=2", arms=arms)
    assert anew.status == 0
    assert not folder.exists()


def test_a_sound_run_has_nothing_to_minimise(leaky, workdir):
    ran = leaky("minimise=true", "num_samples=2")
    assert ran.status == 0, ran.err
    assert not (workdir / "run" / "reproducer").exists()


def test_what_a_run_cannot_minimise_is_refused_or_told(leaky, workdir):
    refused(leaky("minimise=true", arms="arms=[persistent]"), "minimise=true", "arms=[persistent]")
    refused(leaky("minimise=true", arms="arms=[fresh,fresh_again]"), "arms=[persistent,fresh]")
    planned = leaky("minimise=true", "dry_run=true")
    assert planned.status == 0
    assert "then, after a leak or a race" in planned.out
    assert not (workdir / "run").exists()


def test_without_a_name_the_arm_that_differs_is_taken(leaky, minimise, workdir):
    """As of a leak that only another order or another stream shows."""
    leaky("+backend.needs=[7]", arms="arms=[persistent,shuffled,fresh]")
    assert minimise("run").status == 3
    assert kept(workdir / "run" / "reproducer")[1]["arm"] == "shuffled"


def test_a_shorter_reproducer_is_kept_while_it_shows(leaky, minimise, workdir):
    leaky("+backend.needs=[2]")
    assert minimise("run").status == 3
    folder = workdir / "run" / "reproducer"
    shortest = (folder / "requests.jsonl").read_text()
    longer = minimise("run", "--max-requests", "1")
    assert longer.status == 3
    assert f"Not written: {Path('run') / 'reproducer'} holds a shorter one" in longer.out
    assert (folder / "requests.jsonl").read_text() == shortest
    # One that no longer shows is of no use.
    rows = [json.loads(line) for line in shortest.splitlines()]
    rows[0]["request_id"] = 77
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "Written to" in minimise("run", "--max-requests", "1").out
    assert len(kept(folder)[0]) == 4


def test_leaving_requests_out_keeps_the_wrong_answer(minimise):
    """Two faults, of which the smaller gives another wrong answer than the run showed."""

    def answer(request, before):
        ids = set(ids_of(before))
        if {2, 5} <= ids:
            return (1, 7)
        return (1, 3) if 5 in ids else (1, 2)

    found, _ = search(answer, range(8))
    assert ids_of(found.asks) == [2, 5, 99]
    assert found.wrong.token_ids == found.whole_wrong.token_ids == (1, 7)


def test_shorter_requests_that_change_the_wrong_answer_are_told(leaky, minimise, workdir):
    def answer(request, before):
        long = any(len(one.prompt_token_ids) > 40 for one in before)
        return (1, 7) if long else (1, 3) if before else (1, 2)

    found, _ = search(answer, range(3))
    assert (found.wrong.token_ids, found.whole_wrong.token_ids) == ((1, 3), (1, 7))
    leaky(name="Telling")
    assert minimise("run").status == 3
    notes = kept(workdir / "run" / "reproducer")[1]["notes"]
    assert any("the wrong answer is another than after all 2 requests" in one for one in notes)


def test_help_says_what_a_limit_of_requests_does(minimise):
    told = " ".join(minimise("--help").out.split())
    assert "no more than N requests" in told
    assert "not called the smallest" in told
