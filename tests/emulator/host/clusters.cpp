// Clusters: their barrier, and shared memory of other blocks.
#include <cstring>

#include "checker.h"

namespace emulator {

unsigned cluster_block_rank() { return current->block->rank; }
unsigned cluster_block_count() { return static_cast<unsigned>(group.blocks.size()); }

void check_block_is_alive(const Block* block, uint32_t pc) {
  if (block && block->alive == 0)
    report_fatal(ReportKind::kCluster, pc, 0,
                 "shared memory of block rank %u is used after that block returned", block->rank);
}

// A thread may not arrive twice in one phase; its cluster_phase records its arrivals.
void cluster_arrive() {
  Fiber* self = current;
  const uint32_t pc = EMULATOR_CALLER;
  if (self->cluster_phase != group.cluster_phase)
    report_fatal(ReportKind::kCluster, pc, 0,
                 "a thread arrives twice at the cluster barrier without waiting");
  self->cluster_phase++;
  release_to(*group.cluster_arrivals, self);
  if (++group.cluster_arrived < group.alive) return;
  if (group.alive < static_cast<int>(group.fibers.size()))
    report(ReportKind::kBarrierDivergence, pc, 0,
           "%d threads of the cluster returned without reaching this barrier",
           static_cast<int>(group.fibers.size()) - group.alive);
  group.cluster_arrived = 0;
  group.cluster_phase++;
  group.cluster_released = Handle<Knowledge>::make(*group.cluster_arrivals);
  for (Fiber* fiber : group.cluster_waiting) make_runnable(fiber);
  group.cluster_waiting.clear();
}

void cluster_wait() {
  Fiber* self = current;
  const uint32_t pc = EMULATOR_CALLER;
  self->wait_pc = pc;
  if (!self->cluster_phase)
    report_fatal(ReportKind::kCluster, pc, 0, "a wait at the cluster barrier with no arrival");
  if (self->cluster_phase > group.cluster_phase) {
    group.cluster_waiting.push_back(self);
    block_until_runnable(self, FiberState::kClusterBarrier);
  }
  if (settings.check) acquire_from(self, *group.cluster_released);
}

uint32_t map_to_block(uint32_t address, unsigned block_rank) {
  constexpr uint32_t kOffsetBits = 24;
  if (block_rank >= group.blocks.size())
    report_fatal(ReportKind::kCluster, EMULATOR_CALLER, 0, "block rank %u in a cluster of %zu",
                 block_rank, group.blocks.size());
  return (address & ((1u << kOffsetBits) - 1)) | (block_rank + 1) << kOffsetBits;
}

static uint8_t* distributed_pointer(uint32_t address, size_t size, unsigned flags, uint32_t pc) {
  // The variable may not have been used by the other block yet.
  uint8_t* pointer = shared_pointer(address, size);
  if (!pointer)
    report_fatal(ReportKind::kOutOfBounds, pc, 0,
                 "%s of %zu bytes at cluster address 0x%x, where no shared variable lies",
                 flags & kWrite ? "write" : "read", size, address);
  if (const Region* region = find_region(pointer)) check_block_is_alive(region->block, pc);
  if (settings.check) check_access(current, pointer, size, flags, pc);
  return pointer;
}

void cluster_load(void* value, uint32_t cluster_address, size_t size) {
  memcpy(value, distributed_pointer(cluster_address, size, kRead, EMULATOR_CALLER), size);
}

}  // namespace emulator
