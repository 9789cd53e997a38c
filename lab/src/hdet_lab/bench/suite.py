"""What the benchmark consists of: tasks in three parts, methods, and the order in which they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Half = Literal["A", "B", "C", "D", "E", "F", "G", "H", "I", "J", "extra"]
AROUND_TORCH = ("C", "D", "E", "F", "G", "H", "I", "J")
"""Halves around ``torch.optim.AdamW`` at its defaults."""
SHAPES = ("one-cycle", "cosine", "wsd")
START = 1e-3
"""Learning rate that AutoLR is given, which does not matter to it."""
SWEEP_SIZES = (2, 4, 8, 16)
"""Runs of a random search."""
MAX_PASSES = 10
"""Passes over the training rows, beyond which a model with more parameters than rows counts as memorising them."""


def half_decade(index: int) -> float:
    """1, 3, 10, 30, ... by index; 0 is 1, negative ones are below."""
    return float(f"{3 if index % 2 else 1}e{index // 2}")


GRIDS = {
    "adam": range(-8, -2),
    "adamw": range(-8, -2),
    "torch-adamw": range(-8, -2),
    "nadamw": range(-8, -2),
    "muon": range(-8, -2),
    "lion": range(-10, -4),
    "sgd": range(-4, 2),
    "schedule-free": range(-6, -2),
}
"""Indices of half-decades that a grid begins with; it grows where the best is at an edge."""


@dataclass(frozen=True)
class Entry:
    """One line of the results.

    Attributes:
        name: of the entry.
        half: ``A``, on which defaults may be chosen; ``B``, only reported; ``C`` to ``J``: each run once with
            code that had never been tried on it; ``extra``: none of them. On stdlib-gpt AutoLR's settings were looked
            at before there were halves.
        steps: of a run.
        task: what is trained; default the name.
        optimizer: what the grid and AutoLR tune.
        stacked: runs trained at once, as memory allows.
        overfits: why it counts as a task that a model memorises, empty where it does not. The rule: more than
            :data:`MAX_PASSES` passes over the training rows, and more parameters than rows.
    """

    name: str
    half: Half
    steps: int = 500
    task: str = ""
    optimizer: str = "adam"
    stacked: int = 27
    overfits: str = ""

    @property
    def task_name(self) -> str:
        return self.task or self.name


ENTRIES = (
    Entry("shakespeare-gpt", "A"),
    Entry("feed", "A", steps=335),
    Entry("fashion", "A"),
    Entry("word-gpt", "A"),
    Entry("lstm", "A"),
    Entry("fashion-batch-1024", "B", steps=200, stacked=9),  # the dearest first, or it would end last
    Entry("code-gpt", "B"),
    Entry("finetune-gpt", "B"),
    Entry("finetune-lora", "B"),
    Entry("tabular", "B", overfits="1,438 rows, 22 passes, 85,002 parameters"),
    Entry("tabular-regression", "B", overfits="354 rows, 45 passes, 4,929 parameters"),
    Entry("tabular-regression-raw", "B", overfits="354 rows, 45 passes, 4,929 parameters"),
    Entry("fashion-vit", "B"),
    Entry("fashion-batch-8", "B"),
    Entry("fashion-diffusion", "B"),
    Entry("fashion-wide", "B"),
    Entry("linear-raw", "B"),
    Entry("finetune-gpt-10m", "B", steps=300, stacked=9),
    Entry("finetune-lora-10m", "B", steps=300, stacked=9),
    Entry("stdlib-gpt", "extra"),
    Entry("stdlib-gpt-sgd", "extra", task="stdlib-gpt", optimizer="sgd"),
    Entry("stdlib-gpt-lion", "extra", task="stdlib-gpt", optimizer="lion"),
    Entry("stdlib-gpt-muon", "extra", task="stdlib-gpt", optimizer="muon"),
    # As language models are trained: AdamW with betas of 0.9 and 0.95 and a decay of 0.1.
    Entry("shakespeare-gpt-decay", "extra", task="shakespeare-gpt", optimizer="adamw"),
    Entry("word-gpt-decay", "extra", task="word-gpt", optimizer="adamw"),
    Entry("code-gpt-decay", "extra", task="code-gpt", optimizer="adamw"),
    Entry("stdlib-gpt-decay", "extra", task="stdlib-gpt", optimizer="adamw"),
    Entry("wikitext-gpt-decay", "extra", steps=600, task="wikitext-gpt", optimizer="adamw"),
    Entry("quadratic", "extra", steps=200),
    Entry("cifar10", "C", optimizer="torch-adamw", stacked=18),
    Entry("wikitext-gpt", "C", steps=600, optimizer="torch-adamw"),
    Entry("diamonds-raw", "C", steps=5000, optimizer="torch-adamw", stacked=90),
    Entry("speech", "C", steps=800, optimizer="torch-adamw"),
    Entry("molecules", "C", optimizer="torch-adamw"),
    Entry("burgers", "C", steps=600, optimizer="torch-adamw"),
    Entry("movielens", "C", steps=1000, optimizer="torch-adamw"),
    Entry("weather", "C", steps=800, optimizer="torch-adamw"),
    Entry("flights", "C", steps=400, optimizer="torch-adamw"),
    Entry("cifar10-sgd", "C", task="cifar10", optimizer="sgd", stacked=18),
    Entry("movielens-sgd", "C", steps=1000, task="movielens", optimizer="sgd"),
    Entry("masked", "D", steps=600, optimizer="torch-adamw", stacked=18),
    Entry("adding", "D", steps=1000, optimizer="torch-adamw", stacked=54),
    Entry("mixer", "D", optimizer="torch-adamw"),
    Entry("sorting", "D", steps=800, optimizer="torch-adamw"),
    Entry("contrast", "D", optimizer="torch-adamw"),
    Entry("autoencoder", "D", steps=600, optimizer="torch-adamw"),
    Entry("picture", "D", steps=800, optimizer="torch-adamw", overfits="20,480 rows, 40 passes, 50,049 parameters"),
    Entry("parity", "D", steps=1500, optimizer="torch-adamw", stacked=54),
    Entry("density", "D", steps=1500, optimizer="torch-adamw", stacked=54),
    Entry("spirals", "D", steps=1000, optimizer="torch-adamw", stacked=54),
    Entry("teacher", "D", steps=1000, optimizer="torch-adamw", stacked=54),
    Entry("deep", "D", optimizer="torch-adamw"),
    Entry("neighbours", "D", steps=1000, optimizer="torch-adamw"),
    Entry("masks", "D", steps=400, optimizer="torch-adamw"),
    Entry("mixer-sgd", "D", task="mixer", optimizer="sgd"),
    Entry("teacher-sgd", "D", steps=1000, task="teacher", optimizer="sgd", stacked=54),
    Entry("masks-lion", "D", steps=400, task="masks", optimizer="lion"),
    Entry("bible-gpt", "E", steps=800, optimizer="torch-adamw", stacked=18),
    Entry("bible-rnn", "E", steps=600, optimizer="torch-adamw"),
    Entry("phonemes", "E", steps=800, optimizer="torch-adamw"),
    Entry("cities", "E", steps=1000, optimizer="torch-adamw"),
    Entry("countries", "E", steps=1000, optimizer="torch-adamw"),
    Entry("denoise", "E", steps=600, optimizer="torch-adamw"),
    Entry("upscale", "E", optimizer="torch-adamw"),
    Entry("convnext", "E", steps=600, optimizer="torch-adamw", stacked=18),
    Entry("tokens", "E", steps=800, optimizer="torch-adamw"),
    Entry("experts", "E", steps=600, optimizer="torch-adamw", stacked=18),
    Entry("ranking", "E", steps=800, optimizer="torch-adamw"),
    Entry("boxes", "E", steps=700, optimizer="torch-adamw"),
    Entry("pendulum", "E", steps=800, optimizer="torch-adamw", stacked=54),
    Entry("clouds", "E", steps=1000, optimizer="torch-adamw"),
    Entry("cities-sgd", "E", steps=1000, task="cities", optimizer="sgd"),
    Entry("upscale-lion", "E", task="upscale", optimizer="lion"),
    Entry("phonemes-muon", "E", steps=800, task="phonemes", optimizer="muon"),
    Entry("tunes-gpt", "F", steps=600, optimizer="torch-adamw", stacked=18),
    Entry("javascript-decay", "F", task="javascript", optimizer="adamw", stacked=18),
    Entry("accents", "F", optimizer="torch-adamw"),
    Entry("glosses", "F", steps=1000, optimizer="torch-adamw"),
    Entry("siamese-sgd", "F", steps=600, task="siamese", optimizer="sgd"),
    Entry("flow", "F", steps=700, optimizer="torch-adamw", stacked=18),
    Entry("pixels", "F", steps=800, optimizer="torch-adamw"),
    Entry("strokes", "F", steps=1000, optimizer="torch-adamw"),
    Entry("baseball", "F", steps=2000, optimizer="torch-adamw", stacked=54),
    Entry("codebook", "F", steps=600, optimizer="torch-adamw"),
    Entry("physics", "F", steps=1500, optimizer="torch-adamw", stacked=54),
    Entry("control", "F", steps=400, optimizer="torch-adamw", stacked=54),
    Entry("codebook-sgd", "F", steps=600, task="codebook", optimizer="sgd"),
    Entry("accents-lion", "F", task="accents", optimizer="lion"),
    Entry("flow-muon", "F", steps=700, task="flow", optimizer="muon", stacked=18),
    Entry("languages", "G", steps=800, optimizer="torch-adamw"),
    Entry("lemmas", "G", optimizer="torch-adamw"),
    Entry("manual", "G", steps=800, optimizer="torch-adamw"),
    Entry("hotels", "G", steps=1500, optimizer="torch-adamw", stacked=54),
    Entry("survival", "G", optimizer="torch-adamw", stacked=54),
    Entry("demand", "G", optimizer="torch-adamw"),
    Entry("senses", "G", steps=600, optimizer="torch-adamw"),
    Entry("vortices", "G", steps=600, optimizer="torch-adamw"),
    Entry("mazes", "G", steps=600, optimizer="torch-adamw"),
    Entry("body", "G", steps=400, optimizer="torch-adamw", stacked=54),
    Entry("patches", "G", steps=600, optimizer="torch-adamw"),
    Entry("mazes-sgd", "G", steps=600, task="mazes", optimizer="sgd"),
    Entry("lemmas-lion", "G", task="lemmas", optimizer="lion"),
    Entry("demand-muon", "G", task="demand", optimizer="muon"),
    Entry("hyphens", "H", steps=800, optimizer="torch-adamw"),
    Entry("unicode", "H", steps=600, optimizer="torch-adamw", stacked=18),
    Entry("icons", "H", steps=700, optimizer="torch-adamw"),
    Entry("coasts", "H", steps=400, optimizer="torch-adamw", stacked=54),
    Entry("films", "H", steps=2500, optimizer="torch-adamw", stacked=54),
    Entry("tomography", "H", optimizer="torch-adamw"),
    Entry("carries", "H", steps=1500, optimizer="torch-adamw", stacked=54),
    Entry("drawing", "H", steps=600, optimizer="torch-adamw"),
    Entry("context", "H", steps=1200, optimizer="torch-adamw"),
    Entry("bars", "H", steps=1000, optimizer="torch-adamw", stacked=54),
    Entry("hyphens-sgd", "H", steps=800, task="hyphens", optimizer="sgd"),
    Entry("icons-lion", "H", steps=700, task="icons", optimizer="lion"),
    Entry("context-muon", "H", steps=1200, task="context", optimizer="muon"),
    Entry("quotes", "I", steps=800, optimizer="torch-adamw"),
    Entry("colours", "I", steps=1000, optimizer="torch-adamw"),
    Entry("glyphs", "I", steps=600, optimizer="torch-adamw"),
    Entry("visits", "I", steps=400, optimizer="torch-adamw", stacked=54),
    Entry("spellings", "I", steps=800, optimizer="torch-adamw"),
    Entry("melting", "I", steps=2000, optimizer="torch-adamw", stacked=54),
    Entry("voices", "I", optimizer="torch-adamw"),
    Entry("charges", "I", steps=3000, optimizer="torch-adamw", stacked=54),
    Entry("clusters", "I", steps=1000, optimizer="torch-adamw"),
    Entry("voices-sgd", "I", task="voices", optimizer="sgd"),
    Entry("spellings-lion", "I", steps=800, task="spellings", optimizer="lion"),
    Entry("webster", "J", optimizer="torch-adamw", stacked=9),
    Entry("readings", "J", steps=700, optimizer="torch-adamw"),
    Entry("banners", "J", steps=600, optimizer="torch-adamw"),
    Entry("births", "J", steps=400, optimizer="torch-adamw", stacked=54),
    Entry("lectures", "J", steps=450, optimizer="torch-adamw", stacked=54),
    Entry("glucose", "J", steps=1000, optimizer="torch-adamw", stacked=54),
    Entry("stars", "J", steps=1000, optimizer="torch-adamw"),
    Entry("heights", "J", steps=2000, optimizer="torch-adamw", stacked=54),
    Entry("wages", "J", steps=600, optimizer="torch-adamw"),
    Entry("codes", "J", steps=5000, optimizer="torch-adamw", stacked=90),
    Entry("banners-sgd", "J", steps=600, task="banners", optimizer="sgd"),
    Entry("stars-lion", "J", steps=1000, task="stars", optimizer="lion"),
    Entry("readings-muon", "J", steps=700, task="readings", optimizer="muon"),
)
BY_NAME = {entry.name: entry for entry in ENTRIES}
DEFAULT_ENTRIES = tuple(entry.name for entry in ENTRIES if entry.name != "quadratic")


def own_entry(target: str) -> Entry:
    """A task of the user's own, ``package.module:Class``."""
    return Entry(target.replace(":", "-"), "extra", task=target)


