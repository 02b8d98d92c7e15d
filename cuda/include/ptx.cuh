// All assembly instructions of the kernels, one per wrapper.  Comments mark wrappers that only tests use.
//
// Kernels contain no other assembly, so only this file has to be compared with the PTX manual.
//
// Pointers to shared memory are generic pointers.  A parameter named `address` is instead a 32-bit
// address in the shared window of this block or, after map_to_block, of another block of the cluster.
//
// Registers are passed by reference as fixed-size arrays.  The comment of each matrix instruction gives
// the matrix elements, as (row, column), in each register of a lane, where group = lane / 4 and
// pair = lane % 4.
#ifndef CUPYCONV_PTX_CUH
#define CUPYCONV_PTX_CUH

namespace ptx {

// A tensor map encoded on the host.  A kernel's parameter is a `const __grid_constant__ ptx::TensorMap`.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// Returns the 32-bit address of shared memory in the shared window, as the instructions below take it.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// ------------------------------------------------------------------------------------------------
// Conversions, and functions of one value
// ------------------------------------------------------------------------------------------------

// cvt.f32.f16: returns the value of the binary16 with these bits; exact.
__device__ __forceinline__ float f32_from_f16(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// cvt.rn.f16.f32: returns the bits of the nearest binary16; ties go to even.
__device__ __forceinline__ unsigned short f16_from_f32(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// rcp.approx.ftz.f32: returns 1 / value with an error of up to 1 unit in the last place.  Subnormal
// arguments and results become zero.
__device__ __forceinline__ float rcp_approx(float value) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(value));
  return inverse;
}

// ex2.approx.ftz.f32: returns 2**power with an error of up to 2 units in the last place.
// Subnormal arguments and results become zero.
__device__ __forceinline__ float ex2_approx(float power) {
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(power));
  return value;
}

#if __CUDA_ARCH__ >= 800

