"""A model by name, for every command: the shipped ones, libraries, files, functions of users."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from eventful.errors import CheckpointError, EventfulError, UnsupportedError
from eventful.models import shipped
from eventful.models.loading import load_model
from eventful.models.vivit.model import ViViT
from eventful.modelspec import hf_models, own_function, timm_models, torchvision_models
from eventful.modelspec.names import first_line, nearest
from eventful.modelspec.size import Size, both_sides, in_words
from eventful.modelspec.weights import PRETRAINED, load_state
from eventful.surgery.matching import named_trunks

LIBRARIES = ("timm", "hf", "torchvision")
FORMS = (
    "detector, actions or focus, timm:NAME, hf:NAME, torchvision:NAME, a .safetensors file made "
    "by this package, or module.path:function, which returns the model"
)


class RandomWeightsWarning(UserWarning):
    """A model was made with random weights: its outputs mean nothing."""


@dataclass(frozen=True)
class NamedModel:
    """A model by name, in eval mode.

    Attributes:
        random: its weights are random.
    """

    name: str
    model: nn.Module
    random: bool = False


def open_named(
    name: str,
    *,
    weights: str | None = None,
    size: Size | None = None,
    weightless: bool = False,
) -> NamedModel:
    """The model that a user named.

    Args:
        name: see `FORMS`; a name of timm's may stand without `timm:`.
        weights: for a model of a library or a function, a file of weights; `pretrained`, for a
            library, fetches the published ones. Without, a model of a library has random weights,
            unless it is a folder with weights or a name on the hub, and a warning says so.
        size: of the frames in pixels, to build it for where the family lets one choose.
        weightless: a model of a library comes without weights, where shapes are all that is needed.

    Raises:
        UnsupportedError: the name is of no known form, or there is no such model.
        CheckpointError: the weights are not there, or do not fit.
    """
    family, colon, rest = name.partition(":")
    if not colon and name not in shipped.NAMES and _bare(name) and timm_models.knows(name):
        family, rest = "timm", name
    if family in LIBRARIES and rest:
        opened = _of_library(name, family, rest, weights, size, weightless)
        if weightless and next(named_trunks(opened.model), None) is None:
            # What is recognised by its structure is tried with weights.
            opened = _of_library(name, family, rest, weights, size, False)
    else:
        opened = _other(name, weights, size)
    if opened.random and not weightless:
        warn_random(name)
    return opened


def warn_random(name: str) -> None:
    """Say that a model has random weights."""
    others = "--weights pretrained fetches the published ones"
    if name.startswith("hf:"):
        others = "hf:FOLDER and hf:OWNER/NAME come with theirs"
    warnings.warn(
        f"{name} has random weights, so its outputs mean nothing: --weights FILE takes real ones, "
        f"{others}.",
        RandomWeightsWarning,
        stacklevel=3,
    )


def _bare(name: str) -> bool:
    return Path(name).suffix != ".safetensors" and "/" not in name


def _of_library(
    name: str, family: str, rest: str, weights: str | None, size: Size | None, weightless: bool
) -> NamedModel:
    try:
        return _made(name, family, rest, weights, size, weightless)
    except EventfulError:
        raise
    except Exception as error:  # each library refuses names and sizes in its own ways
        raise UnsupportedError(
            f"{name} cannot be made ({type(error).__name__}: {first_line(error)})."
        ) from error


def _made(
    name: str, family: str, rest: str, weights: str | None, size: Size | None, weightless: bool
) -> NamedModel:
    torch.manual_seed(0)  # random weights are the same in every run, and when one is resumed
    if weights == PRETRAINED and not weightless:
        return NamedModel(name, _published(family, rest, size))
    random = True
    if family == "timm":
        model = timm_models.build(rest, size, weightless=weightless)
    elif family == "torchvision":
        model = torchvision_models.build(rest, size, weightless=weightless)
    else:
        fetch = weights == PRETRAINED
        model, random = hf_models.build(rest, size, weightless=weightless, fetch=fetch)
    if weights is not None and weights != PRETRAINED:  # without weights: whether they would fit
        load_state(model, Path(weights), name)
        random = False
    return NamedModel(name, model, random)


def _published(family: str, name: str, size: Size | None) -> nn.Module:
    """A model with the weights that its library publishes; they are fetched if need be."""
    try:
        if family == "timm":
            return timm_models.build(name, size, pretrained=True)
        if family == "torchvision":
            return torchvision_models.build(name, size, weights="DEFAULT")
        model, random = hf_models.build(name, size, fetch=True)
    except EventfulError:
        raise
    except Exception as error:  # each library and its network client fail in their own ways
        raise CheckpointError(
            f"The published weights of {family}:{name} cannot be fetched "
            f"({type(error).__name__}: {first_line(error)}). Check the network, or give a file: "
            "--weights FILE.safetensors."
        ) from None
    if random:
        raise CheckpointError(
            f"hf:{name} is a class, a model type or a config, which has no published weights. Name "
            "a model on the hub, hf:OWNER/NAME, or give a file: --weights FILE.safetensors."
        )
    return model


def _other(name: str, weights: str | None, size: Size | None) -> NamedModel:
    """A shipped model, a file, or a function of the user's."""
    if (found := own_function.FORM.fullmatch(name)) is not None and found.group(1) not in LIBRARIES:
        if weights == PRETRAINED:
            raise UnsupportedError(f"{name} has no published weights: give a file, --weights FILE.")
        model = own_function.build(found.group(1), found.group(2), size)
        if weights is not None:
            load_state(model, Path(weights), name)
        return NamedModel(name, model)
    if name in shipped.NAMES or name.endswith(".safetensors"):
        if weights is not None:
            raise UnsupportedError(f"{name} has its own weights; leave --weights out.")
        return NamedModel(name, _shipped(name, size))
    raise UnsupportedError(f"{name!r} names no model.{_meant(name)} A model is {FORMS}.")


def _meant(name: str) -> str:
    """What a name of no known form may mean."""
    family, colon, _ = name.partition(":")
    if colon:
        return nearest(family, [f"{library}:NAME" for library in LIBRARIES])
    if Path(name, "config.json").is_file() or name.endswith(".json"):
        return f" For a config or folder of transformers write hf:{name}."
    if name.endswith((".pth", ".pt", ".bin", ".pkl")):
        return " `eventful weights convert` makes a .safetensors file of a checkpoint."
    near = nearest(name, shipped.NAMES)
    if near or not _bare(name):
        return near
    return timm_models.near(name)


def _shipped(name: str, size: Size | None) -> nn.Module:
    if name in shipped.NAMES and (size is None or name not in shipped.SHIPPED):
        return shipped.load(name)
    path = shipped.weights_of(name) if name in shipped.NAMES else Path(name)
    if not path.is_file():
        raise CheckpointError(f"{path} is not there. A model is {FORMS}.")
    model = load_model(path)
    # A ViViT resizes its positions by itself, a detector is built for one size of squares.
    if size is None or isinstance(model, ViViT):
        return model
    height, width = both_sides(size)
    if height != width:
        raise UnsupportedError(
            f"{name} takes square frames, into which pictures of any shape are fitted: give one "
            f"side, --size {max(height, width)}, not {in_words(size)}."
        )
    return load_model(path, size=height)
