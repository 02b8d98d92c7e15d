// Force-included before an unchanged .cu: the language extensions, variables and functions that
// NVRTC knows without a header.
//
// `__shared__` becomes `thread_local` and the file is compiled with -femulated-tls: every use of a
// shared variable then asks the runtime for its address (__emutls_get_address), which returns the
// running block's copy.  So blocks of a cluster run concurrently, and guard gaps surround each
// variable.
#ifndef CUPYCONV_EMULATOR_CUDA_BUILTINS_H
#define CUPYCONV_EMULATOR_CUDA_BUILTINS_H

#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "emulator.h"

#define __global__
#define __device__
#define __host__
// `used` makes the optimiser keep all loads and stores, even of a variable that is never read or
// never written.
#define __shared__ __attribute__((used)) thread_local
#define __constant__ static
#define __managed__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)  // read from the source text by build.py
#define __cluster_dims__(...)   // likewise
#define __maxnreg__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__ __restrict

#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define blockDim (emulator::block_extent())
#define gridDim (emulator::grid_extent())
#define warpSize 32

#define EMULATOR_INLINE static inline __attribute__((always_inline, unused))
// Functions whose memory accesses are the emulator's, not the kernel's.
#define EMULATOR_UNCHECKED static __attribute__((noinline, unused, no_sanitize("kernel-address")))

// Called before accesses, as inserted by alignment.py.
__attribute__((always_inline, used, nodebug, no_sanitize("kernel-address"))) static inline void
emulator_check_alignment(const void* address, size_t alignment) __asm__("emulator_check_alignment");
void emulator_check_alignment(const void* address, size_t alignment) {
  if (reinterpret_cast<size_t>(address) & (alignment - 1)) emulator::misaligned(address, alignment);
}

// ---------------------------------------------------------------------------------------------
// Barriers, votes, shuffles
// ---------------------------------------------------------------------------------------------
EMULATOR_INLINE void __syncthreads() { emulator::synchronise_block(); }
EMULATOR_INLINE int __syncthreads_or(int predicate) {
  return emulator::synchronise_block_reduce(predicate, emulator::BarrierReduction::kOr);
}
EMULATOR_INLINE int __syncthreads_and(int predicate) {
  return emulator::synchronise_block_reduce(predicate, emulator::BarrierReduction::kAnd);
}
EMULATOR_INLINE int __syncthreads_count(int predicate) {
  return emulator::synchronise_block_reduce(predicate, emulator::BarrierReduction::kCount);
}
EMULATOR_INLINE void __syncwarp(unsigned mask = 0xffffffffu) { emulator::synchronise_warp(mask); }
EMULATOR_INLINE void __threadfence() { emulator::thread_fence(); }
EMULATOR_INLINE void __threadfence_block() {}
EMULATOR_INLINE void __threadfence_system() { emulator::thread_fence(); }
EMULATOR_INLINE void __nanosleep(unsigned) {}
EMULATOR_INLINE long long clock64() { return emulator::clock_cycles(); }
EMULATOR_INLINE void __trap() { emulator::trap(); }
EMULATOR_INLINE unsigned __activemask() { return emulator::active_mask(); }

EMULATOR_INLINE unsigned __ballot_sync(unsigned mask, int predicate) {
  return emulator::ballot(mask, predicate != 0);
}
EMULATOR_INLINE int __any_sync(unsigned mask, int predicate) {
  return emulator::ballot(mask, predicate != 0) != 0;
}
EMULATOR_INLINE int __all_sync(unsigned mask, int predicate) {
  return emulator::ballot(mask, predicate == 0) == 0;
}
template <class T>
EMULATOR_INLINE unsigned __match_any_sync(unsigned mask, T value) {
  uint64_t key = 0;
  __builtin_memcpy(&key, &value, sizeof value);
  return emulator::match(mask, key);
}

template <class T>
EMULATOR_INLINE T emulator_shuffle(unsigned mask, T value, int operand, int width,
                                   emulator::ShuffleMode mode) {
  uint32_t words[(sizeof(T) + 3) / 4] = {};
  __builtin_memcpy(words, &value, sizeof value);
  emulator::shuffle(mask, words, sizeof words / 4, operand, width, mode);
  __builtin_memcpy(&value, words, sizeof value);
  return value;
}
template <class T>
EMULATOR_INLINE T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return emulator_shuffle(mask, value, lane, width, emulator::ShuffleMode::kIndex);
}
template <class T>
EMULATOR_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return emulator_shuffle(mask, value, (int)delta, width, emulator::ShuffleMode::kUp);
}
template <class T>
EMULATOR_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return emulator_shuffle(mask, value, (int)delta, width, emulator::ShuffleMode::kDown);
}
template <class T>
EMULATOR_INLINE T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  return emulator_shuffle(mask, value, lanes, width, emulator::ShuffleMode::kXor);
}


