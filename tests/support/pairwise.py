"""Combinations of options of which every pair occurs at least once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(options: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows with a value for each option, such that any two values of two options stand in a row together.

    There are about as many as the product of the two longest options, not of all of them. Greedy, and the same in
    every run: a row begins with a pair that is missing, and takes for each option the value with most of those.
    """
    names = list(options)
    missing = {
        frozenset([(a, i), (b, k)])
        for a, b in combinations(names, 2)
        for i, k in product(range(len(options[a])), range(len(options[b])))
    }
    rows = []
    while missing:
        row = dict(min(sorted(pair) for pair in missing))
        for name in sorted(names, key=lambda name: (name not in row, -len(options[name]))):
            if name not in row:
                row[name] = max(
                    range(len(options[name])),
                    key=lambda i: (sum(frozenset([(name, i), item]) in missing for item in row.items()), -i),
                )
        missing -= {frozenset(pair) for pair in combinations(row.items(), 2)}
        rows.append({name: options[name][row[name]] for name in names})
    return rows
