// Twin of cuda/include/ptx.cuh: the same declarations, each with a body for the CPU.
//
// It is force-included and defines the shipped header's include guard, so an unchanged kernel uses
// these functions.  A test and every build compare the declarations of the two files.
#ifndef CUPYCONV_PTX_CUH
#define CUPYCONV_PTX_CUH

// The twin's helpers; without `__device__ __forceinline__`, they do not count as wrappers.
namespace ptx_twin {
static inline __attribute__((always_inline)) uint64_t* as_barrier(unsigned long long* barrier) {
  return reinterpret_cast<uint64_t*>(barrier);
}
static inline unsigned short nearest_bf16(float value) {
  const unsigned bits = emulator_bit_cast<unsigned>(value);
  if (value != value) return 0x7fff;  // the NaN that the instruction returns
  return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
// As ptxas expands it for sm_90: infinity and NaN only lose their low bits.
static inline unsigned nearest_tf32(float value) {
  const unsigned bits = emulator_bit_cast<unsigned>(value);
  const bool is_finite = (bits & 0x7f800000u) != 0x7f800000u;
  return (is_finite ? bits + 0x1000u : bits) & 0xffffe000u;
}
static inline float flushed(float value) {
  const unsigned bits = emulator_bit_cast<unsigned>(value);
  return bits & 0x7f800000u ? value : emulator_bit_cast<float>(bits & 0x80000000u);
}
template <int N>
static inline __attribute__((always_inline)) void check_wgmma_n() {
  static_assert(N == 8 || N == 64 || N == 128 || N == 192 || N == 256,
                "an N that the wrappers have");
}
}  // namespace ptx_twin

namespace ptx {
using ptx_twin::as_barrier;
using ptx_twin::check_wgmma_n;

struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return emulator::shared_address(pointer);
}

// --- conversions ---
__device__ __forceinline__ float f32_from_f16(unsigned short bits) {
  return (float)emulator_bit_cast<_Float16>(bits);
}
__device__ __forceinline__ unsigned short f16_from_f32(float value) {
  if (value != value) return 0x7fff;  // the NaN that the instruction returns
  return emulator_bit_cast<unsigned short>((_Float16)value);
}
__device__ __forceinline__ unsigned f16x2_from_f32(float low, float high) {
  return (unsigned)f16_from_f32(high) << 16 | f16_from_f32(low);
}
__device__ __forceinline__ unsigned bf16x2_from_f32(float low, float high) {
  return (unsigned)ptx_twin::nearest_bf16(high) << 16 | ptx_twin::nearest_bf16(low);
}
__device__ __forceinline__ unsigned tf32_from_f32(float value) {
  return ptx_twin::nearest_tf32(value);
}
__device__ __forceinline__ float rcp_approx(float value) {
  return ptx_twin::flushed(1.0f / ptx_twin::flushed(value));
}
__device__ __forceinline__ float ex2_approx(float power) {
  return ptx_twin::flushed(exp2f(ptx_twin::flushed(power)));
}

__device__ __forceinline__ void store_16_bytes(void* destination, const unsigned (&words)[4]) {
  *(uint4*)destination = make_uint4(words[0], words[1], words[2], words[3]);
}

// --- matrices between shared memory and registers ---
__device__ __forceinline__ void ldmatrix_x2(unsigned (&r)[2], const void* row) {
  emulator::load_matrix(r, row, 2, false);
}
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row) {
  emulator::load_matrix(r, row, 4, false);
}
__device__ __forceinline__ void ldmatrix_x2_trans(unsigned (&r)[2], const void* row) {
  emulator::load_matrix(r, row, 2, true);
}
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) {
  emulator::load_matrix(r, row, 4, true);
}
__device__ __forceinline__ void stmatrix_x4(void* row, const unsigned (&r)[4]) {
  emulator::store_matrix(r, row, 4, false);
}
__device__ __forceinline__ void stmatrix_x4_trans(void* row, const unsigned (&r)[4]) {
  emulator::store_matrix(r, row, 4, true);
}

