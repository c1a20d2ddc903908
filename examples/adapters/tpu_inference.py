"""The offload connector of tpu-inference on jaxkv.

vllm-project/tpu-inference, tpu_inference/offload/tpu_offload_connector.py and cpu_backend.py,
commit b8692ff0. `TPUOffloadConnectorWorker` is called by vLLM's model runner: `start_load_kv`
before a step, `start_save_kv` after it. There a chunk is an array in `LocalCPUBackend` and has a
`device_put` of its own; here all chunks are pages of one pool for each shape of layer, and the
chunks of all requests of a step are one asynchronous copy.

A save gathers blocks in HBM, so that the scheduler may reuse them at once, and overlaps the next
step. A load is in the cache before the step, as upstream; neither blocks the host.
"""

import collections
from typing import Any

import jax

import jaxkv
from examples.adapters.staged_copies import StagedCopies, padded, scatter_program


class JaxkvOffloadWorker:
    """In place of `TPUOffloadConnectorWorker`; chunks are addressed by id, below `num_chunks`."""

    def __init__(self, connector: Any, num_chunks: int) -> None:
        self._connector, self._num_chunks = connector, num_chunks
        self._saved: set[int] = set()
        self._finished_saves: set[str] = set()
        self._stats: dict[str, dict[str, list[Any]]] = {}
        self._processed_save_for_step = False

    def register_runner(self, runner: Any) -> None:
        """Allocates the pools for the caches of the runner."""
        self._runner = runner
        self._groups: list[tuple[list[int], StagedCopies, Any, Any]] = []
        layers = collections.defaultdict(list)
        for index, cache in enumerate(runner.kv_caches):
            layers[cache.shape[1:], cache.dtype, cache.sharding].append(index)
        for (shape, dtype, sharding), indices in layers.items():
            staged = jax.NamedSharding(sharding.mesh, jax.P(None, *sharding.spec[1:]))
            page = jax.ShapeDtypeStruct((1, *shape), dtype, sharding=staged)
            copies = StagedCopies(page, len(indices), self._num_chunks)
            gather = jax.jit(lambda caches, ids: [c[ids] for c in caches], out_shardings=staged)
            scatter = scatter_program(sharding.mesh, staged.spec, sharding.spec)
            self._groups.append((indices, copies, gather, scatter))

    def start_save_kv(self) -> None:
        """Starts the saves of this step."""
        specs = {} if self._processed_save_for_step else self._specs("save_spec")
        self._processed_save_for_step = True
        self._finished_saves |= {r for r, s in specs.items() if s.skip_save and s.is_final_save}
        specs = {request: spec for request, spec in specs.items() if not spec.skip_save}
        blocks, chunks = self._ids(specs, "src_blocks", "dst_chunks")
        if len(blocks):
            for indices, copies, gather, _ in self._groups:
                caches = [self._runner.kv_caches[i] for i in indices]
                copies.store(gather(caches, padded(blocks, 0)), padded(chunks))
        self._saved |= set(chunks)
        self._record("finished_save_chunks", specs, "dst_chunks")

    def start_load_kv(self, fwd_ctx: Any, **kwargs: Any) -> None:
        """Loads the chunks of this step into the caches of the runner."""
        self._processed_save_for_step = False
        specs = self._specs("load_spec")
        specs = {request: spec for request, spec in specs.items() if spec.can_load}
        chunks, blocks = self._ids(specs, "src_chunks", "dst_blocks")
        if missing := set(chunks) - self._saved:
            raise ValueError(f"chunks {sorted(missing)} have not been saved")
        if not chunks:
            return
        loads = [copies.load(padded(chunks)) for _, copies, _, _ in self._groups]
        for wait, (indices, _, _, scatter) in zip(loads, self._groups, strict=True):
            caches, rows = [self._runner.kv_caches[i] for i in indices], padded(range(len(chunks)))
            loaded = scatter(wait(), caches, rows, padded(blocks))
            for i, cache in zip(indices, loaded, strict=True):
                self._runner.kv_caches[i] = cache
        self._record("finished_load_chunks", specs, "src_chunks")
        jaxkv.check_errors()
