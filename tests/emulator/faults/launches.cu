// Launches that overlap earlier ones.  See memory.cu for the launches; `after` names the kernel of the
// preceding launch, which it may overlap.
#include "ptx.cuh"

// launch: block 64
extern "C" __global__ void stores(const float* in, float* out) {
  ptx::griddepcontrol_launch_dependents();
  out[threadIdx.x] = in[threadIdx.x];
}

// launch: block 64, after stores
extern "C" __global__ void result_read_without_a_wait(const float* in, float* out) {
  out[64 + threadIdx.x] = out[threadIdx.x];  // FAULT launch-race
}

// launch: block 64, after stores
extern "C" __global__ void result_read_before_the_wait(const float* in, float* out) {
  const float early = out[threadIdx.x];  // FAULT launch-race
  ptx::griddepcontrol_wait();
  out[64 + threadIdx.x] = early + out[threadIdx.x];
}

// launch: block 64, after stores
extern "C" __global__ void result_overwritten_without_a_wait(const float* in, float* out) {
  out[threadIdx.x] = in[64 + threadIdx.x];  // FAULT launch-race
}

// Only the waiting thread is ordered: other threads need a barrier after the wait.
// launch: block 64, after stores
extern "C" __global__ void wait_of_another_thread(const float* in, float* out) {
  if (threadIdx.x < 32) ptx::griddepcontrol_wait();
  out[64 + threadIdx.x] = out[threadIdx.x];  // FAULT launch-race
}

// launch: grid 2, block 32, after stores
extern "C" __global__ void wait_of_another_block(const float* in, float* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (blockIdx.x == 0) ptx::griddepcontrol_wait();
  out[64 + i] = out[i];  // FAULT launch-race
}

// launch: block 64, zeroed
extern "C" __global__ void loads(const float* in, float* out) {
  out[64 + threadIdx.x] = out[threadIdx.x];
}

// launch: block 64, zeroed, after loads
extern "C" __global__ void operand_overwritten_without_a_wait(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x];  // FAULT launch-race
}

// Correct, without reports: memory that no earlier launch writes may be read at once.
// launch: block 64, after stores
extern "C" __global__ void result_read_after_a_wait(const float* in, float* out) {
  const float own = in[threadIdx.x];
  if (threadIdx.x == 0) ptx::griddepcontrol_wait();
  __syncthreads();
  out[64 + threadIdx.x] = own + out[63 - threadIdx.x];
}
