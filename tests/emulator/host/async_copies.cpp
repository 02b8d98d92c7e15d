// Asynchronous copies: cp.async, mbarriers, TMA loads and stores.
#include <algorithm>
#include <cstring>

#include "checker.h"
#include "tensor_map.h"

namespace emulator {

void start_async_operation(AsyncOperation operation) {
  group.async_operations.push_back(std::move(operation));
  if (settings.async_timing == kEarly) {
    std::swap(group.async_operations.front(), group.async_operations.back());
    run_one_async_operation(true);
  }
}

// Marks the destination of a new copy, which must not be accessed before the wait.
static void mark_in_flight(const void* destination, size_t size, uint32_t pc) {
  for_each_cell(destination, size, [pc](Cell& cell, Region*, size_t) {
    cell.flags = kTouched | kInFlight | kGenericWrite;
    cell.write_pc = pc;
  });
}

// ---------------------------------------------------------------------------------------------
// cp.async
// ---------------------------------------------------------------------------------------------
static void land_copy(const CopyOperation& copy) {
  memset(copy.destination, 0, static_cast<size_t>(copy.size));
  memcpy(copy.destination, copy.source, static_cast<size_t>(copy.source_size));
}

void cp_async(void* destination, const void* source, int size, int source_size) {
  Fiber* self = current;
  const uint32_t pc = EMULATOR_CALLER;
  if (source_size < 0 || source_size > size)
    report_fatal(ReportKind::kOutOfBounds, pc, 0, "cp.async of %d bytes asks for %d source bytes",
                 size, source_size);
  const auto bytes = static_cast<size_t>(size);
  if (settings.check) {
    if (!is_aligned(destination, bytes) || !is_aligned(source, bytes))
      report_fatal(ReportKind::kMisaligned, pc, 0,
                   "the addresses of a cp.async of %d bytes are not both multiples of it", size);
    if (source_size)
      check_access(self, source, static_cast<size_t>(source_size), kRead | kAnyAlignment, pc);
    check_access(self, destination, bytes, kWrite | kAnyAlignment, pc);
    mark_in_flight(destination, bytes, pc);
    if (settings.bank_conflicts)
      count_shared_access(self, shared_offset(destination), bytes, false, pc);
  }
  const CopyOperation copy = {static_cast<uint8_t*>(destination),
                              static_cast<const uint8_t*>(source), size, source_size, pc};
  if (settings.async_timing == kEarly)
    land_copy(copy);
  else
    memset(destination, 0xff, bytes);  // poison until the wait
  self->open_copies.push_back(copy);
}

void cp_async_commit() {
  current->copy_groups.push_back(std::move(current->open_copies));
  current->open_copies.clear();
}

void cp_async_wait(int groups_left) {
  Fiber* self = current;
  while (static_cast<int>(self->copy_groups.size()) > groups_left) {
    for (const CopyOperation& copy : self->copy_groups.front()) {
      if (settings.async_timing != kEarly) land_copy(copy);
      mark_written(copy.destination, static_cast<size_t>(copy.size), self->participant, self->clock,
                   copy.pc, kGenericWrite);
    }
    self->copy_groups.pop_front();
  }
}

// ---------------------------------------------------------------------------------------------
// mbarriers
// ---------------------------------------------------------------------------------------------
struct Mbarrier {
  uint32_t expected = 0, pending = 0;
  int64_t bytes = 0;  // expected bytes that have not landed
  uint32_t phase = 0;
  unsigned pseudo = 0;  // participant that represents its copies
  uint32_t init_pc = 0, init_clock = 0, expect_pc = 0, copy_pc = 0;
  unsigned init_participant = 0;
  bool init_fenced = false;
  KnowledgeHandle arrivals, released;
};
static std::map<uint64_t*, Mbarrier> mbarriers;
constexpr int64_t kMaxTransactionBytes = (1 << 20) - 1;

void reset_async_state() { mbarriers.clear(); }

static Mbarrier& find_mbarrier(uint64_t* barrier, uint32_t pc) {
  auto found = mbarriers.find(barrier);
  if (found == mbarriers.end())
    report_fatal(ReportKind::kMbarrier, pc, 0, "use of an mbarrier that was never initialised");
  if (settings.check) check_access(current, barrier, 8, kRead | kOnBarrierObject, pc);
  return found->second;
}

// Checks for the fence that makes the initialisation visible to the asynchronous proxy.
static void check_init_is_fenced(const Mbarrier& barrier, uint32_t pc) {
  const bool fenced = barrier.init_fenced ||
                      current->knowledge->fenced[barrier.init_participant] >= barrier.init_clock;
  if (settings.check && !fenced)
    report(ReportKind::kMissingProxyFence, pc, barrier.init_pc,
           "a bulk copy uses an mbarrier initialised at {line %u} with no fence between",
           barrier.init_pc);
}

static void wake_waiters(const uint64_t* barrier) {
  for (Fiber* fiber : group.fibers)
    if (fiber->state == FiberState::kMbarrier && fiber->wait_mbarrier == barrier)
      make_runnable(fiber);
}

static void end_phase_if_complete(uint64_t* address, Mbarrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.phase++;
  barrier.pending = barrier.expected;
  barrier.released = Handle<Knowledge>::make(*barrier.arrivals);
  wake_waiters(address);
}

static void arrive_once(uint64_t* address, Mbarrier& barrier, uint32_t pc) {
  if (barrier.pending == 0)
    report_fatal(ReportKind::kMbarrier, pc, barrier.init_pc,
                 "more arrivals in one phase than the %u the mbarrier was initialised with",
                 barrier.expected);
  barrier.pending--;
  end_phase_if_complete(address, barrier);
}

void mbarrier_init(uint64_t* address, uint32_t count) {
  Fiber* self = current;
  const uint32_t pc = EMULATOR_CALLER;
  if (count == 0 || count >= 1u << 20)
    report_fatal(ReportKind::kMbarrier, pc, 0, "an mbarrier for %u arrivals", count);
  if (mbarriers.count(address))
    report(ReportKind::kMbarrier, pc, mbarriers[address].init_pc,
           "an mbarrier is initialised again without being invalidated");
  if (settings.check) {
    check_access(self, address, 8, kWrite | kOnBarrierObject, pc);
    for_each_cell(address, 8, [](Cell& cell, Region*, size_t) { cell.flags |= kBarrierObject; });
  }
  Mbarrier barrier;
  barrier.expected = barrier.pending = count;
  if (group.pseudo_used < kPseudoThreads) group.pseudo_used++;
  barrier.pseudo = group.pseudo_used - 1;
  barrier.init_pc = pc;
  barrier.init_clock = self->clock;
  barrier.init_participant = self->participant;
  barrier.arrivals = Handle<Knowledge>::make(group.participants);
  barrier.released = barrier.arrivals;
  mbarriers[address] = std::move(barrier);
}

void mbarrier_arrive(uint64_t* address) {
  const uint32_t pc = EMULATOR_CALLER;
  Mbarrier& barrier = find_mbarrier(address, pc);
  release_to(*barrier.arrivals, current);
  arrive_once(address, barrier, pc);
}

void mbarrier_expect_tx(uint64_t* address, uint32_t bytes, bool arrive) {
  const uint32_t pc = EMULATOR_CALLER;
  Mbarrier& barrier = find_mbarrier(address, pc);
  barrier.bytes += bytes;
  barrier.expect_pc = pc;
  if (barrier.bytes > kMaxTransactionBytes)
    report_fatal(ReportKind::kTransactionCount, pc, 0, "%ld bytes expected, the limit is %ld",
                 static_cast<long>(barrier.bytes), static_cast<long>(kMaxTransactionBytes));
  if (!arrive) return;
  release_to(*barrier.arrivals, current);
  arrive_once(address, barrier, pc);
}

void mbarrier_arrive_cluster(uint32_t cluster_address) {
  const uint32_t pc = EMULATOR_CALLER;
  uint8_t* pointer = shared_pointer(cluster_address, 8);
  if (!pointer)
    report_fatal(ReportKind::kOutOfBounds, pc, 0, "an arrival at cluster address 0x%x",
                 cluster_address);
  if (const Region* region = find_region(pointer)) check_block_is_alive(region->block, pc);
  auto* address = reinterpret_cast<uint64_t*>(pointer);
  Mbarrier& barrier = find_mbarrier(address, pc);
  release_to(*barrier.arrivals, current);
  arrive_once(address, barrier, pc);
}

bool mbarrier_try_wait(uint64_t* address, uint32_t parity) {
  Fiber* self = current;
  const uint32_t pc = EMULATOR_CALLER;
  Mbarrier* barrier = &find_mbarrier(address, pc);
  self->wait_pc = pc;
  if ((barrier->phase & 1) == (parity & 1)) {
    // The thread sleeps until the phase ends, but still returns false, which exposes kernels that
    // do not poll again.
    self->wait_mbarrier = address;
    block_until_runnable(self, FiberState::kMbarrier);
    return false;
  }
  if (settings.check) acquire_from(self, *barrier->released);
  return true;
}

std::string describe_mbarrier(uint64_t* address, uint32_t* expect_pc) {
  auto found = mbarriers.find(address);
  if (found == mbarriers.end()) return "invalidated";
  const Mbarrier& barrier = found->second;
  if (barrier.pending == 0 && barrier.bytes != 0) *expect_pc = barrier.expect_pc;
  char text[100];
  snprintf(text, sizeof text, "phase %u lacks %u arrivals and %ld bytes", barrier.phase,
           barrier.pending, barrier.bytes);
  return text;
}

void fence_mbarrier_init() {
  Fiber* self = current;
  for (auto& [address, barrier] : mbarriers)
    if (barrier.init_participant == self->participant ||
        self->knowledge->seen[barrier.init_participant] >= barrier.init_clock)
      barrier.init_fenced = true;
}

void fence_proxy_async() {
  if (!settings.check) return;
  Fiber* self = current;
  Knowledge& knowledge = own_knowledge(self);
  for (size_t i = 0; i < knowledge.seen.size(); i++)
    knowledge.fenced[i] = std::max(knowledge.fenced[i], knowledge.seen[i]);
  knowledge.fenced[self->participant] = self->clock;
  advance_clock(self);
}

// Orders landed bytes, written as the barrier's pseudo thread, before the end of the phase.
static void publish_landing(Mbarrier& barrier, const Knowledge& issuer_knew) {
  if (!settings.check) return;
  barrier.arrivals->merge(issuer_knew);
  barrier.arrivals->seen[barrier.pseudo + group.fibers.size()] = group.pseudo_clock[barrier.pseudo];
}

static void mark_landed(const void* destination, size_t size, const Mbarrier& barrier, uint32_t pc,
                        uint8_t flags) {
  mark_written(destination, size, barrier.pseudo + static_cast<unsigned>(group.fibers.size()),
               group.pseudo_clock[barrier.pseudo], pc, flags);
}

// ---------------------------------------------------------------------------------------------
// TMA
// ---------------------------------------------------------------------------------------------
uint32_t swizzled(uint32_t address, int swizzle_bytes) {
  // 16-byte units are permuted within spans of 32, 64 or 128 bytes by the bits from bit 7 on.
  const uint32_t bits = swizzle_bytes == 128 ? 7 : swizzle_bytes == 64 ? 3 : swizzle_bytes ? 1 : 0;
  return address ^ ((address >> 7 & bits) << 4);
}

static TensorMapRecord decode_map(const void* map, int rank, bool im2col, uint32_t pc) {
  TensorMapRecord record;
  memcpy(&record, map, sizeof record);
  if (record.magic != kTensorMapMagic)
    report_fatal(ReportKind::kTensorMap, pc, 0, "the tensor map is not one that the host encoded");
  if (record.rank != rank || static_cast<bool>(record.im2col) != im2col)
    report_fatal(
        ReportKind::kTensorMap, pc, 0, "the instruction is %s of rank %d, the map %s of rank %d",
        im2col ? "im2col" : "tiled", rank, record.im2col ? "im2col" : "tiled", record.rank);
  return record;
}

static void check_bulk_address(const void* shared, uint32_t pc) {
  const Region* region = find_region(shared);
  if (!region || !region->is_shared)
    report_fatal(ReportKind::kOutOfBounds, pc, 0, "a bulk copy to or from no shared memory");
  if (!is_aligned(shared, 128))
    report_fatal(ReportKind::kMisaligned, pc, 0,
                 "a bulk copy at %s, whose address is no multiple of 128",
                 describe_address(region, shared).c_str());
}

static size_t steps(const TensorMapRecord& map, int dimension) {
  const unsigned stride = dimension ? map.element_stride[dimension] : 1;
  return (map.box[dimension] + stride - 1) / stride;
}

static size_t copy_bytes(const TensorMapRecord& map) {
  size_t bytes = map.element_size * static_cast<size_t>(map.box[0]);
  if (map.im2col) return bytes * map.box[1];
  for (int i = 1; i < map.rank; i++) bytes *= steps(map, i);
  return bytes;
}

// One row of a copy: global address of its first element (null: outside the tensor) and the range
// of elements inside.
struct TensorRow {
  uint8_t* start;
  long first, count;  // elements inside the tensor
};
using VisitRow = std::function<void(size_t row, const TensorRow&)>;

static TensorRow row_at(const TensorMapRecord& map, const long* coordinate) {
  auto* address = reinterpret_cast<uint8_t*>(map.base);
  for (int i = 1; i < map.rank; i++) {
    if (coordinate[i] < 0 || coordinate[i] >= static_cast<long>(map.extent[i]))
      return {nullptr, 0, 0};
    address += static_cast<uint64_t>(coordinate[i]) * map.stride[i - 1];
  }
  const long first = std::max(0l, -coordinate[0]);
  const long end = std::min<long>(map.box[0], static_cast<long>(map.extent[0]) - coordinate[0]);
  if (first >= end) return {nullptr, 0, 0};
  return {address + coordinate[0] * map.element_size, first, end - first};
}

static void visit_tile(const TensorMapRecord& map, const int* corner, const VisitRow& visit) {
  size_t rows = 1;
  for (int i = 1; i < map.rank; i++) rows *= steps(map, i);
  for (size_t row = 0; row < rows; row++) {
    long coordinate[kMaxTensorRank] = {corner[0]};
    size_t rest = row;
    for (int i = 1; i < map.rank; i++) {
      coordinate[i] = corner[i] + static_cast<long>(rest % steps(map, i)) * map.element_stride[i];
      rest /= steps(map, i);
    }
    visit(row, row_at(map, coordinate));
  }
}

// Visits pixels inside the bounding box, W first, then H, D and the image; each load is offset by
// the filter tap.
static void visit_column(const TensorMapRecord& map, const int* base,
                         const std::vector<unsigned short>& taps, const VisitRow& visit) {
  const int spatial = map.rank - 2;
  long pixel[kMaxTensorRank];
  for (int i = 0; i < map.rank; i++) pixel[i] = base[i];
  for (size_t row = 0; row < map.box[1]; row++) {
    long coordinate[kMaxTensorRank];
    for (int i = 0; i < map.rank; i++) coordinate[i] = pixel[i];
    for (int i = 0; i < spatial; i++) coordinate[1 + i] += taps[static_cast<size_t>(i)];
    visit(row, row_at(map, coordinate));
    int axis = 0;
    for (; axis < spatial; axis++) {
      pixel[1 + axis] += map.element_stride[1 + axis];
      const long last = static_cast<long>(map.extent[1 + axis]) - 1 + map.upper[axis];
      if (pixel[1 + axis] <= last) break;
      pixel[1 + axis] = map.lower[axis];
    }
    if (axis == spatial) pixel[map.rank - 1]++;
  }
}

struct LoadRequest {
  TensorMapRecord map;
  int coordinates[kMaxTensorRank];
  std::vector<unsigned short> taps;
  size_t bytes;
  uint32_t pc;
};

static void visit_rows(const LoadRequest& request, const VisitRow& visit) {
  if (request.map.im2col)
    visit_column(request.map, request.coordinates, request.taps, visit);
  else
    visit_tile(request.map, request.coordinates, visit);
}

static void check_global_rows(const LoadRequest& request) {
  const size_t element = request.map.element_size;
  visit_rows(request, [&](size_t, const TensorRow& row) {
    if (row.start)
      check_access(current, row.start + static_cast<size_t>(row.first) * element,
                   static_cast<size_t>(row.count) * element, kRead | kAsyncProxy, request.pc);
  });
}

// A TFLOAT32 map rounds to nearest even; infinities and NaN are unchanged.
static void round_to_tf32(std::vector<uint8_t>& line) {
  for (size_t i = 0; i < line.size(); i += 4) {
    uint32_t bits;
    memcpy(&bits, &line[i], 4);
    if ((bits & 0x7f800000) == 0x7f800000) continue;
    bits = (bits + 0xfff + (bits >> 13 & 1)) & 0xffffe000;
    memcpy(&line[i], &bits, 4);
  }
}

static void copy_into_shared(const LoadRequest& request, uint8_t* window, uint32_t offset) {
  const TensorMapRecord& map = request.map;
  const size_t row_bytes = static_cast<size_t>(map.box[0]) * map.element_size;
  std::vector<uint8_t> line(row_bytes);
  visit_rows(request, [&](size_t row, const TensorRow& source) {
    std::fill(line.begin(), line.end(), uint8_t{0});
    if (source.start) {
      const size_t skip = static_cast<size_t>(source.first) * map.element_size;
      memcpy(&line[skip], source.start + skip,
             static_cast<size_t>(source.count) * map.element_size);
      if (map.to_tf32) round_to_tf32(line);
    }
    for (size_t unit = 0; unit < row_bytes; unit += 16) {
      const uint32_t place =
          swizzled(static_cast<uint32_t>(offset + row * row_bytes + unit), map.swizzle);
      memcpy(window + place, &line[unit], 16);
    }
  });
}

static void load_into_block(const Handle<LoadRequest>& request, Block* block,
                            uint32_t offset, uint32_t barrier_offset) {
  Fiber* self = current;
  const uint32_t pc = request->pc;
  uint8_t* destination = block->shared_base + offset;
  auto* barrier_address = reinterpret_cast<uint64_t*>(block->shared_base + barrier_offset);
  check_block_is_alive(block, pc);
  Mbarrier& barrier = find_mbarrier(barrier_address, pc);
  check_init_is_fenced(barrier, pc);
  check_bulk_address(destination, pc);
  if (settings.check) {
    check_access(self, destination, request->bytes, kWrite | kAsyncProxy, pc);
    mark_in_flight(destination, request->bytes, pc);
  }
  memset(destination, 0xff, request->bytes);
  auto knew = Handle<Knowledge>::make(*self->knowledge);
  const uint32_t issued_in = barrier.phase;
  auto land = [=] {
    copy_into_shared(*request, block->shared_base, offset);
    auto found = mbarriers.find(barrier_address);
    if (found == mbarriers.end()) {
      report(ReportKind::kMbarrier, pc, 0, "the mbarrier of a bulk copy is gone when it lands");
      return;
    }
    Mbarrier& done = found->second;
    if (done.phase != issued_in)
      report(ReportKind::kTransactionCount, done.expect_pc ? done.expect_pc : pc, pc,
             "the phase ends before the copy of %zu bytes issued at {line %u} lands: too few bytes "
             "are expected",
             request->bytes, pc);
    group.pseudo_clock[done.pseudo]++;
    mark_landed(destination, request->bytes, done, pc, 0);
    publish_landing(done, *knew);
    done.bytes -= static_cast<int64_t>(request->bytes);
    done.copy_pc = pc;
    end_phase_if_complete(barrier_address, done);
  };
  start_async_operation({land, self, pc});
}

// An H200 stops a kernel that breaks these rules with "illegal instruction" (seen).
static void check_coordinates(const LoadRequest& request, bool is_store) {
  const TensorMapRecord& map = request.map;
  const long bytes = static_cast<long>(request.coordinates[0]) * map.element_size;
  if (bytes % 16)
    report_fatal(ReportKind::kMisaligned, request.pc, 0,
                 "the innermost coordinate of a TMA copy is %ld bytes into the tensor, not a "
                 "multiple of 16",
                 bytes);
  for (int i = 0; is_store && i < map.rank; i++)
    if (request.coordinates[i] < 0)
      report_fatal(ReportKind::kTensorMap, request.pc, 0,
                   "a TMA store begins at a negative coordinate: %d of dimension %d",
                   request.coordinates[i], i);
}

void tensor_load(const TensorLoad& load) {
  const uint32_t pc = EMULATOR_CALLER;
  auto request = Handle<LoadRequest>::make();
  request->map = decode_map(load.map, load.rank, load.offsets != nullptr, pc);
  request->pc = pc;
  request->bytes = copy_bytes(request->map);
  memcpy(request->coordinates, load.coordinates, sizeof request->coordinates);
  if (load.offsets) request->taps.assign(load.offsets, load.offsets + load.rank - 2);
  check_coordinates(*request, false);
  check_bulk_address(load.destination, pc);
  if (settings.check) check_global_rows(*request);
  const uint32_t offset = shared_offset(load.destination);
  const uint32_t barrier_offset = shared_offset(load.barrier);
  if (!load.block_mask) return load_into_block(request, current->block, offset, barrier_offset);
  for (unsigned rank = 0; rank < 16; rank++) {
    if (!(load.block_mask >> rank & 1)) continue;
    if (rank >= group.blocks.size())
      report_fatal(ReportKind::kCluster, pc, 0, "a multicast to block %u of a cluster of %zu", rank,
                   group.blocks.size());
    load_into_block(request, group.blocks[rank], offset, barrier_offset);
  }
}

void tensor_map_prefetch(const void* map) {
  TensorMapRecord record;
  memcpy(&record, map, sizeof record);
  if (record.magic != kTensorMapMagic)
    report_fatal(ReportKind::kTensorMap, EMULATOR_CALLER, 0,
                 "the tensor map is not one that the host encoded");
}

// ---------------------------------------------------------------------------------------------
// TMA stores
// ---------------------------------------------------------------------------------------------
static void perform_store(const LoadRequest& request, uint8_t* window, uint32_t offset) {
  const TensorMapRecord& map = request.map;
  const size_t row_bytes = static_cast<size_t>(map.box[0]) * map.element_size;
  std::vector<uint8_t> line(row_bytes);
  visit_rows(request, [&](size_t row, const TensorRow& target) {
    if (!target.start) return;
    for (size_t unit = 0; unit < row_bytes; unit += 16) {
      const uint32_t place =
          swizzled(static_cast<uint32_t>(offset + row * row_bytes + unit), map.swizzle);
      memcpy(&line[unit], window + place, 16);
    }
    const size_t skip = static_cast<size_t>(target.first) * map.element_size;
    const size_t bytes = static_cast<size_t>(target.count) * map.element_size;
    if (settings.check)
      check_access(current, target.start + skip, bytes, kWrite | kAsyncProxy, request.pc);
    memcpy(target.start + skip, &line[skip], bytes);
  });
}

void tensor_store(const void* map, const void* source, int rank, const int* coordinates,
                  bool im2col) {
  Fiber* self = current;
  const uint32_t pc = EMULATOR_CALLER;
  auto request = Handle<LoadRequest>::make();
  request->map = decode_map(map, rank, im2col, pc);
  if (im2col) request->taps.assign(static_cast<size_t>(rank) - 2, 0);
  request->pc = pc;
  request->bytes = copy_bytes(request->map);
  memcpy(request->coordinates, coordinates, sizeof(int) * static_cast<size_t>(rank));
  check_coordinates(*request, true);
  check_bulk_address(source, pc);
  if (settings.check) check_access(self, source, request->bytes, kRead | kAsyncProxy, pc);
  for_each_cell(source, request->bytes, [](Cell& cell, Region*, size_t) {
    if (cell.async_readers < 255) cell.async_readers++;
  });
  uint8_t* window = self->block->shared_base;
  const uint32_t offset = shared_offset(source);
  StoreOperation store;
  store.source = window + offset;
  store.size = request->bytes;
  store.pc = pc;
  store.perform = [=] { perform_store(*request, window, offset); };
  store.performed = settings.async_timing == kEarly;
  store.read_finished = false;
  if (store.performed) store.perform();
  self->open_stores.push_back(std::move(store));
}

void tensor_store_commit() {
  current->store_groups.push_back(std::move(current->open_stores));
  current->open_stores.clear();
}

static void finish_reading(Fiber* fiber, StoreOperation& store) {
  if (!store.performed) store.perform();
  store.performed = true;
  if (store.read_finished) return;
  store.read_finished = true;
  for_each_cell(store.source, store.size, [&](Cell& cell, Region*, size_t) {
    if (cell.async_readers) cell.async_readers--;
    cell.reader_count = 1;
    cell.read_group = group.id;
    cell.reader[0] = static_cast<uint16_t>(fiber->participant);
    cell.read_clock[0] = fiber->clock;
    cell.read_pc = store.pc;
  });
}

void tensor_store_wait(int groups_left, bool read_only) {
  Fiber* self = current;
  auto& groups = self->store_groups;
  const size_t finished = groups.size() - std::min(groups.size(), static_cast<size_t>(groups_left));
  for (size_t i = 0; i < finished; i++)
    for (StoreOperation& store : groups[i]) finish_reading(self, store);
  if (!read_only) groups.erase(groups.begin(), groups.begin() + static_cast<long>(finished));
}

// ---------------------------------------------------------------------------------------------
// Exit of threads and groups
// ---------------------------------------------------------------------------------------------
void check_state_at_exit(Fiber* fiber) {
  const CopyOperation* open_copy = fiber->open_copies.empty() ? nullptr : &fiber->open_copies[0];
  for (const auto& copies : fiber->copy_groups)
    if (!copies.empty()) open_copy = &copies[0];
  if (open_copy)
    report(ReportKind::kUnwaitedCopy, open_copy->pc, 0,
           "the thread returns without waiting for its cp.async");
  const StoreOperation* open_store = fiber->open_stores.empty() ? nullptr : &fiber->open_stores[0];
  for (auto& stores : fiber->store_groups)
    for (StoreOperation& store : stores) {
      if (!store.read_finished) open_store = &store;
    }
  if (open_store)
    report(ReportKind::kUnwaitedCopy, open_store->pc, 0,
           "the thread returns while a bulk store still reads shared memory");
  for (auto& stores : fiber->store_groups)
    for (StoreOperation& store : stores)
      if (!store.performed) store.perform();
}

// Reports a block whose warpgroups hold more registers than it was launched with: on a GPU, one of them
// waits for ever.  A block is launched with all registers of the SM in equal shares, in multiples of 8.
// Only the last numbers count, since a warpgroup may wait until another gives registers away.
static void check_registers(const Block& block) {
  const int count = static_cast<int>(block.warpgroups.size()), launched = 65536 / (count * 128) / 8 * 8;
  int sum = 0;
  uint32_t pc = 0;
  for (const Warpgroup& one : block.warpgroups) {
    sum += one.registers ? one.registers : launched;
    if (one.registers > launched) pc = one.registers_pc;
  }
  if (sum > count * launched)
    report(ReportKind::kWarpgroupMma, pc, 0,
           "setmaxnreg: the %d warpgroups of a block launched with %d registers per thread hold %d",
           count, launched, sum);
}

void check_async_state_at_group_end() {
  for (const AsyncOperation& operation : group.async_operations) {
    current = operation.issuer;
    report(ReportKind::kUnwaitedCopy, operation.pc, 0,
           "the block ends while a bulk copy is under way");
  }
  for (const auto& [address, barrier] : mbarriers)
    if (barrier.bytes && group.async_operations.empty()) {
      current = group.fibers[0];
      const uint32_t pc = barrier.expect_pc ? barrier.expect_pc : barrier.copy_pc;
      report(ReportKind::kTransactionCount, pc, barrier.init_pc,
             "the block ends with an mbarrier that lacks %ld bytes",
             static_cast<long>(barrier.bytes));
    }
  for (Block* block : group.blocks) {
    current = block->fibers[0];
    check_registers(*block);
    for (const Warpgroup& warpgroup : block->warpgroups) {
      const std::vector<PendingMma>& pending =
          warpgroup.groups.empty() ? warpgroup.open : warpgroup.groups.front();
      if (!pending.empty())
        report(ReportKind::kWarpgroupMma, pending[0].pc, 0,
               "the block ends with a wgmma not waited for");
    }
  }
  current = nullptr;
}

}  // namespace emulator
