"""Transformers that are recognised by their structure; see docs/adapters.md."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from eventful.errors import UnsupportedError
from eventful.rules.spec import BlockSpec
from eventful.rules.step import Step
from eventful.surgery.adapter import Adapter, BlockCall, Foreign, Method, Mismatch
from eventful.surgery.outputs import first_tensor
from eventful.surgery.session import Session
from eventful.surgery.structure.arguments import extra_argument
from eventful.surgery.structure.dryrun import (
    Facts,
    Proofs,
    as_returned,
    facts_of,
)
from eventful.surgery.structure.fingerprint import Fingerprint, KeptFingerprint
from eventful.surgery.structure.loop import loop_is_plain
from eventful.surgery.structure.passed import pass_on, taken
from eventful.surgery.structure.proof import described, refuse_hooks
from eventful.surgery.structure.search import BlockList, block_lists
from eventful.surgery.structure.state import BlockState
from eventful.tokens.layout import TokenLayout

NAME = "structure"

# What dry runs found, by the first weight of the part that takes frames, and its state.
_facts: MutableMapping[Tensor, tuple[KeptFingerprint, list[list[str]], list[Facts]]]
_facts = WeakTensorKeyDictionary()
_lock = threading.Lock()


def structural_trunks(
    model: nn.Module, taken: list[str]
) -> Iterator[tuple[str, nn.Module, Adapter]]:
    """The trunks of a model that structure shows, outside the parts whose names are `taken`.

    Where one part has several lists of blocks, each list is a trunk.
    """
    found = block_lists(model, taken)
    for frames in dict.fromkeys(one.frames for one in found):
        lists = [one for one in found if one.frames == frames]
        module = model.get_submodule(frames)
        facts = _facts_of(module, [_block_names(model, one) for one in lists])
        for one, known in zip(lists, facts, strict=True):
            adapter = StructuralTrunk(known, _relative(one.name, frames), len(lists) == 1)
            adapter.learn(model.get_submodule(one.name))
            if adapter.whole:
                yield frames, module, adapter
            else:
                yield one.name, model.get_submodule(one.name), adapter


def _relative(name: str, outer: str) -> str:
    return name if outer == "" else name[len(outer) + 1 :]


def _block_names(model: nn.Module, blocks: BlockList) -> list[str]:
    """The blocks of a list, relative to the part that takes frames."""
    path = _relative(blocks.name, blocks.frames)
    return [f"{path}.{name}" for name, _ in model.get_submodule(blocks.name).named_children()]


def _facts_of(frames: nn.Module, lists: list[list[str]]) -> list[Facts]:
    """What a dry run finds; trees over the same weights, as `convert` makes them, share it."""
    first, now = next(frames.parameters()), Fingerprint.of(frames)
    with _lock:
        known = _facts.get(first)
    if known is not None and known[1] == lists and known[0].fits(now):
        return known[2]
    found = facts_of(frames, lists)
    if all(facts.lasting for facts in found):
        with _lock:
            _facts[first] = (now.kept(), lists, found)
    return found


@dataclass(eq=False)
class StructuralTrunk(Adapter):
    """A list of blocks, each proven to compute what its description says.

    Attributes:
        facts: how the tokens lie.
        path: of the list of blocks, relative to the part that takes frames.
        whole: whether the trunk is that part; otherwise it is the list.
        returns, spatial: see `Recipe`.
        tried: the blocks when dry runs of the model tried them; empty where that is not known.
        proven: checks blocks with numbers of tokens that are new, and blocks that have changed.
        states: of the blocks when they were described last.
    """

    facts: Facts
    path: str
    whole: bool
    returns: int | None = None
    spatial: bool = False
    tried: list[KeptFingerprint] = field(default_factory=list, repr=False)
    proven: Proofs = field(default_factory=Proofs, repr=False)
    states: MutableMapping[nn.Module, BlockState] = field(
        default_factory=WeakKeyDictionary, repr=False
    )
    name = NAME

    def learn(self, blocks: nn.Module) -> None:
        """Take what all blocks of a list share from the first that can be described."""
        self.tried = [Fingerprint.of(block).kept() for block in blocks.children()]
        for block in blocks.children():
            try:
                recipe = described(block)
            except Mismatch:
                continue
            self.returns, self.spatial = recipe.returns, recipe.spatial
            return

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tried": [], "proven": None, "states": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.proven, self.states = Proofs(), WeakKeyDictionary()

    def matches(self, module: nn.Module) -> bool:
        """See `Adapter`; trunks are found by `structural_trunks` instead."""
        return False

    def blocks(self, trunk: nn.Module) -> Sequence[tuple[str, nn.Module]]:
        """See `Adapter`."""
        if not self.whole:
            return list(trunk.named_children())
        children = trunk.get_submodule(self.path).named_children()
        return [(f"{self.path}.{name}", block) for name, block in children]

    def spec(self, trunk: nn.Module, block: nn.Module) -> BlockSpec:
        """See `Adapter`."""
        recipe = described(block)
        if self.facts.reason is not None:
            raise Mismatch(self.facts.reason)
        at = [known for _, known in self.blocks(trunk)].index(block)
        if at < len(self.facts.refused) and self.facts.refused[at] is not None:
            raise Mismatch(self.facts.refused[at])
        if (recipe.returns, recipe.spatial) != (self.returns, self.spatial):
            raise Mismatch("it takes or returns its tokens in another form than other blocks")
        refuse_hooks(block, recipe)
        tried = self.tried[at] if at < len(self.tried) else None
        self.states[block] = BlockState(block, recipe, tried, self.states.get(block))
        return recipe.spec(block)

    def layout(self, trunk: nn.Module, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`."""
        return self.facts.layout(size)

    def default_size(self, trunk: nn.Module) -> tuple[int, int]:
        """See `Adapter`."""
        return self.facts.size

    def read(self, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        """See `Adapter`."""
        extra = extra_argument(spec.module, args, kwargs)
        if extra is not None:
            raise UnsupportedError(
                f"`{extra}` was passed to a block inside a stream. The block was proven to work "
                "on tokens alone; call the model outside the stream for this input."
            )
        tokens = _tokens(args, kwargs)
        return BlockCall(tokens.flatten(1, 2) if tokens.dim() == 4 else tokens)

    def read_in(
        self, step: Step, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BlockCall:
        """See `Adapter`; a number of tokens that is new is proven first."""
        state, layout = self.states[spec.module], step.layouts[spec.trunk]
        changed = state.changed()
        if changed is not None:
            raise UnsupportedError(
                f"The model set `{changed}` of its block {spec.name} in this call. A stream runs "
                "parts of the block, which do not see it; call the model outside the stream."
            )
        if layout not in state.proven:
            self._prove(spec, layout)
            state.proven.add(layout)
        tokens = _tokens(args, kwargs)
        if tokens.dim() == 4 and tuple(tokens.shape[1:3]) != layout.grid:
            places = [" x ".join(map(str, sides)) for sides in (tokens.shape[1:3], layout.grid)]
            raise UnsupportedError(
                f"{spec.name} got {places[0]} tokens where {places[1]} were expected for frames of "
                f"this size: they do not lie as the patches of the frame. Use frames of "
                f"{self.facts.size[0]} x {self.facts.size[1]} px."
            )
        return self.read(spec, args, kwargs)

    def _prove(self, spec: BlockSpec, layout: TokenLayout) -> None:
        """Raise where a block, as it is now, does something else with as many tokens."""
        usual = layout == self.facts.layout(self.facts.size)
        if usual and self.states[spec.module].as_tried:
            return
        places = layout.grid if self.spatial else (layout.tokens,)
        reason = self.proven(spec.module, described(spec.module), (*places, spec.dim))
        if reason is not None:
            raise UnsupportedError(
                f"{spec.name} was changed since the model was converted: {reason}. Undo the "
                "change, or convert the model again."
                if usual
                else f"{spec.name} cannot be used for frames of this size: {reason}. Use frames of "
                f"{self.facts.size[0]} x {self.facts.size[1]} px, or an adapter "
                "(docs/adapters.md)."
            )

    def write(self, tokens: Tensor, layout: TokenLayout | None, args: tuple[Any, ...]) -> Any:
        """See `Adapter`."""
        if self.spatial and layout is not None:
            tokens = tokens.unflatten(1, layout.grid)
        return as_returned(tokens, self.returns)

    def write_in(self, step: Step, spec: BlockSpec, tokens: Tensor, args: tuple[Any, ...]) -> Any:
        """See `Adapter`; between blocks, selected tokens are for the next block alone."""
        if spec.trunk in step.compact and step.track is None:
            return as_returned(pass_on(tokens), self.returns)
        return super().write_in(step, spec, tokens, args)

    def watched(self, spec: BlockSpec, step: Step) -> bool:
        """Whether a hook, or anything but the next block, may see this block's output."""
        return super().watched(spec, step) or _plain(spec.trunk) not in step.cache

    def prepare(self, trunk: nn.Module, name: str, session: Session) -> dict[str, Method]:
        """See `Adapter`."""
        path = self.path if self.whole else ""
        if is_sequence(trunk.get_submodule(path)):
            return {f"{path}.forward".lstrip("."): SequenceLoop(trunk, path, name, session)}
        if not self.whole:
            return {}
        names = [short for short, _ in self.blocks(trunk)]
        return {"forward": ProvenLoop(trunk, names, name, session)}


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tokens among a block's arguments."""
    found = first_tensor((*args, *kwargs.values()))
    assert found is not None
    return taken(found)


def is_sequence(module: nn.Module) -> bool:
    """Whether a module passes each child's output to the next child alone."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _plain(trunk: str) -> tuple[str, str]:
    """Where a step notes that only the next block sees a block's output."""
    return ("plain loop", trunk)


@dataclass(eq=False)
class SequenceLoop:
    """The forward of an `nn.Sequential` of blocks, in which nothing else sees their outputs."""

    trunk: nn.Module
    path: str
    name: str
    session: Session

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The list's own forward."""
        step = self.session.step
        if step is not None:
            step.cache[_plain(self.name)] = True
        return nn.Sequential.forward(self.trunk.get_submodule(self.path), *args, **kwargs)  # type: ignore[arg-type]


@dataclass(eq=False)
class ProvenLoop:
    """A trunk's forward; a dry run shows whether only the next block sees a block's output.

    The dry run is made once for each kind of call and each size of frames. Where it shows that
    something else uses the outputs, or cannot be made, every block returns all its tokens.
    """

    trunk: Foreign
    names: list[str]
    name: str
    session: Session
    known: dict[Hashable, bool] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The trunk's own forward."""
        step = self.session.step
        if step is not None and self._plain(step, args, kwargs):
            step.cache[_plain(self.name)] = True
        return type(self.trunk).forward(self.trunk, *args, **kwargs)

    def _plain(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        kinds = tuple(map(_kind, (*args, *kwargs.values())))
        if None in kinds:
            return False
        key = (len(args), tuple(kwargs), kinds, self.session.revision, step.structure)
        known = self.known.get(key)
        if known is None:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return False
            try:
                known = loop_is_plain(self.trunk, self.names, args, kwargs)
            except Mismatch as reason:
                raise UnsupportedError(f"{reason}. Call the model outside the stream.") from reason
            except Exception:  # the trunk itself will raise what there is to say
                known = False
            self.known[key] = known
        return known

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "known": {}}


def _kind(value: object) -> Hashable | None:
    """What the path of a call through the code may depend on; None where that is not known."""
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), value.dtype, value.device)
    if isinstance(value, list | tuple):
        parts = tuple(map(_kind, value))
        return None if None in parts else parts
    return (value,) if value is None or type(value) in (bool, int, float, str) else None
