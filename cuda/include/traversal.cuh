// A traversal is the order in which TMA loads read the pixels of a tensor under the taps of a filter.
//
// A load reads successive base pixels, all shifted by the offset of one tap.  In forward and
// backprop-filter, the base pixel is the first pixel of the window in x.  In backprop-input, each stride
// phase (StridePhase in gather.cuh) is a traversal over dy with reversed taps:
//
//   p = (i + base) + (taps - 1 - j) * spacing,
//
// which is a base pixel plus a non-negative offset.  In a 3-D layer, runs of frames that the same taps read
// may have traversals of their own; their tensor maps contain only the frames that they read.
// cupyconv/kernels/hopper.py computes the fields.
#ifndef CUPYCONV_TRAVERSAL_CUH
#define CUPYCONV_TRAVERSAL_CUH

// One dense problem: a whole pass, a stride phase of backprop-input, or a run of frames of either.  The
// axes are D, H, W.
struct TraversalPhase {
  int pixels[3];        // number of base pixels of one image
  int base[3];          // coordinate of the first base pixel
  int taps[3];          // number of taps that contribute
  int filter_first[3];  // coordinate of the first contributing tap in the filter
  int place_first[3];   // coordinate of the first pixel in the tensor that the pass writes
  int tile_rows;        // number of rows of tiles of C; with clusters, number of pairs of such rows
};

template <int COUNT>
struct Traversal {
  int stride[3];       // step between base pixels
  int spacing[3];      // step between taps in the tensor that the pass reads
  int filter_step[3];  // step between taps in the filter
  int place_step[3];   // step between pixels in the tensor that the pass writes
  int tile_columns;    // number of columns of tiles of C
  int tiles_of_group;  // number of tiles per group and split, in all phases
  int tiles;           // number of tiles in all groups and splits
  int steps_of_split;  // number of steps of BLOCK_K per split; the last split may have fewer
  TraversalPhase phase[COUNT];
};

#endif
