import csv
import dataclasses
import io

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from ruler_bench.report import Row, build_row, terminal_table
from ruler_bench.report.tables import COLUMNS, NOT_ALWAYS, markdown_runs, write_summary
from ruler_bench.report.text import csv_cell, visible

NAMES = st.text(
    alphabet=st.one_of(
        st.characters(),
        st.characters(categories=["Cs"]),
        st.sampled_from("|,\"'`\\\n\r\t\x1b;="),
    ),
    max_size=20,
)

TITLES = [title for title in COLUMNS if title not in NOT_ALWAYS]


def test_summary_reads_back_as_numbers(record, run, tmp_path):
    rows = [
        build_row(
            run(
                record(0, ttft_seconds=0.5, decode_seconds=1.0, output_tokens=(1, 2, 3)),
                record(1, output="no"),
                record(2, error="failed"),
            )
        ),
        build_row(run(task="vt", length=131072)),
    ]
    write_summary(tmp_path / "summary.csv", rows)
    table = pd.read_csv(tmp_path / "summary.csv")
    assert list(table.columns) == [field.name for field in dataclasses.fields(Row)]
    first, second = table.to_dict("records")
    assert first["score"] == 50.0
    assert (first["samples"], first["correct"], first["errors"]) == (2, 1, 1)
    assert first["decode_tokens_per_second"] == 2.0
    assert first["score_low_95"] == rows[0].score_low_95
    assert second["length_tokens"] == 131072
    assert pd.isna(second["score"])


@pytest.mark.parametrize("name", ["=1+1", "+1", "-2+3", "@SUM(A1)", "plain", "'=x", "a=b"])
def test_no_cell_is_a_formula(record, run, tmp_path, name):
    write_summary(tmp_path / "summary.csv", [build_row(run(record(0), model=name))])
    (line,) = csv.DictReader(io.StringIO((tmp_path / "summary.csv").read_text()))
    assert line["model"][0] not in "=+-@"
    assert line["model"].removeprefix("'") == name.removeprefix("'")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(task=NAMES, model=NAMES)
def test_summary_stays_well_formed_whatever_the_names(record, run, tmp_path, task, model):
    path = tmp_path / "summary.csv"
    write_summary(path, [build_row(run(record(0), task=task, model=model))] * 2)
    text = path.read_bytes().decode("utf-8")
    assert len(text.splitlines()) == 3
    lines = list(csv.DictReader(io.StringIO(text, newline="")))
    names = (csv_cell(task), csv_cell(model))
    assert [(line["task"], line["model"]) for line in lines] == [names] * 2
    assert all(line["correct"] == "1" for line in lines)


def cells(text):
    """Read a Markdown table back: its rows of rendered text."""
    rows = []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "inline":
            rows[-1].append("".join(child.content for child in token.children))
    return rows


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=4))
def test_the_markdown_table_reads_back(record, run, names):
    rows = [build_row(run(record(0), task=task, model=model)) for task, model in names]
    read = cells(markdown_runs(rows))
    assert read[0] == TITLES
    assert len(read) == len(rows) + 1
    for line, (task, model) in zip(read[1:], names, strict=True):
        assert len(line) == len(TITLES)
        assert line[0] == visible(task).strip()
        assert line[3] == visible(model).strip()
        assert line[6] == "1"


def costs():
    return {
        "total_seconds": 1.75,
        "ttft_seconds": 0.25,
        "decode_seconds": 1.5,
        "output_tokens": (1,) * 16,
        "bytes_up": 3 * 2**20,
        "bytes_down": 2**19,
        "peak_device_bytes": 5 * 2**30,
    }


def test_a_wide_terminal_shows_one_line_a_run(record, run):
    runs = [run(record(0, **costs())), run(record(0, output="no"), task="niah_multikey_2")]
    lines = terminal_table(runs, width=400).splitlines()
    assert len(lines) == 4
    for title in TITLES:
        assert title in lines[0]
    for text in ("4096", "100.00", "20.7 to 100.0", "250.0 ms", "1.75 s", "10.0", "3.0 MiB"):
        assert text in lines[2]
    assert "5.00 GiB" in lines[2]
    assert lines[3].startswith("niah_multikey_2")


def test_a_narrow_terminal_shows_fields_as_lines(record, run):
    table = terminal_table([run(record(0, **costs()))], width=60)
    lines = dict(line.split("  ", 1) for line in table.splitlines())
    assert list(lines) == TITLES
    assert lines["task"].strip() == "niah_single_1"
    assert lines["time to first token"].strip() == "250.0 ms"


def test_reused_tokens_are_shown_where_there_are_any(record, run):
    runs = [run(record(0, reused_tokens=0)), run(record(0, reused_tokens=1024))]
    assert "reused" not in terminal_table(runs[:1], width=400)
    titles, _, first, second = terminal_table(runs, width=400).splitlines()
    assert titles.endswith("reused per sample")
    assert first.endswith("-")
    assert second.endswith("1024.0")


def test_hidden_copies_are_shown_where_requests_were_traced(record, run):
    traced = run(record(0, copy_hidden_share=0.5), record(1, copy_hidden_share=1.0), record(2))
    table = terminal_table([traced, run(record(0), task="niah_multikey_2")], width=400)
    titles, _, first, second = table.splitlines()
    assert titles.split("  ")[-1].strip() == "copies hidden"
    assert first.endswith("75.0%")
    assert second.endswith("-")


def test_figures_of_sparse_prefill_are_shown_where_there_are_any(record, run):
    sparse = {"density": 0.25, "dense_share": 0.0, "estimation_seconds": 0.5}
    runs = [
        run(record(0, **sparse, attention_seconds=1.5), record(1, density=0.75)),
        run(record(0), task="niah_multikey_2"),
    ]
    titles, _, first, second = terminal_table(runs, width=500).splitlines()
    shown = ["density", "went dense", "estimation per sample", "prefill attention per sample"]
    assert titles.split("  ")[-1].strip() == shown[-1]
    assert all(title in titles for title in shown)
    assert first.split()[-6:] == ["50.0%", "0.0%", "500.0", "ms", "1.50", "s"]
    assert second.split()[-4:] == ["-"] * 4
    assert not any(title in terminal_table(runs[1:], width=500) for title in shown)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(width=st.integers(50, 250), count=st.integers(1, 9))
def test_the_table_keeps_to_the_width_and_leaves_no_run_out(record, run, width, count):
    runs = [run(record(0), task=f"task_{number}") for number in range(count)]
    table = terminal_table(runs, width=width)
    assert max(map(len, table.splitlines())) <= width
    for number in range(count):
        assert table.count(f"task_{number}") == 1


@pytest.mark.parametrize("width", [1, 80])
def test_control_characters_never_reach_the_terminal(record, run, width):
    table = terminal_table([run(record(0), model="\x1b[31mred\r\n\x07")], width=width)
    assert "\\x1b[31mred\\r\\n\\x07" in table
    assert all(line.isprintable() for line in table.split("\n"))


def test_the_width_is_the_terminals_by_default(record, run, monkeypatch):
    runs = [run(record(0))]
    monkeypatch.setenv("COLUMNS", "400")
    assert terminal_table(runs) == terminal_table(runs, width=400)
    monkeypatch.setenv("COLUMNS", "70")
    assert terminal_table(runs) == terminal_table(runs, width=70)
