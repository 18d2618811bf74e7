"""Snapshots: a stream's memory as one safetensors file, tied to its model by a fingerprint.

A checksum over the description and the tensors shows a damaged file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from eventful import files
from eventful.errors import ConfigError, EventfulError, SnapshotError
from eventful.memory.state import RowState
from eventful.policies import Policy, policy_from_dict, policy_to_dict

FORMAT = 2


@dataclass(frozen=True)
class Identity:
    """The model a snapshot belongs to.

    Attributes:
        fingerprint: digest of the weights.
        rule: the config without its policy, and the converted blocks.
        settings: attributes of the blocks, as text.
        device: where the weights are.
    """

    fingerprint: str
    rule: dict[str, Any]
    settings: dict[str, str]
    device: torch.device


@dataclass
class Snapshot:
    """What a snapshot holds besides the model's identity.

    Attributes:
        note: what only the kind of stream that wrote it needs; others leave it out.
    """

    state: RowState
    policies: list[Policy | None]
    signature: tuple[tuple[int, ...], torch.dtype, torch.device, str] | None
    note: dict[str, Any] = field(default_factory=dict)


def write_snapshot(model: Identity, content: Snapshot, path: str | Path | None) -> bytes | None:
    """Serialise, and write to `path`; without a path, return it."""
    if content.signature is None:
        raise SnapshotError("The stream has seen no frame yet, so there is nothing to keep.")
    shape, dtype, device, autocast = content.signature
    try:
        policies = [
            None if policy is None else policy_to_dict(policy) for policy in content.policies
        ]
    except ConfigError as error:
        raise SnapshotError(str(error)) from None
    about = {
        "format": FORMAT,
        "fingerprint": model.fingerprint,
        "rule": model.rule,
        "settings": model.settings,
        "policies": policies,
        "frames": content.state.frames,
        "signature": [list(shape), str(dtype).removeprefix("torch."), str(device), autocast],
    }
    if content.note:
        about["note"] = content.note
    tensors = {name: tensor.contiguous().cpu() for name, tensor in content.state.tensors.items()}
    try:
        description = json.dumps(about)
    except TypeError as error:
        raise SnapshotError(f"A policy holds what cannot be written down: {error}.") from None
    header = {"eventful": description, "checksum": _checksum(description, tensors)}
    data: bytes = save_tensors(tensors, metadata=header)
    if path is None:
        return data
    try:
        with files.replacing(Path(path)) as partial:
            partial.write_bytes(data)
    except OSError as error:
        raise SnapshotError(
            f"The snapshot cannot be written to {path}: {error.strerror}. The folder must "
            "exist; the stream is as it was."
        ) from error
    return None


def read_snapshot(model: Identity, source: str | Path | bytes) -> Snapshot:
    """The content of a snapshot, moved to the model's device; raises if it is another model's."""
    try:
        return _read(model, *_open(source))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, EventfulError):
            raise
        raise SnapshotError(f"The snapshot's description is damaged: {error!r}.") from None


def _read(model: Identity, about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Snapshot:
    if about["rule"] != model.rule:
        raise SnapshotError(
            "The snapshot was taken under another update rule. Convert the model with the config "
            f"it was taken with: {about['rule']}."
        )
    if about["fingerprint"] != model.fingerprint:
        raise SnapshotError(
            "The snapshot belongs to a model with other weights. Load those into the model first."
        )
    _check_settings(model, about["settings"])
    _check_content(about, tensors)
    device = model.device
    state = RowState(len(about["frames"]))
    state.frames = list(about["frames"])
    # Cloned into torch's own memory: a mapped file is aligned otherwise, and kernels that choose
    # their path by alignment would round otherwise than before the snapshot.
    state.tensors = {name: tensor.to(device).clone() for name, tensor in tensors.items()}
    shape, dtype, _, autocast = about["signature"]
    policies = [
        None if policy is None else policy_from_dict(policy) for policy in about["policies"]
    ]
    note = about.get("note")
    return Snapshot(
        state, policies, (tuple(shape), getattr(torch, dtype), device, autocast),
        note if isinstance(note, dict) else {},
    )  # fmt: skip


def _check_settings(model: Identity, taken: dict[str, str]) -> None:
    """Raise if an attribute of a block is not as it was; versions of a library may add some."""
    now = model.settings
    differ = [name for name in taken if name in now and now[name] != taken[name]]
    if differ:
        first = differ[0]
        raise SnapshotError(
            f"The snapshot was taken with {first} = {taken[first]}, the model has {now[first]} "
            f"({len(differ)} such differences). Set the model as it was, or start a new stream."
        )


def _check_content(about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Raise if values are of other types or counts than `write_snapshot` writes.

    The checksum finds damage. It is no signature, so a forged file can have a right one.
    """
    frames, (shape, dtype, _, autocast) = about["frames"], about["signature"]
    good = (
        isinstance(frames, list)
        and all(type(count) is int and count >= -1 for count in frames)  # -1: is to be flushed
        and all(type(side) is int and side >= 0 for side in shape)
        and isinstance(getattr(torch, str(dtype), None), torch.dtype)
        and isinstance(autocast, str)
        and all(tensor.shape[:1] == (len(frames),) for tensor in tensors.values())
    )
    if not good:
        raise SnapshotError("The snapshot's description does not fit its tensors: use another.")


def _open(source: str | Path | bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The description and the tensors, if the checksum holds."""
    try:
        header, tensors = _read_file(source)
        about = json.loads(header["eventful"])
        _check_format(about["format"])
        whole = header["checksum"] == _checksum(header["eventful"], tensors)
    except FileNotFoundError:
        raise SnapshotError(f"No snapshot at {source!r}.") from None
    except OSError as error:
        raise SnapshotError(f"The snapshot {source!r} cannot be read: {error}.") from None
    except (SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise SnapshotError(f"Not a snapshot of an eventful stream: {error}.") from None
    if not whole:
        raise SnapshotError(
            "The snapshot is damaged: its checksum does not match its content. Use another "
            "snapshot, or start a new stream: its first frame recomputes everything."
        )
    return about, tensors


def _check_format(found: Any) -> None:
    if found == FORMAT:
        return
    older = isinstance(found, int) and found < FORMAT
    raise SnapshotError(
        f"The snapshot has format {found}, of {'an older' if older else 'another'} version of "
        f"eventful; this version reads format {FORMAT}. Start a new stream: its first frame "
        "recomputes everything."
    )


def _read_file(source: str | Path | bytes) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """The header's texts and the tensors."""
    if isinstance(source, bytes):
        header = json.loads(source[8 : 8 + int.from_bytes(source[:8], "little")])
        return header["__metadata__"], load_tensors(source)
    with safe_open(str(source), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return file.metadata() or {}, tensors


def _checksum(description: str, tensors: dict[str, torch.Tensor]) -> str:
    """A digest of the description and of every tensor's name, shape, dtype and bytes."""

    def parts() -> Iterator[str | memoryview]:
        yield description
        for name, tensor in sorted(tensors.items()):
            yield f"\n{name} {tuple(tensor.shape)} {tensor.dtype}\n"
            yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data

    return files.digest(parts())
