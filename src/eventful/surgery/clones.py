"""A second module tree over the same weights."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from eventful.surgery.wrappers import is_own_method


def clone_tree(module: nn.Module, done: dict[int, nn.Module] | None = None) -> nn.Module:
    """A new module tree over the same parameters, buffers and hyper-parameters.

    The dicts of parameters and buffers themselves are shared, so both trees see weights that are
    loaded, moved or replaced through either.
    """
    done = {} if done is None else done
    if id(module) in done:
        return done[id(module)]
    if isinstance(module, torch.jit.ScriptModule):  # fixed code: nothing in it can be converted
        return module
    # Every traced graph has its own class, and `GraphModule.__new__` would make another one.
    make = object if isinstance(module, torch.fx.GraphModule) else module.__class__
    twin: nn.Module = make.__new__(module.__class__)
    done[id(module)] = twin
    for key, value in vars(module).items():
        if key == "_modules":
            twins = {n: None if m is None else clone_tree(m, done) for n, m in value.items()}
            vars(twin)[key] = type(value)(twins)
        elif key.endswith("_hooks") or key.startswith(("_forward_hooks", "_forward_pre_hooks")):
            vars(twin)[key] = copy.copy(value)
        elif key == "forward" and is_own_method(module, key):
            continue  # it would call the original
        else:
            vars(twin)[key] = value
    return twin


def bare_tree(module: nn.Module) -> nn.Module:
    """A second tree over the same weights, without hooks and without what `convert` puts there."""
    return _bare(clone_tree(module))


def _bare(twin: nn.Module) -> nn.Module:
    for part in twin.modules():
        if own_forward(vars(part).get("forward")):
            del vars(part)["forward"]
        for name, hooks in vars(part).items():
            if name.startswith(("_forward_hooks", "_forward_pre_hooks")):
                vars(part)[name] = type(hooks)()
    return twin


def own_forward(forward: object) -> bool:
    """Whether a forward that was set on an object is one that `convert` puts there."""
    return type(forward).__module__.split(".")[0] == "eventful"


def private_tree(module: nn.Module, shared: Iterable[nn.Module] = ()) -> nn.Module:
    """A bare tree whose run leaves the module as it is: buffers and attributes are its own.

    Parameters are its own, too, but for those inside `shared`: parts that are not run.
    """
    done: dict[int, nn.Module] = {}
    twin = _bare(clone_tree(module, done))
    held = {id(p) for part in shared for p in part.parameters()}
    memo: dict[int, Any] = dict(done)
    for parameter in module.parameters():
        own = id(parameter) not in held and type(parameter) is nn.Parameter
        memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), False) if own else parameter
    for part in twin.modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue
        for key, value in vars(part).items():
            if key != "_modules" and not key.endswith("_hooks"):
                vars(part)[key] = _own(value, memo)
    return twin


def _own(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of an attribute's value; the value itself where it cannot be copied."""
    if isinstance(value, dict) and type(value) in (dict, OrderedDict):
        return type(value)((key, _own(part, memo)) for key, part in value.items())
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Tensor):
        return memo.setdefault(id(value), value.detach().clone())
    if isinstance(value, torch.Generator):
        return memo.setdefault(id(value), value.clone_state())
    if own_forward(value):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # locks, files, whatever a library forbids to copy
        return value
