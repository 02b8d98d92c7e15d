// Hopper: the three passes as implicit GEMMs on wgmma, fed by TMA, on compute capability 9.0.
// Operands are channels last (or, by conv_arrange.cu, copies that are) or images with channels first
// as they lie; the result lies as the caller wants it.
//
//   pass             gemm_m          gemm_n            gemm_k             A               B
//   forward          output pixels   filters           taps * channels    im2col(x)       w
//   backprop_input   input pixels    channels          taps * filters     im2col(dy)      w
//   backprop_filter  filters         taps * channels   output pixels      dy              im2col(x)
//
// backprop_filter changes A and B (WINDOW_ROWS) where filters are the last axis of w, so that C is
// contiguous along n, and with SPLIT where fewer tiles cover it so.  The im2col matrix exists only in
// shared memory: a TMA load in im2col mode brings BLOCK_M pixels of LINE channels under one tap, zeros
// where the window hangs over.
//
// Images with channels first (PLANAR) come in lines of LINE pixels of a row, for LINE channels at a
// time, and lie in shared memory with the pixels as lines.  A tap moves the whole line, and what hangs
// over is zero again.  The last line of a row is filled up: the product has more rows than pixels, which
// are dropped or, in backprop_filter, have zeros in dy.  There x may not have anything else, lest a
// NaN meet these zeros: a map for each tap along the row ends x where the last pixel reads it (MAPS).
//
// What it adds over conv_gather.cu: products of a whole warpgroup that read both operands from
// shared memory; loads that one thread issues, with no address arithmetic in the threads that
// multiply; and blocks that stay and compute one tile after the other, so that the first loads of a
// tile and the stores of the one before run under products.
//
//   producer     one thread: waits until a stage is empty, says how many bytes it expects, and
//                starts the loads of both operands; the stage becomes full when the bytes have come
//   consumers    two warpgroups: wait until a stage is full, multiply, give the stage back.  Each
//                has half of the tile's rows or, of narrow tiles (TURNS), every other tile
//
// A warpgroup has 64 rows, or a few times as many; its sums stay in registers, which the producer's
// warpgroup gives up for them (setmaxnreg).  With CLUSTER = 2, two blocks have tiles below each
// other and share B: each loads half of it for both.  Tiles are taken in bands of BAND rows, so that
// blocks that run together share operands in L2.
//
// Its launch, and that of conv_hopper_reduce, may begin before the one before has ended: after
// conv_arrange as soon as its blocks are all under way, after others, which do not say so, when they
// end.  What that one writes is waited for where it is read first.
//
// With SPLIT, gemm_k is shared out; each split writes float sums to a workspace, which
// conv_hopper_reduce adds in order.  Which block computes which tile never changes any bit.
//
// Operands are 16-bit types, or float as TF32, which wgmma takes only with lines along k: the
// forward pass with channels last in w, and backprop_input with filters last.  With PLANES = 3,
// they are float32 tensors that conv_planes.cu has split into three bfloat16 planes each, high to
// low; a product is then the six of planes whose product reaches 24 bits, and sums leave the tensor
// core's accumulator, which drops bits, for float registers every PROMOTION steps.
//
// A variant is chosen with -D: PASS (0, 1, 2 as in the table), STORAGE (of operands), RESULT (of C
// and the bias), PLANES, BLOCK_M, BLOCK_N, STAGES, CLUSTER, SPATIAL (axes), PHASES (stride phases
// of backprop_input, else 1), MAPS (of what is gathered), POINTWISE (1 x 1, stride 1, no padding,
// and not PLANAR: x is a plain matrix), PLANAR (x and dy that are read are channels first),
// FILTERS_LAST (of w), WINDOW_ROWS (of backprop_filter: whether A is x and not dy), STORE and RUN
// (how C is stored, hopper.cuh), SPLIT, ACTIVATION (epilogue.cuh; of forward and backprop_input),
// SHARED_BYTES.
#include "hopper.cuh"
#include "parts.cuh"

