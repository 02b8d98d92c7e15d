// ldmatrix, stmatrix, mma.sync and wgmma.
//
// Sums are computed in double and rounded once per instruction; the hardware keeps fewer bits, so
// the last bits of a float accumulator differ.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "checker.h"

namespace emulator {

// ---------------------------------------------------------------------------------------------
// Elements
// ---------------------------------------------------------------------------------------------
template <class To, class From>
static To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To result;
  memcpy(&result, &value, sizeof result);
  return result;
}
static float f16_value(uint16_t bits) { return static_cast<float>(bit_cast<_Float16>(bits)); }
static float bf16_value(uint16_t bits) {
  return bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}
// The tensor cores ignore the fraction bits beyond tf32.
static float tf32_value(uint32_t bits) { return bit_cast<float>(bits & 0xffffe000u); }
static float value_of_16(Element element, uint16_t bits) {
  return element == Element::kF16 ? f16_value(bits) : bf16_value(bits);
}

enum MatrixOperation { kLoadMatrix = 100, kStoreMatrix = 120, kMma = 140, kMmaF64 = 160 };
enum WarpgroupOperation { kFence = 1, kCommit, kWait, kSetRegisters, kMultiply };

// ---------------------------------------------------------------------------------------------
// ldmatrix, stmatrix
// ---------------------------------------------------------------------------------------------
struct MatrixArgument {
  uint8_t* row;
  uint32_t* registers;
  int count;
  bool transpose;
  uint32_t pc;
  Fiber* fiber;
};

static void check_matrix_row(const MatrixArgument& lane, unsigned flags) {
  current = lane.fiber;
  const Region* region = find_region(lane.row);
  if (!region || !region->is_shared || lane.row + 16 > region->base + region->size)
    report_fatal(ReportKind::kOutOfBounds, lane.pc, 0, "%s of a matrix row, %s",
                 flags & kWrite ? "write" : "read",
                 region ? describe_address(region, lane.row).c_str() : "not in shared memory");
  if (!is_aligned(lane.row, 16))
    report_fatal(ReportKind::kMisaligned, lane.pc, 0, "a matrix row at %s, not a multiple of 16",
                 describe_address(region, lane.row).c_str());
}

// The lane that holds element (row, column) of a matrix, and the position in its register.
struct Holder {
  int lane, half;
};
static Holder holder_of(int row, int column, bool transpose) {
  if (transpose) std::swap(row, column);
  return {row * 4 + column / 2, column % 2};
}

static void count_bank_conflicts(MatrixArgument* const* lanes, int count) {
  if (!settings.bank_conflicts) return;
  for (int matrix = 0; matrix < count; matrix++) {
    uint32_t offsets[8];
    for (int row = 0; row < 8; row++) {
      current = lanes[matrix * 8 + row]->fiber;
      offsets[row] = shared_offset(lanes[matrix * 8 + row]->row);
    }
    count_matrix_access(offsets, 8, lanes[0]->pc);
  }
}

// Moves every element between its row in shared memory and its register.  The access counts as the
// lane's that holds the element, not the lane's that passed the row's address.
template <bool Store>
static void move_matrices(void** arguments, unsigned) {
  auto* const* lanes = reinterpret_cast<MatrixArgument* const*>(arguments);
  const int count = lanes[0]->count;
  const bool transpose = lanes[0]->transpose;
  Fiber* last = current;
  for (int address = 0; address < count * 8; address++)
    check_matrix_row(*lanes[address], Store ? kWrite : kRead);
  for (int matrix = 0; matrix < count; matrix++)
    for (int row = 0; row < 8; row++)
      for (int column = 0; column < 8; column++) {
        const MatrixArgument& source = *lanes[matrix * 8 + row];
        const Holder holder = holder_of(row, column, transpose);
        MatrixArgument& owner = *lanes[holder.lane];
        uint8_t* element = source.row + column * 2;
        current = owner.fiber;
        if (settings.check) check_access(current, element, 2, Store ? kWrite : kRead, source.pc);
        auto* half = reinterpret_cast<uint8_t*>(&owner.registers[matrix]) + holder.half * 2;
        if (Store)
          memcpy(element, half, 2);
        else
          memcpy(half, element, 2);
      }
  count_bank_conflicts(lanes, count);
  current = last;
}

