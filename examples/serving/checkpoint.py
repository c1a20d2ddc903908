"""Reads Hugging Face checkpoints of Qwen3: config.json and safetensors files."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from .model import Config, Params

DTYPES: dict[str, type] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
# Supported configuration; a config.json must have these values or omit them.
SUPPORTED: dict[str, str | bool] = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rope_type": "default",
    "type": "default",  # older name of rope_type
    "attention_bias": False,
    "use_sliding_window": False,
}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Memory-mapped tensors of a file: 8 bytes of header length, JSON header, raw data.

    Raises:
      ValueError: a corrupt file.
    """
    if path.stat().st_size < 8:
        raise ValueError(f"{path}: {path.stat().st_size} bytes, expected at least 8")
    data = np.memmap(path, np.uint8, mode="r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    if start > data.size:
        raise ValueError(f"{path}: header of {start - 8} bytes exceeds file of {data.size} bytes")
    header = _parse_json(path, data[8:start].tobytes())
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {
        name: _tensor(f"{path}: tensor {name}", data[start:], entry)
        for name, entry in entries.items()
    }


def _tensor(where: str, data: np.ndarray, entry: object) -> np.ndarray:
    keys = ("dtype", "shape", "data_offsets")
    if not isinstance(entry, dict) or not all(key in entry for key in keys):
        raise ValueError(f"{where} must be an object with {', '.join(keys)}, got {entry!r}")
    dtype, shape, offsets = (entry[key] for key in keys)
    if dtype not in [*DTYPES]:  # a list, because dtype may be unhashable
        raise ValueError(f"{where}: dtype must be in {[*DTYPES]}, got {dtype!r}")
    for name, sizes in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(sizes, list) or any(type(n) is not int or n < 0 for n in sizes):
            raise ValueError(f"{where}: {name} must be a list of integers >= 0, got {sizes!r}")
    nbytes = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes or offsets[1] > data.size:
        raise ValueError(
            f"{where}: data_offsets must be the bounds of {nbytes} bytes within {data.size}, got "
            f"{offsets}"
        )
    values: np.ndarray = data[slice(*offsets)].view(DTYPES[dtype])
    return values.reshape(shape)


def _parse_json(path: Path, text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: invalid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got a {type(content).__name__}")
    return content


def read_config(path: Path) -> Config:
    """Model sizes from a config.json; ValueError for unsupported configurations."""
    raw = _parse_json(path, path.read_bytes())
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{path}: rope_parameters must be an object, got {rope!r}")
    raw |= rope
    for name, value in SUPPORTED.items():
        if raw.get(name, value) != value:
            raise ValueError(f"{path}: {name} is {raw[name]!r}; only {value!r} is supported")
    sizes: dict[str, Any] = {}
    for field in dataclasses.fields(Config):
        size = sizes[field.name] = raw.get(field.name)
        if not isinstance(size, int | float | bool) or size < 0:
            raise ValueError(f"{path}: {field.name} must be a number >= 0, got {size!r}")
    return Config(**sizes)


def end_tokens(directory: Path) -> frozenset[int]:
    """The tokens that end an answer, from generation_config.json or, without it, config.json."""
    for path in (directory / "generation_config.json", directory / "config.json"):
        raw = _parse_json(path, path.read_bytes()) if path.exists() else {}
        if (ids := raw.get("eos_token_id")) is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if any(type(token) is not int for token in ids):
                raise ValueError(f"{path}: eos_token_id must be one or more integers, got {ids!r}")
            return frozenset(ids)
    return frozenset()


def load_checkpoint(directory: Path, dtype: DTypeLike) -> tuple[Config, Params]:
    """Config and weights, as `dtype` on the default device, of a checkpoint directory.

    Raises:
      FileNotFoundError: no config.json.
      ValueError: a corrupt file, unexpected tensors or an unsupported architecture.
    """
    config = read_config(directory / "config.json")
    tensors: dict[str, np.ndarray] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= read_safetensors(path)

    def make(name: str, shape: tuple[int, ...]) -> jax.Array:
        found = tensors[name].shape if name in tensors else None
        if found != shape:
            raise ValueError(f"{directory}: {name} has shape {found}, expected {shape}")
        return jax.device_put(tensors[name].astype(dtype))

    return config, config.build(make)
