"""Reading files of weights without running what they contain.

A pickle may name any function to be called while it loads. Here it may name those that rebuild
numpy arrays and torch tensors, and nothing else.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eventful.errors import CheckpointError

# Where files keep the weights among other things, in the order of search. Averages over the steps
# of a training run come last: they are used if a file holds nothing else.
_WRAPPERS = (
    *("model", "model_state", "state_dict", "model_state_dict", "module"),
    *("model_ema", "ema_state", "ema_state_dict", "state_dict_ema", "ema"),
)
# What wrappers of a module put before every key: data parallel, torch.compile, averaging.
_PREFIXES = ("module.", "_orig_mod.", "model.")
_TORCH_MAGIC = 0x1950A86A20F9469CFC6C  # the first object of a file by torch.save before zip files

_SAFE_NAMES = {
    "collections": {"OrderedDict"},
    "_codecs": {"encode"},
    "numpy": {"ndarray", "dtype"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
    "numpy._core.numeric": {"_frombuffer"},
    "torch": {"Size", "device"},
    "torch._utils": {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter"},
    "torch.storage": {"_load_from_bytes"},
}
_NUMPY_MOVED = {
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
}


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """The weights in a `.safetensors`, `.pth` or `.pkl` file, by key, on the CPU.

    Weights under `model`, `model_state`, `state_dict` and the like are found there, also those of
    an averaged model where the file has no other.

    Raises:
        CheckpointError: the file is missing, damaged, would run code, or holds no
            weights.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(
            f"{path} is not a file; pass the path of a .safetensors, .pth or .pkl."
        )
    with path.open("rb") as file:
        start = file.read(2)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    content = _read_torch(path) if start == b"PK" else _read_pickle(path)
    return _tensors(path, content)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file ({error}).") from error


def _read_torch(path: Path | io.BytesIO) -> Any:
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail in any way
        named = re.search(r"(?:GLOBAL|function|class|type) (\S+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and named:
            raise CheckpointError(
                f"{_name(path)} refers to {named[1]}, which is not part of a tensor, and was not "
                "loaded. Save its weights alone, where you trust it: "
                "torch.save(model.state_dict(), path)."
            ) from error
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{_name(path)} is damaged or not a torch file ({reason})."
        ) from error


def _read_pickle(path: Path) -> Any:
    with path.open("rb") as file:
        try:
            content = RestrictedUnpickler(file, encoding="latin1").load()
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        except Exception as error:  # a damaged pickle can fail in any way
            raise CheckpointError(f"{path} is damaged or not a pickle ({error}).") from error
    old_torch = isinstance(content, int) and content == _TORCH_MAGIC
    return _read_torch(path) if old_torch else content


class RestrictedUnpickler(pickle.Unpickler):
    """Rebuilds arrays and tensors; a pickle that names anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """The function of an allowed name; raises for others."""
        if name in _SAFE_NAMES.get(module, ()):
            return _resolve(module, name)
        if module == "numpy" and isinstance(getattr(np, name, None), type):
            scalar = getattr(np, name)
            if issubclass(scalar, np.generic):
                return scalar
        if module == "numpy.dtypes" and name.endswith("DType"):
            return getattr(np.dtypes, name)
        raise CheckpointError(
            f"the pickle refers to {module}.{name}, which is not part of an array or tensor; it "
            "was not loaded. Save its weights alone, where you trust it."
        )


def _resolve(module: str, name: str) -> Callable[..., Any]:
    if (module, name) == ("torch.storage", "_load_from_bytes"):
        return _storage_from_bytes
    if (module, name) == ("_codecs", "encode"):
        return _encode
    found: Any = __import__(_NUMPY_MOVED.get(module, module), fromlist=[name])
    resolved: Callable[..., Any] = getattr(found, name)
    return resolved


def _storage_from_bytes(content: bytes) -> Any:
    """Torch's own function would unpickle any content."""
    return _read_torch(io.BytesIO(content))


def _encode(text: str, encoding: str = "latin1", errors: str = "strict") -> bytes:
    """The bytes of an array in old pickles; other codecs are refused."""
    if encoding != "latin1":
        raise CheckpointError(f"the pickle decodes text as {encoding!r}; arrays use latin1.")
    return text.encode(encoding, errors)


def _numpy_globals() -> list[Any]:
    multiarray = __import__("numpy._core.multiarray", fromlist=["_reconstruct"])
    dtypes = {type(np.dtype(code)) for code in ("f2", "f4", "f8", "i4", "i8", "u1", "b1")}
    old = [
        (multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),
        (multiarray.scalar, "numpy.core.multiarray.scalar"),
    ]
    return [multiarray._reconstruct, multiarray.scalar, np.ndarray, np.dtype, *dtypes, *old]


def _tensors(path: Path, content: Any) -> dict[str, Tensor]:
    """The mapping of keys to tensors inside what a file held."""
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, no mapping of weights.")
    weights = _unwrapped(content)
    if not weights:
        keys = ", ".join(str(key) for key in list(content)[:8]) or "nothing"
        raise CheckpointError(f"{path} holds no weights; its keys: {keys}.")
    for prefix in _PREFIXES:
        if all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights


def _unwrapped(content: Mapping[Any, Any], depth: int = 2) -> dict[str, Tensor]:
    """The weights under the first wrapper that has some, or those beside the wrappers."""
    if depth:
        for wrapper in _WRAPPERS:
            if isinstance(content.get(wrapper), Mapping):
                inside = _unwrapped(content[wrapper], depth - 1)
                if inside:
                    return inside
    found = {str(key): _tensor(value) for key, value in content.items()}
    return {key: value for key, value in found.items() if value is not None}


def _tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value.detach()
    if not isinstance(value, np.ndarray | np.generic):
        return None
    array = np.array(value)
    if array.dtype.kind not in "fiub":
        return None
    if (
        array.dtype.kind == "f" and array.dtype.itemsize > 8
    ):  # torch has no wider floating-point type
        array = array.astype(np.float64)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def _name(path: Path | io.BytesIO) -> str:
    return str(path) if isinstance(path, Path) else "a tensor inside the file"
