"""Pictures of updates: what they show is what the stream did, and they can be played."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import eventful
import miniatures
import tiny_models
from clips import moving_square
from eventful import Config, TopR
from eventful.cli.app import app
from eventful.cli.visualize_run import open_frames
from eventful.errors import ConfigError, EventfulError, FrameError, MalformedDataError
from eventful.models.vitdet import Detections
from eventful.surgery.libraries import load
from eventful.video import charts
from eventful.video.budgets import Budget, budget_at, parse_budget, parse_schedule
from eventful.video.charts import spread
from eventful.video.overlay import UpdateView, find_gate, mask_picture, paper_gate
from eventful.video.scene import CAPTION, MARGIN, UpdateStep, scene, with_boxes
from eventful.video.sink import VideoSink

pytest.importorskip("matplotlib")
pytest.importorskip("av")


def invoke(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout  # progress is on stderr


def decoded(path: Path) -> list[torch.Tensor]:
    with load("av").open(str(path)) as container:
        return [
            torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
            for frame in container.decode(video=0)
        ]


def pixels(path: Path) -> torch.Tensor:
    import numpy as np

    with load("PIL.Image").open(path) as picture:
        return torch.from_numpy(np.array(picture.convert("RGB")))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A detector on a MOT sequence, with a budget that falls."""
    folder = tmp_path_factory.mktemp("made")
    sequence = miniatures.mot(folder / "mot", frames=6) / "val" / "C-seq"
    model = tiny_models.write(tiny_models.detector(classes=1), folder / "d.safetensors")
    out = folder / "out"
    arguments = ["--model", str(model), "--preset", "paper", "--budget", "0:8,3:2", "--score", "0"]
    text = invoke("visualize", str(sequence), *arguments, "--out", str(out), "--json")
    return out, json.loads(text)


def test_everything_is_written(made: tuple[Path, dict]) -> None:
    out, summary = made
    names = ["updates.mp4", "sheet.png", "operations.png", "steps.csv"]
    assert [Path(file).name for file in summary["files"]] == names
    assert summary["gate"] == "backbone.blocks.1.qkv"  # it has two blocks, not three
    frames = decoded(out / "updates.mp4")
    assert len(frames) == 6
    assert not frames[1].equal(frames[5])
    for name in names[1:3]:
        assert pixels(out / name).float().std() > 10  # not an empty page


def test_the_steps_follow_the_budget(made: tuple[Path, dict]) -> None:
    rows = list(csv.DictReader((made[0] / "steps.csv").open()))
    assert [int(row["updated"]) for row in rows] == [16, 8, 8, 2, 2, 2]
    assert [int(row["flush"]) for row in rows] == [1, 0, 0, 0, 0, 0]
    costs = [int(row["macs"]) for row in rows]
    assert costs[0] == int(rows[0]["dense_macs"])
    assert costs[0] > costs[1] == costs[2] > costs[3] == costs[4]


def test_a_timm_model_on_a_made_up_clip(tmp_path: Path) -> None:
    text = invoke(
        *("visualize", "synthetic", "--model", "timm:vit_tiny_patch16_224"),
        *("--size", "longest:64", "--frames", "3", "--r", "25%", "--gate", "frame"),
        *("--out", str(tmp_path), "--json"),
    )
    assert json.loads(text)["gate"].endswith("frame")
    rows = list(csv.DictReader((tmp_path / "steps.csv").open()))
    assert [int(row["tokens"]) for row in rows] == [1 + 2 * 4] * 3  # 640 x 360 became 64 x 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "timm:no_such_model"], "no model"),
        (["--model", "detector.pth"], "weights convert"),
        (["--preset", "paper"], "needs --r"),
        (["--r", "4", "--h", "1"], "exclude each other"),
        (["--budget", "5:4"], "starts at frame 0"),
        (["--gate", "blocks.99.qkv", "--r", "4"], "no gate"),
    ],
)
def test_what_cannot_be_shown_is_told(arguments: list[str], message: str, tmp_path: Path) -> None:
    base = ["visualize", "synthetic", "--out", str(tmp_path), "--frames", "2", "--size", "32"]
    with pytest.raises(EventfulError, match=message):
        CliRunner().invoke(
            app,
            [*base, "--model", "timm:vit_tiny_patch16_224", *arguments],
            catch_exceptions=False,
        )