// cvt.rn.f16x2.f32: converts two values to binary16 in one register, `low` in bits 0 to 15.
__device__ __forceinline__ unsigned f16x2_from_f32(float low, float high) {
  unsigned bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// cvt.rn.bf16x2.f32: converts two values to bfloat16 in one register, `low` in bits 0 to 15.
__device__ __forceinline__ unsigned bf16x2_from_f32(float low, float high) {
  unsigned bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// cvt.rna.tf32.f32: rounds to 10 fraction bits, ties away from zero, and returns the bits of a float.
__device__ __forceinline__ unsigned tf32_from_f32(float value) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}
#endif

// st.global.v4: stores 16 bytes with one instruction.  The compiler may split the store of a 16-byte
// type, but not this instruction.
__device__ __forceinline__ void store_16_bytes(void* destination, const unsigned (&words)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// ------------------------------------------------------------------------------------------------
// Copies of 8 x 8 matrices of 16-bit elements between shared memory and registers
// ------------------------------------------------------------------------------------------------

// ldmatrix: loads two or four matrices.  Lanes 8 i to 8 i + 7 pass the addresses of the rows of matrix i.
// A row has 16 bytes, and its address is a multiple of 16.  Register i of each lane receives the elements
// (group, 2 pair) and (group, 2 pair + 1) of matrix i.
__device__ __forceinline__ void ldmatrix_x2(unsigned (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// ldmatrix with transposition: register i receives elements (2 pair, group) and (2 pair + 1, group).
__device__ __forceinline__ void ldmatrix_x2_trans(unsigned (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

#if __CUDA_ARCH__ >= 900
// stmatrix: stores four matrices; addresses and registers are as in ldmatrix.
__device__ __forceinline__ void stmatrix_x4(void* row, const unsigned (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(void* row, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
#endif

// ------------------------------------------------------------------------------------------------
// mma.sync: one warp computes d += a * b on the tensor cores, with sums in float (double for f64).
// Elements of d (16 x 8): d[0], d[1]: (group, 2 pair) and (group, 2 pair + 1); d[2], d[3]: eight rows
// below.
// ------------------------------------------------------------------------------------------------

// float16, 16 x 8 x 8.  a[0]: (group, 2 pair) and (group, 2 pair + 1); a[1]: eight rows below.
// b0: (2 pair, group) and (2 pair + 1, group).
__device__ __forceinline__ void mma_m16n8k8_f16(float (&d)[4], const unsigned (&a)[2],
                                                unsigned b0) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0));
}

#if __CUDA_ARCH__ >= 800
// float16 and bfloat16, 16 x 8 x 16.  a[0], a[1] and b0 are as in mma_m16n8k8_f16; a[2], a[3] are eight
// columns right of a[0], a[1], and b1 is eight rows below b0.
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                                 unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4],
                                                  unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// TF32, 16 x 8 x 8.  a[0]: (group, pair); a[1]: eight rows below; a[2], a[3]: four columns right of a[0],
// a[1].  b0: (pair, group); b1: four rows below.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                                 unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// float64, 8 x 8 x 4.  a: (group, pair); b: (pair, group); d[0], d[1]: (group, 2 pair) and
// (group, 2 pair + 1).
__device__ __forceinline__ void mma_m8n8k4_f64(double (&d)[2], double a, double b) {
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+d"(d[0]), "+d"(d[1])
               : "d"(a), "d"(b));
}

// ------------------------------------------------------------------------------------------------
// cp.async: one thread copies 4, 8 or 16 bytes from global to shared memory, asynchronously.  The first
// source_bytes bytes are read; the other bytes become zero.  Both addresses are multiples of the size.
// ------------------------------------------------------------------------------------------------
__device__ __forceinline__ void cp_async_4(void* destination, const void* source,
                                           int source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(destination)),
               "l"(source), "r"(source_bytes)
               : "memory");
}
__device__ __forceinline__ void cp_async_8(void* destination, const void* source,
                                           int source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(destination)),
               "l"(source), "r"(source_bytes)
               : "memory");
}
// cp.async of 16 bytes with .cg, which bypasses the L1 cache.
__device__ __forceinline__ void cp_async_16(void* destination, const void* source,
                                            int source_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(destination)),
               "l"(source), "r"(source_bytes)
               : "memory");
}
// Closes the group of the thread's copies since the last commit.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most the newest GROUPS_LEFT groups of the thread are in flight.
template <int GROUPS_LEFT>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS_LEFT) : "memory");
}
#endif

// ------------------------------------------------------------------------------------------------
// bar.sync: waits until `threads` threads of the block, a multiple of 32, have arrived at barrier `id`.
// __syncthreads() uses barrier 0.
// ------------------------------------------------------------------------------------------------
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#if __CUDA_ARCH__ >= 900
// ------------------------------------------------------------------------------------------------
// mbarriers.  A phase of a barrier ends when `count` arrivals have been made and all expected bytes have
// been copied.
// ------------------------------------------------------------------------------------------------

