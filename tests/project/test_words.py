"""Phrases that readers stumbled over stay out of the sources, the documentation and the names of tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What to write instead: restart, repair, unhealthy, disagree, silently, assign; a sentence that says what happens.
PHRASES = (
    r"\banew\b",
    r"\bmend(s|ed|ing)?\b",
    r"\bsick\b",
    r"\bquarrel",
    r"without a word",
    r"to its word",
    r"none of the model\b",
    r"nothing of it\b",
    r"as if nothing had been\b",
    r"this is said once",
    r"is no setting of",
    r"is there with --",
    r"or name a place",
    r"(^|[.:] )Where there (is|are) none,",
    r"(values|multipliers|spread|knobs) (is|are) dealt",
)
STUMBLES = re.compile("|".join(PHRASES), re.IGNORECASE)


def _found(path: Path, text: str) -> list[str]:
    lines = enumerate(text.splitlines(), start=1)
    return [f"{path.relative_to(ROOT)}:{n}: {line.strip()}" for n, line in lines if STUMBLES.search(line)]


def test_sources_and_documentation_are_plain() -> None:
    prose = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    found = [
        line for path in (*prose, *sorted((ROOT / "src").rglob("*.py"))) for line in _found(path, path.read_text())
    ]
    assert found == []


def test_names_of_tests_are_plain() -> None:
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        names = re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
        found += _found(path, "\n".join(name.replace("_", " ") for name in names))
    assert found == []


def test_a_converge_is_defined_once() -> None:
    definition = "averaging the replicas' weights at the end of a round; a converge is one such averaging"
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    rows = [path.name for path in pages if f"| **converge** | {definition} |" in path.read_text()]
    assert rows == ["concepts.md"]
