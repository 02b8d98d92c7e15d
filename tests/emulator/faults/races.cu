// Unordered accesses.  See memory.cu for the launches.

// launch: block 64
extern "C" __global__ void read_before_the_barrier(const float* in, float* out) {
  __shared__ float tile[64];
  tile[threadIdx.x] = in[threadIdx.x];  // FAULT race
  out[threadIdx.x] = tile[threadIdx.x ^ 32];  // FAULT race or uninitialised-read
}

// launch: block 64
extern "C" __global__ void written_again_before_the_barrier(const float* in, float* out) {
  __shared__ float tile[64];
  float sum = 0;
  for (int i = 0; i < 2; i++) {
    tile[threadIdx.x] = in[64 * i + threadIdx.x];  // FAULT race
    __syncthreads();
    sum += tile[63 - threadIdx.x];  // FAULT race in some schedules
  }
  out[threadIdx.x] = sum;
}

// launch: block 64
extern "C" __global__ void two_threads_write_one_element(const float* in, float* out) {
  out[threadIdx.x / 2] = in[threadIdx.x];  // FAULT race
}

// launch: block 32
extern "C" __global__ void warp_taken_for_synchronous(const float* in, float* out) {
  __shared__ float tile[32];
  tile[threadIdx.x] = in[threadIdx.x];
  __syncwarp();
  if (threadIdx.x < 16) tile[threadIdx.x] += tile[threadIdx.x + 16];  // FAULT race
  if (threadIdx.x < 8) tile[threadIdx.x] += tile[threadIdx.x + 8];  // FAULT race in some schedules
  out[threadIdx.x] = 0.0f;
}

// launch: grid 2, block 32
extern "C" __global__ void two_blocks_write_one_element(const float* in, float* out) {
  out[threadIdx.x] = in[blockIdx.x * 32 + threadIdx.x];  // FAULT block-race
}

// launch: grid 2, block 32
extern "C" __global__ void another_block_reads_it(const float* in, float* out) {
  if (blockIdx.x == 0) out[threadIdx.x] = in[threadIdx.x];     // FAULT block-race in reverse
  if (blockIdx.x == 1) out[64 + threadIdx.x] = out[threadIdx.x];  // FAULT block-race or uninitialised-read
}

// A plain write and an atomic write to the same element.
// launch: grid 2, block 1
extern "C" __global__ void atomic_and_plain_write(const float* in, float* out) {
  if (blockIdx.x == 0) {
    out[0] = in[0];  // FAULT block-race in reverse
  } else {
    atomicExch(out, 0.0f);  // FAULT block-race
  }
}

// The last block sums up, without the fence that publishes the partial sums.
// launch: grid 3, block 1, zeroed
extern "C" __global__ void last_block_without_a_fence(const float* in, float* out) {
  __shared__ bool is_last;
  out[1 + blockIdx.x] = in[blockIdx.x];
  is_last = atomicAdd(reinterpret_cast<unsigned*>(out), 1u) == gridDim.x - 1;
  if (is_last)
    for (unsigned i = 0; i < gridDim.x; i++) out[8] += out[1 + i];  // FAULT block-race
}

// Correct, without reports.
// launch: grid 3, block 1, zeroed
extern "C" __global__ void last_block_with_a_fence(const float* in, float* out) {
  __shared__ bool is_last;
  out[1 + blockIdx.x] = in[blockIdx.x];
  __threadfence();
  is_last = atomicAdd(reinterpret_cast<unsigned*>(out), 1u) == gridDim.x - 1;
  __threadfence();
  if (is_last)
    for (unsigned i = 0; i < gridDim.x; i++) out[8] += out[1 + i];
}

// Different threads write bytes of one word: correct, without reports.
// launch: block 64
extern "C" __global__ void neighbouring_bytes(const float* in, float* out) {
  __shared__ unsigned char flags[64];
  flags[threadIdx.x] = in[threadIdx.x] > 0.0f;
  __syncthreads();
  reinterpret_cast<unsigned char*>(out)[threadIdx.x] = flags[63 - threadIdx.x];
}
