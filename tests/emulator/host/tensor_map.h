// The emulator's 128 bytes of a CUtensorMap; tensormap.py writes them.
#ifndef CUPYCONV_EMULATOR_TENSOR_MAP_H
#define CUPYCONV_EMULATOR_TENSOR_MAP_H

#include <cstdint>

#include "emulator.h"

namespace emulator {

constexpr uint64_t kTensorMapMagic = 0x70616d5f726f736eull;
struct TensorMapRecord {
  uint64_t magic;
  uint64_t base;
  uint64_t stride[kMaxTensorRank - 1];  // bytes, of dimensions 1 and up
  uint32_t extent[kMaxTensorRank];      // elements, innermost first
  uint16_t box[kMaxTensorRank];         // im2col: channels per pixel, pixels per column
  int16_t lower[kMaxTensorRank - 2];    // im2col: corners of the bounding box, W first
  int16_t upper[kMaxTensorRank - 2];
  uint8_t element_stride[kMaxTensorRank];
  uint8_t element_size;
  uint8_t rank;
  uint8_t swizzle;  // span in bytes: 0, 32, 64, 128
  uint8_t im2col;
  uint8_t to_tf32;  // loads round to TF32
};
static_assert(sizeof(TensorMapRecord) <= 128, "fits into a CUtensorMap");

}  // namespace emulator

#endif
