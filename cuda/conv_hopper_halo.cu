// Hopper: conv_hopper.cu's forward pass and backprop_input for filters of several rows and stride 1,
// which read the input once for each column of the filter instead of once for each tap.
//
//   pass             gemm_m          gemm_n      gemm_k                                        A    B
//   forward          output pixels   filters     channels, filter columns, filter rows         x    w
//   backprop_input   input pixels    channels    filters, filter columns, filter rows          dy   w
//
// A tile of C is a rectangle of pixels: ROWS rows of 8 columns, of one or several images.  Under the
// taps of one column of the filter lie the same 8 columns of the input, further down by a row for
// each row of the filter, so that together they are one box, with a halo of HALO rows:
//
//               . . . . . . . .  <- A under the filter's first row: ROWS rows from here on
//               . . . . . . . .  <- under its second
//               . . . . . . . .  <- under its third
//               . . . . . . . .
//
// A row of the box, 8 pixels of LINE channels, is 1024 bytes: the period of the swizzle in shared
// memory.  A box that is loaded once, in TMA's tiled mode, therefore serves as operand A of every row
// of the filter, from another 1024 bytes on each.  A 3 x 3 filter on 16 rows then loads 3 * 18 rows
// where the im2col mode loads 9 * 16.
//
// The price is at the edges: what of a rectangle hangs over the tensor is computed and not stored.
//
//   producer     one thread: for each block of channels and column of the filter, a box of the
//                input; for each row of the filter, its tile of w; into a ring of stages each
//   consumers    two warpgroups, each with half of the tile's pixels
//
// A variant is chosen with -D as of conv_hopper.cu, with PASS 0 or 1 and PHASES 1, and: ROWS (of
// pixels in a tile, 8 or a multiple), HALO (rows of the input that the taps reach further down),
// STAGES (of w) and BOX_STAGES (stages of the input).  STORE is STORE_BOXES or STORE_FLOAT.
#include "hopper.cuh"

static_assert(PASS != 2 && PHASES == 1, "a filter walked over with stride 1");

// A product's 64 rows are a square of pixels.
constexpr int SIDE = 8;
constexpr int SQUARES = ROWS / SIDE;  // of a tile below each other
constexpr int IMAGES = BLOCK_M / (ROWS * SIDE);
static_assert(SQUARES * IMAGES * SIDE * SIDE == BLOCK_M, "a tile is cut into squares");

struct alignas(1024) Box {
  Storage pixels[IMAGES * (ROWS + HALO) * SIDE * LINE];
};
struct alignas(1024) FilterTile {
  Storage w[BLOCK_N * BLOCK_K];
};

struct SharedMemory {
  Box boxes[BOX_STAGES];
  FilterTile filter[STAGES];
  OutputBuffer output[CONSUMERS][2];
  unsigned long long box_full[BOX_STAGES], box_empty[BOX_STAGES];
  unsigned long long filter_full[STAGES], filter_empty[STAGES];
};
static_assert(sizeof(SharedMemory) == SHARED_BYTES, "the launch asks for as much");

// -- the shape of C ---------------------------------------------------------------------------------

// The rectangles that the pixels are cut into: by images, then downwards, then to the right.
struct Rectangles {
  const WalkPhase& walked;

  // The first pixel of a tile of C, from its first row.
  __device__ __forceinline__ Pixel<int> first_pixel(int row) const {
    const int across = (walked.pixels[2] + SIDE - 1) / SIDE;
    const int down = (walked.pixels[1] + ROWS - 1) / ROWS;
    const int number = row / BLOCK_M;
    const int above = number / across;
    return {above / down * IMAGES, 0, above % down * ROWS, number % across * SIDE};
  }
  // The pixel of any row of C.
  __device__ __forceinline__ Pixel<int> pixel(int row) const {
    const int inside = row % BLOCK_M, line = inside / SIDE;
    Pixel<int> pixel = first_pixel(row);
    pixel.n += line / ROWS;
    pixel.h += line % ROWS;
    pixel.w += inside % SIDE;
    return pixel;
  }
};

