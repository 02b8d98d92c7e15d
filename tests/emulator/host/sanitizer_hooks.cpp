// The functions that kernel code calls under -fsanitize=kernel-address and the integer checks.  No
// sanitizer library is linked: with these definitions, every load and store of a kernel arrives
// here, with its address, size and source line.
#include <cstdio>
#include <cstring>

#include "checker.h"

using namespace emulator;

// Accesses between yields of a thread that may spin on memory, and limit of a launch.
constexpr uint64_t kPatience = 1 << 20;
constexpr uint64_t kMostAccesses = uint64_t{1} << 31;

static void take_a_break(uint32_t pc) {
  if (statistics.accesses > kMostAccesses)
    report_fatal(ReportKind::kDeadlock, pc, 0,
                 "the launch has made %lu accesses: a loop that does not end?",
                 static_cast<unsigned long>(statistics.accesses));
  yield();
}

static inline void observe(const void* address, size_t size, unsigned flags, const void* caller) {
  if (!current || on_a_fiber_stack(address)) return;  // a thread's local variable
  statistics.accesses++;
  if (settings.check) {
    const uint32_t pc = program_counter(caller);
    check_access(current, address, size, flags, pc);
    if (settings.bank_conflicts) {
      const Region* region = find_region(address);
      if (region && region->is_shared)
        count_shared_access(current, shared_offset(address), size, !(flags & kWrite), pc);
    }
  }
  if (statistics.accesses % kPatience == 0) take_a_break(program_counter(caller));
  if (settings.preempt_period && random_number() % settings.preempt_period == 0) yield();
}

#define CALLER __builtin_return_address(0)
extern "C" {
void __asan_handle_no_return() {}

#define ACCESS_HOOKS(size, alignment)                                                              \
  void __asan_load##size##_noabort(const void* p) { observe(p, size, kRead | alignment, CALLER); } \
  void __asan_store##size##_noabort(const void* p) { observe(p, size, kWrite | alignment, CALLER); }
ACCESS_HOOKS(1, 0)
ACCESS_HOOKS(2, 0)
ACCESS_HOOKS(4, 0)
ACCESS_HOOKS(8, 0)
// The optimiser may merge smaller, less aligned accesses into these and the following.  alignment.py
// has already checked the alignment of the source's accesses.
ACCESS_HOOKS(16, kAnyAlignment)

// Odd sizes, accesses with an alignment below their size, and copies of structs.
void __asan_loadN_noabort(const void* p, size_t size) {
  if (size) observe(p, size, kRead | kAnyAlignment, CALLER);
}
void __asan_storeN_noabort(const void* p, size_t size) {
  if (size) observe(p, size, kWrite | kAnyAlignment, CALLER);
}
void* __asan_memcpy(void* to, const void* from, size_t size) {
  if (size) observe(from, size, kRead | kAnyAlignment, CALLER);
  if (size) observe(to, size, kWrite | kAnyAlignment, CALLER);
  return memcpy(to, from, size);
}
void* __asan_memmove(void* to, const void* from, size_t size) {
  if (size) observe(from, size, kRead | kAnyAlignment, CALLER);
  if (size) observe(to, size, kWrite | kAnyAlignment, CALLER);
  return memmove(to, from, size);
}
void* __asan_memset(void* to, int value, size_t size) {
  if (size) observe(to, size, kWrite | kAnyAlignment, CALLER);
  return memset(to, value, size);
}

// ---------------------------------------------------------------------------------------------
// Integer and bounds checks.  A handler's first argument, if any, starts with the source location.
// ---------------------------------------------------------------------------------------------
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};

static void report_integer(ReportKind kind, const SourceLocation* where, const char* text) {
  if (current && settings.check)
    report_at_source(kind, where->file, where->line, where->column, text);
}
#define INTEGER_HANDLER(name, kind, text)                                   \
  void __ubsan_handle_##name(const SourceLocation* where, size_t, size_t) { \
    report_integer(ReportKind::kind, where, text);                          \
  }
INTEGER_HANDLER(add_overflow, kIntegerOverflow, "a signed addition overflows")
INTEGER_HANDLER(sub_overflow, kIntegerOverflow, "a signed subtraction overflows")
INTEGER_HANDLER(mul_overflow, kIntegerOverflow, "a signed multiplication overflows")
INTEGER_HANDLER(negate_overflow, kIntegerOverflow, "a negation overflows")
INTEGER_HANDLER(implicit_conversion, kIntegerOverflow, "an implicit conversion changes the value")
INTEGER_HANDLER(divrem_overflow, kUndefined, "division by zero, or the quotient overflows")
INTEGER_HANDLER(shift_out_of_bounds, kUndefined, "the shift is as wide as the type, or wider")
// Ends the launch before a write past an array destroys its neighbours on the stack.
void __ubsan_handle_out_of_bounds(const SourceLocation* where, size_t index) {
  if (!current || !settings.check) return;
  char text[80];
  snprintf(text, sizeof text, "index %ld is outside of the array's declared bound",
           static_cast<long>(index));
  report_at_source(ReportKind::kOutOfBounds, where->file, where->line, where->column, text);
  abort_launch();
}
void __ubsan_handle_local_out_of_bounds() {
  if (current && settings.check)
    report_fatal(ReportKind::kOutOfBounds, program_counter(CALLER), 0,
                 "an access past the local variable that the pointer is into");
}
}
