// Counts bank conflicts: the wavefronts of a warp's shared-memory requests.
//
// Lanes run one after another here, so requests are reassembled from the lanes' accesses: the i-th
// access by each lane at a place of the code belongs to one request.
#include <algorithm>
#include <cstring>
#include <map>

#include "checker.h"

namespace emulator {

struct BankRecord {  // same fields as in runtime.py
  uint32_t pc, is_matrix;
  uint64_t requests, ideal, wavefronts;
};
static std::map<std::pair<uint32_t, uint32_t>, BankRecord> totals;
static std::vector<BankRecord> listed;

struct Request {
  uint32_t lanes = 0;
  uint32_t offsets[kWarpSize];
  size_t size = 0;
  bool is_load = false;
};
struct WarpTraffic {
  uint32_t executions[kWarpSize] = {};
  std::map<uint64_t, Request> requests;  // by execution
};
static std::map<std::tuple<unsigned, unsigned, uint32_t>, WarpTraffic> traffic;  // block, warp, pc

constexpr int kBanks = 32;

// Lanes that access the same word are served together; different words of one bank are serialized.
static uint64_t wavefronts_of(const uint32_t* offsets, const bool* present, int lanes,
                              size_t size) {
  std::vector<uint32_t> words[kBanks];
  for (int lane = 0; lane < lanes; lane++) {
    if (!present[lane]) continue;
    for (size_t byte = 0; byte < std::max<size_t>(size, 4); byte += 4) {
      const uint32_t word = (offsets[lane] + static_cast<uint32_t>(byte)) / 4;
      auto& in_bank = words[word % kBanks];
      if (std::find(in_bank.begin(), in_bank.end(), word) == in_bank.end()) in_bank.push_back(word);
    }
  }
  size_t most = 0;
  for (auto& in_bank : words) most = std::max(most, in_bank.size());
  return most;
}

static void add(uint32_t pc, bool is_matrix, uint64_t ideal, uint64_t wavefronts) {
  BankRecord& record = totals[{pc, is_matrix}];
  record.pc = pc;
  record.is_matrix = is_matrix;
  record.requests++;
  record.ideal += ideal;
  record.wavefronts += wavefronts;
}

void count_shared_access(Fiber* fiber, uint32_t offset, size_t size, bool is_load, uint32_t pc) {
  WarpTraffic& warp = traffic[{fiber->block->rank, fiber->warp, pc}];
  const uint32_t execution = warp.executions[fiber->lane]++;
  Request& request = warp.requests[execution];
  request.lanes |= 1u << fiber->lane;
  request.offsets[fiber->lane] = offset;
  request.size = size;
  request.is_load = is_load;
}

void count_matrix_access(const uint32_t* row_offsets, int rows, uint32_t pc) {
  bool present[kWarpSize];
  std::fill(present, present + rows, true);
  add(pc, true, 1, wavefronts_of(row_offsets, present, rows, 16));
}

// Whether lanes at this distance access the same address, for all lanes.
static bool is_shared_by_lanes(const Request& request, int apart) {
  for (int lane = 0; lane < kWarpSize; lane++) {
    const uint32_t both = 1u << lane | 1u << (lane ^ apart);
    if ((request.lanes & both) == both && request.offsets[lane] != request.offsets[lane ^ apart])
      return false;
  }
  return true;
}

// Wide accesses are split: 8 bytes by half warps, 16 bytes by quarter warps, and half as many parts
// for loads shared by pairs of lanes (measurements in test_wavefronts_of_wide_loads).
static void add_request(uint32_t pc, const Request& request) {
  int parts = request.size <= 4 ? 1 : request.size <= 8 ? 2 : 4;
  if (parts > 1 && request.is_load &&
      (is_shared_by_lanes(request, 1) || is_shared_by_lanes(request, 2)))
    parts /= 2;
  const int lanes = kWarpSize / parts;
  uint64_t ideal = 0, wavefronts = 0;
  for (int part = 0; part < parts; part++) {
    bool present[kWarpSize];
    bool any = false;
    for (int lane = 0; lane < lanes; lane++) {
      present[lane] = request.lanes >> (part * lanes + lane) & 1;
      any |= present[lane];
    }
    if (!any) continue;
    ideal++;
    wavefronts += wavefronts_of(request.offsets + part * lanes, present, lanes, request.size);
  }
  add(pc, false, ideal, wavefronts);
}

void finish_bank_conflicts_of_block() {
  for (auto& [key, warp] : traffic)
    for (auto& [place, request] : warp.requests) add_request(std::get<2>(key), request);
  traffic.clear();
}

void reset_bank_conflicts() {
  totals.clear();
  traffic.clear();
}

}  // namespace emulator

using namespace emulator;
extern "C" {
size_t emulator_bank_count() {
  listed.clear();
  for (auto& [key, record] : totals) listed.push_back(record);
  return listed.size();
}
const BankRecord* emulator_bank_record(size_t index) { return &listed[index]; }
}
