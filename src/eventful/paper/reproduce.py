"""The paper's claims on generated videos: experiments that need neither data nor weights.

Each names its videos (`source`) and a trained model that comes with the package (`shipped`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from eventful.errors import ConfigError
from eventful.models.shipped import weights_of
from eventful.paper.data.world import recognises
from eventful.paper.evaluate.evaluation import Progress, Settings, evaluate
from eventful.paper.evaluate.experiment import Experiment, load, world_names
from eventful.paper.evaluate.masks import draw_masks
from eventful.paper.evaluate.report import Report
from eventful.paper.evaluate.trace import measure_trace
from eventful.paper.evaluate.variants import BASE

Measure = Callable[[Experiment, Settings, Progress | None], Report]
_KINDS: dict[str, Measure] = {
    "accuracy": evaluate,
    "padding": evaluate,
    "trace": measure_trace,
    "masks": draw_masks,
}


def experiments() -> tuple[Experiment, ...]:
    """All of them, by name."""
    return tuple(load(name) for name in world_names())


def measure(experiment: Experiment, settings: Settings, progress: Progress | None = None) -> Report:
    """Run an experiment of any kind but `runtime`."""
    return _KINDS[experiment.kind](experiment, settings, progress)


def source_of(
    experiment: Experiment,
    *,
    device: str = "cpu",
    videos: int | None = None,
    frames: int | None = None,
) -> str:
    """The generated videos of an experiment, made on the device that runs the model.

    Args:
        videos: in place of the experiment's own number.
        frames: of each video; clips for recognition keep theirs.
    """
    if not recognises(Path(experiment.source)):
        raise ConfigError(f"{experiment.name} names no generated videos; give --data.")
    name, _, query = experiment.source.partition("?")
    options = dict(entry.split("=", 1) for entry in filter(None, query.split("&")))
    if videos is not None:
        options["videos"] = str(videos)
    if frames is not None and experiment.model == "vitdet":
        options["frames"] = str(frames)
    if device != "cpu":
        options["device"] = device
    return name + "?" * bool(options) + "&".join(f"{k}={v}" for k, v in options.items())


def files_of(experiment: Experiment, given: Mapping[str, Path]) -> dict[str, Path]:
    """The weights given, and those that come with the package unless replaced."""
    if experiment.shipped and BASE not in given:
        return {BASE: weights_of(experiment.shipped), **given}
    return dict(given)
