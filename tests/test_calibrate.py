"""`eventful calibrate` on tiny clips and models: what is measured, chosen and written."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import miniatures
import zoo_timm
from commands import here  # noqa: F401
from eventful import Config, FollowScene, Threshold, TopFraction, TopR, register_policy
from eventful.bench.video import measure as bench
from eventful.bench.video.configs import parse_config
from eventful.bench.video.footage import Footage, open_footage
from eventful.bench.video.measure import Head, VideoPlan
from eventful.bench.video.model import Backbone
from eventful.calibrate import measure as measuring
from eventful.calibrate import settings as catalogue
from eventful.calibrate import thresholds as tuning
from eventful.calibrate.choose import Limits, choose
from eventful.calibrate.measure import Clip, FrameSamples, Measured, Sample, load_clip, measure
from eventful.calibrate.policy_file import policy_text
from eventful.calibrate.rows import Row, counted_frames, dense_times, rows_of
from eventful.calibrate.settings import Setting, chosen_settings, parse_setting, skipping
from eventful.calibrate.thresholds import (
    TunedHere,
    operations,
    recorded_errors,
    thresholds,
    tuned_settings,
)
from eventful.errors import ConfigError, DataError, MissingFileError

pytestmark = pytest.mark.usefixtures("without_openvino")

SIZE = "64x96"
USUAL = [
    *("default", "FollowScene(0.3)", "FollowScene(1.2)", "FollowScene(2.4)"),
    *("TopFraction(0.03)", "TopFraction(0.06)", "TopFraction(0.12)", "TopFraction(0.25)"),
]
COMMAND = ("calibrate", "test_vit", "stress:enter", "--size", "48x80", "--frames", "10")
TOP = ("--setting", "TopFraction(0.2)", "--setting", "TopFraction(0.6)")
COLUMNS = ("updated", "operations", "error", "error_p90", "error_worst")


@pytest.fixture(scope="module")
def plan() -> VideoPlan:
    torch.manual_seed(0)
    backbone = Backbone("tiny", zoo_timm.plain(img_size=(64, 96))())
    return VideoPlan(backbone, SIZE, timed=False, compiled=False)


def clip_of(plan: VideoPlan, name: str, frames: int = 12, head: Head | None = None) -> Clip:
    return load_clip(plan, open_footage(f"stress:{name}", frames, SIZE), head)


def by_name(measured: Measured) -> dict[str, Row]:
    return {row.name: row for row in rows_of(measured)}


def row(name: str, cost: float, error: float, every: int = 0, time: float | None = None) -> Row:
    config = None if every else Config.fast(TopFraction(0.1))
    return Row(Setting(name, config, every), cost, cost, error / 2, error, 2 * error, time)


class TestSettings:
    def test_the_usual_ones_and_frame_skipping(self) -> None:
        made = chosen_settings((), "fast", 64)
        assert [setting.name for setting in made] == [
            *USUAL,
            "skip:2",
            "skip:4",
            "skip:8",
            "skip:16",
        ]
        assert made[0].config == Config.fast()
        assert made[1].config == Config.fast(FollowScene(0.3))
        assert made[4].config == Config.fast(TopFraction(0.03))
        assert "skip:8" not in [setting.name for setting in chosen_settings((), "fast", 16)]

    def test_a_preset_without_a_policy_of_its_own(self) -> None:
        made = chosen_settings((), "paper", 8)
        assert [s.name for s in made] == [*USUAL[4:], "skip:2"]
        assert made[0].config == Config.paper(TopFraction(0.03))

    @pytest.mark.parametrize(
        ("text", "name", "config"),
        [
            ("default", "default", Config.fast()),
            ("TopR(8)", "TopR(8)", Config.fast(TopR(8))),
            ("mine=TopR(8)", "mine", Config.fast(TopR(8))),
            ("FollowScene(level=1.0),max_age=9", None, Config.fast(FollowScene(1.0), max_age=9)),
            ("paper:TopR(4)", "paper:TopR(4)", Config.paper(TopR(4))),
            ("fast,max_age=9", "fast,max_age=9", Config.fast(max_age=9)),
        ],
    )
    def test_by_text(self, text: str, name: str | None, config: Config) -> None:
        assert parse_setting(text, "fast") == Setting(name or text, config)

    def test_named_ones_replace_the_usual(self) -> None:
        made = chosen_settings(("TopR(8)", "skip:3"), "fast", 64)
        assert [setting.name for setting in made] == ["TopR(8)", "skip:3"]
        assert made[1].every == 3

    @pytest.mark.parametrize(
        ("texts", "said"),
        [
            (("TopR(8)", "TopR(8)"), "NAME=SPEC"),
            (("dense=TopR(8)",), "NAME=SPEC"),
            (("paper",), "has no policy"),
            (("skip:1",), "every 2nd"),
            (("TopX(3)",), "no policy TopX"),
        ],
    )
    def test_refused(self, texts: tuple[str, ...], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            chosen_settings(texts, "fast", 64)

    def test_families_and_labels_of_the_picture(self) -> None:
        labels = [(s.family, s.label) for s in chosen_settings((), "fast", 16)]
        assert labels[:2] == [("FollowScene", "default"), ("FollowScene", "0.3")]
        assert labels[5] == ("TopFraction", "6 %")
        assert labels[-1] == (catalogue.SKIPPING, "every 4")


class TestMeasuring:
    def test_agrees_with_bench_video(self, plan: VideoPlan) -> None:
        config = Config.fast(TopR(8), fallback=False)
        made = by_name(measure(plan, [clip_of(plan, "enter")], [Setting("top", config)]))["top"]
        other = bench.measure(
            dataclasses.replace(plan, configs={"top": config}),
            open_footage("stress:enter", 12, SIZE),
        )
        expected = next(row for row in other.rows if row.contender == "top")
        assert made.error == pytest.approx(expected.error)
        assert made.error_worst == pytest.approx(expected.error_worst)
        assert made.operations == pytest.approx(expected.operations_steady)
        assert made.updated == pytest.approx(expected.updated_steady)

    def test_frame_skipping_holds_the_last_dense_output(self, plan: VideoPlan) -> None:
        clip = clip_of(plan, "walk", 10)
        measured = measure(plan, [clip], [skipping(3)])
        samples = [frame.settings["skip:3"] for frame in measured.frames[0]]
        assert [sample.error == 0 for sample in samples] == [t % 3 == 0 for t in range(10)]
        with torch.no_grad():
            held, now = (clip.model(clip.prepare(clip.frames[t])) for t in (3, 5))
        assert samples[5].error == pytest.approx(float((held - now).norm() / now.norm()), rel=1e-4)
        made = by_name(measured)["skip:3"]
        assert (made.updated, made.operations) == (1 / 3, 1 / 3)

    def test_columns(self) -> None:
        errors = [9.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
        setting = Setting("a", Config.fast())
        frames = [
            FrameSamples({"a": Sample(0.2, 0.1 if t else 1.0, error, ms=5.0)}, {"eager": 10.0})
            for t, error in enumerate(errors)
        ]
        clip = Clip("c", "", torch.nn.Identity(), None, [])  # type: ignore[arg-type]
        made = by_name(Measured([clip], [setting], frames=[frames]))
        assert made["a"].operations == pytest.approx(0.1)  # without the first frame
        numbers = made["a"].error, made["a"].error_p90, made["a"].error_worst
        assert numbers == pytest.approx((0.45, 0.81, 0.9))
        assert (made["a"].time, made["a"].ms, made["a"].cost) == (0.5, 5.0, 0.5)
        assert made["dense"].time == 1.0

    def test_time_is_against_the_fastest_dense_path(self) -> None:
        setting = Setting("a", Config.fast())
        frame = FrameSamples({"a": Sample(0.2, 0.1, 0.0, 5.0)}, {"eager": 20.0, "graph": 10.0})
        clip = Clip("c", "", torch.nn.Identity(), None, [])  # type: ignore[arg-type]
        measured = Measured([clip], [setting, skipping(4)], frames=[[frame] * 9])
        measured.frames[0] = [
            dataclasses.replace(frame, settings={**frame.settings, "skip:4": Sample(0, 0, 0.1)})
        ] * 9
        made = by_name(measured)
        assert dense_times(measured).path == "graph"
        assert made["a"].time == pytest.approx(0.5)
        assert (made["skip:4"].time, made["skip:4"].ms) == (0.25, 2.5)

    def test_times_are_measured(self, plan: VideoPlan) -> None:
        timed = dataclasses.replace(plan, timed=True)
        settings = [Setting("top", Config.fast(TopR(4))), skipping(2)]
        made = by_name(measure(timed, [clip_of(plan, "enter", 8)], settings))
        assert made["top"].time > 0
        assert made["top"].ms > 0
        assert made["dense"].ms > 0
        assert by_name(measure(plan, [clip_of(plan, "enter", 8)], settings))["top"].time is None

    def test_several_clips_count_by_their_frames(self, plan: VideoPlan) -> None:
        clips = [clip_of(plan, "enter", 8), clip_of(plan, "walk", 12)]
        settings = [Setting("top", Config.fast(TopR(8), fallback=False))]
        both = measure(plan, clips, settings)
        parts = [measure(plan, [clip], settings).frames[0] for clip in clips]
        assert counted_frames(both) == 20
        errors = [frame.settings["top"].error for part in parts for frame in part[1:]]
        assert by_name(both)["top"].error_worst == pytest.approx(max(errors))
        assert by_name(both)["top"].error == pytest.approx(
            sorted(errors)[len(errors) // 2], rel=0.2
        )

    def test_average_precision(self, plan: VideoPlan) -> None:
        head = Head(lambda tokens, size: float(tokens.abs().sum()), lambda found, size: len(found))
        made = by_name(measure(plan, [clip_of(plan, "enter", 8, head)], [skipping(2)]))
        assert {row.map50 for row in made.values()} == {8}

    def test_ctrl_c_keeps_the_frames_so_far(self, plan: VideoPlan) -> None:
        def stop(what: str, done: int, count: int) -> None:
            if done == 9:
                raise KeyboardInterrupt

        settings = [Setting("top", Config.fast(TopR(8))), skipping(2)]
        measured = measure(plan, [clip_of(plan, "enter", 12)], settings, stop)
        assert measured.interrupted
        assert counted_frames(measured) == 9
        assert list(by_name(measured)) == ["dense", "top", "skip:2"]
        begun = Measured(measured.clips, settings, frames=[measured.frames[0][:1]])
        assert rows_of(begun) == []

    def test_a_short_clip_is_refused(self, plan: VideoPlan) -> None:
        with pytest.raises(DataError, match="7 frames; a calibration needs at least 8"):
            clip_of(plan, "enter", 7)

    def test_a_clip_in_which_nothing_changes_is_refused(self, plan: VideoPlan) -> None:
        still, moving = clip_of(plan, "still", 8), clip_of(plan, "cursor", 8)
        with pytest.raises(DataError, match="Nothing changes in stress-still"):
            measure(plan, [still], [skipping(2)])
        made = measure(plan, [still, moving], [skipping(2)])
        assert made.notes == [
            "Nothing changes in stress-still: it lowers the errors and costs shown."
        ]
        frames = [moving.frames[0]] * 8
        noisy = [(f.short() + t % 3).clamp(0, 255).byte() for t, f in enumerate(frames)]
        assert dataclasses.replace(moving, frames=noisy).still


class TestChoice:
    ROWS = (
        row("dear", 0.5, 0.05),
        row("middle", 0.3, 0.09),
        row("cheap", 0.1, 0.3),
        row("skip", 0.05, 0.5, every=20),
    )

    @pytest.mark.parametrize(
        ("limits", "name"),
        [
            (Limits(), "middle"),
            (Limits(error=0.09), "middle"),
            (Limits(error=0.08), "dear"),
            (Limits(error=0.3), "cheap"),
            (Limits(operations=0.4), "middle"),
            (Limits(operations=0.5), "dear"),
            (Limits(operations=0.2), "cheap"),
            (Limits(error=0.3, operations=0.5), "cheap"),
        ],
    )
    def test_the_best_within_the_limits(self, limits: Limits, name: str) -> None:
        found = choose(self.ROWS, limits)
        assert (found.row.name, found.met, found.better_skip) == (name, True, None)

    def test_time_decides_where_it_is_known(self) -> None:
        rows = (row("few operations", 0.1, 0.05, time=0.8), row("fast", 0.3, 0.05, time=0.4))
        assert choose(rows, Limits()).row.name == "fast"
        assert choose(rows, Limits(speed=2)).row.name == "fast"
        assert not choose(rows, Limits(speed=3)).met

    @pytest.mark.parametrize(
        ("limits", "nearest"),
        [(Limits(error=0.01), "dear"), (Limits(operations=0.01), "cheap")],
    )
    def test_the_nearest_where_none_is(self, limits: Limits, nearest: str) -> None:
        found = choose(self.ROWS, limits)
        assert (found.row.name, found.met) == (nearest, False)

    def test_frame_skipping_is_named_and_not_chosen(self) -> None:
        rows = (*self.ROWS, row("skip:8", 0.12, 0.04, every=8))
        found = choose(rows, Limits())
        assert (found.row.name, found.better_skip.name) == ("middle", "skip:8")
        assert choose(rows[-1:], Limits()) is None

    @pytest.mark.parametrize(
        "given",
        [
            {"error": math.nan}, {"error": -0.1}, {"error": math.inf}, {"operations": 0.0},
            {"operations": 20.0}, {"speed": -1.0}, {"speed": math.nan},
        ],
    )  # fmt: skip
    def test_limits_that_make_no_sense(self, given: dict[str, float]) -> None:
        with pytest.raises(ConfigError, match=f"--{next(iter(given))} is a .*e.g. "):
            Limits(**given)

    def test_speed_needs_times(self) -> None:
        with pytest.raises(ConfigError, match="leave out --no-time"):
            choose(self.ROWS, Limits(speed=2))


class TestPolicyFile:
    @pytest.mark.parametrize(
        "config",
        [
            Config.fast(),
            Config.fast(TopR(8), context=None, max_age=None, scene_cut=None),
            Config.exact(),
            Config.paper(Threshold({"blocks.0.qkv": 0.5, "default": 1.0})),
            Config(FollowScene(max_fraction=0.2), gating="block"),
        ],
        ids=repr,
    )
    def test_round_trip(self, config: Config, tmp_path: Path) -> None:
        text = policy_text(config, {"error": 0.25, "map50": None})
        path = tmp_path / "policy.toml"
        path.write_text(text)
        assert Config.load(path) == Config.load(str(path)) == config
        assert parse_config(str(path)) == ("policy", config)
        assert tomllib.loads(text)["calibration"] == {"error": 0.25}

    def test_names_the_preset(self) -> None:
        assert tomllib.loads(policy_text(Config.fast(), {}))["preset"] == "fast"

    def test_what_toml_cannot_hold_is_refused(self) -> None:
        @register_policy
        @dataclasses.dataclass(frozen=True)
        class Odd(FollowScene):
            extra: float | None = 1.0

        with pytest.raises(ConfigError, match="TOML has no None"):
            policy_text(Config.fast(Odd(extra=None)), {})
        never = Config.fast(FollowScene(renewal=None))
        assert Config.from_toml(policy_text(never, {})) == never

    def test_load_says_what_is_wrong(self, tmp_path: Path) -> None:
        with pytest.raises(MissingFileError, match="is not there"):
            Config.load(tmp_path / "none.toml")
        (tmp_path / "bad.toml").write_text("gating = 3\n")
        with pytest.raises(ConfigError, match=r"bad.toml cannot be read as a config: gating must"):
            Config.load(tmp_path / "bad.toml")
        (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigError, match=r"bad.toml cannot be read"):
            Config.load(tmp_path / "bad.toml")
        with pytest.raises(ConfigError, match="Unknown settings: calibration"):
            Config.from_dict({"calibration": {}})


class TestThresholds:
    def test_a_share_of_each_gates_errors_exceeds_its_threshold(self, plan: VideoPlan) -> None:
        errors = recorded_errors([clip_of(plan, "walk", 8)], Config.paper(TopFraction(0.2)))
        assert len(errors) == 3 * len(plan.backbone.model.blocks)
        found = thresholds(errors, 0.2)
        assert list(found) == list(errors)
        for name, values in errors.items():
            assert float((values > found[name]).float().mean()) == pytest.approx(0.2, abs=0.01)
        assert len(set(found.values())) == len(found)

    def test_global_and_per_gate_cost_the_same(self, plan: VideoPlan) -> None:
        clips = [clip_of(plan, "walk", 8)]
        told: list[str] = []
        made = tuned_settings(
            TunedHere(clips), "paper", lambda what, *_: told.append(what), shares=(0.3,)
        )
        assert [s.name for s in made] == ["threshold, global, 30%", "threshold, per gate, 30%"]
        assert [s.family for s in made] == [catalogue.GLOBAL, catalogue.PER_GATE]
        one, own = (s.config.policy.h for s in made)
        assert isinstance(one, float)
        assert "blocks.0.qkv" in own
        costs = [operations(clips, s.config) for s in made]
        assert costs[0] == pytest.approx(costs[1], rel=0.05)
        assert told

    def test_one_gate_per_frame_has_nothing_to_tune(self) -> None:
        with pytest.raises(ConfigError, match="Choose --preset paper"):
            tuned_settings(TunedHere([]), "fast")


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_table_has_every_setting(here: Callable[..., Any]) -> None:
    done = here(*COMMAND[:-1], "8", "--no-time")
    assert done.returncode in (0, 1), done.stderr
    for name in ("dense", *USUAL, "skip:2"):
        assert f"\n{name} " in done.stdout
    assert "The weights are random" in done.stdout.replace("\n", " ")


def test_files_and_json(here: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = here(*COMMAND, *TOP, "--no-compile", "--error", "5", "--json", "--out", out)
    assert done.returncode == 0, done.stderr
    data = miniatures.strict_json(done.stdout)
    assert data == miniatures.strict_json((out / "calibration.json").read_text())
    assert files_in(out) == {"calibration.json", "calibration.png", "policy.toml"}
    assert (out / "calibration.png").stat().st_size > 10_000
    rows = {row["setting"]: row for row in data["settings"]}
    assert list(rows) == ["dense", "TopFraction(0.2)", "TopFraction(0.6)", "skip:2", "skip:4"]
    for numbers in rows.values():
        assert all(math.isfinite(numbers[name]) for name in (*COLUMNS, "time", "ms"))
    chosen = data["chosen"]
    assert chosen == min(list(rows)[1:3], key=lambda name: rows[name]["time"])
    assert data["recommended"] == (chosen if rows[chosen]["time"] < 1 else None)
    config = Config.load(out / "policy.toml")
    assert config == Config.fast(TopFraction(float(chosen[12:-1])))
    about = tomllib.loads((out / "policy.toml").read_text())["calibration"]
    assert about["setting"] == chosen
    assert about["model"] == "test_vit"
    assert about["videos"] == ["stress-enter"]
    assert about["error"] == pytest.approx(rows[chosen]["error"], rel=1e-3)
    assert about["limit_error"] == 5
    assert {"date", "torch", "eventful", "frames", "size"} <= set(about)
    used = here(
        *("bench", "video", "stress:enter", "--model", "test_vit", "--size", "48x80", "--json"),
        *("--frames", "4", "--no-time", "--config", out / "policy.toml"),
    )
    ran = {row["contender"]: row["config"] for row in miniatures.strict_json(used.stdout)}
    assert ran["policy"] == repr(config)


def test_a_limit_out_of_reach(here: Callable[..., Any], tmp_path: Path) -> None:
    given = ("--no-time", "--error", "1e-9", "--out", tmp_path, "--policy", tmp_path / "p.toml")
    done = here(*COMMAND[:2], "stress:walk", *COMMAND[3:], *TOP, *given)
    assert done.returncode == 1
    assert "TopFraction(0.2)" in done.stdout
    message = " ".join(done.stderr.split())
    assert "Nothing measured reaches an error of at most 1e-09." in message
    assert "The nearest is TopFraction(0.6)" in message
    assert files_in(tmp_path) == {"calibration.json", "calibration.png"}
    data = miniatures.strict_json((tmp_path / "calibration.json").read_text())
    assert (data["recommended"], data["nearest"]) == (None, "TopFraction(0.6)")


def test_thresholds_are_written_by_the_names_of_gates(
    here: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "SHARES", (0.4,))
    monkeypatch.setattr(tuning, "_TRIES", 2)
    policy = tmp_path / "deep/policy.toml"
    given = ("--preset", "paper", "--per-gate", "--no-time", "--operations", "0.9")
    given += ("--policy", policy)
    done = here(*COMMAND[:2], "stress:walk", *COMMAND[3:5], "--frames", "8", *given, "--json")
    assert done.returncode == 0, done.stderr
    data = miniatures.strict_json(done.stdout)
    names = [row["setting"] for row in data["settings"]]
    assert {"threshold, global, 40%", "threshold, per gate, 40%"} <= set(names)
    assert "TopFraction(0.06)" not in names
    config = Config.load(policy)
    assert data["recommended"] == "threshold, per gate, 40%"
    assert isinstance(config.policy, Threshold)
    assert {"blocks.0.qkv", "blocks.0.projection", "blocks.0.mlp"} <= set(config.policy.h)
    assert dataclasses.replace(config, policy=None) == Config.paper()


def test_ctrl_c_keeps_what_was_measured(
    here: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, timed = [], measuring.timed

    def stopped(run: Any, frame: Any) -> Any:
        calls.append(1)
        if len(calls) > 3 * 9:
            raise KeyboardInterrupt
        return timed(run, frame)

    monkeypatch.setattr(measuring, "timed", stopped)
    done = here(*COMMAND, *TOP, "--no-time", "--error", "9", "--out", tmp_path, "--json")
    assert done.returncode == 130
    data = miniatures.strict_json(done.stdout)
    assert data["interrupted"]
    assert data["frames"] == 9
    assert "Interrupted after 9 of 10 frames." in data["notes"]
    assert files_in(tmp_path) == {"calibration.json", "calibration.png", "policy.toml"}
    calls.extend([1] * 3 * 9)
    done = here(*COMMAND, *TOP, "--no-time")
    assert done.returncode == 130
    assert "before anything was measured" in done.stderr


def test_labels_and_a_head(here: Callable[..., Any], tmp_path: Path) -> None:
    from eventful.models.anchor_free import PointHead, PointHeadConfig

    data = miniatures.mot(tmp_path / "mot", frames=8)
    sequence = next(p.parent for p in sorted((data / "val").glob("*/seqinfo.ini")))
    head = PointHead(PointHeadConfig(dim=64, patch=16))
    torch.save({"head": head.state_dict(), "about": {}}, tmp_path / "head.pt")
    given = ("--size", "48x64", "--labels", sequence, "--head", tmp_path / "head.pt")
    done = here("calibrate", "test_vit", *given, *TOP, "--no-time", "--json")
    assert done.returncode in (0, 1), done.stderr
    rows = miniatures.strict_json(done.stdout)["settings"]
    assert all(0 <= row["map50"] <= 1 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("test_vit", "nowhere.mp4"), "nowhere.mp4 is not there"),
        (("test_vit",), "Name a video"),
        ((__file__,), "The model comes first"),
        (("test_vit", "stress:enter", "--out", f"{__file__}/deep"), "cannot be made"),
        (("no_such_vit", "stress:enter"), "'no_such_vit' names no model"),
        (("test_vit", "stress:enter", "--frames", "5"), "5 frames; a calibration needs"),
        (("test_vit", "stress:still", "--frames", "9"), "Nothing changes in stress-still"),
        (("test_vit", "stress:enter", "--error", "nan"), "--error is a number >= 0"),
        (("test_vit", "stress:enter", "--error", "-1"), "--error is a number >= 0"),
        (("test_vit", "stress:enter", "--speed", "2", "--no-time"), "leave out --no-time"),
        (("test_vit", "stress:enter", "--preset", "slow"), "the presets are fast"),
        (("test_vit", "stress:enter", "--per-gate", "--frames", "8"), "Choose --preset paper"),
    ],
)
def test_mistakes_say_what_to_do(
    here: Callable[..., Any], arguments: tuple[str, ...], said: str
) -> None:
    done = here("calibrate", *arguments, "--size", "48x80", "--no-compile")
    assert done.returncode == 2
    assert said in done.stderr


def test_footage_is_read_once_per_clip(plan: VideoPlan) -> None:
    read: list[int] = []
    frames = list(open_footage("stress:enter", 8, SIZE).read(None, "none"))
    footage = Footage("a", "", (64, 96), lambda *_: (read.append(1), iter(frames))[1])
    load_clip(plan, footage)
    assert len(read) == 1
