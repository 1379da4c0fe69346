import string

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from ruler_bench.report import write_reports
from ruler_bench.report.markdown import LISTED_SAMPLES
from ruler_bench.report.tables import COLUMNS, NOT_ALWAYS, SETTINGS
from ruler_bench.report.text import visible


def report(folder, *runs):
    write_reports(folder, list(runs))
    return (folder / "report.md").read_bytes().decode("utf-8")


def rendered(text):
    """Read Markdown back: its headings, its code blocks, and its tables as rows of text."""
    headings, blocks, tables = [], [], []
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type == "fence":
            blocks.append(token.content.splitlines())
        elif token.type == "table_open":
            tables.append([])
        elif token.type == "tr_open":
            tables[-1].append([])
        elif token.type == "inline":
            content = "".join(child.content for child in token.children)
            if before.type == "heading_open":
                headings.append(content)
            elif before.type in ("th_open", "td_open"):
                tables[-1][-1].append(content)
    return headings, blocks, tables


def test_a_run_without_failures(record, run, tmp_path):
    headings, (settings_,), (table, depths) = rendered(report(tmp_path, run(record(0), record(1))))
    assert headings == [
        "RULER: niah_single_1, 4096 tokens, offload, probe, persistent",
        "Results",
        "Score by depth",
        "Samples to look at",
        "Settings in force",
    ]
    assert table[0] == [title for title in COLUMNS if title not in NOT_ALWAYS]
    assert table[1][5:10] == ["1", "2", "2", "100.00", "34.2 to 100.0"]
    assert depths[1][5:9] == ["-", "-", "100.0 (2)", "-"]
    for line in (
        "config.backend.num_gpu_blocks = 4",
        "config.arms = []",
        "data.fingerprint = abc123",
        "versions.torch = 2.13.0",
        "device = cpu",
        "command = python -m ruler_bench length=4096",
    ):
        assert line in settings_
    assert not any(line.startswith("lives") for line in settings_)
    assert "every sample was answered with full score" in report(tmp_path, run(record(0)))
    assert "no sample has been run" in report(tmp_path, run())
    assert (tmp_path / "summary.csv").exists()


def test_failures_are_listed_as_for_an_issue(record, run, tmp_path):
    failing = run(
        record(0),
        record(17, output=" 7654321 and\nmore", position=3, finish_reason="length"),
        record(18, error="NaN in layer 3"),
        record(37, output="", depth=None),
    )
    text = report(tmp_path, failing)
    headings, _, (_, _, wrong, errors) = rendered(text)
    assert headings[-2] == "niah_single_1, 4096 tokens, offload, probe, persistent"
    assert "2 of 3 without full score: `indices=[17,37]`." in text
    assert wrong[0] == ["ordinal", "position", "depth", "score", "ended by", "expected", "got"]
    assert wrong[1] == ["17", "3", "0.25", "0.00", "length", "1234567", "7654321 and\\nmore"]
    assert wrong[2] == ["37", "37", "-", "0.00", "stop", "1234567", "(empty)"]
    assert "1 with an error in the engine: `indices=[18]`." in text
    assert errors[1:] == [["18", "18", "NaN in layer 3"]]


def test_several_runs_share_their_settings_once(record, run, tmp_path):
    text = report(
        tmp_path,
        run(record(0)),
        run(record(0, output="no"), backend="gpu_only", config={"seed": 42}),
    )
    headings, (shared, first, second), (table, _, _) = rendered(text)
    assert headings[0] == "RULER: 2 runs"
    assert "config.seed = 42" in shared
    assert "backend = offload" in first
    assert "config.backend.num_gpu_blocks = 4" in first
    assert second == ["backend = gpu_only"]
    assert len(table) == 3
    assert "### niah_single_1, 4096 tokens, gpu_only, probe, persistent" in text


def test_runs_that_differ_in_a_setting_can_be_told_apart(record, run, tmp_path):
    runs = [run(record(0), config={"seed": seed, "backend": {"x": 1}}) for seed in (1, 2)]
    headings, _, (table, _) = rendered(report(tmp_path, *runs))
    column = table[0].index(SETTINGS)
    assert [row[column] for row in table[1:]] == ["seed=1", "seed=2"]
    assert any("seed=2" in heading for heading in headings)


def test_many_failures_are_cut_and_all_ordinals_named(record, run, tmp_path):
    count = LISTED_SAMPLES + 5
    text = report(tmp_path, run(*[record(i, output="no") for i in range(count)]))
    _, _, (_, _, wrong) = rendered(text)
    assert len(wrong) == LISTED_SAMPLES + 1
    assert f",{count - 1}]`. The first {LISTED_SAMPLES} follow" in text


def test_huge_outputs_stay_small_in_the_report(record, run, tmp_path):
    text = report(tmp_path, run(record(0, output="9" * 10**6), record(1, error="x" * 10**6)))
    assert len(text) < 10_000
    assert "(1000000 characters)" in text


NASTY = st.text(
    alphabet=st.one_of(
        st.characters(),
        st.characters(categories=["Cs"]),
        st.sampled_from("|`\\*_[]<>&#~!-\n\r\t\x00\x1b\u2028"),
    ),
    max_size=60,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(outputs=st.lists(NASTY, min_size=1, max_size=4), error=NASTY, model=NASTY, setting=NASTY)
def test_the_report_reads_back_whatever_it_holds(
    record, run, tmp_path, *, outputs, error, model, setting
):
    records = [record(i, output=one, expected=("\x00never",)) for i, one in enumerate(outputs)]
    records.append(record(len(outputs), error=error))
    made = run(*records, model=model, config={"path": setting})
    headings, (lines,), (table, depths, wrong, errors) = rendered(report(tmp_path, made))
    assert len(headings) == 6
    assert [len(row) for row in depths] == [len(depths[0])] * 2
    assert f"config.path = {visible(setting)}" in lines
    assert [len(row) for row in table] == [len(COLUMNS) - len(NOT_ALWAYS)] * 2
    got = [row[-1] for row in wrong[1:]]
    assert got == [visible(one).strip() if one else "(empty)" for one in outputs]
    assert [row[-1] for row in errors[1:]] == [visible(error).strip()]


def test_markup_in_outputs_is_shown_not_obeyed(record, run, tmp_path):
    output = "<img src=x onerror=alert(1)> | [a](http://b) @user #12 " + string.punctuation
    _, _, (_, _, wrong) = rendered(report(tmp_path, run(record(0, output=output))))
    assert wrong[1][-1] == visible(output)
    assert "<img" not in report(tmp_path, run(record(0, output=output)))


def test_the_verdict_comes_first(run, record, tmp_path):
    write_reports(tmp_path, [run(record(0))], "## Verdict\n\n**niah_single_1: OK.**")
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert lines[2:5] == ["## Verdict", "", "**niah_single_1: OK.**"]
    assert "## Results" in lines[5:]
