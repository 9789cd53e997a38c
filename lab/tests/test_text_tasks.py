from __future__ import annotations

from pathlib import Path

import torch

from hdet_lab.models.lstm import LSTM
from hdet_lab.tasks import word_gpt
from hdet_lab.tasks.words import words
from small_tasks import SMALL, write_shakespeare


def test_words_are_counted_on_the_training_part() -> None:
    text = "The cat, the dog.\nThe cat " + "sat " * 10 + "zebra zebra"
    tokens, vocabulary = words(text, 4)
    #   sat 9 (one of the ten is beyond the training part), the 3, cat 2, then the first of those that occur once
    assert vocabulary == 5
    assert tokens[:9].tolist() == [2, 3, 0, 2, 0, 0, 4, 2, 3]
    assert tokens[9:].tolist() == [1] * 10 + [0, 0]


def test_word_gpt_has_room_for_its_words(tmp_path: Path) -> None:
    write_shakespeare(tmp_path)
    task = word_gpt(tmp_path, sha256=None, **SMALL)
    assert task.vocabulary == 1 + len({"to", "be", "or", "not", ",", "that", "is", "the", "question", "\n"})
    assert (task.text > 0).all()
    many = torch.arange(1000)
    assert type(task)("t", many, 1000, **SMALL).text.tolist() == many.tolist()


def test_lstm_is_the_one_of_torch() -> None:
    ours = LSTM(7, width=5, num_layers=2, generator=torch.Generator().manual_seed(0))
    theirs = torch.nn.LSTM(5, 5, num_layers=2, batch_first=True)
    state = dict(ours.named_parameters())
    with torch.no_grad():
        for index in range(2):
            getattr(theirs, f"weight_ih_l{index}").copy_(state[f"layers.{index}.inputs.weight"])
            getattr(theirs, f"weight_hh_l{index}").copy_(state[f"layers.{index}.recurrent.weight"])
            getattr(theirs, f"bias_ih_l{index}").copy_(state[f"layers.{index}.inputs.bias"])
            getattr(theirs, f"bias_hh_l{index}").zero_()
    tokens = torch.randint(7, (3, 6), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(tokens), ours.head(theirs(ours.tokens(tokens))[0]))
