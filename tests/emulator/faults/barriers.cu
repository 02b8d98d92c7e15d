// Barriers and collectives that threads miss.  See memory.cu for the launches.
#include "ptx.cuh"

// launch: block 64
extern "C" __global__ void some_threads_return_early(const float* in, float* out) {
  if (threadIdx.x >= 40) return;
  __syncthreads();  // FAULT barrier-divergence
  out[threadIdx.x] = in[threadIdx.x];
}

// launch: block 64
extern "C" __global__ void barrier_in_two_branches(const float* in, float* out) {
  if (threadIdx.x % 2 == 0) {
    out[threadIdx.x] = in[threadIdx.x];
    __syncthreads();  // FAULT barrier-divergence in any schedule but the first
  } else {
    out[threadIdx.x] = -in[threadIdx.x];
    __syncthreads();  // FAULT barrier-divergence
  }
}

// launch: block 64
extern "C" __global__ void too_few_threads_at_a_named_barrier(const float* in, float* out) {
  if (threadIdx.x < 32) ptx::named_barrier_sync(1, 64);  // FAULT barrier-divergence
  out[threadIdx.x] = in[threadIdx.x];
}

// launch: block 64
extern "C" __global__ void counts_of_a_named_barrier_differ(const float* in, float* out) {
  if (threadIdx.x < 32) {
    ptx::named_barrier_sync(1, 64);  // FAULT barrier-divergence in any schedule but the first
  } else {
    ptx::named_barrier_sync(1, 32);  // FAULT barrier-divergence
  }
  out[threadIdx.x] = in[threadIdx.x];
}

// launch: block 32
extern "C" __global__ void lane_outside_of_its_mask(const float* in, float* out) {
  out[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, in[threadIdx.x], 1);  // FAULT warp-divergence
}

// launch: block 32
extern "C" __global__ void masks_that_overlap(const float* in, float* out) {
  const unsigned mask = threadIdx.x < 16 ? 0x0000ffffu : 0xffff8000u;
  out[threadIdx.x] = __shfl_down_sync(mask, in[threadIdx.x], 1);  // FAULT warp-divergence or deadlock
}

// launch: block 32
extern "C" __global__ void different_operations_meet(const float* in, float* out) {
  if (threadIdx.x < 16) {
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, in[threadIdx.x], 1);  // FAULT warp-divergence in any schedule but the first
  } else {
    out[threadIdx.x] = __shfl_down_sync(0xffffffffu, in[threadIdx.x], 1);  // FAULT warp-divergence
  }
}

// launch: block 32
extern "C" __global__ void half_a_warp_is_missing(const float* in, float* out) {
  if (threadIdx.x >= 16) return;
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, in[threadIdx.x], 1);  // FAULT deadlock
}

// launch: block 64
extern "C" __global__ void arrival_that_never_comes(const float* in, float* out) {
  __shared__ __align__(8) unsigned long long barrier;
  if (threadIdx.x == 0) ptx::mbarrier_init(&barrier, 64);
  __syncthreads();
  if (threadIdx.x != 5) ptx::mbarrier_arrive(&barrier);
  while (!ptx::mbarrier_try_wait_parity(&barrier, 0)) {  // FAULT deadlock
  }
  out[threadIdx.x] = in[threadIdx.x];
}

// launch: block 32
extern "C" __global__ void trap_is_reached(const float* in, float* out) {
  if (in[threadIdx.x] == in[threadIdx.x]) __trap();  // FAULT trap
  out[threadIdx.x] = 0.0f;
}

// A thread that spins on memory does not block the others: only the race is reported.
//
// launch: block 2
extern "C" __global__ void flag_to_spin_on(const float* in, float* out) {
  __shared__ volatile int flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    while (flag == 0) {  // FAULT race
    }
  } else {
    flag = 1;  // FAULT race in some schedules
  }
  out[threadIdx.x] = in[threadIdx.x];
}
