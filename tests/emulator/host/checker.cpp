// Shadow memory: state, last writer and readers of each cell, and their order.
#include "checker.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <set>
#include <tuple>

namespace emulator {

void publish_through_atomic(const void* address);  // scheduler.cpp
const char* launch_of_group(uint32_t group_id);    // launch.cpp

// ---------------------------------------------------------------------------------------------
// Reports
// ---------------------------------------------------------------------------------------------
static std::vector<ReportRecord> reports;
static std::set<std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>> already_reported;
constexpr size_t kMaxReports = 200;

static ReportRecord* new_report(ReportKind kind, uint32_t pc, uint32_t other_pc, uint32_t line) {
  if (!already_reported.insert({static_cast<uint32_t>(kind), pc, other_pc, line}).second)
    return nullptr;
  if (reports.size() >= kMaxReports) return nullptr;
  ReportRecord record = {};
  record.kind = static_cast<uint32_t>(kind);
  record.pc = pc;
  record.other_pc = other_pc;
  record.line = line;
  if (current) {
    const uint3& block = current->block->index;
    const uint3& thread = current->thread_index;
    const uint32_t indices[6] = {block.x, block.y, block.z, thread.x, thread.y, thread.z};
    memcpy(record.block, indices, sizeof record.block);
    memcpy(record.thread, indices + 3, sizeof record.thread);
  }
  reports.push_back(record);
  return &reports.back();
}

void report(ReportKind kind, uint32_t pc, uint32_t other_pc, const char* format, ...) {
  ReportRecord* record = new_report(kind, pc, other_pc, 0);
  if (!record) return;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(record->text, kReportText, format, arguments);
  va_end(arguments);
}

void report_fatal(ReportKind kind, uint32_t pc, uint32_t other_pc, const char* format, ...) {
  if (ReportRecord* record = new_report(kind, pc, other_pc, 0)) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(record->text, kReportText, format, arguments);
    va_end(arguments);
  }
  abort_launch();
}

void report_at_source(ReportKind kind, const char* file, uint32_t line, uint32_t column,
                      const char* text) {
  ReportRecord* record = new_report(kind, 0, column, line);
  if (!record) return;
  record->other_pc = 0;
  snprintf(record->file, sizeof record->file, "%s", file);
  snprintf(record->text, kReportText, "%s", text);
}

// ---------------------------------------------------------------------------------------------
// Regions
// ---------------------------------------------------------------------------------------------
static std::map<uintptr_t, Region*> regions;  // by the address of their last byte + 1
// Cache of recently accessed regions: a kernel alternates between a few arrays.
constexpr unsigned kRecent = 8;
static Region* recent[kRecent];
static unsigned next_recent = 0;

static void forget_recent() { std::fill(recent, recent + kRecent, nullptr); }

static bool contains(const Region* region, const void* address) {
  return static_cast<size_t>(static_cast<const uint8_t*>(address) - region->base) < region->size;
}

Region* find_region(const void* address) {
  for (Region* region : recent)
    if (region && contains(region, address)) return region;
  auto it = regions.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (it == regions.end() || !contains(it->second, address)) return nullptr;
  return recent[next_recent++ % kRecent] = it->second;
}

