"""`config.pbtxt` of Triton Inference Server, for a model whose state the server keeps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eventful.errors import ArtefactError
from eventful.export.manifest import StateEntry

START = "start"
SEQUENCES = 64  # at a time; each keeps its state in the memory of the server
KINDS = {
    "float32": "TYPE_FP32", "float16": "TYPE_FP16", "float64": "TYPE_FP64", "int64": "TYPE_INT64",
    "int32": "TYPE_INT32", "uint8": "TYPE_UINT8", "bool": "TYPE_BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Port:
    """One input or output of the model."""

    name: str
    kind: str
    dims: tuple[int, ...]


def config_text(
    name: str, inputs: Sequence[Port], outputs: Sequence[Port], state: Sequence[StateEntry]
) -> str:
    """`config.pbtxt` of an ONNX model that Triton steps sequence by sequence."""
    lines = [f'name: "{name}"', 'backend: "onnxruntime"', "max_batch_size: 0"]
    for what, ports in (("input", inputs), ("output", outputs)):
        lines += [
            f'{what} {{ name: "{one.name}" data_type: {one.kind} dims: {_dims(one.dims)} }}'
            for one in ports
        ]
    # Without `oldest` a model that takes no batches has one slot: one sequence, the others wait.
    lines += [
        "sequence_batching {", "  max_sequence_idle_microseconds: 60000000",
        f"  oldest {{ max_candidate_sequences: {SEQUENCES} }}",
    ]  # fmt: skip
    lines += [
        "  control_input {", f'    name: "{START}"',
        "    control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }", "  }",
    ]  # fmt: skip
    for one in state:
        kind, dims = KINDS[one.dtype], _dims(one.shape)
        lines += [
            "  state {",
            f'    input_name: "{one.input}"',
            f'    output_name: "{one.output}"',
            f"    data_type: {kind}",
            f"    dims: {dims}",
            f'    initial_state {{ name: "zero" data_type: {kind} dims: {dims} zero_data: true }}',
            "  }",
        ]
    lines += ["}", "instance_group { count: 1 kind: KIND_CPU }"]
    return "\n".join(lines) + "\n"


def _dims(dims: Sequence[int]) -> str:
    return f"[ {', '.join(map(str, dims))} ]"


# The part of Triton's ModelConfig (model_config.proto) that we write: fields of each message, with
# their type, and whether they may stand several times.
SCHEMA: dict[str, dict[str, tuple[str, bool]]] = {
    "ModelConfig": {
        "name": ("string", False), "backend": ("string", False), "max_batch_size": ("int", False),
        "input": ("ModelInput", True), "output": ("ModelOutput", True),
        "sequence_batching": ("ModelSequenceBatching", False),
        "instance_group": ("ModelInstanceGroup", True),
    },
    "ModelInput": {
        "name": ("string", False), "data_type": ("TYPE_", False), "dims": ("int", True),
    },
    "ModelOutput": {
        "name": ("string", False), "data_type": ("TYPE_", False), "dims": ("int", True),
    },
    "ModelSequenceBatching": {
        "max_sequence_idle_microseconds": ("int", False), "control_input": ("ControlInput", True),
        "state": ("State", True), "oldest": ("StrategyOldest", False),
    },
    "StrategyOldest": {"max_candidate_sequences": ("int", False)},
    "ControlInput": {"name": ("string", False), "control": ("Control", True)},
    "Control": {"kind": ("CONTROL_SEQUENCE_", False), "int32_false_true": ("int", True)},
    "State": {
        "input_name": ("string", False), "output_name": ("string", False),
        "data_type": ("TYPE_", False), "dims": ("int", True),
        "initial_state": ("InitialState", True),
    },
    "InitialState": {
        "name": ("string", False), "data_type": ("TYPE_", False), "dims": ("int", True),
        "zero_data": ("bool", False),
    },
    "ModelInstanceGroup": {"count": ("int", False), "kind": ("KIND_", False)},
}  # fmt: skip
_TOKEN = re.compile(r'"[^"\n]*"|[A-Za-z_][A-Za-z0-9_]*|-?\d+|[{}\[\]:,]')


def parse_config(text: str) -> dict[str, Any]:
    """A `config.pbtxt` as dicts and lists, checked against `SCHEMA`.

    Raises:
        ArtefactError: it does not follow the schema; the message names the field.
    """
    if re.sub(_TOKEN, "", text).strip():
        raise ArtefactError(f"Not a text protobuf: {re.sub(_TOKEN, '', text).split()[:3]}.")
    tokens = _TOKEN.findall(text)
    made = _message(tokens, "ModelConfig")
    if tokens:
        raise ArtefactError(f"config.pbtxt goes on after its end: {tokens[:4]}.")
    return made


def _message(tokens: list[str], kind: str) -> dict[str, Any]:
    """The fields of a message, up to its closing brace."""
    made: dict[str, Any] = {}
    while tokens and tokens[0] != "}":
        field = tokens.pop(0)
        if field not in SCHEMA[kind]:
            raise ArtefactError(f"{kind} of Triton has no field {field!r}.")
        of, repeated = SCHEMA[kind][field]
        if of in SCHEMA:
            _take(tokens, "{", field)
            values = [_message(tokens, of)]
            _take(tokens, "}", field)
        else:
            _take(tokens, ":", field)
            values = _values(tokens, of, field, repeated)
        if repeated:
            made.setdefault(field, []).extend(values)
        elif field in made:
            raise ArtefactError(f"{field} of {kind} stands twice.")
        else:
            made[field] = values[0]
    return made


def _take(tokens: list[str], wanted: str, field: str) -> None:
    if not tokens or tokens.pop(0) != wanted:
        raise ArtefactError(f"{field} of config.pbtxt lacks {wanted!r}.")


def _values(tokens: list[str], of: str, field: str, repeated: bool) -> list[Any]:
    if not tokens:
        raise ArtefactError(f"{field} of config.pbtxt has no value.")
    if tokens[0] != "[":
        return [_scalar(tokens.pop(0), of, field)]
    if not repeated:
        raise ArtefactError(f"{field} of config.pbtxt takes one value.")
    tokens.pop(0)
    found = []
    while tokens and tokens[0] != "]":
        found.append(_scalar(tokens.pop(0), of, field))
        if tokens and tokens[0] == ",":
            tokens.pop(0)
    _take(tokens, "]", field)
    return found


def _scalar(text: str, of: str, field: str) -> Any:
    good = {
        "string": text.startswith('"'),
        "int": re.fullmatch(r"-?\d+", text) is not None,
        "bool": text in ("true", "false"),
    }.get(of, text.startswith(of) and text == text.upper())
    if not good:
        raise ArtefactError(f"{field} of config.pbtxt is no {of}: {text}.")
    return int(text) if of == "int" else text == "true" if of == "bool" else text.strip('"')
