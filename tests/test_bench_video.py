"""`eventful bench video` on tiny clips and models, and the stress clips it generates."""

from __future__ import annotations

import csv
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import miniatures
import zoo_timm
from commands import here  # noqa: F401 - a fixture
from eventful import Config, NoiseThreshold, TopFraction, TopR
from eventful.bench.contenders import schedule
from eventful.bench.video import store
from eventful.bench.video.configs import parse_config, plain_config
from eventful.bench.video.footage import open_footage
from eventful.bench.video.measure import ClipResult, Head, VideoPlan, measure
from eventful.bench.video.model import Backbone, SizedBackbone, load_backbone
from eventful.bench.video.rows import Series, VideoRow, quality_fields, rank_correlation
from eventful.bench.video.steps import (
    Carrier,
    Chosen,
    Shot,
    dense_outputs,
    judged,
    layout_of,
    skip_steps,
)
from eventful.bench.video.table import EMPTY, read_videos, videos
from eventful.bench.video.times import Times
from eventful.errors import ConfigError, EventfulError
from eventful.policies import GateContext
from eventful.video.stress import DARKEST, DIMMING, KEY_EVERY, NAMES, StressClip, cursor_box

pytestmark = pytest.mark.usefixtures("without_openvino")

SIZE = (64, 96)
FRAMES = 16


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.manual_seed(0)
    return Backbone("tiny", zoo_timm.plain(img_size=SIZE)())


def run(backbone: Backbone, clip: str, frames: int = FRAMES, **options: Any) -> ClipResult:
    options = {"timed": False, "compiled": False, "size": f"{SIZE[0]}x{SIZE[1]}", **options}
    plan = VideoPlan(backbone, **options)
    return measure(plan, open_footage(clip, frames, plan.size))


def by_name(made: ClipResult) -> dict[str, VideoRow]:
    return {row.contender: row for row in made.rows}


def test_rows_are_complete(backbone: Backbone) -> None:
    told: list[str] = []
    plan = VideoPlan(
        backbone, f"{SIZE[0]}x{SIZE[1]}", configs={"top": Config.fast(TopR(6))}, compiled=False
    )
    footage = open_footage("stress:enter", FRAMES, plan.size)
    made = measure(plan, footage, tick=lambda what, done, count: told.append(what))
    rows = by_name(made)
    assert list(rows) == [
        *("dense", "default", "top", "skip", "skip-carried", "skip-time", "skip-time-carried"),
        "oracle",
    ]
    for name, row in rows.items():
        assert (row.clip, row.tokens, row.frames) == ("stress-enter", 97, FRAMES)
        for column in ("updated", "operations", "error", "error_worst", "cosine", "cosine_worst"):
            assert math.isfinite(getattr(row, column)), (name, column)
        assert len(row.by_frame.error) == len(row.by_frame.updated) == FRAMES
        assert row.error <= row.error_worst
        assert row.cosine_worst <= row.cosine <= 1 + 1e-5
        if name != "oracle":
            assert row.ms > 0
            assert row.time > 0
            assert row.read_ms > 0
            assert min(row.time, 1) <= row.time_read <= max(row.time, 1)
    assert rows["dense"].error == 0
    assert (rows["dense"].time, rows["dense"].operations) == (1.0, 1.0)
    assert all(len(rows[name].by_frame.ms) == FRAMES for name in ("top", "skip", "skip-carried"))
    assert rows["default"].config == repr(Config.fast())
    assert "TopR(r=6" in rows["top"].config
    assert {"timing", "dense outputs", "oracle"} <= set(told)


def test_skipping_has_the_operations_of_the_default(backbone: Backbone) -> None:
    rows = by_name(run(backbone, "stress:enter"))
    default, skip = rows["default"], rows["skip"]
    assert default.operations < 0.6
    assert default.operations <= skip.operations + 1e-9 <= default.operations + 1 / FRAMES + 1e-6
    assert skip.by_frame.operations[0] == 1.0
    assert set(skip.by_frame.operations) == {0.0, 1.0}


