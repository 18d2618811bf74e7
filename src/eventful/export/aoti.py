"""AOTInductor packages of a step: compiled code that Python and C++ load with libtorch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eventful.errors import UnsupportedError


class InPlace(nn.Module):
    """A step that writes the new state over the old one, so that compiled code need not copy it.

    Args:
        given: how many arguments come before the state.
    """

    def __init__(self, step: nn.Module, given: int) -> None:
        super().__init__()
        self._step, self._given = [step], given

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        """What the step returns besides the state; the arguments after `given` are written."""
        state = args[self._given :]
        made = self._step[0](*args)
        rest = len(made) - len(state)
        for old, new in zip(state, made[rest:], strict=True):
            old.copy_(new)
        return tuple(made[:rest])


class AotiWriter:
    """Writes graphs as AOTInductor packages; each holds the weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.options: dict[str, Any] = {"int8": False}
        self.versions: dict[str, str] = {}

    def __enter__(self) -> AotiWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        """Nothing is open."""

    def add(self, plan: Any) -> str:
        """Compile one graph; returns the name of its file."""
        from torch._inductor import aoti_compile_and_package

        file = f"{plan.name}.pt2"
        state = sum(name.startswith("state.") for name in plan.inputs)
        given = len(plan.args) - state
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                program = plan.traced_as(InPlace(plan.module, given)) if state else plan.program
                _check_operators(program, plan.what)
                aoti_compile_and_package(
                    program,
                    package_path=str(self.folder / file),
                    inductor_configs={"cpp.dynamic_threads": True},
                )
        except UnsupportedError:
            raise
        except Exception as error:  # the C++ compiler, or inductor, fails in many ways
            line = str(error).strip().partition("\n")[0][:300]
            raise UnsupportedError(
                f"AOTInductor cannot compile {plan.what} ({type(error).__name__}: {line}). It "
                "needs a C++ compiler (apt install g++). `--to onnx` needs none."
            ) from error
        return file


def _check_operators(program: Any, what: str) -> None:
    """Raise for operators of ours: a package would compile, and call Python that is not there."""
    targets = (node.target for node in program.graph_module.graph.nodes)
    own = {
        target.name().partition("::")[2]
        for target in targets if getattr(target, "namespace", "") == "eventful"
    }  # fmt: skip
    if own:
        raise UnsupportedError(
            f"AOTInductor has no form of {', '.join(sorted(own))} in {what}: the NMS and RoIAlign "
            "of a detector. Use --to onnx or --to openvino, which have operators for both."
        )
