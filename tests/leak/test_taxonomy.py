import csv
import itertools
import random
import re
import uuid
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ruler_bench.leak.taxonomy import KINDS, LOOP_CHARACTERS, Label, classify

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "taxonomy"
DOCS = (ROOT / "docs" / "taxonomy.md").read_text()

NUMBER = "4188992"
UUID = "e767dcea-b0e6-4969-a213-42b0f1eedba3"


def table(name):
    with (DATA / name).open(newline="") as file:
        return list(csv.DictReader(file))


def key(row):
    return row["engine"], row["task"], row["index"]


def published():
    """Expected value and output of each published row."""
    return {
        (engine, row["task"], row["index"]): (row["expected"], row["output"])
        for engine in ("persistent", "fresh")
        for row in table(f"{engine}_engine_errors_32k.csv")
    }


def shown(value):
    """What the publication shows of a value."""
    return value.removesuffix("-...")


def classified():
    rows = published()
    labels = {}
    for (engine, task, index), (expected, output) in rows.items():
        others = {
            int(other[2]): [answer]
            for other, (answer, _) in rows.items()
            if other[:2] == ("persistent", task) and other[2] != index
        }
        fresh = rows.get(("fresh", task, index))
        labels[engine, task, index] = classify(
            output,
            [shown(expected)],
            other_answers=others,
            context_values=[shown(fresh[1])] if fresh else [],
        ).name
    return labels


def confusion(half):
    given_labels = classified()
    return Counter(
        (row["label"], given_labels[key(row)]) for row in table("labels.csv") if row["half"] == half
    )


def share_right(counts):
    return sum(n for (label, given), n in counts.items() if label == given) / counts.total()


def test_held_out_outputs_are_named_as_a_reader_names_them():
    counts = confusion("held_out")
    right = sum(n for (label, given), n in counts.items() if label == given)
    assert share_right(counts) >= 0.9
    assert f"{right} of {counts.total()} held-out" in DOCS


@pytest.mark.parametrize(("half", "heading"), [("rules", "Half that"), ("held_out", "Held-out")])
def test_the_published_confusion_is_what_the_rules_give(half, heading):
    section = re.split(r"^##+ ", DOCS, flags=re.M)
    text = next(part for part in section if part.startswith(heading))
    written = Counter()
    for label, given_label, count in re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\d+) \|", text, re.M):
        written[label, given_label] = int(count)
    assert written == confusion(half)


def test_both_readings_and_the_labels_cover_every_row_once():
    rows = published()
    assert len(rows) == 137
    for name in ("reading_1.csv", "reading_2.csv", "labels.csv"):
        keys = [key(row) for row in table(name)]
        assert len(keys) == len(rows)
        assert set(keys) == set(rows)
        assert {row["label"] for row in table(name)} <= set(KINDS)


def test_a_label_is_what_both_readings_say_or_has_a_reason():
    first = {key(row): row["label"] for row in table("reading_1.csv")}
    second = {key(row): row["label"] for row in table("reading_2.csv")}
    for row in table("labels.csv"):
        said = {first[key(row)], second[key(row)]}
        assert row["label"] in said
        assert bool(row["reason"]) == (len(said) == 2)


def test_the_published_agreement_is_that_of_the_readings():
    second = {key(row): row["label"] for row in table("reading_2.csv")}
    pairs = [(row["label"], second[key(row)]) for row in table("reading_1.csv")]
    agreed = sum(one == other for one, other in pairs)
    # Agreement by chance, counted over every pair of a first and a second label.
    chance = sum(one == other for one, _ in pairs for _, other in pairs) / len(pairs) ** 2
    kappa = (agreed / len(pairs) - chance) / (1 - chance)
    assert f"{agreed} of {len(pairs)}" in DOCS
    assert f"kappa {kappa:.3f}" in DOCS


def test_the_halves_hold_each_kind_alike():
    counts = Counter((row["label"], row["half"]) for row in table("labels.csv"))
    for label in {label for label, _ in counts}:
        assert abs(counts[label, "rules"] - counts[label, "held_out"]) <= 1


