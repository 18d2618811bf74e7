"""Transformers of transformers that take a clip at once, cut into blocks of a few frames."""

from __future__ import annotations

from typing import ClassVar

from eventful.surgery.adapter import Foreign
from eventful.surgery.adapters.hf_plain import HFPlain, special_tokens
from eventful.tokens.layout import TokenLayout


class HFClips(HFPlain):
    """VideoMAE and ViViT: a step is a clip; the grids of its times lie below one another.

    The clips of a stream have as many frames as the model was made for.
    """

    name = "transformers VideoMAE, ViViT"
    trunks: ClassVar = {"videomae": ("VideoMAEModel",), "vivit": ("VivitModel",)}
    layers = ("layers", "encoder.layers", "encoder.layer")

    def layout(self, trunk: Foreign, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`."""
        config = trunk.config
        tubelet = config.tubelet_size
        if isinstance(tubelet, int):
            tubelet = (tubelet, config.patch_size, config.patch_size)
        times = config.num_frames // tubelet[0]
        prefix, suffix = special_tokens(trunk)
        return TokenLayout((times * (size[0] // tubelet[1]), size[1] // tubelet[2]), prefix, suffix)
