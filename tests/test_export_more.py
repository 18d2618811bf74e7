"""The other runtimes, Triton's repository, the detector, and the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import eventful
from eventful import Threshold, TopR, ops
from eventful.cli import main
from eventful.errors import ArtefactError, ConfigError, UnsupportedError
from eventful.export import Runtime, export, exportable
from eventful.export.triton_config import parse_config
from exports import assert_steps_agree, changing, tiny_vit
from tolerances import assert_near
from zoo_timm import segment_anything

RUNTIMES = ["openvino", pytest.param("aoti", marks=pytest.mark.slow)]  # a C++ compiler is slow


@pytest.fixture(scope="module", params=RUNTIMES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A converted model, and a runtime of it with two widths."""
    if request.param == "openvino":
        pytest.importorskip("openvino")
    model = eventful.convert(tiny_vit(), exportable(TopR(6)))
    folder = tmp_path_factory.mktemp(request.param) / "tiny"
    export(model, torch.rand(1, 3, 64, 64), folder, to=request.param, r=(6, 12))
    return model, Runtime(folder, threads=1)


class TestOtherRuntimes:
    def test_each_of_100_steps_agrees_with_the_library(self, made) -> None:
        model, runtime = made
        assert_steps_agree(runtime, model, changing(101))

    def test_a_stream_goes_on_through_another_width_and_a_flush(self, made) -> None:
        model, runtime = made
        ours, theirs = runtime.stream(), eventful.Stream(model)
        for number, frame in enumerate(changing(12)):
            r = (6, 12)[number // 3 % 2]
            ours.policy = theirs.policy = TopR(r)
            if number == 8:
                ours.flush(), theirs.flush()
            assert_near(ours(frame), theirs(frame), "library", number)
            assert ours.last.flushed is theirs.last.flushed[0]

    def test_slots_that_a_threshold_leaves_empty_write_nothing(self, made) -> None:
        model, runtime = made
        policy = Threshold(0.8)
        assert_steps_agree(runtime, model, changing(11), policy)
        stream, empty = runtime.stream(policy), 0
        for frame in changing(11):
            stream(frame)
            empty += stream.last.width - stream.last.updated
        assert empty > 0

    def test_interleaved_streams_equal_separate_ones(self, made) -> None:
        _, runtime = made
        videos = [list(changing(4, seed=seed)) for seed in (1, 2)]
        alone = []
        for video in videos:
            stream = runtime.stream()
            alone.append([stream(frame).clone() for frame in video])
        together = [runtime.stream() for _ in videos]
        for number in range(4):
            for one, video, expected in zip(together, videos, alone, strict=True):
                assert torch.equal(one(video[number]), expected[number])

    def test_snapshots_go_both_ways(self, made) -> None:
        model, runtime = made
        frames = list(changing(6))
        ours = runtime.stream()
        for frame in frames[:3]:
            ours(frame)
        theirs = eventful.Stream.load(model, ours.snapshot())
        assert_near(theirs(frames[3]), ours(frames[3]), "library")
        back = runtime.load(theirs.snapshot())
        assert_near(back(frames[4]), ours(frames[4]), "library")


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_weights_in_8_bits_are_near_and_smaller(to: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model = eventful.convert(tiny_vit(), exportable(TopR(6)))
    sizes, outputs = {}, {}
    for int8 in (False, True):
        folder = tmp_path / f"int8-{int8}"
        export(model, torch.rand(1, 3, 64, 64), folder, to=to, r=(6,), int8=int8)
        sizes[int8] = sum(path.stat().st_size for path in folder.iterdir())
        stream = Runtime(folder, threads=1).stream()
        outputs[int8] = torch.stack([stream(frame) for frame in changing(4)])
    assert sizes[True] < 0.7 * sizes[False]
    apart = (outputs[True] - outputs[False]).abs().max() / outputs[False].abs().max()
    assert 0 < apart < 0.05


@pytest.mark.slow
def test_the_detector_is_exported_whole(tmp_path: Path) -> None:
    from eventful.video.world import World

    pytest.importorskip("onnxscript")
    detector = eventful.load("detector")
    model = eventful.convert(detector, exportable(TopR(64)))
    frames = [
        detector.prepare(pixels)[0] for pixels in World(3, frames=6, exposures=1).read(range(6))
    ]
    export(model, frames[0], tmp_path / "detector", r=(64,))
    runtime, stream = Runtime(tmp_path / "detector"), eventful.Stream(model)
    found = 0
    for number, frame in enumerate(frames):
        ours = runtime.load(stream.snapshot()) if number else runtime.stream()
        expected, got = stream(frame), ours(frame)
        count = int(expected.counts[0])
        assert int(got["counts"][0]) == count
        for name in ("boxes", "scores", "labels"):
            torch.testing.assert_close(
                got[name][0, :count], getattr(expected, name)[0, :count], atol=1e-3, rtol=1e-4
            )
        found += count
    assert found > 20


def test_windows_with_fixed_shapes_are_the_library_s() -> None:
    """A step of SAM's encoder in the backend of exported graphs: windows, relative position."""
    from eventful.export.pure import PureStep
    from eventful.export.subject import Subject

    torch.manual_seed(0)
    model = eventful.convert(segment_anything(), exportable(TopR(5)))
    draw = torch.Generator().manual_seed(0)
    frames = [torch.rand(1, 3, 40, 56, generator=draw) for _ in range(2)]
    frames[1][..., 16:] = frames[0][..., 16:]
    stream = eventful.Stream(model)
    stream(frames[0])
    before = {name: value.clone() for name, value in stream._state.detached().tensors.items()}
    expected = stream(frames[1])
    pure = PureStep(Subject.of(model, frames[0]))
    from eventful.export.pure import Numbers

    state = {one.name: before.get(one.name, torch.full((1,), torch.nan)) for one in pure.entries}
    with torch.no_grad(), ops.use_backend("portable"):
        parts = pure.run(
            frames[1], Numbers.of(pure.subject.params, 1), state, pure.subject.widths([5])[0]
        )
    assert_near(parts.leaves[0], expected, "model")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Triton."""
    pytest.importorskip("onnxruntime")
    from eventful.export.triton import export_triton

    folder, frame = tmp_path_factory.mktemp("triton"), torch.rand(1, 3, 64, 64)
    return export_triton(tiny_vit(), frame, folder, r=6, config=exportable(TopR(6)), name="tiny")


class Server:
    """One sequence in a model, with its state kept as Triton does."""

    def __init__(self, target: Path) -> None:
        import onnxruntime as ort

        about = parse_config((target / "config.pbtxt").read_text())
        self.entries = about["sequence_batching"]["state"]
        self.session = ort.InferenceSession(
            str(target / "1" / "model.onnx"), providers=["CPUExecutionProvider"]
        )
        kinds = {"TYPE_FP32": np.float32, "TYPE_INT64": np.int64}
        self.state = {
            one["input_name"]: np.zeros(one["dims"], kinds[one["data_type"]])
            for one in self.entries
        }
        self.start = True

    def __call__(self, frame: torch.Tensor) -> torch.Tensor:
        given = {"frame": frame.numpy(), "start": np.array([self.start], np.int32), **self.state}
        names = [one.name for one in self.session.get_outputs()]
        found = dict(zip(names, self.session.run(None, given), strict=True))
        self.state = {one["input_name"]: found[one["output_name"]] for one in self.entries}
        self.start, self.report = False, found["step.report"][0].tolist()
        return torch.from_numpy(found["out.output"])


@pytest.mark.slow
def test_triton_s_graph_follows_a_sequence_as_the_library(repository: Path) -> None:
    server = Server(repository)
    ports = {one.name for one in server.session.get_inputs()}
    assert ports == {"frame", "start"} | {one["input_name"] for one in server.entries}
    stream = eventful.Stream(eventful.convert(tiny_vit(), exportable(TopR(6))))
    frames = list(changing(6))
    frames.insert(3, 1 - frames[0].flip(-1) * 3)  # a cut
    flushed = []
    for number, frame in enumerate(frames):
        assert_near(server(frame), stream(frame), "library", number)
        flushed.append(stream.last.flushed[0])
        assert (int(server.state["state.turn"][0]) == 0) is flushed[-1]
        assert server.report[1:3] == [1, int(flushed[-1])]
        assert server.report[4] == 1
    assert flushed[:4] == [True, False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("bad", ["NaN", "infinite", "huge"])
def test_a_bad_frame_costs_triton_s_sequence_nothing_but_itself(repository, number, bad) -> None:
    frames = list(changing(6))
    good = frames[number]
    frames[number] = {"NaN": torch.full_like(good, torch.nan), "huge": good * 1e38}.get(
        bad, good / 0
    )
    server, model = Server(repository), tiny_vit()
    for at, frame in enumerate(frames):
        got = server(frame)
        lost = not (server.report[1] and server.report[4])
        if at == number and (bad != "huge" or number):
            assert lost
            assert int(server.state["state.turn"][0]) == -1
        elif at == number + 1:
            assert server.report[2], "starts over"
            assert_near(got, model(frame), "library")
        elif at != number:
            assert not lost


def test_triton_keeps_many_sequences_at_a_time() -> None:
    from eventful.export.triton_config import config_text

    about = parse_config(config_text("a", [], [], []))
    assert about["max_batch_size"] == 0
    assert about["sequence_batching"]["oldest"]["max_candidate_sequences"] >= 2


GOOD = 'name: "a" max_batch_size: 0 input { name: "x" data_type: TYPE_FP32 dims: [ 1, 2 ] }'


def test_a_config_of_triton_is_checked() -> None:
    made = parse_config(GOOD)
    assert made["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [1, 2]}]
    for wrong, message in (
        ("batch: 1", "no field 'batch'"),
        ('max_batch_size: "a"', "is no int"),
        (GOOD.replace("TYPE_FP32", "FP32"), "is no TYPE_"),
        (GOOD.replace("dims: [ 1, 2 ] }", "dims: [ 1, 2 ]"), "lacks"),
        ("name: 'a'", "Not a text protobuf"),
        ('name: "a" name: "b"', "twice"),
    ):
        with pytest.raises(ArtefactError, match=message):
            parse_config(wrong)


@pytest.mark.slow
def test_the_command_writes_a_folder_and_says_what(tmp_path, capsys, monkeypatch) -> None:
    words = ["eventful", "export", "timm:vit_tiny_patch16_224", "--size", "64", "--r", "4,8",
             "--out", str(tmp_path / "graphs"), "--json"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    about = json.loads(capsys.readouterr().out)
    assert [one["width"] for one in about["steps"]] == [6, 10]
    assert about["left_out"] == ["motion", "context", "fallback"]
    stream = Runtime(tmp_path / "graphs").stream()
    assert stream(torch.rand(1, 3, 64, 64)).shape == (1, 1000)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--r", "many"], "--r is one number"),
        (["--rule", "exact"], "gating='frame'"),
        (["--dtype", "bfloat16"], "--to aoti"),
        (["--to", "aoti", "--int8"], "int8 weights are not written for aoti"),
        (["--to", "triton", "--int8"], "written in float32"),
        (["--to", "triton", "--r", "4,8"], "one step.*--r 8"),
        (["--policy", "follow-scene", "--h", "0.5"], "Leave one of them out"),
        (["--max_age", "1"], "all 17 tokens are due"),
    ],
)
def test_the_command_refuses_what_it_cannot_write(words, message, tmp_path, monkeypatch) -> None:
    from eventful.cli.export import Choice, Dtype, Exported, Target, run

    options: dict[str, Any] = {"r": "4", "size": "64"}
    for name, value in zip(words[::2], [*words[1::2], "x"], strict=False):
        options[name.removeprefix("--")] = {"--h": float, "--max_age": int}.get(name, str)(value)
    if "--int8" in words:
        options["int8"] = True
    what = Exported(
        "timm:vit_tiny_patch16_224", tmp_path / "x",
        **{**options, "to": Target(options.get("to", "onnx")),
           "dtype": Dtype(options.get("dtype", "float32")),
           "policy": Choice(options.get("policy", "top-r"))},
    )  # fmt: skip
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        run(what)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("frames", "method", "message"),
    [(1, "get_image_features", "through its method"), (8, "forward", "takes 8 frames")],
)
def test_models_that_take_no_single_frame_say_why(frames, method, message, monkeypatch) -> None:
    from types import SimpleNamespace

    from eventful.export import frames as opening

    ready = SimpleNamespace(step_frames=frames, method=method)
    subject = SimpleNamespace(model=None, at=lambda *size: ready)
    monkeypatch.setattr(opening, "open_subject", lambda *args, **options: subject)
    with pytest.raises(UnsupportedError, match=message):
        opening.open_for_export("some:model", size=64)
