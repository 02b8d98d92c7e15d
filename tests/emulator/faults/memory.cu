// Invalid memory accesses.  Kernels here read `in` (4096 floats, an input) and write `out` (4096
// floats, initially unwritten).  test_emulator_checker.py launches each kernel as its `launch:` line
// says and expects a report of the kind and at the line that FAULT marks.  `clang`: minimum version
// for the check.

// launch: block 32
extern "C" __global__ void global_read_past_the_end(const float* in, float* out) {
  out[threadIdx.x] = in[4090 + threadIdx.x];  // FAULT out-of-bounds
}

// launch: block 32
extern "C" __global__ void global_write_before_the_start(const float* in, float* out) {
  const int i = static_cast<int>(threadIdx.x);
  out[i - 1] = in[i];  // FAULT out-of-bounds
}

// launch: block 32
extern "C" __global__ void shared_read_past_the_end(const float* in, float* out) {
  __shared__ float tile[32];
  tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  const float* window = tile + threadIdx.x;
  out[threadIdx.x] = window[1];  // FAULT out-of-bounds
}

// launch: block 32
extern "C" __global__ void row_past_its_declared_bound(const float* in, float* out) {
  __shared__ float tile[4][8];
  tile[threadIdx.x / 8][threadIdx.x % 8] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = threadIdx.x / 8 == 3 ? 0.0f
                                          : tile[threadIdx.x / 8][threadIdx.x % 8 + 1];  // FAULT out-of-bounds
}

// launch: block 32, shared 64
extern "C" __global__ void dynamic_shared_too_small(const float* in, float* out) {
  extern __shared__ float dynamic[];
  dynamic[threadIdx.x] = in[threadIdx.x];  // FAULT out-of-bounds
  out[threadIdx.x] = dynamic[threadIdx.x];
}

// launch: block 1
extern "C" __global__ void local_array_past_its_bound(const float* in, float* out) {
  float values[4];
  for (int i = 0; i < 4; i++) values[i] = in[i];
  const int n = in[0] > -1e30f ? 4 : 3;
  out[0] = values[n];  // FAULT out-of-bounds
}

struct RowSums {
  float rows[2][4];
  float sums[2];  // the last array of a struct is not a flexible array
};

// launch: block 64
extern "C" __global__ void read_past_the_last_array_of_a_struct(const float* in, float* out) {
  RowSums mine = {};
  const int last = threadIdx.x < 40 ? 1 : 2;
  for (int j = 0; j < 4; j++) mine.rows[1][j] = in[threadIdx.x + j];
  for (int j = 0; j < 4; j++) mine.sums[1] += mine.rows[1][j];
  out[threadIdx.x] = mine.sums[last];  // FAULT out-of-bounds
}

// launch: block 64
extern "C" __global__ void write_past_the_last_array_of_a_struct(const float* in, float* out) {
  RowSums mine = {};
  const int last = threadIdx.x < 40 ? 1 : 2;
  for (int i = 0; i <= last; i++)
    mine.sums[i] = in[i];  // FAULT out-of-bounds
  out[threadIdx.x] = mine.sums[threadIdx.x % 2];
}

// launch: block 64
extern "C" __global__ void row_of_a_local_array_past_its_bound(const float* in, float* out) {
  float tile[4][8] = {};
  const int columns = threadIdx.x < 40 ? 8 : 9;
  for (int j = 0; j < columns; j++)
    tile[2][j] = in[j];  // FAULT out-of-bounds
  out[threadIdx.x] = tile[threadIdx.x % 4][threadIdx.x % 8];
}

// launch: block 64, clang 20
extern "C" __global__ void pointer_past_a_local_array(const float* in, float* out) {
  float values[8];
  for (int i = 0; i < 8; i++) values[i] = in[i];
  const float* window = values + threadIdx.x % 8;
  const int further = threadIdx.x == 40 ? 8 : 0;
  out[threadIdx.x] = window[further];  // FAULT out-of-bounds
}

// launch: block 64, clang 20
extern "C" __global__ void pointer_before_a_local_array(const float* in, float* out) {
  float values[8];
  for (int i = 0; i < 8; i++) values[i] = in[i];
  float* cursor = values + threadIdx.x % 8;
  const int back = threadIdx.x == 41 ? 2 : 0;
  cursor[-back] = in[8];  // FAULT out-of-bounds
  out[threadIdx.x] = values[0];
}

