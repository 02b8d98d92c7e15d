// Where the elements of an implicit GEMM are: halves of addresses.
//
// Every pass multiplies a matrix that gathers pixels under taps.  The address of its element
// (pixel, tap) is the sum of two offsets, one that depends on the pixel only and one on the tap only:
//
//   forward, backprop-filter   h = (p * stride - pad) + r * dilation      read x at h
//   backprop-input             p = (i + shift) - j * spacing              read dy at p, within a
//                                                                         stride phase
//
// Whether it lies inside the tensor depends on both, but on each axis by itself.  So a tap is known
// by one bit on each axis, a pixel by the bits of the taps that miss the tensor from there, and the
// element exists where the two have no bit in common.
#ifndef CUPYCONV_GATHER_CUH
#define CUPYCONV_GATHER_CUH

#include "maps.cuh"

// Bits for T + R + S taps and for one that no tap has; TAP_WORDS words hold them.
struct TapBits {
  unsigned word[TAP_WORDS];

  __device__ __forceinline__ void fill(unsigned value) {
#pragma unroll
    for (int i = 0; i < TAP_WORDS; ++i) word[i] = value;
  }
  __device__ __forceinline__ void set(int bit) {
#pragma unroll
    for (int i = 0; i < TAP_WORDS; ++i)
      if (TAP_WORDS == 1 || bit / 32 == i) word[i] |= 1u << (bit % 32);
  }
  __device__ __forceinline__ bool meets(const TapBits& other) const {
    unsigned common = 0;
#pragma unroll
    for (int i = 0; i < TAP_WORDS; ++i) common |= word[i] & other.word[i];
    return common != 0;
  }
};

// Half of an element's address.  Those of pixels have the bit that no tap has, those of taps have at
// least one other, and those beyond the end of the matrix have all bits: so these exist with none.
// An operand that is just a matrix counts as pixels under a single tap.
template <class Index>
struct alignas(TAP_WORDS == 1 ? 8 : sizeof(Index)) Half {
  Index offset;
  TapBits bits;

  __device__ __forceinline__ Half() {}

  static __device__ __forceinline__ Half of_pixel(Index offset) {
    Half half;
    half.offset = offset;
    half.bits.fill(0);
    half.bits.set(32 * TAP_WORDS - 1);
    return half;
  }
  static __device__ __forceinline__ Half of_tap(Index offset) {
    Half half;
    half.offset = offset;
    half.bits.fill(0);
    return half;
  }
  static __device__ __forceinline__ Half of_only_tap(Index offset) {
    Half half = of_tap(offset);
    half.bits.set(0);
    return half;
  }
  static __device__ __forceinline__ Half beyond() {
    Half half;
    half.offset = 0;
    half.bits.fill(~0u);
    return half;
  }

  // Sets the bits, from FIRST on, of those of an axis's taps that miss a tensor of that size: the
  // first tap is at a coordinate, the others go on in steps.
  __device__ __forceinline__ void mark_outside(int first, int taps, Index coordinate, Index step,
                                               Index size) {
    for (int tap = 0; tap < taps; ++tap, coordinate += step)
      if (coordinate < 0 || coordinate >= size) bits.set(first + tap);
  }
};

// One stride phase of backprop-input, as cupyconv/gpu/gather.py works it out.
//
// Input pixels h with the same (h + pad) mod stride are fed by the same taps, every step-th one, and
// within them the gradient is a dense convolution with stride 1: with h = first_pixel + i * stride
// and r = first_tap + j * step,
//
//   p = (h + pad - r * dilation) / stride = i + shift - j * spacing.
struct StridePhase {
  int first_pixel[3], pixels[3];
  int first_tap[3], taps[3];
  int shift[3];
  int end;  // of its tiles, counted over the phases of a group
};

template <int COUNT>
struct StridePhases {
  int step[3], spacing[3];
  StridePhase phase[COUNT];
};

#endif
