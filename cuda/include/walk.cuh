// How TMA walks over a tensor under the taps of a filter: the maps of maps.cuh in the form that the
// im2col mode of the tensor memory accelerator takes.
//
// An im2col load takes a column of base pixels and moves all of them by one tap.  Forward and
// backprop-filter read x at the window's first pixel plus the tap; backprop-input is, within each
// stride phase, the same walk over dy with the taps in reverse (StridePhase in gather.cuh):
//
//   p = i + shift - j * spacing = (i + shift - (taps - 1) * spacing) + (taps - 1 - j) * spacing,
//
// a base pixel plus a step that is never negative.  cupyconv/planning/families/hopper.py works the
// numbers out; cupyconv/gpu/hopper.py declares the same fields for NumPy.
#ifndef CUPYCONV_WALK_CUH
#define CUPYCONV_WALK_CUH

// One dense problem: a whole pass, or a stride phase of backprop-input.  Axes are D, H, W.
struct WalkPhase {
  int pixels[3];        // pixels of one image that are walked over
  int base[3];          // coordinate of the first base pixel
  int taps[3];          // taps that contribute
  int filter_first[3];  // the first of them, in the filter
  int place_first[3];   // the first pixel, in the tensor that the pass writes
  int tile_rows;        // tiles of C from top to bottom; pairs of them in a cluster
};

template <int COUNT>
struct Walk {
  int stride[3];       // from one base pixel to the next
  int spacing[3];      // from one tap to the next, in the tensor read
  int filter_step[3];  // from one tap to the next, in the filter
  int place_step[3];   // from one pixel to the next, in the tensor written
  int tile_columns;    // tiles of C from left to right
  int tiles_of_group;  // in all phases
  int tiles;           // in all groups and splits
  int steps_of_split;  // of BLOCK_K; the last split may have fewer
  WalkPhase phase[COUNT];
};

#endif
