"""Clips of `eventful bench video`: they are read by `eventful.read`, at the model's size."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import eventful
import miniatures
import videos
from commands import here  # noqa: F401 - a fixture
from eventful.bench.video.footage import Footage, fitted_size, open_footage
from eventful.bench.video.model import Prepare
from eventful.bench.video.times import time_reading
from eventful.errors import ConfigError, DamagedMediaError, MissingFileError
from eventful.video.normalization import IMAGENET
from eventful.video.stress import StressClip

pytest.importorskip("av")
Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def film(tmp_path: Path) -> Path:
    return videos.pan(tmp_path / "film.mp4", 5)


def test_sizes_are_whole_patches() -> None:
    assert fitted_size((432, 768), "", (14, 14), 518) == (294, 518)
    assert fitted_size((432, 768), "448", (14, 14), 518) == (448, 448)
    assert fitted_size((432, 768), "longest:448", (14, 14), 518) == (252, 448)
    assert fitted_size((432, 768), "252x448", (14, 14), 518) == (252, 448)
    with pytest.raises(ConfigError, match="252x448"):
        fitted_size((432, 768), "256x450", (14, 14), 518)
    with pytest.raises(ConfigError, match="HxW"):
        fitted_size((432, 768), "big", (14, 14), 518)


def test_clips_are_files_folders_and_stress_clips(tmp_path: Path) -> None:
    for t in range(3):
        miniatures.write_image(tmp_path / f"shot/{t:03}.jpg", miniatures.picture(10 * t))
    folder = open_footage(str(tmp_path / "shot"), 2)
    assert (folder.name, folder.size, len(list(folder.pictures()))) == ("shot", miniatures.SIZE, 2)
    assert len(list(folder.pictures())) == 2  # read twice
    miniatures.write_video(tmp_path / "film.mp4", 5)
    assert len(list(open_footage(str(tmp_path / "film.mp4")).pictures())) == 5
    repeat = open_footage(f"stress:repeat:{tmp_path / 'film.mp4'}", 6)
    frames = list(repeat.pictures())
    assert (repeat.name, repeat.size) == ("stress-repeat-film", miniatures.SIZE)
    assert [int(frame.float().mean()) for frame in frames] == pytest.approx(
        [miniatures.grey(t // 2) for t in range(6)], abs=2
    )
    still = open_footage(f"stress:still:{tmp_path / 'shot/001.jpg'}", 2)
    assert (still.name, still.size) == ("stress-still-001", miniatures.SIZE)
    assert int(next(still.pictures()).float().mean()) == pytest.approx(miniatures.grey(10), abs=2)


def test_footage_can_be_cut_short() -> None:
    footage = Footage("a", "", (1, 1), lambda size, how: iter([torch.zeros(1, 3, 1, 1)] * 5))
    assert len(list(footage.first(2).pictures())) == 2
    assert len(list(footage.first(None).pictures())) == 5


def test_frames_in_memory_are_those_of_the_reader(film: Path) -> None:
    """Times of reading are those of the frames that the contenders get."""
    size, footage = (48, 80), open_footage(str(film))
    read = list(eventful.read(film, size, fit="stretch"))
    prepare = Prepare(size, *IMAGENET)
    held = [prepare(frame) for frame in footage.pictures(size)]
    assert footage.size == videos.SIZE
    assert len(read) == len(held) == 5
    assert all(torch.equal(a, b) for a, b in zip(held, read, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(footage.read(size, None), read, strict=True))
    assert len(list(time_reading(footage.first(3), prepare))) == 3


def test_generated_frames_are_fitted_as_pictures_are(tmp_path: Path) -> None:
    footage, clip = open_footage("stress:pan", 2, "48x80"), StressClip("pan", 2, (48, 80))
    assert all(torch.equal(a, b) for a, b in zip(footage.pictures(), clip, strict=True))
    size, path = (32, 48), tmp_path / "first.png"
    Image.fromarray(next(iter(clip)).permute(1, 2, 0).numpy()).save(path)
    (read,) = eventful.read(path, size, fit="stretch")
    assert torch.equal(next(footage.read(size, None)), read)


def test_a_missing_clip_says_what_a_clip_is(tmp_path: Path) -> None:
    for name in ("nowhere.mp4", "camera:0", "stress:pan:nowhere.jpg"):
        with pytest.raises(MissingFileError, match=r"stress:NAME"):
            open_footage(name)
    with pytest.raises(MissingFileError, match="no images"):
        open_footage(str(tmp_path))


def test_a_list_of_sources_is_no_clip(film: Path, tmp_path: Path) -> None:
    (tmp_path / "all.streams").write_text(f"{film.name}\n")
    with pytest.raises(ConfigError, match="each of them"):
        open_footage(str(tmp_path / "all.streams"))


def test_frames_that_do_not_decode_are_not_left_out(tmp_path: Path) -> None:
    folder = videos.images(tmp_path / "shot", 4)
    (folder / "2.png").write_bytes(b"no image")
    footage = open_footage(str(folder))
    for clip in (footage, footage.first(3)):
        with pytest.raises(DamagedMediaError, match="do not decode"):
            list(clip.pictures())


@pytest.mark.parametrize("name", ["000001 (copy).jpg", "2.jpg"])
def test_pictures_beside_labelled_frames_are_refused(here, tmp_path: Path, name: str) -> None:  # noqa: F811
    sequence = miniatures.mot(tmp_path / "mot [15]", frames=3) / "val/C-seq"
    miniatures.write_image(sequence / "img1" / name, miniatures.picture(0))
    done = here("bench", "video", "--labels", sequence, "--model", "test_vit")
    assert done.returncode != 0
    assert "named by a number" in done.stderr


def test_reading_stops_with_the_clip(film: Path) -> None:
    assert len(list(open_footage(str(film)).first(1).pictures())) == 1
    assert all(t.name != "eventful.read" for t in threading.enumerate())
