"""Reads KuaiRand-Pure into tensors, so that a batch is an index gather."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Arrays = Mapping[str, NDArray[Any]]

LABELS = ("is_click", "long_view", "is_like")
PADDING, WATCHED, WATCHED_LONG, LIKED = range(4)  # what a user did with a video of the history
USER_FIELDS = (
    "user_active_degree",
    "is_video_author",
    "is_live_streamer",
    "follow_user_num_range",
    "fans_user_num_range",
    "friend_user_num_range",
    "register_days_range",
    *(f"onehot_feat{i}" for i in range(18)),
)
ITEM_FIELDS = ("author_id", "tag_first", "video_type", "upload_type")
ORIGIN = "https://zenodo.org/records/10439422"


@dataclass(frozen=True)
class FeedData:
    """The log, one entry per row in time order, and the history of each user.

    Attributes:
        fields: (rows, fields) categorical features of user, video and moment; all fields share one range of values.
        item: (rows,) the video shown.
        user: (rows,) who saw it.
        labels: (rows, labels) of 0 and 1.
        past: (users, history) videos watched before the log begins, the latest last, padded in front.
        behaviour: (users, history) what the user did with them.
        day: (rows,) number of the day, from 0.
        num_values: size of the range of ``fields``.
        num_items: videos; one more number stands for padding.
    """

    fields: Tensor
    item: Tensor
    user: Tensor
    labels: Tensor
    past: Tensor
    behaviour: Tensor
    day: Tensor
    num_values: int
    num_items: int


def load_feed(data: str | Path, history: int) -> FeedData:
    """Read ``<data>/kuairand-pure/*.npz``."""
    folder = Path(data) / "kuairand-pure"
    log, users, items, histories = (_load(folder, name) for name in ("log", "users", "items", "histories"))
    if (np.diff(log["time_ms_rel"].astype(np.int64)) < 0).any():
        raise ValueError(f"the rows of {folder / 'log.npz'} must be in time order")
    for name, table, key in (("users", users, "user_id"), ("items", items, "video_id")):
        if not np.array_equal(table[key], np.arange(len(table[key]))):
            raise ValueError(f"{key} of {folder / name}.npz must count from 0 without gaps")
    fields, num_values = _fields(log, users, items)
    past, behaviour = _histories(histories, len(users["user_id"]), len(items["video_id"]), history)
    return FeedData(
        fields=torch.from_numpy(fields),
        item=torch.from_numpy(log["video_id"].astype(np.int64)),
        user=torch.from_numpy(log["user_id"].astype(np.int64)),
        labels=torch.from_numpy(np.stack([log[name] for name in LABELS], axis=1).astype(np.float32)),
        past=torch.from_numpy(past),
        behaviour=torch.from_numpy(behaviour),
        day=torch.from_numpy(np.unique(log["date"], return_inverse=True)[1].astype(np.int64)),
        num_values=num_values,
        num_items=len(items["video_id"]),
    )


def _load(folder: Path, name: str) -> Arrays:
    path = folder / f"{name}.npz"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; the data are KuaiRand-Pure, {ORIGIN}, as .npz files")
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def _fields(log: Arrays, users: Arrays, items: Arrays) -> tuple[NDArray[np.int32], int]:
    """Every categorical feature of every row, as numbers of one shared range (one embedding table for all)."""
    user, item = log["user_id"], log["video_id"]
    hour = (log["time_ms_rel"].astype(np.int64) + log["time_ms_base"]) // 3_600_000 % 24
    duration = np.log2(1 + log["duration_ms"] / 1000).round()
    columns = [user.astype(np.int64)]
    columns += [_codes(users[name])[user] for name in USER_FIELDS]
    columns += [_codes(items[name])[item] for name in ITEM_FIELDS]
    columns += [_codes(values) for values in (log["tab"], hour, duration)]
    sizes = [len(users["user_id"]), *(int(column.max()) + 1 for column in columns[1:])]
    offsets = np.cumsum([0, *sizes])
    return (np.stack(columns, axis=1) + offsets[:-1]).astype(np.int32), int(offsets[-1])


def _codes(values: NDArray[Any]) -> NDArray[np.int64]:
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def _histories(
    histories: Arrays, num_users: int, num_items: int, length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    users = histories["user_id"].astype(np.int64)

    def flat(name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A kind of sequence as (index of its owner, video), one entry per watched video."""
        offsets = histories[f"{name}_off"].astype(np.int64)
        lengths = offsets[1:] - offsets[:-1]
        return np.repeat(np.arange(len(users)), lengths), histories[name].astype(np.int64)

    owner, item = flat("watch_seq")
    pairs = owner * num_items + item
    done = np.full(len(item), WATCHED)
    for name, kind in (("long_watch_seq", WATCHED_LONG), ("like_seq", LIKED)):
        kind_owner, kind_item = flat(name)
        done[np.isin(pairs, kind_owner * num_items + kind_item)] = kind
    from_end = histories["watch_seq_off"].astype(np.int64)[owner + 1] - 1 - np.arange(len(item))
    kept = from_end < length
    place = users[owner[kept]], length - 1 - from_end[kept]
    past = np.full((num_users, length), num_items)
    behaviour = np.full((num_users, length), PADDING)
    past[place], behaviour[place] = item[kept], done[kept]
    return past, behaviour
