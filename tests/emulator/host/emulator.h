// Functions of the emulator's runtime for kernel code compiled for the CPU.
//
// The built-ins (cuda_builtins.h) and the instruction twin (ptx_twin.cuh) are thin inline layers
// over these functions, so that the return address seen by the runtime is in kernel code and
// identifies the kernel's source line.
#ifndef CUPYCONV_EMULATOR_H
#define CUPYCONV_EMULATOR_H

#include <cstddef>
#include <cstdint>

#include "vector_types.h"

// Attributes of collective operations: calls keep their place in the control flow, and calls on
// different source lines are not merged.
#define EMULATOR_MEETING __attribute__((convergent, nomerge))
#define EMULATOR_DISTINCT __attribute__((cold, nomerge))

namespace emulator {

// Constant during the life of a CUDA thread: the compiler may keep them in registers across
// barriers, and they cause no instrumented memory access.
__attribute__((const)) uint3 thread_index();
__attribute__((const)) uint3 block_index();
__attribute__((const)) uint3 block_extent();
__attribute__((const)) uint3 grid_extent();
__attribute__((const)) unsigned lane_index();
// A clock that advances by 2^20 cycles with each read, so that loops that wait end soon.
long long clock_cycles();

// --- barriers and collectives (collectives.cpp) ---
enum class BarrierReduction { kNone, kOr, kAnd, kCount };
EMULATOR_MEETING void synchronise_block();
EMULATOR_MEETING int synchronise_block_reduce(int predicate, BarrierReduction reduction);
EMULATOR_MEETING void named_barrier(int id, int threads, bool wait);
EMULATOR_MEETING void synchronise_warp(unsigned mask);

enum class ShuffleMode { kIndex, kUp, kDown, kXor };
// Replaces the `words` 32-bit words of `value` by the source lane's.
EMULATOR_MEETING void shuffle(unsigned mask, uint32_t* value, int words, int operand, int width,
                              ShuffleMode mode);
EMULATOR_MEETING unsigned ballot(unsigned mask, bool predicate);
// The lanes of `mask` whose 64-bit key equals the caller's.
EMULATOR_MEETING unsigned match(unsigned mask, uint64_t key);
EMULATOR_MEETING unsigned active_mask();
EMULATOR_MEETING bool elect_one();

// --- memory ---
// Checks and records an atomic read-modify-write; the caller then performs it.
void atomic_access(const void* address, size_t size);
// Reports an access whose address is not a multiple of its type's alignment.
[[noreturn]] EMULATOR_DISTINCT void misaligned(const void* address, size_t alignment);
void thread_fence();
uint32_t shared_address(const void* pointer);
[[noreturn]] void trap();

// --- asynchronous copies (async_copies.cpp) ---
void cp_async(void* destination, const void* source, int size, int source_size);
void cp_async_commit();
EMULATOR_MEETING void cp_async_wait(int groups_left);

void mbarrier_init(uint64_t* barrier, uint32_t count);
EMULATOR_MEETING void mbarrier_arrive(uint64_t* barrier);
void mbarrier_expect_tx(uint64_t* barrier, uint32_t bytes, bool arrive);
void mbarrier_arrive_cluster(uint32_t cluster_address);
EMULATOR_MEETING bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity);
void fence_mbarrier_init();
void fence_proxy_async();

constexpr int kMaxTensorRank = 5;
// A tiled or im2col bulk load.  `offsets` (rank - 2 values) selects the im2col form.
struct TensorLoad {
  void* destination;
  const void* map;
  uint64_t* barrier;
  int rank;
  int coordinates[kMaxTensorRank];
  const unsigned short* offsets;
  unsigned block_mask;  // 0: this block only
};
void tensor_load(const TensorLoad& load);
// `im2col`: a column of pixels without offsets (im2col_no_offs).
void tensor_store(const void* map, const void* source, int rank, const int* coordinates,
                  bool im2col = false);
void tensor_store_commit();
void tensor_store_wait(int groups_left, bool read_only);
void tensor_map_prefetch(const void* map);

// --- tensor cores (tensor_cores.cpp) ---
EMULATOR_MEETING void load_matrix(uint32_t* registers, const void* row, int count, bool transpose);
EMULATOR_MEETING void store_matrix(const uint32_t* registers, void* row, int count, bool transpose);
enum class Element { kF16, kBf16, kTf32 };
// d += a * b for one m16n8k16 (f16, bf16), m16n8k8 (tf32, or f16 with two registers of a).
EMULATOR_MEETING void mma(Element element, int k, float* d, const uint32_t* a, const uint32_t* b);
EMULATOR_MEETING void mma_f64(double* d, double a, double b);

struct WarpgroupMma {
  Element element;
  int n;
  float* accumulators;          // n / 2 registers of this thread
  const uint32_t* a_registers;  // four, or null: A is in shared memory
  uint64_t a_descriptor;
  uint64_t b_descriptor;
  bool scale_d;
  bool transpose_a;
  bool transpose_b;
};
EMULATOR_MEETING void warpgroup_mma(const WarpgroupMma& operation);
EMULATOR_MEETING void warpgroup_fence();
EMULATOR_MEETING void warpgroup_commit();
EMULATOR_MEETING void warpgroup_wait(int groups_left);
uint64_t matrix_descriptor(const void* start, unsigned leading_bytes, unsigned stride_bytes,
                           unsigned swizzle);
EMULATOR_MEETING void set_max_registers(int count, bool increase);

// --- clusters (clusters.cpp) ---
unsigned cluster_block_rank();
unsigned cluster_block_count();
EMULATOR_MEETING void cluster_arrive();
EMULATOR_MEETING void cluster_wait();
uint32_t map_to_block(uint32_t address, unsigned block_rank);
void cluster_load(void* value, uint32_t cluster_address, size_t size);

// --- launches that overlap (launch.cpp) ---
void wait_for_launches_before();

// --- kernel entries ---
enum ParameterKind : uint32_t {
  kParameterPointer,
  kParameterInteger,
  kParameterFloat,
  kParameterStruct
};
struct Parameter {
  uint32_t size;
  uint32_t kind;
};
struct Entry {
  const char* name;
  void (*call)(void** parameters);
  uint32_t parameter_count;
  const Parameter* parameters;
  uint32_t launch_bounds;  // 0: none declared
  uint32_t cluster[3];     // 1, 1, 1: none declared
};

}  // namespace emulator

// Dynamic shared memory, `extern __shared__ T name[]`, is an undefined emulated-TLS variable; the
// generated file defines one of these records under its name (build.py).
struct EmulatorSharedControl {
  size_t size;  // 0: the launch's dynamic shared memory
  size_t align;
  void* cached;
  void* initial;
};

#endif
