// Index maps: from rows and columns of a GEMM to pixels, taps and offsets in the tensors.
//
// Every pass multiplies a matrix that gathers pixels under taps.  The position of an element
// (pixel, tap) has two halves, one for the pixel and one for the tap.  A block computes each half once
// and adds the halves for each element:
//
//   forward, backprop-filter   h = p * stride - pad + r * dilation           read x at h
//   backprop-input             p = (h + pad - r * dilation) / stride         read dy at p, if the
//                                                                            division is exact
#ifndef CUPYCONV_MAPS_CUH
#define CUPYCONV_MAPS_CUH

#include "parameters.cuh"

// A pixel of the input or the output, and the number of its image.
template <class Index>
struct Pixel {
  Index n, d, h, w;
};

// A filter tap, and an input channel within the filter's group (an output channel in backprop-input).
template <class Index>
struct Tap {
  Index c, t, r, s;
};

// Half of an element's position: an offset in elements, and three coordinates.  The gathers below compute
// the element's offset from the sum of two halves.
template <class Index>
struct Place {
  Index offset, d, h, w;
};

// Pixels are numbered as (n, d, h, w) with w fastest.
template <class Index>
__device__ __forceinline__ Pixel<Index> pixel_at(Index number, const long long (&sizes)[3]) {
  const Index depth = static_cast<Index>(sizes[0]);
  const Index height = static_cast<Index>(sizes[1]);
  const Index width = static_cast<Index>(sizes[2]);
  Pixel<Index> pixel;
  pixel.w = number % width;
  number /= width;
  pixel.h = number % height;
  number /= height;
  pixel.d = number % depth;
  pixel.n = number / depth;
  return pixel;
}

// Taps are numbered as (t, r, s, c) with the channel fastest.
template <class Index>
__device__ __forceinline__ Tap<Index> tap_at(Index number, Index channels,
                                             const long long (&filter)[3]) {
  const Index height = static_cast<Index>(filter[1]);
  const Index width = static_cast<Index>(filter[2]);
  Tap<Index> tap;
  tap.c = number % channels;
  number /= channels;
  tap.s = number % width;
  number /= width;
  tap.r = number % height;
  tap.t = number / height;
  return tap;
}

// A number in mixed radix, fastest digit first, so that a fixed step can be added without divisions.
// Aligned for 16-byte accesses to shared memory.
template <class Index>
struct alignas(16) Digits {
  Index digit[4];
};

// Sizes of four nested loops, fastest first, and the step that next() adds, as digits of these loops.
template <class Index>
struct Loops {
  alignas(16) Index size[4];
  Digits<Index> step;

  __device__ __forceinline__ Loops() {}
  // Raises the first three sizes to at least 1, since the digits of the loops are divided by them.
  __device__ __forceinline__ Loops(Index fastest, Index second, Index third, Index last)
      : size{at_least_1(fastest), at_least_1(second), at_least_1(third), last} {}

  // Returns the digits of a number.  The last digit is unbounded: the loops end when the last digit
  // reaches the size of its loop.
  __device__ __forceinline__ Digits<Index> digits(Index number) const {
    Digits<Index> found;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      found.digit[i] = number % size[i];
      number /= size[i];
    }
    found.digit[3] = number;
    return found;
  }
  __device__ __forceinline__ bool contain(const Digits<Index>& at) const {
    return at.digit[3] < size[3];
  }
  __device__ __forceinline__ Digits<Index> next(Digits<Index> at) const {
    Index carry = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      at.digit[i] += step.digit[i] + carry;
      carry = at.digit[i] >= size[i];
      if (carry) at.digit[i] -= size[i];
    }
    at.digit[3] += step.digit[3] + carry;
    return at;
  }

 private:
  static __device__ __forceinline__ Index at_least_1(Index size) { return size > 1 ? size : 1; }
};

// Returns the offset of a pixel of x or y, in channel 0.
template <class Index>
__device__ __forceinline__ Index pixel_offset(const Pixel<Index>& pixel,
                                              const long long (&stride)[5]) {
  return pixel.n * static_cast<Index>(stride[0]) + pixel.d * static_cast<Index>(stride[2]) +
         pixel.h * static_cast<Index>(stride[3]) + pixel.w * static_cast<Index>(stride[4]);
}

// Returns the offset in w of the element for output channel 0 and this tap.
template <class Index>
__device__ __forceinline__ Index tap_offset(const Tap<Index>& tap, const long long (&stride)[5]) {
  return tap.c * static_cast<Index>(stride[1]) + tap.t * static_cast<Index>(stride[2]) +
         tap.r * static_cast<Index>(stride[3]) + tap.s * static_cast<Index>(stride[4]);
}

