// Copies used before they land.  See memory.cu for the launches; a kernel with a map parameter gets a
// map of `in` as 64 rows of 64, with boxes of 32 x 32 (4096 bytes).
#include "ptx.cuh"

__device__ __forceinline__ void wait_for_phase(unsigned long long* barrier, unsigned parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// launch: block 32
extern "C" __global__ void copy_read_before_its_wait(const float* in, float* out) {
  __shared__ __align__(16) float tile[128];
  ptx::cp_async_16(&tile[4 * threadIdx.x], &in[4 * threadIdx.x], 16);
  ptx::cp_async_commit();
  out[threadIdx.x] = tile[4 * threadIdx.x];  // FAULT async-before-wait
  ptx::cp_async_wait<0>();
}

// launch: block 32
extern "C" __global__ void wait_that_lets_one_group_pass(const float* in, float* out) {
  __shared__ __align__(16) float tile[2][128];
  for (int stage = 0; stage < 2; stage++) {
    ptx::cp_async_16(&tile[stage][4 * threadIdx.x], &in[128 * stage + 4 * threadIdx.x], 16);
    ptx::cp_async_commit();
  }
  ptx::cp_async_wait<1>();
  out[threadIdx.x] = tile[1][4 * threadIdx.x];  // FAULT async-before-wait
  ptx::cp_async_wait<0>();
}

// Only the copying thread waits: other threads need a barrier after the wait.
// launch: block 32
extern "C" __global__ void copy_of_another_thread(const float* in, float* out) {
  __shared__ __align__(16) float tile[128];
  ptx::cp_async_16(&tile[4 * threadIdx.x], &in[4 * threadIdx.x], 16);  // FAULT race
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  out[threadIdx.x] = tile[4 * (31 - threadIdx.x)];  // FAULT race or uninitialised-read or async-before-wait
}

// launch: block 32
extern "C" __global__ void copy_never_waited_for(const float* in, float* out) {
  __shared__ __align__(16) float tile[128];
  ptx::cp_async_16(&tile[4 * threadIdx.x], &in[4 * threadIdx.x], 16);  // FAULT unwaited-copy
  ptx::cp_async_commit();
  out[threadIdx.x] = in[threadIdx.x];
}

// launch: block 32
extern "C" __global__ void copy_from_a_wrong_address(const float* in, float* out) {
  __shared__ __align__(16) float tile[128];
  ptx::cp_async_16(&tile[4 * threadIdx.x], &in[4 * threadIdx.x + 2], 16);  // FAULT misaligned
  ptx::cp_async_wait<0>();
  out[threadIdx.x] = in[threadIdx.x];
}

// launch: block 32
extern "C" __global__ void copy_from_past_the_end(const float* in, float* out) {
  __shared__ __align__(16) float tile[128];
  ptx::cp_async_16(&tile[4 * threadIdx.x], &in[4000 + 4 * threadIdx.x], 16);  // FAULT out-of-bounds
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  out[threadIdx.x] = tile[4 * threadIdx.x];
}

// ------------------------------------------------------------------------------------------------
// TMA
// ------------------------------------------------------------------------------------------------
#define BULK_BUFFERS(count)                                          \
  __shared__ __align__(1024) float tile[count * 1024];               \
  __shared__ __align__(8) unsigned long long barrier;

// launch: block 32
extern "C" __global__ void bulk_copy_read_before_its_wait(
    const __grid_constant__ ptx::TensorMap map, float* out) {
  BULK_BUFFERS(1)
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(&barrier, 4096);
    ptx::tma_load_2d(tile, &map, &barrier, 0, 0);
    out[0] = tile[0];  // FAULT async-before-wait or race or uninitialised-read
    wait_for_phase(&barrier, 0);
  }
}

// launch: block 32
extern "C" __global__ void more_bytes_expected_than_come(
    const __grid_constant__ ptx::TensorMap map, float* out) {
  BULK_BUFFERS(1)
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(&barrier, 4096 + 128);  // FAULT transaction-count
    ptx::tma_load_2d(tile, &map, &barrier, 0, 0);
    wait_for_phase(&barrier, 0);
    out[0] = tile[0];
  }
}

