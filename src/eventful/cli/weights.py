"""`eventful weights`: published checkpoints into files of this package."""

from __future__ import annotations

import json
from pathlib import Path

from eventful.errors import CheckpointError
from eventful.models.loading import convert_checkpoint, save


def convert(source: Path, target: Path, key_format: str, partial: bool, as_json: bool) -> None:
    """Write the renamed weights, and print how each key was used."""
    if target.suffix != ".safetensors":
        raise CheckpointError(f"{target} should end in .safetensors, which is what is written.")
    converted = convert_checkpoint(source, key_format, strict=not partial)
    if not converted.state:
        raise CheckpointError(f"Nothing in {source} fits:\n{converted.report}")
    save(converted, target)
    if as_json:
        about = {"model": converted.model, "config": converted.config}
        print(json.dumps({**converted.report.as_dict(), **about}, indent=2))
        return
    print(converted.report)
    print(f"{target}: {converted.model}, {len(converted.state)} tensors")