static void* map_zeroed(size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

Region* create_region(const char* name, void* base, size_t size, unsigned granule_shift,
                      bool is_shared, bool read_only, bool uninitialised) {
  Region* region = new Region();
  region->base = static_cast<uint8_t*>(base);
  region->size = size;
  region->is_shared = is_shared;
  region->read_only = read_only;
  region->granule_shift = granule_shift;
  region->name = name;
  region->cell_count = (size >> granule_shift) + 1;
  // A read-only array cannot race, so it has no shadow.
  if (!read_only) region->cells = static_cast<Cell*>(map_zeroed(region->cell_count * sizeof(Cell)));
  if (uninitialised) region->element_state = static_cast<uint8_t*>(map_zeroed(region->cell_count));
  regions[reinterpret_cast<uintptr_t>(base) + size] = region;
  forget_recent();
  return region;
}

void destroy_region(Region* region) {
  if (region->cells) munmap(region->cells, region->cell_count * sizeof(Cell));
  if (region->element_state) munmap(region->element_state, region->cell_count);
  regions.erase(reinterpret_cast<uintptr_t>(region->base) + region->size);
  forget_recent();
  delete region;
}

void forget_accesses() {
  for (auto& [end, region] : regions)
    if (!region->is_shared && region->cells)
      madvise(region->cells, region->cell_count * sizeof(Cell), MADV_DONTNEED);
}

std::string describe_address(const Region* region, const void* address) {
  char text[200];
  const long offset = static_cast<const uint8_t*>(address) - region->base;
  snprintf(text, sizeof text, "%s %s at byte %ld", region->is_shared ? "shared" : "global",
           region->name.c_str(), offset);
  return text;
}

// Describes an address outside all regions by the nearest one.
static std::string describe_stray(const void* address) {
  const auto* byte = static_cast<const uint8_t*>(address);
  const Region* best = nullptr;
  long best_distance = 1 << 20;
  for (auto& [end, region] : regions) {
    const long distance =
        byte < region->base ? region->base - byte : byte - (region->base + region->size) + 1;
    if (distance < best_distance) {
      best_distance = distance;
      best = region;
    }
  }
  if (!best) return "far from every array";
  char text[200];
  const bool before = byte < best->base;
  snprintf(text, sizeof text, "%ld bytes %s %s %s of %zu bytes",
           before ? best_distance : best_distance - 1, before ? "before" : "past the end of",
           best->is_shared ? "shared" : "global", best->name.c_str(), best->size);
  return text;
}

static bool is_aligned_in(const Region* region, const void* address, size_t alignment) {
  const uintptr_t value =
      region && region->is_shared
          ? region->offset +
                static_cast<size_t>(static_cast<const uint8_t*>(address) - region->base)
          : reinterpret_cast<uintptr_t>(address);
  return (value & (alignment - 1)) == 0;
}

bool is_aligned(const void* address, size_t alignment) {
  return is_aligned_in(find_region(address), address, alignment);
}

// ---------------------------------------------------------------------------------------------
// Order of an earlier access and the fiber's next one
// ---------------------------------------------------------------------------------------------
static bool in_this_group(uint32_t group_id) { return group_id == group.id; }

static bool in_a_launch_before(uint32_t group_id) { return group_id < running.first_group; }

// Whether the fiber, or a thread that it has acquired from, has waited for earlier launches.
static bool has_waited(const Fiber* fiber) {
  if (fiber->knowledge->has_waited()) return true;
  if (!fiber->grid_known) return false;
  return std::any_of(fiber->grid_known->begin(), fiber->grid_known->end(),
                     [](const auto& known) { return known.second->has_waited(); });
}

static bool has_ended_for(const Fiber* fiber, uint32_t group_id) {
  return group_id >= running.awaited_from && has_waited(fiber);
}

static bool happened_before(Fiber* fiber, uint32_t group_id, uint16_t participant, uint32_t clock) {
  if (in_this_group(group_id))
    return participant == fiber->participant || fiber->knowledge->seen[participant] >= clock;
  if (in_a_launch_before(group_id)) return true;  // else reported already
  if (!fiber->grid_known) return false;
  auto known = fiber->grid_known->find(group_id);
  return known != fiber->grid_known->end() && known->second->seen[participant] >= clock;
}

static bool is_fenced_for(Fiber* fiber, uint16_t participant, uint32_t clock) {
  return fiber->knowledge->fenced[participant] >= clock;
}

static std::string name_participant(uint32_t group_id, uint16_t participant) {
  if (!in_this_group(group_id)) return "a thread of another block";
  if (participant >= group.fibers.size()) return "an asynchronous copy";
  const Fiber* other = group.fibers[participant];
  char text[80];
  const uint3& t = other->thread_index;
  if (group.blocks.size() > 1)
    snprintf(text, sizeof text, "thread (%u,%u,%u) of block rank %u", t.x, t.y, t.z,
             other->block->rank);
  else
    snprintf(text, sizeof text, "thread (%u,%u,%u)", t.x, t.y, t.z);
  return text;
}

static ReportKind race_kind(uint32_t group_id) {
  return in_this_group(group_id) ? ReportKind::kRace : ReportKind::kBlockRace;
}

// ---------------------------------------------------------------------------------------------
// The access check
// ---------------------------------------------------------------------------------------------
struct Access {
  Fiber* fiber;
  const uint8_t* address;
  unsigned flags;
  uint32_t pc;
  Region* region;
  bool writes() const { return flags & kWrite; }
  const char* verb() const { return writes() ? "write" : "read"; }
  std::string place(const Cell& cell) const {
    const size_t index = static_cast<size_t>(&cell - region->cells) << region->granule_shift;
    return describe_address(region,
                            std::max(address, const_cast<const uint8_t*>(region->base + index)));
  }
};

// Checks an access against those of launches that may still run.
static void check_against_launches_before(const Access& access, const Cell& cell) {
  if (running.first_group == 1 || access.region->is_shared) return;
  if ((access.flags & kAtomic) && (cell.flags & kAtomicWrite)) return;
  const auto may_run = [&](uint32_t group_id) {
    return in_a_launch_before(group_id) && !has_ended_for(access.fiber, group_id);
  };
  const bool is_written = (cell.flags & kTouched) && may_run(cell.write_group);
  const bool is_read = access.writes() && cell.reader_count && may_run(cell.read_group);
  if (!is_written && !is_read) return;
  const uint32_t other = is_written ? cell.write_group : cell.read_group;
  report(ReportKind::kLaunchRace, access.pc, 0, "%s of %s, %s by the launch of %s before, %s",
         access.verb(), access.place(cell).c_str(), is_written ? "written" : "read",
         launch_of_group(other),
         other < running.awaited_from ? "for which a launch between them did not wait"
                                      : "with no griddepcontrol.wait between them");
}

static void check_write_to_cell(const Access& access, Cell& cell) {
  if (cell.async_readers)
    report(ReportKind::kAsyncOverwrite, access.pc, 0,
           "write to %s, which an un-waited wgmma or bulk store still reads",
           access.place(cell).c_str());
  const bool both_atomic = (access.flags & kAtomic) && (cell.flags & kAtomicWrite);
  if ((cell.flags & kTouched) && !both_atomic) {
    if (!happened_before(access.fiber, cell.write_group, cell.writer, cell.write_clock))
      report(race_kind(cell.write_group), access.pc, cell.write_pc,
             "write of %s, also written by %s at {line %u}, with no order between them",
             access.place(cell).c_str(), name_participant(cell.write_group, cell.writer).c_str(),
             cell.write_pc);
    else if ((access.flags & kAsyncProxy) && (cell.flags & kGenericWrite) &&
             access.region->is_shared && in_this_group(cell.write_group) &&
             !is_fenced_for(access.fiber, cell.writer, cell.write_clock))
      report(ReportKind::kMissingProxyFence, access.pc, cell.write_pc,
             "an asynchronous copy overwrites %s, written at {line %u} with no proxy fence between",
             access.place(cell).c_str(), cell.write_pc);
  }
  if (both_atomic || !cell.reader_count) return;
  if (!in_this_group(cell.read_group) || (cell.flags & kOtherGroupRead)) {
    if (!happened_before(access.fiber, cell.read_group, cell.reader[0], cell.read_clock[0]))
      report(ReportKind::kBlockRace, access.pc, cell.read_pc,
             "write of %s, which another block reads at {line %u}", access.place(cell).c_str(),
             cell.read_pc);
    return;
  }
  for (int i = 0; i < cell.reader_count; i++) {
    if (happened_before(access.fiber, cell.read_group, cell.reader[i], cell.read_clock[i]))
      continue;
    report(ReportKind::kRace, access.pc, cell.read_pc,
           "write of %s, read by %s at {line %u}, with no order between them",
           access.place(cell).c_str(), name_participant(cell.read_group, cell.reader[i]).c_str(),
           cell.read_pc);
    return;
  }
}

static void record_write(const Access& access, Cell& cell) {
  cell.write_group = group.id;
  cell.writer = static_cast<uint16_t>(access.fiber->participant);
  cell.write_clock = access.fiber->clock;
  cell.write_pc = access.pc;
  cell.reader_count = 0;
  cell.flags = static_cast<uint8_t>(kTouched | (cell.flags & kBarrierObject) |
                                    (access.flags & kAtomic ? kAtomicWrite : 0) |
                                    (access.flags & kAsyncProxy ? 0 : kGenericWrite));
}

static void check_read_of_cell(const Access& access, Cell& cell, size_t index) {
  const Region* region = access.region;
  if (!(cell.flags & kTouched)) {
    const bool never_written =
        region->is_shared || (region->element_state && !(region->element_state[index] & kWritten));
    if (never_written)
      report(ReportKind::kUninitialisedRead, access.pc, 0, "read of %s, which nothing has written",
             access.place(cell).c_str());
    return;
  }
  if (!happened_before(access.fiber, cell.write_group, cell.writer, cell.write_clock)) {
    report(race_kind(cell.write_group), access.pc, cell.write_pc,
           "read of %s, written by %s at {line %u}, with no order between them",
           access.place(cell).c_str(), name_participant(cell.write_group, cell.writer).c_str(),
           cell.write_pc);
  } else if ((access.flags & kAsyncProxy) && (cell.flags & kGenericWrite) && region->is_shared &&
             !is_fenced_for(access.fiber, cell.writer, cell.write_clock)) {
    report(ReportKind::kMissingProxyFence, access.pc, cell.write_pc,
           "an asynchronous operation reads %s, written at {line %u} with no proxy fence between",
           access.place(cell).c_str(), cell.write_pc);
  }
}

static void record_read(const Access& access, Cell& cell) {
  if (cell.reader_count && cell.read_group != group.id) {
    cell.reader_count = 0;
    cell.flags |= kOtherGroupRead;
  }
  const auto self = static_cast<uint16_t>(access.fiber->participant);
  int slot = 0;
  while (slot < cell.reader_count && cell.reader[slot] != self) slot++;
  if (slot == kReadersKept) {
    // With more readers than slots, a sample is kept.
    static unsigned passed_over = 0;
    if (++passed_over % kReadersKept) return;
    slot = static_cast<int>(passed_over / kReadersKept % kReadersKept);
  }
  if (slot == cell.reader_count) cell.reader_count++;
  cell.read_group = group.id;
  cell.reader[slot] = self;
  cell.read_clock[slot] = access.fiber->clock;
  cell.read_pc = access.pc;
}

static void check_cell(const Access& access, Cell& cell, size_t index) {
  if (!(access.flags & kOnBarrierObject)) {
    if (cell.flags & kInFlight) {
      report(ReportKind::kAsyncBeforeWait, access.pc, cell.write_pc,
             "%s of %s before the wait for the copy issued at {line %u}", access.verb(),
             access.place(cell).c_str(), cell.write_pc);
      return;
    }
    if (cell.flags & kBarrierObject) {
      report(ReportKind::kMbarrier, access.pc, cell.write_pc,
             "plain %s of %s, where an mbarrier initialised at {line %u} lives", access.verb(),
             access.place(cell).c_str(), cell.write_pc);
      return;
    }
  }
  check_against_launches_before(access, cell);
  Region* region = access.region;
  if (access.writes()) {
    if (region->element_state) {
      if (region->element_state[index] & kNotToBeWritten)
        report(ReportKind::kOutOfBounds, access.pc, 0,
               "write to %s, which lies between the elements of the array",
               access.place(cell).c_str());
      region->element_state[index] |= kWritten;
    }
    check_write_to_cell(access, cell);
    record_write(access, cell);
  } else {
    check_read_of_cell(access, cell, index);
    record_read(access, cell);
  }
}

static bool in_the_module(const void* address) {
  const auto value = reinterpret_cast<uintptr_t>(address);
  return value >= running.module_base && value < running.module_end;
}

// Splits the cells of a region for a smaller access, so that neighbouring elements are distinct;
// each part inherits the records.  Returns false if the region is too large.
static bool refine(Region* region, size_t offset_and_size) {
  constexpr size_t kMostCells = size_t{1} << 28;
  if (region->cell_count > kMostCells) return false;
  const unsigned shift = static_cast<unsigned>(__builtin_ctzll(offset_and_size));
  const unsigned split = region->granule_shift - shift;
  const size_t old_count = region->cell_count;
  const size_t count = (region->size >> shift) + 1;
  auto* cells = static_cast<Cell*>(map_zeroed(count * sizeof(Cell)));
  // Untouched cells stay untouched pages.
  const Cell untouched = {};
  for (size_t i = 0; i < old_count; i++) {
    const Cell& cell = region->cells[i];
    if (!memcmp(&cell, &untouched, sizeof(Cell))) continue;
    for (size_t part = i << split; part < (i + 1) << split && part < count; part++)
      cells[part] = cell;
  }
  munmap(region->cells, old_count * sizeof(Cell));
  region->cells = cells;
  if (region->element_state) {
    auto* state = static_cast<uint8_t*>(map_zeroed(count));
    for (size_t i = 0; i < count; i++) state[i] = region->element_state[i >> split];
    munmap(region->element_state, old_count);
    region->element_state = state;
  }
  region->cell_count = count;
  region->granule_shift = shift;
  return true;
}

void check_access(Fiber* fiber, const void* address, size_t size, unsigned flags, uint32_t pc) {
  if (on_a_fiber_stack(address)) return;
  const auto* byte = static_cast<const uint8_t*>(address);
  Region* region = find_region(address);
  const Access access = {fiber, byte, flags, pc, region};
  if (!region) {
    if (!access.writes() && in_the_module(address)) return;  // a constant
    report_fatal(ReportKind::kOutOfBounds, pc, 0, "%s of %zu bytes, %s", access.verb(), size,
                 describe_stray(address).c_str());
  }
  const size_t start = static_cast<size_t>(byte - region->base);
  if (start + size > region->size)
    report_fatal(ReportKind::kOutOfBounds, pc, 0,
                 "%s of %zu bytes at byte %zu of %s %s, which has %zu", access.verb(), size, start,
                 region->is_shared ? "shared" : "global", region->name.c_str(), region->size);
  if (!(flags & (kAnyAlignment | kAsyncProxy)) && size <= 16 &&
      !is_aligned_in(region, address, size))
    report_fatal(ReportKind::kMisaligned, pc, 0, "%s of %zu bytes at %s, not a multiple of %zu",
                 access.verb(), size, describe_address(region, address).c_str(), size);
  if (region->read_only && access.writes())
    report_fatal(ReportKind::kReadOnlyWrite, pc, 0, "write to %s, an input of the kernel",
                 describe_address(region, address).c_str());
  if (!region->cells) return;
  const bool is_part = (start | size) & ((size_t{1} << region->granule_shift) - 1);
  if (is_part && !refine(region, start | size)) return;  // neighbours would look like races
  const size_t last = (start + size - 1) >> region->granule_shift;
  for (size_t i = start >> region->granule_shift; i <= last; i++)
    check_cell(access, region->cells[i], i);
}

void mark_written(const void* address, size_t size, unsigned writer, uint32_t clock, uint32_t pc,
                  uint8_t flags) {
  for_each_cell(address, size, [=](Cell& cell, Region* region, size_t index) {
    cell.flags = static_cast<uint8_t>(kTouched | flags);
    cell.writer = static_cast<uint16_t>(writer);
    cell.write_clock = clock;
    cell.write_pc = pc;
    cell.write_group = group.id;
    cell.reader_count = 0;
    if (region->element_state) region->element_state[index] |= kWritten;
  });
}

void atomic_access(const void* address, size_t size) {
  if (!settings.check) return;
  check_access(current, address, size, kWrite | kAtomic, EMULATOR_CALLER);
  publish_through_atomic(address);
}

void misaligned(const void* address, size_t alignment) {
  const Region* region = find_region(address);
  report_fatal(ReportKind::kMisaligned, EMULATOR_CALLER, 0, "access at %s: its address is not a multiple of %zu",
               region ? describe_address(region, address).c_str() : "a thread's own variable",
               alignment);
}

void trap() { report_fatal(ReportKind::kTrap, EMULATOR_CALLER, 0, "__trap() was reached"); }

}  // namespace emulator

// ---------------------------------------------------------------------------------------------
// Interface for Python
// ---------------------------------------------------------------------------------------------
using namespace emulator;
extern "C" {
void emulator_clear_reports() {
  reports.clear();
  already_reported.clear();
}
size_t emulator_report_count() { return reports.size(); }
const ReportRecord* emulator_report(size_t index) { return &reports[index]; }

void* emulator_register(const char* name, void* base, size_t size, unsigned granule_shift,
                        int read_only, int uninitialised) {
  return create_region(name, base, size, granule_shift, false, read_only, uninitialised);
}
void emulator_unregister(void* region) { destroy_region(static_cast<Region*>(region)); }
// Returns the state bytes of an initially unwritten array, one per cell.
uint8_t* emulator_element_state(void* region) {
  return static_cast<Region*>(region)->element_state;
}
unsigned emulator_granule_shift(void* region) {
  return static_cast<Region*>(region)->granule_shift;
}
int emulator_is_registered(const void* address) { return find_region(address) != nullptr; }
}
