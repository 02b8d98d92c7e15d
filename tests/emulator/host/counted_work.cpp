// What a launch did, as figures: executed instructions, and sectors of global memory.
//
// Lanes run one after another here.  The i-th execution of a piece of code by each lane of a warp is
// taken for one execution by the warp, as where lanes meet again after they parted; a warp whose
// lanes reach some code in turns, at different passes of a loop, is counted too low.
#include <algorithm>
#include <set>
#include <unordered_set>

#include "checker.h"

namespace emulator {

struct ExecutionRecord {  // runtime.py declares the same fields
  uint32_t warp, counter;
  uint64_t by_warp, by_lanes;
};
struct SectorRecord {  // runtime.py declares the same fields
  char tensor[64];
  uint32_t is_write, unused;
  uint64_t requests, sectors, distinct;
};

// ---------------------------------------------------------------------------------------------
// Executed instructions: kernels from PTX increment counters of each thread
// ---------------------------------------------------------------------------------------------
static std::vector<std::vector<uint32_t>> of_threads;  // by participant
static std::map<std::pair<uint32_t, uint32_t>, ExecutionRecord> executions;  // by warp, counter
static std::vector<ExecutionRecord> listed_executions;

uint32_t* execution_counters(uint32_t count) {
  if (of_threads.size() < group.fibers.size()) of_threads.resize(group.fibers.size());
  auto& own = of_threads[current->participant];
  own.assign(count, 0);
  return own.data();
}

static void add_executions() {
  struct OfWarp {
    std::vector<uint32_t> most;
    std::vector<uint64_t> sum;
  };
  std::map<std::pair<unsigned, unsigned>, OfWarp> warps;  // block, warp
  for (Fiber* fiber : group.fibers) {
    if (fiber->participant >= of_threads.size()) continue;
    const auto& own = of_threads[fiber->participant];
    OfWarp& warp = warps[{fiber->block->rank, fiber->warp}];
    warp.most.resize(own.size());
    warp.sum.resize(own.size());
    for (size_t i = 0; i < own.size(); i++) {
      warp.most[i] = std::max(warp.most[i], own[i]);
      warp.sum[i] += own[i];
    }
  }
  for (auto& [place, warp] : warps) {
    for (uint32_t i = 0; i < warp.most.size(); i++) {
      if (!warp.most[i]) continue;
      ExecutionRecord& record = executions[{place.second, i}];
      record.warp = place.second;
      record.counter = i;
      record.by_warp += warp.most[i];
      record.by_lanes += warp.sum[i];
    }
  }
  of_threads.clear();
}

// ---------------------------------------------------------------------------------------------
// Sectors of 32 bytes
// ---------------------------------------------------------------------------------------------
constexpr uint64_t kSector = 32;
struct OfTensor {
  uint64_t requests = 0, sectors = 0;
  std::unordered_set<uint64_t> distinct;
};
static std::map<std::pair<std::string, bool>, OfTensor> tensors;  // by name, written or read
static std::vector<SectorRecord> listed_sectors;

struct GlobalRequest {
  OfTensor* tensor;
  std::set<uint64_t> sectors;
};
struct GlobalTraffic {
  uint32_t executions[kWarpSize] = {};
  std::vector<GlobalRequest> requests;
};
static std::map<std::tuple<unsigned, unsigned, uint32_t>, GlobalTraffic> traffic;

static void finish(const GlobalRequest& request) {
  request.tensor->requests++;
  request.tensor->sectors += request.sectors.size();
  request.tensor->distinct.insert(request.sectors.begin(), request.sectors.end());
}

void count_global_access(Fiber* fiber, const Region* region, const void* address, size_t size,
                         unsigned flags, uint32_t pc) {
  const uint64_t start = reinterpret_cast<uintptr_t>(address);
  GlobalRequest alone = {&tensors[{region->name, (flags & kWrite) != 0}], {}};
  GlobalRequest* request = &alone;
  const bool is_bulk = flags & kAsyncProxy;  // of one thread, a row of a box at a time
  if (!is_bulk) {
    GlobalTraffic& warp = traffic[{fiber->block->rank, fiber->warp, pc}];
    const uint32_t execution = warp.executions[fiber->lane]++;
    if (warp.requests.size() <= execution) warp.requests.resize(execution + 1, alone);
    request = &warp.requests[execution];
  }
  for (uint64_t sector = start / kSector; sector <= (start + size - 1) / kSector; sector++)
    request->sectors.insert(sector);
  if (is_bulk) finish(alone);
}

void finish_counted_work_of_group() {
  add_executions();
  for (auto& [key, warp] : traffic)
    for (const GlobalRequest& request : warp.requests) finish(request);
  traffic.clear();
}

void reset_counted_work() {
  of_threads.clear();
  executions.clear();
  traffic.clear();
  tensors.clear();
}

}  // namespace emulator

using namespace emulator;
extern "C" {
size_t emulator_execution_count() {
  listed_executions.clear();
  for (auto& [key, record] : executions) listed_executions.push_back(record);
  return listed_executions.size();
}
const ExecutionRecord* emulator_execution_record(size_t index) { return &listed_executions[index]; }
size_t emulator_sector_count() {
  listed_sectors.clear();
  for (auto& [key, tensor] : tensors) {
    SectorRecord record = {};
    snprintf(record.tensor, sizeof record.tensor, "%s", key.first.c_str());
    record.is_write = key.second;
    record.requests = tensor.requests;
    record.sectors = tensor.sectors;
    record.distinct = tensor.distinct.size();
    listed_sectors.push_back(record);
  }
  return listed_sectors.size();
}
const SectorRecord* emulator_sector_record(size_t index) { return &listed_sectors[index]; }
}
