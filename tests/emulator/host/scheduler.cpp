// Fibers and their scheduling; vector clocks.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "checker.h"
#include "runtime.h"

namespace emulator {

Settings settings = {1, kFirstIn, kLate, 0, 1, 0};
Statistics statistics = {};
Fiber* current = nullptr;
Group group;
Launch running;

// ---------------------------------------------------------------------------------------------
// Random numbers (xorshift; seeded per launch)
// ---------------------------------------------------------------------------------------------
static uint64_t random_state = 1;
void seed_random(uint32_t seed) {
  random_state = seed * 0x9E3779B97F4A7C15ull + 88172645463325252ull;
}
uint32_t random_number() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<uint32_t>(random_state >> 16);
}

// ---------------------------------------------------------------------------------------------
// Stacks and context switches
// ---------------------------------------------------------------------------------------------
#if !defined(__x86_64__)
#error "the fiber switch is written for x86-64 only"
#endif
// Saves the callee-saved registers on the current stack and its address in *save; resumes the stack
// `to`.
extern "C" void emulator_switch_stack(void** save, void* to);
asm(R"(
.text
.globl emulator_switch_stack
.type emulator_switch_stack, @function
emulator_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch_stack, . - emulator_switch_stack
)");

constexpr size_t kGuardSize = 4096;
uint8_t* stack_arena = nullptr;
static std::vector<Fiber*> fiber_pool;
static void* main_stack_pointer = nullptr;

static void* map_reserved(size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
  return memory;
}

static Fiber* pooled_fiber(size_t index) {
  if (!stack_arena) stack_arena = static_cast<uint8_t*>(map_reserved(kStackSize * kMaxFibers));
  while (fiber_pool.size() <= index) {
    Fiber* fiber = new Fiber();
    fiber->stack = stack_arena + fiber_pool.size() * kStackSize;
    mprotect(fiber->stack, kGuardSize, PROT_NONE);  // too large a kernel frame faults here
    fiber_pool.push_back(fiber);
  }
  return fiber_pool[index];
}

static void switch_to(Fiber* from, Fiber* to) {
  statistics.switches++;
  current = to;
  emulator_switch_stack(from ? &from->stack_pointer : &main_stack_pointer,
                        to ? to->stack_pointer : main_stack_pointer);
}

// ---------------------------------------------------------------------------------------------
// The ready queue
// ---------------------------------------------------------------------------------------------
static std::deque<Fiber*> ready_queue;

void make_runnable(Fiber* fiber) {
  fiber->state = FiberState::kRunnable;
  ready_queue.push_back(fiber);
}

static Fiber* next_fiber() {
  if (ready_queue.empty()) return nullptr;
  size_t pick = 0;
  if (settings.policy == kReverse) pick = ready_queue.size() - 1;
  if (settings.policy == kRandom) pick = random_number() % ready_queue.size();
  std::swap(ready_queue[pick], pick == 0 ? ready_queue.front() : ready_queue.back());
  Fiber* fiber = pick == 0 ? ready_queue.front() : ready_queue.back();
  if (pick == 0)
    ready_queue.pop_front();
  else
    ready_queue.pop_back();
  return fiber;
}

const char* state_name(FiberState state) {
  switch (state) {
    case FiberState::kRunnable:
      return "able to run";
    case FiberState::kBlockBarrier:
      return "at a barrier";
    case FiberState::kCollective:
      return "in a warp or warpgroup operation";
    case FiberState::kMbarrier:
      return "waiting on an mbarrier";
    case FiberState::kClusterBarrier:
      return "at the cluster barrier";
    case FiberState::kDone:
      return "returned";
  }
  return "?";
}

// Reports that no thread can run and no copy is in flight, with the waiting threads and lines.
[[noreturn]] static void report_deadlock() {
  std::map<std::pair<FiberState, uint32_t>, std::pair<int, Fiber*>> waiting;
  int returned = 0;
  for (Fiber* fiber : group.fibers) {
    if (fiber->state == FiberState::kDone) {
      returned++;
      continue;
    }
    auto& entry = waiting[{fiber->state, fiber->wait_pc}];
    if (entry.first++ == 0) entry.second = fiber;
  }
  std::string text;
  bool at_block_barrier = false;
  uint32_t expect_pc = 0;
  Fiber* first = nullptr;
  Fiber* at_transaction = nullptr;
  for (auto& [key, value] : waiting) {
    if (!first || key.first == FiberState::kBlockBarrier) first = value.second;
    at_block_barrier |= key.first == FiberState::kBlockBarrier;
    char state[80];
    snprintf(state, sizeof state, " %d %s {line %u}", value.first, state_name(key.first),
             key.second);
    text += state;
    if (key.first == FiberState::kMbarrier) {
      const uint32_t known = expect_pc;
      text += " (" + describe_mbarrier(value.second->wait_mbarrier, &expect_pc) + ")";
      if (expect_pc != known) at_transaction = value.second;
    }
    text += ";";
  }
  current = at_transaction ? at_transaction : first;
  const bool only_barriers = at_block_barrier && waiting.size() == 1;
  if (expect_pc)
    report_fatal(ReportKind::kTransactionCount, expect_pc, current->wait_pc,
                 "the bytes expected never arrive: %d threads returned;%s", returned, text.c_str());
  if (only_barriers || (at_block_barrier && returned))
    report_fatal(ReportKind::kBarrierDivergence, first->wait_pc, 0,
                 "not every thread reaches this barrier: %d threads returned;%s", returned,
                 text.c_str());
  report_fatal(ReportKind::kDeadlock, first->wait_pc, 0, "nobody can run: %d threads returned;%s",
               returned, text.c_str());
}

