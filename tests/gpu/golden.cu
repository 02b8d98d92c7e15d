// One kernel per wrapper of ptx.cuh, each as small as the wrapper allows.
//
// golden.py runs them on a GPU and keeps inputs and outputs; the tests run the same kernels on the
// CPU and compare.  GOLDEN_ARCH is the chip's compute capability times ten: kernels that it lacks
// are left out.  Operands come as the bytes that shared memory or registers shall hold, so that
// nothing but the wrapper itself stands between a kernel's input and its output.
#include "ptx.cuh"

#define SWIZZLE_ALIGNMENT 1024

// ------------------------------------------------------------------------------------------------
// Conversions: one value a thread
// ------------------------------------------------------------------------------------------------
extern "C" __global__ void f32_from_f16(const unsigned short* in, float* out) {
  out[threadIdx.x] = ptx::f32_from_f16(in[threadIdx.x]);
}
extern "C" __global__ void f16_from_f32(const float* in, unsigned short* out) {
  out[threadIdx.x] = ptx::f16_from_f32(in[threadIdx.x]);
}
extern "C" __global__ void rcp_approx(const float* in, float* out) {
  out[threadIdx.x] = ptx::rcp_approx(in[threadIdx.x]);
}
extern "C" __global__ void ex2_approx(const float* in, float* out) {
  out[threadIdx.x] = ptx::ex2_approx(in[threadIdx.x]);
}

extern "C" __global__ void store_16_bytes(const unsigned* in, unsigned* out) {
  unsigned words[4];
  for (int i = 0; i < 4; i++) words[i] = in[i * 32 + threadIdx.x];
  ptx::store_16_bytes(out + threadIdx.x * 4, words);
}

// ------------------------------------------------------------------------------------------------
// ldmatrix: 32 rows of 16 bytes; lane l gives the address of row l.  out[register][lane]
// ------------------------------------------------------------------------------------------------
#define LDMATRIX_KERNEL_BODY(count, wrapper)                 \
  __shared__ __align__(16) uint4 rows[32];                   \
  rows[threadIdx.x] = in[threadIdx.x];                       \
  __syncwarp();                                              \
  unsigned registers[count];                                 \
  ptx::wrapper(registers, &rows[threadIdx.x % (8 * count)]); \
  for (int i = 0; i < count; i++) out[i * 32 + threadIdx.x] = registers[i];

extern "C" __global__ void ldmatrix_x2(const uint4* in, unsigned* out) {
  LDMATRIX_KERNEL_BODY(2, ldmatrix_x2)
}
extern "C" __global__ void ldmatrix_x4(const uint4* in, unsigned* out) {
  LDMATRIX_KERNEL_BODY(4, ldmatrix_x4)
}
extern "C" __global__ void ldmatrix_x2_trans(const uint4* in, unsigned* out) {
  LDMATRIX_KERNEL_BODY(2, ldmatrix_x2_trans)
}
extern "C" __global__ void ldmatrix_x4_trans(const uint4* in, unsigned* out){
    LDMATRIX_KERNEL_BODY(4, ldmatrix_x4_trans)}
// ------------------------------------------------------------------------------------------------
// mma.sync: registers come as a[register][lane], b[register][lane], d[register][lane]
// ------------------------------------------------------------------------------------------------
#define MMA_KERNEL_BODY(a_count, ...)                                  \
  const int lane = threadIdx.x;                                        \
  unsigned a_registers[a_count];                                       \
  float d_registers[4];                                                \
  for (int i = 0; i < a_count; i++) a_registers[i] = a[i * 32 + lane]; \
  for (int i = 0; i < 4; i++) d_registers[i] = d[i * 32 + lane];       \
  __VA_ARGS__;                                                         \
  for (int i = 0; i < 4; i++) out[i * 32 + lane] = d_registers[i];

extern "C" __global__
    void mma_m16n8k8_f16(const unsigned* a, const unsigned* b, const float* d, float* out) {
  MMA_KERNEL_BODY(2, ptx::mma_m16n8k8_f16(d_registers, a_registers, b[lane]))
}

