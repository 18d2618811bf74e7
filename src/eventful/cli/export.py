"""`eventful export`: a model's steps as graphs that run without Python."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eventful.cli.options import MODEL_HELP, Dtype, FrameSize, Json, ModelWeights, grouped

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from eventful.cli.progress import Report
    from eventful.config import Config
    from eventful.export import Manifest
    from eventful.policies import Policy


class Target(StrEnum):
    """What can be written."""

    onnx = "onnx"
    openvino = "openvino"
    aoti = "aoti"
    triton = "triton"


class Choice(StrEnum):
    """Policies that exported steps begin with."""

    top_r = "top-r"
    follow_scene = "follow-scene"


@dataclass(frozen=True)
class Exported:
    """What `eventful export` writes, and how."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder to write; an earlier export is replaced.")
    ]
    to: Annotated[Target, typer.Option(help="Runtime that the graphs are for.")] = Target.onnx
    rule: Annotated[
        str, typer.Option(help="Preset; only fast can, without motion, context and fallback.")
    ] = "fast"
    r: Annotated[
        str,
        typer.Option(
            "--r",
            metavar="R,...",
            help="Tokens to update; one step graph for each number.",
        ),
    ] = "64,128,256"
    policy: Annotated[
        Choice,
        typer.Option(
            help="Policy to begin with: the largest r, or as many as the scene needs up to it."
        ),
    ] = Choice.top_r
    h: Annotated[
        float | None, typer.Option("--h", help="Threshold on the error in place of --policy.")
    ] = None
    max_age: Annotated[
        int, typer.Option(min=0, help="No token is older than so many frames; 0 for no limit.")
    ] = 128
    size: FrameSize = None
    weights: ModelWeights = None
    dtype: Annotated[Dtype, typer.Option(help="Type of weights, frames and state.")] = Dtype.float32
    int8: Annotated[
        bool, typer.Option("--int8", help="Store the weights of linear layers in 8 bits.")
    ] = False
    as_json: Json = False


@grouped
def export(*, what: Exported) -> None:
    """Write a model's steps as graphs for onnxruntime, OpenVINO, AOTInductor or Triton.

    The folder holds a graph that computes everything, a step for each r, the weights, and a
    manifest. `eventful.export.Runtime` runs it.
    """
    run(what)


def run(what: Exported) -> None:
    """Export, and say what was written."""
    import torch

    from eventful.cli.progress import shown
    from eventful.config import Config
    from eventful.export import export as write
    from eventful.export import exportable
    from eventful.export.frames import open_for_export
    from eventful.modelspec.size import parse_size

    _check_dtype(what)
    numbers = _numbers(what)
    policy, age = _policy(what, numbers), what.max_age or None
    size = parse_size(what.size)
    if what.rule == "fast":
        config = exportable(policy, max_age=age)
    else:
        config = Config.preset(what.rule, policy)
    dtype = getattr(torch, what.dtype.value)
    model, example = open_for_export(what.model, what.weights, size)
    model, example = model.to(dtype), example.to(dtype)
    with shown(f"export {what.model}", "graphs") as report:
        if what.to is Target.triton:
            _to_triton(model, example, config, max(numbers), what, report)
            return
        made = write(
            model, example, what.out, to=what.to.value, r=numbers, config=config,
            name=what.model, int8=what.int8, tick=report,
        )  # fmt: skip
    _show(made, what)


def _check_dtype(what: Exported) -> None:
    """Raise where a runtime cannot compute in a type."""
    from eventful.errors import UnsupportedError

    if what.dtype is not Dtype.float32 and what.to is not Target.aoti:
        raise UnsupportedError(
            f"--dtype {what.dtype.value} is for --to aoti: onnxruntime has no kernels for it on a "
            "CPU, and OpenVINO chooses the precision when it loads: Runtime(folder, "
            "precision='bf16')."
        )


def _to_triton(
    model: Module, example: Tensor, config: Config, r: int, what: Exported, report: Report
) -> None:
    """Write a model repository, and say what is in it."""
    import re

    from eventful.errors import UnsupportedError
    from eventful.export.triton import export_triton

    if what.int8 or what.dtype is not Dtype.float32:
        raise UnsupportedError(
            "A Triton repository is written in float32. Use --to onnx for --int8, --to aoti for "
            "bfloat16."
        )
    name = re.sub("[^A-Za-z0-9_-]+", "-", what.model).strip("-")
    made = export_triton(model, example, what.out, r=r, config=config, name=name, tick=report)
    sizes = {str(path.relative_to(what.out)): path.stat().st_size
             for path in sorted(made.rglob("*")) if path.is_file()}  # fmt: skip
    if what.as_json:
        about = {
            "folder": str(what.out), "to": "triton", "model": name, "r": r,
            "rule": config.to_dict(), "left_out": _left_out(what), "bytes": sizes,
        }  # fmt: skip
        print(json.dumps(about, indent=2))
        return
    print(f"Triton model {name} in {what.out}, with a step of r = {r}:")
    for path, size in sizes.items():
        print(f"  {path} ({size / 1e6:,.1f} MB)")


def _numbers(what: Exported) -> list[int]:
    """The numbers of `--r`."""
    from eventful.errors import ConfigError

    text = what.r
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"--r is one number of tokens or several, e.g. 64,128,256; got {text!r}.")
    if what.to is Target.triton and len(parts) > 1:
        raise ConfigError(
            f"A model of Triton has one step, and --r {text} asks for {len(parts)}. Give one "
            f"number: --r {parts[-1]}."
        )
    return [int(part) for part in parts]


def _policy(what: Exported, numbers: list[int]) -> Policy:
    """The policy to begin with."""
    from eventful.errors import ConfigError
    from eventful.policies import FollowScene, Threshold, TopR

    if what.h is not None and what.policy is Choice.follow_scene:
        raise ConfigError(
            "--h is a policy of its own, a fixed threshold, and --policy follow-scene another one. "
            "Leave one of them out."
        )
    if what.h is not None:
        return Threshold(what.h)
    return FollowScene() if what.policy is Choice.follow_scene else TopR(max(numbers))


def _left_out(what: Exported) -> list[str]:
    """Parts of a preset that graphs do not have, see `exportable`."""
    return ["motion", "context", "fallback"] if what.rule == "fast" else []


def _show(made: Manifest, what: Exported) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(what.out.rglob("*"))
             if path.is_file()}  # fmt: skip
    if what.as_json:
        about = {
            "folder": str(what.out), "to": what.to.value, "model": made.model,
            "rule": made.config, "left_out": _left_out(what), "frame": made.frame,
            "tokens": made.tokens,
            "steps": [{"file": one.file, "width": one.width} for one in made.steps],
            "dense": made.dense, "fingerprint": made.identity["fingerprint"], "bytes": sizes,
            "versions": made.versions,
        }  # fmt: skip
        print(json.dumps(about, indent=2))
        return
    size = "x".join(map(str, made.frame["shape"][2:]))
    widths = ", ".join(map(str, made.widths))
    print(f"{made.model} at {size} px, {made.tokens} tokens, as {what.to.value} in {what.out}")
    print(f"  steps of {widths} tokens; {made.forced} of them are special or due for a refresh")
    print(f"  policy {made.policy!r}, without motion, context and the measured fallback")
    print(f"  {sum(sizes.values()) / 1e6:,.1f} MB in {len(sizes)} files")
