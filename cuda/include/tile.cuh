// The product of a block in the generic kernels: a BLOCK_M x BLOCK_N tile of C in registers, and tiles of
// A and B in shared memory with a depth of BLOCK_K.
//
// A variant is chosen with -D: STORAGE (element type), INDEX (int or long long), BLOCK_M, BLOCK_N,
// BLOCK_K, THREAD_M, THREAD_N.  Each of the THREADS threads owns THREAD_M x THREAD_N sums.
#ifndef CUPYCONV_TILE_CUH
#define CUPYCONV_TILE_CUH

#include "index.cuh"
#include "numeric.cuh"

using Storage = STORAGE;
using Accumulator = typename Numeric<Storage>::Accumulator;

constexpr int THREADS_M = BLOCK_M / THREAD_M;
constexpr int THREADS_N = BLOCK_N / THREAD_N;
constexpr int THREADS = THREADS_M * THREADS_N;
static_assert(BLOCK_M % THREAD_M == 0 && BLOCK_N % THREAD_N == 0, "whole fragments only");
static_assert(THREADS >= BLOCK_K && THREADS % 32 == 0, "whole warps, one thread per tile column");

// A tile of A or B with k outermost.  Each row is padded by 4 elements, so that elements of adjacent k are
// in different banks and rows remain 16-byte aligned.
template <int EXTENT>
struct SharedTile {
  alignas(16) Accumulator element[BLOCK_K][EXTENT + 4];

  // Fills the tile with fetch(position, k), where position is a row of A or a column of B.  Adjacent
  // threads fetch adjacent k or adjacent positions, whichever is contiguous in memory.
  template <class Fetch>
  __device__ __forceinline__ void fill(bool along_k, Fetch fetch) {
#pragma unroll 4
    for (int i = threadIdx.x; i < EXTENT * BLOCK_K; i += THREADS) {
      const int k = along_k ? i % BLOCK_K : i / EXTENT;
      const int position = along_k ? i / BLOCK_K : i % EXTENT;
      element[k][position] = fetch(position, k);
    }
  }
};

// One thread's share of the tile of C.
struct Fragment {
  Accumulator sum[THREAD_M][THREAD_N];
  int row, column;  // row and column of sum[0][0] in the block's tile

  // Adjacent threads have adjacent rows or columns, whichever is contiguous in C.
  __device__ __forceinline__ explicit Fragment(bool along_rows) {
    const int thread = threadIdx.x;
    row = (along_rows ? thread % THREADS_M : thread / THREADS_N) * THREAD_M;
    column = (along_rows ? thread / THREADS_M : thread % THREADS_N) * THREAD_N;
#pragma unroll
    for (int m = 0; m < THREAD_M; ++m)
#pragma unroll
      for (int n = 0; n < THREAD_N; ++n) sum[m][n] = 0;
  }

  __device__ __forceinline__ void multiply(const SharedTile<BLOCK_M>& a,
                                           const SharedTile<BLOCK_N>& b) {
#pragma unroll
    for (int k = 0; k < BLOCK_K; ++k) {
      Accumulator left[THREAD_M], right[THREAD_N];
#pragma unroll
      for (int m = 0; m < THREAD_M; ++m) left[m] = a.element[k][row + m];
#pragma unroll
      for (int n = 0; n < THREAD_N; ++n) right[n] = b.element[k][column + n];
#pragma unroll
      for (int m = 0; m < THREAD_M; ++m)
#pragma unroll
        for (int n = 0; n < THREAD_N; ++n) multiply_add(sum[m][n], left[m], right[n]);
    }
  }
};

// The group and tile of a block.  Tiles of a group are numbered with gemm_n fastest, so that concurrent
// blocks share rows of A.
struct BlockTile {
  Index group, row, column;  // group, row and column of the tile's first element

  __device__ __forceinline__ BlockTile(Index gemm_m, Index gemm_n) {
    const Index tiles_n = (gemm_n + BLOCK_N - 1) / BLOCK_N;
    const Index tiles_m = (gemm_m + BLOCK_M - 1) / BLOCK_M;
    const Index tile = static_cast<Index>(blockIdx.x);
    column = tile % tiles_n * BLOCK_N;
    row = tile / tiles_n % tiles_m * BLOCK_M;
    group = tile / tiles_n / tiles_m;
  }
};

__device__ __forceinline__ Index smaller(Index a, Index b) { return a < b ? a : b; }

#endif