// Initialises a barrier with `count` arrivals per phase.
__device__ __forceinline__ void mbarrier_init(unsigned long long* barrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
}
// Arrives on a barrier of this block.
__device__ __forceinline__ void mbarrier_arrive(unsigned long long* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// Arrives on a barrier of this block, and adds `bytes` to the expected bytes of the phase.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned long long* barrier,
                                                          unsigned bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
// Arrives on a barrier of any block of the cluster; map_to_block returns the address.  The release has
// the scope of this block: it does not make the thread's earlier stores visible to the other block.
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}
// Waits for a limited time, and returns whether the phase with this parity has ended.  Call it in a loop.
__device__ __forceinline__ bool mbarrier_try_wait_parity(unsigned long long* barrier,
                                                         unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Makes mbarrier_init visible to the cluster and to the async proxy.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Orders this thread's earlier accesses to shared memory before later accesses of the async proxy (TMA,
// wgmma).
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ------------------------------------------------------------------------------------------------
// TMA.  One thread calls these wrappers.  Coordinates are listed from the innermost dimension outwards.
// A load counts its copied bytes on the mbarrier.
// ------------------------------------------------------------------------------------------------

// Prefetches a tensor map, which may be a kernel parameter.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Tiled loads: copy the box of the map whose corner has these coordinates.  Only tests load 2 dimensions.
__device__ __forceinline__ void tma_load_2d(void* destination, const TensorMap* map,
                                            unsigned long long* barrier, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1)
      : "memory");
}
__device__ __forceinline__ void tma_load_3d(void* destination, const TensorMap* map,
                                            unsigned long long* barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ __forceinline__ void tma_load_4d(void* destination, const TensorMap* map,
                                            unsigned long long* barrier, int c0, int c1, int c2,
                                            int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// im2col loads: copy channels from c on of successive base pixels, the first at (d, h, w) of image n.
// The offsets tap_d, tap_h, tap_w shift each pixel.  The map has the numbers of channels and pixels.
__device__ __forceinline__ void tma_load_im2col_3d(void* destination, const TensorMap* map,
                                                   unsigned long long* barrier, int c, int w, int n,
                                                   unsigned short tap_w) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2], {%6};" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(c), "r"(w), "r"(n), "h"(tap_w)
      : "memory");
}
__device__ __forceinline__ void tma_load_im2col_4d(void* destination, const TensorMap* map,
                                                   unsigned long long* barrier, int c, int w, int h,
                                                   int n, unsigned short tap_w,
                                                   unsigned short tap_h) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(c), "r"(w), "r"(h), "r"(n), "h"(tap_w), "h"(tap_h)
      : "memory");
}
__device__ __forceinline__ void tma_load_im2col_5d(void* destination, const TensorMap* map,
                                                   unsigned long long* barrier, int c, int w, int h,
                                                   int d, int n, unsigned short tap_w,
                                                   unsigned short tap_h, unsigned short tap_d) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(c), "r"(w), "r"(h), "r"(d), "r"(n), "h"(tap_w),
      "h"(tap_h), "h"(tap_d)
      : "memory");
}
// Multicast loads: copy to every block of the cluster whose bit in block_mask is set.  The destination
// and the barrier have the same offsets in each of these blocks.
__device__ __forceinline__ void tma_load_2d_multicast(void* destination, const TensorMap* map,
                                                      unsigned long long* barrier, int c0, int c1,
                                                      unsigned short block_mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::"
      "cluster "
      "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "h"(block_mask), "r"(c0), "r"(c1)
      : "memory");
}
__device__ __forceinline__ void tma_load_3d_multicast(void* destination, const TensorMap* map,
                                                      unsigned long long* barrier, int c0, int c1,
                                                      int c2, unsigned short block_mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::"
      "cluster "
      "[%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "h"(block_mask), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ __forceinline__ void tma_load_4d_multicast(void* destination, const TensorMap* map,
                                                      unsigned long long* barrier, int c0, int c1,
                                                      int c2, int c3, unsigned short block_mask) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::"
      "cluster "
      "[%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "h"(block_mask), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ __forceinline__ void tma_load_im2col_3d_multicast(void* destination,
                                                             const TensorMap* map,
                                                             unsigned long long* barrier, int c,
                                                             int w, int n, unsigned short tap_w,
                                                             unsigned short block_mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes."
      "multicast::cluster "
      "[%0], [%1, {%4, %5, %6}], [%2], {%7}, %3;" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "h"(block_mask), "r"(c), "r"(w), "r"(n), "h"(tap_w)
      : "memory");
}
__device__ __forceinline__ void tma_load_im2col_4d_multicast(
    void* destination, const TensorMap* map, unsigned long long* barrier, int c, int w, int h,
    int n, unsigned short tap_w, unsigned short tap_h, unsigned short block_mask) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes."
      "multicast::cluster "
      "[%0], [%1, {%4, %5, %6, %7}], [%2], {%8, %9}, %3;" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "h"(block_mask), "r"(c), "r"(w), "r"(h), "r"(n),
      "h"(tap_w), "h"(tap_h)
      : "memory");
}
__device__ __forceinline__ void tma_load_im2col_5d_multicast(
    void* destination, const TensorMap* map, unsigned long long* barrier, int c, int w, int h,
    int d, int n, unsigned short tap_w, unsigned short tap_h, unsigned short tap_d,
    unsigned short block_mask) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes."
      "multicast::cluster "
      "[%0], [%1, {%4, %5, %6, %7, %8}], [%2], {%9, %10, %11}, %3;" ::"r"(
          shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "h"(block_mask), "r"(c), "r"(w), "r"(h), "r"(d),
      "r"(n), "h"(tap_w), "h"(tap_h), "h"(tap_d)
      : "memory");
}
// Tiled stores: elements outside the tensor are not written.
__device__ __forceinline__ void tma_store_2d(const TensorMap* map, const void* source, int c0,
                                             int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(shared_address(source)), "r"(c0), "r"(c1)
      : "memory");
}
// Closes the group of the thread's stores since the last commit.
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until at most the newest GROUPS_LEFT groups of the thread's stores are in flight.
template <int GROUPS_LEFT>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(GROUPS_LEFT) : "memory");
}
// Waits until at most the newest GROUPS_LEFT groups still read shared memory.  The memory of all older
// groups may then be overwritten.
template <int GROUPS_LEFT>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(GROUPS_LEFT) : "memory");
}

