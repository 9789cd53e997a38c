"""Language modelling on Shakespeare, word by word."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from hdet_lab.tasks.text import SHAKESPEARE_SHA256, TRAIN_SHARE, TextTask, read_shakespeare

NUM_WORDS = 8000
_WORD = re.compile(r"[a-z']+|\n|[^a-z'\s]")


def word_gpt(
    data: str | Path = "data",
    *,
    num_words: int = NUM_WORDS,
    sha256: str | None = SHAKESPEARE_SHA256,
    download: bool = True,
    **sizes: int,
) -> TextTask:
    """Word-level GPT on tinyshakespeare in lower case, 1.1M parameters, nearly all in the embedding and the head.

    Args:
        data: folder that holds, or receives, ``tinyshakespeare/input.txt``.
        num_words: how many of the words, marks and line ends are told apart; all others are one more, unknown.
        sha256: what the file must hash to; None skips the check.
        download: fetch the file from its origin where it is missing.
        **sizes: as in :class:`TextTask`; smaller where not given.
    """
    text = read_shakespeare(data, sha256=sha256, download=download).decode()
    tokens, vocabulary = words(text, num_words)
    small = {"context": 64, "num_layers": 2, "width": 64}
    return TextTask("word-gpt", tokens, vocabulary, **{**small, **sizes})


def words(text: str, num_words: int) -> tuple[Tensor, int]:
    """The words of ``text`` as numbers, the most common first, and how many numbers there are; 0 is unknown.

    What is common is counted on the training part alone.
    """
    found = _WORD.findall(text.lower())
    counts = Counter(found[: int(len(found) * TRAIN_SHARE)])
    common = sorted(counts, key=lambda word: (-counts[word], word))[:num_words]
    numbers = {word: number for number, word in enumerate(common, start=1)}
    return torch.tensor([numbers.get(word, 0) for word in found]), len(common) + 1