def test_views_are_of_the_gate_that_is_asked_for() -> None:
    model = tiny_models.detector().eval()
    stream = eventful.Stream(eventful.convert(model, Config.paper(TopR(3))), maps=True)
    for frame in moving_square(3, (64, 64)):
        stream(frame)
    record = stream.last
    assert record is not None
    chosen = find_gate(record, "blocks.1.mlp")
    view = UpdateView.of(frame, record, chosen)
    kept = record.gates[chosen].mask[0]
    layout = next(iter(record.layouts.values()))
    assert view.mask.flatten().equal(kept[layout.prefix :])
    assert view.cut(2, 1).mask.equal(view.mask[:2, :1])
    assert find_gate(record, None) == next(iter(record.gates))
    assert paper_gate(record).endswith(".qkv")
    with pytest.raises(ConfigError, match="several gates"):
        find_gate(record, "qkv")


def test_updated_tokens_keep_their_colours_and_the_others_are_pale() -> None:
    """A dark frame under a dark mask cannot be seen."""
    frame = torch.tensor([0.2, 0.0, 0.1])[:, None, None].expand(3, 8, 8)
    view = UpdateView(frame, torch.zeros(2, 2), torch.tensor([[1, 0], [0, 0]]))
    shown = mask_picture(view)
    assert shown[:, 1, 1] == pytest.approx([0.2, 0.0, 0.1])
    assert shown[0, 6, 6] == shown[1, 6, 6] == shown[2, 6, 6]
    assert 0.4 <= shown[0, 6, 6] < 0.7
    lighter = mask_picture(UpdateView(frame + 0.5, view.error, view.mask))
    assert lighter[0, 6, 6] > shown[0, 6, 6] + 0.2  # what was not updated is still told apart


def test_the_plain_frame_is_shown_beside_the_rest(monkeypatch, tmp_path: Path) -> None:
    frame, prediction = torch.rand(3, 32, 48), torch.zeros(3, 32, 48)
    view = UpdateView(frame, torch.ones(2, 3), torch.zeros(2, 3))
    step = UpdateStep(0, view, prediction, 6, 6, 2_400_000, 4_800_000, flush=False)
    drawn: list[torch.Tensor] = []
    monkeypatch.setattr(charts, "_picture", lambda axis, picture: drawn.append(picture))
    charts.update_sheet([step, step], tmp_path / "sheet.png", gate="frame", prediction="features")
    assert [picture.equal(frame) for picture in drawn] == [True, False, False] * 2
    shown = scene([step], 0, 1.0, width=48, gate="frame")
    top, left = MARGIN + CAPTION, MARGIN
    assert (shown[:, top : top + 32, left : left + 48] - frame).abs().max() < 0.01


def test_boxes_are_drawn_where_they_are() -> None:
    blank = torch.zeros(3, 64, 96)
    found = Detections(
        torch.tensor([[20.0, 30.0, 60.0, 50.0]]), torch.ones(1), torch.zeros(1).long()
    )
    shown = with_boxes(blank, found, [""])
    touched = shown.amax(dim=0).nonzero()
    assert touched.min(dim=0).values.tolist() == [30, 20]
    assert touched.max(dim=0).values.tolist() == [50, 60]
    assert shown[:, 40, 40].sum() == 0


def test_schedules() -> None:
    found = parse_schedule("0:512, 40:128,80:25%")
    assert found == (Budget(0, r=512), Budget(40, r=128), Budget(80, fraction=0.25))
    assert [budget_at(found, t) for t in (0, 39, 40, 400)] == [found[0], *found[:2], found[2]]
    assert budget_at((), 3) is None
    for wrong in ("512", "0:many", "0:5,0:6", "0:5,9:4,3:2", "0:300%", "0:-3"):
        with pytest.raises(ConfigError):
            parse_schedule(wrong)
    with pytest.raises(ConfigError, match="percentage"):
        parse_budget("few")