void load_matrix(uint32_t* registers, const void* row, int count, bool transpose) {
  MatrixArgument argument = {static_cast<uint8_t*>(const_cast<void*>(row)),
                             registers,
                             count,
                             transpose,
                             EMULATOR_CALLER,
                             current};
  warp_meet(kLoadMatrix + count + 8 * transpose, 0xffffffffu, &argument, move_matrices<false>,
            argument.pc);
}

void store_matrix(const uint32_t* registers, void* row, int count, bool transpose) {
  MatrixArgument argument = {static_cast<uint8_t*>(row),
                             const_cast<uint32_t*>(registers),
                             count,
                             transpose,
                             EMULATOR_CALLER,
                             current};
  warp_meet(kStoreMatrix + count + 8 * transpose, 0xffffffffu, &argument, move_matrices<true>,
            argument.pc);
}

// ---------------------------------------------------------------------------------------------
// mma.sync
// ---------------------------------------------------------------------------------------------
struct MmaArgument {
  Element element;
  int k;
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};

// a has 16 rows: register 2 j + h holds row group + 8 h; columns 8 j + 2 pair (+ 1) of 16-bit
// types, column 4 j + pair of tf32.
static void unpack_a(Element element, int k, const uint32_t* registers, int lane,
                     float (&rows)[16][16]) {
  const int group = lane / 4, pair = lane % 4;
  const int columns = element == Element::kTf32 ? 4 : 8;
  for (int j = 0; j < k / columns; j++)
    for (int half = 0; half < 2; half++) {
      const uint32_t bits = registers[2 * j + half];
      float* row = rows[group + 8 * half] + j * columns;
      if (element == Element::kTf32) {
        row[pair] = tf32_value(bits);
      } else {
        row[2 * pair] = value_of_16(element, static_cast<uint16_t>(bits));
        row[2 * pair + 1] = value_of_16(element, static_cast<uint16_t>(bits >> 16));
      }
    }
}

static void unpack_b(const MmaArgument& argument, int lane, float (&rows)[16][8]) {
  const int group = lane / 4, pair = lane % 4;
  const int height = argument.element == Element::kTf32 ? 4 : 8;
  for (int j = 0; j < argument.k / height; j++) {
    const uint32_t bits = argument.b[j];
    if (argument.element == Element::kTf32) {
      rows[j * 4 + pair][group] = tf32_value(bits);
    } else {
      rows[j * 8 + 2 * pair][group] = value_of_16(argument.element, static_cast<uint16_t>(bits));
      rows[j * 8 + 2 * pair + 1][group] =
          value_of_16(argument.element, static_cast<uint16_t>(bits >> 16));
    }
  }
}

static void multiply_in_warp(void** arguments, unsigned) {
  auto* const* lanes = reinterpret_cast<MmaArgument* const*>(arguments);
  float a[16][16], b[16][8];
  for (int lane = 0; lane < kWarpSize; lane++) {
    unpack_a(lanes[lane]->element, lanes[lane]->k, lanes[lane]->a, lane, a);
    unpack_b(*lanes[lane], lane, b);
  }
  for (int row = 0; row < 16; row++)
    for (int column = 0; column < 8; column++) {
      float& d = lanes[row % 8 * 4 + column / 2]->d[row / 8 * 2 + column % 2];
      double sum = d;
      for (int k = 0; k < lanes[0]->k; k++) sum += static_cast<double>(a[row][k]) * b[k][column];
      d = static_cast<float>(sum);
    }
}

void mma(Element element, int k, float* d, const uint32_t* a, const uint32_t* b) {
  MmaArgument argument = {element, k, d, a, b};
  warp_meet(kMma + static_cast<int>(element) * 2 + (k == 8), 0xffffffffu, &argument,
            multiply_in_warp, EMULATOR_CALLER);
}