OWN_METHODS = ("grid", "autolr", "adamw", "nadamw", "prodigy", "mechanic", "schedule-free")
"""What is run on a task of the user's own."""
MethodName = Literal[
    "grid", "autolr", "adamw-grid", "adamw", "prodigy", "schedule-free", "d-adaptation",
    "finder", "halving", "nadamw-grid", "nadamw", "mechanic", "dog", "greedy", "plateau", "adalrs",
    "schedule-free-plus", "muon", "step-law", "autolr-adamw", "autolr-muon",
]  # fmt: skip
CALIBRATIONS: dict[str, str] = {"adamw": "adamw-grid", "nadamw": "nadamw-grid"}
"""Methods at one default for all tasks, and the grid on half A that it is chosen from."""
CHOSEN: dict[str, tuple[str, float]] = {"adamw": ("one-cycle", 1e-2), "nadamw": ("wsd", 3e-3)}
"""What was chosen in the records that are published: schedule and learning rate, for a task of the user's own."""
ADAM_DEFAULT = ("wsd", 3e-3)
"""Of the fixed learning rates of Adam that every task of half A has: the best on the mean over it, five seeds."""
NOTHING_SET = (
    "autolr", "adam", "adamw", "nadamw", "prodigy", "d-adaptation", "mechanic", "dog", "schedule-free",
    "finder", "halving", "greedy", "plateau", "adalrs", "schedule-free-plus", "muon", "step-law",
)  # fmt: skip
"""One run's compute, and nothing for the user to choose."""
OF_ANY_OPTIMIZER = ("grid", "autolr")
PLAIN_LOOPS = ("greedy", "plateau", "adalrs", "schedule-free-plus")
"""Rivals that act on the loss of each step."""
ONLY_ON_C = (*PLAIN_LOOPS, "muon", "step-law", "autolr-adamw", "autolr-muon")
LANGUAGE_MODELS = ("wikitext-gpt", "quotes", "webster")
"""Entries on which Step Law says something."""
# What a run that is cut short should have done first: half B with what decides the target, then half A, then the rest.
_RANKS: dict[str, int] = {
    "adamw-grid": 0, "grid": 1, "autolr": 1, "adamw": 1, "prodigy": 1, "schedule-free": 1,
    "d-adaptation": 3, "finder": 3, "halving": 3, "nadamw-grid": 3, "nadamw": 4, "mechanic": 4, "dog": 4,
    "greedy": 4, "plateau": 4, "adalrs": 4, "schedule-free-plus": 4, "muon": 4, "step-law": 4,
    "autolr-adamw": 4, "autolr-muon": 4,
}  # fmt: skip
METHODS = tuple(_RANKS)


