"""The lab: the ``hdet`` program, tasks, the stacked engine, the benchmark and reports. hdet never imports it."""

__version__ = "0.1.0"
