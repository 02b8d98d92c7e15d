// Single PTX instructions, for the C++ that this folder generates.
//
// A register is an unsigned integer of its width (bool for a predicate): instructions, not
// registers, have types.  `as` reads a register as a type, `set` writes it.  Functions here have no
// debug lines, so every access and report has the line of its statement.
#ifndef CUPYCONV_EMULATOR_PTX_MACHINE_H
#define CUPYCONV_EMULATOR_PTX_MACHINE_H

#define PTX_OP static inline __attribute__((always_inline, unused, nodebug))

namespace ptx_machine {
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using f16 = _Float16;
using f32 = float;
using f64 = double;
using pred = bool;
template <class T, int N>
using vec __attribute__((ext_vector_type(N))) = T;

template <int Bytes>
struct Sized;
template <>
struct Sized<1> {
  using u = u8;
  using s = s8;
};
template <>
struct Sized<2> {
  using u = u16;
  using s = s16;
};
template <>
struct Sized<4> {
  using u = u32;
  using s = s32;
};
template <>
struct Sized<8> {
  using u = u64;
  using s = s64;
};
template <>
struct Sized<16> {
  using u = unsigned __int128;
  using s = __int128;
};
template <class T>
using Bits = typename Sized<sizeof(T)>::u;
template <class T>
constexpr bool is_float =
    std::is_same_v<T, f16> || std::is_same_v<T, f32> || std::is_same_v<T, f64>;
template <class T>
constexpr bool is_signed = T(-1) < T(0);
template <class T>
constexpr u32 kWidth = 8 * sizeof(T);
// The integer of twice the width.
template <class T>
using Wide = std::conditional_t<is_signed<T>, typename Sized<2 * sizeof(T)>::s,
                                typename Sized<2 * sizeof(T)>::u>;

template <class T, class R>
PTX_OP T as(R bits) {
  if constexpr (std::is_same_v<T, bool>) {
    return bits;
  } else {
    static_assert(sizeof(T) <= sizeof(R), "an operand is narrower than its instruction");
    return __builtin_bit_cast(T, static_cast<Bits<T>>(bits));
  }
}
// A register may be wider than the value: signed values are sign-extended.
template <class R, class V>
PTX_OP void set(R& reg, V value) {
  if constexpr (is_float<V>)
    reg = static_cast<R>(__builtin_bit_cast(Bits<V>, value));
  else
    reg = static_cast<R>(value);
}

// --- memory: generic addresses are host addresses ---
PTX_OP char* pointer(u64 address) { return reinterpret_cast<char*>(address); }
PTX_OP u64 address_of(const void* p) { return reinterpret_cast<u64>(p); }
// Volatile, so the host's optimiser does not drop, narrow or merge accesses.
template <class T>
PTX_OP volatile T& at(char* p) {
  return *reinterpret_cast<volatile T*>(p);
}
// Thread-private: parameters, constants and local memory, which may be in registers.
template <class T>
PTX_OP T& own(char* p) {
  return *reinterpret_cast<T*>(p);
}
// Start of the running block's shared window.  Hidden from the optimiser, which must not assume
// that an address computed from one variable never reaches another.
PTX_OP u64 window_base(const void* variable) {
  u64 base = address_of(variable) - emulator::shared_address(variable);
  __asm__("" : "+r"(base));
  return base;
}

// --- integers: all wrap around; shifts by the width or more give 0 or the sign ---
template <class T>
PTX_OP T add(T a, T b) {
  return T(Bits<T>(a) + Bits<T>(b));
}
template <class T>
PTX_OP T sub(T a, T b) {
  return T(Bits<T>(a) - Bits<T>(b));
}
template <class T>
PTX_OP T mul_lo(T a, T b) {
  return T(u64(a) * u64(b));
}
template <class T>
PTX_OP Wide<T> mul_wide(T a, T b) {
  return Wide<T>(a) * Wide<T>(b);
}
template <class T>
PTX_OP T mul_hi(T a, T b) {
  return T(mul_wide(a, b) >> kWidth<T>);
}
// The GPU does not trap.  The result of a division by zero is unspecified: all ones here.
template <class T>
PTX_OP T quotient(T a, T b) {
  if (b == 0) return T(-1);
  if (is_signed<T> && b == T(-1)) return sub(T(0), a);
  return T(a / b);
}
template <class T>
PTX_OP T remaining(T a, T b) {
  if (b == 0) return a;
  return is_signed<T> && b == T(-1) ? T(0) : T(a % b);
}
template <class T>
PTX_OP T shl(T a, u32 n) {
  return n < kWidth<T> ? T(Bits<T>(a) << n) : T(0);
}
template <class T>
PTX_OP T shr(T a, u32 n) {
  if (n < kWidth<T>) return T(a >> n);
  return is_signed<T> && a < T(0) ? T(-1) : T(0);
}
// Upper (left) or lower half of two words shifted together; the caller wraps or clamps `n`.
PTX_OP u32 funnel_left(u32 low, u32 high, u32 n) {
  return u32(((u64(high) << 32 | low) << n) >> 32);
}
PTX_OP u32 funnel_right(u32 low, u32 high, u32 n) { return u32((u64(high) << 32 | low) >> n); }
template <class T>
PTX_OP T bfi(T source, T into, u32 start, u32 length) {
  start &= 0xff, length &= 0xff;
  const T field = shl(length < kWidth<T> ? T(shl(T(1), length) - 1) : T(-1), start);
  return T((shl(source, start) & field) | (into & T(~field)));
}
// Four of eight bytes, by selectors of four bits each; the fourth bit replicates the byte's sign.
PTX_OP u32 prmt(u32 a, u32 b, u32 selector) {
  const u64 bytes = u64(b) << 32 | a;
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    const u32 pick = selector >> (4 * i);
    const u32 byte = u32(bytes >> (8 * (pick & 7))) & 0xff;
    result |= (pick & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << (8 * i);
  }
  return result;
}

// --- floating point ---
// Flushes subnormals to zero with the same sign.
template <class T>
PTX_OP T flush(T v) {
  if constexpr (std::is_same_v<T, f32>)
    return __builtin_fabsf(v) < __FLT_MIN__ ? __builtin_copysignf(0.0f, v) : v;
  else
    return v;
}
// The NaN that number-testing instructions return.
template <class T>
PTX_OP T canonical_nan() {
  return __builtin_bit_cast(T, Bits<T>(Bits<T>(-1) >> 1));
}
// -0 is less than +0; with one NaN, the other operand is returned.
template <class T>
PTX_OP T minimum(T a, T b) {
  if constexpr (is_float<T>) {
    if (a != a && b != b) return canonical_nan<T>();
    if (a != a || b != b) return a != a ? b : a;
    if (a == b) return __builtin_signbit(a) ? a : b;
  }
  return b < a ? b : a;
}
template <class T>
PTX_OP T maximum(T a, T b) {
  if constexpr (is_float<T>) {
    if (a != a && b != b) return canonical_nan<T>();
    if (a != a || b != b) return a != a ? b : a;
    if (a == b) return __builtin_signbit(a) ? b : a;
  }
  return a < b ? b : a;
}
template <class T>
PTX_OP T absolute(T a) {
  if constexpr (is_float<T>)
    return __builtin_bit_cast(T, Bits<T>(__builtin_bit_cast(Bits<T>, a) & Bits<T>(Bits<T>(-1) >> 1)));
  else
    return a < 0 ? sub(T(0), a) : a;
}
template <class T>
PTX_OP T negated(T a) {
  return __builtin_bit_cast(T, Bits<T>(__builtin_bit_cast(Bits<T>, a) ^ ~Bits<T>(Bits<T>(-1) >> 1)));
}

// a * b + c of float32, rounded down, up or to zero; the exact sum is held in two doubles.
enum class Rounding { rm, rp, rz };
PTX_OP f32 directed(f64 high, f64 low, Rounding mode) {
  const f32 nearest = f32(high);
  if (!(std::fabs(high) <= __DBL_MAX__)) return nearest;
  const bool is_above = nearest > high || (nearest == high && low < 0);
  const bool is_below = nearest < high || (nearest == high && low > 0);
  const bool down = mode == Rounding::rm || (mode == Rounding::rz && high > 0);
  if (down && is_above) return std::nextafterf(nearest, -__builtin_inff());
  return !down && is_below ? std::nextafterf(nearest, __builtin_inff()) : nearest;
}
PTX_OP f32 directed_fma(f32 a, f32 b, f32 c, Rounding mode) {
  const f64 product = f64(a) * b, sum = product + c, part = sum - product;
  // A sum of opposite numbers is +0, but -0 when rounding down.
  if (sum == 0 && (product != 0 || std::signbit(product) != std::signbit(c)))
    return mode == Rounding::rm ? -0.0f : 0.0f;
  return directed(sum, (product - (sum - part)) + (c - part), mode);
}

// Clamps to [0, 1]; NaN becomes +0.
template <class F>
PTX_OP F saturate(F v) {
  return v > F(0) ? (v < F(1) ? v : F(1)) : F(0);
}

// --- shuffles ---
// Whether the source lane is inside the segment given by `c`.
PTX_OP bool shuffle_is_inside(emulator::ShuffleMode mode, u32 b, u32 c) {
  const u32 lane = emulator::lane_index(), segment = c >> 8 & 31;
  const int bound = int((lane & segment) | (c & 31 & ~segment)), step = int(b & 31);
  switch (mode) {
    case emulator::ShuffleMode::kUp:
      return int(lane) - step >= bound;
    case emulator::ShuffleMode::kDown:
      return int(lane) + step <= bound;
    case emulator::ShuffleMode::kXor:
      return int(lane ^ u32(step)) <= bound;
    default:
      return int((lane & segment) | (u32(step) & ~segment)) <= bound;
  }
}
PTX_OP u32 shuffle_width(u32 c) { return 32 - (c >> 8 & 31); }
}  // namespace ptx_machine

#endif
