"""Segmentation models of transformers that join queries to the tokens: EoMT."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from eventful.rules.spec import BlockSpec
from eventful.surgery.adapter import Foreign, Mismatch
from eventful.surgery.adapters.hf_plain import HFDinov3, HFPlain


class HFEomt(HFPlain):
    """EoMT over DINOv2: the last blocks take queries beside the tokens and stay dense."""

    name = "transformers EoMT"
    trunks: ClassVar = {"eomt": ("EomtForUniversalSegmentation",)}
    layers = ("layers",)

    def spec(self, trunk: nn.Module, block: nn.Module) -> BlockSpec:
        """See `Adapter`."""
        _refuse_queries(trunk, block)
        return super().spec(trunk, block)


class HFEomtDinov3(HFDinov3):
    """EoMT over DINOv3."""

    name = "transformers EoMT over DINOv3"
    trunks: ClassVar = {"eomt_dinov3": ("EomtDinov3ForUniversalSegmentation",)}
    layers = ("layers",)

    def spec(self, trunk: nn.Module, block: nn.Module) -> BlockSpec:
        """See `Adapter`."""
        _refuse_queries(trunk, block)
        return super().spec(trunk, block)


def _refuse_queries(trunk: Foreign, block: nn.Module) -> None:
    if any(block is last for last in trunk.layers[-trunk.config.num_blocks :]):
        raise Mismatch("it takes the queries of the masks beside the tokens, and masks attention")