struct MmaF64Argument {
  double* d;
  double a, b;
};

void mma_f64(double* d, double a, double b) {
  MmaF64Argument argument = {d, a, b};
  auto body = [](void** arguments, unsigned) {
    auto* const* lanes = reinterpret_cast<MmaF64Argument* const*>(arguments);
    for (int row = 0; row < 8; row++)
      for (int column = 0; column < 8; column++) {
        double& sum = lanes[row * 4 + column / 2]->d[column % 2];
        for (int k = 0; k < 4; k++)
          sum = std::fma(lanes[row * 4 + k]->a, lanes[column * 4 + k]->b, sum);
      }
  };
  warp_meet(kMmaF64, 0xffffffffu, &argument, body, EMULATOR_CALLER);
}

// ---------------------------------------------------------------------------------------------
// wgmma
// ---------------------------------------------------------------------------------------------
struct Descriptor {
  uint32_t start, leading, stride;
  int swizzle;
};

static Descriptor decode_descriptor(uint64_t bits, uint32_t pc) {
  constexpr int kSwizzle[4] = {0, 128, 64, 32};
  const Descriptor descriptor = {
      static_cast<uint32_t>(bits & 0x3fff) << 4, static_cast<uint32_t>(bits >> 16 & 0x3fff) << 4,
      static_cast<uint32_t>(bits >> 32 & 0x3fff) << 4, kSwizzle[bits >> 62]};
  constexpr uint64_t kOtherBits = ~(0x3fffull | 0x3fffull << 16 | 0x3fffull << 32 | 3ull << 62);
  if (bits & kOtherBits)
    report_fatal(ReportKind::kDescriptor, pc, 0,
                 "bits of the descriptor that must be zero (a base offset, or a damaged value)");
  return descriptor;
}

uint64_t matrix_descriptor(const void* start, unsigned leading_bytes, unsigned stride_bytes,
                           unsigned swizzle) {
  const uint32_t pc = EMULATOR_CALLER;
  const uint32_t address = shared_address(start);
  if (address % 16 || leading_bytes % 16 || stride_bytes % 16)
    report_fatal(ReportKind::kDescriptor, pc, 0,
                 "address 0x%x, leading %u and stride %u must be multiples of 16", address,
                 leading_bytes, stride_bytes);
  if (address > 0x3ffff || leading_bytes > 0x3ffff || stride_bytes > 0x3ffff)
    report_fatal(ReportKind::kDescriptor, pc, 0,
                 "address 0x%x, leading %u or stride %u is over 18 bits", address, leading_bytes,
                 stride_bytes);
  const uint64_t mode = swizzle == 0 ? 0 : swizzle == 128 ? 1 : swizzle == 64 ? 2 : 3;
  return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4) << 32 | mode << 62;
}

// Address, before the swizzle, of the 16-byte unit at index `mn` along m or n and `k` along k.
// K-major: a unit is 16 bytes of k in row mn; MN-major: 16 bytes of m or n at depth k.
static uint32_t unit_address(const Descriptor& d, int mn, int k, bool mn_major) {
  const auto row = static_cast<uint32_t>(mn), depth = static_cast<uint32_t>(k);
  if (!mn_major) {
    if (d.swizzle == 0) return d.start + row / 8 * d.stride + row % 8 * 16 + depth * d.leading;
    return d.start + row / 8 * d.stride + row % 8 * static_cast<uint32_t>(d.swizzle) + depth * 16;
  }
  if (d.swizzle == 0) return d.start + row * d.stride + depth % 8 * 16 + depth / 8 * d.leading;
  const uint32_t units = static_cast<uint32_t>(d.swizzle) / 16;
  return d.start + row / units * d.leading + row % units * 16 +
         depth % 8 * static_cast<uint32_t>(d.swizzle) + depth / 8 * d.stride;
}

