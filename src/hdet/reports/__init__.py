"""What a run looks like: its figures in words, charts, one HTML page, a curve in a notebook."""
