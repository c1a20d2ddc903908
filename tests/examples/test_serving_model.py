"""The serving example's model: checkpoints, tokens, and logits against a reference."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxkv
from examples.serving.checkpoint import end_tokens, load_checkpoint, read_safetensors
from examples.serving.model import Config, forward
from examples.serving.tokenizer import ByteTokenizer, QwenTokenizer
from jaxkv.metadata import BatchMetadata

pytestmark = pytest.mark.host_only

CONFIG = Config(256, 64, 96, 2, 4, 2, 16)


def write_safetensors(path, tensors):
    names = {"float32": "F32", "bfloat16": "BF16", "int64": "I64"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, end = [], 0
    for name, value in tensors.items():
        start, end = end, end + value.nbytes
        header[name] = {
            "dtype": names[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [start, end],
        }
        blobs.append(value.tobytes())
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


HF_CONFIG = dataclasses.asdict(CONFIG) | {"model_type": "qwen3", "hidden_act": "silu"}


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint in two files, and the arrays in it."""
    arrays, rng = {}, np.random.default_rng(0)

    def make(name, shape):
        arrays[name] = rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
        return jnp.asarray(arrays[name])

    CONFIG.build(make)
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    for i in range(2):
        shard = {name: arrays[name] for name in list(arrays)[i::2]}
        write_safetensors(tmp_path / f"model-{i}.safetensors", shard)
    return tmp_path, arrays


def test_sharded_checkpoint_is_read_bitwise(checkpoint):
    directory, arrays = checkpoint
    config, params = load_checkpoint(directory, jnp.bfloat16)
    assert config == CONFIG
    down = params["layers"][1]["mlp.down_proj"]
    assert np.asarray(down).tobytes() == arrays["model.layers.1.mlp.down_proj.weight"].tobytes()
    assert params["lm_head"] is params["embed_tokens"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'; only 'qwen3' is supported"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ": type is 'yarn'; only 'default' is"),
        ({"hidden_size": 65}, r"embed_tokens.weight has shape \(256, 64\), expected \(256, 65\)"),
        ({"tie_word_embeddings": False}, "lm_head.weight has shape None"),
        ({"rope_scaling": [1]}, r"rope_parameters must be an object, got \[1\]"),
        ({"hidden_size": "64"}, "hidden_size must be a number >= 0, got '64'"),
        ({"hidden_size": None}, "hidden_size must be a number >= 0, got None"),
    ],
)
def test_unsupported_checkpoint_raises(checkpoint, change, message):
    directory, _ = checkpoint
    (directory / "config.json").write_text(json.dumps(HF_CONFIG | change))
    with pytest.raises(ValueError, match=message):
        load_checkpoint(directory, jnp.float32)


@pytest.mark.parametrize("rope", [None, {}, {"type": "default"}, {"rope_type": "default"}])
def test_checkpoint_without_rope_scaling_is_read(checkpoint, rope):
    directory, _ = checkpoint
    (directory / "config.json").write_text(json.dumps(HF_CONFIG | {"rope_scaling": rope}))
    assert load_checkpoint(directory, jnp.float32)[0] == CONFIG


def test_corrupt_file_raises(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"ids": np.zeros(3, np.int64)})
    with pytest.raises(ValueError, match=r"tensor ids: dtype must be .* got 'I64'"):
        read_safetensors(path)
    path.write_bytes(b"<!doctype html>")
    with pytest.raises(ValueError, match="exceeds file of 15 bytes"):
        read_safetensors(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="0 bytes, expected at least 8"):
        read_safetensors(path)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "expected a JSON object, got a list"),
        ("[" * 100_000, "invalid JSON"),
        ("{", "invalid JSON"),
        ({"w": 3}, "tensor w must be an object with dtype, shape, data_offsets, got 3"),
        ({"w": {"dtype": "F32"}}, "tensor w must be an object with"),
        ({"w": ENTRY | {"dtype": ["F32"]}}, r"dtype must be in .* got \['F32'\]"),
        ({"w": ENTRY | {"shape": 2}}, "shape must be a list of integers >= 0, got 2"),
        ({"w": ENTRY | {"shape": [-1]}}, r"shape must be .* got \[-1\]"),
        ({"w": ENTRY | {"shape": [True]}}, r"shape must be .* got \[True\]"),
        ({"w": ENTRY | {"data_offsets": [-8, 0]}}, r"data_offsets must be .* got \[-8, 0\]"),
        ({"w": ENTRY | {"data_offsets": [0]}}, "must be the bounds of 8 bytes within 8"),
        ({"w": ENTRY | {"data_offsets": [4, 12]}}, "must be the bounds of 8 bytes within 8"),
        ({"w": ENTRY | {"data_offsets": [0, 4]}}, "must be the bounds of 8 bytes within 8"),
    ],
)
def test_damaged_header_raises(header, message, tmp_path):
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ValueError, match=message):
        read_safetensors(path)