// launch: block 32
extern "C" __global__ void fewer_bytes_expected_than_come(
    const __grid_constant__ ptx::TensorMap map, float* out) {
  BULK_BUFFERS(2)
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(&barrier, 4096);  // FAULT transaction-count
    ptx::tma_load_2d(tile, &map, &barrier, 0, 0);
    ptx::tma_load_2d(tile + 1024, &map, &barrier, 32, 0);
    wait_for_phase(&barrier, 0);
    out[0] = tile[0];  // FAULT race or async-before-wait in some schedules
  }
}

// launch: block 32
extern "C" __global__ void no_bytes_expected(const __grid_constant__ ptx::TensorMap map,
                                             float* out) {
  BULK_BUFFERS(1)
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive(&barrier);
    ptx::tma_load_2d(tile, &map, &barrier, 0, 0);  // FAULT transaction-count
    out[0] = 0.0f;
  }
}

// launch: block 32
extern "C" __global__ void barrier_not_fenced_for_the_copy(
    const __grid_constant__ ptx::TensorMap map, float* out) {
  BULK_BUFFERS(1)
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&barrier, 1);
    ptx::mbarrier_arrive_expect_tx(&barrier, 4096);
    ptx::tma_load_2d(tile, &map, &barrier, 0, 0);  // FAULT missing-proxy-fence
    wait_for_phase(&barrier, 0);
    out[0] = tile[0];
  }
}

// The buffer is reloaded while other threads may still read it.
// launch: block 64
extern "C" __global__ void buffer_loaded_again_too_early(
    const __grid_constant__ ptx::TensorMap map, float* out) {
  BULK_BUFFERS(1)
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&barrier, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  float sum = 0.0f;
  for (unsigned i = 0; i < 2; i++) {
    if (threadIdx.x == 32) {
      ptx::mbarrier_arrive_expect_tx(&barrier, 4096);
      ptx::tma_load_2d(tile, &map, &barrier, 32 * i, 0);  // FAULT race
    }
    while (!ptx::mbarrier_try_wait_parity(&barrier, i)) {  // FAULT deadlock in some schedules
    }
    sum += tile[threadIdx.x];  // FAULT async-before-wait in some schedules
  }
  out[threadIdx.x] = sum;
}

// launch: block 32
extern "C" __global__ void store_without_a_proxy_fence(
    const __grid_constant__ ptx::TensorMap map, float* out) {
  BULK_BUFFERS(1)
  for (int i = threadIdx.x; i < 1024; i += 32) tile[i] = 1.0f;
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::tma_store_2d(&map, tile, 0, 0);  // FAULT missing-proxy-fence
    ptx::tma_store_commit();
    ptx::tma_store_wait<0>();
  }
  out[threadIdx.x] = 0.0f;
}

// launch: block 32
extern "C" __global__ void store_buffer_written_too_early(
    const __grid_constant__ ptx::TensorMap map, float* out) {
  BULK_BUFFERS(1)
  for (int i = threadIdx.x; i < 1024; i += 32) tile[i] = 1.0f;
  ptx::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::tma_store_2d(&map, tile, 0, 0);
    ptx::tma_store_commit();
    tile[5] = 2.0f;  // FAULT async-overwrite
    ptx::tma_store_wait_read<0>();
  }
  out[threadIdx.x] = 0.0f;
}

// launch: block 32
extern "C" __global__ void store_never_waited_for(const __grid_constant__ ptx::TensorMap map,
                                                  float* out) {
  BULK_BUFFERS(1)
  for (int i = threadIdx.x; i < 1024; i += 32) tile[i] = 1.0f;
  ptx::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::tma_store_2d(&map, tile, 0, 0);  // FAULT unwaited-copy
    ptx::tma_store_commit();
  }
  out[threadIdx.x] = 0.0f;
}

// launch: block 32
extern "C" __global__ void bulk_copy_to_a_wrong_address(
    const __grid_constant__ ptx::TensorMap map, float* out) {
  BULK_BUFFERS(2)
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(&barrier, 4096);
    ptx::tma_load_2d(tile + 16, &map, &barrier, 0, 0);  // FAULT misaligned
    wait_for_phase(&barrier, 0);
    out[0] = tile[16];
  }
}

