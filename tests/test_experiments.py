"""The paper's experiments: what their files say, that each can be run, that a wheel has them."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

import miniatures
import tiny_models
from eventful import Config, TopR
from eventful.cli import paper_tables
from eventful.errors import ConfigError
from eventful.paper.evaluate import experiment as experiments
from eventful.paper.evaluate.evaluation import Settings, evaluate
from eventful.paper.evaluate.experiment import Experiment
from eventful.paper.evaluate.variants import Variant


@pytest.fixture(params=experiments.names())
def packaged(request) -> Experiment:
    return experiments.load(request.param)


def test_every_experiment_parses_and_every_variant_has_a_rule(packaged) -> None:
    assert packaged.title
    assert packaged.paper
    assert packaged.data
    for variant in packaged.variants:
        config = variant.config()
        plain = variant.preset == "dense" and variant.pool == 1
        assert (config is None) == plain
        if config is not None:
            assert isinstance(config, Config)
            assert Config.from_dict(config.to_dict()) == config
        json.dumps(variant.to_dict())


def test_the_papers_tables_are_all_there() -> None:
    wanted = {f"table-{name}" for name in "12abcde"} | {
        *("gate-position", "query-key-only", "token-wise", "stgt", "vivit-untuned", "padding"),
        "systems",  # not in the paper
    }
    assert wanted == set(experiments.names())


@pytest.mark.parametrize("table", ["1", "A", "B", "C", "D", "E"])
def test_published_costs_agree_with_the_tables_of_reproduce(table: str) -> None:
    """Two transcriptions of the paper, made at different times."""
    made = experiments.load(f"table-{table.lower()}")
    found = sorted(
        (v.label, v.size, v.r or 0, v.tuned_r or 0, v.h or 0.0, v.published.operations)
        for v in made.variants
    )
    expected = sorted(
        # Table A names no tuned r: each row is tested where it was tuned.
        (c.variant, c.size, c.r or 0, c.tuned_r or (c.r or 0 if table == "A" else 0), c.h or 0.0,
         c.value)
        for c in paper_tables.COSTS
        if c.table == f"Table {table}"
    )  # fmt: skip
    assert found == expected
    assert all(v.published.accuracy is not None for v in made.variants)


def test_the_gate_position_is_compared_token_wise() -> None:
    """As in the authors' code: token-wise blocks at three r, one side of the norm and the other."""
    made = experiments.load("gate-position")
    after, before = (
        [v for v in made.variants if v.config().gate == gate]
        for gate in ("after-norm", "before-norm")
    )
    assert len(after) + len(before) == len(made.variants)
    for variants in (after, before):
        assert [v.r for v in variants] == [2048, 1024, 512]
        for v in variants:
            assert v.size == 1024
            assert v.config() == replace(Config.tokenwise(TopR(v.r)), gate=v.config().gate)
    table = [v for v in experiments.load("table-c").variants if v.label == "Token-wise only"]
    published = {(v.size, v.r): v.published for v in table}
    assert [v.published for v in after] == [published[v.size, v.r] for v in after]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title = 'x'", "no variants"),
        ("title = 'x'\n[[variants]]\npreset = 'dense'", "label is missing"),
        ("title = 'x'\ncolour = 1", "unknown 'colour'"),
        ("title = 'x'\n[[variants]]\nlabel = 'a'\npreset = 'papr'\nr = 1", "variant 1.*papr"),
        (
            "title = 'x'\n[[variants]]\nlabel = 'a'\npreset = 'paper'\nr = [1, 2]\n"
            "published.accuracy = [1.0]",
            "different lengths",
        ),
        (
            "title = 'x'\n[[variants]]\nlabel = 'a'\npreset = 'paper'\nr = 1\n"
            "options = { attention = 'fast' }",
            "attention must be one of",
        ),
        ("title = 'x'\n[[variants]]\nlabel = 'a'\npreset = 'stgt'\nr = [1, 1]", "two variants"),
        ("title = ", "not valid TOML"),
    ],
)
def test_a_wrong_experiment_says_where(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experiments.parse(text, "mine")
    with pytest.raises(ConfigError, match="table-c"):
        experiments.load("table-z")


# Each of them, run


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Miniature data and tiny weights for every kind of data the experiments name."""
    root = tmp_path_factory.mktemp("stage")
    detector = tiny_models.write(tiny_models.detector(), root / "vitdet.safetensors")
    verbs = tiny_models.write(tiny_models.recogniser(), root / "epic.safetensors")
    actions = tiny_models.write(tiny_models.recogniser(classes=400), root / "kinetics.safetensors")
    return {
        "ImageNet VID": (miniatures.imagenet(root / "vid"), detector),
        "EPIC-Kitchens-100": (miniatures.epic(root / "epic"), verbs),
        "Kinetics-400": (miniatures.kinetics(root / "kinetics"), actions),
    }


SIDES = {1024: 64, 672: 48, 320: 32, 224: 32}  # 16 tokens, 9, 16 and a class token


def shrunk(variant: Variant) -> Variant:
    """The same at the size of a tiny model; r keeps its share of the tokens."""
    assert variant.size is not None
    side = SIDES[variant.size]
    shrink = (side // (16 if variant.model == "vitdet" else 8)) ** 2 / (variant.size // 16) ** 2
    r = None if variant.r is None else max(1, round(variant.r * shrink))
    return replace(variant, size=side, r=r)


def kinds(made: Experiment) -> tuple[Variant, ...]:
    """One variant of each kind."""
    return tuple({(v.label, v.size, v.tuned_r): shrunk(v) for v in made.variants}.values())


@pytest.mark.parametrize(
    "name", [name for name in experiments.names() if experiments.load(name).kind != "runtime"]
)
def test_every_kind_of_variant_runs(name: str, stage: dict[str, tuple[Path, Path]]) -> None:
    made = experiments.load(name)
    data, weights = next(found for kind, found in stage.items() if made.data.startswith(kind))
    made = replace(made, variants=kinds(made))
    given = dict.fromkeys(made.weights, weights)
    settings = Settings(data, given, videos=1, frames=2, views=(1, 1))
    report = evaluate(made, settings)
    assert not report.left_out
    assert [row.label for row in report.rows] == [variant.label for variant in made.variants]
    for row in report.rows:
        assert getattr(row, made.metric) is not None
        assert row.published_operations is None or row.operations > 0
        if row.preset not in ("dense", "skip") and row.h is None:
            assert row.operations < row.dense_operations


def test_a_wheel_has_the_experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = pytest.importorskip("hatchling.build")
    monkeypatch.chdir(Path(__file__).resolve().parent.parent)
    wheel = tmp_path / build.build_wheel(str(tmp_path))
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
    for name in experiments.names():
        assert f"eventful/paper/experiments/{name}.toml" in files
    assert "eventful/py.typed" in files
    assert "eventful/paper/data/kinetics400.txt" in files
