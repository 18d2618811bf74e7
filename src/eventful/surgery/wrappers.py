"""Refuses what is not a model, or hides its blocks; each message says what to pass instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from eventful.errors import ConfigError

_NO_NEED = "Compiling is not needed: on a GPU a stream records CUDA graphs of its own."
_PARALLEL = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


def checked_model(model: object, use: str) -> nn.Module:
    """Return `model` if it is a module, else raise; `use` names the function that was called."""
    if isinstance(model, nn.Module):
        return model
    shown = repr(model)
    shown = shown if len(shown) <= 60 else f"an object of type {type(model).__name__}"
    raise ConfigError(f"{use} takes a model (torch.nn.Module), got {shown}. {_instead(model)}")


def _instead(model: object) -> str:
    if isinstance(model, str):
        return "Make the model first, e.g. timm.create_model(name, pretrained=True)."
    if isinstance(model, type):
        return f"This is a class: pass an instance, {model.__name__}(...)."
    if isinstance(model, Mapping):
        return "These are weights: load them into a model first, model.load_state_dict(...)."
    if isinstance(getattr(model, "model", None), nn.Module):
        return "Pass the model it holds: its attribute `model`."
    return "Make the model first, then pass it."


def refuse_wrappers(model: nn.Module, parts: Iterable[nn.Module], then: str) -> None:
    """Raise where one of `parts` is inside a wrapper that does not call converted blocks.

    Args:
        parts: trunks and blocks.
        then: what to call without the wrapper, e.g. `eventful.convert(model)`.
    """
    wanted = {id(part) for part in parts}
    for name, module in model.named_modules():
        reason = _hides(module)
        if reason and any(id(inner) in wanted for inner in module.modules()):
            place = f"The part {name!r} of the model" if name else "The model"
            raise ConfigError(f"{place} {reason.format(then=then)}")


def refuse_moved_weights(model: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Raise where weights of `parts` are moved or gathered by hooks, which a stream does not call.

    Args:
        parts: trunks and blocks; modules that hold one, or are inside one, are checked.
    """
    parts = list(parts)
    wanted = {id(part) for part in parts}
    inside = {id(inner) for part in parts for inner in part.modules()}
    for name, module in model.named_modules():
        reason = _moves(module)
        if reason is None:
            continue
        if id(module) in inside or any(id(inner) in wanted for inner in module.modules()):
            place = f"The part {name!r} of the model" if name else "The model"
            raise ConfigError(f"{place} {reason}")


def _moves(module: nn.Module) -> str | None:
    """How the weights of a module are moved or spread, and what to do; None if they are not."""
    if "_hf_hook" in vars(module):
        return (
            "is run by hooks of accelerate (a device map, or offloading), which move weights at "
            "each call of a module; a stream calls parts of blocks without them. Load the model "
            "onto one device without device_map and offloading, or undo them: "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True), then model.to(device)."
        )
    if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
        return (
            "is sharded by fully_shard (FSDP): hooks gather its weights at each call, and a stream "
            "calls parts of blocks without them. Load the whole model on each device, and give "
            "each device streams of its own."
        )
    if any(type(weight).__name__ == "DTensor" for weight in module._parameters.values()):
        return (
            "holds weights that are spread over processes (DTensor). Load the whole model on each "
            "device, and give each device streams of its own."
        )
    return None


def holders(model: nn.Module, parts: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that are or hold one of `parts`: those whose code calls converted blocks."""
    wanted = {id(part) for part in parts}
    return [m for m in model.modules() if any(id(inner) in wanted for inner in m.modules())]


def compiled_in_place(modules: Iterable[nn.Module]) -> bool:
    """Whether one of the modules was compiled by `.compile()`; looked at before every step."""
    for module in modules:
        held = vars(module)
        if held.get("_compiled_call_impl") is not None:
            return True
        if hasattr(held.get("forward"), "_torchdynamo_orig_callable"):
            return True
    return False


def refuse_compiled_part(block: nn.Module, name: str, reason: str) -> None:
    """Raise where a block cannot be read because a part of it is compiled.

    Args:
        name: of the block.
        reason: why the block cannot be read.
    """
    parts = [short for short, module in block.named_modules() if is_compiled(module)]
    if parts and "OptimizedModule" in reason:
        raise ConfigError(
            f"The part {name + '.' + parts[0]!r} of the model is compiled (torch.compile), and a "
            "stream calls what is inside it. Leave attention as it is (`_orig_mod` of the "
            "compiled part). A compiled head, neck or MLP is fine. " + _NO_NEED
        )


def refuse_replaced(model: nn.Module, trunks: Iterable[nn.Module]) -> None:
    """Raise where a forward was set on the instance: it would call modules of the original.

    Args:
        trunks: only modules that hold one of them are checked.
    """
    wanted = {id(trunk) for trunk in trunks}
    for name, module in model.named_modules():
        held = [key for key in ("forward", "forward_features") if key in vars(module)]
        replaced = [key for key in held if not is_own_method(module, key)]
        if replaced and any(id(inner) in wanted for inner in module.modules()):
            place = f"the part {name!r} of the model" if name else "the model"
            raise ConfigError(
                f"`{replaced[0]}` of {place} was replaced on the object, and the replacement "
                "calls the original, not the converted model. Write an nn.Module whose forward "
                "calls the unchanged model and convert that, or pass inplace=True."
            )


def is_own_method(module: nn.Module, key: str) -> bool:
    """Whether an attribute is the method of the class: accelerate leaves these when undone."""
    value = vars(module).get(key)
    own = getattr(type(module), key, None)
    return (
        own is not None
        and getattr(value, "__self__", None) is module
        and getattr(value, "__func__", None) is own
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is what `torch.compile(module)` returned."""
    return "_orig_mod" in module._modules and type(module).__module__.startswith("torch._dynamo")


def _hides(module: nn.Module) -> str | None:
    """Why the blocks inside a module cannot be reached, and what to do; None if they can."""
    cls = type(module)
    if is_compiled(module):
        return (
            "is compiled (torch.compile), and compiled code does not call converted blocks. "
            "Convert the model itself (`_orig_mod` of the compiled one), then step it: {then}. "
            + _NO_NEED
        )
    if compiled_in_place([module]):
        return (
            "is compiled in place (.compile()), and compiled code does not call converted blocks. "
            "Build it again without compiling it, convert that, then step it: "
            "{then}. " + _NO_NEED
        )
    if cls.__name__ in _PARALLEL and cls.__module__.startswith("torch."):
        return (
            f"is wrapped in {cls.__name__}, which runs copies or shards of it. Convert the model "
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
    """What to pass instead of a model with torch.jit or torch.fx code inside; None without any."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            return (
                "It holds TorchScript, whose blocks are fixed code: pass the model it was made of."
            )
        if isinstance(module, torch.fx.GraphModule):
            return "It holds a graph traced by torch.fx: pass the model that was traced."
    return None
