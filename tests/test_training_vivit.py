"""Temporal fine-tuning end to end on a miniature EPIC: cache, tune, resume, several processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import miniatures
from commands import here  # noqa: F401 - a fixture
from eventful.config import Config
from eventful.errors import CheckpointError, ConfigError
from eventful.models.loading import load_model
from eventful.models.saving import save_model
from eventful.models.vivit import ViViT, ViViTConfig, classify_views, prepare
from eventful.paper.data import ViewPlan
from eventful.paper.train import checkpoints
from eventful.paper.train.engine import LoopOptions
from eventful.paper.train.journal import read
from eventful.paper.train.processes import Processes
from eventful.paper.train.recipes import EPIC, KINETICS, Recipe
from eventful.paper.train.temporal import (
    TemporalObjective,
    TemporalPlan,
    TemporalTuning,
    VectorExamples,
    collate,
)
from eventful.policies import TopR
from eventful.stream import Stream
from eventful.surgery.conversion import convert
from tolerances import VALUES, apart, assert_near, limit
from torchrun import pair

ALONE = Processes(0, 1, torch.device("cpu"))
TINY = ViViTConfig(
    classes=97, size=32, frames=8, patch=8, dim=16, depth=2, temporal_depth=1, heads=2
)
VIEWS = ViewPlan(frames=8, stride=1, temporal=2, spatial=1, size=32)
QUICK = Recipe(epochs=3, batch=4, lr=3e-3, weight_decay=0.05, dropout=0.5)


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight segments of one video, dark ones to take and bright ones to bend."""
    root = miniatures.epic(tmp_path_factory.mktemp("epic"), frames=True)
    table = []
    for i in range(8):
        start, verb = i * 0.2, ("take", 0) if i < 4 else ("bend", 96)
        stamps = [f"00:00:{second:05.2f}" for second in (start, start + 0.4)]
        first = 1 + round(start * 50)
        table.append(miniatures.epic_row(f"P01_11_{i}", *stamps, first, first + 20, *verb))
    for split, rows in (("train", table), ("validation", table[1::2])):
        miniatures.write_csv(root / f"EPIC_100_{split}.csv", miniatures.EPIC_COLUMNS, rows)
    torch.manual_seed(0)
    model = ViViT(TINY)
    with torch.no_grad():  # as it is initialised, a model hardly looks at its input
        for parameter in model.spatial.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    save_model(model, root / "tiny.safetensors")
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def tuning(kitchen: Path, cache: Path, r: int | None = 6, **changes: object) -> TemporalTuning:
    plan = TemporalPlan(kitchen, cache, r, train_views=VIEWS, val_views=VIEWS)
    plan = replace(plan, **changes)
    return TemporalTuning(plan, kitchen / "tiny.safetensors", ALONE)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_the_published_settings() -> None:
    assert (EPIC.epochs, EPIC.lr, EPIC.weight_decay, EPIC.batch) == (5, 1e-5, 0.05, 8)
    assert (KINETICS.epochs, KINETICS.lr, KINETICS.batch) == (10, 2e-6, 16)
    assert EPIC.dropout == KINETICS.dropout == 0.5


def test_the_spatial_model_runs_as_in_the_authors_configs(tmp_path: Path) -> None:
    """The paper's rule with A·v at half precision; rules without such an update have no choice."""
    plan = TemporalPlan(tmp_path, tmp_path, 100)
    assert plan.config() == Config.paper(TopR(100), accumulate="half")
    assert plan.config(1.4) == Config.paper(TopR(140), accumulate="half")
    assert replace(plan, accumulate="float32").config() == Config.paper(TopR(100))
    assert replace(plan, preset="tokenwise").config() == Config.tokenwise(TopR(100))
    assert len(plan.train_views) == len(plan.val_views) == 12


@pytest.mark.parametrize("double", [False, True])
def test_the_loss_is_that_of_the_mean_logits_of_all_views(
    kitchen: Path, cache: Path, double: bool
) -> None:
    run = tuning(kitchen, cache)
    examples = VectorExamples(run.vectors(run.val_videos, VIEWS), len(VIEWS))
    batch = collate([examples[i] for i in range(3)])
    assert batch[0].shape == (3, len(VIEWS), 4, 16)
    examples.epoch = 1  # every epoch has the same views
    assert torch.equal(examples[0][0], batch[0][0])

    objective = TemporalObjective(run.model, 0.0, double_softmax=double)
    torch.manual_seed(1)
    batch = torch.randn(3, 2, 4, 16), batch[1]  # views that differ more than those of the clips
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    loss = objective(batch)["class"]
    expected = []
    for vectors, label in zip(*batch, strict=True):
        views = [run.model.classifier(run.model.temporal(view[None]))[0] for view in vectors]
        mean = sum(views) / len(views)
        scores = mean.softmax(0) if double else mean
        expected.append(-scores.log_softmax(0)[label])
    torch.testing.assert_close(loss, sum(expected) / 3)
    apiece = [objective((batch[0][:, [i]], batch[1]))["class"] for i in range(len(VIEWS))]
    for other in (apiece[0], sum(apiece) / len(apiece)):  # of one view, and the mean of losses
        assert not torch.isclose(loss, other)


