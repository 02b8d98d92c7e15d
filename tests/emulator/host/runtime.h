// Internals of the runtime: fibers, blocks, groups of concurrent blocks, settings.
//
// A CUDA thread is a fiber.  A cluster (or a single block without a declared cluster) is a Group;
// groups run one after another, the blocks of a group concurrently.
#ifndef CUPYCONV_EMULATOR_RUNTIME_H
#define CUPYCONV_EMULATOR_RUNTIME_H

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "emulator.h"

namespace emulator {

constexpr int kWarpSize = 32;
constexpr int kWarpgroupSize = 128;
constexpr int kNamedBarriers = 16;
// Asynchronous engines take part in the vector clocks as pseudo threads, one per mbarrier.
constexpr unsigned kPseudoThreads = 64;

// ---------------------------------------------------------------------------------------------
// Settings, written by Python before a launch (module.py declares the same fields)
// ---------------------------------------------------------------------------------------------
enum SchedulePolicy : uint32_t { kFirstIn, kReverse, kRandom };
enum AsyncTiming : uint32_t { kLate, kEarly, kAnyTime };
struct Settings {
  uint32_t check;           // 0: no access is checked
  uint32_t policy;          // SchedulePolicy
  uint32_t async_timing;    // AsyncTiming: when an asynchronous copy lands
  uint32_t preempt_period;  // mean accesses between yields of a thread; 0: never
  uint32_t seed;
  uint32_t bank_conflicts;  // 1: count wavefronts of shared accesses
};
extern Settings settings;

struct Statistics {
  uint64_t switches;
  uint64_t accesses;
  uint64_t blocks;
};
extern Statistics statistics;

uint32_t random_number();

// A counted reference.  std::shared_ptr needs the compiled C++ library, which zig would build.
template <typename T>
class Handle {
  struct Counted {
    T value;
    size_t owners;
  };
  Counted* counted = nullptr;

 public:
  template <typename... Arguments>
  static Handle make(Arguments&&... arguments) {
    Handle handle;
    handle.counted = new Counted{T(std::forward<Arguments>(arguments)...), 1};
    return handle;
  }
  Handle() = default;
  Handle(const Handle& other) : counted(other.counted) {
    if (counted) counted->owners++;
  }
  Handle& operator=(Handle other) {
    std::swap(counted, other.counted);
    return *this;
  }
  ~Handle() {
    if (counted && --counted->owners == 0) delete counted;
  }
  bool is_shared() const { return counted && counted->owners > 1; }
  T* get() const { return &counted->value; }
  T& operator*() const { return counted->value; }
  T* operator->() const { return get(); }
  explicit operator bool() const { return counted; }
  bool operator==(const Handle& other) const { return counted == other.counted; }
};

// ---------------------------------------------------------------------------------------------
// Vector clocks
// ---------------------------------------------------------------------------------------------
// A thread's vector clock: for every thread (and pseudo thread) of the group, the clock up to which
// its accesses happened before (`seen`), and up to which a fence has made its writes visible to the
// asynchronous proxy (`fenced`).  A thread's own clock is in its Fiber, so all threads that leave a
// barrier share one Knowledge.  The last participant represents the earlier launches, which have
// ended for threads that have seen it.
struct Knowledge {
  std::vector<uint32_t> seen, fenced;
  explicit Knowledge(size_t participants) : seen(participants, 0), fenced(participants, 0) {}
  void merge(const Knowledge& other);
  bool has_waited() const { return seen.back(); }
};
using KnowledgeHandle = Handle<Knowledge>;

// Clocks, by group, that a thread of a finished group published through an atomic after a fence.
// With them, a reduction by the last block passes the checker.
using GridKnowledge = std::map<uint32_t, KnowledgeHandle>;
using GridKnowledgeHandle = Handle<GridKnowledge>;

// ---------------------------------------------------------------------------------------------
// Fibers
// ---------------------------------------------------------------------------------------------
enum class FiberState { kRunnable, kBlockBarrier, kCollective, kMbarrier, kClusterBarrier, kDone };

struct CopyOperation {  // one cp.async
  uint8_t* destination;
  const uint8_t* source;
  int size, source_size;
  uint32_t pc;
};
struct StoreOperation {  // one TMA store, and the shared bytes that it still reads
  uint8_t* source;
  size_t size;
  uint32_t pc;
  std::function<void()> perform;
  bool performed, read_finished;
};

struct Block;
struct Fiber {
  uint3 thread_index;
  unsigned thread;  // linear index in the block
  unsigned warp, lane;
  unsigned participant;  // index in the group, and in every vector clock
  Block* block;

  FiberState state;
  void* stack_pointer;
  uint8_t* stack;
  uint32_t wait_pc;  // code address where it is blocked
  uint64_t* wait_mbarrier;
  unsigned cluster_phase;  // arrivals at the cluster barrier so far

  uint32_t clock;
  KnowledgeHandle knowledge;
  GridKnowledgeHandle grid_known;   // acquired from other groups
  GridKnowledgeHandle grid_fenced;  // what a release by this thread publishes


