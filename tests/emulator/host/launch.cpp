// Launches: shared windows, emulated-TLS variables, and groups of blocks in order.
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "checker.h"

namespace emulator {

void run_group(const std::vector<Block*>& blocks);  // scheduler.cpp
void seed_random(uint32_t seed);                    // scheduler.cpp
void forget_published();                            // scheduler.cpp
void finish_bank_conflicts_of_block();              // bank_conflicts.cpp
void reset_bank_conflicts();                        // bank_conflicts.cpp
void check_async_state_at_group_end();              // async_copies.cpp

uint3 thread_index() { return current->thread_index; }
uint3 block_index() { return current->block->index; }
uint3 block_extent() { return {running.block.x, running.block.y, running.block.z}; }
uint3 grid_extent() { return {running.grid.x, running.grid.y, running.grid.z}; }
unsigned lane_index() { return current->lane; }

long long clock_cycles() {
  static std::atomic<long long> cycles;
  return cycles += 1 << 20;
}

// ---------------------------------------------------------------------------------------------
// Shared memory: one window per block.  A variable gets its offset on first use, the same in all
// blocks of the launch, with exactly its declared alignment and a gap around it.
// ---------------------------------------------------------------------------------------------
// Dynamic shared memory comes first: descriptors of wgmma reach only 256 KB.
constexpr size_t kDynamicOffset = 1024;
constexpr size_t kFirstOffset = 4096;
constexpr size_t kGap = 256;
constexpr unsigned kSharedGranuleShift = 2;
constexpr uint32_t kRankShift = 24;  // block rank + 1 of a shared::cluster address

static std::map<const EmulatorSharedControl*, uint32_t> variable_offsets;
static size_t next_offset = kFirstOffset;
static std::vector<Block*> block_pool;

static void fill_with_poison(Region* region) { memset(region->base, 0xff, region->size); }

static Region* shared_region(Block* block, const std::string& name, uint32_t offset, size_t size) {
  Region* region = create_region(name.c_str(), block->shared_base + offset, size,
                                 kSharedGranuleShift, true, false, false);
  region->offset = offset;
  region->block = block;
  block->shared_regions.push_back(region);
  fill_with_poison(region);
  return region;
}

static uint32_t place(size_t size, size_t alignment) {
  size_t offset = (next_offset + alignment - 1) & ~(alignment - 1);
  if ((offset & alignment) == 0) offset += alignment;  // an odd multiple of its alignment
  next_offset = offset + size + kGap;
  return static_cast<uint32_t>(offset);
}

static uint32_t offset_of(const EmulatorSharedControl* control) {
  auto known = variable_offsets.find(control);
  if (known != variable_offsets.end()) return known->second;
  const size_t alignment = control->align;
  const size_t dynamic = alignment < kDynamicOffset ? kDynamicOffset + alignment : alignment;
  const uint32_t offset =
      control->size ? place(control->size, alignment) : static_cast<uint32_t>(dynamic);
  variable_offsets[control] = offset;
  return offset;
}

static bool has_region_at(const Block* block, uint32_t offset) {
  for (const Region* region : block->shared_regions)
    if (region->offset == offset) return true;
  return false;
}

static void* shared_variable(EmulatorSharedControl* control) {
  Block* block = current->block;
  const uint32_t offset = offset_of(control);
  uint8_t* address = block->shared_base + offset;
  if (has_region_at(block, offset)) return address;
  const size_t size = control->size ? control->size : running.dynamic_shared;
  if (size == 0) return address;  // the launch has no dynamic shared memory: any use is reported
  char name[64];
  snprintf(name, sizeof name, "{variable %lx}",
           static_cast<unsigned long>(reinterpret_cast<uintptr_t>(control) - running.module_base));
  // In every block of the cluster: another block may access it before its owner does.
  for (Block* each : group.blocks)
    if (!has_region_at(each, offset)) shared_region(each, name, offset, size);
  return address;
}

uint32_t shared_offset(const void* pointer) {
  const auto* byte = static_cast<const uint8_t*>(pointer);
  return static_cast<uint32_t>(byte - current->block->shared_base);
}

uint32_t shared_address(const void* pointer) {
  const auto* byte = static_cast<const uint8_t*>(pointer);
  for (const Block* block : group.blocks) {
    const size_t offset = static_cast<size_t>(byte - block->shared_base);
    if (offset >= kSharedWindow) continue;
    const uint32_t rank_bits = block == current->block ? 0 : (block->rank + 1) << kRankShift;
    return rank_bits | static_cast<uint32_t>(offset);
  }
  report_fatal(ReportKind::kOutOfBounds, EMULATOR_CALLER, 0,
               "a shared address is taken of a pointer that is not to shared memory");
}

uint8_t* shared_pointer(uint32_t cluster_address, size_t size) {
  const uint32_t rank_bits = cluster_address >> kRankShift;
  const uint32_t offset = cluster_address & ((1u << kRankShift) - 1);
  Block* block = current->block;
  if (rank_bits) {
    if (rank_bits > group.blocks.size()) return nullptr;
    block = group.blocks[rank_bits - 1];
  }
  if (offset + size > kSharedWindow) return nullptr;
  uint8_t* pointer = block->shared_base + offset;
  const Region* region = find_region(pointer);
  if (!region || pointer + size > region->base + region->size) return nullptr;
  return pointer;
}

static Block* prepare_block(size_t slot, uint3 index, unsigned rank) {
  if (block_pool.size() <= slot) {
    Block* fresh = new Block();
    void* window = mmap(nullptr, kSharedWindow, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    fresh->shared_base = static_cast<uint8_t*>(window);
    block_pool.push_back(fresh);
  }
  Block* block = block_pool[slot];
  const size_t threads = static_cast<size_t>(running.block.x) * running.block.y * running.block.z;
  const size_t warps = (threads + kWarpSize - 1) / kWarpSize;
  const size_t warpgroups = (threads + kWarpgroupSize - 1) / kWarpgroupSize;
  block->index = index;
  block->rank = rank;
  block->fibers.clear();
  for (NamedBarrier& barrier : block->barriers) barrier = NamedBarrier();
  block->warp_collectives.assign(warps, {});
  block->warpgroup_collectives.assign(warpgroups, Collective());
  block->warpgroups.assign(warpgroups, Warpgroup());
  for (Region* region : block->shared_regions) {  // reused from the previous block
    fill_with_poison(region);
    memset(static_cast<void*>(region->cells), 0, region->cell_count * sizeof(Cell));
  }
  return block;
}

static void drop_shared_regions() {
  for (Block* block : block_pool) {
    for (Region* region : block->shared_regions) destroy_region(region);
    block->shared_regions.clear();
  }
  variable_offsets.clear();
}

// ---------------------------------------------------------------------------------------------
// Overlapping launches.  They run one after another, but accesses of earlier launches are ordered
// before a thread's only if it has waited for them.
// ---------------------------------------------------------------------------------------------
static std::map<uint32_t, std::string> launches;  // names by last group id
static uint32_t ended_from;  // groups from here on have ended when the last launch has

const char* launch_of_group(uint32_t group_id) {
  return launches.lower_bound(group_id)->second.c_str();
}

void wait_for_launches_before() {
  running.has_waited = true;
  own_knowledge(current).seen.back() = 1;
}

static void begin_launch(bool may_overlap) {
  if (!may_overlap) {
    forget_accesses();
    launches.clear();
    ended_from = 1;
  }
  running.first_group = launches.empty() ? 1 : launches.rbegin()->first + 1;
  running.awaited_from = ended_from;
}

static void end_launch(uint32_t groups) {
  launches[running.first_group + groups - 1] = running.entry->name;
  // A launch that does not wait may end before earlier ones.
  if (!running.has_waited) ended_from = running.first_group;
}

// ---------------------------------------------------------------------------------------------
// The launch
// ---------------------------------------------------------------------------------------------
static int find_module_extent(dl_phdr_info* info, size_t, void*) {
  if (info->dlpi_addr != running.module_base) return 0;
  for (int i = 0; i < info->dlpi_phnum; i++)
    if (info->dlpi_phdr[i].p_type == PT_LOAD)
      running.module_end =
          std::max<uintptr_t>(running.module_end, running.module_base + info->dlpi_phdr[i].p_vaddr +
                                                      info->dlpi_phdr[i].p_memsz);
  return 1;
}

static std::vector<uint32_t> group_order(uint32_t groups) {
  std::vector<uint32_t> order(groups);
  for (uint32_t i = 0; i < groups; i++) order[i] = settings.policy == kReverse ? groups - 1 - i : i;
  if (settings.policy == kRandom)
    for (uint32_t i = groups; i > 1; i--) std::swap(order[i - 1], order[random_number() % i]);
  return order;
}

static void run_cluster(uint32_t cluster_index) {
  const dim3& grid = running.grid;
  const dim3& size = running.cluster;
  const uint32_t clusters_x = grid.x / size.x, clusters_y = grid.y / size.y;
  const uint3 corner = {cluster_index % clusters_x * size.x,
                        cluster_index / clusters_x % clusters_y * size.y,
                        cluster_index / (clusters_x * clusters_y) * size.z};
  std::vector<Block*> blocks;
  for (unsigned rank = 0; rank < size.x * size.y * size.z; rank++) {
    const uint3 index = {corner.x + rank % size.x, corner.y + rank / size.x % size.y,
                         corner.z + rank / (size.x * size.y)};
    blocks.push_back(prepare_block(rank, index, rank));
  }
  group.id = running.first_group + cluster_index;
  run_group(blocks);
  if (!running.aborting) check_async_state_at_group_end();
  if (settings.bank_conflicts) finish_bank_conflicts_of_block();
}

}  // namespace emulator

using namespace emulator;
extern "C" {
// Called by compiled code for the address of a `__shared__` (thread_local) variable.
void* __emutls_get_address(EmulatorSharedControl* control) { return shared_variable(control); }

Settings* emulator_settings() { return &settings; }
Statistics* emulator_statistics() { return &statistics; }

// `chosen`: linear indices of the clusters to run (count 0: all).  `may_overlap`: use programmatic
// stream serialization.
void emulator_launch(const Entry* entry, const uint32_t* grid, const uint32_t* block,
                     size_t dynamic_shared, void** parameters, const uint32_t* chosen,
                     size_t chosen_count, int may_overlap) {
  running = Launch();
  running.entry = entry;
  running.grid = dim3(grid[0], grid[1], grid[2]);
  running.block = dim3(block[0], block[1], block[2]);
  running.cluster = dim3(entry->cluster[0], entry->cluster[1], entry->cluster[2]);
  running.dynamic_shared = dynamic_shared;
  running.parameters = parameters;
  next_offset = kFirstOffset + dynamic_shared + kGap;
  Dl_info info;
  dladdr(reinterpret_cast<const void*>(entry->call), &info);
  running.module_base = reinterpret_cast<uintptr_t>(info.dli_fbase);
  dl_iterate_phdr(find_module_extent, nullptr);

  statistics = Statistics();
  reset_bank_conflicts();
  seed_random(settings.seed);
  begin_launch(may_overlap);
  forget_published();
  const dim3& size = running.cluster;
  const uint32_t groups = grid[0] / size.x * (grid[1] / size.y) * (grid[2] / size.z);
  if (chosen_count) {
    for (size_t i = 0; i < chosen_count && !running.aborting; i++) run_cluster(chosen[i]);
  } else {
    for (uint32_t index : group_order(groups)) {
      if (running.aborting) break;
      run_cluster(index);
    }
  }
  current = nullptr;
  end_launch(groups);
  drop_shared_regions();
}

// Allocates zeroed memory between two unmapped pages; pages are mapped lazily.
void* emulator_allocate(size_t size) {
  const size_t page = 4096;
  const size_t body = (size + page - 1) / page * page;
  void* memory = mmap(nullptr, body + 2 * page, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto* start = static_cast<uint8_t*>(memory);
  mprotect(start, page, PROT_NONE);
  mprotect(start + page + body, page, PROT_NONE);
  return start + page;
}
void emulator_free(void* memory, size_t size) {
  const size_t page = 4096;
  const size_t body = (size + page - 1) / page * page;
  munmap(static_cast<uint8_t*>(memory) - page, body + 2 * page);
}
}