@dataclass(frozen=True)
class Job:
    """All runs of one method on one entry."""

    entry: Entry
    method: str

    @property
    def name(self) -> str:
        return f"{self.entry.name}/{self.method}"

    @property
    def rank(self) -> int:
        """Jobs with a lower one go first."""
        later = 6 if self.entry.half == "extra" else 1 if self.entry.half == "A" and _RANKS[self.method] == 1 else 0
        return _RANKS[self.method] + later


def jobs(entries: Sequence[Entry], methods: Sequence[str]) -> list[Job]:
    """In the order in which they are to run."""
    return sorted(_jobs(entries, methods), key=lambda job: job.rank)


def _jobs(entries: Sequence[Entry], methods: Sequence[str]) -> Iterator[Job]:
    for entry in entries:
        yield from (Job(entry, method) for method in methods if _takes(entry, method))


def _takes(entry: Entry, method: str) -> bool:
    if method in OF_ANY_OPTIMIZER:
        return True
    if entry.half in AROUND_TORCH:
        fits = entry.optimizer == "torch-adamw" and method not in CALIBRATIONS.values()
        return fits and (method != "step-law" or entry.name in LANGUAGE_MODELS)
    calibrates = method in CALIBRATIONS.values()
    return entry.optimizer == "adam" and method not in ONLY_ON_C and (entry.half == "A" or not calibrates)
