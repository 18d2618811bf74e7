"""A stream: one video's memory, stepped frame by frame through a converted model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from eventful.calls import Call
from eventful.config import checked_policy
from eventful.frames import find_frame, refuse_attentions
from eventful.policies import Policy
from eventful.snapshot import Snapshot, read_snapshot, write_snapshot
from eventful.state import StreamState
from eventful.stepper import Stepper
from eventful.tenancy import Check


class Stream(Stepper):
    """One video through a converted model.

    `stream(frame)` returns what `model(frame)` returns. A batch of B frames is B videos
    stepped in lockstep; for videos that come and go use `StreamBatch`.

    Args:
        model: converted, or a model with a converted part.
        policy: overrides the config's; may be assigned between frames at any time.
        maps: keep error maps and update masks in `last`.
        check: on a GPU a frame that is not finite is told of at the next step; `sync` waits
            for each step and tells at once, as it is on a CPU. May be assigned between frames.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy | None = None,
        *,
        maps: bool = False,
        check: Check = "async",
    ) -> None:
        super().__init__(model, maps=maps, check=check)
        self._policy = checked_policy(policy) if policy is not None else self.config.policy

    def __repr__(self) -> str:
        return f"Stream({self._about(self._policy)})"

    @property
    def policy(self) -> Policy | None:
        """The policy in force; assign another between frames to change the cost at once."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = checked_policy(policy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Step with one frame; takes and returns what the model does."""
        return self.call("forward", *args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Step with another method of the model, e.g. `forward_intermediates`."""
        with self._alone():
            frame = find_frame(self.model, args, kwargs)
            self._judge(method, frame)
            refuse_attentions(self.model, kwargs)
            call = Call(self.model, method, args, kwargs, frame)
            streams = len(self._state) or frame.shape[0]
            fresh = len(self._state) == 0
            if fresh:
                self._state = StreamState(streams)
            try:
                return self._run(range(streams), [self._policy] * streams, call)
            except BaseException:
                if fresh:
                    self._state = StreamState(0)
                raise

    def _clear(self) -> None:
        self._state = StreamState(0)  # the next frame may have another batch, too

    def flush(self) -> None:
        """Recompute everything at the next frame, which must be like those before."""
        with self._alone():
            self._settle()
            self._state.frames = [-1] * len(self._state)

    def snapshot(self, path: str | Path | None = None) -> bytes:
        """All that shapes the next frame, as safetensors; written to `path` if given."""
        with self._alone():
            content = Snapshot(self._plain(), [self._policy] * len(self._state), self._signature)
            return write_snapshot(self._session, content, path)

    @classmethod
    def load(
        cls,
        model: nn.Module,
        source: str | Path | bytes,
        *,
        maps: bool = False,
        check: Check = "async",
    ) -> Stream:
        """A stream that goes on where `snapshot` was taken, with the same model and config."""
        stream = cls(model, maps=maps, check=check)
        with torch.inference_mode(False):
            content = read_snapshot(stream._session, source)
        stream._state, stream._signature = content.state, content.signature
        if content.policies:
            stream._policy = content.policies[0]
        stream._weights.remember(stream._weights.check(), ran=False)
        return stream
