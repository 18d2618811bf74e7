"""Converts published weights to files of this package, and loads them into its models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eventful import files
from eventful.errors import CheckpointError
from eventful.models.checkpoints import read_checkpoint
from eventful.models.key_formats import KeyFormat, KeyReport, find_key_format
from eventful.models.vitdet.backbone import BackboneConfig, ViTDetBackbone
from eventful.models.vitdet.model import ViTDet, ViTDetConfig, detector_config
from eventful.models.vivit.model import ViViT, ViViTConfig

_REPEATED = ("depth", "temporal_depth", "stages", "convs")  # parts that have tensors of their own
_LARGEST = 2**16  # of any other number in a configuration
_HEAD_DIM = 64  # of every published ViViT; its files do not state it


@dataclass(frozen=True)
class Converted:
    """Weights under this package's names, with their model and a report on the keys."""

    model: str
    config: dict[str, Any]
    state: dict[str, Tensor]
    report: KeyReport

    @property
    def kind(self) -> str:
        """Old name of `model`."""
        return self.model


def convert_checkpoint(
    source: str | Path | Mapping[str, Tensor],
    format: str = "auto",
    *,
    strict: bool = True,
    layout: str | None = None,
) -> Converted:
    """Rename the weights of a published file.

    Args:
        source: the file, or its keys and tensors.
        format: a key of `KEY_FORMATS`, or `auto`.
        strict: raise unless file and model fit with nothing left over.
        layout: old name of `format`.

    Raises:
        CheckpointError: with the report, if they do not fit.
    """
    given = source if isinstance(source, Mapping) else read_checkpoint(source)
    name, rules = find_key_format(layout or format, given)
    state, report = _renamed(name, rules, given)
    try:
        config = _CONFIGS[rules.model](state)
        with torch.device("meta"):
            expected = build(rules.model, config).state_dict()
    except (KeyError, IndexError, ValueError, ZeroDivisionError, RuntimeError) as error:
        raise CheckpointError(
            "The model's sizes cannot be read from the file: a key they follow from is missing or "
            f"of another shape ({error}).\n{report}"
        ) from error
    if rules.model == "vitdet-backbone":
        state, report = _without_prefix(state, report)
    state, report = _fitted(expected, state, report)
    if strict and not report.complete:
        raise CheckpointError(f"The file does not fit the model:\n{report}")
    return Converted(rules.model, config, state, report)


