// Vector accesses at an offset of `first` elements in global and shared memory, by one thread.
#include "vector.cuh"

template <class Storage, int LENGTH>
__device__ __forceinline__ void load(const Storage* source, Storage* out) {
  float value[LENGTH];
  load_piece(value, source, true);
  for (int i = 0; i < LENGTH; ++i) out[i] = Numeric<Storage>::narrow(value[i]);
}

template <class Storage, int LENGTH>
__device__ __forceinline__ void store(Storage* destination, const Storage* in) {
  float value[LENGTH];
  for (int i = 0; i < LENGTH; ++i) value[i] = Numeric<Storage>::widen(in[i]);
  store_piece(destination, value);
}

#define KERNELS(name, Storage, LENGTH)                                                          \
  extern "C" __global__ void load_##name(const Storage* in, Storage* out, int first) {          \
    load<Storage, LENGTH>(in + first, out);                                                     \
  }                                                                                             \
  extern "C" __global__ void store_##name(const Storage* in, Storage* out, int first) {         \
    store<Storage, LENGTH>(out + first, in);                                                    \
  }                                                                                             \
  extern "C" __global__ void load_shared_##name(const Storage* in, Storage* out, int first) {   \
    __shared__ __align__(32) Storage tile[2 * LENGTH];                                          \
    for (int i = 0; i < 2 * LENGTH; ++i) tile[i] = in[i];                                       \
    load<Storage, LENGTH>(tile + first, out);                                                   \
  }                                                                                             \
  extern "C" __global__ void store_shared_##name(const Storage* in, Storage* out, int first) {  \
    __shared__ __align__(32) Storage tile[2 * LENGTH];                                          \
    store<Storage, LENGTH>(tile + first, in);                                                   \
    for (int i = 0; i < LENGTH; ++i) out[i] = tile[first + i];                                  \
  }
KERNELS(halves2, half_t, 2)
KERNELS(halves8, half_t, 8)
KERNELS(floats2, float, 2)
KERNELS(floats4, float, 4)
KERNELS(floats8, float, 8)
KERNELS(doubles2, double, 2)
