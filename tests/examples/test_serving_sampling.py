"""Sampling of tokens: their distribution, and its limits."""

import jax
import numpy as np
import pytest

from examples.serving.sampling import Sampling, SamplingRows, sample

pytestmark = pytest.mark.end_to_end


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(temperature=2.0, top_k=2), {0, 1}),
        (Sampling(temperature=1.0, top_p=0.75), {0, 1}),  # 0.5, 0.3, 0.15, 0.05
        (Sampling(temperature=1.0, top_p=0.81), {0, 1, 2}),
        (Sampling(temperature=1.0), {0, 1, 2, 3}),
        (Sampling(temperature=1.0, top_k=2**70), {0, 1, 2, 3}),
        (Sampling(), {0}),
    ],
)
def test_sampled_tokens_have_the_distribution(sampling, allowed):
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.tile(np.log(probabilities).astype(np.float32), (2000, 1))
    rows = SamplingRows.of([sampling] * 2000, 2000)
    chosen = np.asarray(jax.jit(sample)(logits, rows, np.arange(2000, dtype=np.int32)))
    assert set(chosen.tolist()) == allowed
    share = (probabilities ** (1 / (sampling.temperature or 1e-3)))[sorted(allowed)]
    counts = np.bincount(chosen, minlength=4)[sorted(allowed)] / 2000
    np.testing.assert_allclose(counts, share / share.sum(), atol=0.05)


def test_the_most_likely_token_is_always_kept():
    """Even if `top_p` is 0 in float32."""
    rows = SamplingRows.of([Sampling(temperature=1.0, top_p=1e-50)] * 50, 50)
    logits = np.tile(np.log(np.array([0.1, 0.2, 0.6, 0.1], np.float32)), (50, 1))
    chosen = np.asarray(jax.jit(sample)(logits, rows, np.arange(50, dtype=np.int32)))
    assert set(chosen.tolist()) == {2}


def test_invalid_sampling_raises():
    for invalid in ({"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}):
        with pytest.raises(ValueError, match="temperature must be >= 0, top_p in"):
            Sampling(**invalid)


@pytest.mark.parametrize("temperature", [1e-37, 1e-45, 1e300])
def test_temperatures_at_the_limits_of_float32(temperature):
    """Quotients by a small one do not overflow: it is the most likely token, not the first one."""
    rows = SamplingRows.of([Sampling(temperature)] * 50, 50)
    logits = np.tile(np.array([1, 35, 90, 50], np.float32), (50, 1))
    chosen = np.asarray(jax.jit(sample)(logits, rows, np.arange(50, dtype=np.int32)))
    assert set(chosen.tolist()) == ({0, 1, 2, 3} if temperature > 1 else {2})