// ---------------------------------------------------------------------------------------------
// Atomics: checked by the runtime, then performed without instrumentation
// ---------------------------------------------------------------------------------------------
template <class T>
struct emulator_identity_of {
  using type = T;
};
// Excludes an argument from template deduction, like the overloads of CUDA's headers.
template <class T>
using emulator_identity = typename emulator_identity_of<T>::type;

template <class T, class Update>
EMULATOR_UNCHECKED T emulator_apply(T* address, Update update) {
  T old = *address;
  *address = update(old);
  return old;
}
#define EMULATOR_ATOMIC(name, expression)                                       \
  template <class T>                                                            \
  EMULATOR_INLINE T name(T* address, emulator_identity<T> value) {              \
    emulator::atomic_access(address, sizeof(T));                                \
    return emulator_apply(address, [value](T old) { return (T)(expression); }); \
  }
EMULATOR_ATOMIC(atomicAdd, old + value)
EMULATOR_ATOMIC(atomicSub, old - value)
EMULATOR_ATOMIC(atomicExch, value)
EMULATOR_ATOMIC(atomicMin, old < value ? old : value)
EMULATOR_ATOMIC(atomicMax, old > value ? old : value)
EMULATOR_ATOMIC(atomicAnd, old& value)
EMULATOR_ATOMIC(atomicOr, old | value)
EMULATOR_ATOMIC(atomicXor, old ^ value)
EMULATOR_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
EMULATOR_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef EMULATOR_ATOMIC
template <class T>
EMULATOR_INLINE T atomicCAS(T* address, emulator_identity<T> compare, emulator_identity<T> value) {
  emulator::atomic_access(address, sizeof(T));
  return emulator_apply(address, [=](T old) { return old == compare ? value : old; });
}

// ---------------------------------------------------------------------------------------------
// Loads and stores with cache hints
// ---------------------------------------------------------------------------------------------
#define EMULATOR_LOAD(name)            \
  template <class T>                   \
  EMULATOR_INLINE T name(const T* p) { \
    return *p;                         \
  }
EMULATOR_LOAD(__ldg)
EMULATOR_LOAD(__ldcg)
EMULATOR_LOAD(__ldca)
EMULATOR_LOAD(__ldcs)
EMULATOR_LOAD(__ldlu)
EMULATOR_LOAD(__ldcv)
#undef EMULATOR_LOAD
#define EMULATOR_STORE(name)                                    \
  template <class T>                                            \
  EMULATOR_INLINE void name(T* p, emulator_identity<T> value) { \
    *p = value;                                                 \
  }
EMULATOR_STORE(__stwb)
EMULATOR_STORE(__stcg)
EMULATOR_STORE(__stcs)
EMULATOR_STORE(__stwt)
#undef EMULATOR_STORE
EMULATOR_INLINE size_t __cvta_generic_to_shared(const void* p) {
  return emulator::shared_address(p);
}

// ---------------------------------------------------------------------------------------------
// Bits and integers
// ---------------------------------------------------------------------------------------------
template <class To, class From>
EMULATOR_INLINE To emulator_bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To result;
  __builtin_memcpy(&result, &value, sizeof result);
  return result;
}
EMULATOR_INLINE float __int_as_float(int v) { return emulator_bit_cast<float>(v); }
EMULATOR_INLINE float __uint_as_float(unsigned v) { return emulator_bit_cast<float>(v); }
EMULATOR_INLINE int __float_as_int(float v) { return emulator_bit_cast<int>(v); }
EMULATOR_INLINE unsigned __float_as_uint(float v) { return emulator_bit_cast<unsigned>(v); }
EMULATOR_INLINE double __longlong_as_double(long long v) { return emulator_bit_cast<double>(v); }
EMULATOR_INLINE long long __double_as_longlong(double v) { return emulator_bit_cast<long long>(v); }
EMULATOR_INLINE int __popc(unsigned v) { return __builtin_popcount(v); }
EMULATOR_INLINE int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
EMULATOR_INLINE int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
EMULATOR_INLINE int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
EMULATOR_INLINE int __ffs(int v) { return __builtin_ffs(v); }
EMULATOR_INLINE int __ffsll(long long v) { return __builtin_ffsll(v); }
EMULATOR_INLINE unsigned __brev(unsigned v) { return __builtin_bitreverse32(v); }
EMULATOR_INLINE unsigned __umulhi(unsigned a, unsigned b) {
  return (unsigned)(((unsigned long long)a * b) >> 32);
}
EMULATOR_INLINE int __mulhi(int a, int b) { return (int)(((long long)a * b) >> 32); }
EMULATOR_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
EMULATOR_INLINE long long __mul64hi(long long a, long long b) {
  return (long long)(((__int128)a * b) >> 64);
}
EMULATOR_INLINE unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = (unsigned long long)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned pick = selector >> (4 * i) & 7;  // the selector's fourth bit is ignored
    result |= ((unsigned)(bytes >> (8 * pick)) & 0xff) << (8 * i);
  }
  return result;
}
EMULATOR_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)((((unsigned long long)high << 32 | low) << (shift & 31)) >> 32);
}
EMULATOR_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}

