"""Exported steps in onnxruntime: the laws of a stream hold for a folder of graphs."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

import eventful
from eventful import Config, FollowScene, Threshold, TopR
from eventful.errors import (
    ArtefactError,
    ConcurrentUseError,
    ConfigError,
    FrameError,
    NonFiniteError,
    SnapshotError,
    UnsupportedError,
)
from eventful.export import Runtime, export, exportable
from eventful.export.frames import open_for_export
from eventful.export.manifest import NAME
from eventful.modelspec.opening import RandomWeightsWarning
from exports import TOKENS, assert_steps_agree, changing, selected, tiny_vit
from tolerances import assert_near

pytest.importorskip("onnxscript")
ort = pytest.importorskip("onnxruntime")

R, WIDE = 6, TOKENS


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return eventful.convert(tiny_vit(), exportable(TopR(R)))


@pytest.fixture(scope="module")
def folder(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "tiny"
    export(model, torch.rand(1, 3, 64, 64), path, r=(R, WIDE), name="tiny")
    return path


@pytest.fixture(scope="module")
def runtime(folder: Path) -> Runtime:
    return Runtime(folder, threads=1)


def test_each_of_100_steps_agrees_with_the_library(runtime, model) -> None:
    assert_steps_agree(runtime, model, changing(101))


@pytest.mark.parametrize(
    "policy",
    [Threshold(0.8), FollowScene(), FollowScene(max_fraction=0.2), eventful.TopFraction(0.1)],
    ids=str,
)
def test_policies_with_a_level_agree_with_the_library(runtime, model, policy) -> None:
    assert_steps_agree(runtime, model, changing(12, seed=1), policy)


def test_outputs_stay_near_the_library_over_a_video(runtime, model) -> None:
    stream, ours = eventful.Stream(model), runtime.stream()
    for frame in changing(30, seed=2):
        assert_near(ours(frame), stream(frame), "library")


def test_all_tokens_are_the_dense_model(runtime, model) -> None:
    ours = runtime.stream(TopR(TOKENS))
    for frame in changing(4):
        assert_near(ours(frame), model(frame), "library")
    assert ours.last.updated == TOKENS
    assert not ours.last.flushed


def test_a_still_video_changes_nothing(runtime) -> None:
    frame = next(changing(1))
    ours = runtime.stream(Threshold(1e-3))
    first = ours(frame).clone()
    for _ in range(3):
        assert_near(ours(frame), first, "step")
    assert ours.last.updated <= 1 + ours._manifest.forced


def test_of_equal_errors_the_first_tokens_win(runtime, model) -> None:
    frame = next(changing(1))
    stream = eventful.Stream(model, maps=True)
    ours = runtime.stream()
    for _ in range(2):
        stream(frame), ours(frame)
    theirs, score = selected(stream)
    equal = [token for token in range(1, TOKENS) if ours.last.score[token] == 0]
    assert len(equal) > R  # nothing moved, so most errors are equal
    picked = sorted(ours.last.index.tolist())
    forced = set(picked) - set(equal[:R])
    assert len(forced) <= ours._manifest.forced
    assert set(equal[:R]) <= set(picked)
    assert float(score.max()) == 0
    assert theirs == set(picked)


def test_interleaved_streams_equal_separate_ones(runtime) -> None:
    videos = [list(changing(5, seed=seed)) for seed in (3, 4, 5)]
    alone = []
    for video in videos:
        stream = runtime.stream()
        alone.append([stream(frame).clone() for frame in video])
    together = [runtime.stream() for _ in videos]
    for number in range(5):
        for one, video, expected in zip(together, videos, alone, strict=True):
            assert torch.equal(one(video[number]), expected[number])


def test_snapshots_go_both_ways(runtime, model, tmp_path) -> None:
    frames = list(changing(8, seed=6))
    ours = runtime.stream(TopR(4))
    for frame in frames[:4]:
        ours(frame)
    data = ours.snapshot()
    ours.snapshot(tmp_path / "stream.safetensors")
    theirs = eventful.Stream.load(model, tmp_path / "stream.safetensors")
    again = runtime.load(data)
    assert theirs.policy == again.policy == TopR(4)
    for frame in frames[4:6]:
        expected = ours(frame)
        assert torch.equal(again(frame), expected)
        assert_near(theirs(frame), expected, "library")
        assert theirs.last.flushed == [False]
    back = runtime.load(theirs.snapshot())
    assert_near(back(frames[6]), ours(frames[6]), "library")


def test_snapshots_of_others_are_refused(runtime) -> None:
    other = eventful.convert(tiny_vit(depth=1), exportable(TopR(R)))
    stream = eventful.Stream(other)
    stream(next(changing(1)))
    with pytest.raises(SnapshotError, match="rule"):
        runtime.load(stream.snapshot())
    with pytest.raises(SnapshotError, match="no frame"):
        runtime.stream().snapshot()


def test_the_first_call_and_a_cut_are_flushes(runtime, model) -> None:
    frames = list(changing(6))
    ours = runtime.stream()
    reasons = []
    for frame in frames[:4]:
        ours(frame)
        reasons.append(ours.last.reason)
    assert reasons == ["first", None, None, None]
    other = 1 - frames[0].flip(-1) * 3
    assert_near(ours(other), model(other), "library")
    assert (ours.last.reason, ours.last.updated) == ("scene", TOKENS)
    ours.flush()
    assert_near(ours(frames[5]), model(frames[5]), "library")
    assert ours.last.reason == "asked"


def test_the_narrowest_step_that_fits_is_taken(runtime) -> None:
    forced = runtime.manifest.forced
    widths = runtime.manifest.widths
    assert widths == [R + forced, TOKENS]
    for r, width in ((1, widths[0]), (R, widths[0]), (R + 1, TOKENS), (500, TOKENS)):
        ours = runtime.stream(TopR(r))
        for frame in changing(2):
            ours(frame)
        assert ours.last.width == width
        assert ours.last.updated <= min(TOKENS, r + forced)


def test_what_does_not_fit_waits(model, runtime, folder, tmp_path) -> None:
    narrow = _copy(folder, tmp_path)
    about = json.loads((narrow / NAME).read_text())
    about["steps"] = about["steps"][:1]
    _sign(narrow, about)
    ours = Runtime(narrow, threads=1).stream(Threshold(0.0))
    for frame in changing(3):
        ours(frame)
    assert ours.last.updated == R + runtime.manifest.forced < ours.last.wanted


def test_a_level_takes_the_step_that_fitted_the_last_frame(runtime) -> None:
    ours = runtime.stream(Threshold(1.0))
    widths = []
    for frame in changing(4):
        ours(frame)
        widths.append(ours.last.width)
    assert widths == [TOKENS, TOKENS, R + runtime.manifest.forced, R + runtime.manifest.forced]


def test_frames_that_do_not_fit_are_refused(runtime) -> None:
    ours = runtime.stream()
    first, second, third = changing(3)
    ours(first)
    for wrong in (torch.rand(1, 3, 72, 64), torch.rand(2, 3, 64, 64), first.double()):
        with pytest.raises(FrameError, match="Resize"):
            ours(wrong)
    twin = runtime.load(ours.snapshot())
    with pytest.raises(NonFiniteError):
        ours(torch.full_like(first, math.nan))
    assert torch.equal(ours(second), twin(second))
    assert torch.equal(ours(third), twin(third))


def test_a_frame_whose_errors_have_no_bound_is_refused_and_the_next_is_whole(runtime, model):
    """It is finite itself; its tokens, or their differences, are not."""
    first, second, third = changing(3)
    for scale in (1e20, 1e30, 1e38):
        ours, theirs = runtime.stream(), eventful.Stream(model)
        ours(first), theirs(first)
        with pytest.raises(NonFiniteError):
            theirs(second * scale)
        with pytest.raises(NonFiniteError, match="computed whole"):
            ours(second * scale)
        assert_near(ours(third), model(third), "library")
        assert (ours.last.flushed, ours.last.reason) == (True, "failed")


@pytest.mark.parametrize("after", [0, 3])
def test_a_step_that_fails_is_followed_by_a_whole_frame(after, runtime, model, monkeypatch) -> None:
    frames = list(changing(6))
    ours = runtime.stream()
    for frame in frames[:after]:
        ours(frame)
    name = "step" if after else "flush"
    run = getattr(ours._memory, name)

    def fails(*given: object) -> None:
        run(*given)
        raise RuntimeError("half of the state is written")

    with monkeypatch.context() as patched:
        patched.setattr(ours._memory, name, fails)
        with pytest.raises(RuntimeError, match="half"):
            ours(frames[4])
    assert_near(ours(frames[5]), model(frames[5]), "library")
    assert (ours.last.flushed, ours.last.reason) == (True, "failed")


def test_nothing_else_is_done_with_a_stream_in_the_middle_of_a_step(runtime) -> None:
    ours = runtime.stream()
    frame = next(changing(1))
    ours(frame)

    def assign() -> None:
        ours.policy = TopR(3)

    with ours._busy:
        for use in (ours.flush, ours.snapshot, assign, lambda: ours(frame)):
            with pytest.raises(ConcurrentUseError):
                use()
    assert ours.policy == TopR(R)


def test_snapshots_keep_the_width_and_the_reason(runtime, model) -> None:
    ours = runtime.stream(Threshold(1.0))
    frames = list(changing(6))
    for frame in frames[:4]:
        ours(frame)
    assert ours.last.width < TOKENS
    again = runtime.load(ours.snapshot())
    assert torch.equal(again(frames[4]), ours(frames[4]))
    assert again.last.width == ours.last.width
    ours.flush()
    again = runtime.load(ours.snapshot())
    again(frames[5])
    assert again.last.reason == "asked"
    assert eventful.Stream.load(model, ours.snapshot()).policy == Threshold(1.0)
    other = runtime.load(ours.snapshot(), policy=TopR(2))
    assert other.policy == TopR(2)


def test_snapshots_of_other_types_are_refused(runtime, model) -> None:
    stream = eventful.Stream(model)
    with torch.autocast("cpu", torch.bfloat16):
        stream(next(changing(1)))
        stream(next(changing(1)))
    with pytest.raises(SnapshotError, match="autocast"):
        runtime.load(stream.snapshot())


@pytest.mark.parametrize("wrong", ["x", None, object(), [[1], [1, 2]]])
def test_what_is_no_frame_is_refused(wrong, runtime) -> None:
    with pytest.raises(FrameError, match="frame"):
        runtime.stream()(wrong)


@pytest.mark.parametrize("threads", [0, -1, "a", 1.5, True])
def test_threads_are_a_positive_number(threads, folder) -> None:
    with pytest.raises(ConfigError, match="threads"):
        Runtime(folder, threads=threads)


def test_writes_are_masked_where_token_0_depends_on_the_frame(model) -> None:
    """With special tokens at the end alone, a bad frame would write to a patch."""
    from dataclasses import replace

    from eventful.export.pure import PureStep
    from eventful.export.subject import Subject

    subject = Subject.of(model, next(changing(1)))
    pure = object.__new__(PureStep)
    pure.subject = subject
    assert pure._always_some
    pure.subject = replace(subject, layout=replace(subject.layout, prefix=0, suffix=1))
    assert not pure._always_some


def _copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def _sign(folder: Path, about: dict) -> None:
    """Write a manifest whose checksum is right."""
    from eventful import files
    from eventful.export.manifest import _canonical

    about = {key: value for key, value in about.items() if key not in ("checksum", "format")}
    text = files.digest([_canonical(about)])
    (folder / NAME).write_text(json.dumps({"format": 1, "checksum": text, **about}))


def test_a_changed_folder_is_refused(folder, tmp_path) -> None:
    copy = _copy(folder, tmp_path)
    good = (copy / NAME).read_text()
    (copy / NAME).write_text(good.replace('"tokens": 65', '"tokens": 64'))
    with pytest.raises(ArtefactError, match="checksum"):
        Runtime(copy)
    (copy / NAME).write_text(good[:-20])
    with pytest.raises(ArtefactError, match="damaged"):
        Runtime(copy)
    about = json.loads(good)
    about["files"]["../outside"] = "0" * 64
    _sign(copy, about)
    with pytest.raises(ArtefactError, match="not a file of the folder"):
        Runtime(copy)
    (copy / NAME).write_text(good)
    with (copy / "weights.bin").open("r+b") as weights:
        weights.seek(5000)
        weights.write(b"x")
    with pytest.raises(ArtefactError, match="digest"):
        Runtime(copy)
    (copy / "weights.bin").unlink()
    with pytest.raises(ArtefactError, match="missing"):
        Runtime(copy)
    with pytest.raises(ArtefactError, match="no manifest"):
        Runtime(tmp_path)


def test_weights_are_stored_once(folder) -> None:
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    weights = sum(value.nbytes for value in tiny_vit().state_dict().values())
    assert sizes["weights.bin"] < 1.5 * weights + 4096 * 60  # pages
    assert all(size < weights for name, size in sizes.items() if name.endswith(".onnx"))


REFUSED = {
    "motion": (Config.fast(TopR(4), context=None, fallback=False), "without motion"),
    "context": (Config.fast(TopR(4), motion=False, fallback=False), "context cannot"),
    "fallback": (Config.fast(TopR(4), motion=False, context=None), "fallback"),
    "operator": (Config.exact(TopR(4)), "gating='frame'"),
    "block": (Config.fast(TopR(4), gating="block"), "gating='frame'"),
    "noise": (exportable(eventful.NoiseThreshold()), "FollowScene"),
    "shared": (exportable(eventful.Shared(0.1)), "TopFraction"),
    "norm": (exportable(TopR(4, order=1.0)), "order=2"),
    "by gate": (exportable(Threshold({"frame": 1.0})), "Threshold with one value"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exported_names_the_nearest_that_can(name, tmp_path) -> None:
    config, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        export(tiny_vit(), torch.rand(1, 3, 64, 64), tmp_path / "x", config=config)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_something_else_is_not_replaced(model, tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ArtefactError, match="Name another folder"):
        export(model, torch.rand(1, 3, 64, 64), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_memory_that_is_read_after_the_update_is_not_updated_in_place(tmp_path) -> None:
    onnx = pytest.importorskip("onnx")
    from eventful.export.manifest import StateEntry
    from eventful.export.runtimes.onnx import updated_in_place

    make, kind = onnx.helper.make_node, onnx.TensorProto.FLOAT
    entry = StateEntry("k", "old", "new", (4, 2), "float32", False)

    def of(*nodes: object) -> set[str]:
        def value(name: str, shape: list[int], dtype: int = kind) -> object:
            return onnx.helper.make_tensor_value_info(name, dtype, shape)

        graph = onnx.helper.make_graph(
            list(nodes), "g",
            [value("old", [4, 2]), value("at", [1, 1], onnx.TensorProto.INT64),
             value("rows", [1, 2])],
            [value("new", [4, 2]), value("seen", [4, 2])],
        )  # fmt: skip
        onnx.save(onnx.helper.make_model(graph), str(tmp_path / "g.onnx"))
        return updated_in_place(tmp_path / "g.onnx", [entry])

    write = make("ScatterND", ["old", "at", "rows"], ["new"])
    assert of(write, make("Neg", ["new"], ["seen"])) == {"k"}
    assert of(write, make("Neg", ["old"], ["seen"])) == set()  # may run after the update
    view = make("Identity", ["old"], ["same"])
    assert of(view, write, make("Neg", ["same"], ["seen"])) == set()
    before = make("ReduceSum", ["old"], ["sum"])
    use = make("Mul", ["rows", "sum"], ["scaled"])
    late = make("ScatterND", ["old", "at", "scaled"], ["new"])
    assert of(before, use, late, make("Neg", ["new"], ["seen"])) == {"k"}
    assert of(make("Add", ["old", "old"], ["new"]), make("Neg", ["new"], ["seen"])) == set()


@pytest.mark.parametrize("name", ["timm:vit_small_patch14_dinov2", "timm:vit_tiny_patch16_224"])
def test_models_by_name_with_and_without_a_head(name) -> None:
    with pytest.warns(RandomWeightsWarning):
        model, frame = open_for_export(name, size=112)
    assert frame.shape == (1, 3, 112, 112)
    with torch.no_grad():
        assert model(frame).dim() == 2
