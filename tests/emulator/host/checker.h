// Shadow memory and reports.
#ifndef CUPYCONV_EMULATOR_CHECKER_H
#define CUPYCONV_EMULATOR_CHECKER_H

#include "runtime.h"

namespace emulator {

// ---------------------------------------------------------------------------------------------
// Reports
// ---------------------------------------------------------------------------------------------
enum class ReportKind : uint32_t {
  kOutOfBounds,
  kMisaligned,
  kReadOnlyWrite,
  kUninitialisedRead,
  kRace,
  kBlockRace,
  kLaunchRace,
  kAsyncBeforeWait,
  kAsyncOverwrite,
  kUnwaitedCopy,
  kMissingProxyFence,
  kTransactionCount,
  kMbarrier,
  kBarrierDivergence,
  kWarpDivergence,
  kDeadlock,
  kIntegerOverflow,
  kUndefined,
  kTensorMap,
  kDescriptor,
  kWarpgroupMma,
  kCluster,
  kTrap,
};
constexpr size_t kReportText = 512;
struct ReportRecord {  // reports.py declares the same fields
  uint32_t kind;
  uint32_t block[3];
  uint32_t thread[3];
  uint32_t pc;        // 0: see `file` and `line`
  uint32_t other_pc;  // of the other access, or 0
  uint32_t line;
  char file[256];
  char text[kReportText];
};
// Files a report, once per kind and pair of code addresses.
__attribute__((format(printf, 4, 5))) void report(ReportKind kind, uint32_t pc, uint32_t other_pc,
                                                  const char* format, ...);
// Files a report and ends the launch, since continuing would access invalid memory.
[[noreturn]] __attribute__((format(printf, 4, 5))) void report_fatal(ReportKind kind, uint32_t pc,
                                                                     uint32_t other_pc,
                                                                     const char* format, ...);
void report_at_source(ReportKind kind, const char* file, uint32_t line, uint32_t column,
                      const char* text);

// ---------------------------------------------------------------------------------------------
// Regions and their shadow
// ---------------------------------------------------------------------------------------------
enum CellFlags : uint8_t {
  kTouched = 1,          // written in this launch
  kInFlight = 2,         // destination of an un-waited asynchronous copy
  kBarrierObject = 4,    // holds an mbarrier
  kGenericWrite = 8,     // last written by the generic proxy (st, cp.async)
  kAtomicWrite = 16,     // last written by an atomic
  kOtherGroupRead = 32,  // read by more than one group in this launch
};
constexpr int kReadersKept = 4;
struct Cell {
  uint32_t write_clock, write_pc, write_group;
  uint32_t read_clock[kReadersKept];
  uint32_t read_pc, read_group;
  uint16_t writer;
  uint16_t reader[kReadersKept];
  uint8_t flags;
  uint8_t reader_count;
  uint8_t async_readers;  // un-waited wgmma or bulk stores that read it
};

// State kept across launches: one byte per cell of an initially unwritten array.
enum ElementState : uint8_t { kWritten = 1, kNotToBeWritten = 2 };

struct Region {
  uint8_t* base;
  size_t size;
  bool is_shared;
  bool read_only;
  unsigned granule_shift;  // log2 of bytes per cell; lowered by the first smaller access
  std::string name;
  Cell* cells;
  size_t cell_count;
  uint8_t* element_state;  // null: initialised memory
  uint32_t offset;         // shared memory: address in the window
  Block* block;            // shared memory: its block
};
Region* find_region(const void* address);
Region* create_region(const char* name, void* base, size_t size, unsigned granule_shift,
                      bool is_shared, bool read_only, bool uninitialised);
void destroy_region(Region* region);
void forget_accesses();  // between ordered launches

// ---------------------------------------------------------------------------------------------
// Accesses
// ---------------------------------------------------------------------------------------------
enum AccessFlags : unsigned {
  kRead = 0,
  kWrite = 1,
  kAtomic = 2,
  kAsyncProxy = 4,       // TMA, wgmma
  kAnyAlignment = 8,     // alignment is checked elsewhere, or not required
  kOnBarrierObject = 16  // an mbarrier instruction
};
void check_access(Fiber* fiber, const void* address, size_t size, unsigned flags, uint32_t pc);
// For shared memory, tests the address in the window, which the instruction uses.
bool is_aligned(const void* address, size_t alignment);
std::string describe_address(const Region* region, const void* address);

template <class Visit>
void for_each_cell(const void* address, size_t size, Visit visit) {
  if (!settings.check) return;
  Region* region = find_region(address);
  if (!region || !region->cells) return;
  const size_t start = static_cast<const uint8_t*>(address) - region->base;
  const size_t last = (start + size - 1) >> region->granule_shift;
  for (size_t i = start >> region->granule_shift; i <= last && i < region->cell_count; i++)
    visit(region->cells[i], region, i);
}
// The cells were just written by `writer` (a thread or a pseudo thread) at `clock`.
void mark_written(const void* address, size_t size, unsigned writer, uint32_t clock, uint32_t pc,
                  uint8_t flags);

// --- bank_conflicts.cpp ---
void count_shared_access(Fiber* fiber, uint32_t offset, size_t size, bool is_load, uint32_t pc);
void count_matrix_access(const uint32_t* row_offsets, int rows, uint32_t pc);

}  // namespace emulator

#endif
