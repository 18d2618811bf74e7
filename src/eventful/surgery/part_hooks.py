"""Hooks on parts of a block that a stream never calls, such as its attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from eventful.surgery.session import Session


class PartHooks:
    """Warns of hooks inside one block that a step does not run.

    A step computes a block from its norms and linear layers, so that a module around them is not
    called. Which ones are is seen by trying, once for each hook.
    """

    def __init__(self, session: Session, block: nn.Module, name: str) -> None:
        self._session, self._block, self._name = session, block, name
        self._looked = -1
        self._judged: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Ids of hooks hold in this process alone."""
        return {**self.__dict__, "_looked": -1, "_judged": set()}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While the block computes all its parts, or, where no token is selected, none."""
        registered: int = RemovableHandle.next_id  # grows with every hook of the process
        hooked = {} if registered == self._looked else self._hooked()
        if not hooked:
            self._looked = registered
            yield
            return
        called: set[nn.Module] = set()
        probes = [
            part.register_forward_pre_hook(_Noted(called))
            for part in self._block.modules()
            if part is not self._block
        ]
        try:
            yield
        finally:
            for probe in probes:
                probe.remove()
        if called:
            self._judge(hooked, called)

    def _judge(self, hooked: dict[str, nn.Module], called: set[nn.Module]) -> None:
        for name, part in hooked.items():
            self._judged.update(hooks_of(part))
            if part not in called:
                self._session.warn_once(
                    f"{self._name}.{name} has a hook, which a stream does not run: it computes "
                    f"the block without calling its {type(part).__name__}. A hook on the block "
                    "itself, or on a linear layer in it, is run."
                )

    def _hooked(self) -> dict[str, nn.Module]:
        """Parts with hooks that were not judged yet, by name."""
        return {
            name: part
            for name, part in self._block.named_modules()
            if name and not self._judged.issuperset(hooks_of(part))
        }


class _Noted:
    """A hook that notes that its module is called."""

    def __init__(self, called: set[nn.Module]) -> None:
        self._called = called

    def __call__(self, module: nn.Module, args: object) -> None:
        self._called.add(module)


def hooks_of(part: nn.Module) -> set[int]:
    """Ids of a module's hooks, without those that transformers keeps for outputs on request."""
    every = {**part._forward_hooks, **part._forward_pre_hooks}
    return {
        key
        for key, hook in every.items()
        if not isinstance(hook, _Noted)  # of a step in another thread
        and not str(getattr(hook, "__module__", "")).startswith("transformers.")
    }
