"""Noticing that the model a stream's memory was computed with has changed."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from eventful.engine.view import ModelView
from eventful.errors import TrainingModeError, WeightsChangedError
from eventful.surgery.session import Session

CHANGED = (
    "The model's {what} changed since the last frame: the stream's memory no longer fits. "
    "Call stream.reset() and go on: the next frame recomputes everything."
)
_REPLACED = (
    "A module of the original model was added, removed or replaced after conversion, and the "
    "converted model still runs the old one. Call eventful.convert again and start new streams, "
    "or replace the module in the converted model instead."
)
_SWITCHED = (
    "Adapters (LoRA) of the original model were switched after conversion, and the converted model "
    "still runs its own. Switch them in the converted model, then call stream.reset()."
)
_REORDERED = (
    "Blocks of the converted model were replaced, added, removed or put in another order. Change "
    "the original model (after eventful.restore if it was converted in place) and call "
    "eventful.convert again."
)


def check_mode(view: ModelView) -> None:
    """Raise if the model, or a part of its trunks, is in training mode."""
    if view.trains():
        raise TrainingModeError(
            "The model is in training mode: dropout and drop path would be remembered. Call "
            "model.eval() first."
        )


class Guard:
    """Remembers the model a stream's state was computed with."""

    def __init__(self, model: nn.Module, session: Session) -> None:
        self._model = model
        self._session = session
        self._known: ModelView | None = None
        self._replaced = False  # weights other than those the state was computed with

    @property
    def known(self) -> ModelView | None:
        """The view remembered, which may no longer hold."""
        return self._known

    def forget(self) -> None:
        """Accept weights on another device at the next step, with the same values as before."""
        if self._replaced:
            raise WeightsChangedError(CHANGED.format(what="weights"))
        if self._known is None:
            return
        if self._known._loads != self._session.loads or not self._known.moved_to(self._take()):
            raise WeightsChangedError(CHANGED.format(what="weights"))
        self._known = None

    def drop(self) -> None:
        """Accept any model at the next step."""
        self._known, self._replaced = None, False

    def check_part(self, turn: int, *, settings: bool) -> ModelView | None:
        """A quarter of `check`, another one at each turn, and all of it where that finds something.

        What shows a change of values, versions and state dicts loaded, is looked at every time.

        Args:
            settings: whether attributes are looked at, too.

        Returns:
            A new view, where something changed that memory does not depend on.
        """
        known, original = self._known, self._session.original
        parts: tuple[Callable[[ModelView], bool], ...] = (
            lambda seen: (
                seen.trains()
                or (original is not None and (original.replaced() or original.switched()))
            ),
            lambda seen: seen.holds_old_memory(),
            lambda seen: settings and not seen.same_settings(),
            lambda seen: not seen.same_surroundings(),
        )
        calm = known is not None and not self._replaced and known.unwritten()
        if known is not None and calm and not parts[turn % len(parts)](known):
            return None
        view = self.check()
        check_mode(view)
        return view

    def check(self) -> ModelView:
        """Raise if the trunks are not the remembered ones; returns the view."""
        if self._session.original is not None and self._session.original.replaced():
            raise WeightsChangedError(_REPLACED)
        if self._session.original is not None and self._session.original.switched():
            raise WeightsChangedError(_SWITCHED)
        if self._replaced:
            raise WeightsChangedError(CHANGED.format(what="weights"))
        if self._known is None:
            return self._take()
        what = self._known.difference()
        if what is not None:
            if self._known.holds_old_memory():
                self._known, self._replaced = None, True
            raise WeightsChangedError(CHANGED.format(what=what))
        if not self._known.same_places() or not self._known.same_surroundings():
            return self._take()
        return self._known

    def _take(self) -> ModelView:
        for name, (trunk, adapter) in self._session.trunks.items():
            if [block for _, block in adapter.blocks(trunk)] != self._session.sequence[name]:
                raise WeightsChangedError(_REORDERED)
        view = ModelView(self._model, self._session)
        view.count_revision()
        return view

    def remember(self, view: ModelView, *, ran: bool) -> None:
        """Take this model as the one the state was computed with; called after a step.

        Args:
            ran: the model's own code ran, which may have changed attributes.
        """
        if ran:
            view.absorb()
        self._known = view
