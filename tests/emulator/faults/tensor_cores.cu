// Wrong uses of wgmma and ldmatrix.  See memory.cu and copies.cu for the launches.
#include "ptx.cuh"

#define OPERANDS                                              \
  __shared__ __align__(1024) unsigned a_tile[64 * 32];        \
  __shared__ __align__(1024) unsigned b_tile[8 * 32];         \
  for (int i = threadIdx.x; i < 64 * 32; i += 128) a_tile[i] = 0; \
  for (int i = threadIdx.x; i < 8 * 32; i += 128) b_tile[i] = 0;

#define DESCRIPTORS                                                                       \
  const unsigned long long a = ptx::wgmma_descriptor<128>(a_tile, 16, 1024);              \
  const unsigned long long b = ptx::wgmma_descriptor<128>(b_tile, 16, 1024);              \
  float d[1][4] = {{1.0f, 2.0f, 3.0f, 4.0f}};

#define STORE \
  for (int i = 0; i < 4; i++) out[4 * threadIdx.x + i] = d[0][i];

// launch: block 128
extern "C" __global__ void operands_not_fenced(const float* in, float* out) {
  OPERANDS
  __syncthreads();
  DESCRIPTORS
  ptx::wgmma_fence(d);
  ptx::wgmma_m64_f16<8, 0, 0>(d[0], a, b, 1);  // FAULT missing-proxy-fence
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(d);
  STORE
}

// launch: block 128
extern "C" __global__ void registers_not_fenced(const float* in, float* out) {
  OPERANDS
  ptx::fence_proxy_async();
  __syncthreads();
  DESCRIPTORS
  ptx::wgmma_m64_f16<8, 0, 0>(d[0], a, b, 1);  // FAULT wgmma
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(d);
  STORE
}

// launch: block 128
extern "C" __global__ void operand_overwritten_before_the_wait(const float* in, float* out) {
  OPERANDS
  ptx::fence_proxy_async();
  __syncthreads();
  DESCRIPTORS
  ptx::wgmma_fence(d);
  ptx::wgmma_m64_f16<8, 0, 0>(d[0], a, b, 1);
  ptx::wgmma_commit();
  a_tile[threadIdx.x] = 1;  // FAULT async-overwrite or race
  ptx::wgmma_wait<0>(d);
  STORE
}

// launch: block 128
extern "C" __global__ void descriptors_that_differ(const float* in, float* out) {
  OPERANDS
  ptx::fence_proxy_async();
  __syncthreads();
  DESCRIPTORS
  ptx::wgmma_fence(d);
  ptx::wgmma_m64_f16<8, 0, 0>(d[0], threadIdx.x < 64 ? a : a + 2, b, 1);  // FAULT wgmma
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(d);
  STORE
}

// launch: block 128
extern "C" __global__ void descriptor_of_an_odd_address(const float* in, float* out) {
  OPERANDS
  const unsigned long long a = ptx::wgmma_descriptor<128>(a_tile + 1, 16, 1024);  // FAULT descriptor
  out[threadIdx.x] = static_cast<float>(a);
}

// launch: block 128
extern "C" __global__ void operand_past_the_end(const float* in, float* out) {
  OPERANDS
  ptx::fence_proxy_async();
  __syncthreads();
  DESCRIPTORS
  ptx::wgmma_fence(d);
  ptx::wgmma_m64_f16<8, 0, 0>(d[0], a + (1024 >> 4), b, 1);  // FAULT out-of-bounds
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(d);
  STORE
}

// The kernel reads results before it waits for the product, so they are wrong; the emulator also reports
// the missing wait when the kernel ends.
// launch: block 128
extern "C" __global__ void product_never_waited_for(const float* in, float* out) {
  OPERANDS
  ptx::fence_proxy_async();
  __syncthreads();
  DESCRIPTORS
  ptx::wgmma_fence(d);
  ptx::wgmma_m64_f16<8, 0, 0>(d[0], a, b, 1);  // FAULT wgmma
  ptx::wgmma_commit();
  STORE
}

// launch: block 32
extern "C" __global__ void matrix_row_misaligned(const float* in, float* out) {
  __shared__ __align__(16) unsigned short rows[8][12];
  for (int i = threadIdx.x; i < 96; i += 32) rows[i / 12][i % 12] = 0;
  __syncwarp();
  unsigned r[2];
  ptx::ldmatrix_x2(r, rows[threadIdx.x % 8]);  // FAULT misaligned
  out[threadIdx.x] = static_cast<float>(r[0]);
}

// launch: block 32
extern "C" __global__ void matrix_read_before_the_barrier(const float* in, float* out) {
  __shared__ __align__(16) unsigned short rows[8][8];
  for (int i = threadIdx.x; i < 64; i += 32) rows[i / 8][i % 8] = 0;
  unsigned r[2];
  ptx::ldmatrix_x2(r, rows[threadIdx.x % 8]);  // FAULT race
  out[threadIdx.x] = static_cast<float>(r[0]);
}