  std::vector<CopyOperation> open_copies;
  std::deque<std::vector<CopyOperation>> copy_groups;
  std::vector<StoreOperation> open_stores;
  std::deque<std::vector<StoreOperation>> store_groups;
};

// ---------------------------------------------------------------------------------------------
// Blocks
// ---------------------------------------------------------------------------------------------
struct NamedBarrier {
  int needed = 0;  // 0: the whole block
  int arrived = 0;
  uint32_t pc = 0;                   // where the first thread arrived
  bool mixed = false;                // a thread arrived elsewhere
  std::vector<Fiber*> participants;  // waiting or arrived, in order
  std::vector<int> predicates;
  std::vector<uint32_t> pcs;  // where each participant arrived
  int reduction_result = 0;
};

using CollectiveBody = void (*)(void** arguments, unsigned mask);
// Rendezvous of a warp or warpgroup: each thread posts its argument, the last one computes.
struct Collective {
  int operation = 0;
  unsigned mask = 0;
  uint32_t pc = 0;
  int arrived = 0;
  void* arguments[kWarpgroupSize] = {};
  Fiber* fibers[kWarpgroupSize] = {};
};

struct PendingMma {
  float* accumulators[kWarpgroupSize];
  std::vector<float> result;  // 64 x n
  int n;
  uint32_t pc;
  std::vector<std::pair<uint8_t*, int>> operands;  // shared bytes still being read
};
struct Warpgroup {
  bool fenced = false;
  int registers = 0;  // per thread, as setmaxnreg set them last; 0 before
  uint32_t registers_pc = 0;
  std::vector<PendingMma> open;
  std::deque<std::vector<PendingMma>> groups;
};

struct Region;
struct Block {
  uint3 index;
  unsigned rank;  // in its cluster
  std::vector<Fiber*> fibers;
  int alive = 0;
  NamedBarrier barriers[kNamedBarriers];
  // Keyed by mask: halves of a warp may be in different collectives.
  std::vector<std::map<unsigned, Collective>> warp_collectives;
  std::vector<Collective> warpgroup_collectives;
  std::vector<Warpgroup> warpgroups;
  uint8_t* shared_base = nullptr;  // start of its shared window
  std::vector<Region*> shared_regions;
};

// ---------------------------------------------------------------------------------------------
// The running launch
// ---------------------------------------------------------------------------------------------
// A copy in flight: `land` moves its bytes and wakes the waiting threads.
struct AsyncOperation {
  std::function<void()> land;
  Fiber* issuer;
  uint32_t pc;
};

struct Group {
  uint32_t id = 0;
  std::vector<Block*> blocks;
  std::vector<Fiber*> fibers;
  int alive = 0;
  unsigned participants = 0;  // threads, pseudo threads, and one for the earlier launches
  unsigned pseudo_used = 0;
  std::vector<uint32_t> pseudo_clock;
  std::deque<AsyncOperation> async_operations;
  int cluster_arrived = 0;
  std::vector<Fiber*> cluster_waiting;
  KnowledgeHandle cluster_arrivals, cluster_released;
  unsigned cluster_phase = 0;
};

struct Launch {
  const Entry* entry = nullptr;
  dim3 grid, block, cluster;
  size_t dynamic_shared = 0;
  void** parameters = nullptr;
  uintptr_t module_base = 0, module_end = 0;
  bool aborting = false;
  // Group ids continue through overlapping launches.  Ids below `first_group` belong to earlier
  // launches; a wait covers those from `awaited_from` on.
  uint32_t first_group = 1, awaited_from = 1;
  bool has_waited = false;
};

extern Fiber* current;
extern Group group;
extern Launch running;

constexpr size_t kStackSize = 256 << 10;
constexpr size_t kMaxFibers = 16 * 1024;  // sixteen blocks of 1024 threads
extern uint8_t* stack_arena;
inline bool on_a_fiber_stack(const void* address) {
  return static_cast<size_t>(static_cast<const uint8_t*>(address) - stack_arena) <
         kStackSize * kMaxFibers;
}

// Offset of a code address in the kernel's module; Python converts it to a source line.
inline uint32_t program_counter(const void* address) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address) - running.module_base);
}
// The code address in the kernel that called the current runtime function.
#define EMULATOR_CALLER (::emulator::program_counter(__builtin_return_address(0)))

// --- scheduler (scheduler.cpp) ---
void make_runnable(Fiber* fiber);
void block_until_runnable(Fiber* fiber, FiberState state);
void yield();
[[noreturn]] void abort_launch();
bool run_one_async_operation(bool in_order);
const char* state_name(FiberState state);

// --- clocks ---
Knowledge& own_knowledge(Fiber* fiber);  // unshared, for modification
void advance_clock(Fiber* fiber);
// Merges the participants' clocks and gives the result to each.
void join_knowledge(const std::vector<Fiber*>& participants);
// Merges the fiber's clocks, including its own accesses, into `into` (a release).
void release_to(Knowledge& into, Fiber* fiber);
void acquire_from(Fiber* fiber, const Knowledge& from);

// --- collectives.cpp ---
void complete_barriers_after_exit(Block* block);
void meet(Collective& collective, int operation, unsigned mask, int needed, int slot,
          void* argument, CollectiveBody body, uint32_t pc);
void warp_meet(int operation, unsigned mask, void* argument, CollectiveBody body, uint32_t pc);
void warpgroup_meet(int operation, void* argument, CollectiveBody body, uint32_t pc);

// --- shared memory window ---
constexpr size_t kSharedWindow = 1 << 20;  // virtual bytes per block
uint8_t* shared_pointer(uint32_t cluster_address, size_t size);
uint32_t shared_offset(const void* pointer);

// --- clusters.cpp ---
void check_block_is_alive(const Block* block, uint32_t pc);

// --- async_copies.cpp ---
void reset_async_state();
void check_state_at_exit(Fiber* fiber);  // reports copies that the thread did not wait for
uint32_t swizzled(uint32_t shared_address, int swizzle_bytes);
void start_async_operation(AsyncOperation operation);
// Describes mbarriers with waiting threads; finds one whose transaction count cannot be met.
std::string describe_mbarrier(uint64_t* barrier, uint32_t* expect_pc);

}  // namespace emulator

#endif