// ------------------------------------------------------------------------------------------------
// Clusters
// ------------------------------------------------------------------------------------------------

// Returns the rank of this block in its cluster.
__device__ __forceinline__ unsigned cluster_block_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Arrives at the barrier of the cluster, with release.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Waits until all threads of the cluster have arrived, with acquire.
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// mapa: returns the address of the same shared variable in another block of the cluster.
__device__ __forceinline__ unsigned map_to_block(unsigned address, unsigned block_rank) {
  unsigned mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(mapped)
               : "r"(address), "r"(block_rank));
  return mapped;
}
// ld.shared::cluster: loads from any block of the cluster.
__device__ __forceinline__ void load_cluster_f32x4(float (&values)[4], unsigned address) {
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
               : "r"(address)
               : "memory");
}

// ------------------------------------------------------------------------------------------------
// Overlapping launches.  A launch with programmatic stream serialization may begin before the launches
// that it depends on have ended.
// ------------------------------------------------------------------------------------------------

// Waits until the launches that this launch depends on have ended and their stores are visible.  Before
// the wait, do not overwrite the operands of those launches.  Returns at once in an ordinary launch.
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Allows the next launch to begin once every block has called this function or ended.  This is a hint and
// makes no store visible; the next launch calls griddepcontrol_wait to see the stores.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// elect.sync: returns true in one lane of a full warp.
__device__ __forceinline__ bool elect_one() {
  unsigned elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// ------------------------------------------------------------------------------------------------
// wgmma: a warpgroup (four warps) computes d (64 x N) = a * b + (scale_d ? d : 0), asynchronously.  Warp
// w has rows 16 w to 16 w + 15 of d.  Let group = lane / 4 and pair = lane % 4.  In row `group` of these
// 16 rows, the lane's registers d[4 j] and d[4 j + 1] hold columns 8 j + 2 pair and 8 j + 2 pair + 1;
// d[4 j + 2] and d[4 j + 3] hold the same columns eight rows below.
// ------------------------------------------------------------------------------------------------

// setmaxnreg: sets the registers per thread of the warpgroup, a multiple of 8 from 24 to 256.  dec
// returns registers to the block; inc waits until the block has enough.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Prevents the compiler from moving accesses to the accumulators d across this place.  The memory clobber
// of an instruction has no such effect on registers.  Emits no instruction, only a PTX comment per
// register.
#define PTX_TIE(d)                                      \
  _Pragma("unroll") for (int i = 0; i < PRODUCTS; ++i)  \
      _Pragma("unroll") for (int j = 0; j < COUNT; ++j) \
          asm volatile("// tied %0" : "+f"(d[i][j])::"memory")

// Keeps accumulators in their registers, also where the compiler knows their values.
template <int PRODUCTS, int COUNT>
__device__ __forceinline__ void wgmma_keep(float (&d)[PRODUCTS][COUNT]) {
  PTX_TIE(d);
}
// wgmma.fence: call it before the first wgmma on the accumulators d, and again after threads access d.
template <int PRODUCTS, int COUNT>
__device__ __forceinline__ void wgmma_fence(float (&d)[PRODUCTS][COUNT]) {
  PTX_TIE(d);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Closes the group of the warpgroup's products since the last commit.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most the newest GROUPS_LEFT groups are in flight.  d contains the accumulators of all
// groups.
template <int GROUPS_LEFT, int PRODUCTS, int COUNT>
__device__ __forceinline__ void wgmma_wait(float (&d)[PRODUCTS][COUNT]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS_LEFT) : "memory");
  PTX_TIE(d);
}