def test_skipping_nothing_is_dense(backbone: Backbone) -> None:
    made = run(backbone, "stress:walk", frames=6)
    model, prepare = backbone.at(SIZE, "", "cpu", torch.float32)
    dense = dense_outputs(model, map(prepare, made.frames))
    shot = Shot(model, prepare, made.frames, dense, layout_of(model, prepare(made.frames[0])))
    for carrier in (None, Carrier(shot.layout)):
        series = judged(shot, skip_steps(shot, 1.0, carrier)).series
        assert series.error == [0.0] * 6
        assert series.operations == [1.0] * 6


def test_the_oracle_is_at_least_as_good_for_the_same_counts(backbone: Backbone) -> None:
    rows = by_name(run(backbone, "stress:enter", frames=24))
    default, oracle = rows["default"], rows["oracle"]
    assert oracle.by_frame.updated == pytest.approx(default.by_frame.updated)
    assert 0 < oracle.error <= default.error + 1e-4
    assert sum(oracle.by_frame.error) <= sum(default.by_frame.error) + 1e-3


def test_carried_outputs_follow_a_pan() -> None:
    """Without positions, which stay where they are when the picture moves."""
    torch.manual_seed(0)
    model = zoo_timm.plain(img_size=SIZE)()
    with torch.no_grad():
        model.pos_embed.zero_()
    rows = by_name(run(Backbone("tiny", model), "stress:pan", frames=12))
    assert rows["skip-carried"].operations == rows["skip"].operations
    assert sum(rows["skip-carried"].by_frame.error) < sum(rows["skip"].by_frame.error)


def test_equal_time_counts_what_carrying_takes() -> None:
    times = Times({"eager": [10.0] * 12}, {"default": [6.0] * 12}, [2.0] * 12, [1.0] * 12)
    assert times.share_of("default", carried=False) == pytest.approx(0.6)
    assert times.share_of("default", carried=True) == pytest.approx(0.5)
    for carried, share in ((False, 0.6), (True, 0.5)):
        due = [due for _, due in zip(range(12), schedule(share), strict=False)]
        assert times.skip_fields(due, carried)["time"] == pytest.approx(0.6, abs=0.1)
    fields = times.fields(times.streams["default"])
    assert fields["time"] == fields["time_median"] == pytest.approx(0.6)
    assert fields["time_read"] == pytest.approx(7 / 11)


def test_estimates_and_flags_are_held_against_the_truth() -> None:
    series = Series(error=[0.0, 0.05, 0.3, 0.4, 0.08], estimate=[0.0, 0.1, 0.2, 0.5, 0.11])
    series.stale = [True, False, True, False, True]
    made = quality_fields(series)
    assert made["estimate_rank"] == pytest.approx(1.0)
    assert (made["stale_caught"], made["stale_false"]) == (0.5, 0.5)
    assert quality_fields(Series(error=[0.0, 0.1]))["stale_caught"] is None
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 1, 1], [4, 3, 2, 1]) is None


def test_chosen_tokens_are_the_most_wrong_ones() -> None:
    forced = torch.tensor([True, False, False, False])
    context = GateContext("frame", "frame", 0, torch.zeros(1), protected=forced)
    chosen = Chosen(torch.tensor([0.0, 1.0, 3.0, 2.0]), 2)
    assert chosen.select(torch.zeros(1, 4), context).index.tolist() == [[0, 2]]


def test_average_precision_is_that_of_each_contenders_outputs(backbone: Backbone) -> None:
    head = Head(
        lambda tokens, size: (tuple(tokens.shape), size), lambda found, size: float(len(found))
    )
    plan = VideoPlan(backbone, timed=False)
    made = measure(plan, open_footage("stress:still", 3, f"{SIZE[0]}x{SIZE[1]}"), head)
    assert {row.map50 for row in made.rows} == {3.0}


