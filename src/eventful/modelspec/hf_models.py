"""Models of transformers: a class, a model type, a config, a local folder, or a name on the hub.

Code of a repository is never run (`trust_remote_code` stays off), and pickled weights are read as
tensors alone.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import nn

from eventful.errors import CheckpointError, EventfulError, UnsupportedError
from eventful.modelspec.hollow import takes
from eventful.modelspec.names import first_line, nearest
from eventful.modelspec.place import made_on
from eventful.modelspec.size import Size, both_sides
from eventful.modelspec.weights import load_state
from eventful.surgery import libraries

_HUB = re.compile(r"[\w.-]+/[\w.-]+")
# Which class to make of a model type that has several, best first: the model without a head, then
# the tasks on pictures.
_TASKS = (
    "MODEL_MAPPING_NAMES",
    *(
        f"MODEL_FOR_{task}_MAPPING_NAMES"
        for task in (
            *("DEPTH_ESTIMATION", "OBJECT_DETECTION", "SEMANTIC_SEGMENTATION"),
            *("UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION", "POSE_ESTIMATION"),
            *("KEYPOINT_DETECTION", "IMAGE_CLASSIFICATION", "ZERO_SHOT_OBJECT_DETECTION"),
            *("MASK_GENERATION", "IMAGE_MATTING", "BACKBONE", "IMAGE_TEXT_TO_TEXT", "PRETRAINING"),
        )
    ),
)
# What the default config of a model type lacks: an LW-DETR without it has no map to detect on.
_LACKING: dict[str, dict[str, Any]] = {"lw_detr": {"projector_scale_factors": [1.0]}}


@dataclass(frozen=True)
class Choice:
    """What a name means.

    Attributes:
        kind: the class of the model.
        source: a local folder with weights, or a name on the hub; None for random weights.
    """

    name: str
    kind: Any
    config: Any
    source: str | None = None


def find(name: str, *, fetch: bool = False) -> Choice:
    """The class and the config that a name means.

    A name that transformers knows means that, also where a folder has it: hf:./NAME is the folder.
    A folder OWNER/NAME goes before the hub.

    Args:
        fetch: a name on the hub may be fetched; else it must be on this machine.

    Raises:
        UnsupportedError: there is no such model; the message says what to write.
    """
    transformers = libraries.load("transformers")
    types = _types()
    path = Path(name).expanduser()
    kind = _class_named(name) if name.isidentifier() else None
    ours = name in types or kind is not None
    if ours and path.exists():
        warnings.warn(_both(name), stacklevel=2)
    elif path.exists() or _is_path(name):
        config = _config_at(path)
        held = path.is_dir() and any(_weight_files(path))
        return Choice(name, class_of(config, name), config, str(path) if held else None)
    if name in types:
        config = _default(partial(transformers.AutoConfig.for_model, name), name, name)
        return Choice(name, class_of(config, name), config)
    if kind is not None:
        make = kind if _is_config(kind) else kind.config_class
        made = _default(make, name, make.model_type)
        return Choice(name, class_of(made, name) if _is_config(kind) else kind, made)
    if _HUB.fullmatch(name):
        source = name if fetch else str(_cached(name))
        config = _config_on_hub(name, source, fetch)
        return Choice(name, class_of(config, name), config, source)
    known = [*types, *_class_names()]
    raise UnsupportedError(
        f"transformers has no model {name!r}.{nearest(name, known)} After hf: comes a class "
        "(hf:DPTForDepthEstimation), a model type (hf:dinov2), the path of a config.json or of its "
        "folder, or a name on the hub (hf:OWNER/NAME)."
    )


def build(
    name: str, size: Size | None = None, *, weightless: bool = False, fetch: bool = False
) -> tuple[nn.Module, bool]:
    """A model of transformers, in eval mode, and whether its weights are random.

    A folder with weights and a name on the hub come with their weights; all others get random ones.
    """
    choice = find(name, fetch=fetch)
    sized = [part for part in _vision_parts(choice.config) if part.image_size is not None]
    if size is not None and sized and not takes(_made(choice, weightless=True), size):
        for part in sized:
            _set_size(part, size)
    if choice.source is None or weightless:
        return _made(choice, weightless), choice.source is None
    return _loaded(choice, fetch), False


def class_of(config: Any, name: str) -> Any:
    """The class that a config names in `architectures`, or the one of its model type."""
    transformers = libraries.load("transformers")
    given = getattr(config, "architectures", None) or ()
    named = next(iter((given,) if isinstance(given, str) else given), None)
    if named is not None:
        kind = getattr(transformers, str(named), None)
        if kind is None:
            raise UnsupportedError(
                f"{name} is a {named}, which transformers {transformers.__version__} does not "
                "have. A newer transformers may have it: pip install -U transformers. Code that "
                "comes with a model is not run."
            )
        if not _is_model(kind):
            raise UnsupportedError(
                f"`architectures` of {name} names {named}, which is no class of models. Name one, "
                "such as ViTModel, or take the entry out."
            )
        return kind
    tables = libraries.load("transformers.models.auto.modeling_auto")
    for task in _TASKS:
        made = getattr(tables, task, {}).get(config.model_type)
        found = made[0] if isinstance(made, tuple | list) else made
        if found is not None and hasattr(transformers, found):
            return getattr(transformers, found)
    raise UnsupportedError(
        f"transformers has no model for pictures of type {config.model_type!r} ({name})."
    )


def _types() -> Any:
    return libraries.load("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES


def _class_names() -> list[str]:
    """Names of models with a config, without importing them."""
    transformers = libraries.load("transformers")
    ends = ("Model", "Backbone", "Config")
    return [
        n
        for n in dir(transformers)
        if n[:1].isupper() and (n.endswith(ends) or "For" in n)
        if "pretrained" not in n.lower() and not n.startswith("Auto")
    ]


def _both(name: str) -> str:
    return (
        f"hf:{name} is the name in transformers, and a file or folder here has it, too. For the "
        f"folder write hf:./{name}."
    )


def _class_named(name: str) -> Any:
    """A class of models or configs; None if transformers has no such class."""
    transformers = libraries.load("transformers")
    try:
        kind = getattr(transformers, name, None)
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(f"transformers cannot load {name}: {first_line(error)}") from None
    return kind if _is_config(kind) or _is_model(kind) else None


def _is_config(kind: Any) -> bool:
    """Whether it is the config of one type of models."""
    base: Any = libraries.load("transformers").PretrainedConfig
    fits = isinstance(kind, type) and issubclass(kind, base)
    return fits and bool(getattr(kind, "model_type", ""))


def _is_model(kind: Any) -> bool:
    """Whether it is a class of models that run: not a base class, which has no forward."""
    base: Any = libraries.load("transformers").PreTrainedModel
    fits = isinstance(kind, type) and issubclass(kind, base)
    runs = getattr(kind, "forward", None) is not nn.Module.forward
    return fits and runs and getattr(kind, "config_class", None) is not None


def _default(make: Any, name: str, model_type: str) -> Any:
    """A config with the library's defaults."""
    try:
        return make(**_LACKING.get(model_type, {}))
    except Exception as error:  # a config of parts may need them
        raise UnsupportedError(
            f"hf:{name} has no config by default ({first_line(error)}). Give the path of a "
            "config.json."
        ) from None


