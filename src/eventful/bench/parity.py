"""Checks that contenders compute the right result before anything is timed.

Two laws. With every token selected, a stream gives what the dense model gives. And a steady step
of `fast` gives what the rule's definition gives, worked out on the original model with hooks and
without any code of a stream: every block's input takes the tokens that were not selected from
memory, so queries, keys and values of those are the remembered ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from eventful.bench.rows import Setting
from eventful.bench.timing import gap
from eventful.config import Config
from eventful.errors import ParityError, UnsupportedError
from eventful.stream import Stream, StreamBatch
from eventful.surgery.conversion import convert

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
EVERYTHING = 10**9  # more tokens than any model has
FRAMES = 3  # a flush and two steady steps
CLEARLY = 1.02  # factor above the cut from which an error must be selected


def open_stream(
    model: nn.Module, config: Config, batch: int, *, maps: bool = False
) -> Stream | StreamBatch:
    """A stream for one video, a batch of streams for more."""
    converted = convert(model, config)
    if batch == 1:
        return Stream(converted, maps=maps)
    streams = StreamBatch(converted, maps=maps)
    for number in range(batch):
        streams.join(str(number))
    return streams


def verify(
    setting: Setting,
    model: nn.Module,
    frames: Sequence[Tensor],
    tick: Callable[[str], None] = lambda _: None,
) -> None:
    """Check both laws for every contender of a run; the second where the output has the tokens.

    Raises:
        ParityError: something differs; the message says what, where and by how much.
    """
    frames = frames[:FRAMES]
    with torch.no_grad():
        dense = [model(frame).clone() for frame in frames]
    for preset in setting.presets:
        tick(f"checking {preset}: all tokens are dense")
        check_dense(setting, model, preset, frames, dense)
    if "fast" in setting.presets and setting.subject.returns_tokens:
        for r in setting.budgets:
            tick(f"checking fast: steady steps at r = {r}")
            check_steady(setting, model, r, frames)


def check_dense(
    setting: Setting,
    model: nn.Module,
    preset: str,
    frames: Sequence[Tensor],
    dense: Sequence[Tensor],
) -> None:
    """With every token selected, each frame's output is the dense model's."""
    stream = open_stream(model, setting.config(preset, EVERYTHING), setting.batch)
    for number, (frame, expected) in enumerate(zip(frames, dense, strict=True)):
        _compare(
            setting,
            f"{preset} with every token selected, frame {number}, against the dense model",
            gap(stream(frame), expected),
        )


def check_steady(setting: Setting, model: nn.Module, r: int, frames: Sequence[Tensor]) -> None:
    """Each step of `fast` selects what changed most, updates it by the rule, keeps the rest.

    Without context and motion, which rank and move tokens in ways of their own.
    """
    config = replace(setting.config("fast", r), context=None, motion=False)
    stream = open_stream(model, config, setting.batch, maps=True)
    rule = RememberedTokens(model)
    for number, frame in enumerate(frames):
        got = stream(frame)
        assert stream.last is not None
        mask = stream.last.mask
        if mask is None:
            raise ParityError("fast: a stream with maps=True recorded no mask; nothing is written.")
        expected = rule.step(frame, mask)
        where = f"fast at r = {r}, frame {number}"
        if not all(stream.last.flushed):
            _check_selection(setting, config, where, rule.error, mask, r)
        got_rows, expected_rows = _tokens(got, mask), _tokens(expected, mask)
        for name, part in (("selected", mask), ("kept", ~mask)):
            if part.any():
                _compare(
                    setting,
                    f"{where}, {name} rows, against the rule worked out on the dense model",
                    gap(got_rows[part], expected_rows[part]),
                )


class RememberedTokens:
    """The rule of `fast` by its definition: blocks get remembered values for unselected tokens."""

    def __init__(self, model: nn.Module) -> None:
        blocks = getattr(model, "blocks", None)
        if blocks is None:
            raise UnsupportedError("A benchmark model must hold its blocks under `blocks`.")
        self.model, self.blocks = model, list(blocks)
        self.memory: dict[int, Tensor] = {}
        self.error = torch.empty(0)

    def step(self, frame: Tensor, mask: Tensor) -> Tensor:
        """The output for one frame.

        Args:
            mask: (B, N) tokens selected; all of them on the first frame.
        """
        handles = [
            block.register_forward_pre_hook(
                lambda _, args, place=place: (self._mix(place, args[0], mask), *args[1:])
            )
            for place, block in enumerate(self.blocks)
        ]
        handles.append(
            self.blocks[-1].register_forward_hook(
                lambda _, __, output: self._mix(len(self.blocks), output, mask)
            )
        )
        try:
            with torch.no_grad():
                output: Tensor = self.model(frame)
        finally:
            for handle in handles:
                handle.remove()
        return output

    def _mix(self, place: int, tokens: Tensor, mask: Tensor) -> Tensor:
        flat = tokens.reshape(tokens.shape[0], -1, tokens.shape[-1])  # (B, N, D) of (B, h, w, D)
        before = self.memory.get(place, flat)
        if place == 0:
            self.error = (flat.float() - before.float()).norm(dim=-1)
        self.memory[place] = torch.where(mask[..., None], flat, before)
        return self.memory[place].reshape(tokens.shape)


def _check_selection(
    setting: Setting, config: Config, where: str, error: Tensor, mask: Tensor, r: int
) -> None:
    """At least r tokens, among them those that changed clearly most.

    Protected tokens and the refresh in turn count toward r, so only the remaining part is certain.
    """
    tokens = error.shape[1]
    count = int(mask.sum(dim=1).min())
    if count < min(r, tokens):
        raise ParityError(_refusal(setting, f"{where}: {count} tokens selected, {r} asked for"))
    refreshed = 0 if config.max_age is None else 2 * tokens // config.max_age + 1
    sure = min(r, tokens) - refreshed - (tokens - _patches(tokens))
    if sure < 1:
        return
    cut = error.topk(sure, dim=1).values[:, -1:]
    missed = int(((error > CLEARLY * cut) & ~mask).sum())
    if missed:
        raise ParityError(
            _refusal(setting, f"{where}: {missed} of the {sure} most changed tokens left out")
        )


def _patches(tokens: int) -> int:
    """Tokens of the largest square grid; the others are class and register tokens."""
    return int(tokens**0.5) ** 2


def _tokens(output: Tensor, mask: Tensor) -> Tensor:
    """The output as (B, N, D), whether it is tokens or a map (B, D, h, w)."""
    rows = output.flatten(2).transpose(1, 2) if output.dim() == 4 else output
    if rows.shape[:2] != mask.shape:
        raise UnsupportedError(
            f"The model's output {tuple(output.shape)} has no row for each of the "
            f"{mask.shape[1]} tokens; a benchmark model must return its tokens."
        )
    return rows


def _compare(setting: Setting, what: str, difference: float) -> None:
    limit = TOLERANCE[setting.torch_dtype]
    if not difference <= limit:
        raise ParityError(
            _refusal(setting, f"{what}: differs by {difference:.1e} (limit {limit:.0e})")
        )


def _refusal(setting: Setting, what: str) -> str:
    return (
        f"{setting.model}, batch {setting.batch}, {setting.dtype} on {setting.device}: {what}. "
        "Nothing was timed or written; run `make test` to find the cause."
    )