// The planes of A and B that are multiplied, the smallest products first.
constexpr int TERMS = PLANES == 1 ? 1 : 6;
struct Term {
  int a, b;
};
__device__ __forceinline__ Term term_at(int number) {
  constexpr unsigned A = 0x010120, B = 0x001102;  // a digit for each term, the last one leftmost
  return {static_cast<int>(A >> number * 4 & 3) * (TERMS > 1),
          static_cast<int>(B >> number * 4 & 3) * (TERMS > 1)};
}
constexpr int PROMOTION = 2;  // steps of all terms

// -- the shape of C ---------------------------------------------------------------------------------

// In backprop_filter the taps * channels side of C is cut into windows: LINE channels under a tap.
struct FilterWindows {
  int channel_blocks, count;

  __device__ __forceinline__ explicit FilterWindows(const ConvParameters& p)
      : channel_blocks(lines(p.channels)),
        count(channel_blocks * static_cast<int>(p.filter[0] * p.filter[1] * p.filter[2])) {}

  // The tap and first channel of a window; beyond the last window, a channel that does not exist.
  __device__ __forceinline__ Tap<int> at(int window, const ConvParameters& p) const {
    if (window >= count) return {static_cast<int>(p.channels), 0, 0, 0};
    Tap<int> tap = tap_at(window, channel_blocks, p.filter);
    tap.c *= LINE;
    return tap;
  }
};

// The pixels of an image as the product counts them: with PLANAR, rows of whole lines.
struct Image {
  long long sizes[3];

  __device__ __forceinline__ explicit Image(const WalkPhase& here)
      : sizes{here.pixels[0], here.pixels[1],
              PLANAR ? lines(here.pixels[2]) * LINE : here.pixels[2]} {}
  __device__ __forceinline__ int pixels() const {
    return static_cast<int>(sizes[0] * sizes[1] * sizes[2]);
  }
  __device__ __forceinline__ Pixel<int> at(int number) const { return pixel_at(number, sizes); }
};

// Where the elements of C lie.  An element's offset is that of its row plus that of its column;
// LINE columns, or what there are of them, are a constant step apart.
struct Output {
  static constexpr long long BEYOND = 1ll << 63;
  const ConvParameters& p;
  const Walk<PHASES>& walk;
  int group;

  __device__ __forceinline__ int rows(int phase) const {
    if constexpr (PASS == 2)
      return FILTERS_LAST ? FilterWindows(p).count * LINE : static_cast<int>(p.filters);
    return static_cast<int>(p.batch) * Image(walk.phase[phase]).pixels();
  }
  __device__ __forceinline__ int columns() const {
    if constexpr (PASS == 1) return static_cast<int>(p.channels);
    if constexpr (PASS == 2 && !FILTERS_LAST) return FilterWindows(p).count * LINE;
    return static_cast<int>(p.filters);
  }