// Runs the next fiber because the current one is blocked, yielding or done; returns when it is
// resumed.
static void schedule() {
  Fiber* self = current;
  for (;;) {
    if (settings.async_timing == kAnyTime && (random_number() & 7) == 0)
      run_one_async_operation(false);
    Fiber* next = next_fiber();
    if (next == self && next) return;
    if (next) {
      switch_to(self, next);
      return;
    }
    if (run_one_async_operation(settings.async_timing != kAnyTime)) continue;
    if (group.alive == 0) {
      switch_to(self, nullptr);
      return;
    }
    report_deadlock();
  }
}

void block_until_runnable(Fiber* fiber, FiberState state) {
  fiber->state = state;
  schedule();
}

void yield() {
  // Queued at the far end, so that every other fiber runs first.
  current->state = FiberState::kRunnable;
  if (settings.policy == kReverse)
    ready_queue.push_front(current);
  else
    ready_queue.push_back(current);
  schedule();
}

[[noreturn]] void abort_launch() {
  running.aborting = true;
  Fiber* self = current;
  switch_to(self, nullptr);
  __builtin_unreachable();
}

static void fiber_main() {
  running.entry->call(running.parameters);
  Fiber* self = current;
  check_state_at_exit(self);
  self->state = FiberState::kDone;
  self->block->alive--;
  group.alive--;
  complete_barriers_after_exit(self->block);
  schedule();
  __builtin_unreachable();
}

static void prepare_stack(Fiber* fiber) {
  // Six callee-saved registers, the entry address, and the alignment expected by a function.
  void** top = reinterpret_cast<void**>(fiber->stack + kStackSize - 64);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(fiber_main);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  fiber->stack_pointer = top;
}

static Fiber* start_fiber(Block* block, unsigned thread, const KnowledgeHandle& knowledge) {
  Fiber* fiber = pooled_fiber(group.fibers.size());
  const dim3& extent = running.block;
  fiber->block = block;
  fiber->thread = thread;
  fiber->warp = thread / kWarpSize;
  fiber->lane = thread % kWarpSize;
  fiber->thread_index = {thread % extent.x, thread / extent.x % extent.y,
                         thread / (extent.x * extent.y)};
  fiber->participant = static_cast<unsigned>(group.fibers.size());
  fiber->clock = 1;
  fiber->knowledge = knowledge;
  fiber->grid_known = {};
  fiber->grid_fenced = {};
  fiber->wait_mbarrier = nullptr;
  fiber->cluster_phase = 0;
  fiber->wait_pc = 0;
  fiber->open_copies.clear();
  fiber->copy_groups.clear();
  fiber->open_stores.clear();
  fiber->store_groups.clear();
  prepare_stack(fiber);
  group.fibers.push_back(fiber);
  block->fibers.push_back(fiber);
  make_runnable(fiber);
  return fiber;
}

// Runs the blocks of the group until they exit or the launch is aborted.
void run_group(const std::vector<Block*>& blocks) {
  const unsigned threads = running.block.x * running.block.y * running.block.z;
  group.blocks = blocks;
  group.fibers.clear();
  group.participants = threads * static_cast<unsigned>(blocks.size()) + kPseudoThreads + 1;
  group.pseudo_used = 0;
  group.pseudo_clock.assign(kPseudoThreads, 0);
  group.async_operations.clear();
  group.cluster_arrived = 0;
  group.cluster_waiting.clear();
  group.cluster_arrivals = Handle<Knowledge>::make(group.participants);
  group.cluster_released = group.cluster_arrivals;
  group.cluster_phase = 0;
  ready_queue.clear();
  reset_async_state();
  auto nothing_known = Handle<Knowledge>::make(group.participants);
  for (Block* block : blocks) {
    block->alive = static_cast<int>(threads);
    for (unsigned thread = 0; thread < threads; thread++) start_fiber(block, thread, nothing_known);
  }
  group.alive = static_cast<int>(group.fibers.size());
  statistics.blocks += blocks.size();
  switch_to(nullptr, next_fiber());
  current = nullptr;
}

