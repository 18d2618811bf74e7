"""The world as a dataset, and sets of videos written in the formats of the loaders."""

# ruff: noqa: F811  (fixtures come by import)

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny_models
from commands import here  # noqa: F401
from eventful.errors import ConfigError, MissingFileError
from eventful.paper.data import Box, Video, VideoSet, open_dataset, recognise
from eventful.paper.data.check import check
from eventful.paper.data.export import WRITERS, export
from eventful.paper.data.imagenet import NAMES
from eventful.paper.data.kept import FRAMES
from eventful.paper.data.world import Film
from eventful.video.world import ACTIONS, CAMERAS, CLASSES, World

STREET = "world:street?videos=2&frames=3&size=96x160&exposures=1"
CLIPS = "world:actions?videos=2&frames=5&size=64x96&exposures=1"


@pytest.fixture(scope="module")
def street() -> VideoSet:
    return open_dataset(STREET)


@pytest.fixture(scope="module")
def clips() -> VideoSet:
    return open_dataset(CLIPS)


class Grey:
    """Frames of one colour."""

    def __len__(self) -> int:
        return 2

    def __iter__(self):
        return iter(self.read(range(2)))

    def read(self, indices) -> torch.Tensor:
        return torch.full((len(indices), 3, 32, 32), 128, dtype=torch.uint8)


# --- Opening


def test_the_street_opens_as_a_set_for_detection() -> None:
    videos = open_dataset("world:street")
    assert (videos.format, videos.split, videos.task) == ("world", "val", "detection")
    assert videos.classes == CLASSES
    assert [video.frames.camera for video in videos][:6] == [*CAMERAS, "stand"]
    assert [video.frames.seed for video in videos] == list(range(20))
    assert all(isinstance(v.frames, World) and len(v) == 100 for v in videos)
    assert all(v.frames.size == (288, 512) and v.label is None for v in videos)


def test_the_actions_open_as_a_set_for_recognition() -> None:
    videos = open_dataset(Path("world:actions"))
    assert (videos.format, videos.task, videos.classes) == ("world", "action", ACTIONS)
    assert [video.label for video in videos] == [i % 16 for i in range(96)]
    assert [v.frames.action for v in videos][:16] == list(ACTIONS)
    assert [v.frames.camera for v in videos][:4] == ["stand", "hand", "pan", "stand"]
    assert all(len(v) == 32 and v.frames.size == (160, 160) for v in videos)
    assert all(video.boxes is None for video in videos)


def test_splits_have_other_seeds() -> None:
    first = {s: open_dataset("world:street", s)[0].frames.seed for s in ("val", "test", "train")}
    assert first == {"val": 0, "test": 100_000, "train": 2_000_000}
    with pytest.raises(MissingFileError, match="no split 'dev'; it has"):
        open_dataset("world:street", "dev")


def test_a_range_of_a_split_has_the_videos_of_the_whole() -> None:
    whole, part = open_dataset("world:actions"), open_dataset("world:actions?first=17&videos=3")
    assert part.videos == whole.videos[17:20]
    named = open_dataset("world:actions?first=17&videos=3&camera=walk&frames=4&size=32x48")
    assert [(v.frames.camera, v.label, len(v)) for v in named] == [
        ("walk", 1, 4), ("walk", 2, 4), ("walk", 3, 4),
    ]  # fmt: skip
    assert named[0].frames.size == (32, 48)


