"""Run folders whose names are tags, paths, markup or terminal codes: shown as text, and nothing else happens."""

from __future__ import annotations

import functools
import io
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from hdet.checks import printable
from hdet_lab import cli
from hdet_lab.commands.report import write_report
from hdet_lab.commands.watch import view
from hdet_lab.reports.drawing import Chart, _inline, draw
from hdet_lab.reports.page import Table, page
from hdet_lab.runs import folder as run_folder
from run_folders import entries, facts, write

pytestmark = pytest.mark.slow

TAGS = (
    *('"><script>alert(1)</script>', "<img src=x onerror=alert(1)>", "' onload='alert(1)", "</title><script>", "<!--"),
    *("</style><script>", "]]>", "{{ 7*7 }}", "{% include 'x' %}", 'x" id="loss', "&lt;b&gt;", "javascript:alert(1)"),
)
PATHS = ("../../x", "/tmp/hdet-hostile", "..", "a/b", "~", "C:\\x")
CONTROLS = (
    "\x1b[2J\x1b]0;title\x07",
    "\x9b31m",
    "a\nb\rc\0",
    "[bold]x[/nope]",
    "[link=x]",
    ":smile:",
    "\u202eabc",
    "\ud800",
)
MATH = ("\\", "$\\frac{", "a_{b}$x$", "\\1\\g<0>", "_hidden", "", " ", "漢字", "x" * 3000)
HOSTILE = (*TAGS, *PATHS, *CONTROLS, *MATH)
NUM_NAMES = 11


def hostile_run(folder: Path, names: Sequence[str]) -> Path:
    """A run folder with names of your choice wherever one stands."""
    config, lines = facts(), entries()
    config["config"] |= {"task": names[0], "method": names[1], "knobs": [names[2]], "schedule": names[3]}
    config |= {"groups": [names[4], names[5]], "hdet": names[6], names[7]: names[8]}
    config["hardware"] = {"cpu": names[6], names[9]: [names[7]]}
    for line in lines[:-1]:
        line["knobs"] = dict.fromkeys((names[2], names[10]), line["knobs"]["eps"])
        line["control"] |= {names[8]: [1.0]}
        line |= {"phase": names[0], "events": [names[1]]}
    lines[-1]["validation"] |= {names[9]: 0.25}
    lines[-1]["status"] = names[10]
    return write(folder, config, lines)