// ---------------------------------------------------------------------------------------------
// Arithmetic that differs from the C library: min and max of mixed types, and intrinsics with an
// explicit rounding.
// ---------------------------------------------------------------------------------------------
template <class A, class B>
EMULATOR_INLINE std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin((T)a, (T)b);
  return (T)a < (T)b ? (T)a : (T)b;
}
template <class A, class B>
EMULATOR_INLINE std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax((T)a, (T)b);
  return (T)a > (T)b ? (T)a : (T)b;
}
EMULATOR_INLINE float __fdividef(float a, float b) { return a / b; }
// Macros, since a C library may define functions with these names.
#define rsqrtf(v) (1.0f / sqrtf(v))
#define rsqrt(v) (1.0 / sqrt(v))
#define __expf(v) expf(v)
#define __logf(v) logf(v)
#define __sinf(v) sinf(v)
#define __cosf(v) cosf(v)
#define __powf(a, b) powf(a, b)
EMULATOR_INLINE float __fadd_rn(float a, float b) { return a + b; }
EMULATOR_INLINE float __fsub_rn(float a, float b) { return a - b; }
EMULATOR_INLINE float __fmul_rn(float a, float b) { return a * b; }
EMULATOR_INLINE float __fdiv_rn(float a, float b) { return a / b; }
EMULATOR_INLINE float __frcp_rn(float a) { return 1.0f / a; }
EMULATOR_INLINE float __fsqrt_rn(float a) { return sqrtf(a); }
EMULATOR_INLINE float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
EMULATOR_INLINE double __dadd_rn(double a, double b) { return a + b; }
EMULATOR_INLINE double __dmul_rn(double a, double b) { return a * b; }
EMULATOR_INLINE double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
EMULATOR_INLINE float __int2float_rn(int v) { return (float)v; }
EMULATOR_INLINE float __saturatef(float v) { return v > 0.0f ? (v < 1.0f ? v : 1.0f) : 0.0f; }

// ---------------------------------------------------------------------------------------------
// Export: a record per kernel that describes its call (build.py writes EMULATOR_EXPORT lines)
// ---------------------------------------------------------------------------------------------
template <class T>
constexpr uint32_t emulator_parameter_kind() {
  using Value = std::remove_cv_t<T>;
  return std::is_pointer_v<Value>                               ? emulator::kParameterPointer
         : std::is_floating_point_v<Value>                      ? emulator::kParameterFloat
         : std::is_arithmetic_v<Value> || std::is_enum_v<Value> ? emulator::kParameterInteger
                                                                : emulator::kParameterStruct;
}
template <auto Kernel, class Signature = decltype(Kernel)>
struct EmulatorExport;
template <auto Kernel, class... Arguments>
struct EmulatorExport<Kernel, void (*)(Arguments...)> {
  static constexpr uint32_t kCount = sizeof...(Arguments);
  static constexpr emulator::Parameter kParameters[sizeof...(Arguments) + 1] = {
      {sizeof(Arguments), emulator_parameter_kind<Arguments>()}..., {0, 0}};
  EMULATOR_UNCHECKED void call(void** parameters) {
    call_with(parameters, std::index_sequence_for<Arguments...>());
  }
  template <size_t... Index>
  EMULATOR_UNCHECKED void call_with(void** parameters, std::index_sequence<Index...>) {
    Kernel(*static_cast<std::remove_cv_t<Arguments>*>(parameters[Index])...);
  }
};
#define EMULATOR_EXPORT(kernel, bounds, ...)                                             \
  extern "C" __attribute__((visibility("default"), used))                                \
  const emulator::Entry emulator_entry_##kernel = {#kernel,                              \
                                                   EmulatorExport<&kernel>::call,        \
                                                   EmulatorExport<&kernel>::kCount,      \
                                                   EmulatorExport<&kernel>::kParameters, \
                                                   (uint32_t)(bounds),                   \
                                                   {__VA_ARGS__}};

#include "ptx_twin.cuh"

// A call, so that the compiler assumes the alignment of the type, as the GPU's does.  If it sees
// through a cast, it may use the smaller alignment of the underlying array.
template <class To, class From>
__attribute__((always_inline, nodebug)) static inline To emulator_reinterpret_cast(From&& from) {
  return reinterpret_cast<To>(std::forward<From>(from));
}
#define reinterpret_cast emulator_reinterpret_cast

#endif
