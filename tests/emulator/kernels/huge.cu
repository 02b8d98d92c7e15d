// Copies of a tensor with more than 2^31 elements.

extern "C" __global__ void copy_far_with_int(const float* x, float* y) {
  const int i =
      static_cast<int>(blockIdx.x) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  y[i] = x[i];
}
extern "C" __global__ void copy_far_with_long(const float* x, float* y) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  y[i] = x[i];
}

// Each thread writes 16 bits: separate ones, or (`shared`) also those of the next thread.
extern "C" __global__ void halves(unsigned short* y, int shared) {
  const long long far = 1ll << 25;
  y[far + threadIdx.x / (1 + shared)] = threadIdx.x;
}
