// Counts executed instructions and sectors of global memory.
//
// Lanes run one after another here.  Executions in the same iteration of all surrounding loops
// count as one execution by the warp, as if divergent lanes reconverged.  Kernels without PTX
// counters have no known loops: the i-th execution by each lane counts as one.
#include <deque>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "checker.h"

namespace emulator {

struct ExecutionRecord {  // same fields as in runtime.py
  uint32_t warp, counter;
  uint64_t by_warp, by_lanes;
};
struct SectorRecord {  // same fields as in runtime.py
  char tensor[64];
  uint32_t is_write, unused;
  uint64_t requests, sectors, distinct;
};

// ---------------------------------------------------------------------------------------------
// Executed instructions: kernels from PTX announce the basic blocks that a thread executes
// ---------------------------------------------------------------------------------------------
struct OfBlock {  // a basic block
  uint64_t by_lanes = 0;
  std::unordered_set<uint64_t> passes;
};
using OfWarp = std::vector<OfBlock>;
static std::map<std::pair<unsigned, unsigned>, OfWarp> of_warps;  // by block of the grid, warp

struct OfThread {
  OfWarp* warp;
  const int* around;
  std::vector<uint32_t> passes;  // iterations of each loop since its parent's last iteration began
};
static std::deque<OfThread> of_threads;  // by participant
static std::map<std::pair<uint32_t, uint32_t>, ExecutionRecord> executions;  // by warp, counter
static std::vector<ExecutionRecord> listed_executions;

void begin_counting(uint32_t blocks, uint32_t loops, const int* around) {
  if (of_threads.size() < group.fibers.size()) of_threads.resize(group.fibers.size());
  OfWarp& warp = of_warps[{current->block->rank, current->warp}];
  warp.resize(blocks);
  of_threads[current->participant] = {&warp, around, std::vector<uint32_t>(loops)};
  current->counts_passes = true;
}

void begin_pass(int loop) {
  OfThread& own = of_threads[current->participant];
  own.passes[loop]++;
  for (size_t inner = loop + 1; inner < own.passes.size(); inner++)  // outer ones come first
    if (own.around[inner] == loop) own.passes[inner] = 0;
}

void execute(uint32_t block, int loop) {
  OfThread& own = of_threads[current->participant];
  uint64_t pass = 0;
  for (int one = loop; one >= 0; one = own.around[one])
    pass = (pass + own.passes[one]) * 0x9e3779b97f4a7c15;
  current->pass = pass;
  OfBlock& counted = (*own.warp)[block];
  counted.by_lanes++;
  counted.passes.insert(pass);
}

static void add_executions() {
  for (auto& [place, warp] : of_warps) {
    for (uint32_t i = 0; i < warp.size(); i++) {
      if (!warp[i].by_lanes) continue;
      ExecutionRecord& record = executions[{place.second, i}];
      record.warp = place.second;
      record.counter = i;
      record.by_warp += warp[i].passes.size();
      record.by_lanes += warp[i].by_lanes;
    }
  }
  of_warps.clear();
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
  std::unordered_map<uint64_t, GlobalRequest> requests;  // by loop iteration, or by execution
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
  const bool is_bulk = flags & kAsyncProxy;  // one thread, one row of a box per call
  if (!is_bulk) {
    GlobalTraffic& warp = traffic[{fiber->block->rank, fiber->warp, pc}];
    const uint32_t execution = warp.executions[fiber->lane]++;
    const uint64_t place = fiber->counts_passes ? fiber->pass : execution;
    request = &warp.requests.try_emplace(place, alone).first->second;
  }
  for (uint64_t sector = start / kSector; sector <= (start + size - 1) / kSector; sector++)
    request->sectors.insert(sector);
  if (is_bulk) finish(alone);
}

void finish_counted_work_of_group() {
  add_executions();
  for (auto& [key, warp] : traffic)
    for (auto& [place, request] : warp.requests) finish(request);
  traffic.clear();
}

void reset_counted_work() {
  of_warps.clear();
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
