"""`eventful demo`: the embedded detector on the embedded clip."""

from __future__ import annotations

import csv
import json

import pytest

from eventful.paper.data import open_dataset
from eventful.pipeline import demo
from eventful.video.world import CLASSES

av = pytest.importorskip("av")
pytest.importorskip("supervision")
FRAMES = 5


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    from typer.testing import CliRunner

    from eventful.cli.app import app

    out = tmp_path_factory.mktemp("demo") / "demo"
    done = CliRunner().invoke(app, ["demo", "--frames", str(FRAMES), "--out", str(out), "--json"])
    assert done.exit_code == 0, done.stderr
    return out, json.loads(done.stdout)


def test_the_clip_has_labels_of_every_frame():
    video, labels = demo.clip()
    with av.open(str(video)) as container:
        frames = sum(1 for _ in container.decode(video=0))
    found = open_dataset(labels)
    assert found.classes == CLASSES
    assert len(found.videos) == 1
    assert frames == len(found.videos[0].boxes) == 96 > demo.FRAMES
    assert any(not box.ignore for box in found.videos[0].boxes[95])


def test_what_is_in_the_folder(made):
    out, _ = made
    with av.open(str(out / demo.VIDEO)) as container:
        assert sum(1 for _ in container.decode(video=0)) == FRAMES
    assert (out / demo.PICTURE).read_bytes()[:4] == b"\x89PNG"
    assert "<html" in (out / "report.html").read_text()
    assert len((out / "results.jsonl").read_text().splitlines()) == FRAMES
    assert len(list(csv.reader((out / "frames.csv").open()))) == FRAMES + 1


def test_both_models_find_the_labelled_objects(made):
    _, summary = made
    assert summary["frames"] == summary["scored_frames"] == FRAMES
    scores = summary["accuracy"]["mAP50"]
    assert scores["dense"] > 0.6
    assert scores["eventful"] > 0.6
    assert 0 < summary["operations"] < 1
    assert 0 < summary["error"] < 0.3
    assert summary["memory"] > 0
    assert summary["speedup"] is not None


def test_the_folder_is_replaced(made):
    from typer.testing import CliRunner

    from eventful.cli.app import app

    out, _ = made
    again = CliRunner().invoke(app, ["demo", "--frames", "1", "--out", str(out), "--json"])
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout)["frames"] == 1