@pytest.mark.parametrize(
    ("text", "name", "config"),
    [
        ("fast:TopFraction(0.12)", "fast:TopFraction(0.12)", Config.fast(TopFraction(0.12))),
        ("busy=fast:TopR(r=8),max_age=32", "busy", Config.fast(TopR(8), max_age=32)),
        ("exact", "exact", Config.exact()),
        ("paper:TopR(4)", "paper:TopR(4)", Config.paper(TopR(4))),
        ("fast,fallback=False", "fast,fallback=False", Config.fast(fallback=False)),
    ],
)
def test_configs_are_read_from_short_texts(text: str, name: str, config: Config) -> None:
    assert parse_config(text) == (name, config)


def test_a_config_may_be_a_file_or_the_former_default(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'preset = "fast"\nmax_age = 9\n[policy]\npolicy = "TopR"\nr = 3\n'
    )
    name, config = parse_config(str(tmp_path / "mine.toml"))
    assert (name, config) == ("mine", Config.fast(TopR(3), max_age=9))
    name, config = parse_config("former")
    assert (name, config.policy) == ("former", NoiseThreshold())
    assert plain_config(TopR(3)).max_age is None


@pytest.mark.parametrize(
    "text", ["slow:TopR(3)", "fast:TopX(3)", "fast:TopR(", "fast:__import__('os')", "no.toml"]
)
def test_a_text_that_is_no_config_says_so(text: str) -> None:
    with pytest.raises(EventfulError):
        parse_config(text)


def frames_of(name: str, frames: int = 12, **options: Any) -> Tensor:
    return torch.stack(list(StressClip(name, frames, (48, 80), **options)))


@pytest.mark.parametrize("name", NAMES)
def test_stress_clips_are_deterministic(name: str) -> None:
    first = frames_of(name, 6)
    assert (first.shape, first.dtype) == ((6, 3, 48, 80), torch.uint8)
    assert torch.equal(first, frames_of(name, 6))
    assert not torch.equal(first, frames_of(name, 6, seed=1))
    assert StressClip(name).about
    base = torch.randint(0, 256, (3, 30, 50), dtype=torch.uint8)
    assert frames_of(name, 2, base=base).shape == (2, 3, 48, 80)


def test_still_and_noise() -> None:
    still, noise = frames_of("still"), frames_of("noise")
    assert (still == still[0]).all()
    grain = (noise.float() - still.float()).std(0)
    assert 1.5 < float(grain.mean()) < 3.5


def test_repeat_stores_every_frame_twice() -> None:
    frames = frames_of("repeat", 9)
    assert len(frames) == 9
    for k in range(4):
        assert torch.equal(frames[2 * k], frames[2 * k + 1])
        assert not torch.equal(frames[2 * k], frames[2 * k + 2])


def test_a_pan_is_under_way_at_the_first_frame() -> None:
    frames = frames_of("pan", 20).float()
    changes = [float((frames[t + 1] - frames[t]).abs().mean()) for t in range(19)]
    assert min(changes) > 0.5 * max(changes) > 0
    shift = round(80 * 0.008 * 10)
    moved = (frames[10][..., : 80 - shift] - frames[0][..., shift:]).abs().mean()
    assert float(moved) < 0.5 * float((frames[10] - frames[0]).abs().mean())


def test_walking_moves_the_whole_picture() -> None:
    frames = frames_of("walk", 8).float()
    assert all(float((b - a).abs().mean()) > 0.5 for a, b in itertools.pairwise(frames))


def test_exposure_follows_its_curve() -> None:
    frames = frames_of("exposure", DIMMING + 10).float()
    for t in (0, 10, 25, DIMMING, DIMMING + 9):
        gain = 1 - (1 - DARKEST) * min(t / DIMMING, 1)
        assert float((frames[t] - gain * frames[0]).abs().max()) <= 1.0


def test_lights_go_off_and_scenes_are_cut_at_once() -> None:
    for name in ("lights-off", "cut"):
        frames = frames_of(name, 12).float()
        changes = [float((frames[t + 1] - frames[t]).abs().mean()) for t in range(11)]
        assert changes[5] > 5 * max(changes[:5] + changes[6:])