// ------------------------------------------------------------------------------------------------
// Named barriers: the first warp announces, the second waits and reads
// ------------------------------------------------------------------------------------------------
extern "C" __global__ void named_barriers(const unsigned* in, unsigned* out) {
  __shared__ unsigned message[32];
  if (threadIdx.x < 32) message[threadIdx.x] = in[threadIdx.x];
  ptx::named_barrier_sync(1, 64);
  if (threadIdx.x >= 32) out[threadIdx.x - 32] = message[63 - threadIdx.x];
}

#if GOLDEN_ARCH >= 800
extern "C" __global__ void f16x2_from_f32(const float* in, unsigned* out) {
  out[threadIdx.x] = ptx::f16x2_from_f32(in[2 * threadIdx.x], in[2 * threadIdx.x + 1]);
}
extern "C" __global__ void bf16x2_from_f32(const float* in, unsigned* out) {
  out[threadIdx.x] = ptx::bf16x2_from_f32(in[2 * threadIdx.x], in[2 * threadIdx.x + 1]);
}
extern "C" __global__ void tf32_from_f32(const float* in, unsigned* out) {
  out[threadIdx.x] = ptx::tf32_from_f32(in[threadIdx.x]);
}

extern "C" __global__ void mma_m16n8k16_f16(const unsigned* a, const unsigned* b, const float* d,
                                            float* out) {
  MMA_KERNEL_BODY(4, ptx::mma_m16n8k16_f16(d_registers, a_registers, b[lane], b[32 + lane]))
}
extern "C" __global__ void mma_m16n8k16_bf16(const unsigned* a, const unsigned* b, const float* d,
                                             float* out) {
  MMA_KERNEL_BODY(4, ptx::mma_m16n8k16_bf16(d_registers, a_registers, b[lane], b[32 + lane]))
}
extern "C" __global__ void mma_m16n8k8_tf32(const unsigned* a, const unsigned* b, const float* d,
                                            float* out) {
  MMA_KERNEL_BODY(4, ptx::mma_m16n8k8_tf32(d_registers, a_registers, b[lane], b[32 + lane]))
}
extern "C" __global__ void mma_m8n8k4_f64(const double* a, const double* b, const double* d,
                                          double* out) {
  const int lane = threadIdx.x;
  double d_registers[2] = {d[lane], d[32 + lane]};
  ptx::mma_m8n8k4_f64(d_registers, a[lane], b[lane]);
  out[lane] = d_registers[0];
  out[32 + lane] = d_registers[1];
}

// cp.async: thread t copies unit t, of which source_bytes[t] come from memory.
#define CP_ASYNC_KERNEL_BODY(bytes, wrapper)                               \
  __shared__ __align__(16) unsigned char staged[32 * bytes];               \
  unsigned char* unit = staged + threadIdx.x * bytes;                      \
  ptx::wrapper(unit, in + threadIdx.x * bytes, source_bytes[threadIdx.x]); \
  ptx::cp_async_commit();                                                  \
  ptx::cp_async_wait<0>();                                                 \
  for (int i = 0; i < bytes; i++) out[threadIdx.x * bytes + i] = unit[i];

extern "C" __global__ void cp_async_4(const unsigned char* in, const int* source_bytes,
                                      unsigned char* out) {
  CP_ASYNC_KERNEL_BODY(4, cp_async_4)
}
extern "C" __global__ void cp_async_8(const unsigned char* in, const int* source_bytes,
                                      unsigned char* out) {
  CP_ASYNC_KERNEL_BODY(8, cp_async_8)
}
extern "C" __global__ void cp_async_16(const unsigned char* in, const int* source_bytes,
                                       unsigned char* out){CP_ASYNC_KERNEL_BODY(16, cp_async_16)}
#endif

#if GOLDEN_ARCH >= 900
// ------------------------------------------------------------------------------------------------
// stmatrix: in[register][lane]; out is the 32 rows
// ------------------------------------------------------------------------------------------------
#define STMATRIX_KERNEL(wrapper)                                               \
  wrapper(const unsigned* in, uint4* out) {                                    \
    __shared__ __align__(16) uint4 rows[32];                                   \
    unsigned registers[4];                                                     \
    for (int i = 0; i < 4; i++) registers[i] = in[i * 32 + threadIdx.x];       \
    ptx::wrapper(&rows[threadIdx.x], registers);                               \
    __syncwarp();                                                              \
    out[threadIdx.x] = rows[threadIdx.x];                                      \
  }