def test_another_loss_is_another_run(kitchen: Path, cache: Path, tmp_path: Path) -> None:
    stopped = LoopOptions(save_every=1, stop_after=1)
    tuning(kitchen, cache).run(tmp_path, QUICK, stopped)
    assert "mean logits of all views" in (tmp_path / "settings.json").read_text()
    with pytest.raises(CheckpointError, match="loss"):
        tuning(kitchen, cache, double_softmax=True).run(tmp_path, QUICK, stopped)


def test_options_reach_the_run(here, kitchen: Path, tmp_path: Path) -> None:  # noqa: F811
    ended = here(
        *("train", "vivit", "--json", "--data", kitchen, "--weights", kitchen / "tiny.safetensors"),
        *("--out", tmp_path / "out", "--cache", tmp_path / "cache", "--r", 6, "--workers", 0),
        *("--temporal-views", 1, "--spatial-views", 1, "--epochs", 1, "--batch", 4),
        *("--double-softmax", "--accumulate", "float32"),
    )
    assert ended.returncode == 0, ended.stderr
    settings = json.loads((tmp_path / "out/settings.json").read_text())
    assert "softmax of the mean logits" in settings["loss"]
    assert settings["rule"]["accumulate"] == "float32"


def test_data_with_other_classes_than_the_model_is_refused(tmp_path: Path) -> None:
    """With fewer classes, too: their numbers would not be those of the weights."""
    root = miniatures.kinetics(tmp_path / "kinetics")
    plan = TemporalPlan(root, tmp_path / "cache", 6, val_split="val")
    for classes, names in ((97, None), (400, "zumba\nabseiling\nyoga\n")):
        save_model(ViViT(replace(TINY, classes=classes)), tmp_path / "tiny.safetensors")
        if names is not None:
            (root / "classes.txt").write_text(names)
        with pytest.raises(ConfigError, match=f"classes, the model {classes}"):
            TemporalTuning(plan, tmp_path / "tiny.safetensors", ALONE)
    (root / "classes.txt").unlink()
    made = TemporalTuning(plan, tmp_path / "tiny.safetensors", ALONE)
    assert [video.label for video in made.val_videos] == [399, 0]


def test_cached_vectors_are_those_of_the_stream(kitchen: Path, cache: Path) -> None:
    run = tuning(kitchen, cache)
    cached = run.vectors(run.val_videos, VIEWS)
    model = load_model(kitchen / "tiny.safetensors")
    stream = Stream(convert(model.spatial, run.plan.config()))
    video = run.val_videos[1]
    pixels = [prepare(v.pixels.permute(0, 2, 3, 1)) for v in VIEWS.cut(video.frames)]
    expected = classify_views(model, pixels, stream)
    vectors = cached[1].views(len(VIEWS))
    with torch.no_grad():
        got = model.classify(vectors).mean(0).softmax(0)
    assert_near(got, expected, "step")
    dense = torch.stack([model(p)[0] for p in pixels]).mean(0).softmax(0)
    assert apart(got, dense) > limit("model")  # r = 6 of 17 tokens does change something


def test_a_cache_goes_on_and_skips_what_is_damaged(kitchen: Path, tmp_path: Path) -> None:
    run = tuning(kitchen, tmp_path)
    first = run.vectors(run.val_videos, VIEWS)
    before = [path.path.stat().st_mtime_ns for path in first]
    first[0].path.unlink()
    done: list[int] = []
    run.on_cached = lambda what, number, count: done.append(count)
    again = run.vectors(run.val_videos, VIEWS)
    assert done == [1]  # the one that was gone
    assert [c.name for c in again] == [c.name for c in first]
    assert [c.path.stat().st_mtime_ns for c in again[1:]] == before[1:]

    broken = replace(run.val_videos[0], frames=replace(run.val_videos[0].frames, folder=tmp_path))
    first[0].path.unlink()
    videos = replace(run.val_videos, videos=(broken, *run.val_videos.videos[1:]))
    left = run.vectors(videos, VIEWS)
    assert [c.name for c in left] == [c.name for c in first[1:]]
    assert len(run.skipped) == 1
    assert broken.name in run.skipped[0]


def test_a_cache_of_other_weights_is_refused(kitchen: Path, cache: Path, tmp_path: Path) -> None:
    run = tuning(kitchen, tmp_path)
    run.vectors(run.val_videos, VIEWS)
    with torch.no_grad():
        run.model.spatial.class_token += 1
    with pytest.raises(ConfigError, match="other weights"):
        run.vectors(run.val_videos, VIEWS)