struct Operand {
  Element element;
  Descriptor descriptor;
  bool mn_major;
  uint32_t pc;
};

// Reads one unit of an operand; checked as an access by the asynchronous proxy.
static void read_unit(const Operand& operand, int mn, int k, uint8_t (&bytes)[16],
                      PendingMma& pending) {
  const uint32_t address = swizzled(unit_address(operand.descriptor, mn, k, operand.mn_major),
                                    operand.descriptor.swizzle);
  uint8_t* pointer = shared_pointer(address, 16);
  if (!pointer)
    report_fatal(ReportKind::kOutOfBounds, operand.pc, 0,
                 "a wgmma operand at shared address 0x%x, where no array lies", address);
  if (settings.check) check_access(current, pointer, 16, kRead | kAsyncProxy, operand.pc);
  pending.operands.push_back({pointer, 16});
  memcpy(bytes, pointer, 16);
}

// Returns an operand in shared memory as values[mn * k_extent + k].
static std::vector<float> read_operand(const Operand& operand, int mn_extent, int k_extent,
                                       PendingMma& pending) {
  const int size = operand.element == Element::kTf32 ? 4 : 2;
  const int per_unit = 16 / size;
  std::vector<float> values(static_cast<size_t>(mn_extent) * static_cast<size_t>(k_extent));
  const int mn_units = operand.mn_major ? mn_extent / per_unit : mn_extent;
  const int k_units = operand.mn_major ? k_extent : k_extent / per_unit;
  for (int mn = 0; mn < mn_units; mn++)
    for (int k = 0; k < k_units; k++) {
      uint8_t bytes[16];
      read_unit(operand, mn, k, bytes, pending);
      for (int i = 0; i < per_unit; i++) {
        const int row = operand.mn_major ? mn * per_unit + i : mn;
        const int depth = operand.mn_major ? k : k * per_unit + i;
        uint32_t bits = 0;
        memcpy(&bits, bytes + i * size, static_cast<size_t>(size));
        values[static_cast<size_t>(row * k_extent + depth)] =
            operand.element == Element::kTf32
                ? tf32_value(bits)
                : value_of_16(operand.element, static_cast<uint16_t>(bits));
      }
    }
  return values;
}

struct WgmmaArgument {
  WarpgroupMma operation;
  Fiber* fiber;
  uint32_t pc;
};

// Accumulator register of element (row, column) of d.
static float& accumulator_of(float* const* accumulators, int row, int column) {
  const int lane = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
  return accumulators[lane][column / 8 * 4 + row % 16 / 8 * 2 + column % 2];
}

static void check_agreement(WgmmaArgument* const* threads) {
  const WarpgroupMma& first = threads[0]->operation;
  for (int i = 1; i < kWarpgroupSize; i++) {
    const WarpgroupMma& other = threads[i]->operation;
    const bool same = other.b_descriptor == first.b_descriptor && other.scale_d == first.scale_d &&
                      (first.a_registers || other.a_descriptor == first.a_descriptor);
    if (same) continue;
    current = threads[i]->fiber;
    report(ReportKind::kWarpgroupMma, threads[0]->pc, 0,
           "the descriptors of one wgmma differ between threads");
    return;
  }
}

static std::vector<float> read_a(WgmmaArgument* const* threads, int k_extent, PendingMma& pending) {
  const WarpgroupMma& operation = threads[0]->operation;
  if (!operation.a_registers) {
    const Operand operand = {operation.element,
                             decode_descriptor(operation.a_descriptor, threads[0]->pc),
                             operation.transpose_a, threads[0]->pc};
    return read_operand(operand, 64, k_extent, pending);
  }
  std::vector<float> values(static_cast<size_t>(64 * k_extent));
  for (int warp = 0; warp < 4; warp++) {
    float rows[16][16];
    for (int lane = 0; lane < kWarpSize; lane++)
      unpack_a(operation.element, k_extent, threads[warp * 32 + lane]->operation.a_registers, lane,
               rows);
    for (int row = 0; row < 16; row++)
      std::copy(rows[row], rows[row] + k_extent, values.begin() + (warp * 16 + row) * k_extent);
  }
  return values;
}

