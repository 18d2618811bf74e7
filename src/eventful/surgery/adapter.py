"""The base class of adapters: what the library needs to know about one family of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from torch import Tensor, nn

from eventful.errors import Mismatch, UnsupportedError
from eventful.rules.spec import BlockSpec, QKVMap, linear_cost
from eventful.rules.step import Step
from eventful.tokens.layout import TokenLayout

if TYPE_CHECKING:
    from eventful.surgery.session import Session

__all__ = [
    "Adapter",
    "BlockCall",
    "Foreign",
    "Method",
    "Mismatch",
    "is_class",
    "packed_qkv",
    "per_head",
    "refuse",
    "usual_spec",
]

# A module of a model library, or a part of one: its attributes have no types here.
Foreign: TypeAlias = Any
# Replaces a method: takes the method's arguments without `self`, and returns what it returns.
Method = Callable[..., Any]


@dataclass
class BlockCall:
    """The arguments of one call of a block, as the update rules need them."""

    tokens: Tensor  # (B, N, D), or (B, M, D) between blocks of gating `frame`
    positions: object = None  # passed on to `BlockSpec.qkv`


class Adapter(ABC):
    """One family of models: how to find its blocks, and how to read and feed them.

    A trunk is the module that owns the list of blocks. Subclass this, then
    `eventful.register_adapter(YourAdapter())`.
    """

    name: ClassVar[str]
    library: ClassVar[str] = ""  # package that defines the family; empty for your own models
    adds_positions: bool = True  # a position encoding is added to the tokens
    # Of models that take frames as patches: by the name of an argument with the grid of each frame,
    # (B, 2) or (B, 3) with a time of 1 first, the name of the one with the patches.
    grids: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def matches(self, module: nn.Module) -> bool:
        """Whether `module` is a trunk of this family."""

    @abstractmethod
    def blocks(self, trunk: nn.Module) -> Sequence[tuple[str, nn.Module]]:
        """The blocks in order, each with its name relative to the trunk."""

    @abstractmethod
    def spec(self, trunk: nn.Module, block: nn.Module) -> BlockSpec:
        """The block as the update rules see it; raises `Mismatch` with the reason if it is none."""

    @abstractmethod
    def layout(self, trunk: nn.Module, size: tuple[int, int]) -> TokenLayout:
        """The token layout for frames of `size` (height, width) pixels."""

    def grid_layout(self, trunk: nn.Module, grid: tuple[int, int]) -> TokenLayout:
        """The token layout for frames that come as a grid (h, w) of patches, see `grids`."""
        return TokenLayout(grid)

    def default_size(self, trunk: nn.Module) -> tuple[int, int]:
        """Frame size the model was made for, for a dry run without frames."""
        raise UnsupportedError(f"{self.name} models have no frame size of their own; pass `size`.")

    def read(self, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        """Tokens and positions from a block's arguments; by default the first one is the tokens."""
        for key in ("attn_mask", "attention_mask", "mask", "is_causal"):
            refuse(kwargs.get(key), key)
        return BlockCall(args[0] if args else kwargs["hidden_states"])

    def read_in(
        self, step: Step, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BlockCall:
        """As `read`, for families whose blocks cannot be read without knowing the step."""
        return self.read(spec, args, kwargs)

    def write(self, tokens: Tensor, layout: TokenLayout | None, args: tuple[Any, ...]) -> Any:
        """A block's return value; `layout` is None between blocks of gating `frame`."""
        return tokens

    def write_in(self, step: Step, spec: BlockSpec, tokens: Tensor, args: tuple[Any, ...]) -> Any:
        """As `write`, for families whose blocks' results depend on the step or the block."""
        full = spec.trunk not in step.compact
        return self.write(tokens, step.layouts[spec.trunk] if full else None, args)

    def watched(self, spec: BlockSpec, step: Step) -> bool:
        """Whether code besides the next block sees this block's output; by default, its hooks."""
        return bool(spec.module._forward_hooks)

    def knows_loop(self, trunk: nn.Module) -> bool:
        """Whether the loop over the blocks is the library's own, which uses no other outputs.

        In a subclass with another loop every block returns all its tokens.
        """
        names = ("forward", "forward_features")
        # A method set on the instance hides the class's; eventful's own calls the class's.
        loops = [vars(trunk).get(name, getattr(type(trunk), name, None)) for name in names]
        return not self.library or all(
            loop is None or loop.__module__.split(".")[0] in (self.library, "eventful")
            for loop in loops
        )

    def prepare(self, trunk: nn.Module, name: str, session: Session) -> dict[str, Method]:
        """Methods to replace on the trunk or below it, by name relative to the trunk.

        A dotted name such as "encoder.forward" is a method of a submodule.
        """
        return {}


def refuse(value: object, name: str) -> None:
    """Raise for an argument that eventful attention cannot honour."""
    if value is not None and value is not False:
        raise UnsupportedError(
            f"{name} was passed to a block inside a stream. Eventful attention has no masks; call "
            "the model outside the stream for this input."
        )


def is_class(module: nn.Module, path: str, *names: str) -> bool:
    """Whether `module` is of a class from `path`, without importing the library it is from."""
    return any(c.__module__ == path and c.__name__ in names for c in type(module).__mro__)


def per_head(norm: nn.Module, tokens: Tensor, heads: int) -> Tensor:
    """Apply a norm over the channels of each head of (B, M, H*d)."""
    if isinstance(norm, nn.Identity):
        return tokens
    return norm(tokens.unflatten(-1, (heads, -1))).flatten(-2)


def repeat_heads(tokens: Tensor, heads: int, size: int) -> Tensor:
    """(B, M, h*d) to (B, M, H*d): keys or values that several of H heads share, once for each."""
    times = heads * size // tokens.shape[-1]
    if times == 1:
        return tokens
    return tokens.unflatten(-1, (-1, size)).repeat_interleave(times, dim=-2).flatten(-2)


def usual_spec(
    block: Foreign, attention: Foreign, heads: int, head_dim: int, qkv: QKVMap
) -> BlockSpec:
    """The spec of a block with parts norm1, attn.qkv, attn.proj, norm2 and mlp.

    Families replace what differs.
    """
    return BlockSpec(
        module=block,
        dim=attention.proj.out_features,
        heads=heads,
        head_dim=head_dim,
        scale=attention.scale,
        norm1=block.norm1,
        qkv=qkv,
        project=attention.proj,
        norm2=block.norm2,
        mlp=block.mlp,
        qkv_cost=linear_cost(attention.qkv),
        project_cost=linear_cost(attention.proj),
        mlp_cost=linear_cost(block.mlp),
    )


def packed_qkv(linear: Callable[[Tensor], Tensor]) -> QKVMap:
    """The QKV map of a layer whose output holds q, k and v side by side."""

    def qkv(x: Tensor, index: Tensor, positions: object) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = linear(x).chunk(3, dim=-1)
        return q, k, v

    return qkv