def test_tuning_lowers_the_loss_and_resumes_to_the_same_weights(
    kitchen: Path, cache: Path, tmp_path: Path
) -> None:
    whole = tuning(kitchen, cache).run(tmp_path / "whole", QUICK)
    rows = [row for row in read(tmp_path / "whole/scalars.csv") if row["name"] == "train/lr"]
    assert rows  # the last step is always noted
    shares = [(score["tuning"], score["share"], score["r"]) for score in whole.scores]
    assert shares == [
        ("before", 1.0, 6), ("after", 0.6, 4), ("after", 0.8, 5),
        ("after", 1.0, 6), ("after", 1.2, 7), ("after", 1.4, 8),
    ]  # fmt: skip
    assert json.loads((tmp_path / "whole/scores.json").read_text()) == whole.scores

    # Six steps; stop in the middle of the second epoch, twice, without a checkpoint the last time.
    for stop in (2, 3):
        tuning(kitchen, cache).run(
            tmp_path / "halved",
            QUICK,
            LoopOptions(save_every=1, keep=1, log_every=1, stop_after=stop),
        )
    assert not (tmp_path / "halved/model.safetensors").exists()
    resumed = tuning(kitchen, cache).run(tmp_path / "halved", QUICK, LoopOptions(log_every=1))
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "halved"))
    assert resumed.scores == whole.scores
    steps = [
        int(r["step"]) for r in read(tmp_path / "halved/scalars.csv") if r["name"] == "train/class"
    ]
    assert steps == [1, 2, 3, 4, 5, 6]
    scored = [
        int(r["step"]) for r in read(tmp_path / "halved/scalars.csv") if r["name"] == "val/top1"
    ]
    assert scored == [2, 4, 6]


def test_tuning_learns_the_actions_and_leaves_the_spatial_model(
    kitchen: Path, cache: Path, tmp_path: Path
) -> None:
    recipe = replace(QUICK, epochs=30, dropout=0.1)
    result = tuning(kitchen, cache, budgets=(1.0,)).run(tmp_path, recipe, LoopOptions(log_every=1))
    losses = [
        float(r["value"]) for r in read(tmp_path / "scalars.csv") if r["name"] == "train/loss"
    ]
    assert losses[-1] < 0.5 * losses[0]
    before, after = result.scores
    assert after["top1"] == 1.0 > before["top1"]
    start, end = load_file(kitchen / "tiny.safetensors"), weights(tmp_path)
    frozen = [key for key in start if key.startswith("spatial.")]
    assert frozen
    assert all(torch.equal(start[key], end[key]) for key in frozen)
    assert not torch.equal(start["classifier.weight"], end["classifier.weight"])


def test_a_run_with_other_settings_is_not_gone_on_with(
    kitchen: Path, cache: Path, tmp_path: Path
) -> None:
    tuning(kitchen, cache).run(tmp_path, QUICK, LoopOptions(save_every=1, stop_after=1))
    with pytest.raises(CheckpointError, match="recipe"):
        tuning(kitchen, cache).run(tmp_path, replace(QUICK, lr=1e-4))
    with pytest.raises(CheckpointError, match="rule"):
        tuning(kitchen, cache, r=7).run(tmp_path, QUICK)


def test_a_damaged_checkpoint_is_named(kitchen: Path, cache: Path, tmp_path: Path) -> None:
    tuning(kitchen, cache).run(tmp_path, QUICK, LoopOptions(save_every=1, stop_after=1))
    (path,) = checkpoints.found(tmp_path / "checkpoints")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=path.name):
        tuning(kitchen, cache).run(tmp_path, QUICK)


def test_two_processes_give_the_weights_of_one(kitchen: Path, cache: Path, tmp_path: Path) -> None:
    recipe = replace(QUICK, dropout=0.0, epochs=2)
    alone = tmp_path / "alone"
    tuning(kitchen, cache, budgets=(1.0,)).run(alone, recipe)
    printed = pair(
        *("-m", "--", "eventful.cli", "train", "vivit", "--json"),
        *("--data", kitchen, "--weights", kitchen / "tiny.safetensors"),
        *("--out", tmp_path / "pair", "--cache", tmp_path / "cache", "--r", 6),
        *("--temporal-views", 2, "--spatial-views", 1, "--epochs", 2, "--batch", 4),
        *("--lr", "3e-3", "--dropout", 0, "--workers", 0),
    )
    report = json.loads(printed)
    assert [score["r"] for score in report["scores"]] == [6, 4, 5, 6, 7, 8]
    one, two = weights(alone), weights(tmp_path / "pair")
    assert one.keys() == two.keys()
    for key in one:
        torch.testing.assert_close(one[key], two[key], **VALUES)