def test_the_codebook_lists_the_kinds_in_the_order_of_their_rules():
    listed = re.findall(r"^\| `(\w+)` \| [^`|]", DOCS, re.M)
    assert listed == list(KINDS)


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("", "empty_or_punctuation"),
        (" :.\x00\u3002\u2026 ", "empty_or_punctuation"),
        (":<|eot_id|>", "empty_or_punctuation"),
        (f" {NUMBER}.<|eot_id|>", "right"),
        (f"The number is {NUMBER}.", "right_with_extra"),
        (f"1{NUMBER}", "right_with_extra"),
        ("is: 41 is:  is: ", "repeated_is"),
        ("41 is:\nis: 4", "repeated_is"),
        ("8, 9, 10, 11", "counting_loop"),
        ("11 10 9 8", "counting_loop"),
        ("8, 9, 10", "unknown_value"),
        ("8 9 8 9 8", "unknown_value"),
        ("361361361", "repetition_loop"),
        ("0:0:0:0:0", "repetition_loop"),
        ("500b 500b 500b", "repetition_loop"),
        ("5001 5001 50", "unknown_value"),
        ("5015015", "unknown_value"),
        ("7770", "unknown_value"),
        (f"{UUID}, {UUID}, {UUID}", "repetition_loop"),
        ("5551234", "unknown_value"),
        ("4188", "truncated"),
        ("418: 8992", "truncated"),
        ("188, but it is not mentioned", "truncated"),
        ("92", "unknown_value"),
        ("418992", "digits_changed"),
        ("41889992", "digits_changed"),
        ("1488992", "digits_changed"),
        ("4188993", "digits_changed"),
        ("7953166", "unknown_value"),
        ("the text", "no_value"),
    ],
)
def test_a_kind_is_told_by_its_rule(output, name):
    assert classify(output, [NUMBER]).name == name


@pytest.mark.parametrize(
    ("output", "name"),
    [
        (UUID.upper(), "right"),
        ("b0e6:4969:a213:42b0f1eedba3", "truncated"),
        ("e767dcea-b0e6-b0e6-4969-a213-42b0f1eedba3", "digits_changed"),
        ("1d28b88b-b6a8-46ba-8e8f-56cbafbfd897", "unknown_value"),
        ("a bad face", "no_value"),
    ],
)
def test_uuids_are_compared_without_what_parts_them(output, name):
    assert classify(output, [UUID]).name == name


OTHERS = {3: ["7953166"], 8: ["5342494"], 9: ["7953166"]}


def test_the_answer_of_another_sample_is_named_with_all_its_samples():
    label = classify("It is 7953166.", [NUMBER], other_answers=OTHERS, context_values=[])
    assert label == Label("other_sample_value", "holds 7953166, an answer of sample 3 and 9")


def test_the_answer_of_another_sample_counts_before_the_loop_that_it_is_in():
    assert classify("5342494 " * 9, [NUMBER], other_answers=OTHERS).name == "other_sample_value"


@pytest.mark.parametrize("output", ["79531661", "795316", "x7953166", "7953166x"])
def test_a_longer_or_shorter_value_is_no_other_answer(output):
    assert classify(output, [NUMBER], other_answers=OTHERS).name == "unknown_value"


def test_what_this_prompt_holds_is_no_other_sample():
    label = classify("7953166", [NUMBER], other_answers=OTHERS, context_values=["7953166"])
    assert label.name == "other_key_value"


def test_an_answer_that_samples_share_is_right():
    assert classify(NUMBER, [NUMBER], other_answers={4: [NUMBER]}).name == "right"


def test_short_answers_of_other_samples_prove_nothing():
    assert classify("paris 123", [NUMBER], other_answers={1: ["paris", "123"]}).name != (
        "other_sample_value"
    )


def test_an_answer_of_another_sample_beside_the_right_one_is_told_in_the_reason():
    label = classify(f"{NUMBER} 5342494", [NUMBER], other_answers=OTHERS, context_values=[])
    assert label.name == "right_with_extra"
    assert "5342494, an answer of sample 8" in label.reason


SEVERAL = ["1234567", "7654321", "8080123"]


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("1234567, 7654321, and 8080123.", "right"),
        ("1. 1234567 2. 7654321 3. 8080123", "right_with_extra"),
        ("1234567 and 7654321", "partly_right"),
        ("9999001, 7654320 and 5050505", "digits_changed"),
        ("9999001, 76543", "truncated"),
        ("9999001, 5050505", "unknown_value"),
    ],
)
def test_several_answers_are_judged_by_the_one_that_fits_best(output, name):
    assert classify(output, SEVERAL).name == name


def test_one_of_several_spellings_is_enough_where_the_metric_says_so():
    assert classify("Paris", ["Paris", "City of Paris"], metric="part").name == "right"
    assert classify("Paris", ["Paris", "City of Paris"]).name == "partly_right"