extern "C" __global__ void STMATRIX_KERNEL(stmatrix_x4)
extern "C" __global__ void STMATRIX_KERNEL(stmatrix_x4_trans)

// ------------------------------------------------------------------------------------------------
// mbarriers
// ------------------------------------------------------------------------------------------------
__device__ __forceinline__ void wait_for_phase(unsigned long long* barrier, unsigned parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// Two phases of arrivals by all threads; out[t] has what thread t + 1 wrote in each.
extern "C" __global__ void mbarrier_phases(const unsigned* in, unsigned* out) {
  __shared__ __align__(8) unsigned long long barrier;
  __shared__ unsigned message[2][64];
  if (threadIdx.x == 0) ptx::mbarrier_init(&barrier, 64);
  __syncthreads();
  unsigned sum = 0;
  for (unsigned phase = 0; phase < 2; phase++) {
    message[phase][threadIdx.x] = in[threadIdx.x] * (phase + 1);
    ptx::mbarrier_arrive(&barrier);
    wait_for_phase(&barrier, phase);
    sum = sum * 1000 + message[phase][(threadIdx.x + 1) % 64];
  }
  out[threadIdx.x] = sum;
}

// Alone, with no launch to wait for.
extern "C" __global__ void griddepcontrol(const unsigned* in, unsigned* out) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  out[threadIdx.x] = in[threadIdx.x];
}

extern "C" __global__ void elect_one(unsigned* out) {
  out[threadIdx.x] = ptx::elect_one() ? 1u : 0u;
}

// ------------------------------------------------------------------------------------------------
// TMA: one copy into shared memory, whose bytes are the output; `bytes` is the size of the copy.
// ------------------------------------------------------------------------------------------------
struct Coordinates {
  int at[5];
  int tap[3];
};

#define TMA_LOAD_KERNEL(name, ...)                                                \
  name(const __grid_constant__ ptx::TensorMap map, unsigned char* out, int bytes, \
       const Coordinates p) {                                                     \
    extern __shared__ __align__(SWIZZLE_ALIGNMENT) unsigned char staged[];        \
    __shared__ __align__(8) unsigned long long barrier;                           \
    const int* c = p.at;                                                          \
    if (threadIdx.x == 0) {                                                       \
      ptx::prefetch_tensor_map(&map);                                             \
      ptx::mbarrier_init(&barrier, 1);                                            \
      ptx::fence_mbarrier_init();                                                 \
      ptx::mbarrier_arrive_expect_tx(&barrier, bytes);                            \
      ptx::name(staged, &map, &barrier, __VA_ARGS__);                             \
    }                                                                             \
    __syncthreads();                                                              \
    wait_for_phase(&barrier, 0);                                                  \
    for (int i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = staged[i];     \
  }
#define TAP(i) static_cast<unsigned short>(p.tap[i])

extern "C" __global__ void TMA_LOAD_KERNEL(tma_load_2d, c[0], c[1]) extern "C" __global__
    void TMA_LOAD_KERNEL(tma_load_3d, c[0], c[1], c[2]) extern "C" __global__
    void TMA_LOAD_KERNEL(tma_load_4d, c[0], c[1], c[2], c[3]) extern "C" __global__
    void TMA_LOAD_KERNEL(tma_load_im2col_3d, c[0], c[1], c[2], TAP(0)) extern "C" __global__
    void TMA_LOAD_KERNEL(tma_load_im2col_4d, c[0], c[1], c[2], c[3], TAP(0),
                         TAP(1)) extern "C" __global__
    void TMA_LOAD_KERNEL(tma_load_im2col_5d, c[0], c[1], c[2], c[3], c[4], TAP(0), TAP(1), TAP(2))

// Block 0 of two loads for both; out has the bytes of block 0, then of block 1.
#define TMA_MULTICAST_KERNEL_BODY(...)                                       \
  extern __shared__ __align__(SWIZZLE_ALIGNMENT)                             \
  unsigned char staged[];                                                    \
  __shared__ __align__(8) unsigned long long barrier;                        \
  const int* c = p.at;                                                       \
  if (threadIdx.x == 0) {                                                    \
    ptx::mbarrier_init(&barrier, 1);                                         \
    ptx::fence_mbarrier_init();                                              \
    ptx::mbarrier_arrive_expect_tx(&barrier, bytes);                         \
  }                                                                          \
  __syncthreads();                                                           \
  ptx::cluster_arrive();                                                     \
  ptx::cluster_wait();                                                       \
  if (threadIdx.x == 0 && ptx::cluster_block_rank() == 0) {                  \
    __VA_ARGS__;                                                             \
  }                                                                          \
  wait_for_phase(&barrier, 0);                                               \
  unsigned char* mine = out + ptx::cluster_block_rank() * bytes;             \
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) mine[i] = staged[i]; \
  ptx::cluster_arrive();                                                     \
  ptx::cluster_wait();