  __device__ __forceinline__ long long row_offset(int row, int phase) const {
    if (row >= rows(phase)) return BEYOND;
    if constexpr (PASS == 2) {
      if (!FILTERS_LAST) return filter_offset(row);
      const Line line = window(row - row % LINE);
      return row % LINE < line.count ? line.offset + row % LINE * p.w_stride[1] : BEYOND;
    }
    const WalkPhase& here = walk.phase[phase];
    const Pixel<int> at = Image(here).at(row);
    if (PLANAR && at.w >= here.pixels[2]) return BEYOND;
    const Pixel<long long> pixel = {at.n, here.place_first[0] + at.d * walk.place_step[0],
                                    here.place_first[1] + at.h * walk.place_step[1],
                                    here.place_first[2] + at.w * walk.place_step[2]};
    return PASS == 0 ? pixel_offset(pixel, p.y_stride) + group * p.filters * column_step()
                     : pixel_offset(pixel, p.x_stride) + group * p.channels * column_step();
  }
  __device__ __forceinline__ Line line(int column) const {
    const int left = columns() - column;
    if constexpr (PASS != 2) return {column, left, column * column_step()};
    if constexpr (FILTERS_LAST) return {column, left, filter_offset(column)};
    return window(column);
  }
  __device__ __forceinline__ long long column_step() const {
    if constexpr (RUN > 1 && STORE != STORE_COLUMNS) return 1;
    if constexpr (PASS == 2) return p.w_stride[FILTERS_LAST ? 0 : 1];
    return (PASS == 0 ? p.y_stride : p.x_stride)[1];
  }
  // Columns of a split's sums in the workspace, so that each row begins with a whole piece.
  __device__ __forceinline__ int pitch() const { return (columns() + 7) / 8 * 8; }
  // Starts the store of 64 x 64 elements of C, which is a plain matrix.
  __device__ __forceinline__ void store_box(const ptx::TensorMap& map, const Result* buffer, int row,
                                            int column) const {
    ptx::tma_store_2d(&map, buffer, group * columns() + column, row);
  }

 private:
  __device__ __forceinline__ long long filter_offset(int filter) const {
    return (group * p.filters + filter) * p.w_stride[0];
  }
  // A line of channels under a tap.
  __device__ __forceinline__ Line window(int position) const {
    const Tap<int> at = FilterWindows(p).at(position / LINE, p);
    const Tap<long long> tap = {at.c, at.t, at.r, at.s};
    return {position, static_cast<int>(p.channels) - at.c, tap_offset(tap, p.w_stride)};
  }
};

// The steps of BLOCK_K of a tile.
struct Steps {
  int first, count;

  __device__ __forceinline__ Steps(const Tile& tile, const ConvParameters& p,
                                   const Walk<PHASES>& walk) {
    const WalkPhase& here = walk.phase[tile.phase];
    const int taps = here.taps[0] * here.taps[1] * here.taps[2];
    const int all = PASS == 2 ? lines(p.batch * Image(here).pixels())
                              : taps * lines(PASS == 0 ? p.channels : p.filters);
    first = tile.split * walk.steps_of_split;
    const int rest = all - first;
    count = rest < 0 ? 0 : rest < walk.steps_of_split ? rest : walk.steps_of_split;
  }
};

// -- producer ---------------------------------------------------------------------------------------

// Starts all loads.  Used by one thread, of few registers: what other blocks load is not kept, and
// in backprop_filter, which keeps most, steps are counted down.
struct Producer {
  SharedMemory& shared;
  const TensorMaps& maps;
  const ConvParameters& p;
  const Walk<PHASES>& walk;
  int rank;
  FilterLoader filter;
  Cursor<STAGES> cursor;
  unsigned long long* full;  // of the stage being loaded