def test_names_of_videos_say_all_that_frames_depend_on() -> None:
    options = ("", "&frames=7", "&size=96x128", "&camera=cut", "&exposures=1", "&first=1")
    names = {open_dataset(f"world:street?videos=1{option}")[0].name for option in options}
    names |= {open_dataset("world:street?videos=1", "test")[0].name}
    assert len(names) == len(options) + 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("world:sea", "There is no world:sea; the generated sets are world:street and world:act"),
        ("world:street?speed=2", "'speed=2' is no option; those are videos, first"),
        ("world:street?videos", "'videos' is no option"),
        ("world:street?videos=0", "videos is a whole number from 1 up, not '0'"),
        ("world:street?first=-1", "first is a whole number from 0 up, not '-1'"),
        ("world:street?frames=some", "frames is a whole number from 1 up"),
        ("world:street?frames=2&frames=3", "frames is given twice"),
        ("world:street?size=288", "size is height x width, such as 288x512, not '288'"),
        ("world:street?size=8x8", "16 x 16 pixels"),
        ("world:street?camera=fly", "camera is one of stand, hand, pan, walk, cut"),
        ("world:street?exposures=2", "exposures is an odd number"),
        ("world:street?device=tpu", "device is cpu, cuda or cuda:0"),
        ("world:street?device=cuda:99", "there is no cuda:99 here; leave device out"),
        ("world:street?first=99999&videos=2", "val has 100,000 videos"),
    ],
)
def test_errors_say_what_to_do(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_dataset(name)


def test_it_is_found_by_name_alone() -> None:
    found = recognise(Path("world:street?videos=1"))
    assert found is not None
    assert found.name == "world"
    assert open_dataset("world:street?videos=1", format="world")[0].frames.seed == 0
    with pytest.raises(MissingFileError, match="world:street or world:actions"):
        open_dataset("no/such/folder")


def test_there_is_nothing_to_check() -> None:
    with pytest.raises(ConfigError, match=r"is generated.*data export world:street FOLDER"):
        check("world:street")
    with pytest.raises(ConfigError, match="There is no world:sea"):
        check("world:sea")


# --- Frames and boxes


def test_walking_equals_asking_and_what_the_world_says(street: VideoSet) -> None:
    video = street[1]
    walked = list(video)
    made = World(1, 3, "hand", (96, 160), exposures=1)
    for index, frame in enumerate(walked):
        assert torch.equal(frame.pixels, made.read([index])[0])
        truth = made.truth(index)
        assert [[b.x1, b.y1, b.x2, b.y2] for b in frame.boxes] == truth.boxes.tolist()
        assert [b.label for b in frame.boxes] == truth.labels.tolist()
        assert [b.track for b in frame.boxes] == truth.tracks.tolist()
        assert [b.ignore for b in frame.boxes] == truth.ignore.tolist()
    assert video.frame(2).boxes == walked[2].boxes
    assert len(video.boxes) == 3
    with pytest.raises(IndexError):
        video.boxes[3]


def test_a_frame_and_its_boxes_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[tuple[int, ...]] = []
    shot = World.shot

    def counted(self: World, indices) -> object:
        rendered.append(tuple(indices))
        return shot(self, indices)

    monkeypatch.setattr(World, "shot", counted)
    FRAMES.clear()
    video = open_dataset(STREET)[0]
    assert [frame.index for frame in video] == [0, 1, 2]
    assert rendered == [(0, 1, 2)]
    assert video.frame(1).boxes
    assert rendered == [(0, 1, 2)]
    alone = open_dataset(STREET)[0]
    assert alone.boxes[1] == video.boxes[1]
    assert rendered == [(0, 1, 2)]
    FRAMES.clear()
    assert open_dataset(STREET)[0].boxes[1] == video.boxes[1]
    assert rendered == [(0, 1, 2), (1,)]


def test_a_video_goes_to_another_process(street: VideoSet) -> None:
    street[0].frames.read([0])
    content = pickle.dumps(street)
    assert len(content) < 4000
    assert pickle.loads(content) == street == open_dataset(STREET)
    assert isinstance(pickle.loads(content)[0].frames, Film)


# --- Exports


def assert_same_boxes(found: VideoSet, videos: VideoSet, *, ignored: bool = True) -> None:
    assert [v.name for v in found] == [v.name for v in videos]
    for mine, theirs in zip(found, videos, strict=True):
        assert mine.boxes is not None
        assert theirs.boxes is not None
        assert len(mine) == len(theirs)
        for index in range(len(mine)):
            wanted = theirs.boxes[index]
            if not ignored:
                wanted = tuple(replace(box, ignore=False) for box in wanted)
            assert mine.boxes[index] == wanted


@pytest.mark.parametrize(
    ("format", "picture"), [("imagenet-vid", "jpeg"), ("coco", "png"), ("mot", "png")]
)
def test_boxes_are_read_back(street, tmp_path: Path, format: str, picture: str) -> None:
    assert any(box.ignore for box in street[0].boxes[0])
    ticks: list[tuple[int, int]] = []
    made = export(
        street, tmp_path / "out", format, picture=picture, watch=lambda *done: ticks.append(done)
    )
    boxes = sum(len(video.boxes[i]) for video in street for i in range(3))
    assert (made.split, made.videos, made.frames, made.annotations) == ("val", 2, 6, boxes)
    assert ticks == [(i, 6) for i in range(1, 7)]
    found = open_dataset(tmp_path / "out")
    assert (found.format, found.split, found.classes) == (format, "val", CLASSES)
    assert_same_boxes(found, street, ignored=format != "imagenet-vid")
    error = found[1].frame(2).pixels.int() - street[1].frame(2).pixels.int()
    assert error.abs().max() == 0 if picture == "png" else error.abs().float().mean() < 4
    assert check(tmp_path / "out").verdict == "complete"


@pytest.mark.parametrize("format", ["kinetics", "epic-kitchens"])
def test_clips_are_read_back(clips, tmp_path: Path, format: str) -> None:
    pytest.importorskip("av")
    export(clips, tmp_path, format)
    found = open_dataset(tmp_path)
    assert (found.format, found.classes) == (format, ACTIONS)
    assert [video.label for video in found] == [video.label for video in clips]
    for mine, theirs in zip(found, clips, strict=True):
        assert mine.name.startswith(theirs.name)
        assert len(mine) == len(theirs)
        error = mine.frames.read(range(5)).int() - theirs.frames.read(range(5)).int()
        assert error.abs().float().mean() < 6
    assert check(tmp_path).verdict == "complete"


def test_a_second_split_joins_the_first(tmp_path: Path) -> None:
    pytest.importorskip("av")
    videos = (Video("a", Grey(), label=3), Video("b", Grey(), label=0))
    clips = VideoSet("own", "val", "action", ACTIONS, videos)
    for format in ("kinetics", "epic-kitchens"):
        export(clips, tmp_path / format, format)
        export(clips, tmp_path / format, format, "train")
        assert len(open_dataset(tmp_path / format, "train")) == 2
        assert len(open_dataset(tmp_path / format)) == 2
        with pytest.raises(ConfigError, match="is not empty"):
            export(clips, tmp_path / format, format, "train")


def test_training_lists_of_vid(street, tmp_path: Path) -> None:
    export(street, tmp_path, "imagenet-vid", "train")
    assert_same_boxes(open_dataset(tmp_path, "train"), street, ignored=False)


def marked(classes: tuple[str, ...], label: int) -> VideoSet:
    """A video with boxes that are no whole numbers, without tracks."""
    boxes = ((Box(1.25, 2.5, 10.125, 20.75, label),), ())
    return VideoSet("own", "val", "detection", classes, (Video("a video", Grey(), boxes),))


@pytest.mark.parametrize("format", ["imagenet-vid", "coco", "mot"])
def test_fractions_and_missing_tracks_are_kept(tmp_path: Path, format: str) -> None:
    videos = marked(("cup", "a plate"), 1)
    export(videos, tmp_path, format)
    found = open_dataset(tmp_path)
    assert found.classes == ("cup", "a plate")
    assert found[0].name == "a-video"
    assert [found[0].boxes[i] for i in range(2)] == [videos[0].boxes[i] for i in range(2)]


def test_classes_of_the_format_need_no_list(tmp_path: Path) -> None:
    export(marked(NAMES, 8), tmp_path / "vid", "imagenet-vid")
    export(marked(("person",), 0), tmp_path / "mot", "mot")
    assert not list(tmp_path.rglob("classes.txt"))
    assert open_dataset(tmp_path / "vid").classes == NAMES
    assert "n02084071" in next(tmp_path.rglob("000000.xml")).read_text()
    with pytest.raises(ConfigError, match="holds a split with other classes"):
        export(marked(("cup",), 0), tmp_path / "mot", "mot", "train")


def test_mot_refuses_a_category_outside_the_list(tmp_path: Path) -> None:
    export(marked(("cup",), 0), tmp_path, "mot")
    path = next(tmp_path.rglob("gt.txt"))
    path.write_text(path.read_text().replace(",1,1,-1", ",1,2,-1"))
    with pytest.raises(Exception, match="a category from 1 to 1, found 2"):
        open_dataset(tmp_path)


def test_exports_that_are_refused(street, clips, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    for folder, message in ((tmp_path, "is not empty"), (tmp_path / "note.txt", "is a file")):
        with pytest.raises(ConfigError, match=message):
            export(street, folder, "mot")
    new = tmp_path / "new"
    for arguments, message in (
        ((street, new, "avi"), "no format 'avi' to write: there are imagenet-vid"),
        ((street, new, "kinetics"), "write it as imagenet-vid or coco or mot"),
        ((clips, new, "mot"), "write it as kinetics or epic-kitchens"),
        ((street, new, "imagenet-vid", "test"), "write it as val or train"),
        ((street, new, "coco", "a/b"), "A split is named by"),
    ):
        with pytest.raises(ConfigError, match=message):
            export(*arguments)
    with pytest.raises(ConfigError, match="picture is jpeg for imagenet-vid"):
        export(street, new, "imagenet-vid", picture="png")
    assert not new.exists()
    assert set(WRITERS) == {"imagenet-vid", "coco", "mot", "kinetics", "epic-kitchens"}


# --- The documentation


def test_the_lines_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parent.parent / "docs" / "world.md"
    code = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert code is not None
    small = code[1].replace("frames=100,", "frames=2, size=(96, 160), exposures=1,")
    small = small.replace("&frames=100", "&frames=2&size=96x160&exposures=1")
    assert small.count("exposures=1") == 2
    exec(compile(small, str(page), "exec"), {})
    shown = capsys.readouterr().out
    assert "% visible" in shown
    assert "1 torch.Size([3, 96, 160])" in shown


# --- The command line


def test_export_from_the_command_line(tmp_path: Path, here) -> None:
    done = here("data", "export", STREET, tmp_path / "a", "--format", "mot", "--as", "b", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert (made["format"], made["split"], made["frames"]) == ("mot", "b", 6)
    assert_same_boxes(open_dataset(tmp_path / "a", "b"), open_dataset(STREET))
    refused = here("data", "export", STREET, tmp_path / "a", "--format", "mot", "--as", "b")
    assert refused.returncode == 2
    assert "is not empty" in refused.stderr
    assert here("data", "check", STREET).returncode == 2


def test_evaluation_takes_the_name_in_place_of_a_folder(tmp_path: Path, here) -> None:
    pytest.importorskip("pycocotools")
    weights = tiny_models.write(tiny_models.detector(len(CLASSES)), tmp_path / "w.safetensors")
    common = ("--weights", weights, "--out", tmp_path / "run", "--json")
    done = here("evaluate", "vitdet", "--data", STREET, *common)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["videos"], row["frames"]) == (2, 6)
    other = here(
        "evaluate", "vitdet", "--data", STREET.replace("size=96x160", "size=96x96"), *common
    )
    assert other.returncode == 2
    assert "data.names" in other.stderr


def test_recognition_takes_the_name_in_place_of_a_folder(tmp_path: Path, here) -> None:
    weights = tiny_models.write(tiny_models.recogniser(len(ACTIONS)), tmp_path / "w.safetensors")
    done = here(
        "evaluate", "vivit", "--data", CLIPS, "--weights", weights, "--views", "1x1", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"][0]["videos"] == 2
    out = ("--out", tmp_path / "run", "--cache", tmp_path / "cache", "--r", "8", "--epochs", "1")
    few = (
        "--temporal-views",
        "1",
        "--spatial-views",
        "1",
        "--batch",
        "2",
        "--workers",
        "0",
        "--json",
    )
    tuned = here("train", "vivit", "--data", CLIPS, "--weights", weights, *out, *few)
    assert tuned.returncode == 0, tuned.stderr


def test_names_that_are_alike_stay_apart(tmp_path: Path, street) -> None:
    from dataclasses import replace

    first = street.videos[0]
    alike = [replace(first, name=name) for name in ("a-b-2", "a b", "a-b", "a/b")]
    export(replace(street, videos=tuple(alike)), tmp_path / "out", "mot", split="val")
    assert len(open_dataset(tmp_path / "out", "val")) == 4


@pytest.mark.parametrize("split", ["..", "-x", "a/b"])
def test_splits_stay_in_the_folder(tmp_path: Path, street, split: str) -> None:
    with pytest.raises(ConfigError, match="split"):
        export(street, tmp_path / "out", "coco", split=split)
    assert not (tmp_path / "out").exists()


def test_an_export_that_was_stopped_is_named(tmp_path: Path, street) -> None:
    export(street, tmp_path / "out", "mot", split="val")
    left = tmp_path / "out" / "train" / street.videos[0].name / "img1"
    left.mkdir(parents=True)
    with pytest.raises(ConfigError, match="stopped"):
        export(street, tmp_path / "out", "mot", split="train")
