"""Reads Hugging Face checkpoints of Qwen3: config.json and safetensors files."""

import dataclasses
import json
from pathlib import Path

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
    "attention_bias": False,
    "use_sliding_window": False,
}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Memory-mapped tensors of a file: 8 bytes of header length, JSON header, raw data."""
    data = np.memmap(path, np.uint8, mode="r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    if start > data.size:
        raise ValueError(f"{path}: header of {start - 8} bytes exceeds file of {data.size} bytes")
    tensors = {}
    for name, entry in json.loads(data[8:start].tobytes()).items():
        if name != "__metadata__":
            if entry["dtype"] not in DTYPES:
                raise ValueError(
                    f"{path}: dtype of {name} must be in {[*DTYPES]}, got {entry['dtype']}"
                )
            begin, end = (start + offset for offset in entry["data_offsets"])
            values: np.ndarray = data[begin:end].view(DTYPES[entry["dtype"]])
            tensors[name] = values.reshape(entry["shape"])
    return tensors


def read_config(path: Path) -> Config:
    """Model sizes from a config.json; ValueError for unsupported configurations."""
    raw = json.loads(path.read_text())
    raw |= raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    for name, value in SUPPORTED.items():
        if raw.get(name, value) != value:
            raise ValueError(f"{path}: {name} is {raw[name]!r}; only {value!r} is supported")
    return Config(**{field.name: raw[field.name] for field in dataclasses.fields(Config)})


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