// The latest wgmma in flight on the same accumulators, whose result this one accumulates.
static const PendingMma* predecessor(const Warpgroup& warpgroup, const float* accumulators) {
  const PendingMma* found = nullptr;
  auto look = [&](const std::vector<PendingMma>& pending) {
    for (const PendingMma& one : pending)
      if (one.accumulators[0] == accumulators) found = &one;
  };
  for (const auto& pending : warpgroup.groups) look(pending);
  look(warpgroup.open);
  return found;
}

static void multiply_in_warpgroup(void** arguments, unsigned) {
  auto* const* threads = reinterpret_cast<WgmmaArgument* const*>(arguments);
  const WarpgroupMma& operation = threads[0]->operation;
  Fiber* last = current;
  current = threads[0]->fiber;
  Warpgroup& warpgroup = current->block->warpgroups[current->thread / kWarpgroupSize];
  if (!warpgroup.fenced)
    report(ReportKind::kWarpgroupMma, threads[0]->pc, 0,
           "wgmma with no wgmma_fence since its registers were last the threads' own");
  check_agreement(threads);
  current = threads[0]->fiber;
  const int k_extent = operation.element == Element::kTf32 ? 8 : 16;
  const int n = operation.n;
  PendingMma pending;
  pending.n = n;
  pending.pc = threads[0]->pc;
  for (int i = 0; i < kWarpgroupSize; i++)
    pending.accumulators[i] = threads[i]->operation.accumulators;
  const std::vector<float> a = read_a(threads, k_extent, pending);
  const Operand b_operand = {operation.element,
                             decode_descriptor(operation.b_descriptor, threads[0]->pc),
                             operation.transpose_b, threads[0]->pc};
  const std::vector<float> b = read_operand(b_operand, n, k_extent, pending);

  const PendingMma* before = predecessor(warpgroup, pending.accumulators[0]);
  pending.result.resize(static_cast<size_t>(64 * n));
  std::vector<float> b_rows(static_cast<size_t>(k_extent * n));  // [k][n]: the inner loop is dense
  for (int column = 0; column < n; column++)
    for (int k = 0; k < k_extent; k++)
      b_rows[static_cast<size_t>(k * n + column)] = b[static_cast<size_t>(column * k_extent + k)];
  std::vector<double> sums(static_cast<size_t>(n));
  for (int row = 0; row < 64; row++) {
    for (int column = 0; column < n; column++) {
      const float old = before ? before->result[static_cast<size_t>(row * n + column)]
                               : accumulator_of(pending.accumulators, row, column);
      sums[static_cast<size_t>(column)] = operation.scale_d ? old : 0.0;
    }
    for (int k = 0; k < k_extent; k++) {
      const double factor = a[static_cast<size_t>(row * k_extent + k)];
      const float* b_row = &b_rows[static_cast<size_t>(k * n)];
      for (int column = 0; column < n; column++)
        sums[static_cast<size_t>(column)] += factor * b_row[column];
    }
    for (int column = 0; column < n; column++) {
      pending.result[static_cast<size_t>(row * n + column)] =
          static_cast<float>(sums[static_cast<size_t>(column)]);
      // Poison until the wait.
      accumulator_of(pending.accumulators, row, column) = std::nanf("");
    }
  }
  for (auto& [pointer, size] : pending.operands)
    for_each_cell(pointer, static_cast<size_t>(size), [](Cell& cell, Region*, size_t) {
      if (cell.async_readers < 255) cell.async_readers++;
    });
  warpgroup.open.push_back(std::move(pending));
  current = last;
}

void warpgroup_mma(const WarpgroupMma& operation) {
  WgmmaArgument argument = {operation, current, EMULATOR_CALLER};
  const int kind = kMultiply + static_cast<int>(operation.element) + 4 * operation.n +
                   2048 * operation.transpose_a + 4096 * operation.transpose_b +
                   8192 * (operation.a_registers != nullptr);
  warpgroup_meet(kind, &argument, multiply_in_warpgroup, argument.pc);
}