// Where the elements of C lie, as Epilogue asks.
struct Output {
  static constexpr long long BEYOND = -1;
  const ConvParameters& p;
  const WalkPhase& walked;
  int group;

  __device__ __forceinline__ int columns() const {
    return static_cast<int>(PASS == 0 ? p.filters : p.channels);
  }
  __device__ __forceinline__ long long row_offset(int row, int) const {
    const Pixel<int> at = Rectangles{walked}.pixel(row);
    if (at.n >= p.batch || at.h >= walked.pixels[1] || at.w >= walked.pixels[2]) return BEYOND;
    const Pixel<long long> pixel = {at.n, 0, at.h, at.w};
    return pixel_offset(pixel, PASS == 0 ? p.y_stride : p.x_stride) + group * columns();
  }
  __device__ __forceinline__ Line line(int column) const {
    return {column, columns() - column, column};
  }
  // Starts the store of a square of pixels, 64 filters or channels of each; what lies outside the
  // tensor is left out.
  __device__ __forceinline__ void store_box(const ptx::TensorMap& map, const Result* buffer, int row,
                                            int column) const {
    const Pixel<int> at = Rectangles{walked}.pixel(row);
    ptx::tma_store_4d(&map, buffer, group * columns() + column, at.w, at.h, at.n);
  }
};

// -- producer ---------------------------------------------------------------------------------------

// Starts all loads.  Used by one thread.
struct Producer {
  SharedMemory& shared;
  const TensorMaps& maps;
  const ConvParameters& p;
  const Walk<PHASES>& walk;
  FilterLoader filter;
  Cursor<BOX_STAGES> box;
  Cursor<STAGES> stage;

  __device__ __forceinline__ void load(const Tile& tile) {
    const WalkPhase& here = walk.phase[0];
    const int depth = static_cast<int>(PASS == 0 ? p.channels : p.filters);
    Pixel<int> first = Rectangles{here}.first_pixel(tile.row);
    first.h += here.base[1];
    first.w += here.base[2];
#pragma unroll 1
    for (int k = 0; k < depth; k += BLOCK_K)
#pragma unroll 1
      for (int s = 0; s < here.taps[2]; ++s) {
        load_box(tile.group * depth + k, first, s);
#pragma unroll 1
        for (int r = 0; r < here.taps[1]; ++r) load_filter(tile, k, {0, 0, r, s});
      }
  }

 private:
  __device__ __forceinline__ void load_box(int channel, const Pixel<int>& first, int s) {
    wait_for(&shared.box_empty[box.stage], box.parity ^ 1);
    unsigned long long* const full = &shared.box_full[box.stage];
    ptx::mbarrier_arrive_expect_tx(full, sizeof(Box));
    ptx::tma_load_4d(&shared.boxes[box.stage], &maps.gathered[0], full, channel,
                     first.w + s * walk.spacing[2], first.h, first.n);
    box.advance();
  }
  __device__ __forceinline__ void load_filter(const Tile& tile, int k, const Tap<int>& tap) {
    wait_for(&shared.filter_empty[stage.stage], stage.parity ^ 1);
    unsigned long long* const full = &shared.filter_full[stage.stage];
    ptx::mbarrier_arrive_expect_tx(full, sizeof(FilterTile));
    filter.load(shared.filter[stage.stage].w, full, tile, k, tap, 0);
    stage.advance();
  }
};

// -- consumers --------------------------------------------------------------------------------------

// One warpgroup's half of a tile.
struct Consumer {
  SharedMemory& shared;
  const Walk<PHASES>& walk;
  int number;  // of the warpgroup
  Cursor<BOX_STAGES> box;
  Cursor<STAGES> stage;