def test_only_the_cursor_moves() -> None:
    size = (48, 80)
    frames, still = frames_of("cursor"), frames_of("still")[0]
    for t, frame in enumerate(frames):
        top, left, bottom, right = cursor_box(t, size)
        outside = torch.ones(size, dtype=torch.bool)
        outside[top:bottom, left:right] = False
        assert torch.equal(frame[:, outside], still[:, outside])
    assert not torch.equal(frames[0], frames[3])


def test_flicker_is_periodic_and_everywhere() -> None:
    means = frames_of("flicker", 32).float().mean((1, 2, 3))
    assert float(means.max() / means.min()) > 1.08


def test_key_frames_pop_and_the_rest_stays() -> None:
    base = (frames_of("still", 1)[0]).clone()
    frames = frames_of("keyframes", 2 * KEY_EVERY, base=base).float()
    changes = [float((b - a).abs().mean()) for a, b in itertools.pairwise(frames)]
    pop = changes.pop(KEY_EVERY - 1)
    moving = float((frames[3] != frames[2]).any(0).float().mean())
    assert pop > 2 * max(changes)
    assert moving < 0.5  # blocks that do not change are repeated exactly


def test_an_object_enters_a_still_scene() -> None:
    frames, still = frames_of("enter", 30), frames_of("still", 1)[0]
    assert torch.equal(frames[0], still)
    changed = (frames != still).any(1).float().mean((1, 2))
    assert changed[-1] > changed[15] > 0


def test_scenes_have_the_spectrum_of_natural_images() -> None:
    picture = StressClip("still", 1, (256, 256))
    grey = next(iter(picture)).float().mean(0)
    power = torch.fft.fft2(grey - grey.mean()).abs().square()
    y = torch.fft.fftfreq(256)[:, None]
    f = (y.square() + torch.fft.fftfreq(256)[None].square()).sqrt()
    bands = [(2 ** -(k + 1), 2**-k) for k in range(2, 6)]
    levels = [float(power[(f >= low) & (f < high)].mean().log2()) for low, high in bands]
    slope = (levels[-1] - levels[0]) / (len(bands) - 1)  # per octave
    assert 1.4 < slope < 3.2  # power 1/f^2 is 2


def test_an_unknown_stress_clip_names_a_close_one() -> None:
    with pytest.raises(ConfigError, match="'pan'"):
        StressClip("pann")


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    return [
        *("bench", "video", "stress:cursor", "--model", "test_vit", "--size", "48x80"),
        *("--frames", "8", "--no-compile", "--config", "top=fast:TopFraction(0.1)"),
        *("--out", str(tmp_path / "out")),
    ]


def test_the_command_prints_json_and_writes_files(here, arguments, tmp_path: Path) -> None:  # noqa: F811
    done = here(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["contender"] for row in rows} >= {"dense", "default", "top", "skip", "oracle"}
    assert all(row["commit"] is not None and row["torch"] for row in rows)
    stored = json.loads((tmp_path / "out" / store.JSON).read_text())
    assert stored["rows"] == rows
    with (tmp_path / "out" / store.CSV).open() as file:
        table = list(csv.DictReader(file))
    assert [row["contender"] for row in table] == [row["contender"] for row in rows]
    assert "by_frame" not in table[0]
    (tmp_path / "video").mkdir()
    (tmp_path / "out").rename(tmp_path / "video/mine")
    page = videos(read_videos(tmp_path))
    assert "| stress-cursor, 48x80, 8 frames | dense | 100.0% | 100.0% | 100.0% |" in page
    assert page.count("\n|  | ") == len(rows) - 1
    (tmp_path / "video/mine").rename(tmp_path / "out")
    assert (tmp_path / "out/stress-cursor.png").stat().st_size > 10_000


def test_the_command_prints_a_table(here, arguments) -> None:  # noqa: F811
    done = here(*arguments, "--no-time")
    assert done.returncode == 0, done.stderr
    for word in ("default", "oracle", "a small cursor", "updated"):
        assert word in done.stdout
    assert "\nskip-time" not in done.stdout.replace("\n ", "\n")


