"""Training on the generated world: what is asked, which scenes, and runs of a few minutes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from eventful.errors import ConfigError
from eventful.models.loading import load_model
from eventful.models.vitdet import BackboneConfig, HeadConfig, ViTDet, ViTDetConfig
from eventful.models.vitdet.boxes import nonempty
from eventful.models.vivit import ViViT, ViViTConfig
from eventful.paper.data.world import SPLITS
from eventful.paper.train import checkpoints, shipped, world
from eventful.paper.train.checkpoints import Checkpoint, Position
from eventful.paper.train.engine import LoopOptions
from eventful.paper.train.loop import LoopObjective
from eventful.paper.train.processes import Processes
from eventful.paper.train.recipes import Recipe
from eventful.paper.train.shipped import PHASES, VALIDATION, train_shipped
from eventful.paper.train.world import FIRST_SEED, Sight, TokenTask, collate
from eventful.video.world import ACTIONS, CLASSES, boxes_of

ALONE = Processes(0, 1, torch.device("cpu"))


def tiny_detector() -> ViTDet:
    trunk = BackboneConfig(
        size=128, trained_size=128, dim=16, depth=2, heads=2, window=3, global_blocks=(1,),
        pretrained_grid=8, class_slot=False,
    )  # fmt: skip
    heads = HeadConfig(len(CLASSES), convs=1, hidden=16, samples=16, shared_boxes=True)
    return ViTDet(
        ViTDetConfig(trunk, heads, channels=16, proposals=(20, 10), short_edge=128,
                     candidates=(40, 20))
    )  # fmt: skip


def tiny_actions() -> ViViT:
    return ViViT(
        ViViTConfig(len(ACTIONS), 32, frames=4, dim=16, depth=1, temporal_depth=1, heads=2,
                    dropout=0.0)
    )  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small models, few surfaces and short phases."""
    monkeypatch.setattr(world, "_BANK", 2)
    world._bank.cache_clear()
    monkeypatch.setattr(shipped, "MODELS", {"detector": tiny_detector, "actions": tiny_actions})
    short = {
        name: tuple(
            replace(
                phase,
                steps=2,
                kept=phase.kept and 4,
                recipe=replace(phase.recipe, batch=2, precision="float32"),
            )
            for phase in phases
        )
        for name, phases in PHASES.items()
    }
    monkeypatch.setattr(shipped, "PHASES", short)
    monkeypatch.setattr("eventful.cli.train_run.PHASES", short)
    few = range(900_000, 900_002)
    monkeypatch.setattr(shipped, "VALIDATION", few)
    monkeypatch.setattr("eventful.cli.train_run.VALIDATION", few)
    yield
    world._bank.cache_clear()


def test_no_scene_is_both_trained_on_and_scored_on():
    trained = range(FIRST_SEED, SPLITS["train"].start)
    for phases in PHASES.values():
        assert sum(phase.scenes for phase in phases) < len(trained)
    for held in (SPLITS["val"], SPLITS["test"], VALIDATION):
        assert held.stop <= trained.start


class TestTokens:
    def test_cells_lie_where_they_are_asked_about(self):
        task = TokenTask(8, 16)
        values = torch.arange(16.0).repeat(1, 2, 3, 1)  # one channel, cells by number
        spread = task._spread(values)
        assert spread.shape == (1, 1, 8, 12)
        assert spread[0, 0, :4, :4].flatten().tolist() == list(range(16))

    def test_the_right_answer_costs_least(self):
        shot = world.street_frames(torch.tensor([6], dtype=torch.int32), 128, 1.0, 1)
        task = TokenTask(8, 16)
        task.norm, task.reach = nn.Identity(), nn.Linear(8, 64)

        class Answers(nn.Module):
            def __init__(self, labels):
                super().__init__()
                self.labels = labels

            def forward(self, tokens):
                right = nn.functional.one_hot(self.labels, len(CLASSES) + 1).float() * 9
                cells = right.unflatten(2, (-1, 4)).unflatten(1, (-1, 4))  # (B, h, 4, w, 4, C)
                return cells.permute(0, 1, 3, 5, 2, 4).flatten(3)

        owner = shot.owner[:, 2::4, 2::4]
        kinds = shot.actors.kind.long().gather(1, owner.clamp_min(0).flatten(1)).view_as(owner)
        labels = torch.where(owner >= 0, kinds, len(CLASSES))
        assert (owner >= 0).any()
        features, found = torch.zeros(1, 8, 8, 8), boxes_of(shot)
        task.classes = Answers(labels)
        right = float(task(features, Sight.of(shot, found))["token_class"])
        task.classes = Answers(labels.roll(1, dims=2))
        assert right < 0.01 < float(task(features, Sight.of(shot, found))["token_class"])


