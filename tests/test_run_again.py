"""`eventful run` in a folder that holds a run: what is there stays, and belongs to its source."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import tiny_models
import videos
from commands import here  # noqa: F401
from eventful.models.saving import save_model
from eventful.pipeline import results
from eventful.pipeline.loop import run
from eventful.pipeline.outputs import Observer
from eventful.pipeline.predictions import read_output
from eventful.pipeline.settings import RunSettings
from eventful.video.frame import Frame
from eventful.video.source import read_image
from runs import PLAIN, WORLD, detector  # noqa: F401

pytest.importorskip("av")
pytest.importorskip("supervision")


def test_a_run_that_is_complete_stays_as_it_is(detector: str, tmp_path: Path) -> None:
    settings = RunSettings(out=tmp_path / "run", frames=3, score=0.0, video=False)
    before = run(detector, [WORLD], settings).summary
    report = (tmp_path / "run" / "report.html").read_bytes()
    after = run(detector, [WORLD], replace(settings, resume=True)).summary
    for name in ("frames", "accuracy", "scored_frames", "memory", "report"):
        assert after[name] == before[name], name
    assert before["memory"] > 0
    assert before["scored_frames"] == 3
    assert (tmp_path / "run" / "report.html").read_bytes() == report


def test_scores_of_a_dense_run_are_of_all_frames(detector: str, tmp_path: Path) -> None:
    settings = replace(PLAIN, out=tmp_path / "run", dense=True, frames=2)
    run(detector, [WORLD], settings)
    after = run(detector, [WORLD], replace(settings, frames=4, resume=True)).summary
    assert after["scored_frames"] == after["frames"] == 4


def test_sources_of_one_name_keep_their_memory_in_another_order(
    detector: str, tmp_path: Path
) -> None:
    names = [str(tmp_path / part / "v.mp4") for part in "cd"]
    for number, name in enumerate(names):
        Path(name).parent.mkdir()
        videos.pan(Path(name), 6, size=(64, 96), step=(1 + number, 2))
    settings = replace(PLAIN, out=tmp_path / "run", frames=3)
    run(detector, names, settings)
    whole = replace(settings, out=tmp_path / "whole", frames=6)
    run(detector, names, whole)
    done = run(detector, names[::-1], replace(settings, frames=6, resume=True))
    assert all(about["resumed"] for about in done.summary["sources"].values())

    def found(folder: Path) -> dict[tuple[str, int], list]:
        lines = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
        return {(line["source"], line["frame"]): line["detections"] for line in lines}

    assert found(tmp_path / "run") == found(tmp_path / "whole")


def test_parts_behind_one_that_is_gone_are_not_written_over(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    rows = [{"source": "a", "frame": n, "seconds": None, "labels": []} for n in range(3)]
    for row in rows:
        writer = results.ParquetWriter(tmp_path / "results")
        writer.write(row, {})
        writer.close()
    (tmp_path / "results" / "part-00001.parquet").unlink()
    writer = results.ParquetWriter(tmp_path / "results")
    writer.write({**rows[0], "frame": 3}, {})
    writer.close()
    names = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert names == [f"part-0000{n}.parquet" for n in (2, 3, 4)]
    assert results.last_frames(tmp_path, "parquet") == {"a": 3}


def test_arrays_of_sources_that_take_turns_share_few_files(tmp_path: Path) -> None:
    writer = results.ArrayWriter(tmp_path / "arrays")
    for frame in range(20):
        for source in "ab":
            row = {"source": source, "frame": frame, "seconds": None}
            writer.write(row, {"features": torch.full((2, 3), float(frame))})
    writer.close()
    parts = sorted((tmp_path / "arrays").iterdir())
    assert len(parts) == 2
    with np.load(parts[1]) as part:
        assert str(part["source"]) == "b"
        assert part["frame"].tolist() == list(range(20))
        assert part["features"][:, 0, 0].tolist() == list(range(20))
    assert results.last_frames(tmp_path, "npz") == {"a": 19, "b": 19}


def test_a_damaged_summary_can_be_overwritten(detector: str, tmp_path: Path) -> None:
    settings = replace(PLAIN, out=tmp_path / "run", frames=1)
    run(detector, [WORLD], settings)
    (tmp_path / "run" / "run.json").write_text("{}")
    assert run(detector, [WORLD], replace(settings, overwrite=True)).status == "complete"


def test_videos_are_known_before_the_run_ends(detector: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    seen = []

    class Reads(Observer):
        def stepped(self, row, frames) -> None:
            seen.append(json.loads((out / "run.json").read_text())["sources"])

    run(detector, [WORLD], RunSettings(out=out, frames=1, report=False), observer=Reads())
    (about,) = seen[0].values()
    assert about["videos"]
    assert (out / about["videos"][0]).is_file()


def test_a_demo_does_not_replace_a_run(detector: str, tmp_path: Path, here) -> None:
    run(detector, [WORLD], replace(PLAIN, out=tmp_path / "run", frames=1))
    done = here("demo", "--out", tmp_path / "run", "--frames", "1")
    assert done.returncode == 2
    assert "no demo" in done.stderr


def test_frames_too_few_for_a_step_are_told(tmp_path: Path) -> None:
    path = tmp_path / "clips.safetensors"
    save_model(tiny_models.recogniser(), path)
    clip = videos.pan(tmp_path / "clip.mp4", 3, size=(64, 96), step=(1, 2))
    done = run(str(path), [str(clip)], replace(PLAIN, out=tmp_path / "run"))
    assert done.summary["lost"] == {"unused": 1}
    (about,) = done.summary["sources"].values()
    assert "a step takes 2" in about["notes"][0]


def test_pictures_of_16_bits_keep_their_range(tmp_path: Path) -> None:
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16)
    Image.fromarray(ramp).save(tmp_path / "8.png")
    Image.fromarray(ramp.astype(np.uint16) * 257).save(tmp_path / "16.png")
    assert torch.equal(read_image(tmp_path / "16.png"), read_image(tmp_path / "8.png"))


def test_queries_with_and_without_a_class_for_none() -> None:
    frame = Frame(torch.zeros(1, 3, 10, 10))
    logits = torch.tensor([[[2.0, -3.0, 1.0]]])
    output = {"logits": logits, "pred_boxes": torch.tensor([[[0.5, 0.5, 0.4, 0.4]]])}
    alone = read_output(output, frame, labels=True, classes=3).detections
    none = read_output(output, frame, labels=True, classes=2).detections
    assert float(alone.scores[0]) == pytest.approx(float(torch.tensor(2.0).sigmoid()))
    assert float(none.scores[0]) == pytest.approx(float(logits[0, 0].softmax(0)[0]))