  // The products of a tile, over so many boxes.  One step's products run while the next stage is
  // waited for.
  __device__ __forceinline__ void multiply_tile(Sums& sums, int boxes) {
    const int rows = walk.phase[0].taps[1];
    bool begun = false;
    int previous_box = 0, previous_stage = 0;
#pragma unroll 1
    for (int i = 0; i < boxes; ++i) {
      wait_for(&shared.box_full[box.stage], box.parity);
      const Storage* const pixels = shared.boxes[box.stage].pixels;
#pragma unroll 1
      for (int r = 0; r < rows; ++r) {
        wait_for(&shared.filter_full[stage.stage], stage.parity);
        start_products(sums, pixels, shared.filter[stage.stage].w, begun,
                       [&](int product) { return first_line(product, r); });
        ptx::wgmma_wait<1>();
        if (begun) {
          release_in_cluster(&shared.filter_empty[previous_stage]);
          if (r == 0) release(&shared.box_empty[previous_box]);
        }
        begun = true;
        previous_stage = stage.stage;
        stage.advance();
      }
      previous_box = box.stage;
      box.advance();
    }
    ptx::wgmma_wait<0>();
    release_in_cluster(&shared.filter_empty[previous_stage]);
    release(&shared.box_empty[previous_box]);
  }

 private:
  // The first pixel in a box of one of this warpgroup's products, under a row of the filter.
  __device__ __forceinline__ int first_line(int product, int r) const {
    const int square = number * PRODUCTS + product;
    const int row = square / SQUARES * (ROWS + HALO) + square % SQUARES * SIDE;
    return (row + r * walk.spacing[1]) * SIDE;
  }
};

// -- kernel -----------------------------------------------------------------------------------------

// c is y or dx; bias may be null.
extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1)
    conv_hopper_halo(const Result* __restrict__ bias, Result* __restrict__ c,
                     const __grid_constant__ TensorMaps maps,
                     const __grid_constant__ Walk<PHASES> walk,
                     const __grid_constant__ ConvParameters p) {
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_memory);
  constexpr int WARPS = CONSUMERS * WARPGROUP / 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < BOX_STAGES; ++stage) {
      ptx::mbarrier_init(&shared.box_full[stage], 1);
      ptx::mbarrier_init(&shared.box_empty[stage], WARPS);
    }
    for (int stage = 0; stage < STAGES; ++stage) {
      ptx::mbarrier_init(&shared.filter_full[stage], 1);
      ptx::mbarrier_init(&shared.filter_empty[stage], CLUSTER * WARPS);
    }
    ptx::fence_mbarrier_init();
  }
  synchronise_cluster();  // no block loads into another whose barriers are not ready

  const Schedule schedule;
  const int warpgroup = threadIdx.x / WARPGROUP;
  if (warpgroup == CONSUMERS) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x < CONSUMERS * WARPGROUP + 32 && ptx::elect_one()) {
      const FilterLoader filter = {maps.other, p, walk, schedule.rank};
      Producer producer = {shared, maps, p, walk, filter};
      for (int number = schedule.first; number < walk.tiles; number += schedule.step)
        producer.load(Tile(number, schedule.rank, p, walk));
    }
  } else {
    ptx::setmaxnreg_inc<232>();
    const int boxes = lines(PASS == 0 ? p.channels : p.filters) * walk.phase[0].taps[2];
    Consumer consumer = {shared, walk, warpgroup};
    Epilogue<Output> epilogue = {shared.output[warpgroup], p, warpgroup};
#pragma unroll 1
    for (int number = schedule.first; number < walk.tiles; number += schedule.step) {
      const Tile tile(number, schedule.rank, p, walk);
      Sums sums;
      consumer.multiply_tile(sums, boxes);
      epilogue.store(sums, tile, {p, walk.phase[0], tile.group}, maps.c, c, bias);
    }
    epilogue.finish();
  }
#if CLUSTER > 1
  synchronise_cluster();  // no block leaves while another may still reach its shared memory
#endif
}