def save(converted: Converted, path: str | Path, classes: Sequence[str] = ()) -> None:
    """Write safetensors that `load_model` reads, whole or not at all.

    The file also names its model and configuration, and the classes where they are given.
    """
    from safetensors.torch import save_file

    path = Path(path)
    about: dict[str, Any] = {"model": converted.model, "config": converted.config}
    if classes:
        about["classes"] = list(classes)
    tensors = {key: value.contiguous().clone() for key, value in converted.state.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as partial:
        save_file(tensors, str(partial), metadata={"eventful": json.dumps(about)})


def load_model(path: str | Path, **overrides: Any) -> nn.Module:
    """The model of a file that `save` wrote, in eval mode.

    Its attribute `classes` has the names of its classes if the file has them, else it is empty.

    Args:
        overrides: fields of the model's configuration to change, such as `size=672`; for a
            detector, those of its backbone.
    """
    about = _about(path)
    config = dict(about["config"])
    inner = dict(config["backbone"]) if "backbone" in config else config
    unknown = sorted(set(overrides) - set(inner))
    if unknown:
        raise CheckpointError(f"{about['model']} has no {unknown[0]!r}; it has {', '.join(inner)}.")
    inner.update(overrides)
    config = {**config, "backbone": inner} if "backbone" in config else inner
    state = read_checkpoint(path)
    _check_sizes(path, config, len(state))
    with torch.device("meta"):  # first without memory: the sizes are what the file says
        expected = build(about["model"], config).state_dict()
    _, report = _fitted(expected, dict(state), KeyReport("own", used={key: key for key in state}))
    if not report.complete:
        raise CheckpointError(f"The weights do not fit the model:\n{report}")
    model = build(about["model"], config)
    load_weights(model, state)
    model.classes = tuple(about.get("classes", ()))  # type: ignore[assignment]
    return model.eval()


def _about(path: str | Path) -> dict[str, Any]:
    """Model name and configuration in a file that `save` wrote."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            written = (file.metadata() or {}).get("eventful", "null")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file ({error}).") from error
    try:
        about = json.loads(written)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: what it says of its model is damaged ({error}).") from None
    if about is None:
        raise CheckpointError(
            f"{path} does not name its model. Make it with `eventful weights convert`, "
            "or build the model yourself and call load_weights."
        )
    if not isinstance(about, dict) or not isinstance(about.get("config"), dict):
        raise CheckpointError(f"{path}: what it says of its model is damaged: no configuration.")
    return about


def _check_sizes(path: str | Path, config: Mapping[str, Any], tensors: int) -> None:
    """Raise if a file with few tensors asks for a huge model, which would take all memory."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            _check_sizes(path, value, tensors)
        most = tensors if name in _REPEATED else _LARGEST
        if isinstance(value, int | float) and not -_LARGEST <= value <= most:
            raise CheckpointError(f"{path} asks for a model with {name} = {value}: it is damaged.")


def load_weights(
    model: nn.Module,
    source: str | Path | Mapping[str, Tensor],
    format: str = "own",
    *,
    strict: bool = True,
    layout: str | None = None,
) -> KeyReport:
    """Load a file into a model.

    Args:
        format: `own` for this package's names, else as in `convert_checkpoint`.
        strict: raise unless all fits; otherwise load what does, and report the rest.
        layout: old name of `format`.
    """
    format = layout or format
    given = source if isinstance(source, Mapping) else read_checkpoint(source)
    if format == "own":
        state = dict(given)
        report = KeyReport(format, used={key: key for key in state})
    else:
        name, rules = find_key_format(format, given)
        state, report = _renamed(name, rules, given)
        if isinstance(model, ViTDetBackbone):
            state, report = _without_prefix(state, report)
    state, report = _fitted(model.state_dict(), state, report)
    if strict and not report.complete:
        raise CheckpointError(f"The weights do not fit the model:\n{report}")
    model.load_state_dict(state, strict=False)
    return report


def build(model: str, config: dict[str, Any]) -> nn.Module:
    """A model with random weights from the name and configuration in a file."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "vitdet": lambda: ViTDet(ViTDetConfig.from_dict(config)),
        "vitdet-backbone": lambda: ViTDetBackbone(BackboneConfig(**config)),
        "vivit": lambda: ViViT(ViViTConfig.from_dict(config)),
    }
    try:
        return makers[model]()
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"No {model!r} with such settings here ({error}): the file is from another version of "
            "eventful. Convert the published file again."
        ) from error


def _renamed(
    name: str, rules: KeyFormat, given: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], KeyReport]:
    state: dict[str, Tensor] = {}
    used: dict[str, str] = {}
    unneeded: dict[str, str] = {}
    unexpected: list[str] = []
    for key, tensor in given.items():
        here, why = rules.rename(key), rules.reason_unneeded(key)
        if here is not None and here not in state:
            state[here], used[key] = tensor, here
        elif why is not None:
            unneeded[key] = why
        else:
            unexpected.append(key)
    return state, KeyReport(name, used, unneeded, tuple(unexpected))


def _fitted(
    expected: Mapping[str, Tensor], state: dict[str, Tensor], report: KeyReport
) -> tuple[dict[str, Tensor], KeyReport]:
    """Drop tensors that the model does not have, and report them."""
    source = {here: key for key, here in report.used.items()}
    unexpected = [key for key in state if key not in expected]
    mismatched = {
        key: f"{tuple(tensor.shape)} in the file, {tuple(expected[key].shape)} in the model"
        for key, tensor in state.items()
        if key in expected and tensor.shape != expected[key].shape
    }
    kept = {k: v for k, v in state.items() if k in expected and k not in mismatched}
    return kept, replace(
        report,
        used={source[key]: key for key in kept},
        unexpected=(*report.unexpected, *(source[key] for key in unexpected)),
        missing=tuple(key for key in expected if key not in state),
        mismatched=mismatched,
    )


def _without_prefix(
    state: Mapping[str, Tensor], report: KeyReport
) -> tuple[dict[str, Tensor], KeyReport]:
    """Names for a backbone by itself; the formats name it as a part of the detector."""
    used = {key: here.removeprefix("backbone.") for key, here in report.used.items()}
    bare = {key.removeprefix("backbone."): value for key, value in state.items()}
    return bare, replace(report, used=used)


def _count(state: Mapping[str, Tensor], prefix: str) -> int:
    """One more than the largest index behind a prefix."""
    numbers = [key.removeprefix(prefix).split(".")[0] for key in state if key.startswith(prefix)]
    return 1 + max((int(number) for number in numbers), default=-1)


def _backbone_config(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Sizes of a ViTDet backbone from its tensors."""
    patches, positions = state["backbone.patch_embed.weight"], state["backbone.pos_embed"]
    dim, channels, patch, _ = patches.shape
    side = math.isqrt(positions.shape[1])
    depth = _count(state, "backbone.blocks.")
    tables = {
        i: (state[f"backbone.blocks.{i}.attn.rel_pos_h"].shape[0] + 1) // 2
        for i in range(depth)
        if f"backbone.blocks.{i}.attn.rel_pos_h" in state
    }
    if not tables:
        raise CheckpointError(
            "The file has no relative position tables, and without them it is unknown which "
            "blocks attend in windows. Build the model yourself, ViTDetBackbone(BackboneConfig(...,"
            " relative=False)), and call load_weights on it with the format's name."
        )
    window, trained = min(tables.values()), max(tables.values())
    columns = state[f"backbone.blocks.{min(tables)}.attn.rel_pos_h"].shape[1]
    return {
        "patch": patch,
        "channels": channels,
        "dim": dim,
        "depth": depth,
        "heads": dim // columns,
        "mlp_ratio": state["backbone.blocks.0.mlp.fc1.weight"].shape[0] / dim,
        "pretrained_grid": side,
        "class_slot": positions.shape[1] > side * side,
        "relative": True,
        "window": window,
        "trained_size": trained * patch,
        "size": trained * patch,
        # Tables of one size are those of global blocks: a ViTDet has some.
        "global_blocks": tuple(i for i, side in tables.items() if side == trained),
    }


def _vitdet_config(state: Mapping[str, Tensor]) -> dict[str, Any]:
    backbone = _backbone_config(state)
    stages = _count(state, "heads.stages.")
    classes = state["heads.stages.0.scores.weight"].shape[0] - 1
    size = backbone.pop("size")
    cascade = stages > 1
    config = detector_config(classes, size, cascade, "linear" if cascade else "bicubic", **backbone)
    heads = replace(
        config.heads,
        stages=stages,
        shared_boxes=state["heads.stages.0.deltas.weight"].shape[0] == 4,
        masks=any(key.startswith("heads.mask.") for key in state),
        convs=_count(state, "heads.stages.0.convs."),
        hidden=state["heads.stages.0.fc.weight"].shape[0],
    )
    channels = state["rpn.objectness.weight"].shape[1]
    return replace(config, heads=heads, channels=channels).to_dict()


def _vivit_config(state: Mapping[str, Tensor]) -> dict[str, Any]:
    patches = state["spatial.embed.weight"]
    dim, channels, tubelet, patch, _ = patches.shape
    side = math.isqrt(state["spatial.positions"].shape[1] - 1)
    return ViViTConfig(
        classes=state["classifier.weight"].shape[0],
        size=side * patch,
        frames=(state["temporal.positions"].shape[1] - 1) * tubelet,
        tubelet=tubelet,
        patch=patch,
        channels=channels,
        dim=dim,
        depth=_count(state, "spatial.blocks."),
        temporal_depth=_count(state, "temporal.blocks."),
        heads=max(1, dim // _HEAD_DIM),
        mlp_ratio=state["spatial.blocks.0.mlp.fc1.weight"].shape[0] / dim,
    ).to_dict()


_CONFIGS = {
    "vitdet": _vitdet_config,
    "vitdet-backbone": _backbone_config,
    "vivit": _vivit_config,
}