#define TMA_MULTICAST_KERNEL(name, ...)                                                 \
  name(const __grid_constant__ ptx::TensorMap map, unsigned char* out, int bytes,       \
       const Coordinates p) {                                                           \
    TMA_MULTICAST_KERNEL_BODY(                                                          \
        ptx::name(staged, &map, &barrier, __VA_ARGS__, static_cast<unsigned short>(3))) \
  }
#define PAIR __cluster_dims__(2, 1, 1)

extern "C" __global__ void PAIR TMA_MULTICAST_KERNEL(tma_load_2d_multicast, c[0],
                                                     c[1]) extern "C" __global__ void PAIR
    TMA_MULTICAST_KERNEL(tma_load_3d_multicast, c[0], c[1], c[2]) extern "C" __global__ void PAIR
    TMA_MULTICAST_KERNEL(tma_load_4d_multicast, c[0], c[1], c[2], c[3]) extern "C" __global__
    void PAIR TMA_MULTICAST_KERNEL(tma_load_im2col_3d_multicast, c[0], c[1], c[2],
                                   TAP(0)) extern "C" __global__ void PAIR
    TMA_MULTICAST_KERNEL(tma_load_im2col_4d_multicast, c[0], c[1], c[2], c[3], TAP(0),
                         TAP(1)) extern "C" __global__ void PAIR
    TMA_MULTICAST_KERNEL(tma_load_im2col_5d_multicast, c[0], c[1], c[2], c[3], c[4], TAP(0), TAP(1),
                         TAP(2))
// Stores: `in` are the bytes of shared memory, the output is the tensor behind the map.
#define TMA_STORE_KERNEL(name, ...)                                                    \
  name(const __grid_constant__ ptx::TensorMap map, const unsigned char* in, int bytes, \
       const Coordinates p) {                                                          \
    extern __shared__ __align__(SWIZZLE_ALIGNMENT) unsigned char staged[];             \
    const int* c = p.at;                                                               \
    for (int i = threadIdx.x; i < bytes; i += blockDim.x) staged[i] = in[i];           \
    ptx::fence_proxy_async();                                                          \
    __syncthreads();                                                                   \
    if (threadIdx.x == 0) {                                                            \
      ptx::name(&map, staged, __VA_ARGS__);                                            \
      ptx::tma_store_commit();                                                         \
      ptx::tma_store_wait_read<0>();                                                   \
      ptx::tma_store_wait<0>();                                                        \
    }                                                                                  \
  }
extern "C" __global__ void TMA_STORE_KERNEL(tma_store_2d, c[0], c[1])

