// The Python module: FFI handlers as capsules, and the functions that Python calls on the host.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>

#include "cache/bind_pinned_memory.h"
#include "collectives/all_reduce.h"
#include "collectives/symmetric_memory.h"
#include "common/bounds.h"
#include "common/error_ring.h"
#include "metadata/flashinfer.h"
#include "python/sync_guard.h"
#include "recurrent/align_states.h"
#include "sparse/rows.h"
#include "transfer/block_copy.h"
#include "transfer/host_ids.h"
#include "xla/ffi/api/ffi.h"
#ifdef JAXKV_CUDA
#include "common/device.h"
#include "execution.h"
#include "transfer/started_copies.h"
#endif
#ifdef JAXKV_TEST_HOOKS
#include "testing/communicator_state.h"
#endif

namespace nb = nanobind;

namespace jaxkv {

extern "C" {
XLA_FFI_Error* PlanPairsCpu(XLA_FFI_CallFrame*);
XLA_FFI_Error* CopyBlocksCpu(XLA_FFI_CallFrame*);
XLA_FFI_Error* CopyPairsCpu(XLA_FFI_CallFrame*);
XLA_FFI_Error* CopyGroupsCpu(XLA_FFI_CallFrame*);
XLA_FFI_Error* StartCopyCpu(XLA_FFI_CallFrame*);
XLA_FFI_Error* MoveTicketCpu(XLA_FFI_CallFrame*);
XLA_FFI_Error* WaitCopyCpu(XLA_FFI_CallFrame*);
XLA_FFI_Error* CheckBoundsCpu(XLA_FFI_CallFrame*);
XLA_FFI_Error* AllReduceCpu(XLA_FFI_CallFrame*);
XLA_FFI_Error* AlignStatesCpu(XLA_FFI_CallFrame*);
XLA_FFI_Error* SparseFetchCpu(XLA_FFI_CallFrame*);
XLA_FFI_Error* SparseAppendCpu(XLA_FFI_CallFrame*);
XLA_FFI_Error* SparseWriteAddedCpu(XLA_FFI_CallFrame*);
#ifdef JAXKV_CUDA
XLA_FFI_Error* PrepareDevice(XLA_FFI_CallFrame*);
XLA_FFI_Error* PlanPairsKernel(XLA_FFI_CallFrame*);
XLA_FFI_Error* CopyBlocksKernel(XLA_FFI_CallFrame*);
XLA_FFI_Error* CopyPairsKernel(XLA_FFI_CallFrame*);
XLA_FFI_Error* CopyGroupsKernel(XLA_FFI_CallFrame*);
XLA_FFI_Error* CopyBlocksDma(XLA_FFI_CallFrame*);
XLA_FFI_Error* PrepareCopyStreams(XLA_FFI_CallFrame*);
XLA_FFI_Error* PrepareSegmentedCopy(XLA_FFI_CallFrame*);
XLA_FFI_Error* StartCopyKernel(XLA_FFI_CallFrame*);
XLA_FFI_Error* StartCopyDma(XLA_FFI_CallFrame*);
XLA_FFI_Error* MoveTicketKernel(XLA_FFI_CallFrame*);
XLA_FFI_Error* WaitCopyKernel(XLA_FFI_CallFrame*);
XLA_FFI_Error* WaitCopyDma(XLA_FFI_CallFrame*);
XLA_FFI_Error* PrepareBounds(XLA_FFI_CallFrame*);
XLA_FFI_Error* CheckBoundsKernel(XLA_FFI_CallFrame*);
XLA_FFI_Error* PrepareAllReduce(XLA_FFI_CallFrame*);
XLA_FFI_Error* AllReduceKernel(XLA_FFI_CallFrame*);
XLA_FFI_Error* PrepareAlign(XLA_FFI_CallFrame*);
XLA_FFI_Error* PrepareFlashInfer(XLA_FFI_CallFrame*);
XLA_FFI_Error* FlashInferKernel(XLA_FFI_CallFrame*);
XLA_FFI_Error* AlignStatesKernel(XLA_FFI_CallFrame*);
XLA_FFI_Error* PrepareSparse(XLA_FFI_CallFrame*);
XLA_FFI_Error* SparseFetchKernel(XLA_FFI_CallFrame*);
XLA_FFI_Error* SparseAppendKernel(XLA_FFI_CallFrame*);
XLA_FFI_Error* SparseWriteAddedKernel(XLA_FFI_CallFrame*);
#ifdef JAXKV_TEST_HOOKS
XLA_FFI_Error* CopyBlocksUnordered(XLA_FFI_CallFrame*);
#endif
#endif
}

namespace {

nb::capsule capsule(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// platform -> target -> stage -> handler
nb::dict registrations() {
  nb::dict cpu, all;
  auto add = [](nb::dict& platform, const char* target, auto... stage_and_handler) {
    nb::dict stages;
    (stages.attr("update")(stage_and_handler), ...);
    platform[target] = stages;
  };
  auto stage = [](const char* name, XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
    nb::dict entry;
    entry[name] = capsule(handler);
    return entry;
  };
  add(cpu, "jaxkv_plan_pairs", stage("execute", PlanPairsCpu));
  add(cpu, "jaxkv_copy_blocks", stage("execute", CopyBlocksCpu));
  add(cpu, "jaxkv_copy_pairs", stage("execute", CopyPairsCpu));
  add(cpu, "jaxkv_copy_groups", stage("execute", CopyGroupsCpu));
  add(cpu, "jaxkv_start_copy", stage("execute", StartCopyCpu));
  add(cpu, "jaxkv_move_ticket", stage("execute", MoveTicketCpu));
  add(cpu, "jaxkv_wait_copy", stage("execute", WaitCopyCpu));
  add(cpu, "jaxkv_check_bounds", stage("execute", CheckBoundsCpu));
  add(cpu, "jaxkv_all_reduce", stage("execute", AllReduceCpu));
  add(cpu, "jaxkv_align_states", stage("execute", AlignStatesCpu));
  add(cpu, "jaxkv_sparse_fetch", stage("execute", SparseFetchCpu));
  add(cpu, "jaxkv_sparse_append", stage("execute", SparseAppendCpu));
  add(cpu, "jaxkv_sparse_write_added", stage("execute", SparseWriteAddedCpu));
  all["cpu"] = cpu;
#ifdef JAXKV_CUDA
  nb::dict cuda;
  const auto prepare = stage("initialize", note_stream<PrepareDevice>);
  add(cuda, "jaxkv_plan_pairs", prepare, stage("execute", join_on_failure<PlanPairsKernel>));
  add(cuda, "jaxkv_copy_blocks", prepare, stage("execute", join_on_failure<CopyBlocksKernel>));
  add(cuda, "jaxkv_copy_pairs", prepare, stage("execute", join_on_failure<CopyPairsKernel>));
  add(cuda, "jaxkv_copy_groups", prepare, stage("execute", join_on_failure<CopyGroupsKernel>));
  // No initialize stage: there is nothing to prepare, and XLA would call it before every execution.
  // This call is never captured.
  add(cuda, "jaxkv_copy_blocks_dma", stage("execute", join_on_failure<note_stream<CopyBlocksDma>>));
  const auto prepare_copy_streams = stage("initialize", note_stream<PrepareCopyStreams>);
  add(cuda, "jaxkv_start_copy", prepare_copy_streams,
      stage("execute", join_on_failure<StartCopyKernel>));
  add(cuda, "jaxkv_start_copy_dma", stage("initialize", note_stream<PrepareSegmentedCopy>),
      stage("execute", join_on_failure<StartCopyDma>));
  add(cuda, "jaxkv_move_ticket", prepare_copy_streams,
      stage("execute", join_on_failure<MoveTicketKernel>));
  add(cuda, "jaxkv_wait_copy", prepare_copy_streams,
      stage("execute", join_on_failure<WaitCopyKernel>));
  add(cuda, "jaxkv_wait_copy_dma", prepare_copy_streams,
      stage("execute", join_on_failure<WaitCopyDma>));
  add(cuda, "jaxkv_check_bounds", stage("initialize", note_stream<PrepareBounds>),
      stage("execute", join_on_failure<CheckBoundsKernel>));
  add(cuda, "jaxkv_all_reduce", stage("initialize", note_stream<PrepareAllReduce>),
      stage("execute", join_on_failure<AllReduceKernel>));
  add(cuda, "jaxkv_align_states", stage("initialize", note_stream<PrepareAlign>),
      stage("execute", join_on_failure<AlignStatesKernel>));
  add(cuda, "jaxkv_flashinfer", stage("initialize", note_stream<PrepareFlashInfer>),
      stage("execute", join_on_failure<FlashInferKernel>));
  const auto prepare_sparse = stage("initialize", note_stream<PrepareSparse>);
  add(cuda, "jaxkv_sparse_fetch", prepare_sparse,
      stage("execute", join_on_failure<SparseFetchKernel>));
  add(cuda, "jaxkv_sparse_append", prepare_sparse,
      stage("execute", join_on_failure<SparseAppendKernel>));
  add(cuda, "jaxkv_sparse_write_added", prepare_sparse,
      stage("execute", join_on_failure<SparseWriteAddedKernel>));
#ifdef JAXKV_TEST_HOOKS
  add(cuda, "jaxkv_copy_blocks_unordered", prepare,
      stage("execute", join_on_failure<CopyBlocksUnordered>));
#endif
  all["CUDA"] = cuda;
#endif
  return all;
}

nb::list device_errors(uint32_t scope) {
  constexpr const char* kNames[kErrorKinds] = {"page_index", "transfer", "bound"};  // of ErrorKind
  nb::list errors;
  for (const auto& taken : take_errors(static_cast<Scope>(scope))) {
    nb::list entries;
    for (const auto& entry : taken.details) {
      entries.append(nb::make_tuple(operation_of(entry), argument_of(entry), describe(entry)));
    }
    const auto device =
        taken.device == kHostChecked ? std::nullopt : std::optional<int32_t>(taken.device);
    errors.append(
        nb::make_tuple(kNames[static_cast<int32_t>(taken.kind)], device, taken.count, entries));
  }
  return errors;
}

int64_t create_communicator(const std::string& platform,
                            const std::vector<std::vector<int32_t>>& devices, uint64_t ll_words,
                            uint64_t slot_words, uint64_t tile_words, uint64_t multicast_words,
                            uint64_t timeout_ns) {
  const collectives::Geometry geometry{static_cast<int32_t>(devices.at(0).size()), ll_words,
                                       slot_words, tile_words, multicast_words};
  if (platform == "cpu") {
    return collectives::register_communicator(
        collectives::make_cpu_communicator(geometry, devices, timeout_ns));
  }
#ifdef JAXKV_CUDA
  auto communicator = collectives::make_cuda_communicator(geometry, devices, timeout_ns);
  communicator->for_each_local([&](const auto& rank) {
    communicator->limit_blocks(collectives::load_all_reduce(rank.device, geometry.world_size));
  });
  return collectives::register_communicator(std::move(communicator));
#else
  throw std::runtime_error("jaxkv: symmetric memory on platform '" + platform +
                           "' requires a build with JAXKV_CUDA=ON");
#endif
}

std::shared_ptr<collectives::Communicator> open_communicator(int64_t id) {
  auto communicator = collectives::find_communicator(id);
  if (!communicator)
    throw std::runtime_error("jaxkv: the SymmetricMemory was closed; create a new one");
  return communicator;
}

// The fields of PeerTimeoutError and its message; None if no wait timed out.
std::optional<nb::tuple> peer_fault(int64_t id) {
  const auto fault = [id] {
    const nb::gil_scoped_release without_gil;
    return open_communicator(id)->fault();
  }();
  if (!fault) return std::nullopt;
  return nb::make_tuple(fault->rank, fault->peer, collectives::name_of(fault->phase),
                        fault->expected, fault->seen, describe(*fault));
}

// None of these may own a communicator while it holds the GIL: the last owner waits for the
// devices, whose work may wait for a Python callback.
void bind_communicators(nb::module_& m) {
  const nb::call_guard<nb::gil_scoped_release> without_gil;
  m.def("create_communicator", &create_communicator, nb::arg("platform"), nb::arg("devices"),
        nb::arg("ll_words"), nb::arg("slot_words"), nb::arg("tile_words"),
        nb::arg("multicast_words"), nb::arg("timeout_ns"), without_gil,
        "Allocates symmetric memory for groups of devices (ordinals, -1 for devices of other "
        "processes); returns the id of the communicator.");
  m.def(
      "communicator_handles", [](int64_t id) { return open_communicator(id)->handles(); },
      nb::arg("id"), without_gil,
      "Memory handles for other processes, [group][rank]; empty for ranks of other processes.");
  m.def(
      "block_limits", [](int64_t id) { return open_communicator(id)->block_limits(); },
      nb::arg("id"), without_gil, "Upper limits on the thread blocks of a call, by kernel.");
  m.def(
      "limit_blocks",
      [](int64_t id, const collectives::BlockLimits& limits) {
        open_communicator(id)->limit_blocks(limits);
      },
      nb::arg("id"), nb::arg("limits"), without_gil,
      "Lowers the limits to those of another process.");
  m.def(
      "map_communicator",
      [](int64_t id, const collectives::ByRank<collectives::Handle>& handles) {
        open_communicator(id)->map(handles);
      },
      nb::arg("id"), nb::arg("handles"), without_gil,
      "Maps the memory of the ranks of other processes.");
  m.def("close_communicator", &collectives::close_communicator, nb::arg("id"), without_gil,
        "Rejects new calls, waits for running ones and unmaps the memory of other processes. Frees "
        "the own memory, unless other processes have mapped it. Idempotent. No CUDA graph with a "
        "call may be launched concurrently.");
  m.def("free_communicator", &collectives::free_communicator, nb::arg("id"), without_gil,
        "Frees the memory of a closed communicator that other processes had mapped. Idempotent.");
  m.def("name_call", &collectives::name_call, nb::arg("signature"), nb::arg("description"),
        "Registers the description of calls with this signature, for error messages.");
  m.def("peer_fault", &peer_fault, nb::arg("id"),
        "(rank, peer, phase, expected, seen, description) of a wait that timed out, or None.");
}

void bind_devices(nb::module_& m) {
#ifdef JAXKV_CUDA
  m.attr("CUDA") = true;
  m.def("synchronize_device", &synchronize_device, nb::arg("ordinal"),
        nb::call_guard<nb::gil_scoped_release>(),
        "Blocks until all work of XLA's programs and of copies on a CUDA device is complete.");
  m.def("started_copies", &transfer::started_copies,
        "Numbers of asynchronous copies that are enqueued entirely, by device and copy stream.");
  m.def("copies_ended", &transfer::copies_ended, nb::arg("started"),
        "Whether all copies counted by an earlier started_copies() are complete; non-blocking.");
  m.def("pci_address", &pci_address, nb::arg("ordinal"), "PCI address of a CUDA device.");
  m.def("multicast_supported", &collectives::multicast_supported, nb::arg("ordinal"),
        "Whether the driver reports NVLink multicast for a CUDA device.");
#else
  m.attr("CUDA") = false;
#endif
}

#ifdef JAXKV_TEST_HOOKS
void bind_test_hooks(nb::module_& m) {
  m.def(
      "set_test_state",
      [](int64_t id, uint64_t epoch, uint64_t ahead, uint64_t stall_ns) {
        testing::set_epoch(*open_communicator(id), epoch, ahead);
        testing::set_stall(*open_communicator(id), stall_ns);
      },
      nb::arg("id"), nb::arg("epoch"), nb::arg("ahead"), nb::arg("stall_ns"),
      nb::call_guard<nb::gil_scoped_release>(),
      "Sets the epochs of all ranks, and the maximum delay of threads.");
}
#endif

}  // namespace

NB_MODULE(_ext, m) {
  m.doc() = "Native part of jaxkv: FFI handlers and host functions.";
  m.def("registrations", &registrations,
        "FFI handlers as capsules: {platform: {target: {stage: capsule}}}.");
  m.def("device_errors", &device_errors, nb::arg("scope"),
        "Errors of a scope since the previous call, for each kind and device with errors: (kind, "
        "device ordinal or None for the host, count, the most recent ones as (operation, argument, "
        "description), with empty names if unknown).");
  m.def("bound_code", &bound_code, nb::arg("operation"), nb::arg("bound"),
        "Integer code of a bound of an operation.");
  m.def(
      "register_scope",
      [](const std::string& name) { return static_cast<uint32_t>(register_scope(name)); },
      nb::arg("name"), "Number of the error scope of this name; 0 is the default scope.");
  bind_communicators(m);
  nb::list operations;
  for (const OperationNames& names : kOperationNames) operations.append(names.operation);
  m.attr("OPERATIONS") = nb::tuple(operations);
  m.attr("HOST_IDS_HEADER") = transfer::kHostIdsHeader;
  m.attr("FLASHINFER_ROWS") = metadata::kMaxFlashInferRows;
  m.attr("INLINE_IDS") = transfer::kInlineIds;
  m.attr("MAX_SEGMENTS") = transfer::kMaxSegments;
  m.attr("MAX_SEGMENT_BUFFERS") = transfer::kMaxSegmentBuffers;
  m.attr("MAX_STATES") = recurrent::kMaxStates;
  m.attr("MAX_STATE_GEOMETRIES") = recurrent::kMaxGeometries;
  m.attr("MAX_SPARSE_IDS") = sparse::kMaxIds;
  m.attr("MAX_SPARSE_SLOTS") = sparse::kMaxSlots;
  m.attr("MAX_SPARSE_BATCH") = sparse::kMaxBatch;
  m.def(
      "write_host_ids_header",
      [](uintptr_t address, size_t num_words) {
        transfer::write_host_ids_header({reinterpret_cast<int32_t*>(address), num_words});
      },
      nb::arg("address"), nb::arg("num_words"),
      "Writes the HostIds header to the first words of an id list.");
  m.def(
      "place_host_ids",
      [](uintptr_t address, uintptr_t words, size_t num_words) {
        auto* const to = reinterpret_cast<int32_t*>(address);
        std::memmove(to, reinterpret_cast<const void*>(words), num_words * sizeof *to);
        transfer::register_host_ids(to, num_words);
      },
      nb::arg("address"), nb::arg("words"), nb::arg("num_words"),
      "Writes HostIds to an address, and registers them there as readable by the host.");
#ifdef JAXKV_WATCH_BUFFERS
  m.def(
      "watch_buffers", &python::watch_buffers, nb::arg("type"), nb::arg("observe").none(),
      "Intercepts buffer requests for a type: observe(get, object) must call get(object) or raise. "
      "None restores the original.");
#endif
  bind_devices(m);
#ifdef JAXKV_TEST_HOOKS
  bind_test_hooks(m);
#endif
  cache::bind_pinned_memory(m);
}

}  // namespace jaxkv
