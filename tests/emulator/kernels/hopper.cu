// c = a * b^T for bfloat16 matrices a (M x K), b (N x K): all Hopper features in one small
// kernel, for the emulator's own tests.
//
// A cluster of two blocks shares a tile of b; each block loads half of it for both.  In a block,
// one warp issues the copies and a warpgroup multiplies.  Tiles of 64 x 64 x 64, STAGES stages.
#include "ptx.cuh"

constexpr int STAGES = 3;
constexpr int TILE = 64;
constexpr int TILE_BYTES = TILE * TILE * 2;
constexpr int CONSUMERS = 128;
constexpr unsigned short BOTH = 3;

struct alignas(1024) Shared {
  unsigned char a[STAGES][TILE_BYTES];
  unsigned char b[STAGES][TILE_BYTES];
  unsigned char c[TILE_BYTES];
  unsigned long long full[STAGES], empty[STAGES];
};

__device__ __forceinline__ void wait_for(unsigned long long* barrier, unsigned parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

__device__ __forceinline__ void produce(Shared& shared, const ptx::TensorMap& map_a,
                                        const ptx::TensorMap& map_b, int steps) {
  const int rank = static_cast<int>(ptx::cluster_block_rank());
  const int m = static_cast<int>(blockIdx.x) * TILE, n = static_cast<int>(blockIdx.y) * TILE;
  for (int step = 0; step < steps; step++) {
    const int stage = step % STAGES;
    const unsigned parity = step / STAGES % 2;
    wait_for(&shared.empty[stage], parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(&shared.full[stage], 2 * TILE_BYTES);
    ptx::tma_load_2d(shared.a[stage], &map_a, &shared.full[stage], step * TILE, m);
    ptx::tma_load_2d_multicast(shared.b[stage] + rank * TILE_BYTES / 2, &map_b,
                               &shared.full[stage], step * TILE, n + rank * TILE / 2, BOTH);
  }
}

__device__ __forceinline__ void consume(Shared& shared, float (&d)[1][TILE / 2], int steps) {
  for (int step = 0; step < steps; step++) {
    const int stage = step % STAGES;
    const unsigned parity = step / STAGES % 2;
    wait_for(&shared.full[stage], parity);
    ptx::wgmma_fence(d);
    for (int k = 0; k < TILE / 16; k++) {
      const auto a = ptx::wgmma_descriptor<128>(shared.a[stage] + 32 * k, 16, 1024);
      const auto b = ptx::wgmma_descriptor<128>(shared.b[stage] + 32 * k, 16, 1024);
      ptx::wgmma_m64_bf16<TILE, 0, 0>(d[0], a, b, 1);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>(d);
    if (threadIdx.x % 32 == 0)
      for (unsigned block = 0; block < 2; block++)
        ptx::mbarrier_arrive_cluster(
            ptx::map_to_block(ptx::shared_address(&shared.empty[stage]), block));
  }
}

// A warp's accumulators are 16 rows; one stmatrix stores four of their 8 x 8 matrices to the tile,
// which is swizzled as in the tensor map.
__device__ __forceinline__ void store(Shared& shared, const float (&d)[TILE / 2],
                                      const ptx::TensorMap& map_c) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int column = 0; column < TILE; column += 16) {
    unsigned r[4];
    for (int i = 0; i < 4; i++) {
      const float* pair = &d[column / 2 + i / 2 * 4 + i % 2 * 2];
      r[i] = ptx::bf16x2_from_f32(pair[0], pair[1]);
    }
    const int row = 16 * warp + lane % 16;
    const int unit = column / 8 + lane / 16;
    ptx::stmatrix_x4(shared.c + row * 128 + (unit ^ row % 8) * 16, r);
  }
  ptx::fence_proxy_async();
  ptx::named_barrier_sync(1, CONSUMERS);
  if (threadIdx.x == 0) {
    ptx::tma_store_2d(&map_c, shared.c, static_cast<int>(blockIdx.y) * TILE,
                      static_cast<int>(blockIdx.x) * TILE);
    ptx::tma_store_commit();
    ptx::tma_store_wait<0>();
  }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(CONSUMERS + 128, 1)
    product(const __grid_constant__ ptx::TensorMap map_a,
            const __grid_constant__ ptx::TensorMap map_b,
            const __grid_constant__ ptx::TensorMap map_c, int steps) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; stage++) {
      ptx::mbarrier_init(&shared.full[stage], 1);
      ptx::mbarrier_init(&shared.empty[stage], 2 * CONSUMERS / 32);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (threadIdx.x >= CONSUMERS) {
    ptx::setmaxnreg_dec<24>();
    if (threadIdx.x < CONSUMERS + 32 && ptx::elect_one()) produce(shared, map_a, map_b, steps);
  } else {
    ptx::setmaxnreg_inc<240>();
    float d[1][TILE / 2];
    for (float& sum : d[0]) sum = 0.0f;
    consume(shared, d, steps);
    store(shared, d[0], map_c);
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
}
