"""A setting as a TOML file that `Config.load` takes, with what was measured of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eventful import extras, files
from eventful.config import PRESETS, Config
from eventful.errors import ConfigError

TABLE = "calibration"


def policy_text(config: Config, about: Mapping[str, Any]) -> str:
    """The whole config, then a table `[calibration]`, which `Config` leaves out.

    Args:
        about: what was measured, on what, when; entries that are None are left out.
    """
    known = {name: value for name, value in about.items() if value is not None}
    text = (
        "# A setting of eventful, made by `eventful calibrate`. Use it in Python:\n"
        '#     eventful.convert(model, eventful.Config.load("THIS FILE"))\n'
        "# or on the command line: eventful bench video --config THIS_FILE VIDEO\n"
        "# The table [calibration] says what was measured; changing it changes nothing.\n\n"
    )
    text += extras.require("tomli_w").dumps({**_whole(config), TABLE: known})
    if Config.from_toml(text) != config:
        raise ConfigError(
            f"{config!r} cannot be written to a policy file: TOML has no None, and a field that "
            "is None there has another default. Give a number in its place."
        )
    return text


def write_policy(path: Path, config: Config, about: Mapping[str, Any]) -> None:
    """Write the file whole or not at all; its folder is made if it is missing."""
    files.write_bytes(path, policy_text(config, about).encode())


def _whole(config: Config) -> dict[str, Any]:
    """Every field, under the name of its preset where that does not change any."""
    plain = config.to_dict()
    preset = config.rule.partition("(")[0]
    named = {"preset": preset, **plain}
    # Fields that are None are left out, and a preset would fill them in.
    same = preset in PRESETS and Config.from_dict(named) == config
    return named if same else plain
