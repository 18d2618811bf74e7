"""A model at one moment: its modules, weights and settings, to be compared with later ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from eventful.engine.probe import Probe
from eventful.engine.settings import Settings
from eventful.surgery.session import Session


class ModelView:
    """The modules, parameters and settings of a model as they are at one moment.

    A change shows in a module or parameter object (assignment), a parameter's pointer
    (replaced or moved data), its version counter (in-place writes), the session's count of
    loaded state dicts, an attribute or buffer (see `Settings`), or a few elements of each weight
    (writes that the version counter misses, see `Probe`). Taken once and compared often, so it is
    kept as flat lists.

    Attributes:
        modules: every module, the model first.
        watched: the model and the modules of its trunks.
        structure: the same for views that saw the same modules and parameters in the trunks.
    """

    def __init__(self, model: nn.Module, session: Session) -> None:
        self.modules = list(model.modules())
        # Heads that keep maps are watched as trunks are: the maps fit their weights alone.
        kept = [*(trunk for trunk, _ in session.trunks.values()), *session.heads.values()]
        trunks = {id(m) for part in kept for m in part.modules()}
        inside = [m for m in self.modules if id(m) in trunks]
        outside = [m for m in self.modules if id(m) not in trunks]
        self.watched = [model, *(m for m in self.modules[1:] if id(m) in trunks)]
        self._session = session
        self._loads = session.loads
        self._children = [m._modules for m in self.modules if m._modules]
        self._no_children = [m._modules for m in self.modules if not m._modules]
        self._kept_children = [list(held.values()) for held in self._children]
        self._hooks = [
            hooks for m in self.modules for hooks in (m._forward_hooks, m._forward_pre_hooks)
        ]
        self._hooked: tuple[int, bool] | None = None
        self._contents: list[Tensor] | None = None
        self._trunk, self._rest = _Weights(inside), _Weights(outside)
        held = [part for m in inside for part in (m, *m._parameters.values())]
        self.structure = session.structure_of(held)
        roots = [trunk for trunk, _ in session.trunks.values()]
        self._settings = Settings(inside, session.volatile, fed=roots)
        # Recorded work would go on with old values; on a CPU a new value is simply used.
        recordable = self.device is not None and self.device.type != "cpu"
        self._rest_settings = Settings([*outside, *roots] if recordable else [], session.volatile)
        self._start_probe()

    def _start_probe(self) -> None:
        self._probe: Probe | None = None
        self._values: list[Tensor] | None = None
        if self.device is None or self.device.type == "cpu":  # elsewhere reading would wait
            self._values = self.probe.values()

    @property
    def device(self) -> torch.device | None:
        """Where the trunks are; None if they have no weights."""
        found = self._trunk.parameters
        return found[0].device if found else None

    @property
    def probe(self) -> Probe:
        """A few elements of every weight and buffer of the trunks; made when first asked for."""
        if self._probe is None:
            self._probe = Probe([*self._trunk.parameters, *self._settings.tensors])
        return self._probe

    @property
    def parameters(self) -> Sequence[Tensor]:
        """Of the trunks."""
        return self._trunk.parameters

    def count_revision(self) -> None:
        """Count in the session that settings or buffers of the trunks are not the last stream's."""
        session, now = self._session, self._settings
        if now.values != session.settings or not now.holds(session.buffers):
            session.settings, session.buffers = now.values, now.kept_tensors()
            session.revision += 1

    def hooked(self) -> bool:
        """Whether some module has hooks, which recorded work would not run."""
        registered = RemovableHandle.next_id  # grows with every hook of the process
        if self._hooked is None or self._hooked[0] != registered or self._hooked[1]:
            self._hooked = (registered, any(self._hooks))
        return self._hooked[1]

    def difference(self) -> str | None:
        """What memory computed with this model no longer fits; None if it still fits."""
        if not self._same_weights():
            return "weights"
        if not self._settings.same():
            names = {id(m): name for m, name in self._named()}
            changed = sorted(f"{names[id(m)]}.{key}" for m, key in self._settings.changes())
            return ", ".join(changed[:3]) + (" ..." if len(changed) > 3 else "")
        if self._values is not None and self.probe.changed(self._values):
            return "weights"
        return None

    def _named(self) -> list[tuple[nn.Module, str]]:
        return [(m, name) for name, m in self.modules[0].named_modules()]

    def _same_weights(self) -> bool:
        return self.unwritten() and self.same_tree() and self._trunk.in_place()

    def unwritten(self) -> bool:
        """Whether nobody wrote to the trunks' weights, as far as torch counts it."""
        return self._loads == self._session.loads and self._trunk.unwritten()

    def same_settings(self) -> bool:
        """Whether the attributes of the trunks' modules are the same."""
        return self._settings.same()

    def trains(self) -> bool:
        """Whether the model, or a part of its trunks, is in training mode."""
        return any([module.training for module in self.watched])

    def same_tree(self) -> bool:
        """Whether the modules are the same."""
        return [list(held.values()) for held in self._children] == self._kept_children and not any(
            self._no_children
        )

    def holds_old_memory(self) -> bool:
        """Whether weights were replaced, so that the view alone keeps the old ones alive."""
        return not self.same_tree() or not self._trunk.in_place()

    def same_places(self) -> bool:
        """Whether the weights outside the trunks lie where they lay."""
        return self._rest.in_place()

    def same_surroundings(self) -> bool:
        """Whether the attributes of modules outside the trunks are the same."""
        return self._rest_settings.same()

    def absorb(self) -> None:
        """Stop watching attributes that the step just made has changed."""
        if self._settings.absorb():
            self._start_probe()  # some buffers may no longer be watched
        self._rest_settings.absorb()

    def moved_to(self, other: ModelView) -> bool:
        """Whether `other` is the same model on another device, as far as the probes show."""
        if self._values is None:
            return True
        there = [values.cpu() for values in other.probe.values()]
        return len(there) == len(self._values) and all(map(torch.equal, there, self._values))

    def note_contents(self) -> None:
        """Note what the trunks' weights hold, once; a device is not waited for.

        Writes through `.data` show nowhere else. Work shared among streams outlives a stream's
        reset, so that `agrees` has to see them.
        """
        if self._contents is None:
            self._contents = self._trunk.norms()

    def agrees(self, other: ModelView) -> bool:
        """Whether two views saw the same modules, weights and settings."""
        if self is other:
            return True

        def seen(view: ModelView) -> list[Any]:
            weights = (view._trunk, view._rest)
            return [
                [id(module) for module in view.modules],
                *[[id(p) for p in part.parameters] for part in weights],
                *[(part.pointers, part.versions) for part in weights],
            ]

        contents = (self._contents or (), other._contents or ())
        return (
            self._loads == other._loads
            and seen(self) == seen(other)
            and self._settings.agrees(other._settings)
            and self._rest_settings.agrees(other._rest_settings)
            and all(map(torch.equal, *contents))  # of no more than both have noted
        )


