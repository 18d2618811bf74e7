"""The C++ example follows a video as the library does."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import eventful
from eventful import TopR
from eventful.export import export, exportable
from exports import changing, tiny_vit
from tolerances import assert_near

SOURCE = Path(__file__).resolve().parent.parent / "examples" / "export_cpp"


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("g++") is None, reason="needs cmake and g++"
)
def test_the_example_follows_a_video_as_the_library(tmp_path: Path) -> None:
    model = eventful.convert(tiny_vit(), exportable(TopR(6)))
    export(model, torch.rand(1, 3, 64, 64), tmp_path / "graphs", to="aoti", r=(6,))
    frames = list(changing(8))
    frames.insert(4, 1 - frames[0].flip(-1) * 3)  # a cut
    torch.cat(frames).numpy().tofile(tmp_path / "frames.bin")
    build, prefix = tmp_path / "build", f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (["cmake", "-S", SOURCE, "-B", build, prefix], ["cmake", "--build", build]):
        subprocess.run([str(word) for word in command], check=True, timeout=900)
    words = [
        build / "export_cpp",
        tmp_path / "graphs",
        tmp_path / "frames.bin",
        tmp_path / "out.bin",
    ]
    told = subprocess.run(
        [str(word) for word in words], check=True, capture_output=True, text=True, timeout=300
    ).stdout.splitlines()
    got = torch.from_file(str(tmp_path / "out.bin"), size=5 * len(frames)).view(len(frames), 5)
    stream = eventful.Stream(model)
    whole = []
    for number, frame in enumerate(frames):
        assert_near(got[number : number + 1], stream(frame), "library", number)
        whole.append(stream.last.flushed[0])
    assert [line.startswith("whole") for line in told] == whole
    assert whole[0]
    assert whole[4]
    assert not all(whole)
