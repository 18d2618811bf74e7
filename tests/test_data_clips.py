"""Video files, the datasets of actions, and the views cut from their clips."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import miniatures
from eventful.errors import (
    ConfigError,
    DamagedMediaError,
    MalformedDataError,
    MissingFileError,
)
from eventful.paper.data import EPIC_VIEWS, KINETICS_VIEWS, Problems, ViewPlan, open_dataset
from eventful.paper.data.epic import open_epic
from eventful.video.source import ImageFiles, VideoFile

pytest.importorskip("av")
pytest.importorskip("PIL")


def numbers(source, indices=None) -> list[int]:
    """Which frames of a miniature these are, read off their brightness."""
    pixels = source.read(range(len(source)) if indices is None else indices)
    return [number(frame.float().mean().item()) for frame in pixels]


def number(brightness: float) -> int:
    """Greys are two levels apart, and the way through YUV and back may take one off."""
    return round((brightness + 0.5 - miniatures.grey(0)) / 2)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    miniatures.write_video(path, 100, fps=50)
    return path


# Video files


def test_the_miniature_stores_its_frames_out_of_order(clip: Path) -> None:
    """Else the tests below would say nothing about B-frames."""
    import av

    with av.open(str(clip)) as container:
        stamps = [packet.pts for packet in container.demux(video=0) if packet.pts is not None]
    assert stamps != sorted(stamps)


def test_every_frame_in_order(clip: Path) -> None:
    source = VideoFile(clip)
    assert len(source) == 100
    assert numbers(source) == list(range(100))
    walked = torch.stack(list(source))
    assert walked.equal(source.read(range(100)))
    assert walked.dtype == torch.uint8
    assert walked.shape == (100, 3, *miniatures.SIZE)


@pytest.mark.parametrize("given", [(0.5, 1.0), (0.2, 1.2, 59.94), (0.0, None, 10.0)])
def test_iterating_gives_what_reading_gives(clip: Path, given) -> None:
    source = VideoFile(clip, *given)
    walked = list(source)
    assert torch.stack(walked).equal(source.read(range(len(source))))
    assert len({frame.data_ptr() for frame in walked}) == len(walked)  # no memory is shared
    assert all(frame.is_contiguous() for frame in walked)


def test_frames_in_any_order_and_more_than_once(clip: Path) -> None:
    assert numbers(VideoFile(clip), [97, 3, 50, 3, 0]) == [97, 3, 50, 3, 0]


def test_a_stretch_begins_and_ends_where_asked(clip: Path) -> None:
    assert numbers(VideoFile(clip, 0.5, 1.0)) == list(range(25, 50))
    assert numbers(VideoFile(clip, 1.9)) == [95, 96, 97, 98, 99]
    assert numbers(VideoFile(clip, 1.0, 1.04)) == [50, 51]


@pytest.mark.parametrize(("fps", "step"), [(50.0, 1), (25.0, 2), (10.0, 5)])
def test_resampling_by_a_whole_factor_picks_every_nth(clip: Path, fps: float, step: int) -> None:
    assert numbers(VideoFile(clip, fps=fps)) == list(range(0, 100, step))


@pytest.mark.parametrize("fps", [30.0, 29.97, 59.94, 100.0])
def test_resampling_picks_the_nearest(clip: Path, fps: float) -> None:
    found = numbers(VideoFile(clip, 0.2, 1.2, fps))
    assert len(found) == round(fps)
    for i, shown in enumerate(found):
        assert abs(shown / 50 - (0.2 + i / fps)) <= 0.01 + 1e-6


def test_times_beyond_the_end(clip: Path) -> None:
    with pytest.raises(DamagedMediaError, match=r"no frame from 5.000 s to 6.000 s"):
        len(VideoFile(clip, 5.0, 6.0))
    assert numbers(VideoFile(clip, 1.96, 9.0)) == [98, 99]


def test_what_is_no_video(tmp_path: Path, clip: Path) -> None:
    for content in (b"", b"no video at all" * 40, clip.read_bytes()[:2000]):
        path = tmp_path / "x.mp4"
        path.write_bytes(content)
        with pytest.raises(DamagedMediaError, match=r"x.mp4"):
            VideoFile(path).read([0])
    with pytest.raises(MissingFileError, match=r"y.mp4 is not there"):
        VideoFile(tmp_path / "y.mp4").read([0])


def test_a_hole_in_the_middle_is_damage(tmp_path: Path, clip: Path) -> None:
    content = bytearray(clip.read_bytes())
    start = content.index(b"mdat") + 4
    middle = start + (len(content) - start) // 3
    content[middle : middle + 6000] = bytes(6000)
    path = tmp_path / "hole.mp4"
    path.write_bytes(content)
    with pytest.raises(DamagedMediaError, match=r"hole.mp4"):
        VideoFile(path).read(range(100))
    with pytest.raises(DamagedMediaError, match=r"hole.mp4"):
        list(VideoFile(path))


def test_images_of_two_sizes_do_not_stack(tmp_path: Path) -> None:
    miniatures.write_image(tmp_path / "a.jpg", miniatures.picture(0))
    miniatures.write_image(tmp_path / "b.jpg", miniatures.picture(0, size=(8, 8)))
    source = ImageFiles(tmp_path, ("a.jpg", "b.jpg"))
    assert [tuple(image.shape) for image in source] == [(3, *miniatures.SIZE), (3, 8, 8)]
    with pytest.raises(MalformedDataError, match="one size"):
        source.read([0, 1])


# EPIC-Kitchens


def test_epic_segments_at_thirty_frames_a_second(tmp_path: Path) -> None:
    videos = open_dataset(miniatures.epic(tmp_path))
    assert (videos.split, videos.task, len(videos.classes)) == ("validation", "action", 97)
    assert [(v.name, v.label) for v in videos] == [("P01_11_0", 0), ("P01_11_1", 96)]
    assert (videos.classes[0], videos.classes[1], videos.classes[96]) == ("take", "verb 1", "bend")
    found = numbers(videos[0].frames)
    assert len(found) == 30
    assert all(abs(n / 50 - (0.2 + i / 30)) <= 0.0101 for i, n in enumerate(found))
    assert numbers(open_epic(tmp_path, fps=50)[1].frames) == list(range(50, 100))


def test_epic_frames_folder_gives_what_the_video_gives(tmp_path: Path) -> None:
    from_video = open_dataset(miniatures.epic(tmp_path / "video"))[0]
    from_images = open_dataset(miniatures.epic(tmp_path / "images", frames=True))[0]
    assert isinstance(from_images.frames, ImageFiles)
    pairs = zip(numbers(from_video.frames), numbers(from_images.frames), strict=True)
    # start_frame counts from 1 where a timestamp counts from 0.
    assert all(abs(video - image) <= 2 for video, image in pairs)


@pytest.mark.parametrize("place", ["P01/P01_11.MP4", "videos/P01_11.mp4", "videos/P01/P01_11.MP4"])
def test_epic_places_of_videos(tmp_path: Path, place: str) -> None:
    miniatures.epic(tmp_path)
    (tmp_path / place).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / "P01/videos/P01_11.MP4").rename(tmp_path / place)
    assert len(open_dataset(tmp_path)[0]) == 30


EPIC_ROWS = {
    "verb": (("P", "00:00:00.2", "00:00:01.2", 1, 2, "take", 97), "from 0 to 96.*'verb_class'"),
    "no verb": (("P", "00:00:00.2", "00:00:01.2", 1, 2, "take", ""), "'verb_class', found ''"),
    "time": (("P", "soon", "00:00:01.2", 1, 2, "take", 0), "HH:MM:SS.*found 'soon'"),
    "order": (("P", "00:00:01.2", "00:00:01.2", 1, 2, "take", 0), "after start_timestamp"),
    "name": (("", "00:00:00.2", "00:00:01.2", 1, 2, "take", 0), "some text"),
}


@pytest.mark.parametrize("case", EPIC_ROWS)
def test_epic_malformed_rows(tmp_path: Path, case: str) -> None:
    row, message = EPIC_ROWS[case]
    miniatures.epic(tmp_path)
    good = miniatures.epic_row("good", "00:00:00.2", "00:00:01.2", 1, 2, "take", 0)
    table = [good, miniatures.epic_row(*row), ["good, too", *good[1:]]]
    miniatures.write_csv(tmp_path / "EPIC_100_validation.csv", miniatures.EPIC_COLUMNS, table)
    with pytest.raises(MalformedDataError, match=rf"validation.csv, line 3: expected .*{message}"):
        open_dataset(tmp_path)
    problems = Problems()
    assert len(open_dataset(tmp_path, on_problem=problems)) == 2
    assert len(problems.malformed) == 1


def test_epic_table_of_another_shape(tmp_path: Path) -> None:
    path = miniatures.epic(tmp_path) / "EPIC_100_validation.csv"
    path.write_text(path.read_text() + "one,value,too,few\n")
    with pytest.raises(MalformedDataError, match="line 4: expected 15 values"):
        open_dataset(tmp_path)
    path.write_text(path.read_text().replace("verb_class", "verb_number", 1))
    with pytest.raises(MalformedDataError, match=r"line 1: expected a header with .*verb_class"):
        open_dataset(tmp_path)


def test_epic_missing_video_names_the_line_that_wants_it(tmp_path: Path) -> None:
    (miniatures.epic(tmp_path) / "P01/videos/P01_11.MP4").unlink()
    with pytest.raises(MissingFileError, match=r"P01_11.MP4 is not there.*csv, line 2") as caught:
        open_dataset(tmp_path)
    assert "rgb_frames" in str(caught.value)


# Kinetics


def test_kinetics_labels_are_those_of_all_400_classes(tmp_path: Path) -> None:
    videos = open_dataset(miniatures.kinetics(tmp_path))
    assert len(videos.classes) == len(set(videos.classes)) == 400
    assert list(videos.classes) == sorted(videos.classes)
    assert [v.label for v in videos] == [399, 0]  # zumba and abseiling
    assert [v.name for v in videos] == ["aaaaaaaaaaa_000003_000013", "-bbbbbbbb_b_000120_000130"]
    assert len(videos[0]) == 50
    assert len(videos[1]) == 50  # 60 frames at 30 a second, handed out at 25
    assert open_dataset(tmp_path, "train")[0].label == 398  # yoga
    (tmp_path / "train.csv").unlink()
    assert [v.label for v in open_dataset(tmp_path)] == [399, 0]


def test_kinetics_labels_outside_the_list_are_refused(tmp_path: Path) -> None:
    row = ["flying to the moon", "aaaaaaaaaaa", 3, 13, "val", 0]
    miniatures.kinetics(tmp_path)
    miniatures.write_csv(tmp_path / "val.csv", miniatures.KINETICS_COLUMNS, [row])
    with pytest.raises(MalformedDataError, match=r"line 2: .*400 names.*classes\.txt.*the moon"):
        open_dataset(tmp_path)
    problems = Problems()
    assert len(open_dataset(tmp_path, on_problem=problems)) == 0
    assert len(problems.malformed) == 1


def test_a_class_list_numbers_kinetics_by_its_lines(tmp_path: Path) -> None:
    miniatures.kinetics(tmp_path)
    (tmp_path / "classes.txt").write_text("zumba\nflying to the moon\nabseiling\n")
    videos = open_dataset(tmp_path)
    assert videos.classes == ("zumba", "flying to the moon", "abseiling")
    assert [v.label for v in videos] == [0, 2]
    with pytest.raises(MalformedDataError, match=r"3 names in .*classes\.txt.*yoga"):
        open_dataset(tmp_path, "train")
    (tmp_path / "classes.txt").write_text("zumba\nabseiling\nzumba\n")
    with pytest.raises(MalformedDataError, match=r"classes\.txt, line 3: expected each name once"):
        open_dataset(tmp_path)


def test_kinetics_missing_clip(tmp_path: Path) -> None:
    (miniatures.kinetics(tmp_path) / "val/aaaaaaaaaaa_000003_000013.mp4").unlink()
    with pytest.raises(MissingFileError, match=r"aaa_000003_000013.mp4.*val.csv, line 2"):
        open_dataset(tmp_path)
    problems = Problems()
    assert len(open_dataset(tmp_path, on_problem=problems)) == 1
    assert len(problems.missing) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["yoga", "x", "3.5", 13, "val", 0], "whole number of at least 0 in column 'time_start'"),
        (["yoga", "x", 13, 3, "val", 0], "a second after time_start"),
        (["", "x", 3, 13, "val", 0], "some text in column 'label'"),
        (["yoga", "x", 3], "6 values"),
    ],
)
def test_kinetics_malformed_rows(tmp_path: Path, row: list[object], message: str) -> None:
    miniatures.kinetics(tmp_path)
    miniatures.write_csv(tmp_path / "val.csv", miniatures.KINETICS_COLUMNS, [row])
    with pytest.raises(MalformedDataError, match=f"val.csv, line 2: expected .*{message}"):
        open_dataset(tmp_path)


# Views


@given(
    length=st.integers(1, 400),
    frames=st.integers(1, 32),
    stride=st.integers(1, 4),
    temporal=st.integers(1, 5),
)
def test_views_lie_inside_evenly_and_reach_both_ends(
    length: int, frames: int, stride: int, temporal: int
) -> None:
    found = ViewPlan(frames, stride, temporal).indices(length)
    assert len(found) == temporal
    span = frames * stride
    for view in found:
        assert len(view) == frames
        assert all(0 <= index < length for index in view)
        whole = [view[0] + i * stride for i in range(frames)]
        assert list(view) == [min(index, length - 1) for index in whole]
    if temporal > 1 and length > span:
        starts = [view[0] for view in found]
        assert starts[0] == 0
        assert length - span - 1 <= starts[-1] <= length - span
        gaps = {after - before for before, after in pairwise(starts)}
        assert max(gaps) - min(gaps) <= 1


def test_published_plans() -> None:
    assert len(EPIC_VIEWS) == len(KINETICS_VIEWS) == 12
    assert (EPIC_VIEWS.frames, EPIC_VIEWS.stride, EPIC_VIEWS.size) == (32, 1, 320)
    assert (KINETICS_VIEWS.frames, KINETICS_VIEWS.stride, KINETICS_VIEWS.size) == (32, 2, 224)
    # Ten seconds of Kinetics: 250 frames, views of 64, so starts 62 apart.
    assert [view[0] for view in KINETICS_VIEWS.indices(250)] == [0, 62, 124, 186]
    assert KINETICS_VIEWS.indices(250)[1][:3] == (62, 64, 66)


@pytest.mark.parametrize(
    ("size", "scaled", "crops"),
    [
        ((256, 340), (224, 298), ((0, 0), (0, 37), (0, 74))),
        ((340, 256), (298, 224), ((0, 0), (37, 0), (74, 0))),
        ((100, 100), (224, 224), ((0, 0), (0, 0), (0, 0))),
    ],
)
def test_crops_go_along_the_longer_side(size, scaled, crops) -> None:
    assert KINETICS_VIEWS.scaled(*size) == scaled
    assert KINETICS_VIEWS.crops(*scaled) == crops


def test_cut_views_show_the_frames_they_name(clip: Path) -> None:
    plan = ViewPlan(frames=8, stride=3, temporal=3, spatial=2, size=32)
    views = list(plan.cut(VideoFile(clip)))
    assert [(v.temporal, v.spatial) for v in views] == [(t, s) for t in range(3) for s in range(2)]
    for view in views:
        assert view.pixels.shape == (8, 3, 32, 32)
        shown = [number(frame.mean().item() * 255) for frame in view.pixels]
        assert shown == list(view.frames)
    assert plan.stack(VideoFile(clip)).equal(torch.stack([view.pixels for view in views]))


def test_a_short_video_repeats_its_last_frame(clip: Path) -> None:
    view = next(iter(ViewPlan(frames=8, temporal=1, spatial=1, size=16).cut(VideoFile(clip, 1.9))))
    assert view.frames == (0, 1, 2, 3, 4, 4, 4, 4)
    assert view.pixels[4].equal(view.pixels[7])


def test_crops_show_left_middle_and_right(tmp_path: Path) -> None:
    pixels = miniatures.picture(0, size=(32, 96))
    pixels[:, 32:64], pixels[:, 64:] = 120, 220
    miniatures.write_image(tmp_path / "a.jpg", pixels)
    plan = ViewPlan(frames=1, temporal=1, spatial=3, size=32)
    left, middle, right = plan.stack(ImageFiles(tmp_path, ("a.jpg",))) * 255
    assert left.mean().item() == pytest.approx(20, abs=3)
    assert middle.mean().item() == pytest.approx(120, abs=3)
    assert right.mean().item() == pytest.approx(220, abs=3)


def test_plans_that_make_no_sense() -> None:
    for field in ("frames", "stride", "temporal", "spatial", "size"):
        with pytest.raises(ConfigError, match=field):
            ViewPlan(**{field: 0})
    with pytest.raises(ConfigError, match="without frames"):
        ViewPlan().indices(0)