// ------------------------------------------------------------------------------------------------
// Clusters of two blocks: each reads what the other wrote, and arrives on its mbarrier.
// ------------------------------------------------------------------------------------------------
extern "C" __global__ void __cluster_dims__(2, 1, 1)
    cluster_exchange(const float* in, float* out) {
  __shared__ __align__(16) float numbers[32];
  __shared__ __align__(8) unsigned long long barrier;
  const unsigned rank = ptx::cluster_block_rank(), lane = threadIdx.x, other = 1 - rank;
  numbers[lane] = in[rank * 32 + lane];
  if (lane == 0) {
    ptx::mbarrier_init(&barrier, 32);
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  float four[4];
  ptx::load_cluster_f32x4(
      four, ptx::map_to_block(ptx::shared_address(&numbers[28 - lane / 4 * 4]), other));
  ptx::mbarrier_arrive_cluster(ptx::map_to_block(ptx::shared_address(&barrier), other));
  wait_for_phase(&barrier, 0);
  const int place = 3 - lane % 4;
  out[rank * 32 + lane] = place < 2 ? four[place & 1] : four[2 + (place & 1)];
  ptx::cluster_arrive();
  ptx::cluster_wait();
}
#endif

#if GOLDEN_WGMMA
// ------------------------------------------------------------------------------------------------
// wgmma: a and b come as the bytes of shared memory.  d[register][thread] before and after.
// ------------------------------------------------------------------------------------------------
struct WgmmaOperands {
  int a_bytes, b_bytes;
  int a_swizzle, b_swizzle;
  int a_leading, a_stride, b_leading, b_stride;
  int a_start, b_start;  // bytes into the tiles
  int scale_d;
};

__device__ __forceinline__ unsigned long long describe(const void* start, int swizzle, int leading,
                                                       int stride) {
  if (swizzle == 128) return ptx::wgmma_descriptor<128>(start, leading, stride);
  if (swizzle == 64) return ptx::wgmma_descriptor<64>(start, leading, stride);
  if (swizzle == 32) return ptx::wgmma_descriptor<32>(start, leading, stride);
  return ptx::wgmma_descriptor<0>(start, leading, stride);
}

#define WGMMA_KERNEL(name, N, ...)                                                            \
  extern "C" __global__ void name(const uint4* a, const uint4* b, const float* d, float* out, \
                                  const WgmmaOperands p) {                                    \
    extern __shared__ __align__(SWIZZLE_ALIGNMENT) uint4 operands[];                          \
    const int thread = threadIdx.x;                                                           \
    uint4* b_tile = operands + p.a_bytes / 16;                                                \
    for (int i = thread; i < p.a_bytes / 16; i += 128) operands[i] = a[i];                    \
    for (int i = thread; i < p.b_bytes / 16; i += 128) b_tile[i] = b[i];                      \
    ptx::fence_proxy_async();                                                                 \
    __syncthreads();                                                                          \
    float sums[1][N / 2];                                                                     \
    for (int i = 0; i < N / 2; i++) sums[0][i] = d[i * 128 + thread];                         \
    const unsigned long long a_descriptor =                                                   \
        describe(operands + p.a_start / 16, p.a_swizzle, p.a_leading, p.a_stride);            \
    const unsigned long long b_descriptor =                                                   \
        describe(b_tile + p.b_start / 16, p.b_swizzle, p.b_leading, p.b_stride);              \
    ptx::wgmma_keep(sums);                                                                    \
    ptx::wgmma_fence(sums);                                                                   \
    ptx::__VA_ARGS__(sums[0], a_descriptor, b_descriptor, p.scale_d);                         \
    ptx::wgmma_commit();                                                                      \
    ptx::wgmma_wait<0>(sums);                                                                 \
    for (int i = 0; i < N / 2; i++) out[i * 128 + thread] = sums[0][i];                       \
  }

#define WGMMA_16(type, N, TA, TB) \
  WGMMA_KERNEL(wgmma_##type##_n##N##_a##TA##_b##TB, N, wgmma_m64_##type<N, TA, TB>)
#define WGMMA_KERNELS_16(type, N) \
  WGMMA_16(type, N, 0, 0)         \
  WGMMA_16(type, N, 0, 1)         \
  WGMMA_16(type, N, 1, 0)         \
  WGMMA_16(type, N, 1, 1)
#define WGMMA_KERNELS(N)    \
  WGMMA_KERNELS_16(f16, N)  \
  WGMMA_KERNELS_16(bf16, N) \
  WGMMA_KERNEL(wgmma_tf32_n##N, N, wgmma_m64_tf32<N>)

WGMMA_KERNELS(8)
WGMMA_KERNELS(64)
WGMMA_KERNELS(128)
WGMMA_KERNELS(192)
WGMMA_KERNELS(256)

// setmaxnreg: a warpgroup gives registers away, the other takes them, both go on computing.
extern "C" __global__ void __launch_bounds__(256, 1) setmaxnreg(const unsigned* in, unsigned* out) {
  unsigned value = in[threadIdx.x];
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<40>();
    value += 1;
  } else {
    ptx::setmaxnreg_inc<232>();
    value += 2;
  }
  out[threadIdx.x] = value;
}
#endif
