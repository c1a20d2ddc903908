"""The offload connector of tpu-inference on jaxkv.

vllm-project/tpu-inference, tpu_inference/offload/tpu_offload_connector.py and cpu_backend.py,
commit b8692ff0. `TPUOffloadConnectorWorker` is called by vLLM's model runner: `start_load_kv`
before a step, `start_save_kv` after it. There a chunk is an array in `LocalCPUBackend` and has its
own `device_put`; here all chunks are pages of one pool for each shape of layer, and the chunks of
all requests of a step are one asynchronous copy.

A save gathers blocks in HBM, so that the scheduler may reuse them immediately, and its copy
overlaps the next step. A load writes the cache in place before the step, which takes complete
caches. The host never blocks.
"""

import collections
from typing import Any

import jax

import jaxkv
from examples.adapters.staged_copies import StagedCopies, padded


class JaxkvOffloadWorker:
    """In place of `TPUOffloadConnectorWorker`; chunks are addressed by id, below `num_chunks`."""

    def __init__(self, connector: Any, num_chunks: int) -> None:
        self._connector, self._num_chunks = connector, num_chunks
        self._saved: set[int] = set()
        self._finished_saves: set[str] = set()
        self._stats: dict[str, dict[str, list[Any]]] = {}
        self._processed_save_for_step = False

    def register_runner(self, runner: Any) -> None:
        """Allocates a pool for each shape of the runner's caches."""
        self._runner = runner
        layers = collections.defaultdict(list)
        for index, cache in enumerate(runner.kv_caches):
            layers[cache.shape[1:], cache.dtype].append(index)
        self._groups = []
        for indices in layers.values():
            copies = StagedCopies(runner.kv_caches[indices[0]], len(indices), self._num_chunks)
            gather = jax.jit(
                lambda caches, blocks: [cache[blocks] for cache in caches],
                out_shardings=copies.sharding,
            )
            self._groups.append((indices, copies, gather))

    def start_load_kv(self, fwd_ctx: Any, **kwargs: Any) -> None:
        """Loads the chunks of this step into the caches of the runner."""
        self._processed_save_for_step = False
        specs = {request: spec for request, spec in self._specs("load_spec") if spec.can_load}
        chunks, blocks = self._ids(specs, "src_chunks", "dst_blocks")
        if missing := set(chunks) - self._saved:
            raise ValueError(f"chunks {sorted(missing)} have not been saved")
        for indices, copies, _ in self._groups if chunks else ():
            caches = [self._runner.kv_caches[i] for i in indices]
            loaded = copies.load_into(caches, padded(chunks), padded(blocks))
            for i, cache in zip(indices, loaded, strict=True):
                self._runner.kv_caches[i] = cache
        self._record("finished_load_chunks", specs, "src_chunks")

    def start_save_kv(self) -> None:
        """Starts the saves of this step, once."""
        specs = {} if self._processed_save_for_step else dict(self._specs("save_spec"))
        self._processed_save_for_step = True
        self._finished_saves |= {r for r, s in specs.items() if s.skip_save and s.is_final_save}
        specs = {request: spec for request, spec in specs.items() if not spec.skip_save}
        blocks, chunks = self._ids(specs, "src_blocks", "dst_chunks")
        for indices, copies, gather in self._groups if chunks else ():
            caches = [self._runner.kv_caches[i] for i in indices]
            copies.store(gather(caches, padded(blocks, 0)), padded(chunks))
        self._saved |= set(chunks)
        self._record("finished_save_chunks", specs, "dst_chunks")

    def get_kv_connector_stats(self) -> dict[str, dict[str, list[list[int]]]] | None:
        """The chunks of each request that were copied since the last call, with the process."""
        jaxkv.check_errors()
        stats, self._stats = self._stats, {}
        return stats or None

    def get_finished(self) -> tuple[set[str], set[str]]:
        """The requests whose last save needs no copy, and none for loads, as upstream."""
        self.start_save_kv()
        finished, self._finished_saves = self._finished_saves, set()
        return finished, set()

    def _specs(self, name: str) -> list[tuple[str, Any]]:
        requests = self._connector._get_connector_metadata().requests_meta
        return [(meta.req_id, getattr(meta, name)) for meta in requests if getattr(meta, name)]

    def _ids(self, specs: dict[str, Any], *names: str) -> list[list[int]]:
        """The source and destination ids of all requests; a negative one would be padding."""
        ids = [[i for spec in specs.values() for i in getattr(spec, name)] for name in names]
        limits = {"chunks": self._num_chunks, "blocks": len(self._runner.kv_caches[0])}
        for name, values in zip(names, ids, strict=True):
            limit = limits[name.partition("_")[2]]
            if bad := [i for i in values if not 0 <= i < limit]:
                raise ValueError(f"{name} must be at least 0 and less than {limit}, got {bad}")
        return ids

    def _record(self, name: str, specs: dict[str, Any], chunks: str) -> None:
        for request, spec in specs.items():
            entries = self._stats.setdefault(name, {}).setdefault(request, [])
            entries += [[chunk, jax.process_index()] for chunk in getattr(spec, chunks)]