class _Weights:
    """The parameters of some modules: objects, pointers and versions in flat lists."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._dicts = [m._parameters for m in modules if m._parameters]
        self._empty = [m._parameters for m in modules if not m._parameters]
        self._kept = [list(held.values()) for held in self._dicts]
        self.parameters = [p for held in self._kept for p in held if p is not None]
        self.pointers = [p.data_ptr() for p in self.parameters]
        self._tracked = [p for p in self.parameters if not p.is_inference()]
        self.versions = [p._version for p in self._tracked]

    def in_place(self) -> bool:
        """Whether the same parameters hold the same memory."""
        try:  # lists compare identical objects without looking inside; others are tensors
            same = [list(held.values()) for held in self._dicts] == self._kept
        except RuntimeError:
            return False
        if not same or any(self._empty):
            return False
        return not self.parameters or [p.data_ptr() for p in self.parameters] == self.pointers

    @torch.no_grad()
    def norms(self) -> list[Tensor]:
        """L1 and L2 norms of the parameters, in a few launches."""
        kinds: dict[Any, list[Tensor]] = {}
        for parameter in self.parameters:
            if parameter.is_floating_point() and type(parameter.data) is Tensor:
                kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        return [
            torch.stack(
                torch._foreach_norm(group, order, dtype=torch.promote_types(kind, torch.float32))
            )
            for (_, kind), group in kinds.items()
            for order in (1, 2)
        ]

    def unwritten(self) -> bool:
        """Whether nobody wrote to them."""
        return [p._version for p in self._tracked] == self.versions
