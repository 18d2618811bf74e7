"""A second module tree over the same weights."""

from __future__ import annotations

import copy

import torch
from torch import nn

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
    twin = clone_tree(module)
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