// --- tensor cores of a warp ---
__device__ __forceinline__ void mma_m16n8k8_f16(float (&d)[4], const unsigned (&a)[2],
                                                unsigned b0) {
  emulator::mma(emulator::Element::kF16, 8, d, a, &b0);
}
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                                 unsigned b1) {
  const unsigned b[] = {b0, b1};
  emulator::mma(emulator::Element::kF16, 16, d, a, b);
}
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4],
                                                  unsigned b0, unsigned b1) {
  const unsigned b[] = {b0, b1};
  emulator::mma(emulator::Element::kBf16, 16, d, a, b);
}
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                                 unsigned b1) {
  const unsigned b[] = {b0, b1};
  emulator::mma(emulator::Element::kTf32, 8, d, a, b);
}
__device__ __forceinline__ void mma_m8n8k4_f64(double (&d)[2], double a, double b) {
  emulator::mma_f64(d, a, b);
}

// --- asynchronous copies of a thread ---
__device__ __forceinline__ void cp_async_4(void* destination, const void* source,
                                           int source_bytes) {
  emulator::cp_async(destination, source, 4, source_bytes);
}
__device__ __forceinline__ void cp_async_8(void* destination, const void* source,
                                           int source_bytes) {
  emulator::cp_async(destination, source, 8, source_bytes);
}
__device__ __forceinline__ void cp_async_16(void* destination, const void* source,
                                            int source_bytes) {
  emulator::cp_async(destination, source, 16, source_bytes);
}
__device__ __forceinline__ void cp_async_commit() { emulator::cp_async_commit(); }
template <int GROUPS_LEFT>
__device__ __forceinline__ void cp_async_wait() {
  emulator::cp_async_wait(GROUPS_LEFT);
}

// --- named barriers ---
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  emulator::named_barrier(id, threads, true);
}

// --- mbarriers ---
__device__ __forceinline__ void mbarrier_init(unsigned long long* barrier, unsigned count) {
  emulator::mbarrier_init(as_barrier(barrier), count);
}
__device__ __forceinline__ void mbarrier_arrive(unsigned long long* barrier) {
  emulator::mbarrier_arrive(as_barrier(barrier));
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned long long* barrier,
                                                          unsigned bytes) {
  emulator::mbarrier_expect_tx(as_barrier(barrier), bytes, true);
}
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned address) {
  emulator::mbarrier_arrive_cluster(address);
}
__device__ __forceinline__ bool mbarrier_try_wait_parity(unsigned long long* barrier,
                                                         unsigned parity) {
  return emulator::mbarrier_try_wait(as_barrier(barrier), parity);
}
__device__ __forceinline__ void fence_mbarrier_init() { emulator::fence_mbarrier_init(); }
__device__ __forceinline__ void fence_proxy_async() { emulator::fence_proxy_async(); }