def test_what_is_to_be_ignored_is_no_object():
    seeds = torch.arange(40, 46, dtype=torch.int32)
    shot = world.street_frames(seeds, 128, 9 / 16, 1)
    found = boxes_of(shot)
    assert (found.seen & found.ignore).any()
    pixels, targets, places = world.as_inputs(shot, found, 128)
    assert pixels.shape == (6, 3, 128, 128)
    assert {place.content for place in places} == {tuple(shot.pixels.shape[2:])}
    for row, target in enumerate(targets):
        wanted = found.seen[row] & ~found.ignore[row]
        assert torch.equal(target.boxes[nonempty(target.boxes)], found.boxes[row, wanted])
        assert torch.equal(target.labels[nonempty(target.boxes)], found.labels[row, wanted])
        spared = found.seen[row] & found.ignore[row]
        assert torch.equal(target.ignored[nonempty(target.ignored)], found.boxes[row, spared])


def test_the_backbone_alone_leaves_the_heads_alone():
    objective = world.StreetObjective(tiny_detector(), boxes=False)
    sum(objective(collate([5, 6])).values()).backward()
    assert objective.model.backbone.patch_embed.weight.grad is not None
    assert objective.model.rpn.objectness.weight.grad is None
    objective.boxes = True
    sum(objective(collate([5, 6])).values()).backward()
    assert objective.model.rpn.objectness.weight.grad is not None


def test_memory_in_the_loop():
    objective = LoopObjective(tiny_detector(), (4, 16))
    losses = objective(collate([5, 6]))
    assert {"class", "eventful_class"} < set(losses)
    sum(losses.values()).backward()
    for name, parameter in objective.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name


@pytest.mark.parametrize("name", ["detector", "actions"])
def test_a_run_in_parts_is_a_run(name, tmp_path):
    """Stopped by the clock after each step, and resumed, it ends in the same weights."""
    whole = train_shipped(name, tmp_path / "whole", ALONE)
    parts, options = None, LoopOptions(seconds=0.0, shard=20_000)
    runs = 0
    while parts is None:
        parts, runs = train_shipped(name, tmp_path / "parts", ALONE, options=options), runs + 1
        assert runs < 12
    assert runs > 2
    for key, value in whole.state_dict().items():
        assert torch.equal(value, parts.state_dict()[key]), key
    files = list((tmp_path / "parts").rglob("*.pt*of*"))
    assert files
    assert max(file.stat().st_size for file in files) <= 20_000
    loaded = load_model(tmp_path / "parts" / f"{name}.safetensors")
    assert loaded.classes == (CLASSES if name == "detector" else ACTIONS)
    near = dict(loaded.named_parameters())
    assert all(torch.allclose(near[k], v, atol=1e-3) for k, v in parts.named_parameters())
    score = shipped.scored(loaded, range(900_000, 900_002))
    assert 0 <= score["map50" if name == "detector" else "top1"] <= 1


def saved(folder, step, shard):
    content = Checkpoint(Position(step), {"w": torch.arange(2000.0)}, {}, {}, [], {})
    return checkpoints.save(content, folder, keep=2, lasting=False, shard=shard)


