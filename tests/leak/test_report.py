"""The verdict as text, Markdown, JSON and JUnit XML."""

import json
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from ruler_bench.leak.classes import CLASSES
from ruler_bench.leak.report import (
    JUNIT_XML,
    VERDICT_JSON,
    junit_xml,
    markdown_verdict,
    terminal_verdict,
    to_json,
    write_verdict,
)
from ruler_bench.leak.verdict import judge

NAMES = ("persistent", "persistent_again", "fresh", "fresh_again", "reference")


@pytest.fixture(scope="session")
def leaky(made):
    """A run in which answers of the warm engine are full of what breaks formats."""

    def judged(text=" \x00\x1b[31m|`<&]]>\ud800\ufffe\n7"):
        records = [
            made.answer(
                name,
                one,
                output=text if name.startswith("persistent") and one > 2 else " 7",
                output_tokens=(one, 5 if name.startswith("persistent") and one > 2 else 4),
                logits_digest=None,
                top2_margin=None,
            )
            for name in NAMES
            for one in range(20)
        ]
        return judge(records, made.arms(*NAMES), title="niah | \x07single")

    return judged


def test_the_sentence_comes_first(leaky):
    verdict = leaky()
    assert verdict.verdict == "leak"
    shown = terminal_verdict(verdict)
    assert shown.startswith(r"niah | \x07single: LEAK. 17 of 20 answers change")
    assert "\x1b" not in shown
    assert markdown_verdict(verdict).splitlines()[2].startswith("**niah &#124;")


def test_the_terminal_has_table_evidence_and_limits(leaky):
    shown = terminal_verdict(leaky())
    for title in ("right in", "Evidence, strongest first", "odd one out", "can be shown"):
        assert title in shown


def test_the_markdown_renders_as_tables(leaky):
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown_verdict(leaky()))
    assert sum(token.type == "table_open" for token in tokens) == 3
    headings = [token.tag for token in tokens if token.type == "heading_open"]
    assert headings == ["h2", "h3", "h3", "h3"]


def test_the_json_is_versioned_and_whole(leaky, tmp_path):
    verdict = leaky()
    write_verdict(tmp_path, verdict)
    read = json.loads((tmp_path / VERDICT_JSON).read_text())
    assert read == json.loads(json.dumps(to_json(verdict)))
    assert read["schema_version"] == 1
    assert read["status"] == 3
    assert read["counts"] == {**dict.fromkeys(CLASSES, 0), "leak": 17, **_others(read)}
    assert len(read["indices"]) == 20
    assert read["indices"][5]["evidence"][0]["kind"] == "same path"


def _others(read):
    counted = dict.fromkeys(CLASSES, 0)
    for one in read["indices"]:
        counted[one["verdict"]] += 1
    return counted


def test_junit_xml_is_well_formed_and_counts(leaky, tmp_path):
    verdict = leaky()
    write_verdict(tmp_path, verdict)
    root = ElementTree.parse(tmp_path / JUNIT_XML).getroot()
    suite = root.find("testsuite")
    cases = suite.findall("testcase")
    assert (len(cases), suite.get("tests"), suite.get("failures")) == (20, "20", "17")
    assert len(suite.findall("testcase/failure")) == 17
    assert suite.find("properties/property[@name='verdict']").get("value") == "leak"
    assert root.get("failures") == "17"


@given(st.text(st.characters(), max_size=40))
def test_junit_xml_holds_any_text(leaky, text):
    root = ElementTree.fromstring(junit_xml(leaky(text or " ")).encode())
    assert root.tag == "testsuites"


def test_unstable_answers_fail_only_where_the_status_says_so(made):
    records = [
        made.answer(name, one, " 7" if name == "fresh_again" and one == 3 else None, bits=None)
        for name in NAMES
        for one in range(20)
    ]
    strict = ElementTree.fromstring(junit_xml(judge(records, made.arms(*NAMES))).encode())
    lenient = judge(records, made.arms(*NAMES), max_unstable=0.05)
    passed = ElementTree.fromstring(junit_xml(lenient).encode())
    assert (strict.get("failures"), strict.get("skipped")) == ("1", "0")
    assert (passed.get("failures"), passed.get("skipped")) == ("0", "1")


def test_a_clean_run_lists_no_index(made):
    records = [made.answer(name, one) for name in NAMES for one in range(20)]
    shown = terminal_verdict(judge(records, made.arms(*NAMES)))
    assert "right in" not in shown
    assert "Evidence" not in shown
