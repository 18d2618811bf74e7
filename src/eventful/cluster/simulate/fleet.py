"""Cameras, machines and failures of a simulated cluster: every assumption is a field here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from eventful.cluster.simulate.costs import measured_shares
from eventful.errors import ConfigError


@dataclass(frozen=True)
class Fleet:
    """A cluster, its cameras, and what goes wrong; times between failures are exponential.

    Attributes:
        cameras: number of streams.
        gpus: number of workers; each has one device.
        node: workers of one machine.
        fps: frames a second of each camera.
        hours: simulated time.
        shares: of the tokens, one drawn for each camera.
        spread: sigma of the lognormal factor on the share, drawn anew every two seconds.
        busy: factor on the share in busy hours.
        busy_cameras: share of the cameras that have busy hours, in the middle third of the time.
        cuts: scene cuts an hour and camera; each costs a flush.
        camera_days: mean time until a camera stops sending, days.
        camera_gone: mean time until it comes back, s; it begins with a flush.
        worker_days: mean time until a worker process dies, days.
        worker_back: until its replacement takes streams, s.
        node_days: mean time until a machine dies, days.
        node_back: until its workers take streams again, s.
        registry_days: mean time until the registry dies, days.
        registry_back: until it gives out leases again, s; running workers go on meanwhile.
        notice: until a dead worker's leases are given to others, s.
        look: between two looks at the load of workers, s.
        full: share of its time above which a worker hands a stream on.
        target: share of its time up to which a worker takes one.
        read: from the capture of a frame to its arrival at the worker, ms; decoding is not on the
            GPU here.
        decode: CPU time for reading one frame, ms, for the number of cores.
        memory: of a device for streams, bytes.
        most: frames in one step; None for the largest that was measured.
    """

    cameras: int = 1000
    gpus: int = 64
    node: int = 8
    fps: float = 25.0
    hours: float = 1.0
    shares: tuple[float, ...] = field(default_factory=lambda: tuple(measured_shares().values()))
    spread: float = 0.3
    busy: float = 2.0
    busy_cameras: float = 0.5
    cuts: float = 4.0
    camera_days: float = 1.0
    camera_gone: float = 30.0
    worker_days: float = 1.0
    worker_back: float = 20.0
    node_days: float = 3.0
    node_back: float = 300.0
    registry_days: float = 1.0
    registry_back: float = 5.0
    notice: float = 2.0
    look: float = 5.0
    full: float = 0.9
    target: float = 0.75
    read: float = 20.0
    decode: float = 4.0
    memory: float = 100e9
    most: int | None = None

    def __post_init__(self) -> None:
        for name in ("cameras", "gpus", "node", "fps", "hours", "look", "memory"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, and is {getattr(self, name)}.")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, int | float) and value < 0:
                raise ConfigError(f"{entry.name} must not be below 0, and is {value}.")
        if not self.shares or not all(0 <= share <= 1 for share in self.shares):
            raise ConfigError("shares are one or more numbers between 0 and 1.")
        if self.busy_cameras > 1:
            raise ConfigError("busy_cameras is a share of the cameras, at most 1.")

    @property
    def tick_ms(self) -> float:
        """Time between two frames of a camera."""
        return 1000 / self.fps

    @property
    def ticks(self) -> int:
        """Frames of a camera in the simulated time."""
        return max(1, round(self.hours * 3600 * self.fps))

    def in_ticks(self, seconds: float) -> int:
        """A time as a number of ticks, at least one."""
        return max(1, round(seconds * self.fps))

    def to_dict(self) -> dict[str, Any]:
        """As values for JSON."""
        return {**asdict(self), "shares": list(self.shares)}


ASSUMPTIONS = (
    "A worker gathers once per frame interval: all frames that came since run in steps of at most "
    "`most` frames, one after the other. Steps larger than measured are not assumed.",
    "A frame whose step has not begun when the camera's next frame is gathered is dropped: the "
    "latest frame wins.",
    "Frames of a camera without a live worker, and frames in a step when its worker dies, are "
    "lost. Cameras that are gone send nothing, and nothing is lost.",
    "A step takes fixed + per_stream * frames + per_token * tokens, fitted to measurements. Its "
    "time does not vary otherwise; other work on the GPU is not modelled.",
    "Streams are placed and moved by the code that a real cluster uses, which knows the expected "
    "cost of each. Workers take the streams of a dead one also where frames are dropped then, up "
    "to a limit.",
    "A stream that begins at a worker, that comes back or that has a scene cut computes all of "
    "its tokens in one frame. Snapshots are not used.",
    "Cameras are independent of each other apart from busy hours. A machine's death takes all of "
    "its workers. The network never fails and costs a fixed time.",
    "Decoding runs on CPUs that keep up: their number is computed, not simulated.",
)
