"""The C++ example follows a video as the library does, and refuses what it cannot read."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import eventful
from eventful import TopR
from eventful.export import Runtime, export, exportable
from exports import changing, tiny_vit
from tolerances import assert_near

SOURCE = Path(__file__).resolve().parent.parent / "examples" / "export_cpp"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("cmake") is None or shutil.which("g++") is None, reason="needs cmake and g++"
    ),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, built."""
    build = tmp_path_factory.mktemp("build")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (["cmake", "-S", SOURCE, "-B", build, prefix], ["cmake", "--build", build]):
        subprocess.run([str(word) for word in command], check=True, timeout=900)
    return build / "export_cpp"


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the example."""
    folder = tmp_path_factory.mktemp("aoti") / "graphs"
    model = eventful.convert(tiny_vit(), exportable(TopR(6)))
    export(model, torch.rand(1, 3, 64, 64), folder, to="aoti", r=(6,))
    return folder


def run(program: Path, graphs: Path, frames: bytes, out: Path) -> subprocess.CompletedProcess:
    """Run the example on frames."""
    (out / "frames.bin").write_bytes(frames)
    words = [program, graphs, out / "frames.bin", out / "out.bin"]
    return subprocess.run(
        [str(word) for word in words], check=False, capture_output=True, text=True, timeout=300
    )


def outputs(out: Path, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What the example wrote."""
    return torch.frombuffer(bytearray((out / "out.bin").read_bytes()), dtype=dtype).view(count, 5)


def video() -> list[torch.Tensor]:
    """Frames with a cut."""
    frames = list(changing(8))
    frames.insert(4, 1 - frames[0].flip(-1) * 3)
    return frames


def test_the_example_follows_a_video_as_the_library(program, graphs, tmp_path: Path) -> None:
    frames = video()
    done = run(program, graphs, torch.cat(frames).numpy().tobytes(), tmp_path)
    assert done.returncode == 0, done.stderr
    got, stream = (
        outputs(tmp_path, len(frames)),
        eventful.Stream(eventful.convert(tiny_vit(), exportable(TopR(6)))),
    )
    whole = []
    for number, frame in enumerate(frames):
        assert_near(got[number : number + 1], stream(frame), "library", number)
        whole.append(stream.last.flushed[0])
    assert [line.startswith("whole") for line in done.stdout.splitlines()] == whole
    assert whole[0]
    assert whole[4]
    assert not all(whole)


@pytest.mark.parametrize("number", [0, 2])
def test_a_bad_frame_costs_its_own_result_alone(number, program, graphs, tmp_path) -> None:
    frames = video()
    frames[number] = torch.full_like(frames[0], torch.nan)
    done = run(program, graphs, torch.cat(frames).numpy().tobytes(), tmp_path)
    assert done.returncode == 1
    assert "1 frames were not finite" in done.stderr
    got, told = outputs(tmp_path, len(frames)), done.stdout.splitlines()
    assert told[number].startswith("not finite")
    assert told[number + 1].startswith("whole")
    assert got.isfinite().all(dim=1).tolist() == [at != number for at in range(len(frames))]
    assert_near(got[number + 1 :][:1], tiny_vit()(frames[number + 1]), "library")


def test_frames_have_the_type_that_was_exported(program, tmp_path: Path) -> None:
    model = eventful.convert(tiny_vit().bfloat16(), exportable(TopR(6)))
    frames = [frame.bfloat16() for frame in changing(4)]
    export(model, frames[0], tmp_path / "graphs", to="aoti", r=(6,))
    raw = torch.cat(frames).view(torch.int16).numpy().tobytes()
    done = run(program, tmp_path / "graphs", raw, tmp_path)
    assert done.returncode == 0, done.stderr
    stream = Runtime(tmp_path / "graphs").stream()
    got = outputs(tmp_path, len(frames), torch.bfloat16)
    for number, frame in enumerate(frames):
        assert torch.equal(got[number : number + 1], stream(frame)), number


def test_a_frame_that_is_cut_off_is_an_error(program, graphs, tmp_path: Path) -> None:
    raw = torch.cat(list(changing(2))).numpy().tobytes()
    done = run(program, graphs, raw[:-100], tmp_path)
    assert done.returncode == 1
    assert "not whole" in done.stderr


WRONG = {
    "no step": ("step ", "steps "),
    "outputs": ("outputs 1", "outputs 900"),
    "no outputs": ("outputs 1", "outputs 0"),
    "levels": ("levels ", "levels x "),
    "outside": ("dense ", "dense ../"),
    "a folder": ("dense ", "dense a/"),
    "a shape": ("float32 1 3", "float32 -1 3"),
    "no number": ("tokens ", "tokens many "),
    "a dtype": ("frame float32", "frame text"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_layout_that_cannot_be_is_refused(name: str, program, graphs, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(graphs, tmp_path / "copy"))
    text, (old, new) = (copy / "layout.txt").read_text(), WRONG[name]
    assert old in text
    (copy / "layout.txt").write_text(text.replace(old, new))
    done = run(program, copy, torch.cat(list(changing(2))).numpy().tobytes(), tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip()