  __device__ __forceinline__ Stage& acquire() {
    wait_for(&shared.empty[cursor.stage], cursor.parity ^ 1);
    full = &shared.full[cursor.stage];
    ptx::mbarrier_arrive_expect_tx(full, sizeof(Stage));
    return shared.stages[cursor.stage];
  }

#if PASS == 2
  // A product over pixels: LINE of them in a step, of LINE channels or filters in each box.
  __device__ __forceinline__ void load(const Tile& tile, const Steps& steps) {
    constexpr int A_BOXES = BLOCK_M / LINE, B_BOXES = BLOCK_N / LINE;
    const OwnBoxes<WINDOW_ROWS ? A_BOXES : B_BOXES, !WINDOW_ROWS> windows(rank);
    const OwnBoxes<WINDOW_ROWS ? B_BOXES : A_BOXES, WINDOW_ROWS> filters(rank);
    const int first_window = (WINDOW_ROWS ? tile.row : tile.column) / LINE + windows.first;
    const int first_filter = (WINDOW_ROWS ? tile.column : tile.row) + filters.first * LINE +
                             tile.group * static_cast<int>(p.filters);
    Tap<int> window[windows.COUNT];
#pragma unroll
    for (int i = 0; i < windows.COUNT; ++i) {
      window[i] = FilterWindows(p).at(first_window + i, p);
      const bool exists = window[i].c < static_cast<int>(p.channels);
      window[i].c = exists ? tile.group * static_cast<int>(p.channels) + window[i].c
                           : static_cast<int>(p.groups * p.channels);
    }
    const Image image(walk.phase[0]);
    int number = steps.first * BLOCK_K;
    Pixel<int> pixel = image.at(number);
#pragma unroll 1
    for (int left = steps.count; left > 0; --left) {
#pragma unroll 1
      for (int product = 0; product < TERMS; ++product) {
        const Term term = term_at(product);
        Stage& stage = acquire();
        Storage* const under_taps = (WINDOW_ROWS ? stage.a : stage.b) + windows.first * BOX;
#pragma unroll
        for (int i = 0; i < windows.COUNT; ++i)
          load_gathered<LINE>(under_taps + i * BOX, 0, window[i], pixel, number,
                              WINDOW_ROWS ? term.a : term.b, windows.TO_BOTH);
        Storage* const other = (WINDOW_ROWS ? stage.b : stage.a) + filters.first * BOX;
#pragma unroll
        for (int i = 0; i < filters.COUNT; ++i) {
          const int filter = first_filter + i * LINE;
          if (PLANAR)
            load_line(other + i * BOX, maps.other, filter, pixel, filters.TO_BOTH);
          else
            load_box(other + i * BOX, maps.other, filter, number, WINDOW_ROWS ? term.b : term.a,
                     filters.TO_BOTH);
        }
        cursor.advance();
      }
      number += BLOCK_K;
      if (PLANAR)
        to_next_line(pixel, walk.phase[0]);
      else
        pixel = image.at(number);
    }
  }
#else
  // A product over taps and, fastest, the channels (or filters) under each.
  __device__ __forceinline__ void load(const Tile& tile, const Steps& steps) {
    const WalkPhase& here = walk.phase[tile.phase];
    const int depth = static_cast<int>(PASS == 0 ? p.channels : p.filters);
    const Pixel<int> pixel = Image(here).at(tile.row);
    const long long taps[3] = {here.taps[0], here.taps[1], here.taps[2]};
    if (steps.count == 0) return;  // a phase without taps
    Tap<int> tap = tap_at(steps.first, lines(depth), taps);
#pragma unroll 1
    for (int step = 0; step < steps.count; ++step) {
      const int k = tap.c * BLOCK_K;
      const Tap<int> channels = {tile.group * depth + k, tap.t, tap.r, tap.s};
#pragma unroll 1
      for (int number = 0; number < TERMS; ++number) {
        const Term term = term_at(number);
        Stage& stage = acquire();
        load_gathered<BLOCK_M>(stage.a, tile.phase, channels, pixel, tile.row, term.a, false);
        filter.load(stage.b, full, tile, k, tap, term.b);
        cursor.advance();
      }
      next(tap, here, lines(depth));
    }
  }

  __device__ __forceinline__ static void next(Tap<int>& tap, const WalkPhase& here, int blocks) {
    if (++tap.c < blocks) return;
    tap.c = 0;
    if (++tap.s < here.taps[2]) return;
    tap.s = 0;
    if (++tap.r < here.taps[1]) return;
    tap.r = 0;
    ++tap.t;
  }
#endif

 private:
  // Where a pixel is read under no tap.
  __device__ __forceinline__ Pixel<int> base_of(const Pixel<int>& pixel,
                                                const WalkPhase& here) const {
    return {pixel.n, here.base[0] + pixel.d * walk.stride[0],
            here.base[1] + pixel.h * walk.stride[1], here.base[2] + pixel.w * walk.stride[2]};
  }

