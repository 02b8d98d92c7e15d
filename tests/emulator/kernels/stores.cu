// Stores of every kind, for the tests of the instrumentation and of outputs.

extern "C" __global__ void fill(float* out, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) out[i] = static_cast<float>(i);
}
extern "C" __global__ void fill_strided(float* out, int count, int stride) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) out[i * stride] = static_cast<float>(i);
}

struct Half {
  unsigned short bits;
};
struct Six {
  unsigned short words[3];
};
struct Flags {
  unsigned low : 5;
  unsigned high : 27;
};

__device__ __forceinline__ Half make_half(unsigned short bits) { return Half{bits}; }
__device__ __noinline__ Six make_six(unsigned short bits) { return Six{{bits, bits, bits}}; }
template <class T>
__device__ void assign(T* to, T value) {
  *to = value;  // STORE store_from_template
}

extern "C" __global__ void store_scalar(unsigned char* out) {
  *reinterpret_cast<float*>(out) = 1.0f;  // STORE store_scalar
}
extern "C" __global__ void store_double(unsigned char* out) {
  *reinterpret_cast<double*>(out) = 1.0;  // STORE store_double
}
extern "C" __global__ void store_byte(unsigned char* out) {
  *out = 1;  // STORE store_byte
}
extern "C" __global__ void store_returned_struct(unsigned char* out) {
  *reinterpret_cast<Half*>(out) = make_half(7);  // STORE store_returned_struct
}
extern "C" __global__ void store_struct_copy(unsigned char* out) {
  *reinterpret_cast<Six*>(out) = make_six(7);  // STORE store_struct_copy
}
extern "C" __global__ void store_vector(unsigned char* out) {
  *reinterpret_cast<float4*>(out) = make_float4(1, 2, 3, 4);  // STORE store_vector
}
extern "C" __global__ void store_memcpy(unsigned char* out) {
  unsigned char bytes[48];
  for (int i = 0; i < 48; i++) bytes[i] = static_cast<unsigned char>(i + blockIdx.x);
  memcpy(out, bytes, 48);  // STORE store_memcpy
}
extern "C" __global__ void store_memset(unsigned char* out) {
  memset(out, 3, 64);  // STORE store_memset
}
extern "C" __global__ void store_through_volatile(unsigned char* out) {
  *reinterpret_cast<volatile int*>(out) = 3;  // STORE store_through_volatile
}
extern "C" __global__ void store_in_a_loop(unsigned char* out) {
  for (unsigned i = 0; i < 16 + blockIdx.x; i++) {
    reinterpret_cast<unsigned*>(out)[i] = i * i;  // STORE store_in_a_loop
  }
}
extern "C" __global__ void store_conditionally(unsigned char* out) {
  if (blockIdx.x == 0) *out = 1;  // STORE store_conditionally
}
extern "C" __global__ void store_bitfield(unsigned char* out) {
  reinterpret_cast<Flags*>(out)->low = 3;  // STORE store_bitfield
}
extern "C" __global__ void store_from_template(unsigned char* out) {
  assign(reinterpret_cast<short*>(out), static_cast<short>(3));
}
extern "C" __global__ void store_compound(unsigned char* out) {
  *reinterpret_cast<float*>(out) += 2.0f;  // STORE store_compound
}
extern "C" __global__ void store_atomic(unsigned char* out) {
  atomicAdd(reinterpret_cast<int*>(out), 1);  // STORE store_atomic
}