// Returns the descriptor of an operand in shared memory.  SWIZZLE is 128 or, only in tests, 0, 32 or 64
// bytes.
// K-major operands: stride_bytes is the distance between groups of eight rows.  leading_bytes is used
// only without a swizzle: it is the distance between the two 16-byte columns of the instruction's k.
// MN-major operands with a swizzle: leading_bytes is the distance between spans of SWIZZLE bytes along m
// or n, and stride_bytes is the distance between groups of eight values of k.  Without a swizzle,
// stride_bytes is the distance between spans of 16 bytes, and leading_bytes the distance between groups
// of eight values of k.
template <int SWIZZLE>
__device__ __forceinline__ unsigned long long wgmma_descriptor(const void* start,
                                                               unsigned leading_bytes,
                                                               unsigned stride_bytes) {
  static_assert(SWIZZLE == 0 || SWIZZLE == 32 || SWIZZLE == 64 || SWIZZLE == 128,
                "a swizzle of 0, 32, 64 or 128 bytes");
  constexpr unsigned long long mode = SWIZZLE == 0 ? 0 : SWIZZLE == 128 ? 1 : SWIZZLE == 64 ? 2 : 3;
  return ((shared_address(start) & 0x3ffffu) >> 4) |
         static_cast<unsigned long long>((leading_bytes & 0x3ffffu) >> 4) << 16 |
         static_cast<unsigned long long>((stride_bytes & 0x3ffffu) >> 4) << 32 | mode << 62;
}

// Lists of accumulator registers; each extends the shorter list.
#define PTX_LIST_4 "%0, %1, %2, %3"
#define PTX_LIST_8 \
  PTX_LIST_4       \
  ", %4, %5, %6, %7"
#define PTX_LIST_16 \
  PTX_LIST_8        \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PTX_LIST_32 \
  PTX_LIST_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PTX_LIST_64                                                                  \
  PTX_LIST_32                                                                        \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PTX_LIST_96                                                                  \
  PTX_LIST_64                                                                        \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PTX_LIST_128                                                                             \
  PTX_LIST_96                                                                                    \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"

