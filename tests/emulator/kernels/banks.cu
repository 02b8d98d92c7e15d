// Shared-memory access patterns with a known number of wavefronts.
#include "ptx.cuh"

#define FILLED(size)                                           \
  __shared__ __align__(128) float tile[size];                  \
  for (int i = threadIdx.x; i < size; i += 32) tile[i] = 1.0f; \
  __syncwarp();                                                \
  const int lane = threadIdx.x;

extern "C" __global__ void column_of_32(float* out) {
  FILLED(32 * 32)
  out[lane] = tile[32 * lane];  // COUNTED column_of_32
}
extern "C" __global__ void column_of_33(float* out) {
  FILLED(32 * 33)
  out[lane] = tile[33 * lane];  // COUNTED column_of_33
}
extern "C" __global__ void row_of_float4(float* out) {
  FILLED(128)
  const float4 v = reinterpret_cast<const float4*>(tile)[lane];  // COUNTED row_of_float4
  out[lane] = v.x + v.w;
}
extern "C" __global__ void stride_2(float* out) {
  FILLED(64)
  out[lane] = tile[2 * lane];  // COUNTED stride_2
}
extern "C" __global__ void broadcast(float* out) {
  FILLED(32)
  out[lane] = tile[5];  // COUNTED broadcast
}

#define MATRIX(pitch)                                                                     \
  FILLED(32 * pitch / 4)                                                                  \
  const unsigned char* row = reinterpret_cast<const unsigned char*>(tile) + pitch * lane; \
  unsigned r[4];
extern "C" __global__ void matrix_pitch_64(float* out) {
  MATRIX(64)
  ptx::ldmatrix_x4(r, row);  // COUNTED matrix_pitch_64
  out[lane] = static_cast<float>(r[0] + r[3]);
}
extern "C" __global__ void matrix_pitch_80(float* out) {
  MATRIX(80)
  ptx::ldmatrix_x4(r, row);  // COUNTED matrix_pitch_80
  out[lane] = static_cast<float>(r[0] + r[3]);
}