def test_a_sink_repeats_odd_borders_and_keeps_one_size(tmp_path: Path) -> None:
    with VideoSink(tmp_path / "a.mp4", fps=12.5) as sink:
        for t in range(3):
            sink.write(torch.full((3, 33, 65), t / 4))
        with pytest.raises(FrameError, match="34 x 66"):
            sink.write(torch.zeros(3, 32, 32))
    frames = decoded(tmp_path / "a.mp4")
    assert [tuple(frame.shape) for frame in frames] == [(3, 34, 66)] * 3
    assert frames[2].float().mean() == pytest.approx(127.5, abs=4)


def test_a_sheet_spreads_over_the_steady_frames() -> None:
    view = UpdateView(torch.zeros(3, 2, 2), torch.zeros(1, 1), torch.zeros(1, 1))
    steps = [UpdateStep(t, view, view.frame, 1, 4, 1, 2, flush=t == 0) for t in range(11)]
    assert [step.index for step in spread(steps, 4)] == [1, 4, 7, 10]
    assert [step.index for step in spread(steps[:3], 4)] == [1, 2]


def test_evaluate_from_the_command_line(tmp_path: Path) -> None:
    data = miniatures.mot(tmp_path / "mot", frames=3)
    model = tiny_models.write(tiny_models.detector(classes=1), tmp_path / "d.safetensors")
    common = ["--data", str(data), "--weights", str(model), "--out", str(tmp_path / "run")]
    arguments = ["evaluate", "vitdet", *common, "--preset", "dense", "--preset", "fast", "--r", "4"]
    report = json.loads(invoke(*arguments, "--json"))
    assert [row["key"] for row in report["rows"]] == ["base-model", "fast-r4"]
    again = invoke(*arguments)
    assert "mAP50, COCO" in again
    assert "mAP50, FGFA" in again
    listed = json.loads(invoke("evaluate", "list", "--json"))
    assert {"table-1", "table-2", "padding"} <= {row["name"] for row in listed}
    assert "Table C" in invoke("evaluate", "list")
    with pytest.raises(ConfigError, match="needs --data: ImageNet VID"):
        CliRunner().invoke(app, ["evaluate", "run", "table-1"], catch_exceptions=False)


def test_images_are_taken_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for t in range(11):
        miniatures.write_image(tmp_path / f"{t}.JPG", miniatures.picture(t))
    frames, rate = open_frames(str(tmp_path), 0, 11)
    greys = [int(frame.float().mean().round()) for frame in frames]
    assert greys == sorted(greys)
    assert (len(greys), rate) == (11, 15.0)


def test_a_damaged_sequence_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    sequence = miniatures.mot(tmp_path) / "val/C-seq"
    assert open_frames(str(sequence), 0, 2)[1] == 30.0
    info = sequence / "seqinfo.ini"
    info.write_text(info.read_text().replace("frameRate=30", "frameRate=fast"))
    assert open_frames(str(sequence), 0, 2)[1] == 15.0
    info.write_text("no ini")
    with pytest.raises(MalformedDataError, match=r"seqinfo.ini, line 1: expected an ini file"):
        open_frames(str(sequence), 0, 2)


def test_only_json_reaches_stdout(tmp_path: Path) -> None:
    arguments = ["synthetic", "--model", "timm:vit_tiny_patch16_224", "--size", "64"]
    words = ["visualize", *arguments, "--frames", "3", "--out", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert json.loads(done.stdout)["frames"] == 3


def test_what_cannot_be_drawn_is_said_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for arguments, message in (
        (["--out", str(tmp_path / "file/sub")], "cannot be written to"),
        (["--out", str(tmp_path), "--preset", "papr"], "no preset 'papr'"),
    ):
        with pytest.raises(ConfigError, match=message):
            CliRunner().invoke(app, ["visualize", "synthetic", *arguments], catch_exceptions=False)
