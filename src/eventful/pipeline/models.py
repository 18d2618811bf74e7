"""Models by name: `detector`, `timm:NAME`, `hf:NAME`, a file of weights, a function of your own."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from eventful.errors import CheckpointError, EventfulError, UnsupportedError
from eventful.models import shipped
from eventful.models.loading import load_model
from eventful.models.vivit.model import ViViT
from eventful.paper.data.imagenet import NAMES as VID_NAMES
from eventful.surgery import libraries

PRETRAINED = "pretrained"  # in place of a file: the weights that the library publishes
LIBRARIES = ("timm", "hf", "torchvision")
FORMS = (
    "detector, actions or focus, timm:NAME, hf:NAME, torchvision:NAME, a .safetensors file made "
    "by this package, or module.path:function, which returns the model"
)
_FUNCTION = re.compile(r"(\w+(?:\.\w+)*):(\w+)")
_HF_HEADS = ("ForImageClassification", "ForObjectDetection")


@dataclass(frozen=True)
class OpenedModel:
    """A model by name, in eval mode.

    Attributes:
        classes: names of its labels, in their order; empty where it has none.
        random: its weights are random.
    """

    name: str
    model: nn.Module
    classes: tuple[str, ...]
    random: bool = False


def open_model(name: str, *, weights: str | None = None, size: int | None = None) -> OpenedModel:
    """The model that a user named.

    Args:
        name: see `FORMS`.
        weights: for a model of a library, a .safetensors file or `pretrained`; random without.
        size: side of the frames in pixels to build it for, if the family lets one choose.

    Raises:
        UnsupportedError: the name is of no known form, or there is no such model.
    """
    family, colon, rest = name.partition(":")
    if family in LIBRARIES and rest:
        torch.manual_seed(0)  # random weights are the same in every run, and when one is resumed
        if family == "timm" and hasattr(build(name, weightless=True), "set_input_size"):
            size = None  # weights are for the model's own size; frames of others come later
        if weights == PRETRAINED:
            model = _published(family, rest, size)
        else:
            model = build(name, size=size)
            if weights is not None:
                load_state(model, Path(weights), rest)
        return OpenedModel(name, model, label_names(model), random=weights is None)
    if weights is not None:
        raise UnsupportedError(f"{name} has its own weights; leave --weights out.")
    if name in shipped.NAMES or not (colon or Path(name).suffix or "/" in name):
        model = _shipped(name, size)
    elif name.endswith(".safetensors"):
        model = _from_file(Path(name), size)
    elif (found := _FUNCTION.fullmatch(name)) is not None:
        model = _called(found.group(1), found.group(2))
    else:
        raise UnsupportedError(f"{name!r} names no model. A model is {FORMS}.")
    return OpenedModel(name, model, label_names(model))


def build(name: str, *, size: int | None = None, weightless: bool = False) -> nn.Module:
    """A model of a library with random weights, in eval mode.

    Args:
        name: `timm:NAME`, `torchvision:NAME`, or `hf:NAME` with a model type (`vit`), a name on
            the hub, or the path of a config.
        size: frame size to build it for, if the family lets one choose.
        weightless: on the meta device, where shapes are all that is needed.
    """
    family, _, rest = name.partition(":")
    if family == "timm" and rest:
        return _timm(rest, size, weightless)
    if family == "hf" and rest:
        return _hf(rest, size, weightless)
    if family == "torchvision" and rest:
        return _torchvision(rest, size, weightless)
    raise UnsupportedError(
        f"{name!r} names no model: write timm:NAME (timm:vit_small_patch16_224), torchvision:NAME "
        "or hf:NAME, where NAME is a model type (hf:dinov2), a name on the hub, or the path of a "
        "config.json."
    )


def load_state(model: nn.Module, path: Path, name: str) -> None:
    """Load a .safetensors file into a model of a library; tensors it does not have are left out."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise CheckpointError(f"{path} is not there.")
    try:
        state = {key: value.float() for key, value in load_file(str(path)).items()}
        left = model.load_state_dict(state, strict=False)
    except (SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not fit {name}: {error}") from None
    if left.missing_keys:
        raise CheckpointError(
            f"{path} lacks {len(left.missing_keys)} tensors of {name}, the first "
            f"{left.missing_keys[0]}; give the weights of this model."
        )


def label_names(model: nn.Module) -> tuple[str, ...]:
    """Names of a model's labels, as far as they are known; `class 3` where they are not."""
    given: Sequence[str] = getattr(model, "classes", None) or ()
    if given:
        return tuple(given)
    config: Any = getattr(model, "config", None)
    heads = getattr(config, "heads", None)
    count = getattr(heads, "classes", None) or getattr(config, "classes", None)
    if count is None and hasattr(config, "id2label"):
        named = {int(key): str(value) for key, value in config.id2label.items()}
        return tuple(named.get(i, f"class {i}") for i in range(max(named, default=-1) + 1))
    count = count or getattr(model, "num_classes", None) or 0
    if heads is not None and count == len(VID_NAMES):
        return tuple(VID_NAMES)
    if heads is not None and count == 1:
        return ("person",)
    if heads is None and count == 1000:
        return _imagenet_names()
    return tuple(f"class {i}" for i in range(count))


def _imagenet_names() -> tuple[str, ...]:
    """Those of ImageNet-1k, if timm is installed."""
    if "timm" not in sys.modules:
        return tuple(f"class {i}" for i in range(1000))
    info = libraries.load("timm.data").ImageNetInfo()
    return tuple(info.index_to_description(i).split(",")[0] for i in range(1000))


def _shipped(name: str, size: int | None) -> nn.Module:
    if name not in shipped.NAMES:
        there = ", ".join(shipped.NAMES)
        raise UnsupportedError(f"There is no model {name!r} ({there}). A model is {FORMS}.")
    if size is not None and name in shipped.SHIPPED:
        return _from_file(shipped.weights_of(name), size)
    return shipped.load(name)


def _from_file(path: Path, size: int | None) -> nn.Module:
    if not path.is_file():
        raise CheckpointError(f"{path} is not there. A model is {FORMS}.")
    model = load_model(path)
    # A ViViT resizes its positions by itself, a detector is built for one size.
    if size is None or isinstance(model, ViViT):
        return model
    return load_model(path, size=size)


def _called(module: str, function: str) -> nn.Module:
    """What a function of the user's returns; modules in the current folder are found."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(module), function)()
    except EventfulError:
        raise
    except Exception as error:  # code of the user's may fail in any way
        raise UnsupportedError(
            f"{module}:{function} does not give a model ({type(error).__name__}: {error}). Name a "
            "function without arguments that returns a torch.nn.Module."
        ) from error
    if not isinstance(made, nn.Module):
        raise UnsupportedError(
            f"{module}:{function} returned a {type(made).__name__}, not a torch.nn.Module."
        )
    return made.eval()


def _place(weightless: bool) -> Any:
    return torch.device("meta") if weightless else nullcontext()


def _timm(name: str, size: int | None, weightless: bool, *, pretrained: bool = False) -> nn.Module:
    timm = libraries.load("timm")
    if not timm.is_model(name):
        close = timm.list_models(f"*{name.split('_')[0]}*")[:8]
        raise UnsupportedError(
            f"timm has no model {name!r}. Some it has: {', '.join(close) or 'none'}."
        )
    options = {} if size is None else {"img_size": size}
    try:
        with _place(weightless):
            made = timm.create_model(name, pretrained=pretrained, **options).eval()
    except (TypeError, NotImplementedError):
        # Some families take no img_size, some constructors need real tensors.
        made = timm.create_model(name, pretrained=pretrained).eval()
    return cast(nn.Module, made)


def _hf_config(name: str, size: int | None) -> Any:
    transformers = libraries.load("transformers")
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    try:
        if name in known and not Path(name).exists():
            config = transformers.AutoConfig.for_model(name)
        else:
            # Else transformers would ask whether to run code of a repository on the hub.
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            f"transformers cannot find a config for {name!r} ({str(error).splitlines()[0]}). Pass "
            "a model type such as vit or dinov2, or the path of a config.json."
        ) from None
    if size is not None and hasattr(config, "image_size"):
        pair = isinstance(config.image_size, list | tuple)
        config.image_size = [size, size] if pair else size
    return config


def _hf_class(config: Any) -> Any:
    """The class with the head that the config names, if it classifies or detects."""
    transformers = libraries.load("transformers")
    named = next(iter(getattr(config, "architectures", None) or ()), "")
    if named.endswith(_HF_HEADS) and hasattr(transformers, named):
        return getattr(transformers, named)
    return transformers.AutoModel


def _hf(name: str, size: int | None, weightless: bool) -> nn.Module:
    config = _hf_config(name, size)
    kind = _hf_class(config)
    try:
        with _place(weightless):
            made = getattr(kind, "from_config", getattr(kind, "_from_config", kind))(config)
    except (ValueError, TypeError) as error:  # e.g. a config of no model with pictures
        raise UnsupportedError(f"transformers cannot make a model of {name!r}: {error}") from None
    return cast(nn.Module, made.eval())


def _torchvision(
    name: str, size: int | None, weightless: bool, *, weights: str | None = None
) -> nn.Module:
    models = libraries.load("torchvision.models")
    options = {} if size is None else {"image_size": size}
    try:
        with _place(weightless):
            made = models.get_model(name, weights=weights, **options)
    except (ValueError, TypeError) as error:
        raise UnsupportedError(f"torchvision cannot make {name!r}: {error}") from None
    return cast(nn.Module, made.eval())


def _published(family: str, name: str, size: int | None) -> nn.Module:
    """A model with the weights that its library publishes; they are fetched if need be."""
    try:
        if family == "timm":
            return _timm(name, size, False, pretrained=True)
        if family == "torchvision":
            return _torchvision(name, size, False, weights="DEFAULT")
        config = _hf_config(name, size)
        made = _hf_class(config).from_pretrained(name, config=config, trust_remote_code=False)
        return cast(nn.Module, made.eval())
    except EventfulError:
        raise
    except Exception as error:  # each library and its network client fail in their own ways
        raise CheckpointError(
            f"The published weights of {family}:{name} cannot be fetched "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}). Check "
            "the network, or give a file: --weights FILE.safetensors."
        ) from None