class Tags(HTMLParser):
    """Every tag of a page with the names of its attributes, and the texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.outside: Counter[str] = Counter()
        self.kinds: set[tuple[str, tuple[str, ...]]] = set()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.depth = 0
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.depth += tag == "svg"
        if not self.depth:
            self.outside[tag] += 1
        self.kinds.add((tag, tuple(sorted(name for name, _ in attrs))))
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag == "svg"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data!r}")


def report_of(folder: Path, names: Sequence[str]) -> tuple[Tags, str]:
    """Parsed; and no file is written but the page and its charts, where they belong."""
    run = hostile_run(folder / "run", names)
    page = write_report([run], folder / "deep" / "down" / "out")
    assert page == folder / "deep" / "down" / "out" / "report.html"
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    charts = {f"deep/down/out/{name}.png" for name in ("loss", "lr", "knob-1", "knob-2", "evidence", "distance")}
    own = {"run/config.json", "run/metrics.jsonl", "deep/down/out/report.html"}
    assert own <= written <= own | charts
    html = page.read_text(encoding="utf-8")
    return Tags(html), html


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> Tags:
    """Harmless to a page, but for its charts there are names of files elsewhere."""
    folder = tmp_path_factory.mktemp("harmless")
    names = [f"name{k}" for k in range(NUM_NAMES)]
    names[2], names[10] = "../../x", str(folder / "absolute")
    return report_of(folder, names)[0]


NAMES = st.lists(
    st.one_of(st.sampled_from(HOSTILE), st.text(max_size=30)), min_size=NUM_NAMES, max_size=NUM_NAMES, unique=True
)


@pytest.mark.parametrize("first", [0, 11, len(HOSTILE) - NUM_NAMES])
def test_whatever_the_names_are_the_report_has_the_same_tags(first: int, harmless: Tags, tmp_path: Path) -> None:
    names = HOSTILE[first : first + NUM_NAMES]
    found, html = report_of(tmp_path, names)
    check_tags(found, harmless)
    assert "Content-Security-Policy" in html
    for shown in names[:2]:
        assert printable(shown).strip() in " ".join(found.texts)


def small_page(names: Sequence[str]) -> Tags:
    """As of a report, but for the drawing, which takes seconds."""
    chart = Chart("loss", names[0], names[1], _inline(empty_chart(), "again", names[2]), b"")
    table = Table(names[3], [names[4], names[5]], [[names[6], names[7]]])
    told = {"headline": names[1], "about": [names[2]], "notes": [names[3]], "events": [(names[4], names[5])]}
    return Tags(page(names[8], [table], [chart], [Table(names[9], [names[10]], [[names[0]]])], **told))  # type: ignore[arg-type]


@functools.cache
def empty_chart() -> str:
    return draw("loss", "loss", "", lambda axes: None).svg


@functools.cache
def harmless_page() -> Tags:
    return small_page([f"name{k}" for k in range(NUM_NAMES)])


@settings(max_examples=50)
@given(names=NAMES)
def test_whatever_the_names_are_the_page_has_the_same_tags(names: list[str]) -> None:
    found, expected = small_page(names), harmless_page()
    check_tags(found, expected)
    assert found.outside == expected.outside


def check_tags(found: Tags, expected: Tags) -> None:
    assert "script" not in found.outside
    assert found.kinds <= expected.kinds  # an attribute that was injected would make a new kind
    assert not [name for _, attributes in found.kinds for name in attributes if name.startswith("on")]
    varying = {"th", "td", "tr"}  # there is a row for each different name
    assert {t: n for t, n in found.outside.items() if t not in varying} == {
        t: n for t, n in expected.outside.items() if t not in varying
    }
    assert len(found.ids) == len(set(found.ids))
    assert all(re.fullmatch(r"[\w.-]+", name) for name in found.ids)
    assert [link for link in found.links if not link.startswith("#")] == ["data:,"]


def test_a_knob_cannot_choose_where_its_chart_is_written(harmless: Tags) -> None:
    assert {"knob-1", "knob-2"} <= set(harmless.ids)  # report_of has looked for files elsewhere
    assert "../../x" in harmless.texts


# -- the terminal -----------------------------------------------------------------------------------------------


@given(names=NAMES)
@settings(max_examples=40)
@example(names=list(HOSTILE[:11]))
@example(names=list(HOSTILE[18:29]))
def test_watch_shows_names_and_obeys_none(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        record = run_folder.read(hostile_run(Path(folder) / "run", names))
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system=None, width=20_000).print(view(record))
    text = out.getvalue()
    assert all(character.isprintable() or character == "\n" for character in text)
    for name in (*names[:2], names[4], names[5], names[10]):
        assert printable(name) in text


def test_errors_show_no_terminal_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run", facts(), [])
    (run / "metrics.jsonl").write_text("\x1b[2J\u202e\n")
    for command in (["report", str(run)], ["watch", str(run), "--once"], ["watch", f"{tmp_path}/\x1b[2J\n"]):
        assert cli.main(command) == 2
        err = capsys.readouterr().err
        assert "\\x1b[2J" in err
        assert err.count("\n") == 1
        assert err.strip("\n").isprintable()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("plain [b] ü 漢", "plain [b] ü 漢"), ("\x1b[1m\n", "\\x1b[1m\\n"), ("\ud800\u202e", "\\ud800\\u202e")],
)
def test_printable(text: Any, expected: str) -> None:
    assert printable(text) == expected
