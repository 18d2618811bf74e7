"""BEiT and Data2Vec of transformers: a learned bias between the places of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from eventful.rules.spec import BiasTable, BlockSpec
from eventful.surgery.adapter import BlockCall, Foreign, Method, is_class
from eventful.surgery.adapters.hf_base import AnnouncedStages, find
from eventful.surgery.adapters.hf_plain import HFPlain
from eventful.surgery.session import Session
from eventful.tokens.layout import TokenLayout


class HFBeit(HFPlain):
    """BEiT: the bias is a block's own, or one that the model shares between its blocks."""

    name = "transformers BEiT"
    trunks: ClassVar = {"beit": ("BeitModel", "BeitBackbone")}
    layers = ("layers", "encoder.layers", "encoder.layer")
    sized: ClassVar = {"shared_position_bias.forward": False}

    def spec(self, trunk: nn.Module, block: Foreign) -> BlockSpec:
        """See `Adapter`."""
        scales = {
            field: getattr(block, name)
            for field, name in (("project_scale", "lambda_1"), ("mlp_scale", "lambda_2"))
            if isinstance(getattr(block, name), Tensor)
        }
        own = find(block, "relative_position_bias", "attention.attention.relative_position_bias")
        shared = find(trunk, "shared_position_bias", "encoder.relative_position_bias")
        tables = [table for table in (own, shared) if table is not None]
        bias = _sum_of(tables) if tables else None
        return replace(super().spec(trunk, block), bias=bias, **scales)

    def read(self, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        """See `Adapter`; a mask that the model passes is the bias it shares."""
        if spec.bias is not None:
            kwargs = {**kwargs, "attention_mask": None}
        return super().read(spec, args, kwargs)


class HFData2Vec(HFBeit):
    """Data2Vec: blocks return their tokens as the only entry of a tuple."""

    name = "transformers Data2Vec"
    sized: ClassVar = {"embeddings.interpolate_pos_encoding": True}

    def matches(self, module: nn.Module) -> bool:
        """See `Adapter`."""
        path = "transformers.models.data2vec.modeling_data2vec_vision"
        return is_class(module, path, "Data2VecVisionModel")

    def write(self, tokens: Tensor, layout: TokenLayout | None, args: tuple[Any, ...]) -> Any:
        """See `Adapter`."""
        return (tokens,)

    def prepare(self, trunk: nn.Module, name: str, session: Session) -> dict[str, Method]:
        """See `Adapter`; the encoder collects the outputs of its blocks without hooks."""
        announced = AnnouncedStages(trunk, name, session)
        return {**super().prepare(trunk, name, session), "forward": announced}


def _sum_of(tables: list[Any]) -> BiasTable:
    def bias(layout: TokenLayout) -> Tensor:
        total: Tensor = sum(table(layout.grid)[0] for table in tables)
        return total

    return bias
