"""What a run looks like: its figures in words, charts, one HTML page."""

from hdet_lab.reports.views import report

__all__ = ["report"]
