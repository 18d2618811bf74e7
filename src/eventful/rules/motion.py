"""Memory that moves with the picture: references and outputs are carried along its motion.

The frame gate then compares a token with what its content was where it came from. The embedded
patches are compared without their positions, which do not move. A token that moved and is
otherwise the same keeps its output, and costs nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eventful import ops
from eventful.rules.spec import BlockSpec
from eventful.rules.step import Step, View


def see(step: Step, trunk: str, image: Tensor, patches: Tensor) -> None:
    """Note what a patch embedding saw.

    Args:
        image: (B, C, height, width).
        patches: (B, D, h, w).
    """
    layout = step.layouts.get(trunk)
    if not step.config.motion or layout is None or tuple(patches.shape[2:]) != layout.grid:
        return
    picture = ops.grey_picture(image, layout.grid)
    content = patches.flatten(2).transpose(1, 2)
    if step.track is not None:  # blocks recorded alone read it where it was when recorded
        picture = _placed(step, (trunk, "picture"), picture)
        content = _placed(step, (trunk, "content"), content)
    step.views[trunk] = View(picture, content)


def _placed(step: Step, key: tuple[str, str], value: Tensor) -> Tensor:
    """The same values at a place that stays."""
    place: Tensor = step.constant(
        ("placed", *key, value.shape, value.dtype),
        lambda: torch.empty(value.shape, dtype=value.dtype, device=value.device),
    )
    return place.copy_(value)


def follow_motion(step: Step, spec: BlockSpec, tokens: Tensor) -> Tensor:
    """Carry the references of a trunk along the motion of the picture.

    Args:
        tokens: (B, N, D), embedded.

    Returns:
        What the frame gate compares (B, N, D): the tokens without their positions.
    """
    view, picture = step.views[spec.trunk], _picture(spec)
    layout, state = step.layouts[spec.trunk], step.state
    if not step.flush_all or step.inputs_of(spec.trunk, tokens).count_wanted:
        height, width = layout.grid
        step.record.carried[spec.trunk] = (height * width, spec.dim, 0)
        motion = ops.match_blocks(view.picture, state.raw(picture), state.slots, _hint(step, spec))
        if not state.reversible or bool(motion.any()):
            step.motions[spec.trunk] = motion
        carry(step, spec, f"{spec.gate_name('frame')}/reference")
    parts = [tokens[:, : layout.prefix], view.content, tokens[:, layout.tokens - layout.suffix :]]
    return torch.cat([part for part in parts if part.shape[1]], dim=1)


def carry(step: Step, spec: BlockSpec, name: str) -> None:
    """Carry a tensor (B, N, D) of the state along the motion."""
    motion = step.motions.get(spec.trunk)
    if spec.trunk in step.record.carried:  # counted whether anything moved or not, as on a device
        size, dim, count = step.record.carried[spec.trunk]
        step.record.carried[spec.trunk] = (size, dim, count + 1)
    if motion is None or name not in step.state:
        return
    memory, slots = step.state.held(name)
    prefix = step.layouts[spec.trunk].prefix
    step.state.fill(name, ops.carry(memory, motion, prefix, slots), owned=True)


def keep_picture(step: Step, spec: BlockSpec) -> None:
    """Remember the picture for the next frame, once the frame is known to be good."""
    step.state.fill(_picture(spec), step.views[spec.trunk].picture, owned=True)


def _picture(spec: BlockSpec) -> str:
    return f"{spec.gate_name('frame')}/picture"


def _hint(step: Step, spec: BlockSpec) -> Tensor | None:
    """(B, h, w, 2) in tokens: the motion that came with the frame at the cell of each token."""
    if step.hint is None:
        return None
    height, width = step.layouts[spec.trunk].grid
    nearest = torch.nn.functional.interpolate(step.hint.float(), (height, width), mode="nearest")
    return nearest.permute(0, 2, 3, 1) * nearest.new_tensor([height, width])