def test_labels_and_a_head_give_average_precision(here, tmp_path: Path) -> None:  # noqa: F811
    from eventful.models.anchor_free import PointHead, PointHeadConfig

    data = miniatures.mot(tmp_path / "mot", frames=3)
    sequence = next(p.parent for p in sorted((data / "val").glob("*/seqinfo.ini")))
    head = PointHead(PointHeadConfig(dim=64, patch=16))
    torch.save({"head": head.state_dict(), "about": {}}, tmp_path / "head.pt")
    words = ["bench", "video", "--labels", sequence, "--model", "test_vit", "--size", "48x64"]
    words += ["--frames", "3", "--no-time", "--json", "--head"]
    done = here(*words, tmp_path / "head.pt")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert all(0 <= row["map50"] <= 1 for row in rows)
    assert rows[0]["clip"] == sequence.name
    assert "trains a head" in here(*words, tmp_path / "none.pt").stderr


def test_names_must_tell_contenders_apart(here, arguments) -> None:  # noqa: F811
    done = here(*arguments, "--config", "dense=fast:TopR(3)")
    assert done.returncode == 2
    assert "NAME=SPEC" in done.stderr


def test_clips_of_one_name_are_told_apart(here, arguments, tmp_path: Path) -> None:  # noqa: F811
    done = here(*arguments, "stress:cursor", "--no-time", "--json")
    assert {row["clip"] for row in json.loads(done.stdout)} == {"stress-cursor", "stress-cursor-2"}
    assert (tmp_path / "out/stress-cursor-2.png").exists()


def test_a_page_without_results_says_how_to_get_some(tmp_path: Path) -> None:
    assert videos(read_videos(tmp_path)) == EMPTY


def test_a_clip_must_be_named(here) -> None:  # noqa: F811
    done = here("bench", "video", "--model", "test_vit")
    assert done.returncode == 2
    assert "stress:pan" in done.stderr


def tokens_of(path: Path) -> str:
    """A ViT of transformers in a folder, with weights; its first output is its tokens."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        image_size=64, patch_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.ViTModel(config).save_pretrained(path)
    return f"hf:{path}"


def test_a_model_of_another_library_is_measured_at_its_own_size(tmp_path: Path) -> None:
    loaded = load_backbone(tokens_of(tmp_path), None)
    assert not loaded.random
    rows = by_name(run(loaded, "stress:enter", size=""))
    assert list(rows) == ["dense", "default", "skip", "skip-carried", "oracle"]
    assert {(row.size, row.tokens) for row in rows.values()} == {("64x64", 17)}
    assert rows["dense"].error_worst == 0 < rows["default"].error_worst


def test_an_output_without_a_row_per_token_is_neither_carried_nor_judged_by_token(
    tmp_path: Path,
) -> None:
    loaded = load_backbone(tokens_of(tmp_path), None)
    pooled = SizedBackbone("pooled", Pooled(loaded.model), size=(64, 64))
    plan = VideoPlan(pooled, compiled=False)
    rows = by_name(measure(plan, open_footage("stress:enter", 6)))
    assert list(rows) == ["dense", "default", "skip", "skip-time"]
    assert all(row.ms > 0 for row in rows.values())


class Pooled(torch.nn.Module):
    """One vector of each frame."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, frame: Tensor) -> Tensor:
        return self.model(frame).mean(dim=1)


def test_models_that_cannot_be_measured_say_so(here, tmp_path: Path) -> None:  # noqa: F811
    done = here("bench", "video", "stress:enter", "--model", "actions")
    assert done.returncode == 2
    assert "actions takes clips" in done.stderr
    done = here("bench", "video", "stress:enter", "--model", "timm:resnet18")
    assert done.returncode == 2
    assert "no blocks that can be made eventful" in done.stderr
    (tmp_path / "head.pt").write_bytes(b"")
    words = ("bench", "video", "stress:enter", "--model", tokens_of(tmp_path))
    done = here(*words, "--head", tmp_path / "head.pt")
    assert done.returncode == 2
    assert "--head takes the tokens of a model of timm" in done.stderr