// launch: block 32
extern "C" __global__ void misaligned_vector_load(const float* in, float* out) {
  const float4 v = *reinterpret_cast<const float4*>(in + 1 + 4 * threadIdx.x);  // FAULT misaligned
  out[threadIdx.x] = v.x + v.y + v.z + v.w;
}

// launch: block 32
extern "C" __global__ void misaligned_shared_store(const float* in, float* out) {
  __shared__ __align__(16) float tile[68];
  float4* corner = reinterpret_cast<float4*>(&tile[2 * threadIdx.x + 2]);
  *corner = make_float4(in[0], 0, 0, 0);  // FAULT misaligned
  out[threadIdx.x] = 0.0f;
}

struct alignas(16) Piece {
  unsigned short element[8];
};

// launch: block 32
extern "C" __global__ void misaligned_struct_load(const float* in, float* out) {
  Piece piece = {};
  if (in[threadIdx.x] > 0) piece = *reinterpret_cast<const Piece*>(in + threadIdx.x);  // FAULT misaligned
  *reinterpret_cast<Piece*>(out + 4 * threadIdx.x) = piece;
}

// launch: block 32
extern "C" __global__ void misaligned_struct_of_which_one_member_is_used(const float* in, float* out) {
  const Piece piece = *reinterpret_cast<const Piece*>(in + threadIdx.x);  // FAULT misaligned
  out[threadIdx.x] = piece.element[0];
}

// launch: block 32
extern "C" __global__ void misaligned_struct_between_arrays(const float* in, float* out) {
  *reinterpret_cast<Piece*>(out + 4 * threadIdx.x + 1) =  // FAULT misaligned
      *reinterpret_cast<const Piece*>(in + 4 * threadIdx.x);
}

// launch: block 32
extern "C" __global__ void misaligned_vector_of_which_one_element_is_used(const float* in, float* out) {
  out[threadIdx.x] = reinterpret_cast<const float2*>(in + threadIdx.x)->x;  // FAULT misaligned
}

struct alignas(8) Couple {
  float first, second;
};

// launch: block 32
extern "C" __global__ void misaligned_small_struct_in_shared_memory(const float* in, float* out) {
  __shared__ float tile[65];
  for (int i = 0; i < 2; i++) tile[2 * threadIdx.x + i + 1] = in[i];
  const Couple couple = *reinterpret_cast<const Couple*>(&tile[2 * threadIdx.x + 1]);  // FAULT misaligned
  out[threadIdx.x] = couple.first + couple.second;
}

struct alignas(32) Wide {
  float element[8];
};

// Chips before 10.0 load it with 16-byte instructions, later ones with a 32-byte one.
// launch: block 32
extern "C" __global__ void misaligned_struct_of_32_bytes(const float* in, float* out) {
  const Wide wide = *reinterpret_cast<const Wide*>(in + 4 * threadIdx.x);  // FAULT misaligned
  for (int i = 0; i < 8; i++) out[8 * threadIdx.x + i] = wide.element[i];
}

struct Plain {
  float element[4];
};

// launch: block 32
extern "C" __global__ void plain_struct_where_its_elements_are_aligned(const float* in, float* out) {
  __shared__ Plain tile[32];
  tile[threadIdx.x] = *reinterpret_cast<const Plain*>(in + threadIdx.x);
  *reinterpret_cast<Plain*>(out + 4 * threadIdx.x + 1) = tile[threadIdx.x];
}

// launch: block 32
extern "C" __global__ void write_to_an_input(const float* in, float* out) {
  const_cast<float*>(in)[threadIdx.x] = 1.0f;  // FAULT read-only-write
  out[threadIdx.x] = 0.0f;
}

// launch: block 32
extern "C" __global__ void shared_never_written(const float* in, float* out) {
  __shared__ float tile[32];
  if (threadIdx.x != 7) tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];  // FAULT uninitialised-read
}

// launch: block 32
extern "C" __global__ void shared_sum_never_zeroed(const float* in, float* out) {
  __shared__ float sums[32];
  sums[threadIdx.x] += in[threadIdx.x];  // FAULT uninitialised-read
  out[threadIdx.x] = sums[threadIdx.x];
}

// launch: block 32
extern "C" __global__ void output_read_before_it_is_written(const float* in, float* out) {
  out[threadIdx.x] = out[threadIdx.x] + in[threadIdx.x];  // FAULT uninitialised-read
}