#define PTX_ACCUMULATORS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PTX_ACCUMULATORS_8(d, i) PTX_ACCUMULATORS_4(d, i), PTX_ACCUMULATORS_4(d, i + 4)
#define PTX_ACCUMULATORS_16(d, i) PTX_ACCUMULATORS_8(d, i), PTX_ACCUMULATORS_8(d, i + 8)
#define PTX_ACCUMULATORS_32(d, i) PTX_ACCUMULATORS_16(d, i), PTX_ACCUMULATORS_16(d, i + 16)
#define PTX_ACCUMULATORS_64(d, i) PTX_ACCUMULATORS_32(d, i), PTX_ACCUMULATORS_32(d, i + 32)
#define PTX_ACCUMULATORS_96(d, i) PTX_ACCUMULATORS_64(d, i), PTX_ACCUMULATORS_32(d, i + 64)
#define PTX_ACCUMULATORS_128(d, i) PTX_ACCUMULATORS_64(d, i), PTX_ACCUMULATORS_64(d, i + 64)

// Expands CASE(n, accumulators per thread, indices of the next asm operands) for every supported N.
// Only tests use N = 8.
#define PTX_FOR_EACH_WGMMA_N(CASE)                                     \
  static_assert(N == 8 || N == 64 || N == 128 || N == 192 || N == 256, \
                "an N that the wrappers have");                        \
  CASE(8, 4, "%4", "%5", "%6", "%7", "%8")                             \
  CASE(64, 32, "%32", "%33", "%34", "%35", "%36")                      \
  CASE(128, 64, "%64", "%65", "%66", "%67", "%68")                     \
  CASE(192, 96, "%96", "%97", "%98", "%99", "%100")                    \
  CASE(256, 128, "%128", "%129", "%130", "%131", "%132")

// wgmma with a and b in shared memory.  TAIL is empty, or the two transpose flags of the 16-bit types.
#define PTX_WGMMA_SHARED(n, registers, K_AND_TYPES, TAIL, a, b, scale, ...)                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " scale                                          \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n K_AND_TYPES " {" PTX_LIST_##registers \
               "}, " a ", " b ", p, 1, 1" TAIL ";\n}"                                             \
               : PTX_ACCUMULATORS_##registers(d, 0)                                               \
               : "l"(a_descriptor), "l"(b_descriptor), "r"(scale_d), ##__VA_ARGS__)

#define PTX_CASE_F16(n, registers, o0, o1, o2, o3, o4)                             \
  if constexpr (N == n)                                                            \
    PTX_WGMMA_SHARED(n, registers, "k16.f32.f16.f16", ", " o3 ", " o4, o0, o1, o2, \
                     "n"(TRANSPOSE_A), "n"(TRANSPOSE_B));
#define PTX_CASE_BF16(n, registers, o0, o1, o2, o3, o4)                              \
  if constexpr (N == n)                                                              \
    PTX_WGMMA_SHARED(n, registers, "k16.f32.bf16.bf16", ", " o3 ", " o4, o0, o1, o2, \
                     "n"(TRANSPOSE_A), "n"(TRANSPOSE_B));
#define PTX_CASE_TF32(n, registers, o0, o1, o2, o3, o4) \
  if constexpr (N == n) PTX_WGMMA_SHARED(n, registers, "k8.f32.tf32.tf32", "", o0, o1, o2);

// TRANSPOSE_A and TRANSPOSE_B are 0 for a K-major operand and 1 for an MN-major operand.  TF32 operands
// are K-major.
template <int N, int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_m64_f16(float (&d)[N / 2], unsigned long long a_descriptor,
                                              unsigned long long b_descriptor, int scale_d) {
  PTX_FOR_EACH_WGMMA_N(PTX_CASE_F16)
}
template <int N, int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_m64_bf16(float (&d)[N / 2], unsigned long long a_descriptor,
                                               unsigned long long b_descriptor, int scale_d) {
  PTX_FOR_EACH_WGMMA_N(PTX_CASE_BF16)
}
template <int N>
__device__ __forceinline__ void wgmma_m64_tf32(float (&d)[N / 2], unsigned long long a_descriptor,
                                               unsigned long long b_descriptor, int scale_d) {
  PTX_FOR_EACH_WGMMA_N(PTX_CASE_TF32)
}
#endif

}  // namespace ptx

#endif  // CUPYCONV_PTX_CUH
