"""What is given as a model and is none, or hides its blocks: each refused with what to pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from eventful.errors import ConfigError

_NO_NEED = "Compiling is not needed: on a GPU a stream records CUDA graphs of its own."
_PARALLEL = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


def checked_model(model: Any, use: str) -> nn.Module:
    """The model, if it is one; `use` names what was called with it."""
    if isinstance(model, nn.Module):
        return model
    shown = repr(model)
    shown = shown if len(shown) <= 60 else f"an object of type {type(model).__name__}"
    raise ConfigError(f"{use} takes a model (torch.nn.Module), got {shown}. {_instead(model)}")


def _instead(model: Any) -> str:
    if isinstance(model, str):
        return "Make the model first, e.g. timm.create_model(name, pretrained=True)."
    if isinstance(model, type):
        return f"This is a class: pass a model made of it, {model.__name__}(...)."
    if isinstance(model, Mapping):
        return "These are weights alone: load them into a model first, model.load_state_dict(...)."
    if isinstance(getattr(model, "model", None), nn.Module):
        return "Pass the model it holds: its attribute `model`."
    return "Make the model first, then pass it."


def refuse_wrappers(model: nn.Module, parts: Iterable[nn.Module], then: str) -> None:
    """Raise where a wrapper that runs past converted blocks holds one of `parts`.

    Args:
        parts: trunks and blocks.
        then: what to call once the wrapper is off, e.g. `eventful.convert(model)`.
    """
    wanted = {id(part) for part in parts}
    for name, module in model.named_modules():
        reason = _hides(module)
        if reason and any(id(inner) in wanted for inner in module.modules()):
            place = f"The part {name!r} of the model" if name else "The model"
            raise ConfigError(f"{place} {reason.format(then=then)}")


def refuse_replaced(model: nn.Module, trunks: Iterable[nn.Module]) -> None:
    """Raise where a forward was replaced on the object itself: it would call the original's parts.

    Args:
        trunks: one of them inside is what makes the replaced forward matter.
    """
    wanted = {id(trunk) for trunk in trunks}
    for name, module in model.named_modules():
        replaced = [key for key in ("forward", "forward_features") if key in vars(module)]
        if replaced and any(id(inner) in wanted for inner in module.modules()):
            place = f"the part {name!r} of the model" if name else "the model"
            raise ConfigError(
                f"`{replaced[0]}` of {place} was replaced on the object, and what stands there "
                "calls the original, not the converted model. Write an nn.Module whose forward "
                "calls the unchanged model and convert that, or pass inplace=True."
            )


def _hides(module: nn.Module) -> str | None:
    """Why the blocks inside a module could not be reached, and what to do; None if they can."""
    kind = type(module)
    if "_orig_mod" in module._modules and kind.__module__.startswith("torch._dynamo"):
        return (
            "is compiled (torch.compile), and compiled code runs past converted blocks. Convert "
            "the model itself (`_orig_mod` of the compiled one), then step it: {then}. " + _NO_NEED
        )
    if getattr(module, "_compiled_call_impl", None) is not None or hasattr(
        vars(module).get("forward"), "_torchdynamo_orig_callable"
    ):
        return (
            "is compiled in place (.compile()), and compiled code runs past converted blocks. "
            "Make it anew, do not compile it, and convert the model itself, then step it: "
            "{then}. " + _NO_NEED
        )
    if kind.__name__ in _PARALLEL and kind.__module__.startswith("torch."):
        return (
            f"is wrapped in {kind.__name__}, which runs copies or shards of it. Convert the model "
            "itself (`module` of the wrapper), then step it: {then}. Give each device a model and "
            "streams of its own."
        )
    if isinstance(module, torch.jit.ScriptModule):
        return (
            "is TorchScript, whose blocks are fixed code. Convert the model itself, as it was "
            "before torch.jit, then step it: {then}."
        )
    return None


def fixed_code(model: nn.Module) -> str | None:
    """Whether a model without known blocks holds code of torch.jit or torch.fx, and what to do."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            return (
                "It holds TorchScript, whose blocks are fixed code: pass the model it was made of."
            )
        if isinstance(module, torch.fx.GraphModule):
            return "It holds a graph traced by torch.fx: pass the model that was traced."
    return None