  __device__ __forceinline__ void load_box(Storage* to, const ptx::TensorMap& map, int inner,
                                           int second, int third, bool to_both) {
    if (to_both)
      ptx::tma_load_3d_multicast(to, &map, full, inner, second, third, BOTH_BLOCKS);
    else
      ptx::tma_load_3d(to, &map, full, inner, second, third);
  }
  // From a line of pixels of a row to the next one, of images that are PLANAR.
  __device__ __forceinline__ static void to_next_line(Pixel<int>& line, const WalkPhase& here) {
    if ((line.w += LINE) < here.pixels[2]) return;
    line.w = 0;
    if (++line.h < here.pixels[1]) return;
    line.h = 0;
    ++line.n;
  }
  // LINE pixels of a row from one on, of LINE channels.
  __device__ __forceinline__ void load_line(Storage* to, const ptx::TensorMap& map, int channel,
                                            const Pixel<int>& at, bool to_both) {
#if SPATIAL == 1
    load_box(to, map, at.w, channel, at.n, to_both);
#else
    if (to_both)
      ptx::tma_load_4d_multicast(to, &map, full, at.w, at.h, channel, at.n, BOTH_BLOCKS);
    else
      ptx::tma_load_4d(to, &map, full, at.w, at.h, channel, at.n);
#endif
  }

  // PIXELS pixels of a walk, from one with a number on, LINE channels of each from tap.c on, under a
  // tap.  In im2col mode, planes are further images.
  template <int PIXELS>
  __device__ __forceinline__ void load_gathered(Storage* to, int phase, const Tap<int>& tap,
                                                const Pixel<int>& pixel, int number, int plane,
                                                bool to_both) {
    const WalkPhase& here = walk.phase[phase];
#if PLANAR
    const ptx::TensorMap& map = maps.gathered[MAPS > 1 ? tap.s : 0];
    Pixel<int> line = pixel;
#pragma unroll
    for (int first = 0; first < PIXELS; first += LINE) {
      Pixel<int> at = base_of(line, here);
      at.h += tap.r * walk.spacing[1];
      at.w += tap.s * walk.spacing[2];
      load_line(to + first * LINE, map, tap.c, at, to_both);
      to_next_line(line, here);
    }
#elif POINTWISE
    load_box(to, maps.gathered[0], tap.c, number, plane, to_both);
#else
    const ptx::TensorMap* map = &maps.gathered[phase];
    const Pixel<int> base = base_of(pixel, here);
    const int image = base.n + plane * static_cast<int>(p.batch);
    const auto off_w = static_cast<unsigned short>(tap.s * walk.spacing[2]);
#if SPATIAL == 1
    if (to_both)
      ptx::tma_load_im2col_3d_multicast(to, map, full, tap.c, base.w, image, off_w, BOTH_BLOCKS);
    else
      ptx::tma_load_im2col_3d(to, map, full, tap.c, base.w, image, off_w);
#else
    const auto off_h = static_cast<unsigned short>(tap.r * walk.spacing[1]);
#if SPATIAL == 2
    if (to_both)
      ptx::tma_load_im2col_4d_multicast(to, map, full, tap.c, base.w, base.h, image, off_w, off_h,
                                        BOTH_BLOCKS);
    else
      ptx::tma_load_im2col_4d(to, map, full, tap.c, base.w, base.h, image, off_w, off_h);
#else
    const auto off_d = static_cast<unsigned short>(tap.t * walk.spacing[0]);
    if (to_both)
      ptx::tma_load_im2col_5d_multicast(to, map, full, tap.c, base.w, base.h, base.d, image, off_w,
                                        off_h, off_d, BOTH_BLOCKS);
    else
      ptx::tma_load_im2col_5d(to, map, full, tap.c, base.w, base.h, base.d, image, off_w, off_h,
                              off_d);
#endif
#endif
#endif
  }
};

// -- consumers --------------------------------------------------------------------------------------