static Warpgroup& warpgroup_of_current() {
  return current->block->warpgroups[current->thread / kWarpgroupSize];
}

void warpgroup_fence() {
  auto body = [](void**, unsigned) { warpgroup_of_current().fenced = true; };
  warpgroup_meet(kFence, current, body, EMULATOR_CALLER);
}

void warpgroup_commit() {
  auto body = [](void**, unsigned) {
    Warpgroup& warpgroup = warpgroup_of_current();
    warpgroup.groups.push_back(std::move(warpgroup.open));
    warpgroup.open.clear();
  };
  warpgroup_meet(kCommit, current, body, EMULATOR_CALLER);
}

// Ends the reads of the operands; threads ordered after these may overwrite them.
static void release_operands(const PendingMma& pending, Fiber* const* readers, uint32_t pc) {
  for (auto& [pointer, size] : pending.operands)
    for_each_cell(pointer, static_cast<size_t>(size), [&](Cell& cell, Region*, size_t) {
      if (cell.async_readers) cell.async_readers--;
      cell.read_group = group.id;
      cell.read_pc = pc;
      cell.reader_count = kReadersKept;
      for (int warp = 0; warp < kReadersKept; warp++) {
        cell.reader[warp] = static_cast<uint16_t>(readers[warp]->participant);
        cell.read_clock[warp] = readers[warp]->clock;
      }
    });
}

struct CountArgument {
  Fiber* fiber;
  int count;  // groups that may remain, or registers
  uint32_t pc;
};

static void finish_groups(void** arguments, unsigned) {
  auto* const* threads = reinterpret_cast<CountArgument* const*>(arguments);
  Warpgroup& warpgroup = warpgroup_of_current();
  Fiber* readers[kReadersKept];  // one thread per warp
  for (int warp = 0; warp < kReadersKept; warp++) readers[warp] = threads[warp * 32]->fiber;
  while (static_cast<int>(warpgroup.groups.size()) > threads[0]->count) {
    const std::vector<PendingMma> finished = std::move(warpgroup.groups.front());
    warpgroup.groups.pop_front();
    for (size_t i = 0; i < finished.size(); i++) {
      const PendingMma& one = finished[i];
      bool is_newest = predecessor(warpgroup, one.accumulators[0]) == nullptr;
      for (size_t j = i + 1; j < finished.size(); j++)
        is_newest &= finished[j].accumulators[0] != one.accumulators[0];
      if (is_newest)
        for (int row = 0; row < 64; row++)
          for (int column = 0; column < one.n; column++)
            accumulator_of(one.accumulators, row, column) =
                one.result[static_cast<size_t>(row * one.n + column)];
      release_operands(one, readers, threads[0]->pc);
    }
  }
  if (warpgroup.groups.empty() && warpgroup.open.empty()) warpgroup.fenced = false;
}

void warpgroup_wait(int groups_left) {
  CountArgument argument = {current, groups_left, EMULATOR_CALLER};
  warpgroup_meet(kWait, &argument, finish_groups, argument.pc);
}

static void set_registers(void** arguments, unsigned) {
  auto* const* threads = reinterpret_cast<CountArgument* const*>(arguments);
  warpgroup_of_current().registers = threads[0]->count;
  warpgroup_of_current().registers_pc = threads[0]->pc;
}

void set_max_registers(int count, bool increase) {
  const uint32_t pc = EMULATOR_CALLER;
  if (count < 24 || count > 256 || count % 8)
    report_fatal(ReportKind::kWarpgroupMma, pc, 0,
                 "setmaxnreg of %d registers: a multiple of 8 from 24 to 256", count);
  CountArgument argument = {current, count, pc};
  warpgroup_meet(kSetRegisters + 100000 * increase + 100 * count, &argument, set_registers, pc);
}

}  // namespace emulator