// --- TMA ---
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  emulator::tensor_map_prefetch(map);
}
__device__ __forceinline__ void tma_load_2d(void* destination, const TensorMap* map,
                                            unsigned long long* barrier, int c0, int c1) {
  emulator::tensor_load({destination, map, as_barrier(barrier), 2, {c0, c1}, nullptr, 0});
}
__device__ __forceinline__ void tma_load_3d(void* destination, const TensorMap* map,
                                            unsigned long long* barrier, int c0, int c1, int c2) {
  emulator::tensor_load({destination, map, as_barrier(barrier), 3, {c0, c1, c2}, nullptr, 0});
}
__device__ __forceinline__ void tma_load_4d(void* destination, const TensorMap* map,
                                            unsigned long long* barrier, int c0, int c1, int c2,
                                            int c3) {
  emulator::tensor_load({destination, map, as_barrier(barrier), 4, {c0, c1, c2, c3}, nullptr, 0});
}
__device__ __forceinline__ void tma_load_im2col_3d(void* destination, const TensorMap* map,
                                                   unsigned long long* barrier, int c, int w, int n,
                                                   unsigned short tap_w) {
  const unsigned short taps[] = {tap_w};
  emulator::tensor_load({destination, map, as_barrier(barrier), 3, {c, w, n}, taps, 0});
}
__device__ __forceinline__ void tma_load_im2col_4d(void* destination, const TensorMap* map,
                                                   unsigned long long* barrier, int c, int w, int h,
                                                   int n, unsigned short tap_w,
                                                   unsigned short tap_h) {
  const unsigned short taps[] = {tap_w, tap_h};
  emulator::tensor_load({destination, map, as_barrier(barrier), 4, {c, w, h, n}, taps, 0});
}
__device__ __forceinline__ void tma_load_im2col_5d(void* destination, const TensorMap* map,
                                                   unsigned long long* barrier, int c, int w, int h,
                                                   int d, int n, unsigned short tap_w,
                                                   unsigned short tap_h, unsigned short tap_d) {
  const unsigned short taps[] = {tap_w, tap_h, tap_d};
  emulator::tensor_load({destination, map, as_barrier(barrier), 5, {c, w, h, d, n}, taps, 0});
}
__device__ __forceinline__ void tma_load_2d_multicast(void* destination, const TensorMap* map,
                                                      unsigned long long* barrier, int c0, int c1,
                                                      unsigned short block_mask) {
  emulator::tensor_load({destination, map, as_barrier(barrier), 2, {c0, c1}, nullptr, block_mask});
}
__device__ __forceinline__ void tma_load_3d_multicast(void* destination, const TensorMap* map,
                                                      unsigned long long* barrier, int c0, int c1,
                                                      int c2, unsigned short block_mask) {
  emulator::tensor_load(
      {destination, map, as_barrier(barrier), 3, {c0, c1, c2}, nullptr, block_mask});
}
__device__ __forceinline__ void tma_load_4d_multicast(void* destination, const TensorMap* map,
                                                      unsigned long long* barrier, int c0, int c1,
                                                      int c2, int c3, unsigned short block_mask) {
  emulator::tensor_load(
      {destination, map, as_barrier(barrier), 4, {c0, c1, c2, c3}, nullptr, block_mask});
}
__device__ __forceinline__ void tma_load_im2col_3d_multicast(void* destination,
                                                             const TensorMap* map,
                                                             unsigned long long* barrier, int c,
                                                             int w, int n, unsigned short tap_w,
                                                             unsigned short block_mask) {
  const unsigned short taps[] = {tap_w};
  emulator::tensor_load({destination, map, as_barrier(barrier), 3, {c, w, n}, taps, block_mask});
}
__device__ __forceinline__ void tma_load_im2col_4d_multicast(
    void* destination, const TensorMap* map, unsigned long long* barrier, int c, int w, int h,
    int n, unsigned short tap_w, unsigned short tap_h, unsigned short block_mask) {
  const unsigned short taps[] = {tap_w, tap_h};
  emulator::tensor_load({destination, map, as_barrier(barrier), 4, {c, w, h, n}, taps, block_mask});
}
__device__ __forceinline__ void tma_load_im2col_5d_multicast(
    void* destination, const TensorMap* map, unsigned long long* barrier, int c, int w, int h,
    int d, int n, unsigned short tap_w, unsigned short tap_h, unsigned short tap_d,
    unsigned short block_mask) {
  const unsigned short taps[] = {tap_w, tap_h, tap_d};
  emulator::tensor_load(
      {destination, map, as_barrier(barrier), 5, {c, w, h, d, n}, taps, block_mask});
}
__device__ __forceinline__ void tma_store_2d(const TensorMap* map, const void* source, int c0,
                                             int c1) {
  const int coordinates[] = {c0, c1};
  emulator::tensor_store(map, source, 2, coordinates);
}
__device__ __forceinline__ void tma_store_commit() { emulator::tensor_store_commit(); }
template <int GROUPS_LEFT>
__device__ __forceinline__ void tma_store_wait() {
  emulator::tensor_store_wait(GROUPS_LEFT, false);
}
template <int GROUPS_LEFT>
__device__ __forceinline__ void tma_store_wait_read() {
  emulator::tensor_store_wait(GROUPS_LEFT, true);
}

