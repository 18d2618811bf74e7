"""Exported steps compiled by AOTInductor: the state is passed in and written in place."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eventful.errors import ArtefactError
from eventful.export.manifest import Manifest
from eventful.export.pure import Numbers
from eventful.export.runtimes.engine import EXTRA, Engine, Made, Memory


class AotiEngine(Engine):
    """Compiled packages, loaded into this process.

    Compiled code uses as many threads as torch does; `threads` sets that for the whole process.
    """

    def __init__(self, folder: Path, manifest: Manifest, threads: int | None) -> None:
        super().__init__(folder, manifest, threads)
        if threads is not None:
            torch.set_num_threads(threads)
        self.dense = self._open(manifest.dense)
        self.steps = {one.width: self._open(one.file) for one in manifest.steps}
        self.one = threading.Lock()  # a package runs once at a time

    def _open(self, file: str) -> Any:
        from torch._inductor import aoti_load_package

        try:
            return aoti_load_package(str(self.folder / file))
        except Exception as error:  # the loader, and the linker of the system, fail in many ways
            line = str(error).strip().partition("\n")[0][:300]
            raise ArtefactError(
                f"{self.folder / file} cannot be loaded ({type(error).__name__}: {line}). A "
                "package runs on the kind of processor, and with the version of torch, that it was "
                "made with: export again here."
            ) from error

    def memory(self) -> AotiMemory:
        """See `Engine`."""
        return AotiMemory(self)


class AotiMemory(Memory):
    """State in torch tensors that compiled steps write to."""

    def __init__(self, engine: AotiEngine) -> None:
        super().__init__(engine.manifest)
        self._engine = engine

    def flush(self, frame: Tensor) -> Made:
        """See `Memory`."""
        manifest = self._engine.manifest
        with self._engine.one, torch.no_grad():
            made = self._engine.dense(frame.contiguous())
        leaves = len(manifest.leaves)
        for one, value in zip(manifest.written, made[leaves + 1 :], strict=True):
            self.state[one.name].copy_(value)
        return Made(list(made[:leaves]), made[leaves][0].tolist())

    def step(self, frame: Tensor, numbers: Numbers, width: int) -> Made:
        """See `Memory`."""
        manifest = self._engine.manifest
        state = [self.state[one.name] for one in manifest.state]
        with self._engine.one, torch.no_grad():
            made = self._engine.steps[width](frame.contiguous(), *numbers, *state)
            made = [_own(value, state) for value in made]
        leaves = len(manifest.leaves)
        report, index, count, score = made[leaves : leaves + len(EXTRA)]
        return Made(list(made[:leaves]), report[0].tolist(), index[: int(count)], score)


def _own(value: Tensor, state: Sequence[Tensor]) -> Tensor:
    """A tensor that the next step does not write to.

    Where the model returns what its last block returned, compiled code returns the state itself.
    """
    place = value.data_ptr()
    inside = (one.data_ptr() <= place < one.data_ptr() + one.nbytes for one in state)
    return value.clone() if any(inside) else value
