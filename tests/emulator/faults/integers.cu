// Faults of integer arithmetic.  See memory.cu for the launches.

// launch: block 32
extern "C" __global__ void index_overflows(const float* in, float* out) {
  const int row = 65536 + static_cast<int>(threadIdx.x);
  const int pitch = 65536;
  const int index = row * pitch;  // FAULT integer-overflow
  out[threadIdx.x] = in[index & 4095];
}

// launch: block 32
extern "C" __global__ void sum_overflows(const float* in, float* out) {
  const int start = 2147483647 - 16;
  const int index = start + static_cast<int>(threadIdx.x);  // FAULT integer-overflow
  out[threadIdx.x] = in[index & 4095];
}

// launch: block 32
extern "C" __global__ void offset_is_cut_short(const float* in, float* out) {
  const long long offset = 4294967296ll * (threadIdx.x + 1);
  const int index = offset;  // FAULT integer-overflow
  out[threadIdx.x] = in[index & 4095];
}

// launch: block 32
extern "C" __global__ void shift_too_far(const float* in, float* out) {
  const unsigned bit = 1u << (threadIdx.x + 8);  // FAULT undefined-behaviour
  out[threadIdx.x] = in[bit & 4095];
}

