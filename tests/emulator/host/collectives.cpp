// Block barriers, and the rendezvous of warps and warpgroups.
#include <cstring>

#include "checker.h"

namespace emulator {

// ---------------------------------------------------------------------------------------------
// Named barriers; __syncthreads() is number 0 over the whole block
// ---------------------------------------------------------------------------------------------
static void release_barrier(NamedBarrier& barrier) {
  join_knowledge(barrier.participants);
  for (Fiber* fiber : barrier.participants)
    if (fiber->state == FiberState::kBlockBarrier && fiber != current) make_runnable(fiber);
  barrier.participants.clear();
  barrier.pcs.clear();
  barrier.predicates.clear();
  barrier.arrived = 0;
}

void complete_barriers_after_exit(Block* block) {
  // On the GPU, exited threads count as arrived, so the others continue.  It is reported because a
  // thread must not exit before a barrier of the whole block.
  for (NamedBarrier& barrier : block->barriers) {
    if (!barrier.arrived || barrier.needed || barrier.arrived < block->alive) continue;
    report(ReportKind::kBarrierDivergence, barrier.pc, 0,
           "%d of the block's threads returned without reaching this barrier",
           static_cast<int>(block->fibers.size()) - block->alive);
    Fiber* returning = current;
    current = nullptr;  // wake all threads of the barrier
    release_barrier(barrier);
    current = returning;
  }
}

// Arrives; returns true if the barrier is complete.  `needed` 0: every thread of the block.
static bool arrive(Fiber* self, NamedBarrier& barrier, int needed, bool block_wide, uint32_t pc) {
  if (!barrier.arrived) {
    barrier.needed = needed;
    barrier.pc = pc;
    barrier.mixed = false;
  } else if (barrier.needed != needed) {
    report_fatal(ReportKind::kBarrierDivergence, pc, barrier.pc,
                 "threads meet at one barrier with different counts: %d here, %d at {line %u}",
                 needed, barrier.needed, barrier.pc);
  } else if (barrier.mixed || barrier.pc != pc) {
    barrier.mixed = true;
    // __syncthreads(): the same line for all threads.  A named barrier: the same line per warp.
    for (size_t i = 0; i < barrier.participants.size(); i++) {
      const bool must_agree = block_wide || barrier.participants[i]->warp == self->warp;
      if (!must_agree || barrier.pcs[i] == pc) continue;
      report(ReportKind::kBarrierDivergence, pc, barrier.pcs[i],
             "threads meet at one barrier from different lines: here and at {line %u}",
             barrier.pcs[i]);
      break;
    }
  }
  self->wait_pc = pc;
  barrier.arrived++;
  barrier.participants.push_back(self);
  barrier.pcs.push_back(pc);
  return barrier.arrived >= (needed ? needed : self->block->alive);
}

static void check_nobody_returned(Fiber* self, uint32_t pc) {
  const int returned = static_cast<int>(self->block->fibers.size()) - self->block->alive;
  if (returned)
    report(ReportKind::kBarrierDivergence, pc, 0,
           "%d of the block's threads returned without reaching this barrier", returned);
}

static void wait_at(Fiber* self, NamedBarrier& barrier, bool complete) {
  if (complete)
    release_barrier(barrier);
  else
    block_until_runnable(self, FiberState::kBlockBarrier);
  if (complete && settings.policy == kRandom && (random_number() & 3) == 0) yield();
}

void synchronise_block() {
  Fiber* self = current;
  const uint32_t pc = EMULATOR_CALLER;
  NamedBarrier& barrier = self->block->barriers[0];
  const bool complete = arrive(self, barrier, 0, true, pc);
  if (complete) check_nobody_returned(self, pc);
  wait_at(self, barrier, complete);
}

int synchronise_block_reduce(int predicate, BarrierReduction reduction) {
  Fiber* self = current;
  const uint32_t pc = EMULATOR_CALLER;
  NamedBarrier& barrier = self->block->barriers[0];
  barrier.predicates.push_back(predicate != 0);
  const bool complete = arrive(self, barrier, 0, true, pc);
  if (complete) {
    check_nobody_returned(self, pc);
    int count = 0;
    for (int value : barrier.predicates) count += value;
    const int total = static_cast<int>(barrier.predicates.size());
    barrier.reduction_result = reduction == BarrierReduction::kOr    ? count > 0
                               : reduction == BarrierReduction::kAnd ? count == total
                                                                     : count;
  }
  wait_at(self, barrier, complete);
  // The next use of the barrier cannot complete before every thread has read this.
  return barrier.reduction_result;
}

void named_barrier(int id, int threads, bool wait) {
  Fiber* self = current;
  const uint32_t pc = EMULATOR_CALLER;
  if (id < 0 || id >= kNamedBarriers || threads <= 0 || threads % kWarpSize)
    report_fatal(ReportKind::kBarrierDivergence, pc, 0,
                 "barrier %d for %d threads: ids are 0 to 15, counts multiples of 32", id, threads);
  NamedBarrier& barrier = self->block->barriers[id];
  const bool complete = arrive(self, barrier, threads, false, pc);
  if (wait) {
    wait_at(self, barrier, complete);
  } else if (complete) {
    release_barrier(barrier);
  }
}

// ---------------------------------------------------------------------------------------------
// Rendezvous
// ---------------------------------------------------------------------------------------------
void meet(Collective& collective, int operation, unsigned mask, int needed, int slot,
          void* argument, CollectiveBody body, uint32_t pc) {
  Fiber* self = current;
  self->wait_pc = pc;
  if (!collective.arrived) {
    collective.operation = operation;
    collective.mask = mask;
    collective.pc = pc;
    memset(collective.arguments, 0, sizeof collective.arguments);
  } else if (collective.operation != operation) {
    report_fatal(ReportKind::kWarpDivergence, pc, collective.pc,
                 "threads of one warp meet in different operations: here and at {line %u}",
                 collective.pc);
  }
  collective.arguments[slot] = argument;
  collective.fibers[collective.arrived++] = self;
  if (collective.arrived < needed) {
    block_until_runnable(self, FiberState::kCollective);
    return;
  }
  const int arrived = collective.arrived;
  collective.arrived = 0;
  body(collective.arguments, mask);
  for (int i = 0; i < arrived - 1; i++) make_runnable(collective.fibers[i]);
  if (settings.policy == kRandom && (random_number() & 3) == 0) yield();
}

static unsigned full_warp_mask(const Fiber* fiber) {
  const size_t first = fiber->warp * kWarpSize;
  const size_t live = fiber->block->fibers.size() - first;
  return live >= kWarpSize ? 0xffffffffu : (1u << live) - 1;
}

void warp_meet(int operation, unsigned mask, void* argument, CollectiveBody body, uint32_t pc) {
  Fiber* self = current;
  if (!(mask >> self->lane & 1))
    report_fatal(ReportKind::kWarpDivergence, pc, 0, "lane %u is not in its own mask %08x",
                 self->lane, mask);
  const unsigned present = mask & full_warp_mask(self);
  auto& collectives = self->block->warp_collectives[self->warp];
  for (auto& [other_mask, other] : collectives)
    if (other_mask != mask && (other_mask & mask) && other.arrived)
      report_fatal(ReportKind::kWarpDivergence, pc, other.pc,
                   "masks of one warp overlap but differ: %08x here, %08x at {line %u}", mask,
                   other_mask, other.pc);
  meet(collectives[mask], operation, mask, __builtin_popcount(present),
       static_cast<int>(self->lane), argument, body, pc);
}

void warpgroup_meet(int operation, void* argument, CollectiveBody body, uint32_t pc) {
  Fiber* self = current;
  const unsigned index = self->thread / kWarpgroupSize;
  if ((index + 1) * kWarpgroupSize > self->block->fibers.size())
    report_fatal(ReportKind::kWarpDivergence, pc, 0,
                 "a warpgroup operation in the last, incomplete warpgroup of the block");
  meet(self->block->warpgroup_collectives[index], operation, 0xffffffffu, kWarpgroupSize,
       static_cast<int>(self->thread % kWarpgroupSize), argument, body, pc);
}

// ---------------------------------------------------------------------------------------------
// Warp operations
// ---------------------------------------------------------------------------------------------
enum WarpOperation { kSyncWarp = 1, kBallot, kMatch, kElect, kShuffle };

static Fiber* lane_fiber(unsigned lane) {
  return current->block->fibers[current->warp * kWarpSize + lane];
}

void synchronise_warp(unsigned mask) {
  auto body = [](void** arguments, unsigned lanes) {
    std::vector<Fiber*> participants;
    for (unsigned lane = 0; lane < kWarpSize; lane++)
      if (lanes >> lane & 1 && arguments[lane]) participants.push_back(lane_fiber(lane));
    join_knowledge(participants);
  };
  warp_meet(kSyncWarp, mask, current, body, EMULATOR_CALLER);
}

struct ShuffleArgument {
  uint32_t value[4], result[4];
  int words, operand, width;
};

template <ShuffleMode Mode>
static void shuffle_body(void** arguments, unsigned mask) {
  for (int lane = 0; lane < kWarpSize; lane++) {
    auto* self = static_cast<ShuffleArgument*>(arguments[lane]);
    if (!self) continue;
    const int segment = lane & ~(self->width - 1);
    int source = Mode == ShuffleMode::kIndex  ? segment + (self->operand & (self->width - 1))
                 : Mode == ShuffleMode::kUp   ? lane - self->operand
                 : Mode == ShuffleMode::kDown ? lane + self->operand
                                              : lane ^ self->operand;
    // XOR may read lower segments, but not higher ones.
    const bool too_low = source < segment && Mode != ShuffleMode::kXor;
    if (too_low || source >= segment + self->width) source = lane;
    auto* other = static_cast<ShuffleArgument*>(arguments[source]);
    if (other && mask >> source & 1)
      memcpy(self->result, other->value, sizeof self->result);
    else  // undefined for an inactive source lane: an easily recognized poison
      for (uint32_t& word : self->result) word = 0x7fc0dead;
  }
}

void shuffle(unsigned mask, uint32_t* value, int words, int operand, int width, ShuffleMode mode) {
  ShuffleArgument argument = {};
  memcpy(argument.value, value, sizeof(uint32_t) * static_cast<size_t>(words));
  argument.words = words;
  argument.operand = operand;
  argument.width = width;
  CollectiveBody body = mode == ShuffleMode::kIndex  ? shuffle_body<ShuffleMode::kIndex>
                        : mode == ShuffleMode::kUp   ? shuffle_body<ShuffleMode::kUp>
                        : mode == ShuffleMode::kDown ? shuffle_body<ShuffleMode::kDown>
                                                     : shuffle_body<ShuffleMode::kXor>;
  warp_meet(kShuffle + static_cast<int>(mode), mask, &argument, body, EMULATOR_CALLER);
  memcpy(value, argument.result, sizeof(uint32_t) * static_cast<size_t>(words));
}

struct VoteArgument {
  uint64_t key;
  unsigned result;
};

unsigned ballot(unsigned mask, bool predicate) {
  VoteArgument argument = {predicate, 0};
  auto body = [](void** arguments, unsigned) {
    unsigned votes = 0;
    for (int lane = 0; lane < kWarpSize; lane++)
      if (arguments[lane] && static_cast<VoteArgument*>(arguments[lane])->key) votes |= 1u << lane;
    for (int lane = 0; lane < kWarpSize; lane++)
      if (arguments[lane]) static_cast<VoteArgument*>(arguments[lane])->result = votes;
  };
  warp_meet(kBallot, mask, &argument, body, EMULATOR_CALLER);
  return argument.result;
}

unsigned match(unsigned mask, uint64_t key) {
  VoteArgument argument = {key, 0};
  auto body = [](void** arguments, unsigned) {
    for (int lane = 0; lane < kWarpSize; lane++)
      for (int other = 0; other < kWarpSize; other++)
        if (arguments[lane] && arguments[other] &&
            static_cast<VoteArgument*>(arguments[lane])->key ==
                static_cast<VoteArgument*>(arguments[other])->key)
          static_cast<VoteArgument*>(arguments[lane])->result |= 1u << other;
  };
  warp_meet(kMatch, mask, &argument, body, EMULATOR_CALLER);
  return argument.result;
}

unsigned active_mask() {
  // Fibers diverge freely, so all lanes that have not exited count as active.
  unsigned mask = 0;
  const unsigned present = full_warp_mask(current);
  for (unsigned lane = 0; lane < kWarpSize; lane++)
    if (present >> lane & 1 && lane_fiber(lane)->state != FiberState::kDone) mask |= 1u << lane;
  return mask;
}

bool elect_one() {
  VoteArgument argument = {};
  auto body = [](void** arguments, unsigned) {
    for (int lane = 0; lane < kWarpSize; lane++)
      if (arguments[lane]) {  // the lowest lane, as the GPU does
        static_cast<VoteArgument*>(arguments[lane])->result = 1;
        return;
      }
  };
  warp_meet(kElect, 0xffffffffu, &argument, body, EMULATOR_CALLER);
  return argument.result != 0;
}

}  // namespace emulator