// Adds the offsets of the pixel and of the tap; returns whether the element is inside the tensor.
template <class Index>
__device__ __forceinline__ bool add_places(const Place<Index>& pixel, const Place<Index>& tap,
                                           const long long (&sizes)[3], Index& offset) {
  const Index d = pixel.d + tap.d, h = pixel.h + tap.h, w = pixel.w + tap.w;
  offset = pixel.offset + tap.offset;
  return d >= 0 && d < static_cast<Index>(sizes[0]) && h >= 0 &&
         h < static_cast<Index>(sizes[1]) && w >= 0 && w < static_cast<Index>(sizes[2]);
}

// Gathers x under the window of an output pixel: the matrix that im2col would write to memory.
template <class Index>
struct WindowGather {
  const ConvParameters& p;

  // Returns the first pixel of an output pixel's window.  Coordinates in the padding are negative.
  __device__ __forceinline__ Place<Index> of_pixel(const Pixel<Index>& out) const {
    const Pixel<Index> first = {
        out.n,
        out.d * static_cast<Index>(p.stride[0]) - static_cast<Index>(p.pad[0]),
        out.h * static_cast<Index>(p.stride[1]) - static_cast<Index>(p.pad[1]),
        out.w * static_cast<Index>(p.stride[2]) - static_cast<Index>(p.pad[2]),
    };
    return {pixel_offset(first, p.x_stride), first.d, first.h, first.w};
  }

  // Returns the distance of a tap from the first pixel of the window.
  __device__ __forceinline__ Place<Index> of_tap(const Tap<Index>& tap) const {
    const Pixel<Index> step = {
        0,
        tap.t * static_cast<Index>(p.dilation[0]),
        tap.r * static_cast<Index>(p.dilation[1]),
        tap.s * static_cast<Index>(p.dilation[2]),
    };
    const Index channel = tap.c * static_cast<Index>(p.x_stride[1]);
    return {pixel_offset(step, p.x_stride) + channel, step.d, step.h, step.w};
  }

  // Computes the offset of the element of x under a tap; returns whether the element is inside x.
  __device__ __forceinline__ bool locate(const Place<Index>& pixel, const Place<Index>& tap,
                                         Index& offset) const {
    return add_places(pixel, tap, p.input, offset);
  }
};

// Gathers dy for an input pixel and a tap: the output whose window has the pixel under this tap.
template <class Index>
struct ContributionGather {
  const ConvParameters& p;

  __device__ __forceinline__ Place<Index> of_pixel(const Pixel<Index>& in) const {
    return {in.n * static_cast<Index>(p.y_stride[0]), in.d + static_cast<Index>(p.pad[0]),
            in.h + static_cast<Index>(p.pad[1]), in.w + static_cast<Index>(p.pad[2])};
  }

  // tap.c is an output channel here: the taps of a pixel of dx run over the filters.
  __device__ __forceinline__ Place<Index> of_tap(const Tap<Index>& tap) const {
    return {tap.c * static_cast<Index>(p.y_stride[1]), -tap.t * static_cast<Index>(p.dilation[0]),
            -tap.r * static_cast<Index>(p.dilation[1]), -tap.s * static_cast<Index>(p.dilation[2])};
  }

  __device__ __forceinline__ bool locate(const Place<Index>& pixel, const Place<Index>& tap,
                                         Index& offset) const {
    Pixel<Index> out = {0, pixel.d + tap.d, pixel.h + tap.h, pixel.w + tap.w};
    const bool starts_here = divide_exactly(out.d, p.stride[0], p.output[0]) &&
                             divide_exactly(out.h, p.stride[1], p.output[1]) &&
                             divide_exactly(out.w, p.stride[2], p.output[2]);
    offset = pixel.offset + tap.offset;
    if (starts_here) offset += pixel_offset(out, p.y_stride);
    return starts_here;
  }

 private:
  // Divides position by stride in place; returns whether the division is exact and the output exists.
  static __device__ __forceinline__ bool divide_exactly(Index& position, long long stride,
                                                        long long outputs) {
    if (position < 0) return false;
    const Index step = static_cast<Index>(stride);
    const Index output = step == 1 ? position : position / step;
    const bool exact = output * step == position;
    position = output;
    return exact && output < static_cast<Index>(outputs);
  }
};

#endif
