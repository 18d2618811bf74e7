"""What the adapters for transformers share: tapped layers, refused options, attribute lookup."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from eventful.errors import UnsupportedError
from eventful.rules.spec import BlockSpec
from eventful.rules.step import Step
from eventful.surgery.adapter import (
    Adapter,
    BlockCall,
    Foreign,
    Method,
    Mismatch,
    is_class,
    refuse,
)
from eventful.surgery.adapters.constants import SizedMethod, is_own
from eventful.surgery.adapters.origin import forward_of
from eventful.surgery.adapters.versions import refuse_old_transformers
from eventful.surgery.session import Session
from eventful.tokens.layout import TokenLayout

_CAPTURING = "transformers.utils.output_capturing"


class HFAdapter(Adapter):
    """A family of transformers: its trunks own both the patch embedding and the layers.

    Attributes:
        trunks: class names of the trunks, by module below `transformers.models`.
        layers: where a trunk may keep its layers, dotted.
        sized: methods below a trunk whose results depend on weights and frame size alone, dotted,
            with whether only the shape of tensors passed to them counts, see `SizedMethod.shaped`.
    """

    library = "transformers"

    trunks: ClassVar[Mapping[str, Sequence[str]]]
    layers: ClassVar[Sequence[str]]
    sized: ClassVar[Mapping[str, bool]] = {}

    def matches(self, module: nn.Module) -> bool:
        """See `Adapter`."""
        known = any(
            is_class(module, f"transformers.models.{path}.modeling_{path}", *names)
            for path, names in self.trunks.items()
        )
        if known:
            refuse_old_transformers()
        return known and any(find(module, path) is not None for path in self.layers)

    def blocks(self, trunk: nn.Module) -> Sequence[tuple[str, nn.Module]]:
        """See `Adapter`."""
        path = next(path for path in self.layers if find(trunk, path) is not None)
        layers = trunk.get_submodule(path)
        return [(f"{path}.{name}", block) for name, block in layers.named_children()]

    def layout(self, trunk: Foreign, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`."""
        patches = patches_of(trunk)
        return TokenLayout((size[0] // patches.stride[0], size[1] // patches.stride[1]))

    def default_size(self, trunk: Foreign) -> tuple[int, int]:
        """See `Adapter`."""
        size = trunk.config.image_size
        return (size, size) if isinstance(size, int) else (size[0], size[1])

    def read(self, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        """See `Adapter`."""
        refuse(args[1] if len(args) > 1 else kwargs.get("attention_mask"), "attention_mask")
        refuse(kwargs.get("is_causal"), "is_causal")
        if kwargs.get("output_attentions") or "attentions" in captured():
            raise UnsupportedError(
                "output_attentions=True: inside a stream attention maps are not computed for all "
                "tokens. Call the model outside the stream, or switch output_attentions off."
            )
        return BlockCall(args[0] if args else kwargs["hidden_states"])

    def watched(self, spec: BlockSpec, step: Step) -> bool:
        """Whether a hook uses the layer's output.

        transformers installs its own hooks at the first request for hidden states and never
        removes them, so they count only in calls that request hidden states.
        """
        hooks = spec.module._forward_hooks.values()
        if any(getattr(hook, "__module__", None) != _CAPTURING for hook in hooks):
            return True
        if not hooks or ("announced", spec.trunk) in step.cache:
            return False
        collected = captured()
        some = collected.get("_hidden_states_layers")
        return "hidden_states" in collected and (some is None or spec.index in some)

    def prepare(self, trunk: Foreign, name: str, session: Session) -> dict[str, Method]:
        """See `Adapter`."""
        made: dict[str, Method] = {}
        for path, shaped in self.sized.items():
            owner, _, method = path.rpartition(".")
            module = find(trunk, owner)
            if is_own(module, method, self.library):
                made[path] = SizedMethod(module, method, session, shaped)
        if is_backbone(trunk):
            made["forward"] = AnnouncedStages(trunk, name, session)
        return made


@dataclass
class AnnouncedStages:
    """A trunk's forward, which first notes in the step the layers whose outputs it will return.

    A backbone requests the output of every layer from its encoder and drops most of them, so
    without this every layer would count as tapped.
    """

    trunk: Foreign
    name: str
    session: Session

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The trunk's own forward."""
        original = type(self.trunk).forward
        step = self.session.step
        if step is not None:
            step.cache["announced", self.name] = True
            step.taps.setdefault(self.name, set()).update(self._taps(original, args, kwargs))
        return original(self.trunk, *args, **kwargs)

    def _taps(self, original: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
        if len(args) > 1:
            names = list(inspect.signature(original).parameters)[1:]
            kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        wanted = kwargs.get("output_hidden_states")
        if self.trunk.config.output_hidden_states if wanted is None else wanted:
            return set(range(self.trunk.config.num_hidden_layers))
        if not is_backbone(self.trunk):
            return set()
        # Stage 0 is the stem; stage i + 1 is the output of layer i.
        stages = self.trunk.stage_names
        return {i - 1 for i, stage in enumerate(stages) if i and stage in self.trunk.out_features}


def is_backbone(trunk: Foreign) -> bool:
    """Whether the trunk returns feature maps of named stages."""
    return hasattr(trunk, "stage_names") and hasattr(trunk, "out_features")


def captured() -> Mapping[str, Any]:
    """What transformers' hooks collect for the model that is being called, by name."""
    active = getattr(sys.modules.get(_CAPTURING), "_active_collector", None)
    return (active.get() if active is not None else None) or {}


def find(module: nn.Module, *paths: str) -> Foreign:
    """The first of the dotted `paths` that exists, else None; names differ between versions."""
    for path in paths:
        found: Foreign = module
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return found
    return None


def need(module: nn.Module, *paths: str) -> Foreign:
    """As `find`; raises `Mismatch` if none exists."""
    found = find(module, *paths)
    if found is None:
        raise Mismatch(f"{type(module).__name__} has no {' or '.join(paths)}")
    return found


def need_own_forward(*modules: nn.Module) -> None:
    """Raise for modules that do not run the forward that transformers defines for them."""
    for module in modules:
        if not forward_of(module).startswith("transformers.models."):
            raise Mismatch(f"the forward of its {type(module).__name__} was replaced")


def patches_of(trunk: nn.Module) -> nn.Conv2d:
    """The convolution that makes patches."""
    found: nn.Conv2d = find(
        trunk,
        "embeddings.patch_embeddings.projection",
        "embeddings.patch_embeddings",
        "embeddings.patch_embedding",
        "embeddings.patch_embed",
        "embeddings.projection",
        "patch_embed.projection",
        "embeddings.proj",
    )
    return found
