"""When a stream runs dense: by measured times, or always where its rule has no GPU kernels."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from eventful.config import Config
from eventful.cost.fallback import Fallback, enabled
from eventful.cost.times import Costs
from eventful.files import digest
from eventful.policies import Always
from eventful.rules.kernels import dense_instead
from eventful.surgery.conversion import BlockForward, global_attention
from eventful.surgery.session import Session
from eventful.tokens.layout import TokenLayout


def cost_key(session: Session, frame: Tensor, batch: int, tokens: int) -> str:
    """What a measurement holds for: model, rule, machine, precision, batch and tokens."""
    shapes = [
        part
        for name, (trunk, _) in sorted(session.trunks.items())
        for part in (
            f"{name}:{type(trunk).__name__}",
            *(f"{key}:{tuple(p.shape)}:{p.dtype}" for key, p in trunk.named_parameters()),
        )
    ]
    config = session.config
    if frame.is_cuda:
        machine = torch.cuda.get_device_name(frame.device)
        tf32 = torch.backends.cuda.matmul.allow_tf32
        kind = f"{frame.dtype} tf32" if tf32 and frame.dtype == torch.float32 else frame.dtype
    else:
        machine = f"{platform.processor() or platform.machine()} x{torch.get_num_threads()}"
        kind = frame.dtype
    parts = (
        digest(shapes)[:16],
        f"{config.gating}/{config.attention}/{config.windows}/{config.pool}"
        f"/{config.context}/{config.motion}",
        machine,
        torch.__version__,
        kind,
        f"B{batch}",
        f"N{tokens}",
    )
    return " | ".join(str(part).removeprefix("torch.") for part in parts)


def dense_form(session: Session) -> Config:
    """The rule under which a step that recomputes everything is cheapest: one gate per frame."""
    gaps = any(_has_gaps(blocks) for blocks in session.sequence.values())
    return replace(
        session.config, policy=Always(), gating="block" if gaps else "frame", attention="query",
        reference="update", gate="before-norm", overlap="twice", accumulate="float32",
        max_age=None, scene_cut=None, fallback=False,
    )  # fmt: skip


def _has_gaps(blocks: Sequence[nn.Module]) -> bool:
    """Whether a block that is not converted lies between two that are."""
    held = [i for i, m in enumerate(blocks) if isinstance(vars(m).get("forward"), BlockForward)]
    return len(held) <= held[-1] - held[0]


class Fallbacks:
    """The decisions of one `Stream` or `StreamBatch`, apart for each number of frames in a call."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._made: dict[int, Fallback | None] = {}
        self._paused = False

    def of(self, frame: Tensor, layouts: dict[str, TokenLayout]) -> Fallback | None:
        """What decides for frames like these; None where a stream never falls back."""
        if self._paused:
            return None
        batch = frame.shape[0]
        if batch not in self._made:
            self._made[batch] = self._make(frame, layouts)
        return self._made[batch]

    def _make(self, frame: Tensor, layouts: dict[str, TokenLayout]) -> Fallback | None:
        config, costs = self._session.config, self._session.costs
        if not config.fallback or config.deterministic or len(layouts) != 1 or not enabled():
            return None
        (layout,) = layouts.values()
        key = cost_key(self._session, frame, frame.shape[0], layout.tokens)
        if key not in costs:
            costs[key] = Costs(key, layout.tokens)
        return Fallback(costs[key])

    def always(self, on_device: bool) -> str | None:
        """Why every frame runs dense; None where steps are eventful.

        It depends on the rule and the model alone, not on measured times, so `deterministic` does
        not change it.

        Args:
            on_device: frames are on a device whose steps do not wait for the host.
        """
        if not on_device or self._paused or not enabled():
            return None
        session = self._session
        return dense_instead(session.config, global_only=lambda: global_attention(session))

    def pause(self, paused: bool) -> bool:
        """Never fall back while a budget forbids it; whether that is a change."""
        changed, self._paused = paused is not self._paused, paused
        return changed

    def dense_ms(self) -> float | None:
        """The lowest time of a dense step of these streams; None if none was timed."""
        made = [fallback for fallback in self._made.values() if fallback is not None]
        return made[-1].costs.dense_ms if made else None

    def clear(self) -> None:
        """Start over, e.g. for frames of another size; what steps cost stays known."""
        self._made.clear()