// One warpgroup's rows of a tile.
struct Consumer {
  SharedMemory& shared;
  OperandA a;  // its rows, in the first stage
  OperandB b;
  Cursor<STAGES> cursor;

  __device__ __forceinline__ Consumer(SharedMemory& shared, int first_row)
      : shared(shared),
        a(OperandA(shared.stages[0].a).from(first_row, 0)),
        b(shared.stages[0].b) {}

  // Leaves a tile of so many steps to the other warpgroup.
  __device__ __forceinline__ void pass_over(int steps) { cursor.advance_by(steps * TERMS); }

  // Sets the sums to the products of some steps.  One step's products run while the next stage is
  // waited for.
  __device__ __forceinline__ void multiply_steps(Sums& sums, int steps) {
    int previous = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_for(&shared.full[cursor.stage], cursor.parity);
      const unsigned stage = cursor.stage * sizeof(Stage);
      start_products(sums, a.further(stage), b.further(stage), step > 0);
      ptx::wgmma_wait<1>();
      if (step > 0) release_in_cluster(&shared.empty[previous]);
      previous = cursor.stage;
      cursor.advance();
    }
    ptx::wgmma_wait<0>();
    if (steps > 0) release_in_cluster(&shared.empty[previous]);
  }

  // The products of all steps of a tile.
  __device__ __forceinline__ void multiply_tile(Sums& sums, int steps) {
    clear(sums);
#if PLANES == 1
    multiply_steps(sums, steps);
#else
#pragma unroll 1
    for (int step = 0; step < steps; step += PROMOTION) {
      Sums part;
      multiply_steps(part, (steps - step < PROMOTION ? steps - step : PROMOTION) * TERMS);
#pragma unroll
      for (int i = 0; i < PRODUCTS; ++i)
#pragma unroll
        for (int j = 0; j < BLOCK_N / 2; ++j) sums[i][j] += part[i][j];
    }
#endif
  }
};

#if SPLIT
static_assert(PHASES == 1, "an element of C is found in the only phase");

// Whether the product is the transpose of C.
constexpr bool TRANSPOSED = PASS == 2 && WINDOW_ROWS != FILTERS_LAST;

// Stores the sums of one split, as they are: (split, group, row, column) of C in the workspace.
__device__ __forceinline__ void store_partial(const Sums& sums, const Tile& tile,
                                              const Output& output,
                                              const Epilogue<Output>& epilogue, float* partial) {
  const int rows = output.rows(tile.phase), pitch = output.pitch();
  partial += (tile.split * output.p.groups + tile.group) * static_cast<long long>(rows) * pitch;
  const auto row_at = [&](int row) {
    if constexpr (TRANSPOSED) return row < pitch ? partial + row : nullptr;
    return row < rows ? partial + static_cast<long long>(row) * pitch : nullptr;
  };
  const auto same = [](int column) { return column; };
  epilogue.for_each_pair(sums, tile, row_at, same,
                         [&](float* row, int line, int place, const float(&pair)[2]) {
                           const int column = line + place;
                           if (row == nullptr) return;
                           if constexpr (!TRANSPOSED) {
                             if (column < pitch) store_piece(row + column, pair);
                             return;
                           }
#pragma unroll
                           for (int i = 0; i < 2; ++i)
                             if (column + i < rows)
                               row[static_cast<long long>(column + i) * pitch] = pair[i];
                         });
}
#endif

// -- kernels ----------------------------------------------------------------------------------------