bool run_one_async_operation(bool in_order) {
  auto& operations = group.async_operations;
  if (operations.empty()) return false;
  const size_t pick = in_order ? 0 : random_number() % operations.size();
  AsyncOperation operation = std::move(operations[pick]);
  operations.erase(operations.begin() + static_cast<long>(pick));
  Fiber* interrupted = current;
  current = operation.issuer;  // the issuing fiber, for reports
  operation.land();
  current = interrupted;
  return true;
}

// ---------------------------------------------------------------------------------------------
// Vector clocks
// ---------------------------------------------------------------------------------------------
static void raise_to(std::vector<uint32_t>& into, const std::vector<uint32_t>& other) {
  uint32_t* a = into.data();
  const uint32_t* b = other.data();
  for (size_t i = 0, n = into.size(); i < n; i++) a[i] = std::max(a[i], b[i]);
}

void Knowledge::merge(const Knowledge& other) {
  raise_to(seen, other.seen);
  raise_to(fenced, other.fenced);
}

Knowledge& own_knowledge(Fiber* fiber) {
  if (fiber->knowledge.is_shared())
    fiber->knowledge = Handle<Knowledge>::make(*fiber->knowledge);
  return *fiber->knowledge;
}

void advance_clock(Fiber* fiber) { fiber->clock++; }

void release_to(Knowledge& into, Fiber* fiber) {
  into.merge(*fiber->knowledge);
  into.seen[fiber->participant] = fiber->clock;
  advance_clock(fiber);
}

void acquire_from(Fiber* fiber, const Knowledge& from) { own_knowledge(fiber).merge(from); }

static void merge_grid(GridKnowledgeHandle& into, const GridKnowledgeHandle& other) {
  if (!other || into == other) return;
  if (!into) {
    into = other;
    return;
  }
  auto merged = Handle<GridKnowledge>::make(*into);
  for (auto& [id, knowledge] : *other) {
    KnowledgeHandle& slot = (*merged)[id];
    if (slot == knowledge) continue;
    if (!slot) {
      slot = knowledge;
      continue;
    }
    auto both = Handle<Knowledge>::make(*slot);
    both->merge(*knowledge);
    slot = both;
  }
  into = merged;
}

void join_knowledge(const std::vector<Fiber*>& participants) {
  if (!settings.check || participants.empty()) return;
  auto joined = Handle<Knowledge>::make(*participants[0]->knowledge);
  const Knowledge* merged_last = participants[0]->knowledge.get();
  GridKnowledgeHandle known, fenced;
  for (Fiber* fiber : participants) {
    if (fiber->knowledge.get() != merged_last) joined->merge(*fiber->knowledge);
    merged_last = fiber->knowledge.get();
    merge_grid(known, fiber->grid_known);
    merge_grid(fenced, fiber->grid_fenced);
  }
  for (Fiber* fiber : participants) joined->seen[fiber->participant] = fiber->clock;
  for (Fiber* fiber : participants) {
    fiber->knowledge = joined;
    fiber->grid_known = known;
    fiber->grid_fenced = fenced;
    advance_clock(fiber);
  }
}

// ---------------------------------------------------------------------------------------------
// Order between groups: a fence and then an atomic publish clocks; a group that performs an atomic
// on the same address and then a fence acquires them.
// ---------------------------------------------------------------------------------------------
static std::map<const void*, GridKnowledgeHandle> published;
void forget_published() { published.clear(); }

void thread_fence() {
  if (!settings.check) return;
  Fiber* self = current;
  auto snapshot = Handle<Knowledge>::make(group.participants);
  release_to(*snapshot, self);
  auto fenced = Handle<GridKnowledge>::make();
  if (self->grid_known) *fenced = *self->grid_known;
  (*fenced)[group.id] = snapshot;
  GridKnowledgeHandle handle = fenced;
  merge_grid(self->grid_fenced, handle);
}

void publish_through_atomic(const void* address) {
  Fiber* self = current;
  GridKnowledgeHandle& slot = published[address];
  merge_grid(self->grid_known, slot);
  if (self->grid_known) {
    auto mine = self->grid_known->find(group.id);
    if (mine != self->grid_known->end()) acquire_from(self, *mine->second);
  }
  merge_grid(slot, self->grid_fenced);
}

}  // namespace emulator
