"""The page of a report: one HTML file that needs nothing else, for light, dark, print and phone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from hdet.lab.charts import PALETTE, Chart

# The same hues, lighter where the background is dark.
DARK_PALETTE = ("#4fa8e0", "#ff8a3d", "#2fc79c", "#e29bc4", "#f2b632", "#a5dcff")


@dataclass
class Table:
    """A title, a row of heads, and rows."""

    title: str
    heads: list[str]
    rows: list[list[str]] = field(default_factory=list)


def page(title: str, tables: Sequence[Table], charts: Sequence[Chart], details: Sequence[Table]) -> str:
    """The whole document; ``details`` are folded away."""
    figures = "\n".join(
        f'<figure id="{chart.name}"><h2>{escape(chart.title)}</h2>{chart.svg}'
        f"<figcaption>{escape(chart.caption)}</figcaption></figure>"
        for chart in charts
    )
    folded = "\n".join(
        f"<details><summary>{escape(table.title)}</summary>{_table(table)}</details>" for table in details
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{_style()}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{"".join(f"<section><h2>{escape(table.title)}</h2>{_table(table)}</section>" for table in tables)}
<div class="charts">
{figures}
</div>
<section class="facts">
<h2>How they were made</h2>
{folded}
</section>
</main>
</body>
</html>
"""


def _table(table: Table) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in table.heads)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _style() -> str:
    light = "".join(f"--c{index}:{colour};" for index, colour in enumerate(PALETTE))
    dark = "".join(f"--c{index}:{colour};" for index, colour in enumerate(DARK_PALETTE))
    return f"""
:root {{ {light} --ink:#1a1a1b; --paper:#fff; --grid:#d9dbdd; --soft:#5b6067; --line:#e3e5e8; }}
@media screen and (prefers-color-scheme: dark) {{
  :root {{ {dark} --ink:#e8e8ea; --paper:#16181b; --grid:#34383d; --soft:#a3a9b1; --line:#2b2f34; }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }}
main {{ max-width: 1080px; margin: 0 auto; padding: 20px 16px 48px; }}
h1 {{ font-size: 22px; margin: 0 0 16px; overflow-wrap: anywhere; }}
h2 {{ font-size: 15px; margin: 20px 0 8px; overflow-wrap: anywhere; }}
.charts {{ display: grid; gap: 8px 32px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }}
figure {{ margin: 0; min-width: 0; break-inside: avoid; }}
figcaption {{ color: var(--soft); font-size: 13px; }}
svg {{ display: block; width: 100%; height: auto; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }}
th {{ color: var(--soft); font-weight: 500; }}
th:first-child, td:first-child {{ text-align: left; }}
.facts td {{ text-align: left; overflow-wrap: anywhere; }}
.facts th {{ text-align: left; }}
.facts td:first-child {{ white-space: nowrap; overflow-wrap: normal; }}
summary {{ cursor: pointer; overflow-wrap: anywhere; padding: 2px 0; }}
@media (max-width: 480px) {{ table {{ font-size: 12.5px; }} th, td {{ padding-right: 7px; }} }}
@media print {{ main {{ max-width: none; }} body {{ font-size: 11px; }} .wide {{ overflow: visible; }} }}
"""