@pytest.mark.parametrize(
    ("output", "name"),
    [("New York", "truncated"), ("London", "unknown_value"), ("city", "truncated")],
)
def test_answers_of_words_have_pieces_too(output, name):
    assert classify(output, ["New York City"]).name == name


def test_an_output_needs_an_answer():
    with pytest.raises(ValueError, match="at least one expected answer"):
        classify("1", [])
    assert classify("1", [None, " "]).name == "unknown_value"


# Whatever an engine prints: any code point, lone surrogates among them, and pieces of the rules.
PIECES = st.sampled_from(
    [NUMBER, UUID, "is:", " is : ", "<|eot_id|>", "<|", "-", "\x00", "İ", "ﬁ", "९", "7 8 9 10 "]
)
OUTPUTS = st.lists(PIECES | st.text(st.characters(), max_size=8), max_size=30).map("".join)
ANSWERS = st.lists(
    st.sampled_from([NUMBER, UUID]) | st.text(st.characters(), max_size=12), min_size=1, max_size=4
)


@given(OUTPUTS, ANSWERS, st.dictionaries(st.integers(0, 9), ANSWERS, max_size=3), ANSWERS)
def test_any_output_has_one_kind_and_the_same_one_each_time(output, expected, others, context):
    label = classify(output, expected, other_answers=others, context_values=context)
    assert label.name in KINDS
    assert label.reason
    again = classify(
        output,
        expected,
        other_answers=dict(reversed(others.items())),
        context_values=context,
    )
    assert again == label


@given(OUTPUTS)
def test_letter_case_and_blank_ends_do_not_matter_in_ascii(output):
    plain = output.encode("ascii", "ignore").decode()
    assert classify(f" {plain.upper()}\n", [UUID]).name == classify(plain, [UUID]).name


VALUES = st.one_of(
    st.integers(10**6, 10**7 - 1).map(str),
    st.uuids(version=4).map(str),
)


@given(VALUES, st.data())
def test_an_unbroken_piece_is_truncated_or_a_loop(value, data):
    plain = value.replace("-", "")
    length = data.draw(st.integers(3, len(plain) - 1))
    start = data.draw(st.integers(0, len(plain) - length))
    piece = plain[start : start + length]
    if re.search(r"\d", piece):
        assert classify(f": {piece}.", [value]).name in {"truncated", "repetition_loop"}


@given(st.integers(10**6, 10**7 - 1).map(str), st.integers(1, 6))
def test_a_digit_dropped_or_doubled_is_seen_as_such(value, at):
    changed = value[:at] + value[at] + value[at:]
    assert classify(changed, [value]).name in {
        "digits_changed",
        "repetition_loop",
        "right_with_extra",
    }
    dropped = value[:at] + value[at + 1 :]
    assert classify(dropped, [value]).name in {"digits_changed", "truncated", "repetition_loop"}


@given(st.text("abcdefgh0123456789", min_size=1, max_size=12), st.integers(6, 40))
def test_any_piece_six_times_or_more_is_a_loop(piece, copies):
    assert classify(piece * copies, ["city"]).name == "repetition_loop"


def test_random_values_seldom_look_like_pieces_of_the_answer():
    rng = random.Random(0)
    numbers = [str(rng.randrange(10**6, 10**7)) for _ in range(3001)]
    uuids = [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(501)]
    for values in (numbers, uuids):
        names = Counter(
            classify(output, [answer]).name for output, answer in itertools.pairwise(values)
        )
        assert names["unknown_value"] >= 0.99 * names.total()


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(
        [
            "a",
            "9",
            "is ",
            "is:x",
            "<|",
            "<|x",
            "1-",
            " 1 2 1 2 3 9",
            "\ud800",
            "é̀",
            NUMBER[:6] + " ",
        ]
    )
)
def test_a_megabyte_has_a_kind_and_a_short_reason(piece):
    label = classify(piece * (1_000_000 // len(piece)), [NUMBER], other_answers=OTHERS)
    assert label.name in KINDS
    assert len(label.reason) < 200


def test_loops_are_looked_for_at_the_start_of_a_huge_output():
    rng = random.Random(0)
    words = " ".join(rng.choices(["alpha", "beta", "gamma", "delta"], k=LOOP_CHARACTERS))
    assert classify(words + "x" * 2 * len(words), [NUMBER]).name == "no_value"
