// The built-in vector types of CUDA, with the alignments of the GPU's vector loads.
//
// Types of two or four elements that fit one access (16 bytes) are the compiler's own vectors: a
// load or store stays one access of full width and alignment until the checker sees it.
#ifndef CUPYCONV_EMULATOR_VECTOR_TYPES_H
#define CUPYCONV_EMULATOR_VECTOR_TYPES_H

#define EMULATOR_SMALL_VECTORS(name, scalar)                                   \
  struct name##1 { scalar x; };                                                \
  typedef scalar name##2 __attribute__((ext_vector_type(2)));                  \
  struct name##3 { scalar x, y, z; };                                          \
  inline name##1 make_##name##1(scalar x) { return name##1 {x}; }              \
  inline name##2 make_##name##2(scalar x, scalar y) { return name##2 {x, y}; } \
  inline name##3 make_##name##3(scalar x, scalar y, scalar z) { return name##3 {x, y, z}; }
#define EMULATOR_MAKE_4(name, scalar)                                     \
  inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { \
    return name##4 {x, y, z, w};                                          \
  }
#define EMULATOR_VECTORS(name, scalar)                        \
  EMULATOR_SMALL_VECTORS(name, scalar)                        \
  typedef scalar name##4 __attribute__((ext_vector_type(4))); \
  EMULATOR_MAKE_4(name, scalar)
#define EMULATOR_WIDE_VECTORS(name, scalar)          \
  EMULATOR_SMALL_VECTORS(name, scalar)               \
  struct alignas(16) name##4 { scalar x, y, z, w; }; \
  EMULATOR_MAKE_4(name, scalar)

EMULATOR_VECTORS(char, signed char)
EMULATOR_VECTORS(uchar, unsigned char)
EMULATOR_VECTORS(short, short)
EMULATOR_VECTORS(ushort, unsigned short)
EMULATOR_VECTORS(int, int)
EMULATOR_VECTORS(uint, unsigned)
EMULATOR_VECTORS(float, float)
EMULATOR_WIDE_VECTORS(longlong, long long)
EMULATOR_WIDE_VECTORS(ulonglong, unsigned long long)
EMULATOR_WIDE_VECTORS(double, double)

#undef EMULATOR_SMALL_VECTORS
#undef EMULATOR_MAKE_4
#undef EMULATOR_VECTORS
#undef EMULATOR_WIDE_VECTORS

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

#endif