// launch: block 32
extern "C" __global__ void map_of_another_rank(const __grid_constant__ ptx::TensorMap map,
                                               float* out) {
  BULK_BUFFERS(1)
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(&barrier, 4096);
    ptx::tma_load_3d(tile, &map, &barrier, 0, 0, 0);  // FAULT tensor-map
    wait_for_phase(&barrier, 0);
    out[0] = tile[0];
  }
}

// ------------------------------------------------------------------------------------------------
// mbarriers
// ------------------------------------------------------------------------------------------------
// launch: block 32
extern "C" __global__ void more_arrivals_than_counted(const float* in, float* out) {
  __shared__ __align__(8) unsigned long long barrier[2];
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&barrier[0], 1);
    ptx::mbarrier_arrive_expect_tx(&barrier[0], 128);
    ptx::mbarrier_arrive(&barrier[0]);  // FAULT mbarrier
  }
  out[threadIdx.x] = in[threadIdx.x];
}

// launch: block 32
extern "C" __global__ void mbarrier_not_initialised(const float* in, float* out) {
  __shared__ __align__(8) unsigned long long barrier;
  ptx::mbarrier_arrive(&barrier);  // FAULT mbarrier
  out[threadIdx.x] = in[threadIdx.x];
}

// launch: block 32
extern "C" __global__ void mbarrier_read_like_a_number(const float* in, float* out) {
  __shared__ __align__(8) unsigned long long barrier;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&barrier, 1);
    out[0] = static_cast<float>(barrier);  // FAULT mbarrier
  }
}

// launch: block 32
extern "C" __global__ void mbarrier_initialised_twice(const float* in, float* out) {
  __shared__ __align__(8) unsigned long long barrier;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&barrier, 1);
    ptx::mbarrier_init(&barrier, 2);  // FAULT mbarrier
    out[0] = in[0];
  }
}

// launch: block 64
extern "C" __global__ void mbarrier_used_before_the_barrier(const float* in, float* out) {
  __shared__ __align__(8) unsigned long long barrier;
  if (threadIdx.x == 0) ptx::mbarrier_init(&barrier, 64);
  ptx::mbarrier_arrive(&barrier);  // FAULT race or mbarrier
  out[threadIdx.x] = in[threadIdx.x];
}

// ------------------------------------------------------------------------------------------------
// Clusters
// ------------------------------------------------------------------------------------------------
// launch: grid 2, block 32
extern "C" __global__ void __cluster_dims__(2, 1, 1)
    block_returns_while_others_read_it(const float* in, float* out) {
  __shared__ __align__(16) float tile[32];
  tile[threadIdx.x] = in[threadIdx.x];
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (ptx::cluster_block_rank() == 0) return;
  __syncwarp();
  float four[4];
  ptx::load_cluster_f32x4(four, ptx::map_to_block(ptx::shared_address(tile), 0));  // FAULT cluster
  out[threadIdx.x] = four[0];
}

// launch: grid 2, block 32
extern "C" __global__ void __cluster_dims__(2, 1, 1)
    neighbour_read_before_the_cluster_barrier(const float* in, float* out) {
  __shared__ __align__(16) float tile[32];
  const unsigned other = 1 - ptx::cluster_block_rank();
  tile[threadIdx.x] = in[threadIdx.x];  // FAULT race
  __syncthreads();
  const unsigned address = ptx::map_to_block(ptx::shared_address(tile), other);
  float four[4];
  ptx::load_cluster_f32x4(four, address);  // FAULT race or uninitialised-read
  out[blockIdx.x * 32 + threadIdx.x] = four[0];
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

// launch: grid 2, block 32
extern "C" __global__ void __cluster_dims__(2, 1, 1)
    block_that_is_not_there(const float* in, float* out) {
  __shared__ __align__(16) float tile[32];
  tile[threadIdx.x] = in[threadIdx.x];
  float four[4];
  ptx::load_cluster_f32x4(four, ptx::map_to_block(ptx::shared_address(tile), 2));  // FAULT cluster
  out[blockIdx.x * 32 + threadIdx.x] = four[0];
}