// --- clusters ---
__device__ __forceinline__ unsigned cluster_block_rank() { return emulator::cluster_block_rank(); }
__device__ __forceinline__ void cluster_arrive() { emulator::cluster_arrive(); }
__device__ __forceinline__ void cluster_wait() { emulator::cluster_wait(); }
__device__ __forceinline__ unsigned map_to_block(unsigned address, unsigned block_rank) {
  return emulator::map_to_block(address, block_rank);
}
__device__ __forceinline__ void load_cluster_f32x4(float (&values)[4], unsigned address) {
  emulator::cluster_load(values, address, sizeof values);
}
__device__ __forceinline__ void griddepcontrol_wait() { emulator::wait_for_launches_before(); }
__device__ __forceinline__ void griddepcontrol_launch_dependents() {}  // a hint
__device__ __forceinline__ bool elect_one() { return emulator::elect_one(); }

// --- tensor cores of a warpgroup ---
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  emulator::set_max_registers(REGISTERS, true);
}
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  emulator::set_max_registers(REGISTERS, false);
}
template <int PRODUCTS, int COUNT>
__device__ __forceinline__ void wgmma_keep(float (&d)[PRODUCTS][COUNT]) {}  // for compilers
template <int PRODUCTS, int COUNT>
__device__ __forceinline__ void wgmma_fence(float (&d)[PRODUCTS][COUNT]) {
  emulator::warpgroup_fence();
}
__device__ __forceinline__ void wgmma_commit() { emulator::warpgroup_commit(); }
template <int GROUPS_LEFT, int PRODUCTS, int COUNT>
__device__ __forceinline__ void wgmma_wait(float (&d)[PRODUCTS][COUNT]) {
  emulator::warpgroup_wait(GROUPS_LEFT);
}
template <int SWIZZLE>
__device__ __forceinline__ unsigned long long wgmma_descriptor(const void* start,
                                                               unsigned leading_bytes,
                                                               unsigned stride_bytes) {
  return emulator::matrix_descriptor(start, leading_bytes, stride_bytes, SWIZZLE);
}
template <int N, int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_m64_f16(float (&d)[N / 2], unsigned long long a_descriptor,
                                              unsigned long long b_descriptor, int scale_d) {
  check_wgmma_n<N>();
  emulator::warpgroup_mma({emulator::Element::kF16, N, d, nullptr, a_descriptor, b_descriptor,
                           scale_d != 0, TRANSPOSE_A != 0, TRANSPOSE_B != 0});
}
template <int N, int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_m64_bf16(float (&d)[N / 2], unsigned long long a_descriptor,
                                               unsigned long long b_descriptor, int scale_d) {
  check_wgmma_n<N>();
  emulator::warpgroup_mma({emulator::Element::kBf16, N, d, nullptr, a_descriptor, b_descriptor,
                           scale_d != 0, TRANSPOSE_A != 0, TRANSPOSE_B != 0});
}
template <int N>
__device__ __forceinline__ void wgmma_m64_tf32(float (&d)[N / 2], unsigned long long a_descriptor,
                                               unsigned long long b_descriptor, int scale_d) {
  check_wgmma_n<N>();
  emulator::warpgroup_mma({emulator::Element::kTf32, N, d, nullptr, a_descriptor, b_descriptor,
                           scale_d != 0, false, false});
}
}  // namespace ptx

#endif  // CUPYCONV_PTX_CUH
