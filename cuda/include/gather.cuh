// Addresses of the elements of an implicit GEMM, as sums of two halves.
//
// Every pass multiplies a matrix that gathers pixels under taps.  The address of an element
// (pixel, tap) is the sum of two offsets, one for the pixel and one for the tap:
//
//   forward, backprop-filter   h = (p * stride - pad) + r * dilation      read x at h
//   backprop-input             p = (i + base) + (taps - 1 - j) * spacing  read dy at p (StridePhase)
//
// Whether the element is inside the tensor depends on the pixel and the tap, separately on each axis.
// Therefore each tap sets one bit per axis, for its position along the axis.  Each pixel sets the bits
// of all taps that miss the tensor from this pixel.  The element is inside if the two sets of bits have
// no bit in common.
#ifndef CUPYCONV_GATHER_CUH
#define CUPYCONV_GATHER_CUH

#include "maps.cuh"

// A set of bits in TAP_WORDS 32-bit words: T + R + S bits for the positions of taps, and a spare bit, the
// highest bit of the last word.
struct TapBits {
  unsigned word[TAP_WORDS];

  __device__ __forceinline__ void fill(unsigned value) {
#pragma unroll
    for (int i = 0; i < TAP_WORDS; ++i) word[i] = value;
  }
  __device__ __forceinline__ void set(int bit) {
#pragma unroll
    for (int i = 0; i < TAP_WORDS; ++i)
      word[i] |= TAP_WORDS == 1 || bit / 32 == i ? 1u << (bit % 32) : 0;
  }
  // Clears the bits from `first` to `end` - 1.
  __device__ __forceinline__ void clear(int first, int end) {
#pragma unroll
    for (int i = 0; i < TAP_WORDS; ++i) word[i] &= ~(below(end - 32 * i) - below(first - 32 * i));
  }
  __device__ __forceinline__ bool meets(const TapBits& other) const {
    unsigned common = 0;
#pragma unroll
    for (int i = 0; i < TAP_WORDS; ++i) common |= word[i] & other.word[i];
    return common != 0;
  }

 private:
  // Returns the bits of a word below `bit`; a single word has less than 32 bits of taps.
  static __device__ __forceinline__ unsigned below(int bit) {
    if (TAP_WORDS > 1 && bit <= 0) return 0;
    return TAP_WORDS > 1 && bit >= 32 ? ~0u : (1u << bit) - 1;
  }
};

// Half of an element's address: an offset, and the bits that decide whether the element is inside the
// tensor.  A half beyond the end of the matrix has all bits set.  Every other half has at least one bit
// set: pixels the spare bit, taps the bits of their positions.  Therefore no element beyond the end counts
// as inside.  A plain matrix is treated as pixels under a single tap.
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
  // Returns a half with all bits set.
  static __device__ __forceinline__ Half outside(Index offset) {
    Half half;
    half.offset = offset;
    half.bits.fill(~0u);
    return half;
  }
};

// The taps of windows along one axis: tap i reads the pixel i * spacing after the pixel of tap 0.
//
// A quotient by spacing is the upper half of 2 * dividend * reciprocal, shifted right, where shift is
// ceil(log2(spacing)) and reciprocal is ceil(2^(31 + shift) / spacing).  It is exact for dividends below
// 2^31.
struct TapAxis {
  int spacing;
  unsigned reciprocal;
  int shift;

  // Returns how many of the first `taps` taps read negative coordinates if tap 0 reads `coordinate`.
  __device__ __forceinline__ int before_0(int coordinate, int taps) const {
    const int clamped = max(min(coordinate, 0), -taps * spacing);
    return __umulhi(2u * (spacing - 1) - 2u * clamped, reciprocal) >> shift;
  }
};

// A stride phase of backprop_input, or a run of its frames that the same taps read.
//
// Input pixels h with equal (h + pad) mod stride read the same taps: every step-th tap.  For these
// pixels, the gradient is a dense convolution with stride 1: with h = first_pixel + i * stride and
// r = first_tap + j * step,
//
//   p = (h + pad - r * dilation) / stride = (i + base) + (taps - 1 - j) * spacing,
//
// where base is p for i = 0 and the last tap, j = taps - 1, and spacing = step * dilation / stride.
// i runs from 0 to pixels - 1, and j from 0 to taps - 1.  Arrays have one element per axis D, H, W.
struct StridePhase {
  int first_pixel[3], pixels[3];
  int first_tap[3], taps[3];
  int base[3];
  int end;  // number of tiles per group in this phase and all phases before it
};

// The stride phases of a launch, and the taps of all windows.  Other passes have a single phase, of which
// they read only `end`; the spacing of their taps is the dilation.  cupyconv/kernels/gather.py computes
// the fields.
template <int COUNT>
struct StridePhases {
  TapAxis axis[3];
  int step[3];
  StridePhase phase[COUNT];
};

#endif