// c is y, dx or dw; bias is of y or dx and may be null; partial is the workspace of SPLIT.
extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1)
    conv_hopper(const Result* __restrict__ bias, Result* __restrict__ c,
                float* __restrict__ partial, const __grid_constant__ TensorMaps maps,
                const __grid_constant__ Walk<PHASES> walk,
                const __grid_constant__ ConvParameters p) {
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_memory);
  if (threadIdx.x == CONSUMERS * WARPGROUP) maps.prefetch();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], 1);
      ptx::mbarrier_init(&shared.empty[stage], CLUSTER * CONSUMERS_OF_TILE * WARPGROUP / 32);
    }
    for (auto& barrier : shared.turn) ptx::mbarrier_init(&barrier, WARPGROUP / 32);
    ptx::fence_mbarrier_init();
  }
  synchronise_cluster();  // no block loads into another whose barriers are not ready

  const Schedule schedule;
  const int warpgroup = warpgroup_of_thread();
  if (warpgroup == CONSUMERS) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x < CONSUMERS * WARPGROUP + 32 && ptx::elect_one()) {
      const FilterLoader filter = {maps.other, p, walk, schedule.rank};
      Producer producer = {shared, maps, p, walk, schedule.rank, filter};
      ptx::griddepcontrol_wait();  // operands may be copies that the launch before makes
      for (int number = schedule.first; number < walk.tiles; number += schedule.step) {
        const Tile tile(number, schedule.rank, p, walk);
        producer.load(tile, Steps(tile, p, walk));
      }
    }
  } else {
    ptx::setmaxnreg_inc<232>();
    const int first_row = TURNS ? 0 : warpgroup * CONSUMER_ROWS;
    Consumer consumer(shared, first_row);
    Epilogue<Output> epilogue = {shared, bias, p, warpgroup, first_row};
    Turn turn(shared.turn, warpgroup);
    int next = 0;  // whose turn it is
#pragma unroll 1
    for (int number = schedule.first; number < walk.tiles; number += schedule.step) {
      const Tile tile(number, schedule.rank, p, walk);
      const int steps = Steps(tile, p, walk).count;
      if (TURNS && warpgroup != next++ % CONSUMERS) {
        consumer.pass_over(steps);
        continue;
      }
      Sums sums;
      float biases[Epilogue<Output>::BIASES];
      epilogue.load_biases(biases, tile);
      if (TURNS) turn.wait();
      consumer.multiply_tile(sums, steps);
      if (TURNS) turn.pass_on();
      const Output output = {p, walk, tile.group};
#if SPLIT
      store_partial(sums, tile, output, epilogue, partial);
#else
      epilogue.share_biases(biases);
      epilogue.store(sums, tile, output, maps.c, c);
#endif
    }
    epilogue.finish();
  }
#if CLUSTER > 1
  synchronise_cluster();  // no block leaves while another may still reach its shared memory
#endif
}

#if SPLIT
// Adds the splits' sums in order, one thread those of eight columns of C.
extern "C" __global__ void __launch_bounds__(ADDING_THREADS, 1)
    conv_hopper_reduce(const float* __restrict__ partial, const Result* __restrict__ bias,
                       Result* __restrict__ c, const int splits,
                       const __grid_constant__ Walk<PHASES> walk,
                       const __grid_constant__ ConvParameters p) {
  constexpr int COLUMNS = 8;
  const Output all = {p, walk, 0};
  const int pitch = all.pitch();
  const long long matrix = static_cast<long long>(all.rows(0)) * pitch;
  const long long elements = p.groups * matrix;
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long element = thread * COLUMNS;
  if (element >= elements) return;

  ptx::griddepcontrol_wait();  // the launch before has written the sums
  float sums[COLUMNS];
  add_parts(sums, partial + element, splits, elements);
  const Output output = {p, walk, static_cast<int>(element / matrix)};
  const int row = static_cast<int>(element % matrix / pitch);
  const int column = static_cast<int>(element % pitch);
  const long long row_offset = output.row_offset(row, 0);
  if (row_offset == Output::BEYOND) return;
  const int first_channel = output.group * static_cast<int>(result_channels(p)) + column;
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i)
    sums[i] = activate<ACTIVATION>(sums[i] + bias_of(first_channel + i, p, bias));
  const int place = column % LINE;
  store_in_line(c + row_offset, output.line(column - place), place, output.column_step(), sums);
}
#endif
