"""Tasks to train: a model, deterministic batches and a fixed validation set, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hdet_lab.targets import is_target, load_target
from hdet_lab.tasks.base import MEMBERS, Batch, Task, batch_of, split_rows
from hdet_lab.tasks.code import code_gpt
from hdet_lab.tasks.diffusion import FashionDiffusionTask
from hdet_lab.tasks.fashion import FashionTask, fashion_batch_8, fashion_batch_1024
from hdet_lab.tasks.fashion_vit import FashionViTTask
from hdet_lab.tasks.fashion_wide import FashionWideTask
from hdet_lab.tasks.feed import FeedTask
from hdet_lab.tasks.finetune import (
    FineTuneTask,
    finetune_gpt,
    finetune_gpt_10m,
    finetune_lora,
    finetune_lora_10m,
)
from hdet_lab.tasks.half_c import (
    BurgersTask,
    CifarTask,
    MoleculesTask,
    RatingsTask,
    WeatherTask,
    diamonds_raw,
    flights,
    speech,
    wikitext_gpt,
)
from hdet_lab.tasks.half_d import (
    AddingTask,
    AutoencoderTask,
    ContrastTask,
    DeepTask,
    DensityTask,
    MaskedTask,
    MasksTask,
    MixerTask,
    NeighboursTask,
    ParityTask,
    PictureTask,
    SortingTask,
    SpiralsTask,
    TeacherTask,
)
from hdet_lab.tasks.half_e import (
    BoxesTask,
    CitiesTask,
    CloudsTask,
    ConvNextTask,
    CountriesTask,
    DenoiseTask,
    ExpertsTask,
    PendulumTask,
    PhonemesTask,
    RankingTask,
    TokensTask,
    UpscaleTask,
    bible_gpt,
    bible_rnn,
)
from hdet_lab.tasks.half_f import (
    AccentsTask,
    BaseballTask,
    CodebookTask,
    ControlTask,
    FlowTask,
    GlossesTask,
    PhysicsTask,
    PixelsTask,
    SiameseTask,
    StrokesTask,
    javascript,
    tunes_gpt,
)
from hdet_lab.tasks.half_g import (
    BodyTask,
    DemandTask,
    HotelsTask,
    LanguagesTask,
    LemmasTask,
    MazesTask,
    PatchesTask,
    SensesTask,
    SurvivalTask,
    VorticesTask,
    manual,
)
from hdet_lab.tasks.half_h import (
    BarsTask,
    CarriesTask,
    CoastsTask,
    ContextTask,
    DrawingTask,
    FilmsTask,
    HyphensTask,
    TomographyTask,
    UnicodeTask,
    icons,
)
from hdet_lab.tasks.half_i import (
    ChargesTask,
    ClustersTask,
    ColoursTask,
    GlyphsTask,
    MeltingTask,
    SpellingsTask,
    VisitsTask,
    VoicesTask,
    quotes,
)
from hdet_lab.tasks.half_j import (
    BannersTask,
    BirthsTask,
    CodesTask,
    GlucoseTask,
    HeightsTask,
    LecturesTask,
    ReadingsTask,
    StarsTask,
    WagesTask,
    webster,
)
from hdet_lab.tasks.quadratic import QuadraticTask
from hdet_lab.tasks.recurrent import LSTMTask, shakespeare_lstm
from hdet_lab.tasks.tabular import TabularTask, linear_raw, tabular_classes, tabular_regression, tabular_regression_raw
from hdet_lab.tasks.text import TextTask, shakespeare_gpt, shakespeare_gpt_10m, stdlib_gpt
from hdet_lab.tasks.words import word_gpt

__all__ = [
    "TASKS",
    "Batch",
    "FashionDiffusionTask",
    "FashionTask",
    "FashionViTTask",
    "FashionWideTask",
    "FeedTask",
    "FineTuneTask",
    "LSTMTask",
    "QuadraticTask",
    "TabularTask",
    "Task",
    "TextTask",
    "batch_of",
    "code_gpt",
    "fashion_batch_8",
    "fashion_batch_1024",
    "finetune_gpt",
    "finetune_gpt_10m",
    "finetune_lora",
    "finetune_lora_10m",
    "linear_raw",
    "load_task",
    "shakespeare_gpt",
    "shakespeare_gpt_10m",
    "shakespeare_lstm",
    "split_rows",
    "stdlib_gpt",
    "tabular_classes",
    "tabular_regression",
    "tabular_regression_raw",
    "word_gpt",
]

TASKS: dict[str, Callable[..., Task]] = {
    "stdlib-gpt": lambda data, **options: stdlib_gpt(**options),
    "code-gpt": code_gpt,
    "shakespeare-gpt": shakespeare_gpt,
    "shakespeare-gpt-10m": shakespeare_gpt_10m,
    "word-gpt": word_gpt,
    "lstm": shakespeare_lstm,
    "finetune-gpt": finetune_gpt,
    "finetune-lora": finetune_lora,
    "finetune-gpt-10m": finetune_gpt_10m,
    "finetune-lora-10m": finetune_lora_10m,
    "feed": FeedTask,
    "fashion": FashionTask,
    "fashion-batch-8": fashion_batch_8,
    "fashion-batch-1024": fashion_batch_1024,
    "fashion-vit": FashionViTTask,
    "fashion-wide": FashionWideTask,
    "fashion-diffusion": FashionDiffusionTask,
    "tabular": tabular_classes,
    "tabular-regression": tabular_regression,
    "tabular-regression-raw": tabular_regression_raw,
    "linear-raw": linear_raw,
    "quadratic": lambda data, **options: QuadraticTask(**options),
    "cifar10": CifarTask,
    "wikitext-gpt": wikitext_gpt,
    "molecules": MoleculesTask,
    "movielens": RatingsTask,
    "speech": speech,
    "weather": WeatherTask,
    "burgers": BurgersTask,
    "diamonds-raw": diamonds_raw,
    "flights": flights,
    "masked": MaskedTask,
    "mixer": MixerTask,
    "contrast": ContrastTask,
    "autoencoder": AutoencoderTask,
    "deep": DeepTask,
    "neighbours": NeighboursTask,
    "adding": lambda data, **options: AddingTask(**options),
    "sorting": lambda data, **options: SortingTask(**options),
    "picture": lambda data, **options: PictureTask(**options),
    "parity": lambda data, **options: ParityTask(**options),
    "density": lambda data, **options: DensityTask(**options),
    "spirals": lambda data, **options: SpiralsTask(**options),
    "teacher": lambda data, **options: TeacherTask(**options),
    "masks": lambda data, **options: MasksTask(**options),
    "bible-gpt": bible_gpt,
    "bible-rnn": bible_rnn,
    "phonemes": PhonemesTask,
    "cities": CitiesTask,
    "countries": CountriesTask,
    "denoise": DenoiseTask,
    "upscale": UpscaleTask,
    "convnext": ConvNextTask,
    "tokens": TokensTask,
    "experts": ExpertsTask,
    "ranking": RankingTask,
    "boxes": lambda data, **options: BoxesTask(**options),
    "pendulum": lambda data, **options: PendulumTask(**options),
    "clouds": lambda data, **options: CloudsTask(**options),
    "tunes-gpt": tunes_gpt,
    "javascript": javascript,
    "accents": AccentsTask,
    "glosses": GlossesTask,
    "siamese": SiameseTask,
    "flow": FlowTask,
    "pixels": PixelsTask,
    "strokes": StrokesTask,
    "baseball": BaseballTask,
    "codebook": CodebookTask,
    "physics": lambda data, **options: PhysicsTask(**options),
    "control": lambda data, **options: ControlTask(**options),
    "languages": LanguagesTask,
    "lemmas": LemmasTask,
    "manual": manual,
    "hotels": HotelsTask,
    "survival": SurvivalTask,
    "demand": DemandTask,
    "senses": SensesTask,
    "patches": PatchesTask,
    "vortices": lambda data, **options: VorticesTask(**options),
    "mazes": lambda data, **options: MazesTask(**options),
    "body": lambda data, **options: BodyTask(**options),
    "hyphens": HyphensTask,
    "unicode": UnicodeTask,
    "icons": icons,
    "coasts": CoastsTask,
    "films": FilmsTask,
    "tomography": lambda data, **options: TomographyTask(**options),
    "carries": lambda data, **options: CarriesTask(**options),
    "drawing": lambda data, **options: DrawingTask(**options),
    "context": lambda data, **options: ContextTask(**options),
    "bars": lambda data, **options: BarsTask(**options),
    "quotes": quotes,
    "colours": ColoursTask,
    "glyphs": GlyphsTask,
    "visits": VisitsTask,
    "spellings": SpellingsTask,
    "melting": MeltingTask,
    "voices": VoicesTask,
    "charges": lambda data, **options: ChargesTask(**options),
    "clusters": lambda data, **options: ClustersTask(**options),
    "webster": webster,
    "readings": ReadingsTask,
    "banners": BannersTask,
    "births": BirthsTask,
    "lectures": LecturesTask,
    "glucose": GlucoseTask,
    "stars": StarsTask,
    "heights": HeightsTask,
    "wages": WagesTask,
    "codes": lambda data, **options: CodesTask(**options),
}
"""Name to what makes the task from the data folder and options."""


def load_task(name: str, data: str | Path = "data", **options: Any) -> Task:
    """The task called ``name``.

    Args:
        name: one of :data:`TASKS`, or ``package.module:Class`` for one of your own. The class, or any function that
            returns a task, is called with ``options``, and with ``data`` where it has a parameter of this name.
        data: folder that holds ``tinyshakespeare/``, ``kuairand-pure/``, ``fashion-mnist/``, ``tabular/``, ``open/``.
        **options: of the task; default its own sizes.
    """
    if is_target(name):
        return _own_task(name, data, options)
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, or MODULE:CLASS, but got {name!r}")
    return TASKS[name](data, **options)


def _own_task(target: str, data: str | Path, options: dict[str, Any]) -> Task:
    try:
        make = load_target(target)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"task must be MODULE:CLASS that can be imported, but got {target!r}: {error}") from error
    given = {"data": Path(data)} if "data" in inspect.signature(make).parameters else {}
    task: Task = make(**given, **options)
    missing = [name for name in MEMBERS if not hasattr(task, name)]
    if missing:
        raise ValueError(
            f"task must have what hdet_lab.tasks.base.Task has, but that of {target!r} has no {', '.join(missing)}"
        )
    return task