class TestShards:
    def test_they_are_read_as_one(self, tmp_path):
        saved(tmp_path, 1, 3000)
        assert sorted(p.name for p in tmp_path.iterdir())[0] == "step_00000001.pt.1of4"
        path, content = checkpoints.newest(tmp_path)
        assert path.name == "step_00000001.pt"
        assert content.model["w"].tolist() == list(range(2000))

    def test_old_ones_are_removed_whole(self, tmp_path):
        for step in (1, 2, 3):
            saved(tmp_path, step, 3000)
        assert {path.name for path in checkpoints.found(tmp_path)} == {
            "step_00000002.pt", "step_00000003.pt"
        }  # fmt: skip
        assert not list(tmp_path.glob("step_00000001*"))

    def test_one_with_a_missing_part_is_none(self, tmp_path):
        saved(tmp_path, 1, 3000)
        saved(tmp_path, 2, 3000)
        (tmp_path / "step_00000002.pt.3of4").unlink()
        path, _ = checkpoints.newest(tmp_path)
        assert path.name == "step_00000001.pt"

    def test_parts_of_two_writings_do_not_mix(self, tmp_path):
        for shard in (3000, 5000, None, 2000):
            saved(tmp_path, 1, shard)
            _, content = checkpoints.newest(tmp_path)
            assert content.model["w"].tolist() == list(range(2000))
        assert len(list(tmp_path.iterdir())) == 5

    def test_a_set_that_was_not_finished_is_removed(self, tmp_path):
        saved(tmp_path, 1, 3000)
        (tmp_path / "step_00000001.pt.2of4").unlink()
        saved(tmp_path, 2, None)
        assert [path.name for path in tmp_path.iterdir()] == ["step_00000002.pt"]

    def test_a_damaged_part_falls_back_to_the_one_before(self, tmp_path):
        saved(tmp_path, 1, 3000)
        saved(tmp_path, 2, 3000)
        (tmp_path / "step_00000002.pt.2of4").write_bytes(b"nothing")
        with pytest.warns(UserWarning, match="damaged"):
            path, _ = checkpoints.newest(tmp_path)
        assert path.name == "step_00000001.pt"


def test_the_rate_falls_along_a_cosine():
    recipe = Recipe(epochs=1, batch=1, lr=1.0, weight_decay=0, cosine=True)
    assert [round(recipe.rate(step, 0, 100), 3) for step in (0, 50, 100)] == [1.0, 0.5, 0.0]
    plain = replace(recipe, cosine=False)
    assert plain.rate(50, 0, 100) == 1.0


def test_the_command(tmp_path):
    from eventful.cli.app import app

    command = ["train", "world", "detector", "--out", str(tmp_path / "run"), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["finished"]
    assert (tmp_path / "run" / "detector.safetensors").is_file()
    stopped = [*command[:4], str(tmp_path / "other"), "--minutes", "0", "--json"]
    result = CliRunner().invoke(app, stopped)
    assert json.loads(result.stdout) == {"finished": False, "score": None}


def test_unknown_models(tmp_path):
    with pytest.raises(ConfigError, match="detector, actions"):
        train_shipped("segmenter", tmp_path, ALONE)


def test_the_time_of_a_run_is_that_of_all_its_phases(tmp_path, monkeypatch):
    now = [0.0]

    def later():
        now[0] += 10.0
        return now[0]

    monkeypatch.setattr("eventful.paper.train.engine.time.monotonic", later)
    options = LoopOptions(seconds=60.0)
    assert train_shipped("detector", tmp_path, ALONE, options=options) is None
    assert not list((tmp_path / "boxes").glob("checkpoints/*.lasting"))


def test_scenes_of_the_dataset_are_not_trained_on(tmp_path):
    many = [replace(PHASES["actions"][0], kept=None, steps=10**6)]
    with pytest.raises(ConfigError, match="world:street"):
        train_shipped("actions", tmp_path, ALONE, phases=many)


def test_processes_are_told_that_heads_have_no_gradient():
    objective = world.StreetObjective(tiny_detector(), boxes=False)
    assert objective.partial
    objective.boxes = True
    assert not objective.partial