def test_byte_tokenizer_round_trip():
    tokenizer = ByteTokenizer()
    first = tokenizer.prompt("Grüße", [])
    assert "Grüße" in tokenizer.decode(first)
    assert len(tokenizer.prompt("Grüße", first)) < len(first)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, set()),
        ({"eos_token_id": None}, {}, set()),
        ({"eos_token_id": 7}, None, {7}),
        ({"eos_token_id": 7}, {"temperature": 0.6}, {7}),
        ({"eos_token_id": 7}, {"eos_token_id": [2, 5]}, {2, 5}),
    ],
)
def test_end_tokens_of_a_checkpoint(config, generation, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert end_tokens(tmp_path) == expected


def test_end_tokens_that_are_no_integers_raise(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": ["<|im_end|>"]}')
    with pytest.raises(ValueError, match=r"eos_token_id must be .*, got \['<|im_end|>'\]"):
        end_tokens(tmp_path)


def test_chat_format_closes_truncated_answer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<unk>", "<|im_start|>", "<|im_end|>"]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(words[1:])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    qwen = QwenTokenizer(tmp_path)
    assert qwen.stop == {2}
    ends = [qwen.prompt("Hello", history).count(2) for history in ([], [5, 2], [5, 0])]
    assert ends == [2, 1, 2]
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    assert QwenTokenizer(tmp_path).stop == {1, 2}


@pytest.mark.parametrize("tied", [True, False])
def test_logits_match_transformers(tied, tmp_path):
    """Chunked prefill and decode over scattered pages, against one pass of the reference."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    reference_config = transformers.Qwen3Config(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5,
        rope_theta=5e4, tie_word_embeddings=tied, attn_implementation="eager",
    )  # fmt: skip
    reference = transformers.Qwen3ForCausalLM(reference_config).float().eval()
    with torch.no_grad():
        for parameter in reference.parameters():  # norms are initially ones, which hides mistakes
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    reference.save_pretrained(tmp_path, safe_serialization=True, max_shard_size="40KB")
    config, params = load_checkpoint(tmp_path, jnp.float32)
    assert config.tie_word_embeddings == tied
    assert len(list(tmp_path.glob("*.safetensors"))) > 1

    rng = np.random.default_rng(0)
    page_size, prompt, chunk, total = 4, 22, 8, 30
    tokens = rng.integers(0, config.vocab_size, (2, total))
    with torch.no_grad():
        expected = reference(torch.from_numpy(tokens)).logits.numpy()
    tables = rng.permutation(20)[:16].reshape(2, 8).astype(np.int32)
    spec = jaxkv.KVCacheSpec(3, page_size, 2, 16, jnp.float32)
    cache = jaxkv.DeviceCache.create(spec, num_pages=20)

    @jax.jit
    def step(cache, new, rows):
        logits, layers = forward(config, params, lambda i, after: cache.layers[i], new, rows)
        return logits, dataclasses.replace(cache, layers=layers)

    starts = [*range(0, prompt, chunk), *range(prompt, total)]
    for start, stop in zip(starts, [*starts[1:], total], strict=True):
        width = chunk if start < prompt else 1
        rows = BatchMetadata.from_host(
            [stop - start] * 2, [stop] * 2, tables, max_num_reqs=2, max_num_tokens=2 * width,
            max_blocks=8, block_size=page_size,
        )  # fmt: skip
        new = np.zeros(2 * width, np.int32)
        new[: 2 * (stop - start)] = tokens[:, start:stop].ravel()
        logits, cache = step(cache, new, rows)
        scale = expected[:, stop - 1].std()
        error = np.abs(np.asarray(logits) - expected[:, stop - 1]).max()
        assert error < 2e-5 * scale, f"tokens {start} to {stop}"
