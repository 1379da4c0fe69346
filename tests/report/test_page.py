"""The page: what it says, that it escapes what models put out, that a browser runs none of it."""

import html
import re
import shutil
import string
import subprocess
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ruler_bench.report import page as pages
from ruler_bench.report import write_page
from ruler_bench.report.strips import LISTED_CARDS
from ruler_bench.report.text import visible

SCRIPTS = (
    "<script>document.title='ran'</script>",
    "<img src=x onerror=\"document.title='ran'\">",
    "</code></pre></style><svg/onload=document.title='ran'>",
    '"><input autofocus onfocus="document.title=\'ran\'">',
    "<a href=\"javascript:document.title='ran'\">x</a>",
    "'-->]]></title><iframe srcdoc='<script>parent.document.title=\"ran\"</script>'></iframe>",
    "{{ 7 * 7 }}{% raw %}",
)
VOID = {"meta", "line", "circle"}


class Reader(HTMLParser):
    """Reads a page: its elements, its attributes, its text, and whether all is closed in order."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text, self.open = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def page(folder, *runs, **more):
    prompts = more.pop("prompts", ())
    write_page(folder, list(runs), pages.Page("", **more), prompts)
    return (folder / pages.PAGE).read_bytes().decode("utf-8")


def read(text):
    reader = Reader(text)
    assert reader.open == []
    return reader


def test_a_page_says_what_the_run_was(record, run, tmp_path):
    records = [
        record(0, total_seconds=0.5, ttft_seconds=0.25, density=0.5),
        record(1, output="7654321", depth=0.99, predecessor=0),
        record(2, error="CUDA error: 17"),
    ]
    text = page(tmp_path, run(*records), prompts=[("0" * 64, "x" * 5000 + "What is it?")])
    words = " ".join(" ".join(read(text).text).split())
    for said in (
        "1 of 2 answers right, score 50.00 (95% interval 9.5 to 90.5); 1 failed in the engine.",
        "niah_single_1, 4096 tokens, offload, probe",
        "500.0 ms (95%: 500.0 ms)",
        "time to first token",
        "density",
        "CUDA error",
        "unknown value",
        "xxxWhat is it?",
        "config.backend.num_gpu_blocks = 4",
    ):
        assert said in words
    assert "expected: 1234567" in html.unescape(text)
    assert "got: 7654321" in html.unescape(text)
    assert "predecessor: 0, position 1" in html.unescape(text)


def test_a_page_needs_no_network_and_has_no_script(record, run, tmp_path):
    reader = read(page(tmp_path, run(record(0, output="no"))))
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(reader.tags)
    addresses = [value for name, value in reader.attributes if name in ("href", "src")]
    assert addresses
    assert all(one.startswith("#") for one in addresses)
    policy = dict(reader.attributes)["http-equiv"], dict(reader.attributes)["content"]
    assert policy[0] == "Content-Security-Policy"
    text = (tmp_path / pages.PAGE).read_text()
    assert "default-src 'none'" in text
    assert "script-src" not in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert not re.search(r"url\(|@import|https?:", text)


NASTY = st.text(
    alphabet=st.one_of(
        st.characters(),
        st.characters(categories=["Cs"]),
        st.sampled_from("<>&\"'`=/\\\n\x00{}%-!"),
    ),
    max_size=60,
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40
)
@given(output=NASTY, error=NASTY, model=NASTY, setting=NASTY, prompt=NASTY)
def test_a_page_is_well_formed_whatever_it_holds(
    record, run, tmp_path, *, output, error, model, setting, prompt
):
    made = run(
        record(0, output=output, expected=("\x00never",)),
        record(1, error=error),
        record(2, output=output, expected=("\x00never",), arm="fresh<"),
        model=model,
        config={"path": setting},
    )
    verdict = {"sentence": output, "status": 3, "verdict": "leak", "indices": [], "notes": [error]}
    plain = read(page(tmp_path, run(record(0), record(1, error="x"), record(2, output="no"))))
    reader = read(page(tmp_path, made, verdict=verdict, prompts=[("0" * 64, prompt)]))
    assert set(reader.tags) - {"ul", "li", "details", "summary"} <= set(plain.tags)
    assert {name for name, _ in reader.attributes} <= {name for name, _ in plain.attributes}
    text = "".join(reader.text)
    assert visible(output) in text
    assert f"config.path = {visible(setting)}" in text


@pytest.mark.parametrize("output", [*SCRIPTS, string.punctuation])
def test_markup_is_shown_and_not_obeyed(record, run, tmp_path, output):
    text = page(tmp_path, run(record(0, output=output)))
    assert f"<code>{html.escape(visible(output))}" in text.replace("&#39;", "&#x27;").replace(
        "&#34;", "&quot;"
    )


def test_the_verdict_stands_above_all(record, run, tmp_path):
    verdict = {
        "sentence": "niah_single_1: LEAK.",
        "verdict": "leak",
        "status": 3,
        "indices": [
            {
                "ordinal": 1, "verdict": "leak", "reason": "it changes", "position": 1,
                "predecessor": 0, "first_difference": None,
            }
        ],
        "tests": [{"name": "t", "finding": "f", "p_value": 0.01}],
        "support": [{"verdict": "leak", "is_possible": True, "how": "fresh engines"}],
        "notes": ["a note"],
    }  # fmt: skip
    text = page(tmp_path, run(record(0), record(1, output="no")), verdict=verdict)
    assert text.index('class="verdict bad">niah_single_1: LEAK.') < text.index("<h2>")
    assert 'href="#i0-1"' in text
    assert 'id="i0-1"' in text


def test_further_tables_stand_on_the_page(record, run, tmp_path):
    section = pages.Section("Diagnosis", "Supported: <none>.", ("row", "why"), [("a", "<b>")])
    text = page(tmp_path, run(record(0)), sections=[section])
    words = " ".join(" ".join(read(text).text).split())
    assert "Diagnosis Supported: <none>. row why a <b>" in words


def test_failures_come_first_and_the_page_stays_small(record, run, tmp_path):
    wrong = [record(i, output="9" * 10**4) for i in range(400, 800)]
    text = page(tmp_path, run(*[record(i) for i in range(400)], *wrong))
    assert len(text) < 2_000_000
    keys = re.findall(r'<article id="i0-(\d+)"', text)
    assert keys == [str(i) for i in range(400, 400 + LISTED_CARDS)]
    assert "100 more indices with failures are in records.jsonl" in text
    # Each square that is a link leads to a card.
    assert set(re.findall(r'href="#i0-(\d+)"', text)) == set(keys)


def test_several_runs_share_a_page(record, run, tmp_path):
    runs = [run(record(0, output="no" * (n % 2)), seed=n, config={"seed": n}) for n in range(12)]
    text = page(tmp_path, *runs)
    assert "<h1>12 runs: niah_single_1, 4096 tokens</h1>" in text
    assert "seed=11" in text
    # Of many runs only what failed has a card.
    assert len(re.findall("<article id=", text)) == 12


def test_an_empty_run_has_a_page(run, tmp_path):
    assert "No sample has been run." in page(tmp_path, run())


def test_a_browser_runs_nothing_of_an_output(record, run, tmp_path):
    """The escaping holds without the page's policy, and the policy without the escaping."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no chromium is installed")
    records = [record(i, output=one, expected=(one, "never")) for i, one in enumerate(SCRIPTS)]
    records += [record(9, error=SCRIPTS[0])]
    manifest = {"model": SCRIPTS[2], "config": {"a": SCRIPTS[0], SCRIPTS[1]: "b"}}
    text = page(tmp_path, run(*records, **manifest), prompts=[("0" * 64, SCRIPTS[2])])
    policy = re.search(r"<meta http-equiv=[^>]*>", text)[0]
    variants = {
        "escaped": text.replace(policy, ""),
        "forbidden": text.replace("</h1>", f"</h1>{SCRIPTS[0]}{SCRIPTS[1]}"),
        # What does run shows that the test would see it.
        "control": text.replace(policy, "").replace("</h1>", f"</h1>{SCRIPTS[0]}"),
    }
    titles = {}
    for name, variant in variants.items():
        (tmp_path / f"{name}.html").write_text(variant)
        titles[name] = _title(browser, tmp_path / f"{name}.html", tmp_path)
    assert titles["control"] == "ran"
    assert titles["escaped"] == titles["forbidden"]
    assert titles["escaped"].startswith("RULER: ")


def _title(browser, path, home):
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=500",
         f"--user-data-dir={home / 'profile'}", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    found = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert found, done.stderr[-500:]
    return found[1]