def _is_path(name: str) -> bool:
    return name.endswith(".json") or name.startswith((".", "/", "~")) or name.count("/") > 1


def _config_at(path: Path) -> Any:
    transformers = libraries.load("transformers")
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UnsupportedError(
            f"{file} is not there. Give the path of a config.json, or of the folder that holds it."
        )
    try:
        return transformers.AutoConfig.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # a damaged file can fail in any way
        raise UnsupportedError(_unreadable(str(file), error)) from None


def _unreadable(name: str, error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text or "custom code" in text:
        return (
            f"{name} needs code of its own repository, which is not run. Make the model in a "
            "function of your own and name that: module.path:function."
        )
    if "model_type" in text or "model type" in text:
        return (
            f"{name} names no model type that this transformers knows: {first_line(error)} A newer "
            "one may know it (pip install -U transformers)."
        )
    return f"{name} is no config of transformers ({first_line(error)})."


def _cached(name: str) -> Path:
    """The folder of a model of the hub on this machine.

    It is looked up here: transformers asks the hub even where it may not fetch.
    """
    libraries.load("transformers")
    hub: Any = sys.modules["huggingface_hub"]  # loaded with any part of transformers
    try:
        found = hub.try_to_load_from_cache(name, "config.json")
    except ValueError as error:  # no name can be so
        raise UnsupportedError(
            f"hf:{name} is neither a path that exists nor a name on the hub: {first_line(error)}"
        ) from None
    if not isinstance(found, str):
        raise UnsupportedError(_not_here(name, fetch=False))
    return Path(found).parent


def _config_on_hub(name: str, source: str, fetch: bool) -> Any:
    transformers = libraries.load("transformers")
    try:
        with _quiet():
            return transformers.AutoConfig.from_pretrained(
                source, trust_remote_code=False, local_files_only=not fetch
            )
    except OSError:
        raise UnsupportedError(_not_here(name, fetch)) from None
    except Exception as error:  # each version of the library fails in its own way
        raise UnsupportedError(_unreadable(f"hf:{name}", error)) from None


def _not_here(name: str, fetch: bool) -> str:
    begin = (
        f"hf:{name} could not be fetched: there is no such name, no access to it, or no network."
        if fetch
        else f"hf:{name} is not on this machine. `--weights pretrained` fetches it from the hub."
    )
    return (
        f"{begin} Without a network, copy its folder here (on another machine: hf download {name} "
        "--local-dir FOLDER) and name that: hf:FOLDER. For random weights name a class, a model "
        "type or a config: hf:ViTModel, hf:dinov2, hf:config.json."
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the hub's client logs of every attempt; the error says what matters."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _vision_parts(config: Any) -> list[Any]:
    """The configs in which the size of frames may stand: the whole, and its vision parts."""
    parts = [config, *(getattr(config, n, None) for n in ("vision_config", "backbone_config"))]
    return [part for part in parts if hasattr(part, "image_size")]


def _set_size(config: Any, size: Size) -> None:
    """Set the size of the frames in a config."""
    height, width = both_sides(size)
    value: Any = height
    if isinstance(config.image_size, list | tuple) or height != width:
        value = (height, width) if isinstance(config.image_size, tuple) else [height, width]
    try:
        config.image_size = value
    except Exception:  # a config that checks its fields, and takes squares alone
        raise UnsupportedError(
            f"A {type(config).__name__} takes square frames alone: give one side, --size "
            f"{max(height, width)}."
        ) from None


def _made(choice: Choice, weightless: bool) -> nn.Module:
    make = getattr(choice.kind, "_from_config", choice.kind)
    try:
        with _quiet():
            made = made_on(weightless, lambda: make(choice.config))
    except Exception as error:  # each family checks its config in its own way
        raise UnsupportedError(
            f"transformers cannot make a {choice.kind.__name__} of hf:{choice.name}: "
            f"{first_line(error)}"
        ) from None
    return made.eval()


def _weight_files(folder: Path) -> Iterator[Path]:
    for pattern in ("model*.safetensors", "pytorch_model*.bin"):
        yield from sorted(folder.glob(pattern))


def _loaded(choice: Choice, fetch: bool) -> nn.Module:
    """A model with the weights of a folder, or of the hub."""
    source = Path(cast(str, choice.source))
    files = list(_weight_files(source)) if source.is_dir() else []
    if files and not any(file.suffix == ".safetensors" for file in files):
        if len(files) > 1:
            raise CheckpointError(
                f"{source} holds weights in {len(files)} pickled parts. Save them as safetensors: "
                "model.save_pretrained(folder)."
            )
        made = _made(choice, False)
        load_state(made, files[0], f"hf:{choice.name}")
        return made
    try:
        with _quiet():
            made, info = choice.kind.from_pretrained(
                choice.source, config=choice.config, trust_remote_code=False,
                local_files_only=not fetch, use_safetensors=True, output_loading_info=True,
            )  # fmt: skip
    except EventfulError:
        raise
    except OSError:
        raise CheckpointError(_not_here(choice.name, fetch)) from None
    except Exception as error:
        raise CheckpointError(
            f"The weights of hf:{choice.name} do not fit a {choice.kind.__name__}: "
            f"{first_line(error)} Leave --size out, or give that of the weights."
        ) from None
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        raise CheckpointError(
            f"The weights of hf:{choice.name} lack {len(missing)} tensors of a "
            f"{choice.kind.__name__}, the first {missing[0]}. Name the class that they are of in "
            "`architectures` of the config."
        )
    return cast(nn.Module, made.float().eval())
